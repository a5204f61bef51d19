"""A job in a lab, a script of faults, and the clock between them."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ringweave import lab, telemetry
from ringweave.benchmarks.chaos import accounts, times
from ringweave.benchmarks.chaos.accounts import Report
from ringweave.benchmarks.chaos.doing import clocks, hands, jobs, notes
from ringweave.benchmarks.chaos.doing.crews import LabCrew
from ringweave.benchmarks.chaos.doing.hands import Hands, LabHands
from ringweave.benchmarks.chaos.doing.jobs import Job
from ringweave.benchmarks.chaos.faults import Fault, Targets
from ringweave.errors import LaunchError, explain
from ringweave.lab import tools
from ringweave.telemetry import Event, EventLog, Tail
from ringweave.topology import Cluster

POLL_S = 0.02
MOST_TRIES = 3
"""So many attempts may end before the job has made any train step."""
WRONG_USAGE = 2
"""The exit code of commands that were not understood: another attempt would end with it as well."""
_LAST_LINES = 15


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is to happen."""

    system: str
    script: Sequence[str]
    """Path of the script, and its arguments; `{disk}` in them is a folder of the job's own."""
    faults: Sequence[Fault]
    out: Path
    options: Sequence[str] = ()
    """Of `ringweave lab run`, or torchrun."""
    until_s: float = 600.0
    """Seconds after the first train step at which the job is stopped, if it has not ended."""
    restart_s: float = 0.0
    """Seconds between the end of a failed attempt and the next one."""
    start_s: float = 300.0
    """The job must have made a train step after so many seconds."""


class Running(Protocol):
    """What is needed of an attempt."""

    def ended(self) -> int | None:
        """Its exit code."""
        ...

    def stop(self) -> None:
        """End it."""
        ...


@dataclass(kw_only=True, slots=True)
class Timetable:
    """Which fault is due: begun in order, each taken back in its time. Pure."""

    waiting: list[Fault]
    lifting: list[tuple[float, Fault, Callable[[], None]]] = field(default_factory=list)

    def due(self, now_s: float) -> list[Fault]:
        """Those whose time has come, and that were not begun."""
        return [fault for fault in self.waiting if fault.at_s <= now_s]

    def begun(self, fault: Fault, now_s: float, lift: Callable[[], None]) -> None:
        """It happens; it is to be taken back when it has lasted as long as it should."""
        self.waiting.remove(fault)
        self.lifting.append((now_s + fault.lasts_s, fault, lift))

    def over(self, now_s: float) -> list[tuple[Fault, Callable[[], None]]]:
        """Those that are to be taken back now."""
        found = [(fault, lift) for end_s, fault, lift in self.lifting if end_s <= now_s]
        self.lifting = [each for each in self.lifting if each[0] > now_s]
        return found


def run(plan: Plan, cluster: Cluster, progress: Callable[[str], None]) -> Report:
    """Bring the cluster up, run the job under the faults, take all down again.

    Raises:
        UsageError: The cluster cannot be a lab.
        LabError: This machine cannot have it.
        LaunchError: The job made no train step, or was not understood.
    """
    tools.refuse_problems(lab.problems())
    plan.out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        stack.enter_context(ended_cleanly())
        disk = stack.enter_context(hands.small_disk(plan.out / "disk"))
        place = lab.up(cluster, f"chaos-{os.getpid()}", progress=lambda what: progress(f"{what} ..."))
        stack.callback(lab.down, place.name)
        script = [word.replace("{disk}", str(disk)) for word in plan.script]
        events = plan.out / "events.jsonl"
        does = LabHands(place, disk, events, LabCrew(place, events))
        told = {notes.OFFSET: repr(time.time() - time.monotonic()), **clocks.environ(plan.faults, place, plan.out)}

        def start() -> Job:
            return Job(jobs.commands(plan.system, place, script, plan.out, plan.options, told), plan.out / "job.log")

        play(plan, start, does, EventLog(events), progress)
    return judge(list(telemetry.read(events)), cluster, plan.faults, plan.restart_s)


def judge(
    events: Sequence[Event],
    cluster: Cluster,
    wanted: Sequence[Fault],
    restart_s: float,
    samples_per_step: int | None = None,
) -> Report:
    """What the faults that were wanted cost a job on a cluster."""
    nodes = cluster.nodes
    return accounts.report(
        times.steady(events),
        wanted=wanted,
        num_workers=sum(node.num_devices for node in nodes),
        workers_on={node.name: node.num_devices for node in nodes},
        restart_s=restart_s,
        samples_per_step=samples_per_step,
    )


