"""Schedule selector: decides which schedule each collective takes, identically on all ranks.

Collectives are numbered and decided in the order of the calls. Nearly all are decided in the call, from earlier
decisions. When a consultation is due, the ranks hold it at the collective's turn in its channel, and later collectives
stay undecided until it is done. When one is due follows from decisions and calls alone, so all ranks agree.
A collective waits only for smaller numbers, which every rank calls before it, so no circular wait is possible.
"""

import functools
import hashlib
import importlib.metadata
import json
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path

from torch.distributed import Store

from ringweave import schedules
from ringweave.comm import plan_choice
from ringweave.comm.group_info import GENERATION_GROUP_PREFIX, REDUCE_GROUP_PREFIX, GroupInfo
from ringweave.comm.group_plan import GroupPlan, PlanBroadcast
from ringweave.comm.transport.interface import TransferFailedError, Transport
from ringweave.comm.tuning.control_tree import ControlTree, run_survey
from ringweave.environment import WorkerEnvironment
from ringweave.files import file_io
from ringweave.planning import Plan, ScheduleChoice
from ringweave.planning.autotune.link_survey import SurveyHistory
from ringweave.planning.autotune.tuner import MAX_AGE_S, Autotuner
from ringweave.planning.autotune.tuning_messages import REPORT_WINDOW, TuningDecision, TuningReport, message_class
from ringweave.planning.group_planner import GroupPlacement
from ringweave.planning.plans import EXACT
from ringweave.schedules import CollectiveKind
from ringweave.telemetry.events import EventLog

_TIMINGS_FLUSH_S = 30.0
_MAX_TIMED_KINDS = 512
_NUM_TIMES_KEPT = 101
"""Number of the latest times of a kind whose median is taken."""

_TimingKey = tuple[int, CollectiveKind, ScheduleChoice, int]
"""Version of the plan, collective, choice, bytes."""


