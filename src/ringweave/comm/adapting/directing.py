"""Who decides what a collective takes, and when: the same on all ranks, whatever their threads are doing.

Collectives get numbers in the order of the calls, and are decided in that order. Nearly all are decided at once, in the
call, from what has been ruled before. But now and then one is *due*: the ranks have to consult before it. They do so at
its turn in its lane, as part of it, and those behind it stay undecided until the ruling is there. What is due follows
from the rulings and from the calls alone, so all ranks see the same ones.

Nobody waits in a circle: a collective waits only for smaller numbers, and all ranks call those before.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ringweave.comm.adapting.consulting import Council
from ringweave.comm.adapting.surveying import survey
from ringweave.comm.adapting.timings import Timings
from ringweave.comm.choosing import GroupPlan
from ringweave.comm.members import Members
from ringweave.comm.transport.seam import TransferFailedError, Transport
from ringweave.planning import Choice, Plan
from ringweave.planning.adapting import Adviser, Report, Ruling, size_class
from ringweave.planning.adapting.reports import WINDOW

_LATE = 4
"""Newest collectives that a report leaves out: the other lane may still be at them."""
_MAX_KEPT = 2 * WINDOW + 512


UNEQUAL = Ruling(num_bytes=-1)
"""The ranks are not at the same collective. They run what they are at, and find out who differs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What is to be decided for one collective."""

    num_bytes: int
    """Size of its message."""
    forced: str | None
    """Schedule that it has to take."""
    host_can: bool
    """The host library computes it as well."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What it takes."""

    choice: Choice
    plan: Plan
    version: int
    """Of the plan."""
    is_trial: bool = False
    """It runs alone, and begins on all ranks together."""


@dataclass(slots=True, eq=False)
class Ticket:
    """The place of one collective in the order of the group."""

    number: int
    asked: Asked
    bind: Callable[[Decision], None]
    """Called with the decision, in the order of the numbers."""
    index: int = 0
    """Among those of its class that are decided by ruling."""
    decision: Decision | None = None


@dataclass(slots=True)
class _Track:
    """What holds for one class of sizes."""

    count: int = 0
    """Collectives so far."""
    settled: str = ""
    """The schedule that was ruled; empty while trials go on."""
    since: int = 0
    """Index from which it holds."""
    reported: int = 0
    """Index up to which times were reported."""
    next_due: int = 0
    """Index of the next consultation."""
    seconds: dict[int, float] = field(default_factory=dict)
    """Per byte, by index."""


