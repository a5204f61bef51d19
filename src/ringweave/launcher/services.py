"""Services of a run beside its workers: parameter server and coordinators, their credentials and processes."""

import abc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ringweave import rpc, telemetry
from ringweave.errors import LaunchError, RpcError
from ringweave.files import rotation
from ringweave.jobs import modes
from ringweave.jobs.restart_policy import RestartPolicy
from ringweave.launcher import bootstrap
from ringweave.launcher.node_context import NodeContext
from ringweave.launcher.run_dir import RunDir
from ringweave.launcher.workers import HostPort
from ringweave.membership.messages import CoordinatorStatus, CoordinatorStatusRequest, is_ring_part
from ringweave.membership.settings import MemberBounds
from ringweave.rpc import Credentials
from ringweave.topology import Cluster

_SHELL_SIGNAL_BASE = 128
"""A shell exits with this plus the signal's number when a signal has ended its program."""


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
    inherited_fds: Sequence[int],
) -> "subprocess.Popen[bytes]":
    """Start a sidecar process on its node, in its own session; the kernel kills it when this process dies.

    Args:
        description: Description of the process, for the error.
        argv: Command line.
        endpoint: Endpoint of the process.
        node_context: Context that runs processes on the node.
        environ: Inherited environment; the node's own variables override it.
        log: File to which its output is appended.
        inherited_fds: Descriptors that it inherits, such as that of its credentials; closed here.

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
                pass_fds=tuple(inherited_fds),
            )
    except OSError as error:
        raise LaunchError(f"{description} could not be started: {error}. [node {endpoint.node}]") from error
    finally:
        for descriptor in inherited_fds:
            os.close(descriptor)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceSetup:
    """Objects that the services of a run, or of one node of a job, share."""

    node_context: NodeContext
    """Context that runs processes on a node."""
    run_dir: RunDir
    """Gets their logs and events."""
    issue: Callable[[str, int], Credentials]
    """Role and index -> credentials of the next process with them."""
    give_up: Callable[[str], object] = lambda text: None
    """Gets a text about each process that is not restarted."""
    clock: Callable[[], float] = time.monotonic


class ServiceProcesses(abc.ABC):
    """Processes of one service beside the workers, each with an index; one that dies time after time is given up."""

    _name: str
    _role: str
    """Role in the credentials."""
    _consequence: str
    """Consequence of giving a process up, for people."""
    _stop_timeout_s: float

    def __init__(self, endpoints: Mapping[int, SidecarEndpoint], setup: ServiceSetup) -> None:
        """`endpoints`: index -> endpoint of each process that runs here. Starts none yet."""
        self._own_endpoints, self._setup, self._run_dir = dict(endpoints), setup, setup.run_dir
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._restart_policies = {index: RestartPolicy() for index in endpoints}
        self._started_s: dict[int, float] = {}
        """Index -> start of a process whose end was not observed yet."""
        self._environ: Mapping[str, str] = {}

    @property
    def pids(self) -> frozenset[int]:
        """Process ids of those that run."""
        return frozenset(process.pid for process in self._processes.values() if process.poll() is None)

    @property
    def num_connections(self) -> int:
        return sum(
            count_established(process.pid, self._own_endpoints[index].advertised.port)
            for index, process in self._processes.items()
            if process.poll() is None
        )

    @property
    @abc.abstractmethod
    def failure_text(self) -> str:
        """Failure of the service without which no worker can go on, in words; else empty."""

    @abc.abstractmethod
    def is_needed(self, now_s: float) -> bool:
        """Return whether workers of other nodes still need it, after this node's workers have ended well."""

    @contextmanager
    def running(self, environ: Mapping[str, str]) -> Iterator[None]:
        """Run the processes for the length of a block.

        Raises:
            LaunchError: One could not be started.
        """
        self._environ = environ
        try:
            for index in self._own_endpoints:
                self._start_process(index, is_first=True)
            yield
        finally:
            self._stop_processes()

    def restart_dead(self) -> None:
        """Restart dead processes, after a delay where they died soon after their start."""
        now_s = self._setup.clock()
        for index, process in list(self._processes.items()):
            policy, exit_code = self._restart_policies[index], process.poll()
            if exit_code is not None and index in self._started_s and self._is_replaced(exit_code):
                was_killed = exit_code < 0 or exit_code > _SHELL_SIGNAL_BASE
                policy = policy.after_end(now_s - self._started_s.pop(index), now_s, is_useful=was_killed)
                self._restart_policies[index] = policy
                self._record_exit(index, exit_code, was_stopped=False)
                self._report_if_given_up(index, f"the last one with exit code {exit_code}")
            if policy.is_due(now_s):
                self._restart_policies[index] = policy.starting_at(None)
                try:
                    self._start_process(index, is_first=False)
                except (LaunchError, OSError) as error:
                    self._restart_policies[index] = policy.after_end(0.0, now_s)
                    self._report_if_given_up(index, f"and a replacement could not be started: {error}")

    @abc.abstractmethod
    def _is_replaced(self, exit_code: int) -> bool:
        """Return whether a process that ended with this code gets a successor."""

    @abc.abstractmethod
    def _log(self, index: int) -> Path: ...

    @abc.abstractmethod
    def _argv(self, index: int, credentials: str, *, is_first: bool) -> list[str]:
        """Return the command line; `credentials` names their descriptor."""

    def _take_inherited(self) -> list[int]:
        """Return the descriptors that the command line just made refers to, beside that of the credentials."""
        return []

    @abc.abstractmethod
    def _record_start(self, index: int, pid: int) -> None: ...

    @abc.abstractmethod
    def _record_exit(self, index: int, exit_code: int, *, was_stopped: bool) -> None: ...

    def _start_process(self, index: int, *, is_first: bool) -> None:
        secret = self._setup.issue(self._role, index).to_descriptor()
        argv, inherited = self._argv(index, f"fd:{secret}", is_first=is_first), self._take_inherited()
        process = self._processes[index] = start_sidecar(
            self._name,
            argv,
            endpoint=self._own_endpoints[index],
            node_context=self._setup.node_context,
            environ=self._environ,
            log=self._log(index),
            inherited_fds=[secret, *inherited],
        )
        self._started_s[index] = self._setup.clock()
        self._record_start(index, process.pid)

    def _stop_processes(self) -> None:
        ended = {index: process.poll() for index, process in self._processes.items()}
        for process in self._processes.values():
            process.terminate()
        for index, process in self._processes.items():
            with suppress(subprocess.TimeoutExpired):
                process.wait(self._stop_timeout_s)
            process.kill()
            self._record_exit(index, process.wait(), was_stopped=ended[index] is None)

    def _report_if_given_up(self, index: int, how: str) -> None:
        restart_policy = self._restart_policies[index]
        if restart_policy.has_given_up:
            node, log = self._own_endpoints[index].node, self._log(index)
            self._setup.give_up(
                f"{self._name} {index} on node {node} is given up: {restart_policy.num_failed_starts} of its processes "
                f"in a row ended soon after their start, {how}. {self._consequence} See the cause in {log}."
            )


