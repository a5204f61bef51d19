"""From edges between switches to a tree with a root, and from there to a cluster."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ringweave.topology.building import SHORT_FORM_NIC
from ringweave.topology.cluster import Cluster, Device, Nic, Node, Switch, link_name
from ringweave.topology.recovery import evidence as seen
from ringweave.topology.recovery.evidence import Cut
from ringweave.topology.recovery.fitting import Fit
from ringweave.topology.rules import CORE

_ALIKE = 1.06
"""Rates up to this factor from each other are taken for the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """What is known of a node beforehand."""

    name: str
    address: str | None
    num_devices: int
    nics: tuple[str, ...] = ()
    """Names of the NICs by which it is measured; empty where they are not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredLink:
    """One direction of an edge of the tree."""

    src: str
    dst: str
    rate_bytes_per_s: float
    """Measured: what TCP streams delivered over it."""
    is_proved: bool
    """It was seen to be what held flows back; else it carries at least this, and nothing could ask it for more."""

    @property
    def name(self) -> str:
        """`a0->s0`."""
        return link_name(self.src, self.dst)


@dataclass(frozen=True, slots=True)
class Tree:
    """Switches with a root; -1 stands for it as a parent."""

    parents: tuple[int, ...]
    """Switch above each switch; the root is number 0."""
    sides: tuple[Cut, ...]
    """The nodes below each switch: its edge is this cut outward, and the other side inward; unused for the root."""
    homes: tuple[int, ...]
    """Switch of each node."""


def tree(edges: Sequence[Cut], num_nodes: int) -> Tree:
    """The tree of these edges, its root in the middle; switches in preorder, by their first nodes.

    Where the middle is an edge the root lies on it, as the core between two racks does. No measurement can tell where a
    root is: links in a row, with nothing else between them, are one link.
    """
    everybody = (1 << num_nodes) - 1
    groups = [everybody, *sorted(edges, key=lambda cut: -cut.bit_count())]
    above = [-1] + [_smallest_around(groups, index) for index in range(1, len(groups))]
    homes = [max(range(len(groups)), key=lambda g: (groups[g] >> node & 1, g)) for node in range(num_nodes)]
    neighbours: dict[int, list[int]] = {index: [] for index in range(len(groups))}
    for index, parent in enumerate(above[1:], 1):
        neighbours[index].append(parent)
        neighbours[parent].append(index)
    middle = _middle(neighbours)
    root = middle[0]
    if len(middle) == 2:
        root = len(groups)
        neighbours[root] = list(middle)
        for one, other in (middle, middle[::-1]):
            neighbours[one] = [root if each == other else each for each in neighbours[one]]
    return _rooted(neighbours, root, homes)


def racks(found: Fit) -> Iterator[Cut]:
    """Nodes that hang on one switch of the fit's tree and may be a rack of their own: all, or those with NICs alike.

    Those that an edge of the fit separates already are left out, as are single nodes and all but one.
    """
    shape, num_nodes = tree(found.edges[::2], found.num_nodes), found.num_nodes
    known = set(found.cuts)
    nics = [min(found.rate(1 << node), found.rate(seen.other_side(1 << node, num_nodes))) for node in range(num_nodes)]
    for switch in range(len(shape.parents)):
        at_home = [node for node in range(num_nodes) if shape.homes[node] == switch]
        for alike in (at_home, *_alike(at_home, nics)):
            cut = sum(1 << node for node in alike)
            if 2 <= len(alike) <= num_nodes - 2 and cut not in known:
                known |= {cut, seen.other_side(cut, num_nodes)}
                yield cut


def _alike(nodes: Sequence[int], rates: Sequence[float]) -> list[list[int]]:
    """Nodes in sets of about the same rate, slowest first."""
    sets: list[list[int]] = []
    for node in sorted(nodes, key=lambda node: rates[node]):
        if sets and rates[node] <= rates[sets[-1][0]] * _ALIKE:
            sets[-1].append(node)
        else:
            sets.append([node])
    return sets


def cluster(
    name: str,
    hosts: Sequence[Host],
    found: Fit,
    latency_s: float,
    rounded: Callable[[float], float] = float,
) -> tuple[Cluster, tuple[MeasuredLink, ...]]:
    """The cluster of a fit, and its links with the rates of both directions.

    The cluster has one rate for both directions of a link, the lower one; where only one direction was seen to be full,
    that one's.
    """
    shape = tree(found.edges[::2], len(hosts))
    names = [CORE, *_switch_names(len(shape.parents) - 1, {host.name for host in hosts})]
    links = tuple(_levelled(list(_links(shape, names, hosts, found)), rounded))
    rates = _rates(links)
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
        for host, home in zip(hosts, shape.homes, strict=True)
    )
    return Cluster(name=name, nodes=nodes, switches=switches, latency_s=latency_s), links


def _links(shape: Tree, names: Sequence[str], hosts: Sequence[Host], found: Fit) -> Iterator[MeasuredLink]:
    """Nodes first, then switches, upwards before downwards: the order of `Cluster.links`."""
    ends = [
        (host.name, names[home], 1 << index) for index, (host, home) in enumerate(zip(hosts, shape.homes, strict=True))
    ]
    ends += [(names[i], names[parent], shape.sides[i]) for i, parent in enumerate(shape.parents) if i]
    for lower, upper, cut in ends:
        for src, dst, way in ((lower, upper, cut), (upper, lower, seen.other_side(cut, len(hosts)))):
            yield MeasuredLink(src=src, dst=dst, rate_bytes_per_s=found.rate(way), is_proved=found.is_proved(way))


def _levelled(links: Sequence[MeasuredLink], rounded: Callable[[float], float]) -> Iterator[MeasuredLink]:
    """Links with the median of all whose rates are about theirs: equal hardware shall look equal.

    Plans for equal links are simpler, and faster, than those that follow the noise of measurements.
    """
    levels: list[list[float]] = []
    for rate in sorted(link.rate_bytes_per_s for link in links):
        if levels and rate <= levels[-1][0] * _ALIKE:
            levels[-1].append(rate)
        else:
            levels.append([rate])
    level = {rate: rounded(statistics.median(alike)) for alike in levels for rate in alike}
    for link in links:
        yield replace(link, rate_bytes_per_s=level[link.rate_bytes_per_s])


def _rates(links: Sequence[MeasuredLink]) -> dict[str, float]:
    """The lower end of each edge -> its rate."""
    rates = {}
    for up, down in zip(links[::2], links[1::2], strict=True):
        proved = [link.rate_bytes_per_s for link in (up, down) if link.is_proved]
        rates[up.src] = min(proved) if len(proved) == 1 else min(up.rate_bytes_per_s, down.rate_bytes_per_s)
    return rates


def _smallest_around(groups: Sequence[Cut], index: int) -> int:
    return max(other for other in range(index) if groups[other] & groups[index] == groups[index])


def _middle(neighbours: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
    """The one or two vertices that are left when the outermost are taken away again and again."""
    left = {vertex: set(around) for vertex, around in neighbours.items()}
    while len(left) > 2:
        outermost = [vertex for vertex, around in left.items() if len(around) <= 1]
        for vertex in outermost:
            for other in left.pop(vertex):
                left[other].discard(vertex)
    return tuple(sorted(left))


def _rooted(neighbours: Mapping[int, Sequence[int]], root: int, homes: Sequence[int]) -> Tree:
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
    return Tree(
        parents=tuple(parent for _, parent in order),
        sides=tuple(below[vertex] for vertex, _ in order),
        homes=tuple(places[home] for home in homes),
    )


def _switch_names(count: int, taken: set[str]) -> list[str]:
    """`s0`, `s1`, ... by a stem that no node uses."""
    folded = {name.casefold() for name in taken}
    for stem in ("s", "switch-", "recovered-switch-"):
        names = [f"{stem}{index}" for index in range(count)]
        if folded.isdisjoint(names):
            return names
    return [f"recovered-switch-{index}-{len(folded)}" for index in range(count)]
