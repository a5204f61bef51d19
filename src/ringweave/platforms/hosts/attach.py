"""Following a run on hosts: merged output of its workers, reconnection of hosts that were away, report of the end."""

import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringweave import telemetry
from ringweave.errors import JobError, LaunchError
from ringweave.files import rotation
from ringweave.files.rotation import LogLimits
from ringweave.jobs.states import JobState
from ringweave.launcher import outcome, run_dir
from ringweave.launcher.outcome import RunResult, WorkerFailure
from ringweave.launcher.output import OutputConsole, WorkerLog, WorkerStream, write_message, write_notice
from ringweave.launcher.run_dir import RunDir, path_from_here
from ringweave.launcher.supervise import collect_interrupts
from ringweave.launcher.workers import WorkerExit
from ringweave.platforms.agent import job_config
from ringweave.platforms.hosts import host_runtime, join_protocol
from ringweave.platforms.hosts.run_entry import ENTRY_JSON, KnownRun, RunEntry, forget_known_run
from ringweave.platforms.hosts.ssh import HostConnections, HostError, SshConnection, end_run_at_once
from ringweave.telemetry import verdict

LOG_WAIT_S = 1.0
RECONNECT_S = 1.0
POLL_S = 0.05
REMOVAL_TIMEOUT_S = 10.0
"""Time after which a finished run is removed over ssh."""
MAX_FAILURES_AT_END = 1
"""Failed attempts after which an ended run does not wait for the rest of a host's output."""
_FAILED_RANK = re.compile(r"rank (\d+) (.*)", re.DOTALL)
_KILLED = re.compile(r"was killed by (SIG\w+)")
NUM_LAST_LINES = 200


@dataclass(slots=True)
class _HostState:
    """State of one host for the follower; written by its thread."""

    summary: dict[str, Any]
    """Last summary of the run on this host; empty before the first, and once the run is removed."""
    is_connected: bool = False
    num_failures: int = 0
    """Failed attempts to connect since it was connected last."""
    is_drained: bool = False
    """All output up to the end of the run has been read."""
    is_gone: bool = False
    """The run has been removed from this host."""


