"""Rules over a whole cluster: names used once, references that lead somewhere, a tree of switches with no loop.

The checks run in order, each relying on the ones before it; the first that finds something ends the search, so that a
mistake is told once and not with its consequences. All are linear in nodes and switches.
"""

import ipaddress
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ringweave.files.problems import Path, Problem, closest, listed
from ringweave.topology import rules
from ringweave.topology.problems import refuse_any
from ringweave.topology.rules import CORE

if TYPE_CHECKING:
    from ringweave.topology.cluster import Cluster


def check(cluster: "Cluster") -> None:
    """Refuse a cluster that is not a tree of well-named parts.

    Raises:
        ProblemsError: Lists what is wrong, in the order of the nodes, then of the switches.
    """
    for find in (_shape_problems, _name_problems, _reference_problems, _loop_problems, _unused_problems):
        refuse_any(find(cluster))


def _shape_problems(cluster: "Cluster") -> Iterator[Problem]:
    yield from rules.name_problems(("name",), "name of the cluster", cluster.name)
    yield from rules.latency_problems(cluster.latency_s)
    limits = (1, rules.MAX_NODES)
    yield from rules.tuple_problems(("nodes",), "nodes of the cluster", cluster.nodes, limits, _range("nodes", *limits))
    limits = (0, rules.MAX_SWITCHES)
    expected = _range("switches", *limits)
    yield from rules.tuple_problems(("switches",), "switches of the cluster", cluster.switches, limits, expected)


def _name_problems(cluster: "Cluster") -> Iterator[Problem]:
    parts = [*cluster.nodes, *cluster.switches]
    for index in rules.repeated(part.name for part in parts):
        is_node = index < len(cluster.nodes)
        path: Path = ("nodes", index) if is_node else ("switches", index - len(cluster.nodes))
        yield Problem(
            path=(*path, "name"),
            what="name of a node" if is_node else "name of a switch",
            got=parts[index].name,
            expected="a name that no other node or switch has (upper and lower case are the same)",
            do="Rename one of them, or remove the one that is there twice",
        )
    addressed = [index for index, node in enumerate(cluster.nodes) if node.address is not None]
    addresses = [ipaddress.ip_address(str(cluster.nodes[index].address)) for index in addressed]
    for position in rules.repeated(addresses):
        node = cluster.nodes[addressed[position]]
        yield Problem(
            path=("nodes", addressed[position], "address"),
            what=f"address of node {node.name}",
            got=node.address,
            expected="an address that no other node has",
            do="Give each node its own address, or leave the key out",
        )


def _reference_problems(cluster: "Cluster") -> Iterator[Problem]:
    known = {CORE, *(switch.name for switch in cluster.switches)}
    for index, node in enumerate(cluster.nodes):
        if node.switch is not None and node.switch not in known:
            yield _unknown(cluster, ("nodes", index, "switch"), f"switch of node {node.name}", node.switch)
    for index, switch in enumerate(cluster.switches):
        if switch.parent is not None and switch.parent not in known:
            yield _unknown(cluster, ("switches", index, "parent"), f"parent of switch {switch.name}", switch.parent)


def _loop_problems(cluster: "Cluster") -> Iterator[Problem]:
    parents = {switch.name: switch.parent or CORE for switch in cluster.switches}
    indices = {switch.name: index for index, switch in enumerate(cluster.switches)}
    settled = {CORE}
    for start in parents:
        climbed: dict[str, None] = {}
        name = start
        while name not in settled and name not in climbed:
            climbed[name] = None
            name = parents[name]
        if name in climbed:
            loop = list(climbed)[list(climbed).index(name) :]
            yield Problem(
                path=("switches", indices[name], "parent"),
                what=f"parent of switch {name}",
                got=parents[name],
                expected=f"a way up to {CORE}, not the loop {_loop([*loop, name])}",
                do=f"Leave parent out of the switch that hangs on {CORE}",
            )
        settled.update(climbed)


def _unused_problems(cluster: "Cluster") -> Iterator[Problem]:
    parents = {switch.name: switch.parent or CORE for switch in cluster.switches}
    used = {CORE}
    for node in cluster.nodes:
        name = node.switch or CORE
        while name not in used:
            used.add(name)
            name = parents[name]
    for index, switch in enumerate(cluster.switches):
        if switch.name not in used:
            yield Problem(
                path=("switches", index),
                what="switch with no node below it",
                got=switch.name,
                expected="at least one node below every switch",
                do=f'Write "switch: {switch.name}" in the nodes that hang on it, or remove the switch',
            )


def _unknown(cluster: "Cluster", path: Path, what: str, got: object) -> Problem:
    names = [switch.name for switch in cluster.switches]
    known = f"one of the switches ({listed(names, len(names))})" if names else "none, as no switches are declared"
    return Problem(
        path=path,
        what=what,
        got=got,
        expected=f"{known}, or {CORE}",
        do=closest(got, [*names, CORE]) or f"Declare it under switches, or leave the key out to hang on {CORE}",
    )


def _loop(names: list[str]) -> str:
    return " -> ".join(names if len(names) <= 6 else [*names[:4], "...", names[-1]])


def _range(noun: str, low: int, high: int) -> str:
    return f"{low} to {high} {noun}"
