"""What the server does with each message: handlers around one ledger, one model and two locks.

One lock guards all that changes; nobody waits with it but for the model. The other one, the *turn*, lets one push at a
time be told to the standby and then be applied, so that versions are the same there.
"""

# Longer than a file should be: what may happen under which lock is seen only side by side.

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from ringweave import wire
from ringweave.errors import ConnectionLostError, DeadlineError, TrainingError, explain
from ringweave.params.flat import Flat
from ringweave.params.messages import Ask, Leave, Pull, Pulled, Push, Pushed, Regroup, Start, Status, Take, Taken
from ringweave.params.rules import Receipt
from ringweave.params.serving import attending, regrouping, snapshots
from ringweave.params.serving import job as jobs
from ringweave.params.serving.attending import Attendance
from ringweave.params.serving.job import Counts, Job
from ringweave.params.serving.keeping import Keeping
from ringweave.params.serving.rehearsing import Rehearsal
from ringweave.params.serving.replicas import Alone, Replica
from ringweave.params.serving.snapshots import Snapshot
from ringweave.wire import Answer, Call, Done, Handler, Incoming
from ringweave.wire.states import Shelf

_LOOK_S = 0.5
_ROOM_LOOK_S = 0.005
"""How often a pull looks whether a copy has been sent: nobody can wake it."""


