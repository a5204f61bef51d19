"""Outcome of a run: its recorder, the first cause of a failure, the exit code and the report for the user."""

import re
import signal
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from ringweave import environment, telemetry
from ringweave.launcher import run_dir as launcher_run_dir
from ringweave.launcher.run_dir import RunDir
from ringweave.launcher.workers import WorkerExit, WorkerGroup, WorkerSpec, WorkerState


class RunRecorder:
    """Writes the event log and run.json of one attempt; opens both on construction."""

    def __init__(self, run_dir: RunDir, group: WorkerGroup, record: Mapping[str, Any]) -> None:
        """`record` is the first content of run.json: at least `attempt`, `command`, `world_size` and `cluster.name`."""
        self._run_dir = run_dir
        self._nodes = {worker.global_rank: worker for worker in group.workers}
        self._events = telemetry.EventLog(run_dir.events)
        self._started_s = time.monotonic()
        self.training: dict[str, Any] | None = None
        """Summary of the training for run.json; None before `close`, and where no script called `ringweave.prepare`."""
        self._events.write(
            "run_started",
            format=telemetry.EVENTS_FORMAT,
            attempt=record["attempt"],
            command=record["command"],
            cluster=record["cluster"]["name"],
            world_size=record["world_size"],
            cluster_text=_cluster_text(run_dir, group),
        )
        unknown = {"ended": None, "wall_s": None, "exit_code": None, "outcome": "running", "cause": None}
        first = {"format": launcher_run_dir.RUN_JSON_FORMAT, **record, "started": _local_time(), **unknown}
        launcher_run_dir.update_run_json(run_dir.run_json, first)

    def workers_started(self, pid_of: Callable[[int], int]) -> None:
        """Record the start of all workers; `pid_of` maps a global rank to its process id."""
        for worker in list(self._nodes.values()):
            self.worker_started(worker, pid_of(worker.global_rank))

    def worker_started(self, worker: WorkerSpec, pid: int) -> None:
        """Record the start of one worker: a first start, a restart, or an additional worker."""
        self._nodes[worker.global_rank] = worker
        self._events.write(
            "worker_started", rank=worker.global_rank, node=worker.node, local_rank=worker.local_rank, pid=pid
        )

    def spare_ready(self, pid: int, import_s: float) -> None:
        """Record that a spare waits for a slot, after imports of so many seconds."""
        self._events.write("spare_ready", pid=pid, import_s=import_s)

    def spare_used(self, worker: WorkerSpec, pid: int, waited_s: float) -> None:
        """Record that a spare has become a worker, after it had waited for so long."""
        member = worker.environ.get(environment.MEMBER, "")
        self._events.write("spare_used", rank=worker.global_rank, member=member, pid=pid, waited_s=round(waited_s, 3))

    def worker_exited(self, state: WorkerState) -> None:
        """Record the end of a worker."""
        if state.exit is None:
            return
        self._events.write(
            "worker_exited",
            rank=state.global_rank,
            node=self._nodes[state.global_rank].node,
            exit_code=state.exit.exit_code,
            signal=state.exit.signal_name,
            stopped=state.exit.was_stopped,
        )

    def close(self, *, outcome: str, exit_code: int, cause: str | None) -> float:
        """Record the end of the attempt; return its seconds."""
        wall_s = round(time.monotonic() - self._started_s, 3)
        summary = end_attempt(self._run_dir, wall_s=wall_s, outcome=outcome, exit_code=exit_code, cause=cause)
        self.training = summary["training"]
        return wall_s


def _cluster_text(run_dir: RunDir, group: WorkerGroup) -> str:
    """Return the cluster file for the event log, by which other machines know the run; empty if it is too long.

    Of the nodes of a job the one with rank 0 has it for all. Under torchrun the first rank calls, with no workers.
    """
    has_first = not group.workers or any(worker.global_rank == 0 for worker in group.workers)
    text = run_dir.cluster_file.read_text(encoding="utf-8") if has_first and run_dir.cluster_file.exists() else ""
    return text if len(text) <= telemetry.MAX_CLUSTER_TEXT else ""