def count_established(pid: int, port: int) -> int:
    """Count the established connections at a port in the process's own network namespace, as the kernel lists them."""
    wanted, established = f":{port:04X}", "01"
    count = 0
    for family in ("tcp", "tcp6"):
        with suppress(OSError):
            rows = [line.split() for line in Path(f"/proc/{pid}/net/{family}").read_text(encoding="ascii").splitlines()]
            count += sum(row[1].endswith(wanted) and row[3] == established for row in rows[1:])
    return count


COORDINATOR_ROLE = "coordinator"
_COORDINATOR_MAIN = "ringweave.membership.main"
COORDINATOR_LINGER_S = 10.0
"""Time that a coordinator stays for workers of other nodes after its own have finished; they report their end too."""
_OTHER_COORDINATOR_CONNECTIONS = 1
"""Number of connections of the other coordinator."""
_QUERY_TIMEOUT_S = 2.0
"""Upper limit of each step of a query; the supervision of the workers waits for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorPair:
    """The two coordinators of a job, or the one of a job on one node."""

    endpoints: Sequence[SidecarEndpoint]
    """Endpoints of them; the first one is active at the start."""
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
        others = [each for number, each in enumerate(self.addresses) if number != index]
        arguments = [
            "--host",
            self.endpoints[index].bind_host,
            "--port",
            str(address.port),
            *(word for host, port in others for word in ("--other", f"{host}:{port}")),
        ]
        arguments += ["--elastic", str(self.bounds), "--expected", str(self.expected_members), "--index", str(index)]
        arguments += ["--successors", ",".join(self.initial_members)] if self.initial_members and is_first else []
        return [*arguments, "--standby"] if is_standby else arguments


class CoordinatorProcesses(ServiceProcesses):
    """Coordinators of a run or of one node of a job; a new process learns its state from the members.

    Training goes on without them: it needs coordinators only when members come or go.
    """

    _name = _role = COORDINATOR_ROLE
    _consequence = "Training continues, without a standby for the other coordinator."
    _stop_timeout_s = 3.0

    def __init__(self, pair: CoordinatorPair, setup: ServiceSetup, standby_by_index: Mapping[int, bool]) -> None:
        """`standby_by_index`: index of each coordinator that runs here -> it is a standby at first."""
        super().__init__({index: pair.endpoints[index] for index in standby_by_index}, setup)
        self._pair, self._standby_by_index = pair, standby_by_index
        self._waiting_since_s: float | None = None

    @property
    def addresses(self) -> tuple[tuple[str, int], ...]:
        """(host, port) of each; the first one is active at the start."""
        return self._pair.addresses

    @property
    def failure_text(self) -> str:
        """Always empty: its death ends no round. This one is restarted, and the other one, if any, takes over."""
        return ""

    def is_needed(self, now_s: float) -> bool:
        """Return whether other nodes' workers are still connected, for a limited time after its own have finished."""
        self._waiting_since_s = now_s if self._waiting_since_s is None else self._waiting_since_s
        if now_s - self._waiting_since_s >= COORDINATOR_LINGER_S:
            return False
        return self.num_connections > _OTHER_COORDINATOR_CONNECTIONS

    def _is_replaced(self, exit_code: int) -> bool:
        return True

    def _log(self, index: int) -> Path:
        return self._run_dir.root / "logs" / f"coordinator-{index}.log"

    def _argv(self, index: int, credentials: str, *, is_first: bool) -> list[str]:
        is_standby = self._standby_by_index[index] or not is_first
        arguments = self._pair.arguments(index, is_standby=is_standby, is_first=is_first)
        command = [sys.executable, "-m", _COORDINATOR_MAIN, "--credentials", credentials, *arguments]
        return [*command, "--run-dir", str(self._run_dir.root)]

    def _record_start(self, index: int, pid: int) -> None:
        """Record nothing: coordinators write events of their own."""

    def _record_exit(self, index: int, exit_code: int, *, was_stopped: bool) -> None:
        """Record nothing: training goes on without them."""


