"""Node context: how processes of a run are put on a node, on this machine as it is or inside of a lab; free ports."""

import abc
import errno
import random
import socket
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ringweave import ports
from ringweave.environment import FINDINGS
from ringweave.errors import LaunchError
from ringweave.lab import Lab
from ringweave.launcher.workers import HostPort, WorkerSpec
from ringweave.ports import PortRange

LOWEST_PORT, HIGHEST_PORT = 10_000, 65_535


def non_ephemeral_ports(ephemeral: tuple[int, int]) -> list[int]:
    """Return the ports outside the ephemeral range: no outgoing connection can take one between choice and use."""
    low, high = ephemeral
    return [port for port in range(LOWEST_PORT, HIGHEST_PORT + 1) if not low <= port <= high]


def free_port(rng: random.Random, within: PortRange | None = None, avoided: Collection[int] = ()) -> int:
    """Return a port that no process listens on now, outside the ephemeral range if there is one.

    Args:
        rng: Source of the choice.
        within: Range to choose from, wherever the ephemeral one is; None: all ports.
        avoided: Ports to take only if there is no other.

    Raises:
        LaunchError: All ports are taken.
    """
    if within is not None:
        candidates = within.shuffled(rng, begins_low=True)
    else:
        kernel = ports.kernel_ports()
        candidates = non_ephemeral_ports((kernel.low, kernel.high)) or list(range(LOWEST_PORT, HIGHEST_PORT + 1))
        rng.shuffle(candidates)
    for port in sorted(candidates, key=lambda port: port in avoided):
        if _is_port_free(port):
            return port
    if within is not None:
        raise ports.all_taken_error(within, "this machine")
    raise LaunchError(f"no free port between {LOWEST_PORT} and {HIGHEST_PORT}. End listening programs. [ss -ltn]")


def _is_port_free(port: int) -> bool:
    families = [(socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")]
    return all(_can_bind_port(family, host, port) for family, host in families)


def _can_bind_port(family: socket.AddressFamily, host: str, port: int) -> bool:
    try:
        probe = socket.socket(family, socket.SOCK_STREAM)
    except OSError:  # this machine lacks the family, so no process listens on it
        return True
    with probe:
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return family == socket.AF_INET6 and error.errno not in _PORT_TAKEN_ERRORS
    return True


_PORT_TAKEN_ERRORS = {errno.EADDRINUSE, errno.EACCES}


_FREE_PORT_PROGRAM = (
    "import random; from ringweave.launcher import node_context as here; print(here.free_port(random.SystemRandom()))"
)
_FREE_PORT_TIMEOUT_S = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeEntry:
    """Way of a running process into a node; empty for a node that is this machine."""

    namespaces: tuple[str, ...] = ()
    """Files of the namespaces, in the order in which they are entered."""
    control_group: str = ""
    """Folder of the control group that limits CPU time; empty without a limit."""


class NodeContext(abc.ABC):
    """Runs processes on the nodes of a run, and knows their addresses."""

    @property
    @abc.abstractmethod
    def lab_name(self) -> str | None:
        """Name of the lab; None outside of a lab."""

    @property
    def quota_kind(self) -> str | None:
        """Kind of limit of the workers' CPU time, as `Lab.quota_kind`; None without one."""
        return None

    @abc.abstractmethod
    def pick_address(self, node: str) -> HostPort:
        """Return the node's host, and a port that is free there.

        Raises:
            LaunchError: There is no free port.
        """

    @abc.abstractmethod
    def wrap_worker_command(self, worker: WorkerSpec, argv: Sequence[str]) -> Sequence[str]:
        """Return the command line that becomes `argv` in the worker's place, without a process in between."""

    @abc.abstractmethod
    def node_entry(self, worker: WorkerSpec) -> NodeEntry:
        """Return the way of a running process into the worker's place: that of `wrap_worker_command`."""

    @abc.abstractmethod
    def wrap_node_command(self, node: str, argv: Sequence[str]) -> Sequence[str]:
        """Return the command line that becomes `argv` on this node, beside the workers and on none of their devices."""

    @abc.abstractmethod
    def node_environ(self, node: str, device: int | None = None) -> Mapping[str, str]:
        """Return the variables of processes that depend on their node, and on their device if they have one."""


class HostContext(NodeContext):
    """This machine as it is: all nodes of the run are on it, on loopback unless an address is given."""

    def __init__(self, address: str = "127.0.0.1", within: PortRange | None = None) -> None:
        """`address` is the one at which workers of all nodes reach this machine; `within` limits its ports."""
        self._address, self._within = address, within
        self._picked: set[int] = set()

    @property
    def lab_name(self) -> str | None:
        return None

    def pick_address(self, node: str) -> HostPort:
        port = free_port(random.SystemRandom(), self._within, self._picked)
        self._picked.add(port)  # nobody may listen there yet when the next one is picked
        return HostPort(host=self._address, port=port)

    def wrap_worker_command(self, worker: WorkerSpec, argv: Sequence[str]) -> Sequence[str]:
        return argv

    def node_entry(self, worker: WorkerSpec) -> NodeEntry:
        return NodeEntry()

    def wrap_node_command(self, node: str, argv: Sequence[str]) -> Sequence[str]:
        return argv

    def node_environ(self, node: str, device: int | None = None) -> Mapping[str, str]:
        return {}


class LabContext(NodeContext):
    """Nodes of a lab: every process runs in its node, with its device's CPU quota if there are quotas."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab

    @property
    def lab_name(self) -> str | None:
        return self._lab.name

    @property
    def quota_kind(self) -> str | None:
        return self._lab.quota_kind

    def pick_address(self, node: str) -> HostPort:
        """Return the node's first address, and a port that is free inside of the node."""
        command = self._lab.command(node, [sys.executable, "-P", "-c", _FREE_PORT_PROGRAM])
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_FREE_PORT_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            do = "Check that the lab is still up, and the load of this machine"
            got = f"nothing in {_FREE_PORT_TIMEOUT_S} s"
            raise LaunchError(f"port on node {node}", got=got, expected="a free one", do=do) from error
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise LaunchError(f"port on node {node}: {last}, expected a free one. Check that the lab is still up.")
        return HostPort(host=self._lab.addresses[node][0], port=int(done.stdout))

    def wrap_worker_command(self, worker: WorkerSpec, argv: Sequence[str]) -> Sequence[str]:
        """Return the command line that enters the node first."""
        return self._lab.command(worker.node, argv, device=worker.local_rank)

    def node_entry(self, worker: WorkerSpec) -> NodeEntry:
        return NodeEntry(
            namespaces=tuple(map(str, self._lab.namespace_files(worker.node, worker.local_rank).values())),
            control_group=self._lab.control_group(worker.node, worker.local_rank) or "",
        )

    def wrap_node_command(self, node: str, argv: Sequence[str]) -> Sequence[str]:
        """Return the command line that enters the node first."""
        return self._lab.command(node, argv)

    def node_environ(self, node: str, device: int | None = None) -> Mapping[str, str]:
        """Return the interfaces for Gloo, the lab's folder of probing results, and what follows from quotas.

        Gloo needs the same number of interfaces on all ranks, so it gets as many as the node with the fewest has.
        """
        count = min(len(addresses) for addresses in self._lab.addresses.values())
        interfaces = {"GLOO_SOCKET_IFNAME": ",".join(self._lab.interfaces(node)[:count])}
        threads = {"OMP_NUM_THREADS": "1"} if self._lab.quotas else {}
        quota = {} if device is None else self._lab.quota_environ(node, device)
        return {**interfaces, **threads, **quota, FINDINGS: str(self._lab.probe_results_folder)}
