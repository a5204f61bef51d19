"""MPICH, from PyPI, in an environment of its own."""

from collections.abc import Sequence

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

FOLDER = ".venv-mpich"
_ALGORITHM, _COMPOSITION = "MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM", "MPIR_CVAR_ALLREDUCE_COMPOSITION"
_ALGORITHMS = ("ring", "recursive_doubling", "reduce_scatter_allgather")
_FLAT = {_COMPOSITION: "2"}
_MANY_LEADERS = {_COMPOSITION: "4"}
_YIELD = {"MPIR_CVAR_POLLS_BEFORE_YIELD": "1"}


class Mpich(System):
    """Device ch4:ucx over TCP, and its own shared memory inside a node."""

    name = "mpich"

    def problem(self) -> str:
        """Its environment is missing, or empty."""
        return "" if peer_python(FOLDER) else absent_peer(FOLDER)

    def knobs(self, shape: Shape) -> Sequence[Knob]:
        """The default and the algorithms for large messages; with several ranks a node, also flat and many leaders."""
        polite = _YIELD if shape.is_crowded else {}
        found = [Knob(name="default")]
        if polite:
            found.append(Knob(name="default, yielding", environ=polite))
        found += [_forced(name, name, polite) for name in _ALGORITHMS]
        if shape.most_ranks_per_node > 1:
            found += [_forced(f"flat {name}", name, {**polite, **_FLAT}) for name in _ALGORITHMS]
            found.append(Knob(name="many leaders", environ={**polite, **_MANY_LEADERS}))
        return found

    def starts(self, setup: Setup, knob: Knob) -> Sequence[Start]:
        """One mpiexec (Hydra) on the node of rank 0."""
        python = peer_python(FOLDER)
        assert python is not None, "problem() was asked before"
        variables = [word for name, value in sorted(knob.environ.items()) for word in ("-genv", name, value)]
        argv = (
            *(str(python.with_name("mpiexec")), "-n", str(len(setup.node_of_rank))),
            *(_over_nodes(setup) if setup.place.is_limited else ()),
            *variables,
            *(str(python), str(PROGRAMS / "mpi_worker.py"), *setup.worker_options),
        )
        return [Start(node=setup.node_of_rank[0], argv=argv, environ={})]


def _forced(name: str, algorithm: str, more: dict[str, str]) -> Knob:
    return Knob(name=name, environ={_ALGORITHM: algorithm, **more})


def _over_nodes(setup: Setup) -> tuple[str, ...]:
    """UCX may use TCP only: it knows no namespaces, and would take the memory of one machine as a way between nodes."""
    addresses, place = setup.place.addresses, setup.place
    agent = agents.write_agent(setup)
    hosts = agents.write_hosts(setup.folder / "hosts", [f"{addresses[node][0]}:1" for node in setup.node_of_rank])
    interfaces = sorted({name for node in set(setup.node_of_rank) for name in place.interfaces(node)})
    return (
        *("-launcher", "ssh", "-launcher-exec", str(agent), "-f", str(hosts)),
        *("-iface", place.interfaces(setup.node_of_rank[0])[0]),
        *("-genv", "UCX_TLS", "tcp,self", "-genv", "UCX_NET_DEVICES", ",".join(interfaces)),
    )
