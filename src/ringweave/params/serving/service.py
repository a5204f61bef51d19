"""What the server does with each message: handlers around one ledger, one model and one lock."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ringweave import wire
from ringweave.errors import DeadlineError, RefusedError, TrainingError, explain
from ringweave.params import flat
from ringweave.params.flat import Flat
from ringweave.params.messages import Ask, Leave, Pull, Pulled, Push, Pushed, Regroup, Setup, Start, Status, Take, Taken
from ringweave.params.rules import Leads, Ledger, Receipt, StalenessPolicy, Tempo, TicketOffice
from ringweave.params.serving import regrouping, snapshots
from ringweave.params.serving.model import GatheredModel
from ringweave.params.serving.rooms import Lanes
from ringweave.params.serving.snapshots import Snapshot
from ringweave.wire import Answer, Call, Done, Handler, Incoming

_LOOK_S = 0.5
_RECEIVING = 1
"""Pushes that are received at once from quick rings. The others wait on their links, which loses nothing: it is the
server's link that they share, and of pushes that come at the same time the first is done sooner."""
_SENDING = 2
"""Copies of the parameters that are sent at once to quick rings: one is made while the other is on its way."""
_ROOM_LOOK_S = 0.005
"""How often a pull looks whether a copy has been sent: nobody can wake it."""


@dataclass(slots=True)
class Counts:
    """What a server has done."""

    staleness: Counter[int] = field(default_factory=Counter)
    pushes: Counter[int] = field(default_factory=Counter)
    samples: int = 0
    repeats: int = 0
    received_bytes: int = 0
    """Content of pushes and of the first parameters."""
    sent_bytes: int = 0
    """Parameters."""
    most_peers: int = 0


@dataclass(slots=True)
class _Job:
    """All that is there once the job has begun."""

    setup: Setup
    ledger: Ledger
    model: GatheredModel
    tickets: TicketOffice
    receiving: Lanes
    sending: Lanes
    tempo: Tempo = field(default_factory=Tempo)
    leads: Leads = field(default_factory=Leads)
    gone: set[int] = field(default_factory=set)
    pulled_after: dict[int, int] = field(default_factory=dict)
    """After which push each ring has asked last: who asks after an earlier one has been given up."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of all tensors, and of the memory that they are received into and sent from."""
        return self.model.memory_bytes + self.receiving.memory_bytes + self.sending.memory_bytes


