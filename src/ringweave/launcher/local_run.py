"""One run on this machine, from the cluster to the final run.json."""

import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from ringweave import environment, telemetry
from ringweave.environment import WorkerEnvironment
from ringweave.jobs import worker_options
from ringweave.jobs.request import ELASTIC_SERVER_MODES, MODES, SERVER_MODES
from ringweave.jobs.worker_options import DEFAULT_OPTIONS, WorkerOptions
from ringweave.lab import cpu_quotas
from ringweave.launcher import entry, outcome, run_dir
from ringweave.launcher.membership_history import EvictionWatcher, MembershipHistory
from ringweave.launcher.node_context import HostContext, NodeContext
from ringweave.launcher.outcome import RunRecorder, WorkerFailure
from ringweave.launcher.output import OutputConsole, write_message
from ringweave.launcher.processes import LocalLauncher, ProcessContext
from ringweave.launcher.restarts import RunRestartPolicy, WorkerRestartPolicy
from ringweave.launcher.run_dir import RunDir
from ringweave.launcher.scale_requests import ScaleLimits, ScaleRequests
from ringweave.launcher.services import (
    CoordinatorProcesses,
    CoordinatorQuery,
    JobServer,
    ServiceProcesses,
    run_coordinators,
)
from ringweave.launcher.spares import SpareRules, gains_from_fork_server
from ringweave.launcher.supervise import ElasticRules, NodePlan, NodeWorkers, with_member_name
from ringweave.launcher.workers import (
    WorkerGroup,
    WorkerProgram,
    WorkerSpec,
    build_worker_group,
    with_later_workers,
)
from ringweave.membership.settings import MemberBounds
from ringweave.rpc import CertificateAuthority
from ringweave.telemetry import verdict
from ringweave.topology import Cluster