class Director:
    """Decides what each collective of a group takes."""

    def __init__(
        self,
        guide: GroupPlan,
        members: Members,
        make_adviser: Callable[[Plan], Adviser],
        tell: Callable[[Adviser], None],
        timings: Timings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`make_adviser` is called on the first rank, where the group adapts; `tell` after each of its rulings."""
        self._timings = timings
        self._guide = guide
        self._members = members
        self._make_adviser = make_adviser
        self._tell = tell
        self._clock = clock
        self._adviser: Adviser | None = None
        self._changed = threading.Condition()
        self._num_admitted = 0
        self._undecided: deque[Ticket] = deque()
        self._due: Ticket | None = None
        self._unfinished: set[int] = set()
        self._tracks: dict[int, _Track] = {}
        self._version = 1
        self._trial_s = float("nan")
        self._is_cut = False

    def admit(self, asked: Asked, bind: Callable[[Decision], None], timeout_s: float | None = None) -> Ticket:
        """Give a collective its number; it is decided now or later.

        Args:
            asked: What is to be decided.
            bind: Called with the decision, in the order of the numbers.
            timeout_s: How long the first rank may take to send the plan; None is the group's time-out.

        Raises:
            PeerError: The first rank did not send the plan in time.
            UsageError: This group cannot run the forced schedule.
        """
        self._guide.get(timeout_s)
        with self._changed:
            self._num_admitted += 1
            ticket = Ticket(self._num_admitted, asked, bind)
            self._undecided.append(ticket)
            self._unfinished.add(ticket.number)
            self._decide_more()
        return ticket

    def decide(self, ticket: Ticket, transport: Transport, *, tag: int, timeout_s: float) -> Decision:
        """The decision, in the thread of the collective's lane; consults the other ranks if that is due.

        Args:
            ticket: The collective whose turn it is.
            transport: Of its lane.
            tag: Of its messages.
            timeout_s: Bound on each wait for a message.

        Raises:
            TransferFailedError: A rank is gone or silent, or the group was cut.
        """
        if ticket.decision is None or self._is_cut:  # nearly all are decided before they come here
            with self._changed:
                self._wait(lambda: ticket.decision is not None or self._due is ticket)
        if ticket.decision is None:
            council = Council(self._members, transport, tag=tag, timeout_s=timeout_s)
            self._follow(ticket, self._consult(ticket, council, transport, tag=tag, timeout_s=timeout_s))
        assert ticket.decision is not None
        if ticket.decision.is_trial:
            self._wait_alone(ticket)
        return ticket.decision

    def meet(self, transport: Transport, *, tag: int, timeout_s: float) -> None:
        """Block until all ranks have come as far in the collective whose turn it is in this lane.

        Raises:
            TransferFailedError: A rank is gone or silent.
        """
        Council(self._members, transport, tag=tag, timeout_s=timeout_s).wait_all()

    def finish(self, ticket: Ticket, seconds: float) -> None:
        """Its message holds the result, after so many seconds on this rank."""
        decision = ticket.decision
        assert decision is not None
        with self._changed:
            self._unfinished.discard(ticket.number)
            if decision.is_trial:
                self._trial_s = seconds
            elif decision.version == self._version and self._adapts(ticket.asked):
                track = self._track(ticket)
                track.seconds[ticket.index] = seconds / max(1, ticket.asked.num_bytes)
                if len(track.seconds) > _MAX_KEPT:
                    del track.seconds[next(iter(track.seconds))]
            if self._due is ticket:
                self._due = None
                self._decide_more()
            self._changed.notify_all()
        self._timings.note(decision.version, decision.choice, ticket.asked.num_bytes, seconds)

    @property
    def plan(self) -> Plan:
        """The plan that holds.

        Raises:
            PeerError: The first rank did not send it in time.
        """
        return self._guide.get()

    def flush(self) -> None:
        """Write what collectives took."""
        self._timings.flush()

    def cut(self) -> None:
        """Let everybody go who waits here: the group has ended."""
        with self._changed:
            self._is_cut = True
            self._guide.cut()
            self._undecided.clear()
            self._changed.notify_all()

    def _adapts(self, asked: Asked) -> bool:
        return self._guide.adapts and asked.forced is None and asked.host_can

    def _track(self, ticket: Ticket) -> _Track:
        return self._tracks.setdefault(size_class(ticket.asked.num_bytes), _Track())

    def _decide_more(self) -> None:
        """Decide those that can be, in order, up to the next one that is due."""
        while self._undecided and self._due is None:
            ticket = self._undecided[0]
            if not self._adapts(ticket.asked):
                self._settle(ticket, ticket.asked.forced)
            else:
                track = self._track(ticket)
                ticket.index, track.count = track.count, track.count + 1
                if not track.settled or ticket.index >= track.next_due:
                    self._due = ticket
                else:
                    self._settle(ticket, track.settled)
            self._undecided.popleft()
        self._changed.notify_all()

    def _settle(self, ticket: Ticket, name: str | None, *, is_trial: bool = False) -> None:
        choice = self._guide.choose(ticket.asked.num_bytes, name)
        ticket.decision = Decision(choice, self._guide.get(), self._version, is_trial)
        ticket.bind(ticket.decision)

    def _consult(self, ticket: Ticket, council: Council, transport: Transport, *, tag: int, timeout_s: float) -> Ruling:
        """What the first rank rules, after a survey if it wants one."""
        own = self._report(ticket)
        ruling = Ruling.parse(council.consult(own.to_vector(), self._rule))
        if not ruling.phases:
            return ruling
        self._wait_alone(ticket)
        started_s = self._clock()
        found = survey(
            ruling.phases, self._members, council, transport, tag=tag, timeout_s=timeout_s, clock=self._clock
        )
        return Ruling.parse(council.consult(found, lambda rates: self._resolve(ticket, rates, started_s)))

    def _rule(self, vector: list[float]) -> str:
        report = Report.from_vector(vector)
        if not report.is_equal:
            return str(UNEQUAL)
        if self._adviser is None:
            self._adviser = self._make_adviser(self._guide.get())
        ruling = self._adviser.rule(report, self._clock())
        self._tell(self._adviser)
        return str(ruling)

    def _resolve(self, ticket: Ticket, rates: list[float], started_s: float) -> str:
        assert self._adviser is not None
        now_s = self._clock()
        ruling = self._adviser.resolve(ticket.asked.num_bytes, rates, now_s, now_s - started_s)
        self._tell(self._adviser)
        return str(ruling)

    def _report(self, ticket: Ticket) -> Report:
        """This rank's times since the last report of the class."""
        with self._changed:
            track = self._track(ticket)
            until = max(track.reported, ticket.index - _LATE)
            first = max(track.since, track.reported, until - WINDOW)
            window = [track.seconds.get(index, float("nan")) for index in range(first, until)]
            track.reported = until
            trial_s, self._trial_s = self._trial_s, float("nan")
        return Report(num_bytes=ticket.asked.num_bytes, trial_s=trial_s, window=tuple(window))

    def _follow(self, ticket: Ticket, ruling: Ruling) -> None:
        """Let the ruling hold from this collective on."""
        if ruling == UNEQUAL:
            with self._changed:
                self._settle(ticket, None)
                self._due = None
                self._decide_more()
            return
        plan = Plan.parse(ruling.plan) if ruling.plan else None
        with self._changed:
            if plan is not None:
                self._guide.replace(plan)
                self._version += 1
                for track in self._tracks.values():
                    track.settled = ""
                    track.seconds.clear()
            track = self._track(ticket)
            if not ruling.is_trial:
                if track.settled != ruling.schedule:
                    track.since = track.reported = ticket.index
                track.settled = ruling.schedule
                track.next_due = ticket.index + ruling.next_in
            self._settle(ticket, ruling.schedule, is_trial=ruling.is_trial)
            if not ruling.is_trial:
                self._due = None
                self._decide_more()
            self._changed.notify_all()

    def _wait_alone(self, ticket: Ticket) -> None:
        """Block until all collectives before this one are through on this rank."""
        with self._changed:
            self._wait(lambda: not any(number < ticket.number for number in self._unfinished))

    def _wait(self, is_so: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._is_cut or is_so())
        if self._is_cut:
            raise TransferFailedError(None, "the connections of this group were cut", hung=False)
