"""What can be sent from one side of an edge to the other, by the links there; and so which edges can be seen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ringweave.topology.cluster import Cluster
from ringweave.topology.recovery import evidence as seen
from ringweave.topology.recovery.evidence import Cut
from ringweave.topology.rules import CORE


def room(rates: Mapping[Cut, float], cut: Cut, num_nodes: int) -> tuple[dict[int, float], dict[int, float]]:
    """What each node inside a cut can send, and each outside can receive, if all inside send to all outside.

    Where nodes have to share a link on their side, it is shared in proportion to their NICs.

    Args:
        rates: Cut -> bytes per second, among them all that go around one node.
        cut: The edge; its own rate does not count.
        num_nodes: Number of nodes.
    """
    far = seen.other_side(cut, num_nodes)
    sends = {node: rates[1 << node] for node in seen.members(cut, num_nodes)}
    takes = {node: rates[seen.other_side(1 << node, num_nodes)] for node in seen.members(far, num_nodes)}
    inner = sorted(rates, key=int.bit_count)
    for side, cuts, limited in (
        (cut, [(each, each) for each in inner], sends),
        (far, [(each, seen.other_side(each, num_nodes)) for each in reversed(inner)], takes),
    ):
        for each, behind in cuts:
            if behind != side and behind & side == behind and behind.bit_count() > 1:
                _limit(limited, seen.members(behind, num_nodes), rates[each])
    return sends, takes


@dataclass(frozen=True, slots=True)
class Sight:
    """What measurements between its nodes can see of a cluster."""

    rates: Mapping[Cut, float]
    """Every edge, in both directions -> bytes per second; links in a row are one edge, of the least rate."""
    pressures: Mapping[Cut, float]
    """Every edge -> how many times its rate its sides could send through it; up to 1 it never holds anything back."""

    def edges(self, num_nodes: int, least_pressure: float = 1.0) -> set[Cut]:
        """Edges between switches (the side without node 0) that hold back something in some direction."""
        between = {cut for cut in self.rates if 2 <= cut.bit_count() <= num_nodes - 2}
        felt = {cut for cut in between if self.pressures[cut] > least_pressure}
        return {seen.other_side(cut, num_nodes) if cut & 1 else cut for cut in felt}


def sight(cluster: Cluster, rates: Mapping[str, float] | None = None) -> Sight:
    """What can be seen of a cluster by sending between its nodes; `rates` replaces those of links by name."""
    nodes = {node.name: index for index, node in enumerate(cluster.nodes)}
    below = {name: 1 << index for name, index in nodes.items()}
    for name, index in nodes.items():
        for switch in cluster.ancestors(name):
            below[switch] = below.get(switch, 0) | 1 << index
    least: dict[Cut, float] = {}
    for link in cluster.links():
        is_up = link.src != CORE and cluster.ancestors(link.src)[0] == link.dst
        cut = below[link.src] if is_up else seen.other_side(below[link.dst], len(nodes))
        rate = (rates or {}).get(link.name, link.bandwidth_bytes_per_s)
        least[cut] = min(rate, least.get(cut, rate))
    least.pop(0, None)
    least.pop((1 << len(nodes)) - 1, None)
    pressures = {cut: min(sum(side.values()) for side in room(least, cut, len(nodes))) / least[cut] for cut in least}
    return Sight(rates=least, pressures=pressures)


def _limit(rates: dict[int, float], nodes: Sequence[int], capacity: float) -> None:
    total = sum(rates[node] for node in nodes)
    if total > capacity:
        for node in nodes:
            rates[node] *= capacity / total
