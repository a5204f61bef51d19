"""Switch tree of a fit: its root, the cluster made from it, and its slowest part in one line."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ringweave import units
from ringweave.topology.cluster import CORE, SHORT_FORM_NIC, Cluster, Device, Nic, Node, Switch, link_name
from ringweave.topology.inference import observations
from ringweave.topology.inference.fit import TreeFit
from ringweave.topology.inference.observations import Cut

_SAME_RATE_FACTOR = 1.06
"""Rates that differ by up to this factor are taken as equal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSpec:
    """Known facts of a node before the measurement."""

    name: str
    address: str | None
    num_devices: int
    nics: tuple[str, ...] = ()
    """Names of the NICs by which it is measured; empty where unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredLink:
    """One direction of an edge of the tree."""

    src: str
    dst: str
    rate_bytes_per_s: float
    """Measured: rate that TCP streams got over it."""
    is_proved: bool
    """It was seen to be the bottleneck; else it carries at least this, and no batch could load it more."""

    @property
    def name(self) -> str:
        """`a0->s0`."""
        return link_name(self.src, self.dst)


@dataclass(frozen=True, slots=True)
class SwitchTree:
    """Switches with a root; -1 is the parent of the root."""

    parents: tuple[int, ...]
    """Switch above each switch; the root is number 0."""
    sides: tuple[Cut, ...]
    """Nodes below each switch: its edge is this cut outward, and the opposite cut inward; unused for the root."""
    switch_of_node: tuple[int, ...]


def build_switch_tree(edges: Sequence[Cut], num_nodes: int) -> SwitchTree:
    """Return the tree of these edges, rooted in its middle; switches in preorder, by their first nodes.

    Where the middle is an edge, the root lies on it, like the core between two racks. No measurement can locate a root:
    a chain of links, with nothing else between them, is one link.
    """
    all_nodes = (1 << num_nodes) - 1
    groups = [all_nodes, *sorted(edges, key=lambda cut: -cut.bit_count())]
    above = [-1] + [_smallest_enclosing(groups, index) for index in range(1, len(groups))]
    homes = [max(range(len(groups)), key=lambda g: (groups[g] >> node & 1, g)) for node in range(num_nodes)]
    neighbours: dict[int, list[int]] = {index: [] for index in range(len(groups))}
    for index, parent in enumerate(above[1:], 1):
        neighbours[index].append(parent)
        neighbours[parent].append(index)
    middle = _tree_center(neighbours)
    root = middle[0]
    if len(middle) == 2:
        root = len(groups)
        neighbours[root] = list(middle)
        for one, other in (middle, middle[::-1]):
            neighbours[one] = [root if each == other else each for each in neighbours[one]]
    return _rooted_tree(neighbours, root, homes)


def possible_racks(found: TreeFit) -> Iterator[Cut]:
    """Yield sets of nodes of one switch that may be a rack of their own: all of them, or those with equal NICs.

    Sets that an edge of the fit separates already are left out, as are single nodes and all but one.
    """
    shape, num_nodes = build_switch_tree(found.edges[::2], found.num_nodes), found.num_nodes
    known = set(found.cuts)
    nics = [
        min(found.rate(1 << node), found.rate(observations.opposite_cut(1 << node, num_nodes)))
        for node in range(num_nodes)
    ]
    for switch in range(len(shape.parents)):
        at_home = [node for node in range(num_nodes) if shape.switch_of_node[node] == switch]
        for alike in (at_home, *_group_by_rate(at_home, nics)):
            cut = sum(1 << node for node in alike)
            if 2 <= len(alike) <= num_nodes - 2 and cut not in known:
                known |= {cut, observations.opposite_cut(cut, num_nodes)}
                yield cut


def _group_by_rate(nodes: Sequence[int], rates: Sequence[float]) -> list[list[int]]:
    """Return nodes in sets of about the same rate, slowest first."""
    sets: list[list[int]] = []
    for node in sorted(nodes, key=lambda node: rates[node]):
        if sets and rates[node] <= rates[sets[-1][0]] * _SAME_RATE_FACTOR:
            sets[-1].append(node)
        else:
            sets.append([node])
    return sets


def cluster_from_fit(
    name: str,
    hosts: Sequence[NodeSpec],
    found: TreeFit,
    latency_s: float,
    rounded: Callable[[float], float] = float,
) -> tuple[Cluster, tuple[MeasuredLink, ...]]:
    """Return the cluster of a fit, and its links with the rates of both directions.

    The cluster has one rate for both directions of a link: the lower one, or that of the only direction that was seen
    to be full.
    """
    shape = build_switch_tree(found.edges[::2], len(hosts))
    names = [CORE, *_switch_names(len(shape.parents) - 1, {host.name for host in hosts})]
    links = tuple(_with_equalized_rates(list(_measured_links(shape, names, hosts, found)), rounded))
    rates = _edge_rates(links)
    switches = tuple(
        Switch(name=names[index], uplink_bytes_per_s=rates[names[index]], parent=names[parent] if parent else None)
        for index, parent in enumerate(shape.parents)
        if index
    )
    nodes = tuple(
        Node(
            name=host.name,
            address=host.address,
            devices=(Device(),) * host.num_devices,
            nics=(Nic(name=SHORT_FORM_NIC, rate_bytes_per_s=rates[host.name]),),
            switch=names[home] if home else None,
        )
        for host, home in zip(hosts, shape.switch_of_node, strict=True)
    )
    return Cluster(name=name, nodes=nodes, switches=switches, latency_s=latency_s), links


def _measured_links(
    shape: SwitchTree, names: Sequence[str], hosts: Sequence[NodeSpec], found: TreeFit
) -> Iterator[MeasuredLink]:
    """Yield the links of nodes, then of switches, upwards before downwards: the order of `Cluster.links`."""
    ends = [
        (host.name, names[home], 1 << index)
        for index, (host, home) in enumerate(zip(hosts, shape.switch_of_node, strict=True))
    ]
    ends += [(names[i], names[parent], shape.sides[i]) for i, parent in enumerate(shape.parents) if i]
    for lower, upper, cut in ends:
        for src, dst, way in ((lower, upper, cut), (upper, lower, observations.opposite_cut(cut, len(hosts)))):
            yield MeasuredLink(src=src, dst=dst, rate_bytes_per_s=found.rate(way), is_proved=found.is_proved(way))


def _with_equalized_rates(links: Sequence[MeasuredLink], rounded: Callable[[float], float]) -> Iterator[MeasuredLink]:
    """Yield the links with the median of all links with about the same rate: equal hardware shall look equal.

    Plans for equal links are simpler, and faster, than plans that follow the noise of measurements.
    """
    levels: list[list[float]] = []
    for rate in sorted(link.rate_bytes_per_s for link in links):
        if levels and rate <= levels[-1][0] * _SAME_RATE_FACTOR:
            levels[-1].append(rate)
        else:
            levels.append([rate])
    level = {rate: rounded(statistics.median(alike)) for alike in levels for rate in alike}
    for link in links:
        yield replace(link, rate_bytes_per_s=level[link.rate_bytes_per_s])


def _edge_rates(links: Sequence[MeasuredLink]) -> dict[str, float]:
    """Return the rate of each edge by the name of its lower end."""
    rates = {}
    for up, down in zip(links[::2], links[1::2], strict=True):
        proved = [link.rate_bytes_per_s for link in (up, down) if link.is_proved]
        rates[up.src] = min(proved) if len(proved) == 1 else min(up.rate_bytes_per_s, down.rate_bytes_per_s)
    return rates


def _smallest_enclosing(groups: Sequence[Cut], index: int) -> int:
    return max(other for other in range(index) if groups[other] & groups[index] == groups[index])


def _tree_center(neighbours: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
    """Return the one or two vertices that are left after repeated removal of the outermost ones."""
    left = {vertex: set(around) for vertex, around in neighbours.items()}
    while len(left) > 2:
        outermost = [vertex for vertex, around in left.items() if len(around) <= 1]
        for vertex in outermost:
            for other in left.pop(vertex):
                left[other].discard(vertex)
    return tuple(sorted(left))


def _rooted_tree(neighbours: Mapping[int, Sequence[int]], root: int, homes: Sequence[int]) -> SwitchTree:
    below = dict.fromkeys(neighbours, 0)

    def gather(vertex: int, parent: int) -> Cut:
        below[vertex] = sum(1 << node for node, home in enumerate(homes) if home == vertex)
        for other in neighbours[vertex]:
            if other != parent:
                below[vertex] |= gather(other, vertex)
        return below[vertex]

    gather(root, -1)
    order: list[tuple[int, int]] = []

    def visit(vertex: int, parent: int) -> None:
        place = len(order)
        order.append((vertex, parent))
        children = [other for other in neighbours[vertex] if place == 0 or other != order[parent][0]]
        for child in sorted(children, key=lambda other: below[other] & -below[other]):
            visit(child, place)

    visit(root, -1)
    places = {vertex: place for place, (vertex, _) in enumerate(order)}
    return SwitchTree(
        parents=tuple(parent for _, parent in order),
        sides=tuple(below[vertex] for vertex, _ in order),
        switch_of_node=tuple(places[home] for home in homes),
    )


def _switch_names(count: int, taken: set[str]) -> list[str]:
    """Return `s0`, `s1`, ... with a stem that no node uses."""
    folded = {name.casefold() for name in taken}
    for stem in ("s", "switch-", "recovered-switch-"):
        names = [f"{stem}{index}" for index in range(count)]
        if folded.isdisjoint(names):
            return names
    return [f"recovered-switch-{index}-{len(folded)}" for index in range(count)]


_SLOW_FRACTION = 0.75
"""A rate above this fraction of the usual one is not called slow."""
_FRACTION_WORDS = {
    1 / 2: "half",
    1 / 3: "a third",
    1 / 4: "a quarter",
    1 / 5: "a fifth",
    1 / 8: "an eighth",
    1 / 10: "a tenth",
}
_WORD_TOLERANCE = 0.08


def slowest_part_text(cluster: Cluster, links: Sequence[MeasuredLink]) -> str | None:
    """Return `slow: link a2->core carries 48.1Mbit/s, a quarter of the median NIC (measured)`; None if nothing is slow.

    A NIC is compared with the median NIC, an uplink with the sum of the NICs below it (at most the sum on the other
    side). The link with the smallest fraction is named. A node whose NIC is slow in both directions is named as a node.
    """
    nodes = {node.name for node in cluster.nodes}
    rates = {(link.src, link.dst): link.rate_bytes_per_s for link in links}
    nics = [link for link in links if nodes & {link.src, link.dst}]
    usual = statistics.median(link.rate_bytes_per_s for link in nics)
    parts = [(link.rate_bytes_per_s / _expected_rate(cluster, link, rates, usual, nodes), link) for link in links]
    part, worst = min(parts, key=lambda pair: pair[0])
    if part > _SLOW_FRACTION:
        return None
    rate = _rate_text(worst.rate_bytes_per_s)
    if not nodes & {worst.src, worst.dst}:
        return (
            f"slow: link {worst.name} carries {rate}, "
            f"{_fraction_text(part)} of what the NICs on its sides do (measured)"
        )
    node = worst.src if worst.src in nodes else worst.dst
    back = rates[worst.dst, worst.src]
    if back <= _SLOW_FRACTION * usual:
        rates_text = (
            rate if abs(back / worst.rate_bytes_per_s - 1) < _WORD_TOLERANCE else f"{rate} ({_rate_text(back)} back)"
        )
        return (
            f"slow: node {node} (link {worst.name}) carries {rates_text}, "
            f"{_fraction_text(part)} of the median NIC (measured)"
        )
    return f"slow: link {worst.name} carries {rate}, {_fraction_text(part)} of the median NIC (measured)"


def _expected_rate(
    cluster: Cluster,
    link: MeasuredLink,
    rates: dict[tuple[str, str], float],
    usual: float,
    nodes: set[str],
) -> float:
    if nodes & {link.src, link.dst}:
        return usual
    is_up = cluster.ancestors(link.src)[:1] == (link.dst,)
    lower = link.src if is_up else link.dst
    sends = {node.name: rates[node.name, cluster.ancestors(node.name)[0]] for node in cluster.nodes}
    takes = {node.name: rates[cluster.ancestors(node.name)[0], node.name] for node in cluster.nodes}
    below = {node.name for node in cluster.nodes if lower in cluster.ancestors(node.name)}
    inner, outer = (sends, takes) if is_up else (takes, sends)
    return min(sum(inner[name] for name in below), sum(outer[name] for name in nodes - below))


def _fraction_text(part: float) -> str:
    nearest = min(_FRACTION_WORDS, key=lambda known: abs(known - part))
    return _FRACTION_WORDS[nearest] if abs(nearest - part) <= _WORD_TOLERANCE * nearest else f"{part:.0%}"


def _rate_text(bytes_per_s: float) -> str:
    """Format with three digits, as the rate is measured."""
    return units.format_rate(float(f"{bytes_per_s * 8:.3g}") / 8)