def create_coordinators(bounds: MemberBounds, cluster: Cluster, setup: ServiceSetup) -> CoordinatorProcesses:
    """Create both coordinators of a run on a cluster, on two nodes where there are two.

    Raises:
        LaunchError: There is no free port.
    """
    names = [node.name for node in cluster.nodes]
    pair = CoordinatorPair(
        endpoints=[
            SidecarEndpoint(node=node, advertised=setup.node_context.pick_address(node))
            for node in (names[0], names[1 % len(names)])
        ],
        bounds=bounds,
        expected_members=sum(node.num_devices for node in cluster.nodes),
    )
    return CoordinatorProcesses(pair, setup, {0: False, 1: True})


class CoordinatorQuery:
    """Asks the coordinators of a job for its members."""

    def __init__(self, addresses: Sequence[tuple[str, int]], credentials: Callable[[], Credentials]) -> None:
        """`addresses` are (host, port) of each; `credentials` returns those of this process, for the first query."""
        self._addresses, self._credentials = addresses, credentials
        self._authentication: rpc.PeerAuthentication | None = None

    def members(self, names: Collection[str]) -> set[str]:
        """Return the current members; all these names where rings have memberships of their own."""
        members: set[str] = set()
        with suppress(OSError, RuntimeError):  # no free descriptor or thread
            self._authentication = self._authentication or rpc.TlsAuthentication(self._credentials())
            for address in self._addresses:
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
SERVER_IDLE_TIMEOUT_S = 10.0
"""A server without connections for this long is not needed any more: the script trained without it, or its members left
without a goodbye. A member that lost its connection is back within seconds."""
_SUMMARY_PREFIX, _SUMMARY_MARK = "parameter server: ", "pushes applied"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerPairMember:
    """One of the two parameter servers of a job, on its node."""

    index: int
    """Index of the server; 0 leads at the start."""
    open_log: Callable[[], int]
    """Returns a descriptor for a new process: a socket to the leadership log of both servers."""


