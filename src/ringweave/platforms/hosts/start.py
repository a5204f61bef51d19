"""Start of a run on hosts, from the command: connects to all of them, checks them, sends files, starts the services."""

import os
import secrets
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ringweave import __version__, ports, units
from ringweave.environment import PORTS, PROBE, is_same_minor
from ringweave.errors import LaunchError, explain
from ringweave.jobs import admission
from ringweave.jobs.admission import PermissionCache
from ringweave.jobs.records import Job
from ringweave.jobs.request import ELASTIC_SERVER_MODES, ElasticRequest, JobRequest, NodeRequest
from ringweave.launcher.local_run import RunOptions
from ringweave.launcher.output import write_notice
from ringweave.launcher.run_dir import software_versions
from ringweave.launcher.workers import spread_slots
from ringweave.membership.settings import MemberBounds
from ringweave.platforms import submission
from ringweave.platforms.hosts import attach, host_list, install, join_protocol, run_entry
from ringweave.platforms.hosts.controller import MAX_GROWN_WORKERS
from ringweave.platforms.hosts.host_list import HostList, HostSpec
from ringweave.platforms.hosts.messages import COMMAND_ROLE, HOST_ROLE
from ringweave.platforms.hosts.script_files import ScriptFile, collect_files
from ringweave.platforms.hosts.ssh import HostConnections, HostError, SshConnection, end_run_at_once, run_parallel
from ringweave.platforms.submission import JobOrigin
from ringweave.ports import PortRange
from ringweave.rpc import CertificateAuthority

START_CALL_TIMEOUT_S = 30.0
MIN_FREE_DISK_BYTES = 64_000_000
"""Free space below which logs and the record of a run may not find room."""
MAX_ROUND_TRIP_S = 0.1
"""Longer ones slow train steps down, in which hosts wait for each other's messages several times."""
FORWARDED_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "OMP_", "MKL_", "PYTORCH_", "HF_", "WANDB_")
"""Prefixes of the command's variables that workers on all hosts get too."""


def check_hosts(connections: Sequence[SshConnection]) -> None:
    """Refuse hosts that differ in what a run needs equal, with one line for each.

    Raises:
        HostError: ringweave or torch differ, or a clock is off.
    """
    problems = find_differences(connections)
    if problems:
        raise HostError("\n".join(problems))


def find_differences(connections: Sequence[SshConnection]) -> list[str]:
    """Return one line for each thing in which hosts differ that a run needs equal."""
    own = software_versions()
    problems: list[str] = []
    times = [connection.hello["time"] - time.time() for connection in connections]
    for connection, offset_s in zip(connections, times, strict=True):
        node, hello = connection.host.node, connection.hello
        if hello["ringweave"] != __version__:
            do = f"Install ringweave {__version__} there, or add --install"
            problems.append(_difference("ringweave", node, hello["ringweave"], __version__, do))
        if hello["torch"] is None:
            do = "Install torch for the interpreter there, name another with --python, or add --install"
            problems.append(explain(f"torch on host {node}", got="none", expected=str(own["torch"]), do=do))
        elif not is_same_minor(hello["torch"], connections[0].hello["torch"]):
            first = connections[0]
            expected = f"{first.hello['torch']}, as on host {first.host.node}, or another patch release of it"
            do = "Install the same minor version of torch on all hosts"
            problems.append(_difference("torch", node, hello["torch"], expected, do))
        if (
            abs(offset_s - statistics.median(times)) > join_protocol.MAX_CLOCK_DIFFERENCE_S
            or abs(offset_s) > join_protocol.MAX_CLOCK_DIFFERENCE_S
        ):
            do = "Set it, or start its time service: timedatectl set-ntp true"
            got = f"{offset_s:+.0f} s from this machine's"
            problems.append(explain(f"clock of host {node}", got=got, expected="the same time", do=do))
        if hello["free_disk"] < MIN_FREE_DISK_BYTES:
            expected, do = (
                f"at least {units.format_bytes(MIN_FREE_DISK_BYTES)}",
                f"Free space for {hello['state_folder']}",
            )
            got = units.format_bytes(hello["free_disk"])
            problems.append(explain(f"free disk of host {node}", got=got, expected=expected, do=do))
    return problems


