"""Supervision of workers, on one node of a job or on all nodes of a run: stop policy, restarts, services."""

import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import psutil

from ringweave import environment
from ringweave.errors import LaunchError, explain
from ringweave.launcher.node_context import NodeContext
from ringweave.launcher.outcome import RunRecorder, WorkerFailure, first_cause
from ringweave.launcher.output import OutputConsole
from ringweave.launcher.processes import LocalLauncher, ProcessContext
from ringweave.launcher.restarts import (
    JOB_FINISHED,
    JOB_OVER,
    EvictionWatcher,
    MembershipHistory,
    NoRestartError,
    PastMembers,
    RestartDecision,
    SlotExit,
    WorkerRestarts,
)
from ringweave.launcher.run_dir import RunDir, path_from_here
from ringweave.launcher.scale_requests import WorkerRequests
from ringweave.launcher.services import CoordinatorQuery, ServiceProcesses
from ringweave.launcher.spares import Spare, SpareRules, gains_from_fork_server
from ringweave.launcher.workers import WorkerGroup, WorkerProgram, WorkerSpec, WorkerState
from ringweave.rpc import Credentials

SUPERVISION_INTERVAL_S = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class StopTimeouts:
    """Timeouts before each harder measure."""

    grace_s: float = 1.5
    """After the first failure: a worker that dies by itself in this time may be the cause. Long enough for the
    backend's survivors to hear of each other's failures and report the peer that they blame."""
    sigterm_s: float = 1.5
    """Between SIGTERM after a failure and SIGKILL; the run cannot succeed any more."""
    interrupt_s: float = 3.0
    """Between a user's SIGINT or SIGTERM and SIGKILL; long enough to write a small checkpoint."""
    sigkill_s: float = 5.0
    """After SIGKILL: the kernel holds a process that still exists then, and it is given up."""


class StopPolicy:
    """Decides which signal one worker group gets, and when."""

    def __init__(self, patience: StopTimeouts) -> None:
        self._patience = patience
        self._escalate_at_s: float | None = None
        self._num_interrupts = 0
        self._last_signal: signal.Signals | None = None

    def decide(
        self, states: Sequence[WorkerState], interrupts: Sequence[signal.Signals], now_s: float
    ) -> signal.Signals | None:
        """Return the signal to send to all workers now, or None.

        `interrupts`: all SIGINT and SIGTERM that the run itself has received so far.
        """
        if len(interrupts) > self._num_interrupts:
            self._num_interrupts = len(interrupts)
            return self._send(interrupts[-1] if self._last_signal is None else signal.SIGKILL, now_s)
        if self._escalate_at_s is not None:
            return self._send(signal.SIGKILL, now_s) if now_s >= self._escalate_at_s else None
        return self._decide_after_failure(states, now_s)

    def is_over(self, states: Sequence[WorkerState], now_s: float) -> bool:
        """Return whether there is nothing left to wait for: every worker has ended or has survived SIGKILL."""
        given_up = (
            self._last_signal is signal.SIGKILL and self._escalate_at_s is not None and now_s >= self._escalate_at_s
        )
        return given_up or all(state.exit for state in states)

    def _decide_after_failure(self, states: Sequence[WorkerState], now_s: float) -> signal.Signals | None:
        failed = [state.exit.time_s for state in states if state.exit and not state.exit.is_success]
        if failed and now_s >= min(failed) + self._patience.grace_s:
            return self._send(signal.SIGTERM, now_s, wait_s=self._patience.sigterm_s)
        return None

    def _send(self, signum: signal.Signals, now_s: float, wait_s: float | None = None) -> signal.Signals | None:
        if self._last_signal is signal.SIGKILL:
            return None
        if wait_s is None:
            wait_s = self._patience.sigkill_s if signum is signal.SIGKILL else self._patience.interrupt_s
        self._last_signal, self._escalate_at_s = signum, now_s + wait_s
        return signum


@contextmanager
def collect_interrupts(*, only_first: bool = False) -> Iterator[list[signal.Signals]]:
    """Collect SIGINT, SIGTERM and SIGHUP of this process; an ignored SIGHUP (nohup) stays ignored.

    `only_first`: another one of the same kind does what it did before.
    """
    received: list[signal.Signals] = []
    wanted = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        wanted.append(signal.SIGHUP)
    before = {signum: signal.getsignal(signum) for signum in wanted}

    def collect(number: int, frame: FrameType | None) -> None:
        del frame
        received.append(signal.Signals(number))
        if only_first:
            signal.signal(number, before[signal.Signals(number)])

    for signum in wanted:
        signal.signal(signum, collect)
    try:
        yield received
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


