"""One run on this machine, from the cluster to the final record."""

import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from ringweave import environment, telemetry
from ringweave.environment import WorkerEnvironment
from ringweave.launch import orders, records, reports, run_dirs, supervision
from ringweave.launch.causes import Death
from ringweave.launch.launcher import WorkerState
from ringweave.launch.local.launcher import LocalLauncher
from ringweave.launch.local.merging import Console
from ringweave.launch.local.sites import Site, ThisMachine
from ringweave.launch.orders import BLOCK, Order
from ringweave.launch.run_dirs import RunDir
from ringweave.launch.serving import JobServer
from ringweave.launch.workers import Program, WorkerGroup, lay_out
from ringweave.topology import Cluster


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What the user wants to run, and where."""

    program: Program
    cluster: Cluster
    cluster_text: str
    """The cluster file's text, as it is kept in the run directory."""
    cluster_path: str | None
    """Where the user's cluster file is; None if there is none."""
    run_dir: RunDir
    schedule: str | None
    """Schedule to be used by force; None leaves the choice to the planner."""
    replace_backend: bool
    """Let an explicit "gloo" or "nccl" be ringweave too."""
    tuning: bool | None = None
    """Let measured times change what runs; None means among several nodes."""
    mode: str | None = None
    """How scripts that call `ringweave.prepare` train; None leaves it to them."""
    leader_per_nic: bool = False
    """Plan with a leader for each NIC of a node, not just each node."""
    order: Order = BLOCK
    """In which order the devices get ranks."""
    site: Site = field(default_factory=ThisMachine)
    """Where the workers' processes are put: on this machine as it is, or inside of a lab on it."""
    tells_cluster: bool = True
    """Workers are told the cluster file and the name of their node; if not, they have to find both out."""


def run(request: Request, *, environ: Mapping[str, str], stdout: TextIO, stderr: TextIO) -> reports.Ending:
    """Run the program on all devices of the cluster, all on this machine, and keep the books.

    Args:
        request: What to run.
        environ: What workers inherit.
        stdout: Gets what the workers print there, line by line with the rank in front.
        stderr: Likewise; also notices, and in the end the report of a failure.

    Returns:
        How it ended. Nothing of the run is left then.
    """
    with run_dirs.taken(request.run_dir), _interrupts() as interrupts:
        attempt = run_dirs.begin_attempt(request.run_dir, request.cluster_text)
        server = JobServer.of(request.mode, request.cluster, request.site, request.run_dir)
        group = _lay_out(request, server)
        _announce(request, group, attempt, stderr)
        books = _Books(request, group, attempt, server)
        console = Console({"stdout": stdout.buffer, "stderr": stderr.buffer}, environ)  # type: ignore[attr-defined]
        try:
            with (
                server.running(environ) if server else nullcontext(),
                LocalLauncher(
                    request.run_dir.log,
                    console,
                    environ,
                    enter=request.site.enter,
                    secret=server.secret if server else lambda worker: None,
                ) as launcher,
            ):
                launcher.start(group)
                books.workers_started(launcher.pid)
                states = supervision.supervise(launcher, interrupts, on_exit=books.worker_exited)
        except BaseException as error:
            books.close(outcome="failed", exit_code=1, cause=str(error) or type(error).__name__)
            raise
        ending = reports.conclude([_death(launcher, group, state) for state in states if _is_bad(state)], interrupts)
        wall_s = books.close(outcome=ending.outcome, exit_code=ending.exit_code, cause=ending.cause)
        if server:
            stderr.write(server.to_text())
        stderr.write(
            reports.to_text(ending, wall_s=wall_s, log_of=_shown(request.run_dir.root) + "/logs/rank-{rank}.log")
        )
        return ending


class _Books:
    """The event log and run.json of one attempt."""

    def __init__(self, request: Request, group: WorkerGroup, attempt: int, server: JobServer | None) -> None:
        self._run_dir, self._group = request.run_dir, group
        self._log = telemetry.EventLog(request.run_dir.events)
        self._started_s = time.monotonic()
        command = [*(["-m"] if request.program.is_module else []), request.program.target, *request.program.arguments]
        self._log.write(
            "run_started",
            attempt=attempt,
            command=command,
            cluster=request.cluster.name,
            world_size=group.world_size,
        )
        place = {"server": {"node": server.node, "address": server.address} if server else None}
        records.update(request.run_dir.record, _first_record(request, group, attempt, command) | place)

    def workers_started(self, pid: Callable[[int], int]) -> None:
        for worker in self._group.workers:
            self._log.write(
                "worker_started",
                rank=worker.global_rank,
                node=worker.node,
                local_rank=worker.local_rank,
                pid=pid(worker.global_rank),
            )

    def worker_exited(self, state: WorkerState) -> None:
        if state.exit is None:
            return
        self._log.write(
            "worker_exited",
            rank=state.global_rank,
            node=self._group.workers[state.global_rank].node,
            exit_code=state.exit.exit_code,
            signal=state.exit.signal_name,
            stopped=state.exit.stopped,
        )

    def close(self, *, outcome: str, exit_code: int, cause: str | None) -> float:
        wall_s = round(time.monotonic() - self._started_s, 3)
        self._log.write("run_ended", outcome=outcome, exit_code=exit_code, wall_s=wall_s, cause=cause)
        ended = {"ended": _now(), "wall_s": wall_s, "exit_code": exit_code, "outcome": outcome, "cause": cause}
        summary = records.summarize(telemetry.read_last_attempt(self._run_dir.events))
        records.update(self._run_dir.record, ended | summary)
        return wall_s


