"""A network in memory for the survey to measure: max-min sharing over the links of a cluster, with noise."""

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ringweave.topology import Cluster
from ringweave.topology.cluster import CORE
from ringweave.topology.inference.fit import TreeFit
from ringweave.topology.inference.infer import SurveyLimits, infer_topology
from ringweave.topology.inference.observations import Cut, FlowBatch, Observations, opposite_cut, rates_across_cut


class Network:
    """What the flows of a batch get."""

    def __init__(
        self, cluster: Cluster, seed: int = 0, noise: float = 0.0, rates: Mapping[str, float] | None = None
    ) -> None:
        """`noise` is the most that a flow misses of its share; a third of it is the most that it gets above."""
        self._names = [node.name for node in cluster.nodes]
        self._cluster = cluster
        self._rates = {link.name: link.bandwidth_bytes_per_s for link in cluster.links()} | dict(rates or {})
        self._random = random.Random(seed)
        self._noise = noise
        self.batches: list[FlowBatch] = []

    def run(self, batch: FlowBatch) -> list[float]:
        self.batches.append(batch)
        return [rate * self._random.uniform(1 - self._noise, 1 + self._noise / 3) for rate in self._shares(batch)]

    def _shares(self, batch: FlowBatch) -> list[float]:
        routes = [self._cluster.route(self._names[flow.src], self._names[flow.dst]) for flow in batch.flows]
        left = dict(self._rates)
        rates = [0.0] * len(routes)
        growing = set(range(len(routes)))
        while growing:
            users = Counter(name for flow in growing for name in routes[flow])
            step = min(left[name] / count for name, count in users.items())
            for flow in growing:
                rates[flow] += step
            for name, count in users.items():
                left[name] -= step * count
            full = {name for name, count in users.items() if left[name] <= 1e-9 * self._rates[name]}
            growing = {flow for flow in growing if full.isdisjoint(routes[flow])}
        return rates


def measure(
    network: Network,
    num_nodes: int,
    effort: SurveyLimits | None = None,
    seed: int = 0,
    clock: Callable[[], float] = time.thread_time,
) -> tuple[Observations, TreeFit]:
    """The survey of this network, to its end."""
    asking = infer_topology(num_nodes, random.Random(seed), effort, clock)
    try:
        batch = next(asking)
        while True:
            batch = asking.send(network.run(batch))
    except StopIteration as end:
        return end.value


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
