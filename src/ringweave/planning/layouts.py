"""How the ranks of a group are laid out on the tree: the ring, groups and their leaders, rows and columns, the root."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ringweave.cost import Network
from ringweave.topology import Cluster, Node, leaders


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """What the generators of schedules want to know of the topology."""

    ring_order: tuple[int, ...]
    """Ranks of a node together, nodes of a switch together: the ring passes every link once in each direction."""
    groups: tuple[tuple[int, ...], ...]
    """Ranks of each node (or of each of its NICs), the leader first, in the order of the ring."""
    racks: tuple[tuple[int, ...], ...]
    """Indices of `groups` that hang on the same switch."""
    root: int
    """First leader of the node that is best connected."""


def lay_out(cluster: Cluster, net: Network, nodes: Sequence[str], *, leader_per_nic: bool = False) -> Layout:
    """The layout of a group.

    Args:
        cluster: The machines.
        net: The network between the nodes of the group.
        nodes: Name of the node of each rank.
        leader_per_nic: Give each NIC of a node a leader, not just each node.
    """
    ranks_on: dict[str, list[int]] = {}
    for rank, name in enumerate(nodes):
        ranks_on.setdefault(name, []).append(rank)
    groups: list[tuple[int, ...]] = []
    racks: dict[int, list[int]] = {}
    leaders: dict[int, int] = {}
    for vertex, name in enumerate(net.names):
        if net.is_node[vertex]:
            split = _groups(cluster.node(name), ranks_on[name], leader_per_nic)
            racks.setdefault(int(net.parents[vertex]), []).extend(range(len(groups), len(groups) + len(split)))
            leaders[vertex] = split[0][0]
            groups += split
    return Layout(
        ring_order=tuple(rank for group in groups for rank in sorted(group)),
        groups=tuple(groups),
        racks=tuple(map(tuple, racks.values())),
        root=leaders[_best_connected(net)],
    )


def column_counts(layout: Layout) -> list[int | None]:
    """Numbers of columns worth comparing: the most square matrix, and those whose rows lie inside racks.

    Rows that cross racks put n times more on the uplinks, so n divides the number of leaders of every rack.
    """
    inside = math.gcd(*map(len, layout.racks))
    smaller = max((n for n in range(1, inside) if inside % n == 0), default=inside)
    counts: list[int | None] = [None]
    return counts + [count for count in dict.fromkeys((inside, smaller)) if count > 1]


def tierings(layout: Layout) -> list[tuple[tuple[int, ...], ...]]:
    """Groups worth comparing for the hierarchical schedule: of nodes, and of racks.

    Nodes of one rank each would make it a ring, which is considered anyway.
    """
    racks = tuple(tuple(rank for group in rack for rank in layout.groups[group]) for rack in layout.racks)
    return list(dict.fromkeys((layout.groups, racks) if max(map(len, layout.groups)) > 1 else (racks,)))


def _groups(node: Node, ranks: Sequence[int], leader_per_nic: bool) -> list[tuple[int, ...]]:
    """The ranks of a node, leader first, in one group or one per NIC.

    Ranks are on devices in their order where all devices of the node take part; then a device belongs to the NIC that
    it is nearest to, and leads there if it is the nearest of all (`topology.leaders`).
    """
    nics = leaders.preferred(node.nics)[: len(ranks) if leader_per_nic else 1]
    is_whole = len(ranks) == node.num_devices
    far = [[leaders.remoteness(node, nic, i) if is_whole else 0 for i in range(len(ranks))] for nic in nics]
    members: list[list[int]] = [[] for _ in nics]
    for place in range(len(ranks)):
        members[min(range(len(nics)), key=lambda i: (far[i][place], len(members[i]), i))].append(place)
    groups = []
    for index, places in enumerate(members):
        if places:
            leader = min(places, key=lambda place: (far[index][place], place))
            groups.append(tuple(ranks[place] for place in sorted(places, key=lambda place: (place != leader, place))))
    return groups


def _best_connected(net: Network) -> int:
    """The node with the fastest way to the root of the tree, the first of several."""
    rates = [math.inf]
    for vertex, parent in enumerate(net.parents.tolist()[1:], start=1):
        rates.append(min(rates[parent], float(net.up_bytes_per_s[vertex]), float(net.down_bytes_per_s[vertex])))
    return max((vertex for vertex in range(len(net)) if net.is_node[vertex]), key=lambda vertex: rates[vertex])
