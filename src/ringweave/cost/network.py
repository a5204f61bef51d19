"""Network of a group: the part of the cluster's tree between its nodes, measured rates, and max-min fair sharing.

The network keeps only switches with a node of the group below them, and nothing above the lowest switch that has all
nodes below it, because no byte of the group passes there. So every remaining link separates nodes of the group.
"""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringweave.errors import ClusterError, UsageError
from ringweave.files import file_io
from ringweave.files.problems import suggest_closest
from ringweave.topology import Cluster, link_name
from ringweave.topology.cluster import CORE

_NAME_KEYS = ("name", "link")
_RATE_KEYS = ("rate_bytes_per_s", "measured_bytes_per_s")


def load_measured_rates(path: str | Path, cluster: Cluster) -> dict[str, float]:
    """Return bytes per second by directed link name (`a0->r0`), from a file about this cluster.

    Raises:
        UsageError: The file cannot be read, has no links, one that the cluster lacks, or a rate that is none.
    """
    where = str(path)
    try:
        found = list(_links_of_document(file_io.load_json(path)))
    except OSError as cause:
        do = cause.strerror or str(cause)
        raise UsageError("--rates", got=where, expected="a file that can be read", do=do) from cause
    except (ValueError, TypeError, KeyError, RecursionError) as cause:
        expected, do = 'a JSON document with measured "links"', "Give findings of probing, or a result of bench --out"
        raise UsageError("--rates", got=where, expected=expected, do=do) from cause
    known = {link.name for link in cluster.links()}
    for name, rate in found:
        _check_measured_link(name, rate, known, where)
    return {name: float(rate) for name, rate in found if rate is not None}