def find_distant(connections: Sequence[SshConnection]) -> list[str]:
    """Return one line for each host whose answers take long; a run works there, but slowly."""
    texts = []
    for connection, clock in zip(connections, run_parallel(SshConnection.read_clock, connections), strict=True):
        if clock.round_trip_s > MAX_ROUND_TRIP_S:
            what, got = f"round trip to host {connection.host.node}", f"{clock.round_trip_s:.2f} s over ssh"
            do = "Leave the host out, or train in a mode that waits for it less often: --mode local, or ps-hra"
            expected = f"at most {MAX_ROUND_TRIP_S:g} s, as each train step waits for it several times"
            texts.append(explain(what, got=got, expected=expected, do=do))
    return texts


def _difference(what: str, node: str, got: object, expected: str, do: str) -> str:
    return explain(f"{what} on host {node}", got=got, expected=expected, do=do)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostsRunRequest:
    """Run on hosts, as the command asks for it."""

    job: Job
    """Admitted job; its nodes are the hosts in their order."""
    host_list: HostList
    directory: Path
    """Directory of the script on this machine."""
    options: run_entry.HostsOptions
    run_dir: Path | None
    """Folder on this machine that gets the output; None for a job that is not followed by the command."""
    notify: Callable[[str], object]
    """Gets a text about each step that takes time."""
    ports: PortRange | None = None
    """Ports of all listeners of the run, but for torch's own; None: any."""
    bounds: MemberBounds | None = None
    """Bounds of `--elastic`; None: it cannot grow."""
    join_expiry_s: float = join_protocol.DEFAULT_EXPIRY_S
    """Seconds for which the tokens of joining hosts count."""

    @property
    def elastic_bounds(self) -> MemberBounds | None:
        """Bounds of an elastic run; a submitted job does not grow beyond its workers."""
        elastic, num_workers = self.job.request.elastic, self.job.request.num_workers
        if elastic is None:
            return None
        return self.bounds or MemberBounds(min_members=elastic.min, max_members=num_workers)


def find_slots(request: HostsRunRequest, connections: Sequence[SshConnection]) -> tuple[int, ...]:
    """Return the slots of workers on each host: those of the initial workers, and of those that may come later.

    A cluster file has no others, nor have rings; a host has as many as GPUs if the workers have GPUs.
    """
    job, bounds, hosts = request.job, request.elastic_bounds, request.host_list.hosts
    counts = [host.workers for host in hosts]
    is_fixed = job.request.mode in ELASTIC_SERVER_MODES or request.host_list.cluster_text is not None
    if bounds is None or is_fixed:
        return tuple(counts)
    most = max(sum(counts), min(bounds.max_members, MAX_GROWN_WORKERS))
    limits = [host_list.MAX_WORKERS_PER_HOST] * len(hosts)
    if job.request.device == "cuda":
        gpus = {connection.host.node: int(connection.hello["gpus"]) for connection in connections}
        limits = [max(host.workers, gpus.get(host.node, 0)) for host in hosts]
    return tuple(spread_slots(counts, most, limits=limits))


def _make_origin(request: HostsRunRequest, connections: Sequence[SshConnection]) -> JobOrigin:
    directory, cluster = str(request.directory), request.host_list.cluster_text
    slots = find_slots(request, connections)
    return JobOrigin(directory=directory, script_text=None, environ={}, cluster=cluster, slots=slots)


def start_run(request: HostsRunRequest, connections: HostConnections) -> run_entry.KnownRun:
    """Send the files and start the services on all hosts.

    Raises:
        HostError: A host refuses; what was started has been ended then.
    """
    run_id = f"{request.job.request.name}-{secrets.token_hex(4)}"
    try:
        return _start_run(request, connections, run_id)
    except BaseException:
        end_run_at_once(connections.open, run_id)
        raise


