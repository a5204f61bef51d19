"""A network in memory for the survey to measure: max-min sharing over the links of a cluster, with noise."""

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping

from ringweave.topology import Cluster
from ringweave.topology.inference.fit import TreeFit
from ringweave.topology.inference.infer import SurveyLimits, infer_topology
from ringweave.topology.inference.observations import FlowBatch, Observations


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
