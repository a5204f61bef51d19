"""Edges of a known cluster that measurements between its nodes can see: what an inferred one is compared with."""

from collections.abc import Mapping
from dataclasses import dataclass

from ringweave.topology import Cluster
from ringweave.topology.cluster import CORE
from ringweave.topology.inference.observations import Cut, opposite_cut, rates_across_cut


@dataclass(frozen=True, slots=True)
class VisibleEdges:
    """Edges of a cluster that measurements between its nodes can see."""

    rates: Mapping[Cut, float]
    """Every edge, in both directions -> bytes per second; a chain of links is one edge, of the lowest rate."""
    pressures: Mapping[Cut, float]
    """Every edge -> rate that its sides could send through it, divided by its rate; up to 1 it is never a bottleneck.
    """

    def edges(self, num_nodes: int, least_pressure: float = 1.0) -> set[Cut]:
        """Return edges between switches (the side without node 0) that are a bottleneck in some direction."""
        between = {cut for cut in self.rates if 2 <= cut.bit_count() <= num_nodes - 2}
        felt = {cut for cut in between if self.pressures[cut] > least_pressure}
        return {opposite_cut(cut, num_nodes) if cut & 1 else cut for cut in felt}


def visible_edges(cluster: Cluster, rates: Mapping[str, float] | None = None) -> VisibleEdges:
    """Return the edges of a cluster that flows between its nodes can see; `rates` replaces those of links by name."""
    nodes = {node.name: index for index, node in enumerate(cluster.nodes)}
    below = {name: 1 << index for name, index in nodes.items()}
    for name, index in nodes.items():
        for switch in cluster.ancestors(name):
            below[switch] = below.get(switch, 0) | 1 << index
    least: dict[Cut, float] = {}
    for link in cluster.links():
        is_up = link.src != CORE and cluster.ancestors(link.src)[0] == link.dst
        cut = below[link.src] if is_up else opposite_cut(below[link.dst], len(nodes))
        rate = (rates or {}).get(link.name, link.bandwidth_bytes_per_s)
        least[cut] = min(rate, least.get(cut, rate))
    least.pop(0, None)
    least.pop((1 << len(nodes)) - 1, None)
    pressures = {
        cut: min(sum(side.values()) for side in rates_across_cut(least, cut, len(nodes))) / least[cut] for cut in least
    }
    return VisibleEdges(rates=least, pressures=pressures)