class RunFollower:
    """Follows one run from the machine that started it."""

    def __init__(
        self,
        known: KnownRun,
        connections: HostConnections,
        console: OutputConsole,
        notify: Callable[[str], object],
    ) -> None:
        """Begin with open connections; those that break are opened again.

        Args:
            known: Run to follow.
            connections: Connections to its hosts; closed by `close`.
            console: Gets the output, line by line with the rank in front.
            notify: Gets a text about each change of state.
        """
        self._known, self._connections, self._console, self._notify = known, connections, console, notify
        self.run_dir = RunDir(root=Path(known.run_dir))
        (self.run_dir.root / "logs").mkdir(parents=True, exist_ok=True)
        for path in (self.run_dir.root / "logs").glob("rank-*.log*"):
            path.unlink()
        self._names = [*(host.node for host in known.hosts), *(node for _, node in known.joining)]
        self._hosts = [_HostState(summary={}) for _ in self._names]
        self._positions: list[dict[str, str]] = [{} for _ in self._names]
        self._streams: dict[int, WorkerStream] = {}
        self._logs: dict[int, WorkerLog] = {}
        self._output_lock, self._closing = threading.Lock(), threading.Event()
        self._live: list[SshConnection | None] = [
            *connections.open,
            *[None] * (len(self._names) - len(connections.open)),
        ]
        self._started_s = time.monotonic()
        self._last_shown = ""

    def follow(self, interrupts: Sequence[signal.Signals]) -> RunEntry | None:
        """Print the output until the run has ended; return its last entry, None if it was removed meanwhile.

        Args:
            interrupts: Grows with every SIGINT, SIGTERM and SIGHUP of this process. SIGINT stops the run; after the
                others it continues, and `KeyboardInterrupt` is raised.
        """
        for index, name in enumerate(self._names):
            threading.Thread(target=self._follow_host, args=(index,), name=f"host {name}", daemon=True).start()
        num_handled, is_stop_due = 0, False
        while True:
            if len(interrupts) > num_handled:
                num_handled, is_stop_due = len(interrupts), True
                if interrupts[-1] is not signal.SIGINT:
                    raise KeyboardInterrupt
                self._notify("stopping all workers")
            is_stop_due = is_stop_due and not self._try_stop()
            newest = self._newest_summary()
            if newest is not None:
                self._show(newest)
                if newest["is_end"] and self._is_drained():
                    return self.read_entry()
            elif self._started_threads_see_nothing():
                return None
            time.sleep(POLL_S)

    def apply_verb(self, verb: str) -> None:
        """Apply a verb to the run, by the first host that can pass it on.

        Raises:
            HostError: No host can.
        """
        errors: list[str] = []
        for connection in self._open_connections():
            try:
                connection.call("verb", run_id=self._known.run_id, verb_name=verb)
            except LaunchError as error:
                errors.append(str(error))
            else:
                return
        raise HostError("\n".join(errors) or f"run {self._known.name}: no host answers, expected one.")

    def _try_stop(self) -> bool:
        """Stop the run if a host answers; return whether that is done, or not needed any more."""
        try:
            self.apply_verb("stop")
        except JobError:  # it has ended by itself
            return True
        except LaunchError:
            return False
        return True

    def read_entry(self) -> RunEntry:
        """Return the newest entry of the run.

        Raises:
            HostError: No host answers.
        """
        entries = []
        for connection in self._open_connections():
            try:
                entries.append(ENTRY_JSON.parse(connection.call("status", run_id=self._known.run_id)["entry"]))
            except LaunchError:
                continue
        if not entries:
            raise HostError(f"run {self._known.name}: no host answers, expected one. Try ringweave attach later.")
        return max(entries, key=lambda entry: entry.version)

    def fetch_files(self) -> None:
        """Copy events, run.json and logs of each host that answers into the run directory."""
        opened = self._open_connections()
        calls: list[tuple[SshConnection, str, int | None]] = [(each, each.host.node, None) for each in opened]
        calls += [(opened[0], node, host) for host, node in self._known.joining if opened]
        shutil.rmtree(self.run_dir.root / "hosts", ignore_errors=True)  # an earlier run may have left files there
        for connection, name, host in calls:
            target = self.run_dir.root / "hosts" / name
            try:
                _, content = connection.call_for_bytes("fetch", run_id=self._known.run_id, timeout_s=120.0, host=host)
                host_runtime.unpack_files(content, target)
            except (LaunchError, OSError) as error:
                self._notify(f"files of host {name} were not fetched: {error}")

    def remove_run(self) -> bool:
        """Remove the run from all hosts; return whether it is gone from all that answer."""
        try:
            self.apply_verb("delete")
        except LaunchError as error:
            self._notify(str(error))
        deadline_s = time.monotonic() + REMOVAL_TIMEOUT_S
        while left := [each for each in self._open_connections() if not _is_removed(each, self._known.run_id)]:
            if time.monotonic() >= deadline_s:
                end_run_at_once(left, self._known.run_id)
                break
            time.sleep(POLL_S)
        return all(host.is_connected for host in self._hosts)

    def close(self) -> None:
        """Close all connections; the run goes on."""
        self._closing.set()
        for connection in self._live:
            if connection is not None:
                connection.close()
        for log in self._logs.values():
            log.close()

    def last_lines(self, rank: int) -> list[str]:
        """Return the last lines of a worker's output."""
        path = self.run_dir.worker_log(rank)
        try:
            return rotation.last_lines(path)[-NUM_LAST_LINES:]
        except OSError:
            return []

    @property
    def wall_s(self) -> float:
        """Seconds since the start of following."""
        return time.monotonic() - self._started_s

    # One thread for each host.

    def _follow_host(self, index: int) -> None:
        """Read the logs of one host until the follower is closed; connect again when the connection has ended."""
        name, is_reported = self._names[index], False
        via = index if index < len(self._known.hosts) else 0  # the logs of a joined host come over the first one
        while not self._closing.is_set():
            try:
                connection = self._live[index]
                if connection is None or not connection.is_open:
                    connection = self._live[index] = self._connections.connect(via)
                    connection.call("ensure", run_id=self._known.run_id)
                self._hosts[index].is_connected, self._hosts[index].num_failures = True, 0
                if is_reported:
                    self._notify(f"host {name} answers again")
                    is_reported = False
                self._read_logs(index, connection)
            except (LaunchError, OSError, ValueError) as error:
                if self._closing.is_set():
                    return
                self._hosts[index].is_connected = False
                self._hosts[index].num_failures += 1
                if not is_reported:
                    self._notify(f"{error} It is tried again while the run goes on")
                    is_reported = True
                self._closing.wait(RECONNECT_S)

    def _read_logs(self, index: int, connection: SshConnection) -> None:
        state, positions, has_ended = self._hosts[index], self._positions[index], self._has_ended()
        answer, content = connection.call_for_bytes(
            "logs",
            run_id=self._known.run_id,
            positions=positions,
            version=state.summary.get("version"),
            wait_s=0.0 if has_ended else LOG_WAIT_S,
            host=self._joined_host(index),
        )
        for key, end, text in host_runtime.split_pieces(answer["pieces"], content):
            self._feed(int(key.rpartition("/")[2]), text)
            positions[key] = end
        state.is_gone = "version" not in answer
        state.summary = answer
        state.is_drained = has_ended and answer.get("is_at_rest", True) and not answer["pieces"]
        if state.is_drained or state.is_gone:
            self._closing.wait(POLL_S)

    def _joined_host(self, index: int) -> int | None:
        """Return the index in the run of a joined host, which a call of another one names; None for others."""
        number = index - len(self._known.hosts)
        return self._known.joining[number][0] if number >= 0 else None

    def _feed(self, rank: int, received: bytes) -> None:
        with self._output_lock:
            if rank not in self._streams:
                self._logs[rank] = WorkerLog(self.run_dir.worker_log(rank), LogLimits.from_environ(os.environ))
                self._streams[rank] = WorkerStream(self._console, "stdout", rank, self._logs[rank])
            self._streams[rank].feed(received)

    # What the main thread sees.

    def _show(self, summary: dict[str, Any]) -> None:
        text = f"{summary['state']}: {summary['reason']}" if summary["reason"] else summary["state"]
        if text != self._last_shown and not summary["is_end"]:
            self._notify(f"{self._known.name} is {text}")
            if hint := join_protocol.join_hint(summary.get("unjoined", ()), self._known.join_lines):
                self._notify(f"type {hint}")
        self._last_shown = text

    def _is_drained(self) -> bool:
        return all(host.is_drained or host.num_failures > MAX_FAILURES_AT_END for host in self._hosts)

    def _has_ended(self) -> bool:
        """Return whether the newest known entry says that the run has ended."""
        newest = self._newest_summary()
        return newest is not None and newest["is_end"]

    def _newest_summary(self) -> dict[str, Any] | None:
        return max((host.summary for host in self._hosts if "version" in host.summary), key=_version, default=None)

    def _started_threads_see_nothing(self) -> bool:
        return all(host.is_gone for host in self._hosts)

    def _open_connections(self) -> list[SshConnection]:
        """Return one connection to each host that ssh reaches, as far as they are open."""
        return [each for each in self._live[: len(self._known.hosts)] if each is not None and each.is_open]


