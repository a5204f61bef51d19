"""A chaos session: a job in a lab, a script of faults, and the clock that applies them."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ringweave import lab, telemetry
from ringweave.errors import LaunchError, explain
from ringweave.lab import tools
from ringweave.telemetry import Event, EventLog, EventTail
from ringweave.topology import Cluster
from ringweave_bench.chaos import chaos_job, chaos_report, clock_shift, fault_injector, job_history, kill_requests
from ringweave_bench.chaos.chaos_job import ChaosJob
from ringweave_bench.chaos.chaos_report import ChaosReport
from ringweave_bench.chaos.fault_injector import FaultInjector, LabFaultInjector, LabProcessTable
from ringweave_bench.chaos.fault_script import Fault, FaultTargets

POLL_S = 0.02
MAX_FAILED_STARTS = 3
"""Attempts that may end before the job has made any train step."""
USAGE_EXIT_CODE = 2
"""Exit code of commands with wrong usage; another attempt would end with it as well."""
_NUM_LOG_LINES = 15


@dataclass(frozen=True, kw_only=True, slots=True)
class ChaosPlan:
    """Settings of a chaos session."""

    system: str
    script: Sequence[str]
    """Path of the script, and its arguments; `{disk}` in them is a folder of the job's own."""
    faults: Sequence[Fault]
    out: Path
    options: Sequence[str] = ()
    """Options of `ringweave lab run` or torchrun."""
    until_s: float = 600.0
    """Seconds after the first train step at which the job is stopped, if it has not ended."""
    restart_s: float = 0.0
    """Seconds between the end of a failed attempt and the next one."""
    start_s: float = 300.0
    """Seconds within which the job must make a train step."""


class JobAttempt(Protocol):
    """An attempt of the job, as the session sees it."""

    def exit_code(self) -> int | None:
        """Return its exit code; None while it runs."""
        ...

    def stop(self) -> None: ...


@dataclass(kw_only=True, slots=True)
class FaultTimetable:
    """Timetable of faults: begun in order, each lifted in its time. Pure."""

    waiting: list[Fault]
    active: list[tuple[float, Fault, Callable[[], None]]] = field(default_factory=list)

    def due(self, now_s: float) -> list[Fault]:
        """Return the faults that are due and have not begun."""
        return [fault for fault in self.waiting if fault.at_s <= now_s]

    def mark_begun(self, fault: Fault, now_s: float, lift: Callable[[], None]) -> None:
        """Record that a fault has begun; `lift` ends it when its duration is over."""
        self.waiting.remove(fault)
        self.active.append((now_s + fault.lasts_s, fault, lift))

    def take_expired(self, now_s: float) -> list[tuple[Fault, Callable[[], None]]]:
        """Remove and return the faults to be lifted now."""
        found = [(fault, lift) for end_s, fault, lift in self.active if end_s <= now_s]
        self.active = [each for each in self.active if each[0] > now_s]
        return found


def run_chaos(plan: ChaosPlan, cluster: Cluster, progress: Callable[[str], None]) -> ChaosReport:
    """Bring the cluster up, run the job under the faults, take everything down again.

    Raises:
        UsageError: The cluster cannot be a lab.
        LabError: This machine does not support it.
        LaunchError: The job made no train step, or its command has wrong usage.
    """
    tools.raise_lab_problems(lab.lab_problems())
    plan.out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        stack.enter_context(signals_as_interrupt())
        disk = stack.enter_context(fault_injector.mount_small_disk(plan.out / "disk"))
        place = lab.up(cluster, f"chaos-{os.getpid()}", progress=lambda what: progress(f"{what} ..."))
        stack.callback(lab.down, place.name)
        script = [word.replace("{disk}", str(disk)) for word in plan.script]
        events = plan.out / "events.jsonl"
        injector = LabFaultInjector(place, disk, events, LabProcessTable(place, events))
        extra_environ = {
            kill_requests.CLOCK_OFFSET_VARIABLE: repr(time.time() - time.monotonic()),
            **clock_shift.clock_environ(plan.faults, place, plan.out),
        }

        def start() -> ChaosJob:
            return ChaosJob(
                chaos_job.job_commands(plan.system, place, script, plan.out, plan.options, extra_environ),
                plan.out / "job.log",
            )

        play_faults(plan, start, injector, EventLog(events), progress)
    return judge_events(list(telemetry.read_events(events)), cluster, plan.faults, plan.restart_s)


def judge_events(
    events: Sequence[Event],
    cluster: Cluster,
    wanted: Sequence[Fault],
    restart_s: float,
    samples_per_step: int | None = None,
) -> ChaosReport:
    """Report the cost of the requested faults to a job on a cluster."""
    nodes = cluster.nodes
    return chaos_report.build_report(
        job_history.correct_times(events),
        wanted=wanted,
        num_workers=sum(node.num_devices for node in nodes),
        workers_on={node.name: node.num_devices for node in nodes},
        restart_s=restart_s,
        samples_per_step=samples_per_step,
    )