class JobServer(ServiceProcesses):
    """Parameter server of one run or of one node of a job, with an optional standby on another node.

    With a standby, the one of the two that dies is restarted and follows the other.
    """

    _name, _role = "parameter server", SERVER_ROLE
    _consequence = "Training continues with the other one, without a standby."
    _stop_timeout_s = 5.0

    def __init__(
        self, endpoints: Sequence[SidecarEndpoint], setup: ServiceSetup, member: ServerPairMember | None = None
    ) -> None:
        """Create the object; starts no process yet.

        Args:
            endpoints: Endpoints of the server and, if there is one, of its standby.
            setup: Objects of the run or the node.
            member: The one of a job's two servers that runs on this node; None: all servers run here.
        """
        own = {index: each for index, each in enumerate(endpoints) if member is None or member.index == index}
        super().__init__(own, setup)
        self._endpoints, self._member = tuple(endpoints), member
        self._inherited: list[int] = []
        self._events = telemetry.EventLog(setup.run_dir.events)
        self._last_connected_s: float | None = None

    @classmethod
    def for_mode(
        cls, mode: str | None, cluster: Cluster, setup: ServiceSetup, *, has_standby: bool = False
    ) -> "JobServer | None":
        """Create the server that a mode needs, or may come to need (`auto`), on the best connected node of a run.

        Returns None if the mode needs none.

        Raises:
            LaunchError: There is no free port.
        """
        if mode not in (*modes.SERVER_MODES, modes.AUTO) or (mode == modes.AUTO and cluster.num_nodes == 1):
            return None
        from ringweave.planning import group_planner  # brings numpy, for which most runs need not wait

        best_node = group_planner.find_best_connected(cluster).node
        others = [node.name for node in cluster.nodes if node.name != best_node]
        nodes = [best_node, *([*others, best_node][:1] if has_standby else ())]
        endpoints = [SidecarEndpoint(node=node, advertised=setup.node_context.pick_address(node)) for node in nodes]
        return cls(endpoints, setup)

    @property
    def node(self) -> str:
        """Node of the server at the start of the run."""
        return self._endpoints[0].node

    @property
    def address(self) -> str:
        """`host:port`, for the workers; with a standby both, separated by a comma."""
        return ",".join(str(endpoint.advertised) for endpoint in self._endpoints)

    @property
    def exit_code(self) -> int | None:
        """Exit code of an ended server without a standby, negative if a signal ended it; otherwise None."""
        return self._processes[0].poll() if len(self._endpoints) == 1 and self._processes else None

    @property
    def failure_text(self) -> str:
        """Failure of a server without a standby, in words; empty while it runs, and after a good end."""
        code = self.exit_code
        if not code:
            return ""
        ending = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"the parameter server on node {self.node} {ending}"

    def is_needed(self, now_s: float) -> bool:
        """Return whether workers are or were recently connected.

        The server ends by itself when all rings have left it.
        """
        if self.exit_code is not None or {process.poll() for process in self._processes.values()} == {0}:
            return False
        if self._last_connected_s is None or self.num_connections:
            self._last_connected_s = now_s
        return now_s - self._last_connected_s < SERVER_IDLE_TIMEOUT_S

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
        return rotation.last_lines(path) if rotation.exists(path) else []

    def _is_replaced(self, exit_code: int) -> bool:
        """Return whether there is another one that a successor can follow, and the server has not finished."""
        return exit_code != 0 and len(self._endpoints) > 1

    def _log(self, index: int) -> Path:
        return self._run_dir.server_log(index)

    def _argv(self, index: int, credentials: str, *, is_first: bool) -> list[str]:
        endpoint = self._endpoints[index]
        serve = [sys.executable, "-m", "ringweave", "server", "--host", endpoint.bind_host]
        serve += ["--port", str(endpoint.advertised.port), "--credentials", credentials]
        serve += ["--node", endpoint.node, "--run-dir", str(self._run_dir.root)]
        if len(self._endpoints) > 1:
            serve += ["--other", str(self._endpoints[1 - index].advertised), "--index", str(index)]
            serve += ["--claims", self._open_log()]
        return serve

    def _open_log(self) -> str:
        """Return the place of the leadership log for the next process."""
        if self._member is None:
            return str(self._run_dir.leadership_log)
        self._inherited.append(self._member.open_log())
        return f"fd:{self._inherited[-1]}"

    def _take_inherited(self) -> list[int]:
        inherited, self._inherited = self._inherited, []
        return inherited

    def _record_start(self, index: int, pid: int) -> None:
        endpoint = self._endpoints[index]
        self._events.write("server_started", node=endpoint.node, pid=pid, address=str(endpoint.advertised))

    def _record_exit(self, index: int, exit_code: int, *, was_stopped: bool) -> None:
        self._events.write(
            "server_exited",
            node=self._endpoints[index].node,
            exit_code=exit_code if exit_code >= 0 else None,
            signal=signal.Signals(-exit_code).name if exit_code < 0 else None,
            stopped=was_stopped,
        )