def end_attempt(run_dir: RunDir, *, wall_s: float, outcome: str, exit_code: int, cause: str | None) -> dict[str, Any]:
    """Write the end of an attempt to the event log and run.json; return the summary of its events."""
    telemetry.EventLog(run_dir.events).write(
        "run_ended", outcome=outcome, exit_code=exit_code, wall_s=wall_s, cause=cause
    )
    ended = {"ended": _local_time(), "wall_s": wall_s, "exit_code": exit_code, "outcome": outcome, "cause": cause}
    summary = launcher_run_dir.summarize_events(telemetry.read_last_attempt(run_dir.events))
    launcher_run_dir.update_run_json(run_dir.run_json, ended | summary)
    return summary


def _local_time() -> str:
    return datetime.now(tz=UTC).astimezone().isoformat(timespec="seconds")


_TRACEBACK = "Traceback (most recent call last):"
_TORCH_PREFIX = re.compile(r"\[rank\d+\]: ?")
"""torch.distributed prefixes each line of a traceback with it once there is a process group."""
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Warning|Exit|Failure|Group|Timeout|Refused)\b")
_ANY_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?::\s|$)")
_PEER_ERROR = re.compile(
    r"""PeerError | BrokenPipe | Broken\ pipe | Connection(?:Reset|Refused|Aborted)
    | [Cc]onnection\ (?:was\ )?(?:closed|reset|refused|aborted) | [Ss]ocket\ (?:closed|[Tt]imeout)
    | [Rr]emote\ process\ exited | ncclRemoteError | got\ 0\ bytes | recvValue\ failed | sendBytes\ failed
    | heart\ ?beat | Timed\ out\ waiting | client\ socket\ has\ (?:failed|timed\ out)""",
    re.VERBOSE,
)
_CONSEQUENCE = re.compile(r"(?:[\w.]+\.)?(?:MembershipError|CapacityError): ")
"""Exceptions of a worker that has lost its job, or its fellow workers, to the failure of another one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFailure:
    """A worker that ended badly, and the last lines of its log."""

    global_rank: int
    node: str
    exit: WorkerExit
    last_lines: tuple[str, ...] = ()

    @property
    def exception(self) -> str | None:
        """Exception that ended it, `ValueError: no such file`, if its log has one."""
        return find_exception(self.last_lines)

    @property
    def reason(self) -> str:
        """Reason of its end, in words."""
        if self.exit.signal_name:
            return f"was killed by {self.exit.signal_name}"
        return f"raised {self.exception}" if self.exception else f"ended with exit code {self.exit.exit_code}"

    @property
    def is_peer_error(self) -> bool:
        """True if its exception complains of a peer.

        After SIGABRT (C++ aborts the process) any of its last lines counts.
        """
        if self.exit.signal_name == "SIGABRT":
            return any(_PEER_ERROR.search(line) for line in self.last_lines)
        return self.exit.signal_name is None and bool(_PEER_ERROR.search(self.exception or ""))

    @property
    def is_consequence(self) -> bool:
        """True if its exception is one that follows the failure of another worker: of a peer, membership, capacity."""
        return self.is_peer_error or (self.exit.signal_name is None and bool(_CONSEQUENCE.match(self.exception or "")))


def first_cause(failures: Sequence[WorkerFailure]) -> WorkerFailure | None:
    """Return the failure that most likely caused the others; None if ringweave itself ended all of them.

    A failure by a signal comes before one by an exception. One that follows the failure of another worker comes last
    (`is_consequence`). Then the earliest counts, then the lowest rank.
    """
    candidates = [failure for failure in failures if not failure.exit.was_stopped and not failure.exit.is_success]
    return min(candidates, key=_cause_order, default=None)


def find_exception(lines: Sequence[str]) -> str | None:
    """Return the last exception that Python reported in these lines, or None."""
    lines = [_TORCH_PREFIX.sub("", line, count=1) for line in lines]
    starts = [index for index, line in enumerate(lines) if line.strip().endswith(_TRACEBACK)]
    if starts:
        after = [line for line in lines[starts[-1] + 1 :] if _EXCEPTION.match(line)]
        other = [line for line in lines[starts[-1] + 1 :] if _ANY_EXCEPTION.match(line)]
        return next(iter(after or other), None)
    return next((line for line in reversed(lines) if _EXCEPTION.match(line)), None)


def _cause_order(failure: WorkerFailure) -> tuple[int, float, int]:
    kind_order = 0 if failure.exit.signal_name else 1
    return 2 if failure.is_consequence else kind_order, failure.exit.time_s, failure.global_rank


RunOutcome = Literal["done", "failed", "interrupted"]
NUM_REPORTED_LINES = 15


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """Result of a run: outcome, failed workers, received signals."""

    outcome: RunOutcome
    deaths: tuple[WorkerFailure, ...]
    """Every worker that ended badly, by rank."""
    interrupts: tuple[signal.Signals, ...]
    """Signals that the run itself received."""

    @property
    def exit_code(self) -> int:
        return 0 if self.outcome == "done" else 1

    @property
    def cause(self) -> str | None:
        """Reason of a bad end, in one line; None after a good one."""
        if self.outcome == "interrupted":
            return f"interrupted by {self.interrupts[0].name}"
        first = first_cause(self.deaths)
        return f"rank {first.global_rank} on node {first.node} {first.reason}" if first else None


def conclude_run(failures: Sequence[WorkerFailure], interrupts: Sequence[signal.Signals]) -> RunResult:
    """Decide the result of a run from its failed workers and the signals that it received.

    A worker that died by the same signal that interrupted the run is no cause: both came from the same sender.
    """
    first = first_cause(failures)
    names = {signum.name for signum in interrupts}
    if first is not None and first.exit.signal_name not in names:
        outcome: RunOutcome = "failed"
    else:
        outcome = "interrupted" if interrupts else "done"
    return RunResult(outcome=outcome, deaths=tuple(failures), interrupts=tuple(interrupts))


def run_failure_text(result: RunResult, *, wall_s: float, log_pattern: str) -> str:
    """Return the report for a user, first cause on top; empty if the run succeeded.

    `log_pattern`: path of a log file, with `{rank}` in place of the rank.
    """
    if result.outcome == "done":
        return ""
    first = first_cause(result.deaths)
    if result.outcome == "interrupted" or first is None:
        return f"ringweave: interrupted after {wall_s:.1f} s by {result.interrupts[0].name}.\n"
    lines = [
        f"ringweave: failed after {wall_s:.1f} s: {result.cause}.",
        *_crash_hint(first),
        f"Last lines of {log_pattern.format(rank=first.global_rank)}:",
    ]
    lines += [f"    {line}" for line in first.last_lines[-NUM_REPORTED_LINES:]] or ["    (it printed nothing)"]
    lines += _other_failures(result.deaths, first)
    return "\n".join(lines) + "\n"


_GLOO_SIZES = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")
"""Text with which Gloo ends a process that gets more bytes than it expects (seen in torch 2.13)."""


def _crash_hint(first: WorkerFailure) -> list[str]:
    if first.exit.signal_name == "SIGKILL":
        return ["If it was not killed on purpose, the machine ran out of memory: see `dmesg | grep -i oom`."]
    if first.exit.signal_name in ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL"):
        return ["It crashed in native code: run with PYTHONFAULTHANDLER=1 to see where."]
    found = next((match for line in reversed(first.last_lines) if (match := _GLOO_SIZES.search(line))), None)
    if found is not None:
        return [
            f"Another rank sent it {found[1]} bytes in a collective of Gloo, expected {found[2]}: ranks call it with "
            "different shapes. With TORCH_DISTRIBUTED_DEBUG=DETAIL the error names the rank and both shapes."
        ]
    return []


def _other_failures(failures: Sequence[WorkerFailure], first: WorkerFailure) -> list[str]:
    after = [failure for failure in failures if failure is not first and not failure.exit.was_stopped]
    ended = [str(failure.global_rank) for failure in failures if failure.exit.was_stopped]
    lines = [
        f"After it, rank {failure.global_rank} on node {failure.node} {_shorten_reason(failure.reason)}."
        for failure in after
    ]
    return lines + ([f"Ended by ringweave: rank {', '.join(ended)}."] if ended else [])


def _shorten_reason(reason: str) -> str:
    return textwrap.shorten(reason, 160, placeholder=" ...")