def conclude(entry: RunEntry, follower: RunFollower) -> RunResult:
    """Return the result of an ended run, as of a run on one machine."""
    record = entry.job.record
    if record.state is JobState.SUCCEEDED:
        return RunResult(outcome="done", deaths=(), interrupts=())
    if record.state is JobState.STOPPED:
        return RunResult(outcome="interrupted", deaths=(), interrupts=(signal.SIGINT,))
    failures = [
        _failure(entry.job.node_name(node), record.nodes[node].ended, follower) for node in entry.job.used_nodes
    ]
    found = tuple(failure for failure in failures if failure is not None)
    return RunResult(outcome="failed", deaths=found, interrupts=())


def _failure(node: str, ended: Any, follower: RunFollower) -> WorkerFailure | None:
    matched = _FAILED_RANK.match(ended.text) if ended is not None else None
    if ended is None or matched is None or ended.cause == "Peer":
        return None
    rank = int(matched[1])
    killed = _KILLED.search(ended.text)
    worker_exit = WorkerExit(
        exit_code=None if killed else ended.exit_code,
        signal_name=killed[1] if killed else None,
        time_s=0.0,
        was_stopped=False,
    )
    return WorkerFailure(global_rank=rank, node=node, exit=worker_exit, last_lines=tuple(follower.last_lines(rank)))