class ParameterService:
    """The parameter server apart from its connections."""

    def __init__(
        self,
        *,
        replica: Replica | None = None,
        most_peers: Callable[[], int] = lambda: 0,
        count_peers_anew: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        shelf: Shelf | None = None,
    ) -> None:
        """Waits for a job to begin.

        Args:
            replica: Knows whether this server leads, and tells the standby; None means that there is none.
            most_peers: Most workers that were connected at once, for the counts.
            count_peers_anew: Told when the job begins: who rehearsed before is none of its peers.
            clock: Gives seconds.
            shelf: Where state can be read; None makes one.
        """
        self.counts = Counts()
        self._replica, self._most_peers, self._clock = replica or Alone(), most_peers, clock
        self._count_peers_anew = count_peers_anew
        self.changed = threading.Condition()
        """Guards all that changes, and tells who waits."""
        self._turn = threading.Lock()
        self._ticketing = threading.Lock()
        """The standby hears of tickets in the order in which they are given out: of each it keeps how far it goes."""
        self._copying_bytes = 0
        self.job: Job | None = None
        """What it has, once the job has begun."""
        self.attendance = Attendance(self, self._replica, clock)
        self._shelf = shelf or Shelf()
        self._rehearsal = Rehearsal(self._replica.check_term)
        self._keeping = Keeping(self, self._replica, self._shelf, self.attendance.absent, clock)

    def handlers(self) -> list[Handler]:
        """What the wire's server has to know."""
        return [
            Handler(message=Start, handle=self._start),
            Handler(message=Push, handle=self._push, allocate=self._room),
            Handler(message=Pull, handle=self._pull),
            Handler(message=Take, handle=self._take),
            Handler(message=Leave, handle=self._leave),
            Handler(message=Regroup, handle=self._regroup),
            Handler(message=Ask, handle=lambda _: self.status()),
            *self.attendance.handlers(),
            *self._keeping.handlers(),
            *self._rehearsal.handlers(),
            *self._shelf.handlers(),
        ]

    @property
    def is_done(self) -> bool:
        """Every ring has left."""
        job = self.job
        return job is not None and len(job.gone) == len(job.setup.rings)

    @property
    def version(self) -> int:
        """Pushes applied."""
        return self.job.ledger.version if self.job else 0

    def resume(self, snapshot: Snapshot) -> None:
        """Go on from a snapshot, before anybody has called."""
        with self.changed:
            self.job = jobs.resume(snapshot, self._clock)

    def snapshot(self, path: Path) -> int | None:
        """Write the state as it is now to a file; pushes go on meanwhile. The version; None before the job begins.

        Raises:
            OSError: The disk does not take it.
        """
        with self.changed:
            job = self.job
            if job is None:
                return None
            found = jobs.snapshot(job)
        with self.copying(found.num_bytes):
            snapshots.save(found, path)
        return found.version

    @contextmanager
    def copying(self, num_bytes: int) -> Iterator[None]:
        """So many bytes are held for the length of the block."""
        with self.changed:
            self._copying_bytes += num_bytes
        try:
            yield
        finally:
            with self.changed:
                self._copying_bytes -= num_bytes

    @contextmanager
    def standing_still(self) -> Iterator[bytes]:
        """The whole state for a standby, and no push is applied for the length of the block; empty before the job."""
        with self._turn:
            with self.changed:
                job = self.job
                found = jobs.snapshot(job, is_live=True) if job else None
            state = snapshots.to_bytes(found) if found else b""
            del found
            with self.copying(len(state)):
                yield state

    def status(self) -> Status:
        """What it has done so far."""
        with self.changed:
            self.counts.most_peers = self._most_peers()
            return jobs.status(self.job, self.counts, self._copying_bytes)

    def _start(self, call: Call) -> Done:
        message: Start = call.message
        self._replica.check_term(message.term)
        setup = message.setup
        jobs.check_buffers(setup, [len(buffer) for buffer in call.buffers])
        with self.changed:
            if self.job is None:
                # Received memory is the caller's connection's: kept, since nobody else has it.
                self.job = jobs.begin(setup, Flat.over(setup.tensors, call.buffers), self._clock)
                self.counts.received_bytes += sum(len(buffer) for buffer in call.buffers)
                self._count_peers_anew()
            elif self.job.setup != setup:
                raise TrainingError(
                    explain(
                        "job on the parameter server",
                        got="another one",
                        expected="the one that it has",
                        do="Call ringweave.prepare once in a run",
                    )
                )
            job = self.job
        self._rehearsal.end()
        self._replica.started()
        with self.changed:
            job.is_announced = True
        return Done()

    def _room(self, incoming: Incoming) -> Sequence[memoryview]:
        message: Push = incoming.message
        job = self.find_spoken(message.term, message.ring, incoming.peer)
        return self.room_of(job, message, incoming.sizes)

    def room_of(self, job: Job, push: Push, sizes: Sequence[int]) -> Sequence[memoryview]:
        """Memory for a push that is about to come."""
        jobs.check_buffers(job.setup, sizes)
        with self.changed:
            rooms = job.receiving.of(is_slow=job.tempo.is_slow(push.ring))
        room = rooms.take()  # without the lock: whoever has the room needs it to be done
        with self.changed:
            job.tempo.begin(push.ring, self._clock())
        return room

    def _push(self, call: Call) -> Pushed:
        push: Push = call.message
        job = self.find_spoken(push.term, push.ring, call.peer)
        with self.changed:
            job.tempo.end(push.ring, self._clock())
            self.counts.received_bytes += sum(len(buffer) for buffer in call.buffers)
        with self._turn:
            if call.cancelled.is_set():  # while it waited; who lost the connection says it again, if it lives
                raise ConnectionLostError(
                    explain(
                        f"push {push.sequence} of ring {push.ring}",
                        got="from a caller that has hung up",
                        expected="one that waits for what becomes of it",
                        do="Push it again",
                    )
                )
            receipt = self._known(job, push, call.peer)
            if receipt is None:
                self._replica.pushing(push, call.buffers)
                with self.changed:
                    receipt = self.apply(job, push, call.buffers)
                    self.changed.notify_all()
        return Pushed(
            version=receipt.version,
            staleness_versions=receipt.staleness_versions,
            damping=receipt.damping,
            is_repeat=receipt.is_repeat,
        )

    def _known(self, job: Job, push: Push, peer: wire.Identity) -> Receipt | None:
        """The receipt of a push that was applied before; an error if it cannot be applied."""
        with self.changed:
            job.speakers.check(push.ring, peer.name)  # the ring may have gone on while this waited
            receipt = job.ledger.receipt(push.ring, push.sequence)
            if receipt is None:
                job.ledger.check(push.ring, push.sequence, push.base_version)
                job.model.check(push)
            else:
                self.counts.repeats += 1
            return receipt

    def apply(self, job: Job, push: Push, buffers: Sequence[memoryview]) -> Receipt:
        """Make the next version of it; with the lock held."""
        age = job.ledger.check(push.ring, push.sequence, push.base_version)
        content = Flat.over(job.setup.tensors, buffers)
        damping = job.ledger.policy.damping(age)
        if push.content == "gradient":
            job.leads.push(push.ring, job.model.progress.total, push.batch_share)
            job.model.compensate(push.ring, content)
            job.model.apply_gradient(content, push.batch_share, push.options, push.absent, damping)
        else:
            job.model.apply_change(content, push.batch_share, push.num_batches, damping)
        receipt = job.ledger.push(push.ring, push.sequence, push.base_version)
        job.testaments[push.ring] = push.testament
        job.book_push(push)
        job.tickets.pushed(push.ring, push.num_samples)
        self.counts.staleness[receipt.staleness_versions] += 1
        self.counts.pushes[push.ring] += 1
        self.counts.samples += push.num_samples
        return receipt

    def _pull(self, call: Call) -> Answer:
        pull: Pull = call.message
        job = self.find_spoken(pull.term, pull.ring, call.peer)
        is_between_pushes = job.setup.compensation > 0
        with self.changed:
            job.pulled_after[pull.ring] = max(pull.after_sequence, job.pulled_after.get(pull.ring, 0))
        while True:
            with self.changed:
                room = self._wait_for_room(job, call)
            # The standby reads what the next push is compensated by itself: by the same pushes as here.
            with self._turn if is_between_pushes else nullcontext():
                with self.changed:
                    may_go_on = self._is_wanted(job, call) and jobs.is_due(job, pull)
                    granted = jobs.grant(job, pull, room) if may_go_on else None
                if granted is not None:  # else another ring was faster, and this one waits again
                    version, ahead = granted
                    self.counts.sent_bytes += sum(map(len, room))
                    self._replica.granted(pull.ring, version, ahead, is_between_pushes=is_between_pushes)
                    return Answer(Pulled(version=version), room)
            del room

    def _wait_for_room(self, job: Job, call: Call) -> list[memoryview]:
        """Memory for the answer, once the ring may go on; an error if that is too late, or nobody waits any more."""
        pull: Pull = call.message
        while True:
            is_wanted = self._is_wanted(job, call)
            room = self._sending_room(job, pull) if is_wanted else None
            if room is not None:
                return room
            if call.left_s() <= 0 or not is_wanted:
                raise DeadlineError(
                    explain(
                        f"parameters for ring {pull.ring}",
                        got=f"version {job.ledger.version} is all there is" if is_wanted else "nobody who waits",
                        expected=f"its push {pull.after_sequence} applied, and the slowest ring near enough",
                        do="Look which ring does not push any more",
                    )
                )
            self.changed.wait(min(_ROOM_LOOK_S if jobs.is_due(job, pull) else _LOOK_S, max(0.0, call.left_s())))

    @staticmethod
    def _is_wanted(job: Job, call: Call) -> bool:
        """Whether the caller still waits for these parameters, and has not asked for later ones."""
        pull: Pull = call.message
        is_heard = job.speakers.is_heard(pull.ring, call.peer.name)
        return is_heard and not call.cancelled.is_set() and pull.after_sequence == job.pulled_after.get(pull.ring)

    def _sending_room(self, job: Job, pull: Pull) -> list[memoryview] | None:
        """Memory for the answer; None as long as the ring may not go on, or all of it is on its way to others."""
        return job.sending.of(is_slow=job.tempo.is_slow(pull.ring)).take_nowait() if jobs.is_due(job, pull) else None

    def _take(self, call: Call) -> Taken:
        take: Take = call.message
        job = self.find_spoken(take.term, take.ring, call.peer)
        with self._ticketing:
            with self.changed:
                ticket = job.tickets.take(
                    take.ring,
                    take.number,
                    take.epoch,
                    take.num_samples,
                    take.epoch_samples,
                    take.least,
                    take.ended_epoch,
                )
                job.book_ticket(ticket)
            self._replica.noted(ticket)
        return Taken(first=ticket.first, num_samples=ticket.num_samples)

    def _leave(self, call: Call) -> Done:
        leave: Leave = call.message
        job = self.find_spoken(leave.term, leave.ring, call.peer)
        with self.changed:
            job.leave(leave.ring, is_for_good=leave.is_for_good)
            self.changed.notify_all()
        self._replica.noted(leave)
        return Done()

    def _regroup(self, call: Call) -> Done:
        message: Regroup = call.message
        self._replica.check_term(message.term)
        with self.changed:
            job = self.started_job()
            if message.rings != job.setup.rings:  # else it is said again, on a new connection, for a ring of before
                attending.check_speaker(job, message.ring, call.peer)
                setup = regrouping.regrouped(job.setup, message.rings, job.ledger.computing)
                self.job = jobs.regrouped(job, setup, self._clock)
        self._replica.started()
        return Done()

    def started_job(self) -> Job:
        """The job; an error before it has begun."""
        job = self.job
        if job is None:
            raise TrainingError(
                explain("job", got="none yet", expected="one that rank 0 has begun", do="Call ringweave.prepare")
            )
        return job

    def find(self, term: int, ring: int, peer: wire.Identity) -> Job:
        """The job, if that peer may speak for that ring, and this server may answer."""
        self._replica.check_term(term)
        job = self.started_job()
        attending.check_speaker(job, ring, peer)
        with self.changed:
            job.heard(ring)
        return job

    def find_spoken(self, term: int, ring: int, peer: wire.Identity) -> Job:
        """Likewise, if the ring has not gone on with another representative since."""
        job = self.find(term, ring, peer)
        with self.changed:
            job.speakers.check(ring, peer.name)
        return job