MEMBER_INTERRUPT_TIMEOUT_S = 25.0
"""Between a user's SIGTERM and SIGKILL: members finish their step, and one saves, before they leave. Kubernetes and
Slurm kill half a minute after SIGTERM."""

_LEAVE_TIMEOUT_S = 300.0
"""Between SIGTERM and SIGKILL for a worker that is no longer requested. Its train step may be long, or the others may
wait for a newcomer that is about to catch up before a member leaves."""

_EVICTED_EXIT_TIMEOUT_S = 40.0
"""Upper limit of the life of an evicted process. It hears of its eviction at once, or, if it is cut off, searches for a
coordinator for half a minute and then ends. A process that is stopped or blocked hears nothing. The remaining members
may have to wait until another process has its slot, because they cannot know that it is dead; of two members this is
the second one. They wait for a minute (`Settings.patience_s`), so the rest of it has to suffice for a start."""
_EVICTED_CHECK_INTERVAL_S = 1.0


def with_member_name(worker: WorkerSpec, incarnation: int) -> WorkerSpec:
    """Return the worker with a member name of this incarnation; each restart of a worker is another member."""
    return with_member(worker, f"{worker.global_rank}.{incarnation}")


def with_member(worker: WorkerSpec, name: str) -> WorkerSpec:
    """Return the worker with this member name."""
    return replace(worker, environ={**worker.environ, environment.MEMBER: name})