def record_end(follower: RunFollower, entry: RunEntry, result: RunResult, summary: Mapping[str, Any]) -> None:
    """Write the outcome into run.json of the run directory; `summary` is that of all hosts."""
    job = entry.job
    content = {
        "format": run_dir.RUN_JSON_FORMAT,
        **run_dir.software_versions(),
        "job": entry.name,
        "command": job_config.worker_program(job.request).command_words(),
        "cluster": {
            "name": entry.name,
            "path": None,
            "nodes": [{"name": job.node_name(node), "workers": entry.wanted_ranks(node)} for node in job.used_nodes],
        },
        "world_size": entry.num_wanted,
        **job.request.worker_options.to_record(),
        "mode": job.request.mode,
        "elastic": str(job.request.elastic.min) if job.request.elastic else None,
        **summary,
        "wall_s": round(follower.wall_s, 3),
        "outcome": result.outcome,
        "exit_code": result.exit_code,
        "cause": result.cause or (job.record.reason.text if job.record.reason else None),
    }
    run_dir.update_run_json(follower.run_dir.run_json, content)


def end_text(entry: RunEntry, result: RunResult, follower: RunFollower, log_pattern: str) -> str:
    """Return the report of a bad end for people; empty after a good one."""
    if result.outcome == "failed" and outcome.first_cause(result.deaths) is None:
        reason = entry.job.record.reason
        hint = f" {reason.hint}." if reason and reason.hint else ""
        return f"ringweave: failed after {follower.wall_s:.1f} s: {reason.text if reason else 'no reason'}.{hint}\n"
    return outcome.run_failure_text(result, wall_s=follower.wall_s, log_pattern=log_pattern)


def _is_removed(connection: SshConnection, run_id: str) -> bool:
    try:
        return not connection.call("exists", run_id=run_id)["exists"]
    except LaunchError:
        return True


def _version(summary: dict[str, Any]) -> tuple[int, ...]:
    return tuple(summary["version"])


def follow_run(known: KnownRun, connections: HostConnections) -> int:
    """Follow a run until its end or a signal; return the exit code of the command."""
    console = OutputConsole({"stdout": sys.stdout.buffer, "stderr": sys.stderr.buffer}, {})
    follower = RunFollower(known, connections, console, write_notice)
    try:
        with collect_interrupts() as interrupts:
            try:
                entry = follower.follow(interrupts)
            except KeyboardInterrupt:
                write_notice(f"{known.name} continues without this command: ringweave attach {known.name}")
                return 1
        if entry is None:
            write_notice(f"{known.name} was removed before its outcome was read")
            forget_known_run(known)
            return 1
        result = conclude(entry, follower)
        follower.fetch_files()
        events = telemetry.read_run(follower.run_dir.root)
        summary = run_dir.summarize_events(events)
        record_end(follower, entry, result, summary)
        write_message(sys.stderr, run_dir.describe_training(summary["training"]))
        write_message(sys.stderr, verdict.headline(verdict.find_losses(events)))
        log_pattern = f"{path_from_here(follower.run_dir.root)}/logs/rank-{{rank}}.log"
        write_message(sys.stderr, end_text(entry, result, follower, log_pattern))
        if follower.remove_run():
            forget_known_run(known)
        else:
            write_notice(
                f"some hosts did not answer; remove what is left there: ringweave delete {known.name} --on hosts"
            )
        return result.exit_code
    finally:
        follower.close()
