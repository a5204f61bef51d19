"""One run on this machine, from the cluster to the final run.json."""

import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from ringweave import environment, telemetry
from ringweave.environment import WorkerEnvironment
from ringweave.errors import UsageError
from ringweave.jobs import modes, worker_options
from ringweave.jobs.request import ELASTIC_SERVER_MODES, SERVER_MODES
from ringweave.jobs.restart_policy import EARLY_S, MAX_OWN_FAILURES, RestartPolicy
from ringweave.jobs.worker_options import DEFAULT_OPTIONS, WorkerOptions
from ringweave.lab import cpu_quotas
from ringweave.launcher import entry, outcome, run_dir, supervise
from ringweave.launcher.node_context import HostContext, NodeContext
from ringweave.launcher.outcome import RunRecorder
from ringweave.launcher.output import OutputConsole, write_message, write_notice
from ringweave.launcher.run_dir import RunDir, path_from_here
from ringweave.launcher.scale_requests import ScaleLimits, ScaleRequests
from ringweave.launcher.services import CoordinatorProcesses, JobServer, ServiceSetup, create_coordinators
from ringweave.launcher.workers import (
    WorkerGroup,
    WorkerProgram,
    WorkerSpec,
    build_worker_group,
    with_later_workers,
)
from ringweave.membership import settings
from ringweave.membership.settings import MemberBounds
from ringweave.rpc import CertificateAuthority
from ringweave.telemetry import verdict
from ringweave.topology import Cluster


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """Options of a run, on this machine or on hosts."""

    program: WorkerProgram
    run_dir: str | None = None
    """Run directory; None: a new one below `runs/`."""
    worker_options: WorkerOptions = DEFAULT_OPTIONS
    mode: str | None = None
    """Training mode of scripts that call `ringweave.prepare`; None leaves it to them."""
    elastic: str | None = None
    """Bounds MIN:MAX within which workers may die and come back; None ends the run with the first failed worker."""
    num_spares: int = 0
    """Number of spares that wait to replace workers of an elastic run, on each host."""
    has_standby: bool = False
    """Run a second parameter server that takes over when the first one dies."""
    log_environ: Mapping[str, str] = field(default_factory=dict)
    """Limits of logs, where they are not the usual ones."""

    def bounds(self, num_workers: int) -> MemberBounds | None:
        """Return the bounds of an elastic run; None of any other.

        Raises:
            UsageError: They are malformed, or do not include the number of workers.
        """
        if self.elastic is None:
            return None
        bounds = settings.parse_bounds(self.elastic)
        if not bounds.min_members <= num_workers <= bounds.max_members:
            do, expected = "Give bounds that include the number of workers", f"MIN <= {num_workers} workers <= MAX"
            raise UsageError("--elastic", got=self.elastic, expected=expected, do=do)
        return bounds

    def resolve_run_dir(self) -> RunDir:
        """Return the run directory; creates a new one if none is named.

        Raises:
            UsageError: None can be created here.
        """
        if self.run_dir:
            return RunDir(root=Path(self.run_dir).absolute())
        return run_dir.create_run_dir(Path("runs"), self.program.target, datetime.now())


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRequest:
    """Request of a run on this machine: its options and its cluster."""

    options: RunOptions
    cluster: Cluster
    cluster_text: str
    """Text of the cluster file, as the run directory keeps it."""
    expanded_cluster: Cluster | None = None
    """Cluster with one more device for each worker that may come later; None where there is room for none."""
    cluster_path: str | None = None
    """Path of the user's cluster file; None if there is none."""
    run_dir: RunDir
    node_context: NodeContext = field(default_factory=HostContext)
    """Placement of worker processes: on this machine as it is, or inside of a lab on it."""
    shares_cluster_file: bool = True
    """Workers get the cluster file and the name of their node; otherwise they have to find out both."""

    @property
    def elastic(self) -> MemberBounds | None:
        """Bounds of an elastic run; None of any other."""
        return self.options.bounds(sum(node.num_devices for node in self.cluster.nodes))


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
    with run_dir.hold_run_dir(request.run_dir), supervise.collect_interrupts() as interrupts:
        attempts = RestartPolicy()
        while True:
            started_s = time.monotonic()
            result, had_members = _run_attempt(request, environ, output, stderr, interrupts)
            first = outcome.first_cause(result.deaths)
            if request.elastic is None or result.outcome != "failed" or first is None or had_members:
                return result
            now_s = time.monotonic()
            attempts = attempts.after_end(now_s - started_s, now_s, is_own_failure=first.exit.signal_name is None)
            if attempts.has_given_up:
                write_notice(f"no restart: {_stop_reason(attempts)}", stderr)
                return result
            why = "no worker had called ringweave.prepare"
            write_notice(f"{why}, so all workers restart, from their last checkpoint if there is one", stderr)


