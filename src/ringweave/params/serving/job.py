"""What a parameter server holds of its job once it has begun: books, model, memory for what comes and goes."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ringweave.errors import TrainingError, explain
from ringweave.params import flat
from ringweave.params.flat import Flat
from ringweave.params.messages import Meet, Pull, Push, Setup, Status
from ringweave.params.rules import (
    Leads,
    Ledger,
    Meetings,
    Position,
    Resumed,
    Speakers,
    StalenessPolicy,
    Tempo,
    Ticket,
    TicketOffice,
)
from ringweave.params.rules.meetings import MEETINGS_OF_A_PASS
from ringweave.params.serving import snapshots
from ringweave.params.serving.model import GatheredModel
from ringweave.params.serving.rooms import Lanes
from ringweave.params.serving.snapshots import Live, Snapshot


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
class Job:
    """All that is there once the job has begun."""

    setup: Setup
    ledger: Ledger
    model: GatheredModel
    tickets: TicketOffice
    receiving: Lanes
    sending: Lanes
    tempo: Tempo
    meetings: Meetings
    leads: Leads = field(default_factory=Leads)
    gone: set[int] = field(default_factory=set)
    testaments: dict[int, str] = field(default_factory=dict)
    """What came with the last push of each ring."""
    away_s: dict[int, float] = field(default_factory=dict)
    """Rings whose connection broke as their representative's end does, and when; until they are heard of again."""
    silent: set[int] = field(default_factory=set)
    """Rings whose connections last and that nothing is heard of, likewise."""
    pulled_after: dict[int, int] = field(default_factory=dict)
    """After which push each ring has asked last: who asks after an earlier one has been given up."""
    speakers: Speakers = field(default_factory=Speakers)
    """Who represents each ring."""
    is_announced: bool = False
    """It is a job that outlives this server, if it has a standby: whoever asks may be told of its rings."""
    position: Position = field(default_factory=Position)
    """Which samples are in the parameters."""
    resumed: Resumed | None = None
    """What it goes on from."""
    offers: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Checkpoint that each ring could go on from, as (train steps, check); the check is empty of one that has none."""
    has_nothing_to_resume: bool = False
    """All rings have said so."""

    @property
    def live(self) -> Live:
        """What its rings are about."""
        return Live(
            holdings=self.ledger.holdings,
            tickets=self.tickets.last,
            taken=self.tickets.epochs,
            gone=sorted(self.gone),
            testaments=dict(self.testaments),
            meetings=self.meetings.to_words(),
            resumed=self.resumed,
        )

    @property
    def has_begun(self) -> bool:
        """Rings draw samples, or have done so: its parameters are not to be replaced any more."""
        return bool(self.tickets.last) or self.position != (self.resumed.position if self.resumed else Position())

    @property
    def memory_bytes(self) -> int:
        """Bytes of all tensors, and of the memory that they are received into and sent from."""
        return self.model.memory_bytes + self.receiving.memory_bytes + self.sending.memory_bytes

    def heard(self, ring: int) -> None:
        """The ring speaks: if nobody waited for it, the others do again before it is too far behind."""
        was_away, was_silent = self.away_s.pop(ring, None) is not None, ring in self.silent
        self.silent.discard(ring)
        if was_away or was_silent:
            self.ledger.go_on(ring)

    def leave(self, ring: int, *, is_for_good: bool) -> None:
        """The ring computes nothing until it takes parameters again; or never again."""
        self.ledger.leave(ring)
        self.model.release(ring)
        self.leads.rest(ring)
        self.tickets.rested(ring)
        if is_for_good:
            self.gone.add(ring)

    def book_ticket(self, ticket: Ticket) -> None:
        """That ticket is given out."""
        if ticket.ended_epoch is not None:
            self.position = self.position.ended(ticket.epoch, ticket.ended_epoch)

    def book_push(self, push: Push) -> None:
        """The samples of that push are in the parameters."""
        self.position = self.position.pushed(push.pass_number, push.epoch, push.spans)

    def book_meeting(self, meet: Meet) -> None:
        """The ring has come there. Whoever comes to the second one of a pass knows that all have ended it."""
        self.meetings.come(meet.ring, meet.number, meet.said, meet.epoch)
        if meet.number % MEETINGS_OF_A_PASS == 0:
            self.position = self.position.ended(meet.epoch, meet.epoch)


def begin(setup: Setup, first: Flat, clock: Callable[[], float] = time.monotonic) -> Job:
    """A job that begins with these parameters, whose memory is the job's from now on.

    Raises:
        TrainingError: The optimizer cannot be made.
    """
    office = TicketOffice(len(setup.rings), clock=clock)
    return _made(GatheredModel(setup, first), Ledger(_policy(setup)), office, clock)


def resume(snapshot: Snapshot, clock: Callable[[], float] = time.monotonic) -> Job:
    """A job that goes on from a snapshot; with its rings, if that says what they are about."""
    setup, live = snapshot.setup, snapshot.live
    holdings = live.holdings if live else None
    ledger = Ledger(_policy(setup), version=snapshot.version, pushed=snapshot.pushed, holdings=holdings)
    tickets = TicketOffice(len(setup.rings), live.tickets if live else (), live.taken if live else None, clock)
    job = _made(snapshots.restore(snapshot), ledger, tickets, clock)
    if live:
        job.gone.update(live.gone)
        job.testaments.update(live.testaments)
        job.meetings = Meetings.of_words(live.meetings) if live.meetings else job.meetings
        job.resumed = live.resumed
    job.position = snapshot.position
    job.is_announced = True
    return job


def snapshot(job: Job, *, is_live: bool = False) -> Snapshot:
    """A copy of its state now; `is_live`: with what its rings are about."""
    live = job.live if is_live else None
    return snapshots.take(job.model, job.ledger.version, job.ledger.pushed, live, job.position)


def regrouped(job: Job, setup: Setup, clock: Callable[[], float] = time.monotonic) -> Job:
    """The same job with other rings, which have pushed nothing yet."""
    job.model.setup = setup
    ledger = Ledger(_policy(setup), version=job.ledger.version)
    found = _made(job.model, ledger, TicketOffice(len(setup.rings), clock=clock), clock)
    found.is_announced, found.position, found.resumed = True, job.position, job.resumed
    return found


def restored(job: Job, snapshot: Snapshot, resumed: Resumed, clock: Callable[[], float] = time.monotonic) -> Job:
    """The job, whose rings have pushed nothing yet, with the parameters of a snapshot that fits it."""
    ledger = Ledger(_policy(job.setup), version=snapshot.version)
    found = _made(snapshots.restore(snapshot), ledger, TicketOffice(len(job.setup.rings), clock=clock), clock)
    found.gone, found.away_s, found.meetings, found.offers = job.gone, job.away_s, job.meetings, job.offers
    found.is_announced, found.position, found.resumed = True, resumed.position, resumed
    return found


def status(job: Job | None, counts: Counts, copying_bytes: int) -> Status:
    """What the server tells of itself; `copying_bytes` are held for copies that are being written."""
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
        memory_bytes=copying_bytes + (job.memory_bytes if job else 0),
    )


def _policy(setup: Setup) -> StalenessPolicy:
    return StalenessPolicy(num_rings=len(setup.rings), overlaps=setup.overlaps, compensation=setup.compensation)


def _made(model: GatheredModel, ledger: Ledger, tickets: TicketOffice, clock: Callable[[], float]) -> Job:
    """The job, with memory of which one push is received and one copy sent at once, for all quick rings together.

    The others wait on their links, which loses nothing: it is the server's link that they share, and while a push is
    applied or a copy made, what the kernel holds keeps the link busy.
    """
    setup, tempo = model.setup, Tempo()
    num_rings, sizes = len(setup.rings), flat.sizes_of(setup.tensors)
    lanes = [
        Lanes(sizes, num_rings=num_rings, num_kept=num_kept, patience_s=lambda: tempo.patience_s, clock=clock)
        for num_kept in (0, num_rings if setup.compensation else 0)
    ]
    return Job(
        setup=setup,
        ledger=ledger,
        model=model,
        tickets=tickets,
        receiving=lanes[0],
        sending=lanes[1],
        tempo=tempo,
        meetings=Meetings(num_rings),
    )


def is_due(job: Job, pull: Pull) -> bool:
    """Whether the push that the ring speaks of is applied, and the ring may go on."""
    last = job.ledger.pushed.get(pull.ring)
    return (last.sequence if last else 0) >= pull.after_sequence and job.ledger.can_grant(pull.ring)


def grant(job: Job, pull: Pull, room: Sequence[memoryview]) -> tuple[int, float]:
    """Give a ring that may go on the parameters: into that memory.

    Returns:
        Their version, and how many train steps ahead they are.
    """
    job.gone.discard(pull.ring)
    version, ahead = job.ledger.grant(pull.ring), job.leads.grant(pull.ring, job.model.progress.total)
    copy = Flat.over(job.setup.tensors, room)
    job.model.read(copy, ahead)
    if job.setup.compensation:
        job.model.keep(pull.ring, copy)
    return version, ahead


def check_buffers(setup: Setup, sizes: Sequence[int]) -> None:
    """Refuse buffers that are not of the model's sizes.

    Raises:
        TrainingError: They are not.
    """
    expected = flat.sizes_of(setup.tensors)
    if tuple(sizes) != expected:
        raise TrainingError(
            explain(
                "bytes of a push",
                got=list(sizes),
                expected=f"{list(expected)}, those of the model",
                do="Train the same model",
            )
        )