def play(
    plan: Plan,
    start: Callable[[], Running],
    does: Hands,
    log: EventLog,
    progress: Callable[[str], None],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Run the job to its end, or to the end of its time, while faults happen.

    Raises:
        LaunchError: The job made no train step in its time, or was not understood.
    """
    table, tail, begin_s = Timetable(waiting=list(plan.faults)), Tail(log.path), None
    attempts, deadline_s, outcome = _Attempts(plan, start, progress), clock() + plan.start_s, "failed"
    try:
        while True:
            now_s = clock()
            if begin_s is None and any(event["kind"] == "train_step_done" for event in tail.new()):
                begin_s = now_s
            if begin_s is None and now_s > deadline_s:
                raise LaunchError(_no_step(plan, f"no train step after {plan.start_s:g} s"))
            since_s = now_s - begin_s if begin_s is not None else -1.0
            if since_s >= plan.until_s:
                outcome = "stopped"
                return
            _act(table, since_s, does, log, progress)
            if attempts.look(now_s, has_stepped=begin_s is not None):
                outcome = "done"
                return
            sleep(POLL_S)
    finally:
        log.write("chaos_ended", outcome=outcome)
        for fault, lift in table.over(float("inf")):
            _lift(fault, lift, log)
        attempts.stop()


class _Attempts:
    """Starts the job, and starts it again when it fails."""

    def __init__(self, plan: Plan, start: Callable[[], Running], progress: Callable[[str], None]) -> None:
        self._plan, self._start, self._progress = plan, start, progress
        self._running: Running | None = start()
        self._ready_s, self._num_failed = 0.0, 0

    def look(self, now_s: float, *, has_stepped: bool) -> bool:
        """Go on; whether the job is done.

        Raises:
            LaunchError: It fails whatever is tried.
        """
        if self._running is None:
            if now_s >= self._ready_s:
                self._running = self._start()
            return False
        code = self._running.ended()
        if code is None or code == 0:
            return code == 0
        self._running, self._ready_s = None, now_s + self._plan.restart_s
        self._num_failed += 1
        if code == WRONG_USAGE or (not has_stepped and self._num_failed == MOST_TRIES):
            often = "" if self._num_failed == 1 else f" {self._num_failed} times"
            got = f"it has ended with {code}{often}" + ("" if has_stepped else " before any train step")
            raise LaunchError(_no_step(self._plan, got))
        self._progress(f"the attempt ended with {code}; the next one begins after {self._plan.restart_s:g} s")
        return False

    def stop(self) -> None:
        """End what runs."""
        if self._running is not None:
            self._running.stop()


@contextmanager
def ended_cleanly() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does, so that nothing of the lab is left."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = {how: signal.signal(how, interrupt) for how in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for how, handler in before.items():
            signal.signal(how, handler)


def targets(cluster: Cluster) -> Targets:
    """What there is to hit in a cluster."""
    return Targets(
        num_workers=sum(node.num_devices for node in cluster.nodes),
        nodes=[node.name for node in cluster.nodes],
        link_rates={link.name: link.bandwidth_bytes_per_s for link in cluster.links()},
    )


def _act(table: Timetable, since_s: float, does: Hands, log: EventLog, progress: Callable[[str], None]) -> None:
    for fault, lift in table.over(since_s):
        _lift(fault, lift, log)
    for fault in table.due(since_s):
        done = does.begin(fault)
        if done is not None:
            target, lift = done
            table.begun(fault, since_s, lift)
            log.write("fault_begun", fault=str(fault), target=target)
            progress(f"{since_s:.1f} s: {fault} ({target})")


def _lift(fault: Fault, lift: Callable[[], None], log: EventLog) -> None:
    lift()
    log.write("fault_lifted", fault=str(fault))


def _no_step(plan: Plan, got: str) -> str:
    """The error's text, and the last words of the job."""
    log = plan.out / "job.log"
    do = "Run it without chaos first; the job's own output is in job.log"
    text = explain("job under chaos", got=got, expected="train steps", do=do, where=str(log))
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    return "\n".join([text, *(f"    {line}" for line in lines[-_LAST_LINES:])])
