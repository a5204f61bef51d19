"""Where the processes of a run on this machine are put: on the machine as it is, or in the nodes of a lab."""

import abc
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence

from ringweave.environment import FINDINGS
from ringweave.errors import LaunchError, explain
from ringweave.lab import Lab
from ringweave.launch.local.ports import free_port
from ringweave.launch.workers import Meeting, WorkerSpec

_FIND_PORT = "import random; from ringweave.launch.local import ports; print(ports.free_port(random.SystemRandom()))"
_TIMEOUT_S = 30


class Site(abc.ABC):
    """What a run has to know of the place where its workers are."""

    @property
    @abc.abstractmethod
    def lab_name(self) -> str | None:
        """Name of the lab; None if it is in none."""

    @abc.abstractmethod
    def meeting(self, node: str) -> Meeting:
        """Where workers meet if rank 0 is on this node.

        Raises:
            LaunchError: There is no free port.
        """

    @abc.abstractmethod
    def enter(self, worker: WorkerSpec, argv: Sequence[str]) -> Sequence[str]:
        """The command line that becomes `argv` where this worker belongs, without a process in between."""

    @abc.abstractmethod
    def enter_node(self, node: str, argv: Sequence[str]) -> Sequence[str]:
        """The command line that becomes `argv` on this node, beside the workers and on none of their devices."""

    @abc.abstractmethod
    def environ(self, node: str) -> Mapping[str, str]:
        """Variables that workers on this node get because of where they are."""


class ThisMachine(Site):
    """Workers are put on this machine as it is; where no address is given all nodes are it, and meet on loopback."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        """`address` is where workers of all nodes reach this machine."""
        self._address = address

    @property
    def lab_name(self) -> str | None:
        """None."""
        return None

    def meeting(self, node: str) -> Meeting:
        """A free port at its address."""
        return Meeting(host=self._address, port=free_port(random.SystemRandom()))

    def enter(self, worker: WorkerSpec, argv: Sequence[str]) -> Sequence[str]:
        """The same command line."""
        return argv

    def enter_node(self, node: str, argv: Sequence[str]) -> Sequence[str]:
        """The same command line."""
        return argv

    def environ(self, node: str) -> Mapping[str, str]:
        """Nothing."""
        return {}


class InLab(Site):
    """Every worker is in its node of a lab, with its device's CPU quota if there are quotas."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab

    @property
    def lab_name(self) -> str | None:
        """Name of the lab."""
        return self._lab.name

    def meeting(self, node: str) -> Meeting:
        """The node's first address, and a port that is free inside of the node."""
        command = self._lab.command(node, [sys.executable, "-P", "-c", _FIND_PORT])
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            do = "See whether the lab is still up, and how busy this machine is"
            got = f"nothing in {_TIMEOUT_S} s"
            raise LaunchError(explain(f"port on node {node}", got=got, expected="a free one", do=do)) from error
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise LaunchError(f"port on node {node}: {last}, expected a free one. See whether the lab is still up.")
        return Meeting(host=self._lab.addresses[node][0], port=int(done.stdout))

    def enter(self, worker: WorkerSpec, argv: Sequence[str]) -> Sequence[str]:
        """The command line that enters the node first."""
        return self._lab.command(worker.node, argv, device=worker.local_rank)

    def enter_node(self, node: str, argv: Sequence[str]) -> Sequence[str]:
        """The command line that enters the node first."""
        return self._lab.command(node, argv)

    def environ(self, node: str) -> Mapping[str, str]:
        """Interfaces for Gloo, the lab's own folder of findings, and one thread each where CPU time is limited.

        Gloo needs the same number of interfaces on all ranks, so it gets as many as the node with the fewest has.
        """
        count = min(len(addresses) for addresses in self._lab.addresses.values())
        interfaces = {"GLOO_SOCKET_IFNAME": ",".join(self._lab.interfaces(node)[:count])}
        threads = {"OMP_NUM_THREADS": "1"} if self._lab.quotas else {}
        return {**interfaces, **threads, FINDINGS: str(self._lab.findings_folder)}