_AUTO_MODE = MODES[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRequest:
    """Request of a user: the program, the cluster and the options of a run."""

    program: WorkerProgram
    cluster: Cluster
    cluster_text: str
    """Text of the cluster file, as the run directory keeps it."""
    expanded_cluster: Cluster | None = None
    """Cluster with one more device for each worker that may come later; None where there is room for none."""
    cluster_path: str | None
    """Path of the user's cluster file; None if there is none."""
    run_dir: RunDir
    worker_options: WorkerOptions = DEFAULT_OPTIONS
    mode: str | None = None
    """Training mode of scripts that call `ringweave.prepare`; None leaves it to them."""
    has_standby: bool = False
    """Run a second parameter server that takes over when the first one dies."""
    node_context: NodeContext = field(default_factory=HostContext)
    """Placement of worker processes: on this machine as it is, or inside of a lab on it."""
    shares_cluster_file: bool = True
    """Workers get the cluster file and the name of their node; otherwise they have to find out both."""
    elastic: MemberBounds | None = None
    """Bounds within which workers may die and come back; None ends the run with the first failed worker."""
    num_spares: int = 0
    """Number of spares that wait to replace workers of an elastic run."""


def run_here(request: RunRequest, *, environ: Mapping[str, str], stdout: TextIO, stderr: TextIO) -> outcome.RunResult:
    """Run the program on all devices of the cluster, all on this machine, and record the run.

    Args:
        request: What to run.
        environ: Environment that workers inherit.
        stdout: Gets the workers' standard output, line by line with the rank in front.
        stderr: Gets the workers' standard error, notices, and in the end the report of a failure.

    Returns:
        The result of the run. No process of the run is left then.
    """
    output = OutputConsole({"stdout": stdout.buffer, "stderr": stderr.buffer}, environ)  # type: ignore[attr-defined]
    with run_dir.hold_run_dir(request.run_dir), _collect_interrupts() as interrupts:
        attempts = RunRestartPolicy()
        while True:
            started_s = time.monotonic()
            result, had_members = _run_attempt(request, environ, output, stderr, interrupts)
            first = outcome.first_cause(result.deaths)
            if request.elastic is None or result.outcome != "failed" or first is None or had_members:
                return result
            stop_reason = attempts.stop_reason(first, time.monotonic() - started_s)
            if stop_reason:
                write_message(stderr, f"ringweave: no restart: {stop_reason}.\n")
                return result
            write_message(
                stderr,
                "ringweave: no worker had called ringweave.prepare, so all workers restart, from their last checkpoint "
                "if there is one.\n",
            )


def _run_attempt(
    request: RunRequest,
    environ: Mapping[str, str],
    console: OutputConsole,
    stderr: TextIO,
    interrupts: list[signal.Signals],
) -> tuple[outcome.RunResult, bool]:
    """Run all workers once; return the result, and whether a worker was ever a member."""
    started_s, attempt = time.monotonic(), run_dir.begin_attempt(request.run_dir, request.cluster_text)

    def give_up(text: str) -> None:
        write_message(stderr, f"ringweave: {text}\n")

    authority = CertificateAuthority(f"run-{os.getpid()}")
    server = _create_server(request, authority, give_up)
    coordinators = None
    if request.elastic is not None:
        coordinators = run_coordinators(
            request.elastic, request.cluster, request.node_context, request.run_dir, authority, give_up
        )
    group = _build_group(request, server, coordinators)
    history = _membership_history(request, coordinators, authority)
    services = [each for each in (server, coordinators) if each is not None]
    launcher = _create_launcher(request, environ, console, services, authority)
    elastic = _elastic_rules(request, group, history, environ, stderr)
    plan = NodePlan(group=group, environ=environ, services=services, elastic=elastic)
    _announce(request, group, attempt, stderr)
    server_record = {"server": {"node": server.node, "address": server.address} if server else None}
    recorder = RunRecorder(request.run_dir, group, _initial_record(request, group, attempt) | server_record)
    launcher.keep_spares(
        request.program,
        SpareRules(
            num_spares=request.num_spares,
            is_elastic=request.elastic is not None,
            is_over=lambda: bool(interrupts),
            node_entry=request.node_context.node_entry,
            on_ready=lambda spare: recorder.spare_ready(spare.process.pid, spare.import_s),
            on_give_up=give_up,
        ),
    )
    failures = NodeWorkers(plan, launcher, recorder, interrupts).wait()
    result = outcome.conclude_run(failures, interrupts)
    wall_s = _close_record(recorder, result, time.monotonic() - started_s, stderr)
    write_message(stderr, run_dir.describe_training(recorder.training))
    write_message(stderr, verdict.headline(verdict.find_losses(telemetry.read_last_attempt(request.run_dir.events))))
    if server:
        write_message(stderr, server.summary_text())
    log_of = _relative_path(request.run_dir.root) + "/logs/rank-{rank}.log"
    write_message(stderr, outcome.run_failure_text(result, wall_s=wall_s, log_pattern=log_of))
    return result, request.elastic is not None and bool(history.read().members)


def _create_launcher(
    request: RunRequest,
    environ: Mapping[str, str],
    console: OutputConsole,
    services: Sequence[ServiceProcesses],
    authority: CertificateAuthority,
) -> LocalLauncher:
    needs_credentials = bool(services) or request.worker_options.encrypts(between_hosts=False)
    return LocalLauncher(
        request.run_dir.worker_log,
        console,
        environ,
        wrap_command=request.node_context.wrap_worker_command,
        open_credentials=lambda worker: _open_credentials(authority, worker) if needs_credentials else None,
        process_context=ProcessContext(is_unrelated=lambda process: any(process.pid in each.pids for each in services)),
    )


def _open_credentials(authority: CertificateAuthority, worker: WorkerSpec) -> int:
    """Open a descriptor of the worker's credentials, for all services; those of a member name it."""
    name = worker.environ.get(environment.MEMBER, str(worker.global_rank))
    return authority.issue("worker", name).to_descriptor()


def _membership_history(
    request: RunRequest, coordinators: CoordinatorProcesses | None, authority: CertificateAuthority
) -> MembershipHistory:
    """Create the history. Coordinators in a lab are not queried: this process cannot reach the lab's network."""
    is_reachable = coordinators is not None and request.node_context.lab_name is None
    addresses = coordinators.addresses if coordinators and is_reachable else ()
    query = CoordinatorQuery(addresses, lambda: authority.issue("launcher", "0"))
    return MembershipHistory(request.run_dir.events, query.members)


def _close_record(recorder: RunRecorder, result: outcome.RunResult, wall_s: float, stderr: TextIO) -> float:
    """Close the record and return the seconds of the run, even if a full disk refuses the record."""
    try:
        return recorder.close(outcome=result.outcome, exit_code=result.exit_code, cause=result.cause)
    except OSError as error:
        how = f"{result.outcome}, exit code {result.exit_code}"
        write_message(
            stderr, f"ringweave: run.json could not be written: {error}. It lacks the outcome of the run: {how}.\n"
        )
        return wall_s


def _elastic_rules(
    request: RunRequest,
    group: WorkerGroup,
    history: MembershipHistory,
    environ: Mapping[str, str],
    stderr: TextIO,
) -> ElasticRules | None:
    """Return the rules of an elastic run; None of any other."""
    if request.elastic is None:
        return None
    nodes = (request.expanded_cluster or request.cluster).nodes
    slots = with_later_workers(group, nodes, num_cpus=len(os.sched_getaffinity(0)))
    is_quick = request.num_spares or gains_from_fork_server(request.program, environ)
    return ElasticRules(
        slots=slots,
        past_members=history.read,
        restarts=WorkerRestartPolicy(first_delay_s=0.0 if is_quick else 1.0),
        scale_requests=_scale_requests(request, request.elastic, slots, stderr),
        evicted_members=EvictionWatcher(request.run_dir.events).evicted_members,
        notify_user=lambda text: write_message(stderr, f"ringweave: {text}.\n"),
        on_give_up=lambda failure, why: _report_give_up(failure, why, request.run_dir, stderr),
    )


def _scale_requests(request: RunRequest, bounds: MemberBounds, slots: WorkerGroup, stderr: TextIO) -> ScaleRequests:
    """Create the scale requests of an elastic run; with rings, only the slots of the initial workers exist."""
    num_workers = sum(node.num_devices for node in request.cluster.nodes)
    why = "the number of devices in its cluster file"
    if request.mode in ELASTIC_SERVER_MODES:
        slots, why = replace(slots, workers=slots.workers[:num_workers]), "the number of workers in its rings"
    limits = ScaleLimits(bounds=bounds, num_slots=slots.world_size, reason=why)
    return ScaleRequests(
        request.run_dir, limits, num_workers, lambda text: write_message(stderr, f"ringweave: {text}.\n")
    )


def _create_server(
    request: RunRequest, authority: CertificateAuthority, give_up: Callable[[str], object]
) -> JobServer | None:
    """Create the parameter server if the mode needs or may need it; an elastic run in mode `auto` never chooses one."""
    is_balanced = request.elastic is not None and request.mode == _AUTO_MODE
    mode = None if is_balanced else request.mode
    if request.elastic is not None and mode in ELASTIC_SERVER_MODES:
        mode = SERVER_MODES[0]  # sites of an elastic run are rings to the server
    return JobServer.for_mode(
        mode,
        request.cluster,
        request.node_context,
        request.run_dir,
        authority,
        has_standby=request.has_standby,
        give_up=give_up,
    )


def _report_give_up(failure: WorkerFailure, why: str, run_dir: RunDir, stderr: TextIO) -> None:
    """Report that a worker is not restarted while the others go on."""
    log = f"{_relative_path(run_dir.root)}/logs/rank-{failure.global_rank}.log"
    write_message(
        stderr,
        f"ringweave: rank {failure.global_rank} on node {failure.node} is given up: {why}, "
        f"the last time it {failure.reason}. The others continue without it. See the cause in {log}.\n",
    )


def _build_group(
    request: RunRequest, server: JobServer | None, coordinators: CoordinatorProcesses | None
) -> WorkerGroup:
    nodes, options = request.cluster.nodes, request.worker_options
    first_index, _ = worker_options.assign_ranks([node.num_devices for node in nodes], options.order)[0]
    environment_of_run = WorkerEnvironment(
        cluster_path=request.run_dir.cluster_file,
        run_dir=request.run_dir.root,
        mode=request.mode,
        server=server.address if server else None,
        coordinators=coordinators.addresses if coordinators else (),
        encrypts=options.encrypts(between_hosts=False),
    )
    group = build_worker_group(
        nodes,
        request.program.argv(sys.executable, entry=entry.__file__ if request.elastic else None),
        request.node_context.pick_address(nodes[first_index].name),
        num_cpus=len(os.sched_getaffinity(0)),
        common_environment=options.apply_to(environment_of_run),
        order=options.order,
    )
    hidden = {} if request.shares_cluster_file else {environment.CLUSTER: "", environment.NODE: ""}
    workers = [
        replace(
            each, environ={**each.environ, **request.node_context.node_environ(each.node, each.local_rank), **hidden}
        )
        for each in group.workers
    ]
    if coordinators is not None:
        workers = [with_member_name(each, 0) for each in workers]
    return replace(group, workers=tuple(workers))


def _initial_record(request: RunRequest, group: WorkerGroup, attempt: int) -> dict[str, Any]:
    ranks = {node.name: [w.global_rank for w in group.workers if w.node == node.name] for node in request.cluster.nodes}
    return {
        **run_dir.software_versions(),
        "command": request.program.command_words(),
        "attempt": attempt,
        "cluster": {
            "name": request.cluster.name,
            "path": request.cluster_path,
            "nodes": [{"name": name, "workers": members} for name, members in ranks.items()],
        },
        "world_size": group.world_size,
        **request.worker_options.to_record(),
        "mode": request.mode,
        "elastic": str(request.elastic) if request.elastic else None,
        "spares": request.num_spares,
        "lab": request.node_context.lab_name,
        "lab_quotas": request.node_context.quota_kind,
    }


def _announce(request: RunRequest, group: WorkerGroup, attempt: int, stderr: TextIO) -> None:
    nodes = ", ".join(f"{node.name} ({len(node.devices)})" for node in request.cluster.nodes[:8])
    more = ", ..." if len(request.cluster.nodes) > 8 else ""
    where = _relative_path(request.run_dir.root)
    workers = "1 worker" if group.world_size == 1 else f"{group.world_size} workers"
    lines = [f"ringweave: {workers} on {nodes}{more}; files in {shlex.quote(where)}"]
    if request.node_context.quota_kind == cpu_quotas.DUTY_CYCLE:
        lines.append(f"ringweave: {cpu_quotas.DUTY_CYCLE_NOTE}")
    if attempt > 1:
        lines.append(
            f"ringweave: attempt {attempt}; files of attempt {attempt - 1} are in {where}/attempts/{attempt - 1}"
        )
    write_message(stderr, "\n".join(lines) + "\n")


@contextmanager
def _collect_interrupts() -> Iterator[list[signal.Signals]]:
    """Collect SIGINT, SIGTERM and SIGHUP of this process; an ignored SIGHUP (nohup) stays ignored."""
    received: list[signal.Signals] = []
    wanted = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        wanted.append(signal.SIGHUP)
    before = {
        signum: signal.signal(signum, lambda number, _: received.append(signal.Signals(number))) for signum in wanted
    }
    try:
        yield received
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _relative_path(path: Path) -> str:
    """Return the path relative to the current directory, if it is below it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