class ScheduleTimings:
    """Durations of a group's collectives by plan, schedule, size and pipelining, written to the event log at intervals.

    The first rank of a group writes for all. Its times include waiting for late ranks.
    """

    def __init__(
        self, log: EventLog | None, rank: int, group: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`log` is None where nothing is to be written."""
        self._log = log
        self._labels = {"rank": rank, "group": group}
        self._clock = clock
        self._lock = threading.Lock()
        self._seconds: dict[_TimingKey, deque[float]] = {}
        self._rounds: dict[_TimingKey, int] = {}
        self._unwritten: dict[_TimingKey, None] = {}  # a set that keeps its order
        self._next_flush_s = clock() + _TIMINGS_FLUSH_S

    def record(
        self, version: int, kind: CollectiveKind, choice: ScheduleChoice, num_bytes: int, seconds: float
    ) -> None:
        """Record the seconds of a collective on this rank under this version of the plan."""
        if self._log is None:
            return
        key = version, kind, choice, num_bytes
        with self._lock:
            if key not in self._seconds and len(self._seconds) >= _MAX_TIMED_KINDS:
                return
            self._seconds.setdefault(key, deque(maxlen=_NUM_TIMES_KEPT)).append(seconds)
            self._rounds[key] = self._rounds.get(key, 0) + 1
            self._unwritten[key] = None
        if self._clock() >= self._next_flush_s:
            self.flush()

    def flush(self) -> None:
        if self._log is None:
            return
        self._next_flush_s = self._clock() + _TIMINGS_FLUSH_S
        with self._lock:
            rows = [(key, statistics.median(self._seconds[key]), self._rounds[key]) for key in self._unwritten]
            self._unwritten.clear()
        for (version, kind, choice, num_bytes), measured_s, rounds in rows:
            fields: dict[str, object] = {"version": version, "collective": kind, **asdict(choice)}
            fields["predicted_s"] = choice.predicted_s if choice.predicted_s < float("inf") else None
            measured = {"bytes": num_bytes, "measured_s": measured_s, "rounds": rounds}
            self._log.write("schedule_measured", **self._labels, **fields, **measured)


_NUM_UNREPORTED = 4
"""Newest collectives that a report leaves out, since the other channel may still be running them."""
_MAX_KEPT_TIMES = 2 * REPORT_WINDOW + 512


RANKS_DIFFER = TuningDecision(num_bytes=-1)
"""The ranks are at different collectives. Each runs its own, and the mismatch is detected there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveRequest:
    """Request to decide one collective."""

    num_bytes: int
    """Size of the message."""
    kind: CollectiveKind = "allreduce"
    forced: str | None
    """Schedule that the user forces."""
    native_can: bool
    """The native backend can compute it too."""
    is_on_device: bool = False
    """The native backend for it is NCCL, on the device's own tensors."""
    largest_block_bytes: int | None = None
    """Size of the largest block where ranks have blocks of different sizes."""
    wire: str = EXACT
    """Wire format of an allreduce, or `auto`."""


@dataclass(frozen=True, slots=True)
class ScheduleDecision:
    """Schedule and plan of one collective."""

    choice: ScheduleChoice
    plan: Plan
    version: int
    is_trial: bool = False
    """The collective runs alone and starts on all ranks together."""


@dataclass(slots=True, eq=False)
class PendingCollective:
    """Position of one collective in the group's order, and its decision."""

    number: int
    request: CollectiveRequest
    on_decision: Callable[[ScheduleDecision], None]
    """Callback with the decision, called in the order of the numbers."""
    class_index: int = 0
    """Index among the tunable collectives of its message class."""
    decision: ScheduleDecision | None = None


@dataclass(slots=True)
class _ClassState:
    """State of one message class."""

    count: int = 0
    """Number of collectives so far."""
    chosen: str = ""
    """Schedule that was decided; empty while trials go on."""
    chosen_from: int = 0
    """Index of the first collective with this schedule."""
    reported_until: int = 0
    """Index up to which times were reported."""
    next_consultation: int = 0
    s_per_byte: dict[int, float] = field(default_factory=dict)


class ScheduleSelector:
    """Decides the schedule of each collective of a group, identically on all ranks."""

    def __init__(
        self,
        group_plan: GroupPlan,
        members: GroupInfo,
        make_autotuner: Callable[[Plan], Autotuner],
        log_events: Callable[[Autotuner], None],
        timings: ScheduleTimings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The root rank calls `make_autotuner` where the group is tunable, and `log_events` after each decision."""
        self._timings = timings
        self._group_plan = group_plan
        self._members = members
        self._make_autotuner = make_autotuner
        self._log_events = log_events
        self._clock = clock
        self._autotuner: Autotuner | None = None
        self._changed = threading.Condition()
        self._num_admitted = 0
        self._undecided: deque[PendingCollective] = deque()
        self._consulting: PendingCollective | None = None
        self._unfinished: set[int] = set()
        self._classes: dict[str, _ClassState] = {}
        self._plan_version = 1
        self._trial_s = float("nan")
        self._is_aborted = False

    def admit(
        self,
        request: CollectiveRequest,
        on_decision: Callable[[ScheduleDecision], None],
        timeout_s: float | None = None,
    ) -> PendingCollective:
        """Number a collective; it is decided now or later.

        Args:
            request: The collective to decide.
            on_decision: Called with the decision, in the order of the numbers.
            timeout_s: Limit on waiting for the plan of the first rank; None is the group's timeout.

        Raises:
            PeerError: The first rank did not send the plan in time.
            UsageError: The group cannot run the forced schedule.
        """
        self._group_plan.wait_for_plan(timeout_s, is_whole=request.kind != "allreduce" or request.wire != EXACT)
        if request.wire != EXACT:
            request = replace(request, wire=self._wire_of(request))
        with self._changed:
            self._num_admitted += 1
            pending = PendingCollective(self._num_admitted, request, on_decision)
            self._undecided.append(pending)
            self._unfinished.add(pending.number)
            self._decide_ready()
        return pending

    def wait_for_decision(
        self, pending: PendingCollective, transport: Transport, *, tag: int, timeout_s: float
    ) -> ScheduleDecision:
        """Return the decision; consult the other ranks first if a consultation is due. Runs in the channel's thread.

        Raises:
            TransferFailedError: A rank is dead or silent, or the group was aborted.
        """
        if pending.decision is None or self._is_aborted:  # most are decided earlier
            with self._changed:
                self._wait_until(lambda: pending.decision is not None or self._consulting is pending)
        if pending.decision is None:
            tree = ControlTree(self._members, transport, tag=tag, timeout_s=timeout_s)
            self._apply_decision(pending, self._consult_ranks(pending, tree, transport, tag=tag, timeout_s=timeout_s))
        assert pending.decision is not None
        if pending.decision.is_trial:
            self.wait_for_earlier(pending)
        return pending.decision

    def barrier(self, transport: Transport, *, tag: int, timeout_s: float) -> None:
        """Block until all ranks have reached this point of the channel's current collective.

        Raises:
            TransferFailedError: A rank is dead or silent.
        """
        ControlTree(self._members, transport, tag=tag, timeout_s=timeout_s).barrier()

    def record_finished(self, pending: PendingCollective, seconds: float) -> None:
        """Record that the message holds the result after this many seconds on this rank."""
        decision = pending.decision
        assert decision is not None
        with self._changed:
            self._unfinished.discard(pending.number)
            if decision.is_trial:
                self._trial_s = seconds
            elif decision.version == self._plan_version and self._is_tuned(pending.request):
                state = self._state_of(pending)
                state.s_per_byte[pending.class_index] = seconds / max(1, pending.request.num_bytes)
                if len(state.s_per_byte) > _MAX_KEPT_TIMES:
                    del state.s_per_byte[next(iter(state.s_per_byte))]
            if self._consulting is pending:
                self._consulting = None
                self._decide_ready()
            self._changed.notify_all()
        request = pending.request
        self._timings.record(decision.version, request.kind, decision.choice, request.num_bytes, seconds)

    def wait_for_plan(self, *, is_whole: bool = False) -> Plan:
        """Return the current plan of the group; it may have exact allreduces only.

        `is_whole`: with all collectives and wire formats; all ranks ask for that.

        Raises:
            PeerError: The first rank did not send it in time.
        """
        return self._group_plan.wait_for_plan(is_whole=is_whole)

    def flush_timings(self) -> None:
        """Write the recorded times to the event log."""
        self._timings.flush()

    def abort(self) -> None:
        """Wake every waiting thread: the group has ended."""
        with self._changed:
            self._is_aborted = True
            self._group_plan.abort()
            self._undecided.clear()
            self._changed.notify_all()

    def _wire_of(self, request: CollectiveRequest) -> str:
        """Return the format that the plan takes; exact where it has none, or expects too little of it."""
        return self._group_plan.choose(request.num_bytes, request.forced, request.kind, None, request.wire).wire

    def _is_tuned(self, request: CollectiveRequest) -> bool:
        """Return whether trials decide; encoded collectives follow the forecast, since a trial would send residuals."""
        is_exact = request.wire == EXACT
        return self._group_plan.is_tunable and request.forced is None and request.native_can and is_exact

    def _state_of(self, pending: PendingCollective) -> _ClassState:
        request = pending.request
        key = message_class(request.num_bytes, request.kind, is_on_device=request.is_on_device)
        return self._classes.setdefault(key, _ClassState())

    def _decide_ready(self) -> None:
        """Decide collectives in order, up to the next one with a consultation due."""
        while self._undecided and self._consulting is None:
            pending = self._undecided[0]
            if not self._is_tuned(pending.request):
                self._set_decision(pending, pending.request.forced)
            else:
                state = self._state_of(pending)
                pending.class_index, state.count = state.count, state.count + 1
                if not state.chosen or pending.class_index >= state.next_consultation:
                    self._consulting = pending
                else:
                    self._set_decision(pending, state.chosen)
            self._undecided.popleft()
        self._changed.notify_all()

    def _set_decision(self, pending: PendingCollective, name: str | None, *, is_trial: bool = False) -> None:
        request = pending.request
        choice = self._group_plan.choose(
            request.num_bytes, name, request.kind, request.largest_block_bytes, request.wire
        )
        pending.decision = ScheduleDecision(choice, self._group_plan.wait_for_plan(), self._plan_version, is_trial)
        pending.on_decision(pending.decision)

    def _consult_ranks(
        self, pending: PendingCollective, tree: ControlTree, transport: Transport, *, tag: int, timeout_s: float
    ) -> TuningDecision:
        """Return the root's decision, after a link survey if the root asks for one."""
        report = self._make_report(pending)
        decision = TuningDecision.parse(tree.reduce_and_decide(report.to_vector(), self._decide_at_root))
        if not decision.phases:
            return decision
        self.wait_for_earlier(pending)
        started_s = self._clock()
        survey_rates = run_survey(
            decision.phases, self._members, tree, transport, tag=tag, timeout_s=timeout_s, clock=self._clock
        )
        return TuningDecision.parse(
            tree.reduce_and_decide(survey_rates, lambda rates: self._decide_after_survey(pending, rates, started_s))
        )

    def _decide_at_root(self, vector: list[float]) -> str:
        report = TuningReport.from_vector(vector)
        if not report.is_equal:
            return str(RANKS_DIFFER)
        if self._autotuner is None:
            self._autotuner = self._make_autotuner(self._group_plan.wait_for_plan())
        self._autotuner.complete_plan(self._group_plan.wait_for_plan())
        decision = self._autotuner.decide(report, self._clock())
        self._log_events(self._autotuner)
        return str(decision)

    def _decide_after_survey(self, pending: PendingCollective, rates: list[float], started_s: float) -> str:
        assert self._autotuner is not None
        now_s, request = self._clock(), pending.request
        decision = self._autotuner.decide_after_survey(
            request.num_bytes, rates, now_s, now_s - started_s, request.kind, is_on_device=request.is_on_device
        )
        self._log_events(self._autotuner)
        return str(decision)

    def _make_report(self, pending: PendingCollective) -> TuningReport:
        """Report this rank's times since the last report of the message class."""
        with self._changed:
            state = self._state_of(pending)
            until = max(state.reported_until, pending.class_index - _NUM_UNREPORTED)
            first = max(state.chosen_from, state.reported_until, until - REPORT_WINDOW)
            window = [state.s_per_byte.get(index, float("nan")) for index in range(first, until)]
            state.reported_until = until
            trial_s, self._trial_s = self._trial_s, float("nan")
        request = pending.request
        return TuningReport(
            num_bytes=request.num_bytes,
            kind=request.kind,
            is_on_device=request.is_on_device,
            trial_s=trial_s,
            window=tuple(window),
        )

    def _apply_decision(self, pending: PendingCollective, decision: TuningDecision) -> None:
        if decision == RANKS_DIFFER:
            with self._changed:
                self._set_decision(pending, None)
                self._consulting = None
                self._decide_ready()
            return
        plan = Plan.parse(decision.plan) if decision.plan else None
        with self._changed:
            if plan is not None:
                self._group_plan.replace(plan)
                self._plan_version += 1
                for state in self._classes.values():
                    state.chosen = ""
                    state.s_per_byte.clear()
            state = self._state_of(pending)
            if not decision.is_trial:
                if state.chosen != decision.schedule:
                    state.chosen_from = state.reported_until = pending.class_index
                state.chosen = decision.schedule
                state.next_consultation = pending.class_index + decision.next_in
            self._set_decision(pending, decision.schedule, is_trial=decision.is_trial)
            if not decision.is_trial:
                self._consulting = None
                self._decide_ready()
            self._changed.notify_all()

    def wait_for_earlier(self, pending: PendingCollective) -> None:
        """Block until all earlier collectives have finished on this rank.

        Raises:
            TransferFailedError: The group was aborted.
        """
        with self._changed:
            self._wait_until(lambda: not any(number < pending.number for number in self._unfinished))

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._is_aborted or condition())
        if self._is_aborted:
            raise TransferFailedError(None, "the connections of this group were cut", hung=False)


_FORMAT = "ringweave-tuning-3"


class TuningCache:
    """Winners of earlier trials: one file per plan and software version, replaced atomically.

    The text of the plan's exact allreduces contains the nodes of all ranks and the rates of all links, so another
    cluster, placement or measured rate is another file. Winners older than `MAX_AGE_S` are ignored, so that disturbed
    trials do not count for ever.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        """`clock` gives seconds since 1970."""
        self._folder = folder
        self._clock = clock

    @classmethod
    def for_user(cls, environ: Mapping[str, str]) -> "TuningCache":
        """Return the cache in `$XDG_CACHE_HOME/ringweave/tuning`, or in `~/.cache`."""
        base = environ.get("XDG_CACHE_HOME", "")
        root = Path(base) if base.startswith("/") else Path(environ.get("HOME", "/nonexistent")) / ".cache"
        return cls(root / "ringweave" / "tuning")

    def load(self, plan: Plan) -> dict[str, str]:
        """Return the schedule by message class; empty if nothing is known or the file is unreadable."""
        return {key: schedule for key, (schedule, _) in self._read(plan).items()}

    def save(self, plan: Plan, schedules: Mapping[str, str]) -> None:
        """Store the winners for the next run; do nothing where the folder is not writable.

        A winner that was known already keeps its age: it was not tried again.
        """
        path = self._path(plan)
        known, now = self._read(plan), self._clock()
        since = {key: at for key, (name, at) in known.items() if schedules.get(key) == name}
        rows = {key: [name, since.get(key, now)] for key, name in sorted(schedules.items())}
        document = {_FORMAT: rows, "nodes": plan.nodes}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file_io.replace_text(path, json.dumps(document, indent=2) + "\n")
        except OSError:
            return

    def _read(self, plan: Plan) -> dict[str, tuple[str, float]]:
        """Return the schedule by message class and the time it won, without expired ones."""
        try:
            document = file_io.load_json(self._path(plan))
            found = {key: (name, float(at)) for key, (name, at) in document[_FORMAT].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {}
        if not all(name in schedules.SCHEDULE_NAMES for name, _ in found.values()):
            return {}
        now = self._clock()
        return {key: (name, at) for key, (name, at) in found.items() if 0 <= now - at <= MAX_AGE_S}

    def _path(self, plan: Plan) -> Path:
        versions = [importlib.metadata.version("ringweave"), importlib.metadata.version("torch")]
        digest = hashlib.sha256("\n".join([*versions, str(plan.exact_allreduces)]).encode()).hexdigest()
        return self._folder / f"{digest[:32]}.json"


@dataclass(frozen=True, slots=True)
class GroupEventLog:
    """Event log of a group; nothing is written without a log."""

    log: EventLog | None
    rank: int
    group: str


@functools.cache
def _generation_surveys() -> SurveyHistory:
    """Return the surveys of this process in the groups of all generations, of which each replaces the one before."""
    return SurveyHistory()


def make_selector(
    store: Store,
    group: GroupInfo,
    environment: WorkerEnvironment,
    placement: GroupPlacement,
    timeout: timedelta,
    event_log: GroupEventLog,
) -> ScheduleSelector:
    """Make the schedule selector of a group; on the first rank this makes the plan and loads earlier winners.

    Raises:
        ClusterError: The cluster lacks a member's node.
    """
    cache = TuningCache.for_user(os.environ)
    is_awaited = event_log.group.startswith((GENERATION_GROUP_PREFIX, REDUCE_GROUP_PREFIX))
    history = _generation_surveys() if is_awaited else SurveyHistory()
    rates = placement.rates_of_links(history.rates)

    def load(plan: Plan) -> Mapping[str, str] | None:
        return cache.load(plan) if plan_choice.may_tune(group, environment) else None

    def make_autotuner(plan: Plan) -> Autotuner:
        # After a failure all members pause until their first collective, so nothing is simulated before it.
        estimate = (lambda *_: {}) if is_awaited else None
        return Autotuner(placement, plan, group_plan.tuned, estimate, history, rates)

    def log_events(adviser: Autotuner) -> None:
        for kind, fields in adviser.take_events():
            if event_log.log is not None:
                event_log.log.write(kind, rank=event_log.rank, group=event_log.group, **fields)
            if kind == "schedule_tuned" and not adviser.rates:
                cache.save(adviser.plan, adviser.winners)

    broadcast = PlanBroadcast(store, group, timeout) if plan_choice.is_plan_shared(group, environment) else None
    # Likewise a plan is made in parts: each survivor of a failure waits for the first.
    make = lambda is_whole: placement.plan(rates, is_whole=is_whole)  # noqa: E731
    group_plan = GroupPlan(make, load, broadcast, is_whole=not is_awaited)
    timings = ScheduleTimings(event_log.log if group.group_rank == 0 else None, event_log.rank, event_log.group)
    return ScheduleSelector(group_plan, group, make_autotuner, log_events, timings)