def _stop_reason(attempts: RestartPolicy) -> str:
    if attempts.num_own_failures >= MAX_OWN_FAILURES:
        return f"{attempts.num_own_failures} attempts in a row ended with an exception of the script"
    return f"{attempts.num_failed_starts} attempts in a row ended within {EARLY_S:g} s each"


def _run_attempt(
    request: RunRequest,
    environ: Mapping[str, str],
    console: OutputConsole,
    stderr: TextIO,
    interrupts: list[signal.Signals],
) -> tuple[outcome.RunResult, bool]:
    """Run all workers once; return the result, and whether a worker was ever a member."""
    started_s, attempt = time.monotonic(), run_dir.begin_attempt(request.run_dir, request.cluster_text)

    def warn(text: str) -> None:
        write_notice(text, stderr)

    authority = CertificateAuthority(f"run-{os.getpid()}")
    service_setup = ServiceSetup(
        node_context=request.node_context,
        run_dir=request.run_dir,
        issue=lambda role, index: authority.issue(role, str(index)),
        give_up=warn,
    )
    server, coordinators = _create_server(request, service_setup), None
    if request.elastic is not None:
        coordinators = create_coordinators(request.elastic, request.cluster, service_setup)
    group = _build_group(request, server, coordinators)
    services = [each for each in (server, coordinators) if each is not None]
    needs_credentials = bool(services) or request.options.worker_options.encrypts(between_hosts=False)
    server_record = {"server": {"node": server.node, "address": server.address} if server else None}
    setup = supervise.NodeSetup(
        program=request.options.program,
        run_dir=request.run_dir,
        record=_initial_record(request, group, attempt) | server_record,
        node_context=request.node_context,
        console=console,
        open_credentials=lambda worker: _open_credentials(authority, worker) if needs_credentials else None,
        is_over=lambda: bool(interrupts),
        warn=warn,
        num_spares=request.options.num_spares,
    )
    elastic = _elastic_rules(request, setup, group, environ, coordinators, authority)
    plan = supervise.NodePlan(group=group, environ=environ, services=services, elastic=elastic)
    _announce(request, group, attempt, stderr)
    workers, recorder = supervise.start_node(plan, setup, interrupts)
    result = outcome.conclude_run(workers.wait(), interrupts)
    wall_s = _close_record(recorder, result, time.monotonic() - started_s, stderr)
    events = telemetry.read_last_attempt(request.run_dir.events)
    write_message(stderr, run_dir.describe_training(recorder.training) + verdict.headline(verdict.find_losses(events)))
    if server:
        write_message(stderr, server.summary_text())
    log_of = path_from_here(request.run_dir.root) + "/logs/rank-{rank}.log"
    write_message(stderr, outcome.run_failure_text(result, wall_s=wall_s, log_pattern=log_of))
    return result, elastic is not None and bool(elastic.past_members(()).members)


def _open_credentials(authority: CertificateAuthority, worker: WorkerSpec) -> int:
    """Open a descriptor of the worker's credentials, for all services; those of a member name it."""
    name = worker.environ.get(environment.MEMBER, str(worker.global_rank))
    return authority.issue("worker", name).to_descriptor()


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
    setup: supervise.NodeSetup,
    group: WorkerGroup,
    environ: Mapping[str, str],
    coordinators: CoordinatorProcesses | None,
    authority: CertificateAuthority,
) -> supervise.ElasticRules | None:
    """Return the rules of an elastic run; None of any other."""
    if request.elastic is None or coordinators is None:
        return None
    nodes = (request.expanded_cluster or request.cluster).nodes
    slots = with_later_workers(group, nodes, num_cpus=len(os.sched_getaffinity(0)))
    return setup.elastic_rules(
        slots,
        environ,
        coordinators.addresses,
        lambda: authority.issue("launcher", "0"),
        scale_requests=_scale_requests(request, request.elastic, slots, setup.warn),
    )


