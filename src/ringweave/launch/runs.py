"""One run on this machine, from the cluster to the final record."""

import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from ringweave import environment
from ringweave.environment import WorkerEnvironment
from ringweave.jobs.requests.request import MODES, SERVED
from ringweave.launch import causes, orders, records, reports, run_dirs, supervision
from ringweave.launch.books import Books
from ringweave.launch.causes import Death
from ringweave.launch.elastic import entry
from ringweave.launch.elastic.coordinating import JobCoordinators
from ringweave.launch.elastic.places import with_further
from ringweave.launch.elastic.restarting import Attempts, Restarts
from ringweave.launch.elastic.rolls import PutOut
from ringweave.launch.elastic.scaling import Desk, Limits
from ringweave.launch.elastic.supervising import ElasticSupervisor, name_member
from ringweave.launch.launcher import WorkerState
from ringweave.launch.local.launcher import Around, LocalLauncher
from ringweave.launch.local.merging import Console, tell
from ringweave.launch.local.sites import Site, ThisMachine
from ringweave.launch.orders import BLOCK, Order
from ringweave.launch.run_dirs import RunDir
from ringweave.launch.serving import JobServer
from ringweave.launch.workers import Program, WorkerGroup, lay_out
from ringweave.membership.rules.settings import Bounds
from ringweave.topology import Cluster

