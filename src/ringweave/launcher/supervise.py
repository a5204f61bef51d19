"""Supervision of workers: stop policy, elastic restarts, and requests for another number of workers.

A running elastic run is asked for another number of workers through its run directory:

```text
RUN_DIR/scale.json      {"request_id": "3f0c...", "workers": 4}; removed when the run has read it
RUN_DIR/events.jsonl    the answer: event `workers_scaled` with the same id
```
"""

import json
import os
import secrets
import signal
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ringweave import environment, telemetry
from ringweave.errors import LaunchError, UsageError, explain
from ringweave.files import file_io
from ringweave.launcher import run_dir as launcher_run_dir
from ringweave.launcher.launcher import Launcher, WorkerState
from ringweave.launcher.membership_history import PastMembers
from ringweave.launcher.outcome import WorkerFailure
from ringweave.launcher.processes import LocalLauncher
from ringweave.launcher.restarts import RestartDecision, SlotExit, WorkerRestartPolicy
from ringweave.launcher.run_dir import RunDir
from ringweave.launcher.workers import WorkerGroup, WorkerSpec
from ringweave.membership.settings import MemberBounds

_ANSWER_POLL_S = 0.05
_MAX_REQUEST_BYTES = 4096
"""Upper limit of a request; a longer one is ignored."""
_ANSWER_TIMEOUT_S = 30.0
"""A run polls for requests fifty times a second; one that does not answer for this long is stopped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleAnswer:
    """Answer of a run to a request for another number of workers."""

    workers: int
    """Requested number of workers."""
    before: int
    """Previously requested number of workers."""
    starting: Sequence[int] = ()
    """Ranks whose processes were started."""
    leaving: Sequence[int] = ()
    """Ranks that were asked to leave after their train step."""
    refused: str = ""
    """Reason of a refusal, in words; empty if the request was granted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleLimits:
    """Limits of the number of workers of a run."""

    bounds: MemberBounds
    num_slots: int
    """Number of worker slots of the run."""
    reason: str
    """Reason why the run has no more slots, for people."""

    def refusal(self, workers: int) -> str:
        """Return the reason why the run cannot have this many workers; empty if it can."""
        max_workers = min(self.bounds.max_members, self.num_slots)
        if self.bounds.min_members <= workers <= max_workers:
            return ""
        reason = (
            f"--elastic {self.bounds}"
            if max_workers == self.bounds.max_members or workers < self.bounds.min_members
            else self.reason
        )
        expected = f"{self.bounds.min_members} to {max_workers} ({reason})"
        return explain("--workers", got=workers, expected=expected, do="Ask for a number within the limits of the run")


class ScaleRequests:
    """Requests of users for another number of workers, read from the run directory."""

    def __init__(
        self,
        run_dir: RunDir,
        limits: ScaleLimits,
        workers: int,
        notify_user: Callable[[str], object] = lambda text: None,
    ) -> None:
        """Remove a request that was left for an earlier run in this directory.

        Args:
            run_dir: Run directory.
            limits: Limits of the run.
            workers: Initial number of workers.
            notify_user: Gets each granted answer as text.
        """
        self._path, self._limits, self._notify_user = run_dir.scale_request, limits, notify_user
        self._events = telemetry.EventLog(run_dir.events)
        self._request_id = ""
        self.workers = workers
        """Requested number of workers."""
        self._path.unlink(missing_ok=True)

    def take_request(self) -> int | None:
        """Return the requested number of workers, once for each request; None if there is no valid request."""
        try:
            with self._path.open("rb") as file:
                text = file.read(_MAX_REQUEST_BYTES + 1)
            self._path.unlink()
        except OSError:
            return None
        request = _parse_request(text)
        if request is None:
            return None
        self._request_id, workers = request
        return workers

    def refuse_request(self, workers: int, refusal: str) -> bool:
        """Refuse the last request if it is out of limits or comes at the wrong time; return whether it was refused."""
        refused = self._limits.refusal(workers) or refusal
        if refused:
            self._write_answer(ScaleAnswer(workers=self.workers, before=self.workers, refused=refused))
        return bool(refused)

    def grant_request(self, workers: int, *, starting: Sequence[int], leaving: Sequence[int]) -> None:
        """Answer the last request: it is done."""
        before, self.workers = self.workers, workers
        self._write_answer(ScaleAnswer(workers=workers, before=before, starting=starting, leaving=leaving))
        self._notify_user(
            describe_answer(ScaleAnswer(workers=workers, before=before, starting=starting, leaving=leaving))
        )

    def _write_answer(self, scale: ScaleAnswer) -> None:
        self._events.write(
            "workers_scaled",
            request_id=self._request_id,
            workers=scale.workers,
            before=scale.before,
            starting=list(scale.starting),
            leaving=list(scale.leaving),
            refused=scale.refused,
        )