def _scale_requests(
    request: RunRequest, bounds: MemberBounds, slots: WorkerGroup, warn: Callable[[str], object]
) -> ScaleRequests:
    """Create the scale requests of an elastic run; with rings, only the slots of the initial workers exist."""
    num_workers = sum(node.num_devices for node in request.cluster.nodes)
    why = "the number of devices in its cluster file"
    if request.options.mode in ELASTIC_SERVER_MODES:
        slots, why = replace(slots, workers=slots.workers[:num_workers]), "the number of workers in its rings"
    limits = ScaleLimits(bounds=bounds, num_slots=slots.world_size, reason=why)
    return ScaleRequests(request.run_dir, limits, num_workers, warn)


def _create_server(request: RunRequest, setup: ServiceSetup) -> JobServer | None:
    """Create the parameter server if the mode needs or may need it; an elastic run in mode `auto` never chooses one."""
    is_balanced = request.elastic is not None and request.options.mode == modes.AUTO
    mode = None if is_balanced else request.options.mode
    if request.elastic is not None and mode in ELASTIC_SERVER_MODES:
        mode = SERVER_MODES[0]  # sites of an elastic run are rings to the server
    return JobServer.for_mode(mode, request.cluster, setup, has_standby=request.options.has_standby)


def _build_group(
    request: RunRequest, server: JobServer | None, coordinators: CoordinatorProcesses | None
) -> WorkerGroup:
    nodes, options = request.cluster.nodes, request.options.worker_options
    first_index, _ = worker_options.assign_ranks([node.num_devices for node in nodes], options.order)[0]
    environment_of_run = WorkerEnvironment(
        cluster_path=request.run_dir.cluster_file,
        run_dir=request.run_dir.root,
        mode=request.options.mode,
        server=server.address if server else None,
        coordinators=coordinators.addresses if coordinators else (),
        encrypts=options.encrypts(between_hosts=False),
    )
    hidden = {} if request.shares_cluster_file else {environment.CLUSTER: "", environment.NODE: ""}
    group = build_worker_group(
        nodes,
        request.options.program.argv(sys.executable, entry=entry.__file__ if request.elastic else None),
        request.node_context.pick_address(nodes[first_index].name),
        num_cpus=len(os.sched_getaffinity(0)),
        common_environment=options.apply_to(environment_of_run),
        node_environ=lambda node, device: {**request.node_context.node_environ(node, device), **hidden},
        order=options.order,
    )
    if coordinators is None:
        return group
    return replace(group, workers=tuple(supervise.with_member_name(each, 0) for each in group.workers))


def _initial_record(request: RunRequest, group: WorkerGroup, attempt: int) -> dict[str, Any]:
    ranks = {node.name: [w.global_rank for w in group.workers if w.node == node.name] for node in request.cluster.nodes}
    return {
        **run_dir.software_versions(),
        "command": request.options.program.command_words(),
        "attempt": attempt,
        "cluster": {
            "name": request.cluster.name,
            "path": request.cluster_path,
            "nodes": [{"name": name, "workers": members} for name, members in ranks.items()],
        },
        "world_size": group.world_size,
        **request.options.worker_options.to_record(),
        "mode": request.options.mode,
        "elastic": str(request.elastic) if request.elastic else None,
        "spares": request.options.num_spares,
        "lab": request.node_context.lab_name,
        "lab_quotas": request.node_context.quota_kind,
    }


def _announce(request: RunRequest, group: WorkerGroup, attempt: int, stderr: TextIO) -> None:
    nodes = ", ".join(f"{node.name} ({len(node.devices)})" for node in request.cluster.nodes[:8])
    more = ", ..." if len(request.cluster.nodes) > 8 else ""
    where = path_from_here(request.run_dir.root)
    workers = "1 worker" if group.world_size == 1 else f"{group.world_size} workers"
    lines = [f"ringweave: {workers} on {nodes}{more}; files in {shlex.quote(where)}"]
    if request.node_context.quota_kind == cpu_quotas.DUTY_CYCLE:
        lines.append(f"ringweave: {cpu_quotas.DUTY_CYCLE_NOTE}")
    if attempt > 1:
        lines.append(
            f"ringweave: attempt {attempt}; files of attempt {attempt - 1} are in {where}/attempts/{attempt - 1}"
        )
    write_message(stderr, "\n".join(lines) + "\n")