_AUTO = MODES[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What the user wants to run, and where."""

    program: Program
    cluster: Cluster
    cluster_text: str
    """The cluster file's text, as it is kept in the run directory."""
    places: Cluster | None = None
    """The cluster with a device more for each worker that may come later; None where there is no place for any."""
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
    has_standby: bool = False
    """Run a second parameter server that takes over when the first one dies."""
    leader_per_nic: bool = False
    """Plan with a leader for each NIC of a node, not just each node."""
    order: Order = BLOCK
    """In which order the devices get ranks."""
    site: Site = field(default_factory=ThisMachine)
    """Where the workers' processes are put: on this machine as it is, or inside of a lab on it."""
    tells_cluster: bool = True
    """Workers are told the cluster file and the name of their node; if not, they have to find both out."""
    elastic: Bounds | None = None
    """Workers may die and come back, within these bounds; None ends the run with the first that fails."""


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
    output = Console({"stdout": stdout.buffer, "stderr": stderr.buffer}, environ)  # type: ignore[attr-defined]
    with run_dirs.taken(request.run_dir), _interrupts() as interrupts:
        attempts = Attempts()
        while True:
            begun_s = time.monotonic()
            ending, had_members = _attempt(request, environ, output, stderr, interrupts)
            first = causes.first_cause(ending.deaths)
            if request.elastic is None or ending.outcome != "failed" or first is None or had_members:
                return ending
            hopeless = attempts.why_no_other(first, time.monotonic() - begun_s)
            if hopeless:
                tell(stderr, f"ringweave: it is not started again: {hopeless}.\n")
                return ending
            tell(
                stderr,
                "ringweave: no worker has called ringweave.prepare by then, so none can go on without the others: "
                "all start again, from their last checkpoint if they keep one.\n",
            )


def _attempt(
    request: Request,
    environ: Mapping[str, str],
    console: Console,
    stderr: TextIO,
    interrupts: list[signal.Signals],
) -> tuple[reports.Ending, bool]:
    """All workers once, from the start to the end of the last one; how that was, and whether one was ever a member."""
    begun_s, attempt = time.monotonic(), run_dirs.begin_attempt(request.run_dir, request.cluster_text)

    def give_up(text: str) -> None:
        tell(stderr, f"ringweave: {text}\n")

    server = _server(request, give_up)
    crew = _coordinators(request, server, give_up)
    helpers = [each for each in (server, crew) if each is not None]
    group = _lay_out(request, server, crew)
    num_cpus, places = len(os.sched_getaffinity(0)), request.places or request.cluster
    slots = with_further(group, places.nodes, num_cpus=num_cpus)
    _announce(request, group, attempt, stderr)
    place = {"server": {"node": server.node, "address": server.address} if server else None}
    books = Books(request.run_dir, group, _first_record(request, group, attempt) | place)
    try:
        with (
            _running(helpers, environ),
            LocalLauncher(
                request.run_dir.log,
                console,
                environ,
                enter=request.site.enter,
                secret=helpers[-1].secret if helpers else lambda worker: None,
                around=Around(is_other=lambda process: any(process.pid in each.pids for each in helpers)),
            ) as launcher,
        ):
            launcher.start(group)
            books.workers_started(launcher.pid)
            states = _supervise(request, launcher, slots, helpers, books, interrupts, stderr)
    except BaseException as error:
        with suppress(OSError):  # the other one is the cause
            books.close(outcome="failed", exit_code=1, cause=str(error) or type(error).__name__)
        raise
    ending = reports.conclude([_death(launcher, slots, state) for state in states if _is_bad(state)], interrupts)
    wall_s = _close(books, ending, time.monotonic() - begun_s, stderr)
    tell(stderr, records.tell_training(books.training))
    if server:
        tell(stderr, server.to_text())
    log_of = _shown(request.run_dir.root) + "/logs/rank-{rank}.log"
    tell(stderr, reports.to_text(ending, wall_s=wall_s, log_of=log_of))
    return ending, crew is not None and bool(crew.roll().members)


def _close(books: Books, ending: reports.Ending, wall_s: float, stderr: TextIO) -> float:
    """Seconds that it took. How it ended it has ended, also where a full disk does not take its record."""
    try:
        return books.close(outcome=ending.outcome, exit_code=ending.exit_code, cause=ending.cause)
    except OSError as error:
        how = f"{ending.outcome}, exit code {ending.exit_code}"
        tell(stderr, f"ringweave: run.json could not be written: {error}. It does not say how the run ended: {how}.\n")
        return wall_s


def _supervise(
    request: Request,
    launcher: LocalLauncher,
    group: WorkerGroup,
    helpers: Sequence[JobServer | JobCoordinators],
    books: Books,
    interrupts: Sequence[signal.Signals],
    stderr: TextIO,
) -> Sequence[WorkerState]:
    def look() -> None:
        for each in helpers:
            each.look()

    crew = helpers[-1] if helpers else None
    if request.elastic is None or not isinstance(crew, JobCoordinators):
        return supervision.supervise(launcher, interrupts, on_exit=books.worker_exited, look=look)
    supervisor = ElasticSupervisor(
        launcher,
        group,
        Restarts(),
        death_of=lambda state: _death(launcher, group, state) if _is_bad(state) else None,
        roll=crew.roll,
        desk=_desk(request, request.elastic, group, stderr),
        put_out=PutOut(request.run_dir.events).look,
        say=lambda text: tell(stderr, f"ringweave: {text}.\n"),
    )
    return supervisor.run(
        interrupts,
        on_exit=books.worker_exited,
        on_start=lambda worker: books.worker_started(worker, launcher.pid(worker.global_rank)),
        on_give_up=lambda state, why: _give_up(_death(launcher, group, state), why, request.run_dir, stderr),
        look=look,
    )


def _desk(request: Request, bounds: Bounds, slots: WorkerGroup, stderr: TextIO) -> Desk:
    """Where another number of workers is asked for; rings stay as they were formed, of those of the begin."""
    num_workers = sum(node.num_devices for node in request.cluster.nodes)
    why = "the devices of its cluster file"
    if request.mode in SERVED:
        slots, why = replace(slots, workers=slots.workers[:num_workers]), "the workers that its rings were formed of"
    limits = Limits(bounds=bounds, num_places=slots.world_size, why=why)
    return Desk(request.run_dir, limits, num_workers, lambda text: tell(stderr, f"ringweave: {text}.\n"))


def _server(request: Request, give_up: Callable[[str], object]) -> JobServer | None:
    """The parameter server that the mode needs, or may come to need: an elastic run chooses none that does."""
    is_balanced = request.elastic is not None and request.mode == _AUTO
    mode = None if is_balanced else request.mode
    return JobServer.of(
        mode, request.cluster, request.site, request.run_dir, has_standby=request.has_standby, give_up=give_up
    )


def _coordinators(
    request: Request, server: JobServer | None, give_up: Callable[[str], object]
) -> JobCoordinators | None:
    """Those of an elastic run; its workers show the same credentials to them and to the parameter server."""
    if request.elastic is None:
        return None
    authority = server.authority if server else None
    return JobCoordinators.of(request.elastic, request.cluster, request.site, request.run_dir, authority, give_up)


@contextmanager
def _running(helpers: Sequence[JobServer | JobCoordinators], environ: Mapping[str, str]) -> Iterator[None]:
    """Run all of them for the length of a block."""
    with ExitStack() as stack:
        for each in helpers:
            stack.enter_context(each.running(environ))
        yield


def _give_up(death: Death, why: str, run_dir: RunDir, stderr: TextIO) -> None:
    """Say that a worker is not started again, while the others go on."""
    log = f"{_shown(run_dir.root)}/logs/rank-{death.global_rank}.log"
    tell(
        stderr,
        f"ringweave: rank {death.global_rank} on node {death.node} is given up: {why}, this time it {death.reason}. "
        f"The others go on without it. See what it lacks in {log}.\n",
    )


def _lay_out(request: Request, server: JobServer | None, crew: JobCoordinators | None) -> WorkerGroup:
    nodes = request.cluster.nodes
    first_index, _ = orders.deal([node.num_devices for node in nodes], request.order)[0]
    group = lay_out(
        nodes,
        request.program.argv(sys.executable, entry=entry.__file__ if request.elastic else None),
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
            coordinators=crew.addresses if crew else (),
        ),
        order=request.order,
    )
    untold = {} if request.tells_cluster else {environment.CLUSTER: "", environment.NODE: ""}
    workers = [
        replace(each, environ={**each.environ, **request.site.environ(each.node), **untold}) for each in group.workers
    ]
    if crew is not None:
        workers = [name_member(each, 0) for each in workers]
    return replace(group, workers=tuple(workers))


def _first_record(request: Request, group: WorkerGroup, attempt: int) -> dict[str, Any]:
    ranks = {node.name: [w.global_rank for w in group.workers if w.node == node.name] for node in request.cluster.nodes}
    return {
        **records.versions(),
        "command": request.program.words(),
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
        "elastic": str(request.elastic) if request.elastic else None,
        "leader_per_nic": request.leader_per_nic,
        "order": str(request.order),
        "lab": request.site.lab_name,
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
    tell(stderr, "\n".join(lines) + "\n")


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
