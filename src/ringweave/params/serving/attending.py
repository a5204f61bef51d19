"""Which rings are there: those that lose members are not waited for, meet the others, and find their place again."""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from ringweave.errors import DeadlineError, RefusedError, explain
from ringweave.params.messages import Enter, Entered, Meet, Met, Pause, Seated, Seek, Speak
from ringweave.params.rules import Answer
from ringweave.params.serving.job import Job
from ringweave.params.serving.listening import Listening
from ringweave.params.serving.replicas import Replica
from ringweave.wire import Call, Done, Handler, Identity, PeerStatus

ABSENT_S = 15.0
"""A ring that has hung up without a goodbye and is not heard of for so long is not waited for where rings meet: all of
its members are dead, or nobody has taken its representative's place. Forming anew takes a second or two."""
_LOOK_S = 0.5


class Desk(Protocol):
    """What the service has of its job."""

    changed: threading.Condition
    job: Job | None

    def find(self, term: int, ring: int, peer: Identity) -> Job:
        """The job, if that peer may speak for that ring."""
        ...

    def find_spoken(self, term: int, ring: int, peer: Identity) -> Job:
        """Likewise, if the ring has not gone on with another representative since."""
        ...


class Attendance:
    """Handles what rings say of themselves beside pushing and pulling."""

    def __init__(self, desk: Desk, replica: Replica, clock: Callable[[], float]) -> None:
        """`replica` knows whether this server leads, and tells the standby what rings say."""
        self._desk, self._replica, self._clock = desk, replica, clock
        self._listening = Listening(clock())

    def handlers(self) -> list[Handler]:
        """What the wire's server has to know."""
        return [
            Handler(message=Enter, handle=lambda _: Entered(term=self._replica.term, leads=self._replica.answers)),
            Handler(message=Speak, handle=self._speak),
            Handler(message=Pause, handle=self._pause),
            Handler(message=Meet, handle=self._meet),
            Handler(message=Seek, handle=self._seek),
        ]

    def missed(self, peer: Identity) -> None:
        """A process is not connected any more, without a goodbye: its ring forms anew, or is dead or cut off.

        Nobody waits for it meanwhile.

        Where rings lose no members it is a connection that has broken: the ring computes, and comes back with its push.
        The others wait for it at the bound; if it is dead, the run ends.
        """
        with self._desk.changed:
            job = self._desk.job
            ring = ring_of(job, peer) if job and peer.role == "worker" else None
            if job is None or ring is None or ring in job.gone:
                return
            self._miss(job, ring)
            self._desk.changed.notify_all()

    def listen(self, peers: Sequence[PeerStatus]) -> set[int]:
        """Look which rings nothing is heard of, again and again: they hold nobody up until they speak again.

        They may only be stopped, or cut off for a moment: where rings meet they are waited for until their connections
        end.

        Returns:
            Those that nobody waits for from now on.
        """
        with self._desk.changed:
            job = self._desk.job
            if job is None or not job.setup.may_lose_members:
                return set()
            ring = lambda peer: ring_of(job, peer) if peer.role == "worker" else None  # noqa: E731 - for this job
            found = self._listening.look(peers, ring, self._clock()) - job.silent - job.gone - job.away_s.keys()
            for each in found:
                self._pass_over(job, each)
            job.silent |= found
            if found:
                self._desk.changed.notify_all()
            return found

    def take_over(self, connected: Iterable[Identity]) -> None:
        """This server leads from here on: rings that had nobody speak for them to the one before may be dead.

        A ring whose representative lives has a connection to both servers. Nobody waits for the others until they are
        heard of, and where rings meet those have as long as if they had hung up just now.
        """
        with self._desk.changed:
            job = self._desk.job
            if job is None:
                return
            here = {ring_of(job, peer) for peer in connected if peer.role == "worker"} - job.away_s.keys()
            for ring in set(range(len(job.setup.rings))) - here - job.gone:
                self._miss(job, ring)
            self._desk.changed.notify_all()

    def expected(self) -> set[int]:
        """Rings that are there, as far as is known; none before the job has begun."""
        with self._desk.changed:
            job = self._desk.job
            return set(range(len(job.setup.rings))) - job.gone - job.away_s.keys() if job else set()

    def _miss(self, job: Job, ring: int) -> None:
        """Nobody speaks for the ring."""
        self._pass_over(job, ring)
        job.away_s[ring] = self._clock()

    @staticmethod
    def _pass_over(job: Job, ring: int) -> None:
        """Nobody waits for the ring until it is heard of again."""
        if job.setup.may_lose_members:
            job.ledger.pause(ring)
        job.tickets.away(ring)

    def _speak(self, call: Call) -> Done:
        speak: Speak = call.message
        job = self._desk.find(speak.term, speak.ring, call.peer)
        with self._desk.changed:
            job.speakers.speak(speak.ring, speak.ballot, call.peer.name)
            self._desk.changed.notify_all()  # whoever spoke before waits for nothing any more
        return Done()

    def _pause(self, call: Call) -> Done:
        pause: Pause = call.message
        job = self._desk.find(pause.term, pause.ring, call.peer)
        with self._desk.changed:
            job.ledger.pause(pause.ring)
            self._desk.changed.notify_all()
        self._replica.noted(pause)
        return Done()

    def _meet(self, call: Call) -> Met:
        meet: Meet = call.message
        job = self._desk.find_spoken(meet.term, meet.ring, call.peer)
        with self._desk.changed:
            job.book_meeting(meet)
            self._desk.changed.notify_all()
        self._replica.noted(meet)
        answer = Answer(number=meet.number, said=self._wait_met(job, call))
        self._replica.noted(answer)  # whoever asks another server hears the same
        return Met(said={str(ring): said for ring, said in answer.said.items()})

    def _wait_met(self, job: Job, call: Call) -> dict[int, str]:
        """What the rings have said that meet, once all that are there have come."""
        meet: Meet = call.message
        with self._desk.changed:
            while (answer := job.meetings.answer(meet.number, self.absent(job), job.testaments)) is None:
                if call.left_s() <= 0 or call.cancelled.is_set():
                    raise DeadlineError(
                        explain(
                            f"meeting {meet.number} of the rings",
                            got="not all of them",
                            expected="all that are there",
                            do="Look which ring does not get on",
                        )
                    )
                self._desk.changed.wait(min(_LOOK_S, max(0.0, call.left_s())))
        return answer

    def absent(self, job: Job) -> set[int]:
        """Rings that nobody waits for."""
        now_s = self._clock()
        return job.gone | {ring for ring, since_s in job.away_s.items() if now_s - since_s > ABSENT_S}

    def _seek(self, call: Call) -> Seated:
        seek: Seek = call.message
        self._replica.check_term(seek.term)
        with self._desk.changed:
            job = self._desk.job
            if job is None or not job.is_announced:
                return Seated(rings=[])
            rings = job.setup.rings
            ring = next((index for index, each in enumerate(rings) if seek.slot in each), None)
            if ring is None:
                return Seated(rings=rings)
            if seek.begins:  # what others had announced for the ring nobody waits for any more
                job.pulled_after.pop(ring, None)
                job.speakers.forget(ring)
            last = job.ledger.pushed.get(ring)
            ticket = next((each for each in job.tickets.last if each.ring == ring), None)
            num_meetings, epoch = job.meetings.place(ring)
            resumed = job.resumed
            return Seated(
                rings=rings,
                shares=job.setup.shares,
                local_steps=job.setup.local_steps,
                num_pushed=last.sequence if last else 0,
                num_tickets=ticket.number if ticket else 0,
                num_meetings=num_meetings,
                epoch=max(epoch, ticket.epoch if ticket else 0, resumed.position.epoch if resumed else 0),
                testament=job.testaments.get(ring, ""),
                resumed=list(resumed.position.done) if resumed else [],
                resumed_epoch=resumed.position.epoch if resumed else 0,
                resumed_seed=resumed.seed if resumed else None,
            )


def check_speaker(job: Job, ring: int, peer: Identity) -> None:
    """Make sure that the caller may speak for that ring.

    Raises:
        RefusedError: It is none of the ring's.
    """
    members = job.setup.rings[ring] if ring < len(job.setup.rings) else []
    if peer.role == "worker" and slot_of(peer.name) not in members:
        raise RefusedError(
            explain(
                f"caller for ring {ring}",
                got=peer.name,
                expected=f"one of its ranks {', '.join(map(str, members)) or '(there is no such ring)'}",
                do="Join that ring first",
            )
        )


def slot_of(name: str) -> int:
    """Rank at the start of the worker of that name; of an elastic job's, `SLOT.INCARNATION`, the first part."""
    slot = name.partition(".")[0]
    return int(slot) if slot.isdecimal() else -1


def ring_of(job: Job, peer: Identity) -> int | None:
    """The ring that a worker belongs to; None if none does."""
    slot = slot_of(peer.name)
    return next((index for index, each in enumerate(job.setup.rings) if slot in each), None)