def _lay_out(request: Request, server: JobServer | None) -> WorkerGroup:
    nodes = request.cluster.nodes
    first_index, _ = orders.deal([node.num_devices for node in nodes], request.order)[0]
    group = lay_out(
        nodes,
        request.program.argv(sys.executable),
        request.site.meeting(nodes[first_index].name),
        num_cpus=len(os.sched_getaffinity(0)),
        common=WorkerEnvironment(
            cluster_path=request.run_dir.cluster,
            run_dir=request.run_dir.root,
            replace_backend=request.replace_backend,
            schedule=request.schedule,
            tuning=request.tuning,
            mode=request.mode,
            leader_per_nic=request.leader_per_nic,
            server=server.address if server else None,
        ),
        order=request.order,
    )
    untold = {} if request.tells_cluster else {environment.CLUSTER: "", environment.NODE: ""}
    workers = [
        replace(each, environ={**each.environ, **request.site.environ(each.node), **untold}) for each in group.workers
    ]
    return replace(group, workers=tuple(workers))


def _first_record(request: Request, group: WorkerGroup, attempt: int, command: list[str]) -> dict[str, Any]:
    ranks = {node.name: [w.global_rank for w in group.workers if w.node == node.name] for node in request.cluster.nodes}
    return {
        **records.versions(),
        "command": command,
        "attempt": attempt,
        "cluster": {
            "name": request.cluster.name,
            "path": request.cluster_path,
            "nodes": [{"name": name, "workers": members} for name, members in ranks.items()],
        },
        "world_size": group.world_size,
        "schedule": request.schedule,
        "tuning": request.tuning,
        "mode": request.mode,
        "leader_per_nic": request.leader_per_nic,
        "order": str(request.order),
        "lab": request.site.lab_name,
        "started": _now(),
        "ended": None,
        "wall_s": None,
        "exit_code": None,
        "outcome": "running",
        "cause": None,
    }


def _announce(request: Request, group: WorkerGroup, attempt: int, stderr: TextIO) -> None:
    nodes = ", ".join(f"{node.name} ({len(node.devices)})" for node in request.cluster.nodes[:8])
    more = ", ..." if len(request.cluster.nodes) > 8 else ""
    where = _shown(request.run_dir.root)
    workers = "1 worker" if group.world_size == 1 else f"{group.world_size} workers"
    lines = [f"ringweave: {workers} on {nodes}{more}; files in {shlex.quote(where)}"]
    if attempt > 1:
        lines.append(
            f"ringweave: attempt {attempt}; files of attempt {attempt - 1} are in {where}/attempts/{attempt - 1}"
        )
    stderr.write("\n".join(lines) + "\n")
    stderr.flush()


@contextmanager
def _interrupts() -> Iterator[list[signal.Signals]]:
    """SIGINT, SIGTERM and SIGHUP of this process, collected instead of obeyed; an ignored SIGHUP (nohup) stays so."""
    received: list[signal.Signals] = []
    wanted = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        wanted.append(signal.SIGHUP)
    before = {how: signal.signal(how, lambda number, _: received.append(signal.Signals(number))) for how in wanted}
    try:
        yield received
    finally:
        for how, handler in before.items():
            signal.signal(how, handler)


def _is_bad(state: WorkerState) -> bool:
    return state.exit is not None and not state.exit.is_good


def _death(launcher: LocalLauncher, group: WorkerGroup, state: WorkerState) -> Death:
    assert state.exit is not None
    lines = launcher.logs(state.global_rank, num_lines=200)
    node = group.workers[state.global_rank].node
    return Death(global_rank=state.global_rank, node=node, exit=state.exit, last_lines=tuple(lines))


def _shown(path: Path) -> str:
    """Short, if it is below the current directory."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _now() -> str:
    return datetime.now(tz=UTC).astimezone().isoformat(timespec="seconds")
