"""The part of a cluster's tree that lies between the nodes of a group, in numpy columns.

Only switches with a node of the group below them are kept, and nothing above the lowest switch that has all of them
below it: no byte of the group passes there. So every link that is left separates nodes of the group.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringweave.errors import ClusterError, explain
from ringweave.files.problems import closest
from ringweave.topology import Cluster, link_name
from ringweave.topology.rules import CORE

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """Vertices (nodes and switches) in preorder: a vertex comes before what is below it, which follows in one piece."""

    names: tuple[str, ...]
    """Names of nodes and switches; the first is the root."""
    parents: Ints
    """Vertex above each; -1 for the root."""
    ends: Ints
    """What is below vertex v, v included, is v .. ends[v] - 1."""
    depths: Ints
    """Links to the root."""
    up_bytes_per_s: Floats
    """Rate of the link from the vertex to the one above it; infinite for the root."""
    down_bytes_per_s: Floats
    """Rate of the link to the vertex from the one above it; infinite for the root."""
    is_node: NDArray[np.bool_]
    """Nodes of the group; the others are switches."""
    latency_s: float
    """Alpha of a message between two nodes."""

    def __len__(self) -> int:
        return len(self.names)

    def up_name(self, vertex: int) -> str:
        """`a0->r0`, the link that leaves what is below the vertex."""
        return link_name(self.names[vertex], self.names[self.parents[vertex]])

    def down_name(self, vertex: int) -> str:
        """`r0->a0`, the link that enters what is below the vertex."""
        return link_name(self.names[self.parents[vertex]], self.names[vertex])

    def nodes_below(self, vertex: int) -> tuple[str, ...]:
        """Names of the group's nodes below the vertex, itself included."""
        return tuple(self.names[v] for v in range(vertex, int(self.ends[vertex])) if self.is_node[v])

    def children(self) -> list[list[int]]:
        """The vertices right below each vertex, in order."""
        below: list[list[int]] = [[] for _ in self.names]
        for vertex, parent in enumerate(self.parents.tolist()):
            if parent >= 0:
                below[parent].append(vertex)
        return below

    def lowest_common(self, left: Ints, right: Ints) -> Ints:
        """The lowest vertex that has both below it, for each pair."""
        left, right = left.copy(), right.copy()
        while (apart := left != right).any():
            # In preorder the larger of two different vertices is never above the other one.
            climbs_left = apart & (left > right)
            climbs_right = apart & (left < right)
            left[climbs_left] = self.parents[left[climbs_left]]
            right[climbs_right] = self.parents[right[climbs_right]]
        return left

    def sums_below(self, values: Floats) -> Floats:
        """For each vertex the sum of the values at and below it."""
        running = np.concatenate([[0.0], np.cumsum(values)])
        return running[self.ends] - running[:-1]


def network(cluster: Cluster, nodes: Sequence[str] | None = None, rates: Mapping[str, float] | None = None) -> Network:
    """The network between some nodes of a cluster.

    Args:
        cluster: The machines.
        nodes: Names of the nodes that take part, all by default; more than once counts once. What is below a switch
            comes in the order in which it is named first.
        rates: Measured bytes per second by directed link name (`a0->r0`), in place of the cluster's.

    Raises:
        ClusterError: No node takes part, one is not in the cluster, or a rate is wrong or belongs to no link.
    """
    names = list(dict.fromkeys(nodes if nodes is not None else (node.name for node in cluster.nodes)))
    if not names:
        raise ClusterError(
            explain("nodes that take part", got=names, expected="at least one", do="Name nodes of the cluster")
        )
    parent_of = {node.name: node.switch or CORE for node in cluster.nodes}
    rate_of = {node.name: node.rate_bytes_per_s for node in cluster.nodes}
    for name in names:
        cluster.node(name)
    for switch in cluster.switches:
        parent_of[switch.name] = switch.parent or CORE
        rate_of[switch.name] = switch.uplink_bytes_per_s
    measured = _checked(rates or {}, parent_of)
    order, parents = _preorder(names, parent_of)
    up, down = [math.inf], [math.inf]
    for vertex, parent in zip(order[1:], parents[1:], strict=True):
        above = order[parent]
        up.append(measured.get(link_name(vertex, above), rate_of[vertex]))
        down.append(measured.get(link_name(above, vertex), rate_of[vertex]))
    return _columns(order, parents, (up, down), set(names), cluster.latency_s)


def _checked(rates: Mapping[str, float], parent_of: Mapping[str, str]) -> dict[str, float]:
    """The measured rates, refused where they belong to no link or are no rates."""
    known = {link_name(*pair) for edge in parent_of.items() for pair in (edge, edge[::-1])} if rates else set()
    for name, rate in rates.items():
        if name not in known:
            do = closest(name, known) or "Name it by what it connects, sender first"
            raise ClusterError(explain("measured link", got=name, expected="a link of the cluster", do=do))
        if not 0 < rate < math.inf:
            do = "Measure it again, or leave it out"
            raise ClusterError(
                explain(f"measured rate of {name}", got=rate, expected="a positive number of bytes per second", do=do)
            )
    return {name: float(rate) for name, rate in rates.items()}


def _preorder(names: Sequence[str], parent_of: Mapping[str, str]) -> tuple[list[str], list[int]]:
    """Vertices that are needed, in preorder, and the place of each one's parent."""
    below: dict[str, list[str]] = {CORE: []}
    for name in names:
        at = name
        while at != CORE:
            is_new = parent_of[at] not in below
            below.setdefault(parent_of[at], []).append(at)
            if not is_new:
                break
            at = parent_of[at]
    root = CORE
    while len(below.get(root, ())) == 1:
        root = below[root][0]
    order: list[str] = []
    parents: list[int] = []
    stack = [(root, -1)]
    while stack:
        name, parent = stack.pop()
        stack.extend((child, len(order)) for child in reversed(below.get(name, ())))
        order.append(name)
        parents.append(parent)
    return order, parents


def _columns(
    order: list[str], parents: list[int], rates: tuple[list[float], list[float]], nodes: set[str], latency_s: float
) -> Network:
    depths = [0] * len(order)
    for vertex, parent in enumerate(parents[1:], start=1):
        depths[vertex] = depths[parent] + 1
    ends = list(range(1, len(order) + 1))
    for vertex in range(len(order) - 1, 0, -1):
        ends[parents[vertex]] = max(ends[parents[vertex]], ends[vertex])
    return Network(
        names=tuple(order),
        parents=np.array(parents, np.int64),
        ends=np.array(ends, np.int64),
        depths=np.array(depths, np.int64),
        up_bytes_per_s=np.array(rates[0]),
        down_bytes_per_s=np.array(rates[1]),
        is_node=np.array([name in nodes for name in order]),
        latency_s=latency_s,
    )