def _links_of_document(document: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield name and rate of each link."""
    if not document["links"]:
        raise KeyError("links")
    for each in document["links"]:
        (name,) = (each[key] for key in _NAME_KEYS if key in each)
        (rate,) = (each[key] for key in _RATE_KEYS if key in each)
        yield name, rate


def _check_measured_link(name: Any, rate: Any, known: set[str], where: str) -> None:
    if not isinstance(name, str) or name not in known:
        do = (
            suggest_closest(str(name), known)
            or "Give the cluster file that was measured, such as the one of probing --write"
        )
        raise UsageError("measured link", got=name, expected="a link of the cluster", do=do, where=where)
    is_number = isinstance(rate, int | float) and not isinstance(rate, bool)
    if rate is not None and not (is_number and 0 < rate <= sys.float_info.max):
        expected, do = "a positive number of bytes per second", "Measure it again, or leave it out"
        raise UsageError(f"measured rate of {name}", got=rate, expected=expected, do=do, where=where)


Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class GroupNetwork:
    """Vertices (nodes and switches) in preorder: a vertex comes before its subtree, which is contiguous."""

    names: tuple[str, ...]
    """Names of nodes and switches; the first is the root."""
    parents: Ints
    """Vertex above each; -1 for the root."""
    ends: Ints
    """The subtree of vertex v, v included, is v .. ends[v] - 1."""
    depths: Ints
    """Number of links to the root."""
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
        """Return the name of the link that leaves the subtree of the vertex: `a0->r0`."""
        return link_name(self.names[vertex], self.names[self.parents[vertex]])

    def down_name(self, vertex: int) -> str:
        """Return the name of the link that enters the subtree of the vertex: `r0->a0`."""
        return link_name(self.names[self.parents[vertex]], self.names[vertex])

    def nodes_below(self, vertex: int) -> tuple[str, ...]:
        """Return the names of the group's nodes in the subtree of the vertex."""
        return tuple(self.names[v] for v in range(vertex, int(self.ends[vertex])) if self.is_node[v])

    def children(self) -> list[list[int]]:
        """Return the vertices right below each vertex, in order."""
        below: list[list[int]] = [[] for _ in self.names]
        for vertex, parent in enumerate(self.parents.tolist()):
            if parent >= 0:
                below[parent].append(vertex)
        return below

    def lowest_common(self, left: Ints, right: Ints) -> Ints:
        """Return the lowest vertex with both in its subtree, for each pair."""
        left, right = left.copy(), right.copy()
        while (apart := left != right).any():
            # In preorder the larger of two different vertices is never above the other one.
            climbs_left = apart & (left > right)
            climbs_right = apart & (left < right)
            left[climbs_left] = self.parents[left[climbs_left]]
            right[climbs_right] = self.parents[right[climbs_right]]
        return left

    def sums_below(self, values: Floats) -> Floats:
        """Return, for each vertex, the sum of the values in its subtree."""
        running = np.concatenate([[0.0], np.cumsum(values)])
        return running[self.ends] - running[:-1]


def group_network(
    cluster: Cluster, nodes: Sequence[str] | None = None, rates: Mapping[str, float] | None = None
) -> GroupNetwork:
    """Return the network between some nodes of a cluster.

    Args:
        cluster: Cluster with the nodes.
        nodes: Names of the nodes that take part, all by default; duplicates count once. The subtree of a switch comes
            in the order in which its nodes are first named.
        rates: Measured bytes per second by directed link name (`a0->r0`), in place of the cluster's.

    Raises:
        ClusterError: No node takes part, one is not in the cluster, or a rate is wrong or belongs to no link.
    """
    names = list(dict.fromkeys(nodes if nodes is not None else (node.name for node in cluster.nodes)))
    if not names:
        raise ClusterError("nodes that take part", got=names, expected="at least one", do="Name nodes of the cluster")
    parent_of = {node.name: node.switch or CORE for node in cluster.nodes}
    rate_of = {node.name: node.rate_bytes_per_s for node in cluster.nodes}
    for name in names:
        cluster.node(name)
    for switch in cluster.switches:
        parent_of[switch.name] = switch.parent or CORE
        rate_of[switch.name] = switch.uplink_bytes_per_s
    measured = _checked_rates(rates or {}, parent_of)
    order, parents = _preorder(names, parent_of)
    up, down = [math.inf], [math.inf]
    for vertex, parent in zip(order[1:], parents[1:], strict=True):
        above = order[parent]
        up.append(measured.get(link_name(vertex, above), rate_of[vertex]))
        down.append(measured.get(link_name(above, vertex), rate_of[vertex]))
    return _network_columns(order, parents, (up, down), set(names), cluster.latency_s)


def _checked_rates(rates: Mapping[str, float], parent_of: Mapping[str, str]) -> dict[str, float]:
    """Return the measured rates; refuse those that belong to no link or are no rates."""
    known = {link_name(*pair) for edge in parent_of.items() for pair in (edge, edge[::-1])} if rates else set()
    for name, rate in rates.items():
        if name not in known:
            do = suggest_closest(name, known) or "Name it by what it connects, sender first"
            raise ClusterError("measured link", got=name, expected="a link of the cluster", do=do)
        if not 0 < rate < math.inf:
            do = "Measure it again, or leave it out"
            raise ClusterError(
                f"measured rate of {name}", got=rate, expected="a positive number of bytes per second", do=do
            )
    return {name: float(rate) for name, rate in rates.items()}


def _preorder(names: Sequence[str], parent_of: Mapping[str, str]) -> tuple[list[str], list[int]]:
    """Return the required vertices in preorder, and the index of each one's parent."""
    below: dict[str, list[str]] = {CORE: []}
    for name in names:
        current = name
        while current != CORE:
            is_new = parent_of[current] not in below
            below.setdefault(parent_of[current], []).append(current)
            if not is_new:
                break
            current = parent_of[current]
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


def _network_columns(
    order: list[str], parents: list[int], rates: tuple[list[float], list[float]], nodes: set[str], latency_s: float
) -> GroupNetwork:
    depths = [0] * len(order)
    for vertex, parent in enumerate(parents[1:], start=1):
        depths[vertex] = depths[parent] + 1
    ends = list(range(1, len(order) + 1))
    for vertex in range(len(order) - 1, 0, -1):
        ends[parents[vertex]] = max(ends[parents[vertex]], ends[vertex])
    return GroupNetwork(
        names=tuple(order),
        parents=np.array(parents, np.int64),
        ends=np.array(ends, np.int64),
        depths=np.array(depths, np.int64),
        up_bytes_per_s=np.array(rates[0]),
        down_bytes_per_s=np.array(rates[1]),
        is_node=np.array([name in nodes for name in order]),
        latency_s=latency_s,
    )


_SAME_LEVEL = 1 + 1e-12


def max_min_fair_rates(
    routes: Sequence[Sequence[int]], capacities: Mapping[int, float] | Sequence[float]
) -> list[float]:
    """Return the rate of each flow, when flows share links approximately as TCP streams do.

    Progressive filling: all rates grow together until a link is full; the flows that pass it keep their rate, the
    others grow on.

    Args:
        routes: Links of each flow; a flow without links gets an infinite rate.
        capacities: Rate of each link in bytes per second; 0 for one that is cut.

    Returns:
        Bytes per second, in the order of `routes`.

    Source:
        Bertsekas and Gallager, "Data Networks" (1992), section 6.5.2.

    Cost:
        Linear in the lengths of all routes, plus links times different rates.
    """
    users: dict[int, list[int]] = {}
    for flow, route in enumerate(routes):
        for link in route:
            users.setdefault(link, []).append(flow)
    left = {link: capacities[link] for link in users}
    counts = {link: len(flows) for link, flows in users.items()}
    found = [math.inf] * len(routes)
    while counts:
        level = min(left[link] / count for link, count in counts.items())
        full = [link for link, count in counts.items() if left[link] / count <= level * _SAME_LEVEL]
        for link in full:
            for flow in users[link]:
                if found[flow] == math.inf:
                    found[flow] = level
                    for passed in routes[flow]:
                        left[passed] = max(0.0, left[passed] - level)
                        counts[passed] -= 1
        for link in [link for link, count in counts.items() if not count]:
            del counts[link]
    return found