def _start_run(request: HostsRunRequest, connections: HostConnections, run_id: str) -> run_entry.KnownRun:
    directories = prepare_files(request, connections.open, run_id)
    has_relay = any(host.joins for host in request.host_list.hosts)
    endpoints = run_parallel(lambda each: open_endpoint(each, request.ports, has_relay=has_relay), connections.open)
    reached = [index for index, host in enumerate(request.host_list.hosts) if not host.joins]
    authority = CertificateAuthority(run_id)
    invitations = _invite(request, connections, endpoints, authority)
    entry = run_entry.RunEntry(
        run_id=run_id,
        version=(1, 1),
        hosts=_all_endpoints(request.host_list.hosts, endpoints),
        voters=tuple(reached),
        seats=invitations.seats,
        job=request.job,
        origin=_make_origin(request, connections.open),
        bounds=request.elastic_bounds,
    )
    known = run_entry.KnownRun(
        run_id=run_id,
        name=request.job.request.name,
        hosts=request.host_list.reached,
        options=request.options,
        run_dir=str(request.run_dir or ""),
        join_lines=invitations.lines,
        joining=tuple((index, host.node) for index, host in enumerate(request.host_list.hosts) if host.joins),
    )
    environ = forwarded_environ(os.environ) | ({PORTS: str(request.ports)} if request.ports else {})

    def start(index: int, connection: SshConnection) -> None:
        config = run_entry.HostConfig(
            run_id=run_id,
            index=reached[index],
            node=connection.host.node,
            address=endpoints[index].address,
            port=endpoints[index].port,
            directory=directories[index],
            environ=environ,
            first_leader=reached[0],
            join_port=invitations.ports[index],
        )
        connection.call(
            "start",
            config=run_entry.HOST_CONFIG_JSON.dump(config),
            entry=run_entry.ENTRY_JSON.dump(entry),
            credentials=authority.issue(HOST_ROLE, connection.host.node).to_text(),
            command=authority.issue(COMMAND_ROLE, connection.host.node).to_text(),
            timeout_s=START_CALL_TIMEOUT_S,
        )

    check_reachable(connections.open, endpoints)
    run_entry.save_known_run(known)
    try:
        run_parallel(start, list(range(len(endpoints))), connections.open)
    except BaseException:
        run_entry.forget_known_run(known)
        raise
    return known


@dataclass(frozen=True, kw_only=True, slots=True)
class _Invitations:
    """Seats of the joining hosts, and what leads to them."""

    seats: tuple[run_entry.JoinSeat, ...]
    lines: Mapping[str, str]
    """Name of a joining host -> the line to type there."""
    ports: Sequence[int]
    """Port for joiners on each host that ssh reaches; zeros if nobody joins."""


def _invite(
    request: HostsRunRequest,
    connections: HostConnections,
    endpoints: Sequence[run_entry.HostEndpoint],
    authority: CertificateAuthority,
) -> _Invitations:
    """Issue the credentials of all joining hosts now, since the authority's key is forgotten soon."""
    seats, lines = [], {}
    joining = [(index, host) for index, host in enumerate(request.host_list.hosts) if host.joins]
    within = str(request.ports or "")
    ports = [connection.call("open_port", ports=within)["port"] if joining else 0 for connection in connections.open]
    for index, host in joining:
        credentials = [authority.issue(role, host.node) for role in (HOST_ROLE, COMMAND_ROLE)]
        token = join_protocol.JoinToken.create(credentials[0].authority_pem)
        expires_s = connections.open[0].hello["time"] + request.join_expiry_s
        seats.append(join_protocol.make_seat(index, token, credentials, expires_s))
        lines[host.node] = str(join_protocol.JoinLine(address=endpoints[0].address, port=ports[0], token=token))
    return _Invitations(seats=tuple(seats), lines=lines, ports=ports)


def _all_endpoints(
    hosts: Sequence[HostSpec], reached: Sequence[run_entry.HostEndpoint]
) -> tuple[run_entry.HostEndpoint, ...]:
    """Return an endpoint for each host in the order of the list; one that joins later has no address yet."""
    found = iter(reached)
    return tuple(
        run_entry.HostEndpoint(node=host.node, destination="", address="", port=0) if host.joins else next(found)
        for host in hosts
    )


def open_endpoint(
    connection: SshConnection, within: PortRange | None = None, *, has_relay: bool = False
) -> run_entry.HostEndpoint:
    """Let the host listen on free ports until its service starts; return where others reach it.

    `has_relay` says that it may have to take connections of hosts that cannot be called.
    """
    return run_entry.HostEndpoint(
        node=connection.host.node,
        destination=connection.host.destination,
        address=connection.host.address or _reachable_address(connection),
        port=connection.call("open_port", ports=str(within or ""))["port"],
        relay_port=connection.call("open_port", ports=str(within or ""))["port"] if has_relay else 0,
    )


def _reachable_address(connection: SshConnection) -> str:
    """Return the address at which the ssh connection arrived, unless that is a loopback address."""
    address = connection.hello["address"]
    others = connection.hello["addresses"]
    return others[0] if address.startswith(("127.", "::1")) and others else address


def check_reachable(connections: Sequence[SshConnection], endpoints: Sequence[run_entry.HostEndpoint]) -> None:
    """Check that every host reaches the port of every other one, which `open_port` holds open.

    Raises:
        HostError: Some cannot; one line for each pair, at most eight.
    """
    problems = find_unreachable(connections, endpoints)
    if problems:
        more = [f"and {len(problems) - 8} more"] if len(problems) > 8 else []
        raise HostError("\n".join([*problems[:8], *more]))