def play_faults(
    plan: ChaosPlan,
    start: Callable[[], JobAttempt],
    injector: FaultInjector,
    log: EventLog,
    progress: Callable[[str], None],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Run the job to its end, or to the end of its time, while faults happen.

    Raises:
        LaunchError: The job made no train step in its time, or its command has wrong usage.
    """
    table, tail, begin_s = FaultTimetable(waiting=list(plan.faults)), EventTail(log.path), None
    attempts, deadline_s, outcome = _AttemptLoop(plan, start, progress), clock() + plan.start_s, "failed"
    try:
        while True:
            now_s = clock()
            if begin_s is None and any(event["kind"] == "train_step_done" for event in tail.read_new()):
                begin_s = now_s
            if begin_s is None and now_s > deadline_s:
                raise LaunchError(_no_step_text(plan, f"no train step after {plan.start_s:g} s"))
            since_s = now_s - begin_s if begin_s is not None else -1.0
            if since_s >= plan.until_s:
                outcome = "stopped"
                return
            _apply_due_faults(table, since_s, injector, log, progress)
            if attempts.poll(now_s, has_stepped=begin_s is not None):
                outcome = "done"
                return
            sleep(POLL_S)
    finally:
        log.write("chaos_ended", outcome=outcome)
        for fault, lift in table.take_expired(float("inf")):
            _lift_fault(fault, lift, log)
        attempts.stop()


class _AttemptLoop:
    """Starts the job, and restarts it when it fails."""

    def __init__(self, plan: ChaosPlan, start: Callable[[], JobAttempt], progress: Callable[[str], None]) -> None:
        self._plan, self._start, self._progress = plan, start, progress
        self._running: JobAttempt | None = start()
        self._ready_s, self._num_failed = 0.0, 0

    def poll(self, now_s: float, *, has_stepped: bool) -> bool:
        """Start the next attempt if it is time; return True if the job is done.

        Raises:
            LaunchError: Every attempt fails.
        """
        if self._running is None:
            if now_s >= self._ready_s:
                self._running = self._start()
            return False
        code = self._running.exit_code()
        if code is None or code == 0:
            return code == 0
        self._running, self._ready_s = None, now_s + self._plan.restart_s
        self._num_failed += 1
        if code == USAGE_EXIT_CODE or (not has_stepped and self._num_failed == MAX_FAILED_STARTS):
            often = "" if self._num_failed == 1 else f" {self._num_failed} times"
            got = f"it has ended with {code}{often}" + ("" if has_stepped else " before any train step")
            raise LaunchError(_no_step_text(self._plan, got))
        self._progress(f"the attempt ended with {code}; the next one begins after {self._plan.restart_s:g} s")
        return False

    def stop(self) -> None:
        if self._running is not None:
            self._running.stop()


@contextmanager
def signals_as_interrupt() -> Iterator[None]:
    """Make SIGTERM and SIGHUP end the block as Ctrl-C does, so that nothing of the lab is left."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = {how: signal.signal(how, interrupt) for how in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for how, handler in before.items():
            signal.signal(how, handler)


def cluster_targets(cluster: Cluster) -> FaultTargets:
    """Return the possible targets of faults in a cluster."""
    return FaultTargets(
        num_workers=sum(node.num_devices for node in cluster.nodes),
        nodes=[node.name for node in cluster.nodes],
        link_rates={link.name: link.bandwidth_bytes_per_s for link in cluster.links()},
    )


def _apply_due_faults(
    table: FaultTimetable, since_s: float, injector: FaultInjector, log: EventLog, progress: Callable[[str], None]
) -> None:
    for fault, lift in table.take_expired(since_s):
        _lift_fault(fault, lift, log)
    for fault in table.due(since_s):
        done = injector.inject(fault)
        if done is not None:
            target, lift = done
            table.mark_begun(fault, since_s, lift)
            log.write("fault_begun", fault=str(fault), target=target)
            progress(f"{since_s:.1f} s: {fault} ({target})")


def _lift_fault(fault: Fault, lift: Callable[[], None], log: EventLog) -> None:
    lift()
    log.write("fault_lifted", fault=str(fault))


def _no_step_text(plan: ChaosPlan, got: str) -> str:
    """Return the error's text, with the last lines of the job's log."""
    log = plan.out / "job.log"
    do = "Run it without chaos first; the job's own output is in job.log"
    text = explain("job under chaos", got=got, expected="train steps", do=do, where=str(log))
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    return "\n".join([text, *(f"    {line}" for line in lines[-_NUM_LOG_LINES:])])