def next_member(worker: WorkerSpec, previous: str) -> WorkerSpec:
    """Return the worker as the member after the previous one of its slot, an empty text if there was none."""
    return with_member_name(worker, int(previous.partition(".")[2]) + 1 if previous else 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticRules:
    """Rules of workers that may die, come back, come and go."""

    slots: WorkerGroup
    """The workers that are started, followed by those that may be requested later."""
    past_members: Callable[[Collection[str]], PastMembers]
    """Returns the past members, in particular of these names; before the first member, any failed worker ends all."""
    restarts: WorkerRestarts = field(default_factory=WorkerRestarts)
    new_member: Callable[[WorkerSpec, str], WorkerSpec] = next_member
    """Returns a slot's worker as a new member, from the worker and the member name of its last process; may raise
    LaunchError."""
    scale_requests: WorkerRequests | None = None
    """Requests for another number of workers; None if there can be none."""
    evicted_members: Callable[[], Collection[str]] = frozenset
    notify_user: Callable[[str], object] = lambda text: None
    """Gets a text about each slot that cannot be started and is retried or given up."""
    on_give_up: Callable[[WorkerFailure, str], object] = lambda failure, reason: None
    """Called with the reason for each worker that is not restarted while the others go on."""


class ElasticSlots:
    """Slots of elastic workers: restarts failed ones, and decides which ends count for the outcome."""

    def __init__(
        self,
        rules: ElasticRules,
        launcher: LocalLauncher,
        recorder: RunRecorder,
        failure_of: Callable[[WorkerState], WorkerFailure | None],
        clock: Callable[[], float],
    ) -> None:
        """Begin with workers that have been started."""
        self._rules, self._launcher, self._recorder, self._failure_of = rules, launcher, recorder, failure_of
        self._workers = {worker.global_rank: worker for worker in rules.slots.workers}
        self._num_wanted = rules.scale_requests.workers if rules.scale_requests else len(self._workers)
        self._checked_evicted_s, self._evicted_since_s = clock(), dict[str, float]()
        self._started_s = dict.fromkeys(self._wanted_slots, clock())
        self._members = {slot: self._workers[slot].environ.get(environment.MEMBER, "") for slot in self._wanted_slots}
        self._leave_deadline_s: dict[int, float] = {}
        self._failed_slots: set[int] = set()
        self._excused_slots: set[int] = set()
        self._abandoned_slots: set[int] = set()
        self._unstarted_slots: set[int] = set()
        self._own_failures: dict[int, WorkerFailure] = {}

    def handle_exit(self, state: WorkerState, states: Sequence[WorkerState], now_s: float) -> None:
        """Decide what follows from a worker's end that was observed just now."""
        failure = self._failure_of(state)
        if self._decide_restart(state.global_rank, failure, states, now_s) == "give up" and failure is not None:
            self._rules.on_give_up(failure, self._rules.restarts.give_up_reason(state.global_rank))

    def update(self, states: Sequence[WorkerState], now_s: float, *, is_ending: bool) -> set[int] | None:
        """Apply a scale request, kill hung processes, and start what is due.

        Returns:
            The slots that were started. Empty if none of those due could be started, None if none was due.
        """
        may_start = not is_ending and not self._failed_slots
        self._apply_scale_request(states, now_s, is_ending=not may_start)
        self._kill_hung_evicted(states, now_s)
        due = self._rules.restarts.take_due(now_s) if may_start else ()
        return {slot for slot in due if self._start_slot(slot, now_s)} if due else None

    def has_pending(self, *, is_ending: bool) -> bool:
        """Return whether a slot is to be started again."""
        return bool(self._rules.restarts.pending) and not is_ending and not self._failed_slots

    def unexcused(self, states: Sequence[WorkerState]) -> list[WorkerState]:
        """Return the states without those whose end stops nobody."""
        return [each for each in states if each.global_rank not in self._excused_slots]

    def decisive(self, states: Sequence[WorkerState]) -> list[WorkerState]:
        """Return the states that decide the outcome.

        Those are the ones with which the run failed and those that ended well. If none ended well, a job that is over
        has failed, so that those count too that found it over or were given up.
        """
        left_out = self._excused_slots
        if not any(state.exit and state.exit.is_success for state in states):
            left_out = left_out - self._abandoned_slots
        return [state for state in states if state.global_rank not in left_out]

    def with_first_cause(self, failures: Sequence[WorkerFailure]) -> list[WorkerFailure]:
        """Return the failures of a run; if the job is over for those that are left, the exceptions that led to it too.

        A worker that is started again when nobody has the parameters any more fails with a MembershipError. The cause
        is the exception of the worker that it replaces.
        """
        first, found = first_cause(failures), [each.exception or "" for each in failures]
        is_over = any(JOB_OVER in each for each in found) and not any(JOB_FINISHED in each for each in found)
        if first is None or not first.is_consequence or not is_over:
            return list(failures)
        known = {(each.global_rank, each.exit) for each in failures}
        earlier = [each for each in self._own_failures.values() if (each.global_rank, each.exit) not in known]
        return [*earlier, *failures]

    @property
    def is_idle(self) -> bool:
        """True if no worker is wanted here for now, while other nodes train."""
        return not self._num_wanted

    def running_members(self, states: Sequence[WorkerState]) -> tuple[str, ...]:
        """Return the member names of the processes that run."""
        return tuple(self._members[slot] for slot in sorted(_running_slots(states)))

    def _decide_restart(
        self, slot: int, failure: WorkerFailure | None, states: Sequence[WorkerState], now_s: float
    ) -> RestartDecision:
        past_members = self._rules.past_members([self._members[each.global_rank] for each in states] if failure else ())
        if not past_members.members:
            if failure is not None:
                self._failed_slots.add(slot)
            return "rest"
        is_wanted = slot in self._wanted_slots
        if self._leave_deadline_s.pop(slot, None) is not None or not is_wanted:
            if is_wanted:  # it was requested again meanwhile
                self._rules.restarts.start_now(slot, now_s)
            self._excused_slots.add(slot)
            return "rest"
        name = self._members[slot]
        slot_exit = SlotExit(
            death=failure,
            lifetime_s=now_s - self._started_s[slot],
            was_member=name in past_members.members,
            has_trained=name in past_members.trained,
        )
        self._keep_own_failure(slot, slot_exit)
        trains = {
            each.global_rank: not each.exit and self._members[each.global_rank] in past_members.trained
            for each in states
            if each.global_rank != slot and each.global_rank in self._wanted_slots
        }
        decision = self._rules.restarts.decide(slot, slot_exit, now_s, trains)
        if decision == "fail":
            self._fail_run(slot)
        elif failure is not None:
            self._excused_slots.add(slot)
        if decision == "give up" or (decision == "rest" and not (slot_exit.is_finished or slot_exit.has_left)):
            self._abandoned_slots.add(slot)
        return decision

    def _keep_own_failure(self, slot: int, slot_exit: SlotExit) -> None:
        """Keep the exception of a slot's worker until another worker of this slot has trained."""
        if slot_exit.has_trained:
            self._own_failures.pop(slot, None)
        death = slot_exit.death
        if death is not None and not (death.exit.signal_name or slot_exit.has_left or death.is_consequence):
            self._own_failures.setdefault(slot, death)

    @property
    def _wanted_slots(self) -> list[int]:
        return list(self._workers)[: self._num_wanted]

    def _apply_scale_request(self, states: Sequence[WorkerState], now_s: float, *, is_ending: bool) -> None:
        """Apply a request for another number of workers, and kill workers that were asked to leave and did not."""
        for slot in [slot for slot, until_s in self._leave_deadline_s.items() if now_s > until_s]:
            self._launcher.signal_worker(slot, signal.SIGKILL)
            self._leave_deadline_s[slot] = float("inf")
        requests = self._rules.scale_requests
        workers = requests.take_request() if requests else None
        if requests is None or workers is None:
            return
        if requests.refuse_request(workers, self._scale_refusal(states, is_ending=is_ending)):
            return
        self._num_wanted = workers
        running, wanted = _running_slots(states), self._wanted_slots
        leaving = sorted(running - self._leave_deadline_s.keys() - set(wanted))
        absent = [slot for slot in wanted if slot not in running]
        for slot in leaving:
            self._launcher.signal_worker(slot, signal.SIGTERM)
            self._leave_deadline_s[slot] = now_s + _LEAVE_TIMEOUT_S
        for slot in self._workers.keys() - set(wanted):
            self._rules.restarts.reset_slot(slot)
        self._unstarted_slots.difference_update(absent)
        for slot in absent:
            self._rules.restarts.start_now(slot, now_s)
        requests.grant_request(workers, starting=absent, leaving=leaving)

    def _kill_hung_evicted(self, states: Sequence[WorkerState], now_s: float) -> None:
        """Kill evicted processes that do not end: they would block their slots."""
        if now_s - self._checked_evicted_s < _EVICTED_CHECK_INTERVAL_S:
            return
        self._checked_evicted_s, evicted = now_s, self._rules.evicted_members()
        running = {self._members[slot]: slot for slot in _running_slots(states)}
        hung = {name: self._evicted_since_s.get(name, now_s) for name in evicted if name in running}
        for name in [name for name, since_s in hung.items() if now_s - since_s >= _EVICTED_EXIT_TIMEOUT_S]:
            self._launcher.signal_worker(running[name], signal.SIGKILL)
        self._evicted_since_s = hung

    def _scale_refusal(self, states: Sequence[WorkerState], *, is_ending: bool) -> str:
        """Return the reason why workers can neither come nor go now; empty if they can."""
        if is_ending or self._rules.restarts.is_over:
            return explain("run", got="at its end", expected="a run that trains", do="Start it again with more workers")
        running = self.running_members(states)
        if running and not self._rules.past_members(running).members:
            do = "Wait for the event generation_begun in its events.jsonl; scripts without prepare keep their workers"
            return explain("run", got="no member yet", expected="workers that have called ringweave.prepare", do=do)
        return ""

    def _fail_run(self, slot: int) -> None:
        """Mark the run as failed: all trained workers failed by themselves.

        Workers not restarted yet count for the outcome; workers that were given up before do not.
        """
        self._failed_slots.add(slot)
        self._excused_slots = {each for each in self._excused_slots if each not in self._rules.restarts.pending}
        self._abandoned_slots.clear()

    def _start_slot(self, slot: int, now_s: float) -> bool:
        """Start a slot and return whether that succeeded; if not, it is retried later."""
        worker = self._workers[slot]
        try:
            worker = self._rules.new_member(worker, self._members.get(slot, ""))
            spare = self._launcher.restart(worker, self._rules.slots.argv)
        except NoRestartError:
            self._fail_run(slot)
            self._excused_slots.discard(slot)
            return False
        except LaunchError as error:
            self._record_start_failure(worker, error, now_s)
            return False
        self._members[slot], self._started_s[slot] = worker.environ[environment.MEMBER], now_s
        for kept in (self._excused_slots, self._abandoned_slots, self._unstarted_slots):
            kept.discard(slot)
        self._recorder.worker_started(worker, self._launcher.pid(slot))
        if spare is not None:
            self._recorder.spare_used(worker, spare.process.pid, now_s - spare.ready_s)
        return True

    def _record_start_failure(self, worker: WorkerSpec, error: LaunchError, now_s: float) -> None:
        slot = worker.global_rank
        if self._rules.restarts.record_start_failure(slot, now_s) == "give up":
            self._abandoned_slots.add(slot)
            why = f"it could not be started, or died before it joined the others, too often. Last error: {error}"
            text = f"rank {slot} on node {worker.node} is given up: {why} The others continue without it"
            self._rules.notify_user(text)
        elif slot not in self._unstarted_slots:
            self._rules.notify_user(f"{error} It is tried again with growing delay; the others continue meanwhile")
        self._unstarted_slots.add(slot)


def _running_slots(states: Sequence[WorkerState]) -> set[int]:
    return {each.global_rank for each in states if not each.exit}


NUM_SEARCHED_LINES = 200
"""Number of last lines of a worker's log in which an exception is searched."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePlan:
    """Plan of the workers on one node of a job, or on all nodes of a run."""

    group: WorkerGroup
    environ: Mapping[str, str]
    """Environment that services inherit."""
    services: Sequence[ServiceProcesses] = ()
    """Services that run before the workers and beside them."""
    elastic: ElasticRules | None = None
    """Rules of restarts; None ends all with the first failed worker."""
    is_node_of_job: bool = False
    """The workers of other nodes are elsewhere: services stay for them. A failed service ends the workers at once, and
    so does a kill from outside, which is the first cause; no worker needs time to report which peer it blames."""


class NodeWorkers:
    """Workers of a plan with their services: started, watched, restarted and stopped.

    When `poll` has returned failures, no process of the workers is left.
    """

    def __init__(
        self,
        plan: NodePlan,
        launcher: LocalLauncher,
        recorder: RunRecorder,
        interrupts: list[signal.Signals] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the services, then the workers.

        Args:
            plan: Plan of the workers.
            launcher: Launcher that starts them.
            recorder: Recorder of the round; closed here only after an exception.
            interrupts: Grows with every SIGINT and SIGTERM that this process receives. Members of an elastic run always
                get SIGTERM, on which they finish their step and save their state.
            clock: Monotonic seconds; must be the launcher's.

        Raises:
            LaunchError: A process could not be started; none is left then.
        """
        self._plan, self._launcher, self._recorder, self._clock = plan, launcher, recorder, clock
        self._interrupts: list[signal.Signals] = [] if interrupts is None else interrupts
        workers = plan.elastic.slots.workers if plan.elastic else plan.group.workers
        self._nodes = {worker.global_rank: worker.node for worker in workers}
        is_elastic = plan.elastic is not None
        self._stop_policy = StopPolicy(
            StopTimeouts(interrupt_s=MEMBER_INTERRUPT_TIMEOUT_S) if is_elastic else StopTimeouts()
        )
        self._reported_exits: set[int] = set()
        self._stack = ExitStack()
        self.service_failure = ""
        """Failure of a service without which no worker can go on; empty if there is none."""
        self._start()
        self._slots = ElasticSlots(plan.elastic, launcher, recorder, self._failure_of, clock) if plan.elastic else None

    def _start(self) -> None:
        try:
            services = self._stack.enter_context(ExitStack())
            self._stack.enter_context(self._launcher)  # which may have begun already, and ends before the services
            for service in self._plan.services:
                services.enter_context(service.running(self._plan.environ))
            self._launcher.start(self._plan.group)
            self._recorder.workers_started(self._launcher.pid)
        except BaseException as error:
            self._abandon(error)
            raise

    def _abandon(self, error: BaseException) -> None:
        """Stop everything after an error, which is the cause recorded."""
        try:
            self._stack.close()
        finally:
            with suppress(OSError):
                self._recorder.close(outcome="failed", exit_code=1, cause=str(error) or type(error).__name__)

    def request_stop(self, signum: signal.Signals = signal.SIGTERM) -> None:
        """Request the end of the workers, later by force if needed; further calls have no effect."""
        if not self._interrupts:
            self._interrupts.append(signum)

    def running_members(self) -> tuple[str, ...]:
        """Return the member names of the processes that run; none if the workers are not elastic."""
        return self._slots.running_members(self._launcher.observe()) if self._slots else ()

    def wait(self, sleep: Callable[[float], None] = time.sleep) -> list[WorkerFailure]:
        """Wait until the workers have ended, and return the failures that decide the outcome."""
        try:
            while (failures := self.poll()) is None:
                sleep(SUPERVISION_INTERVAL_S)
        except BaseException as error:
            self._abandon(error)
            raise
        return failures

    def poll(self) -> list[WorkerFailure] | None:
        """Return the failures that decide the outcome, or None while a worker runs; it has to be called regularly."""
        for service in self._plan.services:
            service.restart_dead()
        states, now_s = self._launcher.observe(), self._clock()
        self._handle_exits(states, now_s)
        self._check_services()
        is_ending = bool(self._interrupts)
        started = self._slots.update(states, now_s, is_ending=is_ending) if self._slots else None
        if started is not None:
            self._reported_exits -= started
            return None  # the observed exits of those slots belong to processes that have a successor now
        is_pending = self._slots is not None and self._slots.has_pending(is_ending=is_ending)
        decisive = self._slots.decisive(states) if self._slots else states
        is_idle = self._slots is not None and self._slots.is_idle and not is_ending
        is_over = not (is_pending or is_idle) and self._stop_policy.is_over(states, now_s)
        if is_over and not self._are_services_needed(decisive, now_s):
            self._stack.close()
            failures = [failure for state in decisive if (failure := self._failure_of(state)) is not None]
            return self._slots.with_first_cause(failures) if self._slots else failures
        counting = self._slots.unexcused(states) if self._slots else states
        if self._plan.is_node_of_job and any(_was_killed_from_outside(state) for state in counting):
            self.request_stop(signal.SIGTERM if self._slots else signal.SIGKILL)
        # Members finish their step, but not without a service that each step needs.
        finishes_step = self._slots is not None and not self.service_failure
        interrupts = [signal.SIGTERM] * len(self._interrupts) if finishes_step else list(self._interrupts)
        signum = self._stop_policy.decide(counting, interrupts, now_s)
        if signum is not None:
            self._launcher.stop(signum)
        return None

    def _handle_exits(self, states: Sequence[WorkerState], now_s: float) -> None:
        for state in states:
            if state.exit and state.global_rank not in self._reported_exits:
                self._reported_exits.add(state.global_rank)
                self._recorder.worker_exited(state)
                if self._slots is not None:
                    self._slots.handle_exit(state, states, now_s)

    def _check_services(self) -> None:
        """End the workers of a job's node if a service has failed without which none can go on."""
        if self._plan.is_node_of_job and not self.service_failure:
            self.service_failure = next((each.failure_text for each in self._plan.services if each.failure_text), "")
            if self.service_failure:
                self.request_stop(signal.SIGKILL)

    def _are_services_needed(self, decisive: Sequence[WorkerState], now_s: float) -> bool:
        """Return whether this node succeeded and other nodes' workers still need a service."""
        all_well = all(state.exit and state.exit.is_success for state in decisive)
        if not self._plan.is_node_of_job or self._interrupts or not all_well:
            return False
        return any(service.is_needed(now_s) for service in self._plan.services)

    def _failure_of(self, state: WorkerState) -> WorkerFailure | None:
        if state.exit is None or state.exit.is_success:
            return None
        lines = self._launcher.logs(state.global_rank, NUM_SEARCHED_LINES)
        node = self._nodes[state.global_rank]
        return WorkerFailure(global_rank=state.global_rank, node=node, exit=state.exit, last_lines=tuple(lines))


def _was_killed_from_outside(state: WorkerState) -> bool:
    """Return whether it was killed from outside, which is always the first cause.

    SIGABRT does not count: C++ may have aborted because it lost a peer.
    """
    worker_exit = state.exit
    return worker_exit is not None and not worker_exit.was_stopped and worker_exit.signal_name not in (None, "SIGABRT")


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSetup:
    """Surroundings of a plan's workers: their program, files and place, and the process that supervises them."""

    program: WorkerProgram
    run_dir: RunDir
    record: Mapping[str, Any]
    """First content of run.json, see `RunRecorder`."""
    node_context: NodeContext
    console: OutputConsole
    open_credentials: Callable[[WorkerSpec], int | None]
    """Opens a descriptor of a worker's credentials, or returns None."""
    is_over: Callable[[], bool]
    """Returns whether no worker is wanted any more, so that nothing waits for the first spare."""
    warn: Callable[[str], object]
    """Gets a text for people about what is given up, or tried again."""
    num_spares: int = 0
    process_context: ProcessContext = field(default_factory=ProcessContext)
    """Children and descriptors of this process that are neither the workers' nor the services'."""

    def elastic_rules(
        self,
        slots: WorkerGroup,
        environ: Mapping[str, str],
        coordinators: Sequence[tuple[str, int]],
        query_credentials: Callable[[], Credentials],
        *,
        new_member: Callable[[WorkerSpec, str], WorkerSpec] = next_member,
        scale_requests: WorkerRequests | None = None,
        ends_without_services: bool = False,
    ) -> ElasticRules:
        """Return the rules of elastic workers, whose history is in the event log and known to the coordinators.

        Coordinators in a lab are not queried: this process cannot reach the lab's network.

        Args:
            slots: See `ElasticRules`, as for `new_member` and `scale_requests`.
            environ: Environment that workers inherit.
            coordinators: (host, port) of each coordinator.
            query_credentials: Returns the credentials with which they are queried.
            new_member: Returns a slot's worker as a new member.
            scale_requests: Requests for another number of workers.
            ends_without_services: See `WorkerRestarts`.
        """
        query = CoordinatorQuery(() if self.node_context.lab_name else coordinators, query_credentials)
        is_quick = self.num_spares or gains_from_fork_server(self.program, environ)
        return ElasticRules(
            slots=slots,
            past_members=MembershipHistory(self.run_dir.events, query.members).read,
            new_member=new_member,
            scale_requests=scale_requests,
            restarts=WorkerRestarts(
                first_delay_s=0.0 if is_quick else 1.0, ends_without_services=ends_without_services
            ),
            evicted_members=EvictionWatcher(self.run_dir.events).evicted_members,
            notify_user=self.warn,
            on_give_up=self._report_give_up,
        )

    def _report_give_up(self, failure: WorkerFailure, why: str) -> None:
        """Report that a worker is not restarted while the others go on."""
        log = path_from_here(self.run_dir.worker_log(failure.global_rank))
        self.warn(
            f"rank {failure.global_rank} on node {failure.node} is given up: {why}, "
            f"the last time it {failure.reason}. The others continue without it. See the cause in {log}"
        )


class PreparedLauncher:
    """Launcher of the workers in these surroundings, before the plan of the workers is known."""

    def __init__(self, setup: NodeSetup, environ: Mapping[str, str], *, is_elastic: bool) -> None:
        """`environ` is what workers inherit; `is_elastic`: they are replaced."""
        self.services: Sequence[ServiceProcesses] = ()
        """Services that run beside the workers, once they are known."""
        self.recorder: RunRecorder | None = None
        """Recorder of the round, once it has begun."""
        self._process_context = setup.process_context
        self.launcher = LocalLauncher(
            setup.run_dir.worker_log,
            setup.console,
            environ,
            wrap_command=setup.node_context.wrap_worker_command,
            open_credentials=setup.open_credentials,
            process_context=replace(setup.process_context, is_unrelated=self._is_unrelated),
        )
        rules = SpareRules(
            num_spares=setup.num_spares,
            is_elastic=is_elastic,
            is_over=setup.is_over,
            node_entry=setup.node_context.node_entry,
            on_ready=self._record_spare,
            on_give_up=setup.warn,
        )
        self.launcher.keep_spares(setup.program, rules)

    def _is_unrelated(self, process: psutil.Process) -> bool:
        is_service = any(process.pid in each.pids for each in self.services)
        return is_service or self._process_context.is_unrelated(process)

    def _record_spare(self, spare: Spare) -> None:
        if self.recorder is not None:
            self.recorder.spare_ready(spare.process.pid, spare.import_s)


def start_node(
    plan: NodePlan,
    setup: NodeSetup,
    interrupts: list[signal.Signals] | None = None,
    prepared: PreparedLauncher | None = None,
) -> tuple[NodeWorkers, RunRecorder]:
    """Start the workers of a plan with their services and spares.

    Args:
        plan: Plan of the workers.
        setup: Their surroundings.
        interrupts: As for `NodeWorkers`.
        prepared: Launcher that has begun the imports; None begins them now.

    Raises:
        LaunchError: A process could not be started; none is left then.
    """
    prepared = prepared or PreparedLauncher(setup, plan.environ, is_elastic=plan.elastic is not None)
    prepared.services = plan.services
    recorder = prepared.recorder = RunRecorder(setup.run_dir, plan.group, setup.record)
    return NodeWorkers(plan, prepared.launcher, recorder, interrupts), recorder