def find_unreachable(connections: Sequence[SshConnection], endpoints: Sequence[run_entry.HostEndpoint]) -> list[str]:
    """Return one line for each host that does not reach the port of another one."""

    def check(connection: SshConnection) -> list[str]:
        others = [each for each in endpoints if each.node != connection.host.node]
        where = [[each.address, each.port] for each in others]
        reasons = connection.call("unreachable", endpoints=where, timeout_s=10.0)["reasons"]
        return [_unreachable_text(connection.host.node, *pair) for pair in zip(others, reasons, strict=True) if pair[1]]

    return [text for texts in run_parallel(check, connections) for text in texts]


def _unreachable_text(node: str, endpoint: run_entry.HostEndpoint, reason: str) -> str:
    do = f"Open TCP between them in the firewall, or give {endpoint.node} another address"
    expected = f"a listener at {endpoint.address} port {endpoint.port}"
    return explain(f"connection from host {node} to {endpoint.node}", got=reason, expected=expected, do=do)


def prepare_files(request: HostsRunRequest, connections: Sequence[SshConnection], run_id: str) -> list[str]:
    """Return the workers' directory on each host: the script's own where it is shared, else a copy."""
    shared = find_shared(request.directory, connections)
    if all(shared):
        request.notify(f"files: all hosts share {request.directory}")
        return [str(request.directory)] * len(connections)
    files = collect_files(request.directory)
    sent = run_parallel(lambda connection: send_files(files, connection, run_id), connections)
    size, total = units.format_bytes(sum(file.size for file in files)), sum(number for _, number in sent)
    request.notify(f"files: {len(files)} of {request.directory} ({size}), {total} of them sent")
    return [directory for directory, _ in sent]


def find_shared(directory: Path, connections: Sequence[SshConnection]) -> list[bool]:
    """Return which hosts see this directory at the same path, by a file that is written for a moment."""
    token = secrets.token_hex(16).encode()
    mark = directory / f".ringweave-{token[:8].decode()}"
    try:
        mark.write_bytes(token)
    except OSError:
        return [False] * len(connections)
    try:
        return run_parallel(lambda each: each.call("has_file", token, path=str(mark))["found"], connections)
    finally:
        mark.unlink(missing_ok=True)


def send_files(files: Sequence[ScriptFile], connection: SshConnection, run_id: str) -> tuple[str, int]:
    """Send the files that a host does not have; return the directory there and the number of sent files."""
    by_digest = {file.digest: file for file in files}
    missing = connection.call("missing_blobs", digests=sorted(by_digest))["missing"]
    for digest in missing:
        connection.call("put_blob", by_digest[digest].path.read_bytes(), timeout_s=600.0)
    laid = [[file.relative, file.digest, file.mode] for file in files]
    directory = connection.call("lay_out", run_id=run_id, files=laid, timeout_s=120.0)["directory"]
    return directory, len(missing)


def forwarded_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of this environment that workers on all hosts get."""
    return {name: value for name, value in environ.items() if name.startswith(FORWARDED_PREFIXES) or name == PROBE}


def default_run_name(script: str, now: float, existing: Sequence[str]) -> str:
    """Return a name for a run, `train-1127-0941`, with a number if it is taken."""
    stem = "".join(c if c.isascii() and c.isalnum() else "-" for c in Path(script).stem.lower()).strip("-") or "run"
    stem = stem if stem[0].isalpha() else f"run-{stem}"
    base = f"{stem[:24].rstrip('-')}-{time.strftime('%m%d-%H%M', time.localtime(now))}"
    number = 1
    while (name := base if number == 1 else f"{base}-{number}") in existing:
        number += 1
    return name


ELASTIC_RETRIES = 1000
"""Replacements of a node in an elastic run: as on one machine, workers come back as long as others train."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostsRunOptions:
    """Options of a run on hosts."""

    run: RunOptions
    """Its program is found on this machine, by workers in `directory`."""
    hosts: str
    python: str | None
    name: str | None
    detach: bool
    install: bool = False
    """Install this ringweave on the hosts first."""
    ports: PortRange | None = None
    """Ports of all listeners of the run, but for torch's own; None: any."""
    join_expiry: float
    """Minutes for which the tokens of joining hosts count."""

    @property
    def directory(self) -> Path:
        """Directory of a script; of a module and of another command the current one, in which they are found."""
        program = self.run.program
        return Path(program.target).absolute().parent if program.is_script else Path.cwd()