class ParameterService:
    """The parameter server apart from its connections."""

    def __init__(
        self,
        *,
        term: int = 0,
        num_peers: Callable[[], int] = lambda: 0,
        applied: Callable[[Push, Receipt, Sequence[memoryview]], None] = lambda push, receipt, buffers: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Waits for a job to begin.

        Args:
            term: Messages of another one are refused.
            num_peers: Connections that stand, for the counts.
            applied: Called before a push is acknowledged, with the lock held: where a standby is told.
            clock: Gives seconds.
        """
        self.counts = Counts()
        self._term, self._num_peers, self._applied, self._clock = term, num_peers, applied, clock
        self._changed = threading.Condition()
        self._job: _Job | None = None

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
        ]

    @property
    def is_done(self) -> bool:
        """Every ring has left."""
        job = self._job
        return job is not None and len(job.gone) == len(job.setup.rings)

    @property
    def version(self) -> int:
        """Pushes applied."""
        return self._job.ledger.version if self._job else 0

    def resume(self, snapshot: Snapshot) -> None:
        """Go on from a snapshot, before anybody has called."""
        model = snapshots.restore(snapshot)
        self._job = _begin(snapshot.setup, model, version=snapshot.version, pushed=snapshot.pushed)

    def snapshot(self, path: Path) -> int | None:
        """Write the state as it is now to a file; pushes go on meanwhile. The version; None before the job begins.

        Raises:
            OSError: The disk does not take it.
        """
        with self._changed:
            job = self._job
            if job is None:
                return None
            found = snapshots.take(job.model, job.ledger.version, job.ledger.pushed)
        snapshots.save(found, path)
        return found.version

    def status(self) -> Status:
        """What it has done so far."""
        with self._changed:
            counts, job = self.counts, self._job
            return Status(
                version=job.ledger.version if job else 0,
                staleness={str(age): number for age, number in sorted(counts.staleness.items())},
                pushes={str(ring): number for ring, number in sorted(counts.pushes.items())},
                samples=counts.samples,
                repeats=counts.repeats,
                received_bytes=counts.received_bytes,
                sent_bytes=counts.sent_bytes,
                most_peers=counts.most_peers,
                train_steps=job.model.progress.total if job else 0.0,
                memory_bytes=job.memory_bytes if job else 0,
            )

    def _start(self, call: Call) -> Done:
        message: Start = call.message
        self._check_term(message.term)
        setup = message.setup
        _check_buffers(setup, [len(buffer) for buffer in call.buffers])
        with self._changed:
            if self._job is not None:
                if self._job.setup != setup:
                    raise TrainingError(
                        explain(
                            "job on the parameter server",
                            got="another one",
                            expected="the one that it has",
                            do="Call ringweave.prepare once in a run",
                        )
                    )
                return Done()
            # Received memory is the caller's connection's: kept, since nobody else has it.
            model = GatheredModel(setup, Flat.over(setup.tensors, call.buffers))
            self._job = _begin(setup, model, version=0, pushed={})
            self.counts.received_bytes += sum(len(buffer) for buffer in call.buffers)
        return Done()

    def _room(self, incoming: Incoming) -> Sequence[memoryview]:
        message: Push = incoming.message
        job = self._find(message.term, message.ring, incoming.peer)
        _check_buffers(job.setup, incoming.sizes)
        with self._changed:
            rooms = job.receiving.of(is_slow=job.tempo.is_slow(message.ring))
        room = rooms.take()  # without the lock: whoever has the room needs it to be done
        with self._changed:
            job.tempo.begin(message.ring, self._clock())
        return room

    def _push(self, call: Call) -> Pushed:
        push: Push = call.message
        job = self._find(push.term, push.ring, call.peer)
        with self._changed:
            job.tempo.end(push.ring, self._clock())
            self.counts.received_bytes += sum(len(buffer) for buffer in call.buffers)
            self.counts.most_peers = max(self.counts.most_peers, self._num_peers())
            receipt = job.ledger.receipt(push.ring, push.sequence)
            if receipt is None:
                receipt = self._apply(job, push, call.buffers)
                self._changed.notify_all()
            else:
                self.counts.repeats += 1
        return Pushed(
            version=receipt.version,
            staleness_versions=receipt.staleness_versions,
            damping=receipt.damping,
            is_repeat=receipt.is_repeat,
        )

    def _apply(self, job: _Job, push: Push, buffers: Sequence[memoryview]) -> Receipt:
        age = job.ledger.check(push.ring, push.sequence, push.base_version)
        content = Flat.over(job.setup.tensors, buffers)
        damping = job.ledger.policy.damping(age)
        if push.content == "gradient":
            job.leads.push(push.ring, job.model.progress.total)
            job.model.compensate(push.ring, content)
            job.model.apply_gradient(content, push.batch_share, push.options, push.absent, damping)
        else:
            job.model.apply_change(content, push.batch_share * damping)
        receipt = job.ledger.push(push.ring, push.sequence, push.base_version)
        self.counts.staleness[receipt.staleness_versions] += 1
        self.counts.pushes[push.ring] += 1
        self.counts.samples += push.num_samples
        self._applied(push, receipt, buffers)
        return receipt

    def _pull(self, call: Call) -> Answer:
        pull: Pull = call.message
        job = self._find(pull.term, pull.ring, call.peer)
        with self._changed:
            job.pulled_after[pull.ring] = max(pull.after_sequence, job.pulled_after.get(pull.ring, 0))
            room = self._wait_for_room(job, call)
            job.gone.discard(pull.ring)
            version = job.ledger.grant(pull.ring)
            copy = Flat.over(job.setup.tensors, room)
            job.model.read(copy, job.leads.grant(pull.ring, job.model.progress.total))
            if job.setup.compensation:
                job.model.keep(pull.ring, copy)
            self.counts.sent_bytes += copy.num_bytes
        return Answer(Pulled(version=version), room)

    def _wait_for_room(self, job: _Job, call: Call) -> list[memoryview]:
        """Memory for the answer, once the ring may go on; an error if that is too late, or nobody waits any more."""
        pull: Pull = call.message
        while True:
            is_wanted = not call.cancelled.is_set() and pull.after_sequence == job.pulled_after[pull.ring]
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
            self._changed.wait(min(_ROOM_LOOK_S if _is_due(job, pull) else _LOOK_S, max(0.0, call.left_s())))

    def _sending_room(self, job: _Job, pull: Pull) -> list[memoryview] | None:
        """Memory for the answer; None as long as the ring may not go on, or all of it is on its way to others."""
        return job.sending.of(is_slow=job.tempo.is_slow(pull.ring)).take_nowait() if _is_due(job, pull) else None

    def _take(self, call: Call) -> Taken:
        take: Take = call.message
        job = self._find(take.term, take.ring, call.peer)
        with self._changed:
            ticket = job.tickets.take(take.ring, take.number, take.epoch, take.num_samples, take.epoch_samples)
        return Taken(first=ticket.first, num_samples=ticket.num_samples)

    def _leave(self, call: Call) -> Done:
        leave: Leave = call.message
        job = self._find(leave.term, leave.ring, call.peer)
        with self._changed:
            job.ledger.leave(leave.ring)
            job.model.release(leave.ring)
            job.leads.rest(leave.ring)
            if leave.is_for_good:
                job.gone.add(leave.ring)
            self._changed.notify_all()
        return Done()

    def _regroup(self, call: Call) -> Done:
        message: Regroup = call.message
        job = self._find(message.term, message.ring, call.peer)
        with self._changed:
            setup = regrouping.regrouped(job.setup, message.rings, job.ledger.computing)
            if setup != job.setup:  # else it is said again, on a new connection
                job.model.setup = setup
                self._job = _begin(setup, job.model, version=job.ledger.version, pushed={})
        return Done()

    def _find(self, term: int, ring: int, peer: wire.Identity) -> _Job:
        """The job, if that peer may speak for that ring."""
        self._check_term(term)
        job = self._job
        if job is None:
            raise TrainingError(
                explain("job", got="none yet", expected="one that rank 0 has begun", do="Call ringweave.prepare")
            )
        members = job.setup.rings[ring] if ring < len(job.setup.rings) else []
        if peer.role == "worker" and peer.name not in map(str, members):
            raise RefusedError(
                explain(
                    f"caller for ring {ring}",
                    got=peer.name,
                    expected=f"one of its ranks {', '.join(map(str, members)) or '(there is no such ring)'}",
                    do="Join that ring first",
                )
            )
        return job

    def _check_term(self, term: int) -> None:
        if term != self._term:
            raise RefusedError(
                explain(
                    "term of the parameter server",
                    got=term,
                    expected=f"{self._term}, that of this one",
                    do="Ask which server leads now, and join again",
                )
            )


def _begin(setup: Setup, model: GatheredModel, *, version: int, pushed: dict[int, Receipt]) -> _Job:
    policy = StalenessPolicy(num_rings=len(setup.rings), overlaps=setup.overlaps, compensation=setup.compensation)
    sizes = flat.sizes_of(setup.tensors)
    num_kept = len(setup.rings) if setup.compensation else 0
    return _Job(
        setup=setup,
        ledger=Ledger(policy, version=version, pushed=pushed),
        model=model,
        tickets=TicketOffice(len(setup.rings)),
        receiving=Lanes(_RECEIVING, sizes),
        sending=Lanes(_SENDING, sizes, num_kept=num_kept),
    )


def _is_due(job: _Job, pull: Pull) -> bool:
    last = job.ledger.pushed.get(pull.ring)
    return (last.sequence if last else 0) >= pull.after_sequence and job.ledger.can_grant(pull.ring)


def _check_buffers(setup: Setup, sizes: Sequence[int]) -> None:
    if tuple(sizes) != (expected := flat.sizes_of(setup.tensors)):
        wanted = f"{list(expected)}, those of the model"
        raise TrainingError(
            explain("bytes of a push", got=list(sizes), expected=wanted, do="Train the same model"),
        )
