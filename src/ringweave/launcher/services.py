"""Services of a run beside its workers: parameter server and coordinators, their credentials and processes."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ringweave import rpc, telemetry
from ringweave.errors import LaunchError, RpcError
from ringweave.launcher import bootstrap
from ringweave.launcher.membership_history import MembershipHistory, PastMembers
from ringweave.launcher.node_context import NodeContext
from ringweave.launcher.restarts import RestartPolicy
from ringweave.launcher.run_dir import RunDir
from ringweave.launcher.workers import HostPort, WorkerSpec
from ringweave.membership.messages import CoordinatorStatus, CoordinatorStatusRequest, is_ring_part
from ringweave.membership.settings import MemberBounds
from ringweave.rpc import CertificateAuthority, Credentials, Identity
from ringweave.topology import Cluster


@dataclass(frozen=True, kw_only=True, slots=True)
class SidecarEndpoint:
    """Endpoint of a sidecar process."""

    node: str
    advertised: HostPort
    """Address by which others reach it."""
    listen_host: str | None = None
    """Address that it listens at; None: the advertised host, which may be a name that others resolve."""

    @property
    def bind_host(self) -> str:
        """Address that it listens at."""
        return self.listen_host or self.advertised.host


def start_sidecar(
    description: str,
    argv: Sequence[str],
    *,
    endpoint: SidecarEndpoint,
    node_context: NodeContext,
    environ: Mapping[str, str],
    log: Path,
    credentials_fd: int,
) -> "subprocess.Popen[bytes]":
    """Start a sidecar process on its node, in its own session; the kernel kills it when this process dies.

    Args:
        description: Description of the process, for the error.
        argv: Command line.
        endpoint: Endpoint of the process.
        node_context: Context that runs processes on the node.
        environ: Inherited environment; the node's own variables override it.
        log: File to which its output is appended.
        credentials_fd: Descriptor of its credentials, which it inherits; closed here.

    Raises:
        LaunchError: It could not be started.
    """
    command = [
        sys.executable,
        "-I",
        "-S",
        bootstrap.__file__,
        str(os.getpid()),
        *node_context.wrap_node_command(endpoint.node, argv),
    ]
    try:
        with log.open("ab") as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**environ, **node_context.node_environ(endpoint.node)},
                start_new_session=True,
                pass_fds=(credentials_fd,),
            )
    except OSError as error:
        raise LaunchError(f"{description} could not be started: {error}. [node {endpoint.node}]") from error
    finally:
        os.close(credentials_fd)


COORDINATOR_ROLE = "coordinator"
_COORDINATOR_MAIN = "ringweave.membership.main"
_COORDINATOR_STOP_TIMEOUT_S = 3.0
_QUERY_TIMEOUT_S = 2.0
"""Upper limit of each step of a query; the supervision of the workers waits for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorPair:
    """The two coordinators of a job."""

    endpoints: Sequence[SidecarEndpoint]
    """Endpoints of both; the first one is active at the start."""
    bounds: MemberBounds
    """Minimum and maximum number of members of the job."""
    expected_members: int
    """Number of members that the first generation waits for."""
    initial_members: Sequence[str] = ()
    """Members that start right after a coordinator; the earlier members in their slots have ended."""

    @property
    def addresses(self) -> tuple[tuple[str, int], ...]:
        """(host, port) of each."""
        return tuple((endpoint.advertised.host, endpoint.advertised.port) for endpoint in self.endpoints)

    def arguments(self, index: int, *, is_standby: bool, is_first: bool) -> list[str]:
        """Return the command-line arguments of one coordinator, without its credentials and its run directory.

        Only a coordinator's first process gets `initial_members`: later on these may be members already.
        """
        address = self.endpoints[index].advertised
        host, port = self.addresses[1 - index]
        arguments = [
            "--host",
            self.endpoints[index].bind_host,
            "--port",
            str(address.port),
            "--other",
            f"{host}:{port}",
        ]
        arguments += ["--elastic", str(self.bounds), "--expected", str(self.expected_members), "--index", str(index)]
        arguments += ["--successors", ",".join(self.initial_members)] if self.initial_members and is_first else []
        return [*arguments, "--standby"] if is_standby else arguments