def describe_answer(scale: ScaleAnswer) -> str:
    """Return an answer as text: `4 workers requested, 2 before; started: ranks 2, 3`."""
    changes = [("started", scale.starting), ("leaving after the train step", scale.leaving)]
    parts = [f"{what}: rank {', '.join(map(str, ranks))}" for what, ranks in changes if ranks]
    return "; ".join([f"{scale.workers} workers requested, {scale.before} before", *parts])


def request_workers(
    run_dir: RunDir,
    workers: int,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> ScaleAnswer:
    """Ask a run for another number of workers, and return its answer.

    Args:
        run_dir: Directory of an elastic run that is in progress.
        workers: Requested number of workers.
        clock: Monotonic seconds.
        sleep: Waits between two polls.

    Raises:
        UsageError: There is no such run, or it cannot have so many workers.
        LaunchError: The run does not answer.
    """
    _check_elastic(run_dir)
    request_id = secrets.token_hex(8)
    temporary = run_dir.scale_request.with_name(f".{run_dir.scale_request.name}.{os.getpid()}")
    temporary.write_text(json.dumps({"request_id": request_id, "workers": workers}) + "\n", encoding="utf-8")
    temporary.replace(run_dir.scale_request)
    until_s = clock() + _ANSWER_TIMEOUT_S
    while (answer := _find_answer(run_dir, request_id)) is None:
        _check_alive(run_dir)
        if clock() > until_s:
            run_dir.scale_request.unlink(missing_ok=True)
            do = "Check whether its ringweave run is stopped"
            got = f"no answer within {_ANSWER_TIMEOUT_S:g} s"
            raise LaunchError(explain("run", got=got, expected="one", do=do, where=str(run_dir.root)))
        sleep(_ANSWER_POLL_S)
    if answer.refused:
        raise UsageError(answer.refused)
    return answer


def _check_elastic(run_dir: RunDir) -> None:
    try:
        record = file_io.load_json(run_dir.run_json, launcher_run_dir.MAX_RUN_JSON_BYTES)
    except (OSError, ValueError) as error:
        do = "Give the directory that `ringweave run` printed"
        text = explain("run directory", got=str(run_dir.root), expected="one with a run.json", do=do)
        raise UsageError(text) from error
    _check_alive(run_dir)
    if isinstance(record, dict) and record.get("format") != launcher_run_dir.RUN_JSON_FORMAT:
        got, expected = record.get("format", "none"), str(launcher_run_dir.RUN_JSON_FORMAT)
        do = "Scale it with the ringweave that started it"
        raise UsageError(explain("format of run.json", got=got, expected=expected, do=do, where=str(run_dir.run_json)))
    if not isinstance(record, dict) or not record.get("elastic"):
        expected = "a run with --elastic MIN:MAX"
        raise UsageError(
            explain("run", got=str(run_dir.root), expected=expected, do="Start it again with ringweave run --elastic")
        )


def _check_alive(run_dir: RunDir) -> None:
    if not launcher_run_dir.is_run_dir_held(run_dir):
        do = "Start it again with the new number of workers"
        raise UsageError(explain("run", got=f"{run_dir.root}, which is over", expected="a current run", do=do))


def _find_answer(run_dir: RunDir, request_id: str) -> ScaleAnswer | None:
    for event in telemetry.read_events(run_dir.events):
        if event["kind"] == "workers_scaled" and event["request_id"] == request_id:
            fields: dict[str, Any] = {key: event[key] for key in ScaleAnswer.__slots__}
            return ScaleAnswer(**fields)
    return None


def _parse_request(text: bytes) -> tuple[str, int] | None:
    try:
        request = file_io.parse_json(text, _MAX_REQUEST_BYTES)
    except ValueError:
        return None
    if not isinstance(request, dict):
        return None
    request_id, workers = request.get("request_id"), request.get("workers")
    is_valid = isinstance(request_id, str) and isinstance(workers, int) and not isinstance(workers, bool)
    return (request_id, workers) if is_valid and len(request_id) <= 64 else None


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

        Args:
            states: Observed states of the workers.
            interrupts: All SIGINT and SIGTERM that the run itself has received so far.
            now_s: Current time.
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


def supervise_workers(
    launcher: Launcher,
    interrupts: Sequence[signal.Signals],
    *,
    on_exit: Callable[[WorkerState], None] = lambda state: None,
    on_poll: Callable[[], None] = lambda: None,
    timeouts: StopTimeouts | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Sequence[WorkerState]:
    """Wait until all workers have ended; stop them when one fails or the user wants it.

    Args:
        launcher: Launcher that has started the workers.
        interrupts: Grows with every SIGINT and SIGTERM that this process receives.
        on_exit: Called once for each worker when its end is observed.
        on_poll: Called at every poll, to keep other processes alive.
        timeouts: Timeouts before each harder measure.
        clock: Must be the launcher's.
        sleep: Waits between two polls.

    Returns:
        The last state of every worker.
    """
    policy = StopPolicy(timeouts or StopTimeouts())
    reported: set[int] = set()
    while True:
        on_poll()
        states = launcher.observe()
        now_s = clock()
        for state in states:
            if state.exit and state.global_rank not in reported:
                reported.add(state.global_rank)
                on_exit(state)
        if policy.is_over(states, now_s):
            return states
        signum = policy.decide(states, list(interrupts), now_s)
        if signum is not None:
            launcher.stop(signum)
        sleep(SUPERVISION_INTERVAL_S)


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
    return replace(
        worker, environ={**worker.environ, environment.MEMBER: _member_name(worker.global_rank, incarnation)}
    )


def _member_name(slot: int, incarnation: int) -> str:
    return f"{slot}.{incarnation}"


class ElasticSupervisor:
    """Supervises workers of an elastic run: restarts failed ones, and stops all when it cannot succeed."""

    # Longer than a constructor should be: it only keeps its arguments and the state of each slot.
    def __init__(  # noqa: PLR0913 - what it decides about, and what it asks, each once
        self,
        launcher: LocalLauncher,
        group: WorkerGroup,
        restarts: WorkerRestartPolicy,
        *,
        failure_of: Callable[[WorkerState], WorkerFailure | None],
        past_members: Callable[[Collection[str]], PastMembers],
        scale_requests: ScaleRequests | None = None,
        evicted_members: Callable[[], Collection[str]] = frozenset,
        notify_user: Callable[[str], object] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with workers that have been started.

        Args:
            launcher: Launcher that has started them.
            group: The started workers, followed by those that may be requested later.
            restarts: Restart policy of the slots.
            failure_of: Returns the failure of a worker.
            past_members: Returns the past members, in particular of these names; before the first member, any failed
                worker ends the run.
            scale_requests: Requests for another number of workers; None if there can be none.
            evicted_members: Returns the names of the members evicted so far.
            notify_user: Gets a text about each slot that cannot be started and is retried or given up.
            clock: Must be the launcher's.
        """
        self._launcher, self._group, self._restarts = launcher, group, restarts
        self._failure_of, self._past_members, self._clock = failure_of, past_members, clock
        self._scale_requests, self._wanted_workers = (
            scale_requests,
            scale_requests.workers if scale_requests else group.world_size,
        )
        self._stop_policy = StopPolicy(StopTimeouts(interrupt_s=MEMBER_INTERRUPT_TIMEOUT_S))
        self._notify_user, self._evicted_members, self._checked_evicted_s = notify_user, evicted_members, clock()
        self._evicted_since_s: dict[str, float] = {}
        self._started_s = dict.fromkeys(range(self._wanted_workers), clock())
        self._incarnations = dict.fromkeys(range(self._wanted_workers), 0)
        self._leave_deadline_s: dict[int, float] = {}
        self._reported_slots: set[int] = set()
        self._failed_slots: set[int] = set()
        self._excused_slots: set[int] = set()
        self._abandoned_slots: set[int] = set()
        self._unstarted_slots: set[int] = set()

    def run(
        self,
        interrupts: Sequence[signal.Signals],
        *,
        on_exit: Callable[[WorkerState], None],
        on_start: Callable[[WorkerSpec], None],
        on_give_up: Callable[[WorkerState, str], None],
        on_poll: Callable[[], None],
        sleep: Callable[[float], None] = time.sleep,
    ) -> Sequence[WorkerState]:
        """Supervise until no worker runs and none is to be started.

        Args:
            interrupts: Grows with every SIGINT and SIGTERM that this process receives. Workers always get SIGTERM, on
                which members finish their step and save their state.
            on_exit: Called for each worker whose end is observed.
            on_start: Called for each start and restart of a worker.
            on_give_up: Called with the reason for each worker that is not restarted while the others go on.
            on_poll: Called at every poll, to keep other processes alive.
            sleep: Waits between two polls.

        Returns:
            States of the workers that decide the outcome: those with which the run failed and those that ended well; if
            none ended well, also those that found the job over or were given up.
        """
        while True:
            on_poll()
            states, now_s = self._launcher.observe(), self._clock()
            for state in [each for each in states if each.exit and each.global_rank not in self._reported_slots]:
                self._reported_slots.add(state.global_rank)
                on_exit(state)
                if self._decide_restart(state, states, now_s) == "give up":
                    on_give_up(state, self._restarts.give_up_reason(state.global_rank))
            may_start = not interrupts and not self._failed_slots
            self._apply_scale_request(states, now_s, is_ending=not may_start)
            self._kill_hung_evicted(states, now_s)
            due = self._restarts.take_due(now_s) if may_start else ()
            for worker in self._start_due(due, now_s):
                on_start(worker)
            if due:
                continue  # the observed exits of those slots belong to processes that have a successor now
            is_pending = bool(self._restarts.pending) and may_start
            if not is_pending and self._stop_policy.is_over(states, now_s):
                return self._outcome_states(states)
            unexcused = [each for each in states if each.global_rank not in self._excused_slots]
            signum = self._stop_policy.decide(unexcused, [signal.SIGTERM] * len(interrupts), now_s)
            if signum is not None:
                self._launcher.stop(signum)
            sleep(SUPERVISION_INTERVAL_S)

    def _decide_restart(self, state: WorkerState, states: Sequence[WorkerState], now_s: float) -> RestartDecision:
        slot, failure = state.global_rank, self._failure_of(state)
        past_members = self._past_members(
            [self._current_member(each.global_rank) for each in states] if failure else ()
        )
        if not past_members.members:
            if failure is not None:
                self._failed_slots.add(slot)
            return "rest"
        if self._leave_deadline_s.pop(slot, None) is not None or slot >= self._wanted_workers:
            if slot < self._wanted_workers:  # it was requested again meanwhile
                self._restarts.start_now(slot, now_s)
            self._excused_slots.add(slot)
            return "rest"
        name, other_states = (
            self._current_member(slot),
            [each for each in states if each.global_rank not in (slot, *self._removed_slots)],
        )
        slot_exit = SlotExit(
            death=failure,
            lifetime_s=now_s - self._started_s[slot],
            was_member=name in past_members.members,
            has_trained=name in past_members.trained,
        )
        trains = {
            each.global_rank: not each.exit and self._current_member(each.global_rank) in past_members.trained
            for each in other_states
        }
        decision = self._restarts.decide(slot, slot_exit, now_s, trains)
        if decision == "fail":
            self._fail_run(slot)
        elif failure is not None:
            self._excused_slots.add(slot)
        if decision == "give up" or (decision == "rest" and not (slot_exit.is_finished or slot_exit.has_left)):
            self._abandoned_slots.add(slot)
        return decision

    @property
    def _removed_slots(self) -> range:
        """Slots that are not requested any more."""
        return range(self._wanted_workers, self._group.world_size)

    def _apply_scale_request(self, states: Sequence[WorkerState], now_s: float, *, is_ending: bool) -> None:
        """Apply a request for another number of workers, and kill workers that were asked to leave and did not."""
        for slot in [slot for slot, until_s in self._leave_deadline_s.items() if now_s > until_s]:
            self._launcher.signal_worker(slot, signal.SIGKILL)
            self._leave_deadline_s[slot] = float("inf")
        workers = self._scale_requests.take_request() if self._scale_requests else None
        if self._scale_requests is None or workers is None:
            return
        if self._scale_requests.refuse_request(workers, self._scale_refusal(states, is_ending=is_ending)):
            return
        running = _running_slots(states)
        leaving = sorted(slot for slot in running - self._leave_deadline_s.keys() if slot >= workers)
        absent = [slot for slot in range(workers) if slot not in running]
        self._wanted_workers = workers
        for slot in leaving:
            self._launcher.signal_worker(slot, signal.SIGTERM)
            self._leave_deadline_s[slot] = now_s + _LEAVE_TIMEOUT_S
        for slot in self._removed_slots:
            self._restarts.reset_slot(slot)
        self._unstarted_slots.difference_update(absent)
        for slot in absent:
            self._restarts.start_now(slot, now_s)
        self._scale_requests.grant_request(workers, starting=absent, leaving=leaving)

    def _kill_hung_evicted(self, states: Sequence[WorkerState], now_s: float) -> None:
        """Kill evicted processes that do not end: they would block their slots."""
        if now_s - self._checked_evicted_s < _EVICTED_CHECK_INTERVAL_S:
            return
        self._checked_evicted_s, evicted = now_s, self._evicted_members()
        running = {self._current_member(slot): slot for slot in _running_slots(states)}
        hung = {name: self._evicted_since_s.get(name, now_s) for name in evicted if name in running}
        for name in [name for name, since_s in hung.items() if now_s - since_s >= _EVICTED_EXIT_TIMEOUT_S]:
            self._launcher.signal_worker(running[name], signal.SIGKILL)
        self._evicted_since_s = hung

    def _scale_refusal(self, states: Sequence[WorkerState], *, is_ending: bool) -> str:
        """Return the reason why workers can neither come nor go now; empty if they can."""
        if is_ending or self._restarts.is_over:
            return explain("run", got="at its end", expected="a run that trains", do="Start it again with more workers")
        if not self._past_members([self._current_member(slot) for slot in _running_slots(states)]).members:
            do = "Wait for the event generation_begun in its events.jsonl; scripts without prepare keep their workers"
            return explain("run", got="no member yet", expected="workers that have called ringweave.prepare", do=do)
        return ""

    def _fail_run(self, slot: int) -> None:
        """Mark the run as failed: all trained workers failed by themselves.

        Workers not restarted yet count for the outcome; workers that were given up before do not.
        """
        self._failed_slots.add(slot)
        self._excused_slots = {each for each in self._excused_slots if each not in self._restarts.pending}
        self._abandoned_slots.clear()

    def _current_member(self, slot: int) -> str:
        return _member_name(slot, self._incarnations[slot])

    def _outcome_states(self, states: Sequence[WorkerState]) -> Sequence[WorkerState]:
        """Return the states that decide the outcome.

        Without a good end, a job that is over has failed, whichever slots were excused.
        """
        left_out = self._excused_slots
        if not any(state.exit and state.exit.is_success for state in states):
            left_out = left_out - self._abandoned_slots
        return [state for state in states if state.global_rank not in left_out]

    def _start_due(self, due: Iterable[int], now_s: float) -> list[WorkerSpec]:
        """Start these slots and return the workers that could be started; the others are retried later."""
        started = []
        for slot in due:
            incarnation = self._incarnations.get(slot, -1) + 1
            worker = with_member_name(self._group.workers[slot], incarnation)
            try:
                self._launcher.restart(worker, self._group.argv)
            except LaunchError as error:
                self._record_start_failure(worker, error, now_s)
                continue
            self._incarnations[slot], self._started_s[slot] = incarnation, now_s
            for kept in (self._reported_slots, self._excused_slots, self._abandoned_slots, self._unstarted_slots):
                kept.discard(slot)
            started.append(worker)
        return started

    def _record_start_failure(self, worker: WorkerSpec, error: LaunchError, now_s: float) -> None:
        slot = worker.global_rank
        if self._restarts.record_start_failure(slot, now_s) == "give up":
            self._abandoned_slots.add(slot)
            why = f"it could not be started, or died before it joined the others, too often. Last error: {error}"
            self._notify_user(f"rank {slot} on node {worker.node} is given up: {why} The others continue without it")
        elif slot not in self._unstarted_slots:
            self._notify_user(f"{error} It is tried again with growing delay; the others continue meanwhile")
        self._unstarted_slots.add(slot)


def _running_slots(states: Sequence[WorkerState]) -> set[int]:
    return {each.global_rank for each in states if not each.exit}