def start_job(job: Job, hosts: HostList, directory: Path, options: run_entry.HostsOptions) -> None:
    """Start a submitted job, which nothing follows.

    Raises:
        HostError: A host refuses.
    """
    with HostConnections(hosts.hosts, options) as connections:
        check_hosts(connections.open)
        request = HostsRunRequest(
            job=job, host_list=hosts, directory=directory, options=options, run_dir=None, notify=write_notice
        )
        start_run(request, connections)


def run_on_hosts(options: HostsRunOptions) -> int:
    """Start a run on hosts and follow it; return the exit code."""
    hosts = host_list.parse_hosts(options.hosts)
    _check_ports(options, hosts)
    connect_options = (
        install.install_on_hosts(hosts.reached, options.python, write_notice)
        if options.install
        else run_entry.HostsOptions(python=options.python)
    )
    with HostConnections(hosts.reached, connect_options) as connections:
        check_hosts(connections.open)
        for text in find_distant(connections.open):
            write_notice(text.removesuffix("."))
        if options.ports is not None:
            kernel = [PortRange(*each.hello["kernel_ports"]) for each in connections.open]
            if notice := ports.outside_text(options.ports, kernel):
                write_notice(notice)
        job_request = _job_request(options, hosts, connections)
        job = admission.admit_job(
            job_request,
            requester=submission.os_user(),
            existing=[],
            permissions=PermissionCache(admission.OPEN_POLICY.find_permission),
            now=time.time(),
        )
        request = HostsRunRequest(
            job=job,
            host_list=hosts,
            directory=options.directory,
            options=connect_options,
            run_dir=_make_run_dir(options.run),
            notify=write_notice,
            ports=options.ports,
            bounds=options.run.bounds(hosts.num_workers),
            join_expiry_s=options.join_expiry * 60.0,
        )
        known = start_run(request, connections)
        named = ", ".join(f"{host.node} ({host.workers})" for host in hosts.hosts[:8])
        more = ", ..." if len(hosts.hosts) > 8 else ""
        write_notice(f"{known.name}: {hosts.num_workers} workers on {named}{more}; files in {known.run_dir}")
        for node, line in known.join_lines.items():
            write_notice(f"type on host {node}, within {options.join_expiry:g} minutes: ringweave join {line}")
        if options.detach:
            verbs = f"ringweave attach {known.name}, ringweave stop {known.name}"
            write_notice(f"it continues without this command: {verbs}")
            return 0
        return attach.follow_run(known, connections)


def _check_ports(options: HostsRunOptions, hosts: HostList) -> None:
    if options.ports is not None:
        host = max(hosts.hosts, key=lambda host: host.workers)
        # The host service, the store of the process group; then a coordinator and a parameter server.
        num_services = 4 if options.run.elastic else 2
        num_services += 2 * any(host.joins for host in hosts.hosts)  # the listener for joiners, the relay
        num_services += host.workers * ports.ENCRYPTED_LISTENERS_PER_WORKER
        needed = ports.needed_ports(host.workers, is_elastic=options.run.elastic is not None, num_services=num_services)
        ports.check_size(options.ports, needed, f"host {host.node}")


def _job_request(options: HostsRunOptions, hosts: HostList, connections: HostConnections) -> JobRequest:
    has_gpus = all(each.hello["gpus"] >= each.host.workers for each in connections.open)
    bounds = options.run.bounds(hosts.num_workers)
    retries = ELASTIC_RETRIES if bounds else 0
    names = [run.name for run in run_entry.list_known_runs()]
    program = options.run.program
    return JobRequest(
        name=options.name or default_run_name(program.target, time.time(), names),
        num_workers=hosts.num_workers,
        script=Path(program.target).name if program.is_script else None,
        module=program.target if program.is_module else None,
        command=program.target if program.is_command else None,
        directory=".",
        arguments=program.arguments,
        nodes=tuple(NodeRequest(name=host.node, capacity=host.workers, max_retries=retries) for host in hosts.hosts),
        device="cuda" if has_gpus else "cpu",
        mode=options.run.mode or "auto",
        **options.run.worker_options.to_fields(),
        elastic=ElasticRequest(min=bounds.min_members, spares=options.run.num_spares) if bounds else None,
        standby=options.run.has_standby,
        environment=options.run.log_environ,
        min_per_node=1,
    )


def _make_run_dir(options: RunOptions) -> Path:
    found = options.resolve_run_dir().root
    try:
        found.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"run directory {found}: {error.strerror}. Give another --run-dir.") from error
    return found