class CoordinatorProcesses:
    """Coordinator processes that this process starts and restarts; a new one learns its state from the members.

    A coordinator that dies time after time is given up. Training goes on: it needs coordinators only when members come
    or go.
    """

    def __init__(
        self,
        pair: CoordinatorPair,
        node_context: NodeContext,
        run_dir: RunDir,
        credentials: Callable[[int], Credentials],
        *,
        standby_by_index: Mapping[int, bool],
        give_up: Callable[[str], object] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the object; starts no process yet.

        Args:
            pair: Both coordinators.
            node_context: Context that runs processes on a node.
            run_dir: Gets their logs and events.
            credentials: Index -> credentials of its next process.
            standby_by_index: Index of each coordinator that this process starts -> it is a standby at first.
            give_up: Gets a text about each coordinator that is not restarted.
            clock: Monotonic seconds.
        """
        self._pair, self._node_context, self._run_dir, self._credentials = pair, node_context, run_dir, credentials
        self._standby_by_index, self._give_up, self._clock = dict(standby_by_index), give_up, clock
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._restart_policies = {index: RestartPolicy() for index in self._standby_by_index}
        self._environ: Mapping[str, str] = {}

    @property
    def pids(self) -> frozenset[int]:
        """Process ids of the coordinators that run."""
        return frozenset(process.pid for process in self._processes.values() if process.poll() is None)

    @contextmanager
    def running(self, environ: Mapping[str, str]) -> Iterator[None]:
        """Run them for the length of a block.

        Raises:
            LaunchError: One could not be started.
        """
        self._environ = environ
        try:
            for index, is_standby in self._standby_by_index.items():
                self._start_process(index, is_standby=is_standby, is_first=True)
            yield
        finally:
            for process in self._processes.values():
                process.terminate()
            for process in self._processes.values():
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_COORDINATOR_STOP_TIMEOUT_S)
                process.kill()
                process.wait()

    def restart_dead(self) -> None:
        now_s = self._clock()
        for index, process in list(self._processes.items()):
            restart_policy = self._restart_policies[index]
            exit_code = process.poll()
            if exit_code is not None and restart_policy.record_exit(now_s, exit_code):
                self._report_if_given_up(index, f"the last one with exit code {exit_code}")
            if restart_policy.take_due(now_s):
                try:
                    self._start_process(index, is_standby=True, is_first=False)
                except (LaunchError, OSError) as error:
                    restart_policy.record_death(0.0, now_s)
                    self._report_if_given_up(index, f"and a replacement could not be started: {error}")

    def _report_if_given_up(self, index: int, how: str) -> None:
        restart_policy = self._restart_policies[index]
        if restart_policy.has_given_up:
            node, log = self._pair.endpoints[index].node, self._log(index)
            self._give_up(
                f"coordinator {index} on node {node} is given up: {restart_policy.num_early_deaths} of its processes "
                f"in a row ended soon after their start, {how}. Training continues, without a standby for the other "
                f"coordinator. See the cause in {log}."
            )

    def _log(self, index: int) -> Path:
        return self._run_dir.root / "logs" / f"coordinator-{index}.log"

    def _start_process(self, index: int, *, is_standby: bool, is_first: bool) -> None:
        secret = self._credentials(index).to_descriptor()
        arguments = self._pair.arguments(index, is_standby=is_standby, is_first=is_first)
        command = [sys.executable, "-m", _COORDINATOR_MAIN, "--credentials", f"fd:{secret}", *arguments]
        command += ["--run-dir", str(self._run_dir.root)]
        self._processes[index] = start_sidecar(
            "coordinator",
            command,
            endpoint=self._pair.endpoints[index],
            node_context=self._node_context,
            environ=self._environ,
            log=self._log(index),
            credentials_fd=secret,
        )
        self._restart_policies[index].record_start(self._clock())


class RunCoordinators:
    """The two coordinators of one run, on two nodes where there are two."""

    def __init__(
        self,
        endpoints: list[SidecarEndpoint],
        bounds: MemberBounds,
        expected: int,
        node_context: NodeContext,
        run_dir: RunDir,
        authority: CertificateAuthority | None = None,
        give_up: Callable[[str], object] = lambda text: None,
    ) -> None:
        """`authority` is the job's certificate authority, if there is one already.

        `give_up` gets a text about each coordinator that is not restarted.
        """
        self._authority = authority or CertificateAuthority(
            Identity(job=f"run-{os.getpid()}", role=COORDINATOR_ROLE, name="0").job
        )
        self._pair = CoordinatorPair(endpoints=endpoints, bounds=bounds, expected_members=expected)
        self._processes = CoordinatorProcesses(
            self._pair,
            node_context,
            run_dir,
            credentials=lambda index: self._authority.issue(COORDINATOR_ROLE, str(index)),
            standby_by_index={0: False, 1: True},
            give_up=give_up,
        )
        self._history = MembershipHistory(
            run_dir.events, self._query_members if node_context.lab_name is None else lambda names: ()
        )
        self._authentication: rpc.PeerAuthentication | None = None

    @classmethod
    def on_cluster(
        cls,
        bounds: MemberBounds,
        cluster: Cluster,
        node_context: NodeContext,
        run_dir: RunDir,
        authority: CertificateAuthority | None = None,
        give_up: Callable[[str], object] = lambda text: None,
    ) -> "RunCoordinators":
        """Create the coordinators of a run on a cluster.

        Raises:
            LaunchError: There is no free port.
        """
        names = [node.name for node in cluster.nodes]
        coordinator_nodes = [names[0], names[1 % len(names)]]
        endpoints = [
            SidecarEndpoint(node=node, advertised=node_context.pick_address(node)) for node in coordinator_nodes
        ]
        return cls(
            endpoints,
            bounds,
            sum(node.num_devices for node in cluster.nodes),
            node_context,
            run_dir,
            authority,
            give_up,
        )

    @property
    def addresses(self) -> tuple[tuple[str, int], ...]:
        """(host, port) of each; the first one is active at the start."""
        return self._pair.addresses

    @property
    def pids(self) -> frozenset[int]:
        """Process ids of the coordinators that run."""
        return self._processes.pids

    def open_credentials(self, worker: WorkerSpec) -> int:
        """Open a descriptor of the worker's credentials, which the worker inherits; they name its member."""
        return self._authority.issue("worker", worker.environ["RINGWEAVE_MEMBER"]).to_descriptor()

    def running(self, environ: Mapping[str, str]) -> AbstractContextManager[None]:
        """Run both for the length of a block.

        Raises:
            LaunchError: One could not be started.
        """
        return self._processes.running(environ)

    def restart_dead(self) -> None:
        self._processes.restart_dead()

    def past_members(self, names: Collection[str] = ()) -> PastMembers:
        """Return the past members by the event log; query the coordinators where it lacks one of these names.

        Coordinators in a lab are not queried: this process cannot reach the lab's network.
        """
        return self._history.read(names)

    def _query_members(self, names: Collection[str]) -> set[str]:
        """Return the current members by the coordinators; all these names where rings have memberships of their own."""
        members: set[str] = set()
        with suppress(OSError, RuntimeError):  # no free descriptor or thread
            self._authentication = self._authentication or rpc.TlsAuthentication(self._authority.issue("launcher", "0"))
            for address in self.addresses:
                with suppress(RpcError):  # the other coordinator knows
                    count = _query_member_count(address, self._authentication)
                    members.update(count.members, names if any(map(is_ring_part, count.parts)) else ())
        return members


def _query_member_count(address: tuple[str, int], authentication: rpc.PeerAuthentication) -> CoordinatorStatus:
    limits, (host, port) = rpc.RpcLimits(handshake_s=_QUERY_TIMEOUT_S), address
    with rpc.RpcClient.connect(
        host, port, authentication, role=COORDINATOR_ROLE, limits=limits, timeout_s=_QUERY_TIMEOUT_S
    ) as client:
        count = client.call(CoordinatorStatusRequest(), timeout_s=_QUERY_TIMEOUT_S).message
    assert isinstance(count, CoordinatorStatus), "the class of the reply"
    return count


SERVER_ROLE = "server"
_SERVER_STOP_TIMEOUT_S = 5.0
_SUMMARY_PREFIX, _SUMMARY_MARK = "parameter server: ", "pushes applied"


class JobServer:
    """Parameter server of one run, on the best connected node, with an optional standby on another node.

    The key of its job's certificate authority stays in this process. With a standby, the one of the two that dies is
    restarted and follows the other.
    """

    def __init__(
        self,
        endpoints: Sequence[SidecarEndpoint],
        node_context: NodeContext,
        run_dir: RunDir,
        authority: CertificateAuthority,
        *,
        give_up: Callable[[str], object] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`endpoints` are the endpoints of the server and, if there is one, of its standby.

        `give_up` gets a text about one that dies time after time; it is not restarted.
        """
        self._endpoints, self._node_context, self._run_dir = tuple(endpoints), node_context, run_dir
        self.authority = authority
        self._log = telemetry.EventLog(run_dir.events)
        self._give_up, self._clock = give_up, clock
        self._restart_policies = [RestartPolicy() for _ in endpoints]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._environ: Mapping[str, str] = {}

    @classmethod
    def for_mode(
        cls,
        mode: str | None,
        cluster: Cluster,
        node_context: NodeContext,
        run_dir: RunDir,
        *,
        has_standby: bool = False,
        give_up: Callable[[str], object] = lambda text: None,
    ) -> "JobServer | None":
        """Create the server that a mode needs, or may come to need (`auto`); return None if it needs none.

        Raises:
            LaunchError: There is no free port.
        """
        from ringweave.planning import group_planner, modes

        if mode not in (*modes.SERVER_MODES, modes.AUTO) or (mode == modes.AUTO and cluster.num_nodes == 1):
            return None
        best_node = group_planner.find_best_connected(cluster).node
        others = [node.name for node in cluster.nodes if node.name != best_node]
        nodes = [best_node, *([*others, best_node][:1] if has_standby else ())]
        job = Identity(job=f"run-{os.getpid()}", role=SERVER_ROLE, name="0").job
        endpoints = [SidecarEndpoint(node=node, advertised=node_context.pick_address(node)) for node in nodes]
        return cls(endpoints, node_context, run_dir, CertificateAuthority(job), give_up=give_up)

    @property
    def node(self) -> str:
        """Node of the server at the start of the run."""
        return self._endpoints[0].node

    @property
    def address(self) -> str:
        """`host:port`, for the workers; with a standby both, separated by a comma."""
        return ",".join(_host_port_text(endpoint) for endpoint in self._endpoints)

    @property
    def exit_code(self) -> int | None:
        """Exit code of an ended server without a standby, negative if a signal ended it; otherwise None."""
        return self._processes[0].poll() if len(self._processes) == 1 else None

    @property
    def pids(self) -> frozenset[int]:
        """Process ids of the server and its standby that run."""
        return frozenset(process.pid for process in self._processes if process.poll() is None)

    @property
    def num_connections(self) -> int:
        """Number of connections that are open now, to the server and its standby."""
        return sum(
            count_established(process.pid, endpoint.advertised.port)
            for process, endpoint in zip(self._processes, self._endpoints, strict=False)
            if process.poll() is None
        )

    def open_credentials(self, worker: WorkerSpec) -> int:
        """Open a descriptor of the worker's credentials, which the worker inherits."""
        return self.authority.issue("worker", str(worker.global_rank)).to_descriptor()

    @contextmanager
    def running(self, environ: Mapping[str, str]) -> Iterator[None]:
        """Run the server for the length of a block.

        Raises:
            LaunchError: It could not be started.
        """
        self._environ = environ
        try:
            for index in range(len(self._endpoints)):
                self._processes.append(self._start_process(index))
            yield
        finally:
            for index, process in enumerate(self._processes):
                found = process.poll()
                self._record_exit(
                    index, _terminate_process(process) if found is None else found, was_stopped=found is None
                )

    def restart_dead(self) -> None:
        """Restart a dead server or standby, if there is another one that it can follow."""
        now_s = self._clock()
        for index, process in enumerate(self._processes if len(self._endpoints) > 1 else ()):
            restart_policy, exit_code = self._restart_policies[index], process.poll()
            if exit_code and restart_policy.record_exit(now_s, exit_code):
                self._record_exit(index, exit_code, was_stopped=False)
                self._report_if_given_up(index, f"the last one with exit code {exit_code}")
            if restart_policy.take_due(now_s):
                try:
                    self._processes[index] = self._start_process(index)
                except (LaunchError, OSError) as error:
                    restart_policy.record_death(0.0, now_s)
                    self._report_if_given_up(index, f"and a replacement could not be started: {error}")

    def _report_if_given_up(self, index: int, last: str) -> None:
        if self._restart_policies[index].has_given_up:
            self._give_up(self._give_up_text(index, last, self._restart_policies[index].num_early_deaths))

    def _give_up_text(self, index: int, last: str, num_deaths: int) -> str:
        node, log = self._endpoints[index].node, self._run_dir.server_log(index)
        return (
            f"parameter server {index} on node {node} is given up: {num_deaths} of its processes in a row ended "
            f"soon after their start, {last}. Training continues with the other one, without a standby. "
            f"See the cause in {log}."
        )

    def summary_text(self) -> str:
        """Return the server's final summary for the user, or a notice that it served no push."""
        lines = [line for index in range(len(self._endpoints)) for line in self._log_lines(index)]
        summaries = [line for line in lines if line.startswith(_SUMMARY_PREFIX) and _SUMMARY_MARK in line]
        if summaries:
            return f"ringweave: {summaries[-1]}\n"
        last = lines[-1] if lines else "it printed nothing"
        return f"ringweave: the parameter server on node {self.node} served no push ({last})\n"

    def _log_lines(self, index: int) -> list[str]:
        path = self._run_dir.server_log(index)
        return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []

    def _record_exit(self, index: int, exit_code: int, *, was_stopped: bool) -> None:
        self._log.write(
            "server_exited",
            node=self._endpoints[index].node,
            exit_code=exit_code if exit_code >= 0 else None,
            signal=signal.Signals(-exit_code).name if exit_code < 0 else None,
            stopped=was_stopped,
        )

    def _start_process(self, index: int) -> "subprocess.Popen[bytes]":
        endpoint = self._endpoints[index]
        secret = self.authority.issue(SERVER_ROLE, str(index)).to_descriptor()
        serve = [sys.executable, "-m", "ringweave", "server", "--host", endpoint.advertised.host]
        serve += ["--port", str(endpoint.advertised.port), "--credentials", f"fd:{secret}"]
        serve += ["--node", endpoint.node, "--run-dir", str(self._run_dir.root)]
        if len(self._endpoints) > 1:
            serve += ["--other", _host_port_text(self._endpoints[1 - index]), "--index", str(index)]
            serve += ["--claims", str(self._run_dir.leadership_log)]
        log = self._run_dir.server_log(index)
        process = start_sidecar(
            "parameter server",
            serve,
            endpoint=endpoint,
            node_context=self._node_context,
            environ=self._environ,
            log=log,
            credentials_fd=secret,
        )
        self._restart_policies[index].record_start(self._clock())
        self._log.write("server_started", node=endpoint.node, pid=process.pid, address=_host_port_text(endpoint))
        return process


def _host_port_text(endpoint: SidecarEndpoint) -> str:
    return f"{endpoint.advertised.host}:{endpoint.advertised.port}"


def count_established(pid: int, port: int) -> int:
    """Count the established connections at a port in the process's own network namespace, as the kernel lists them."""
    wanted, established = f":{port:04X}", "01"
    count = 0
    for family in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            rows = [line.split() for line in Path(f"/proc/{pid}/net/{family}").read_text(encoding="ascii").splitlines()]
            count += sum(row[1].endswith(wanted) and row[3] == established for row in rows[1:])
    return count


def _terminate_process(process: "subprocess.Popen[bytes]") -> int:
    """Terminate a process, by SIGKILL if needed; return its exit code, negative if a signal ended it."""
    process.terminate()
    try:
        return process.wait(_SERVER_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
