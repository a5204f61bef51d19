"""Observations of topology inference: batches of flows, their measured rates, and the loads of cuts.

A *cut* is a set of nodes, written as an integer whose bit i stands for node i. The traffic that nodes of the set send
to nodes outside passes it. Every edge of a tree is two cuts, one for each direction.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Flow:
    """One TCP stream that runs at full speed."""

    src: int
    """Index of the sending node."""
    dst: int
    """Index of the receiving node."""


@dataclass(frozen=True, slots=True)
class FlowBatch:
    """Flows that run at the same time."""

    flows: tuple[Flow, ...]
    purpose: str
    """Purpose in a few words, for a log."""


def round_robin_pairs(num_nodes: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield rounds of disjoint pairs in which all nodes meet once (circle method); in odd numbers one node waits.

    Cost: num_nodes - 1 rounds, or num_nodes where that is odd.
    """
    positions = [*range(num_nodes), *([None] if num_nodes % 2 else [])]
    for _ in range(len(positions) - 1):
        facing = zip(positions[: len(positions) // 2], reversed(positions[len(positions) // 2 :]), strict=True)
        yield tuple((one, other) for one, other in facing if one is not None and other is not None)
        positions.insert(1, positions.pop())


def pair_batches(num_nodes: int) -> Iterator[FlowBatch]:
    """Yield every pair in both directions, one after the other; no node sends and receives in the same batch."""
    for number, pairs in enumerate(round_robin_pairs(num_nodes), 1):
        # The first sender alternates along the row, or the first half would always send to the second.
        turned = [(b, a) if index % 2 else (a, b) for index, (a, b) in enumerate(pairs)]
        for ends in (turned, [(b, a) for a, b in turned]):
            yield FlowBatch(tuple(Flow(*each) for each in ends), f"pairs, round {number}")


def all_nodes_batch(order: Sequence[int], shift: int) -> FlowBatch:
    """Return a batch in which every node sends to one and receives from one; it fills NICs and shared links."""
    receivers = np.roll(np.asarray(order), -shift).tolist()
    return FlowBatch(tuple(map(Flow, order, receivers)), f"all at once, shift {shift}")


Cut = int
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

TOLERANCE = 0.1
"""A link whose load is within this fraction of its largest load is full: noise of TCP and of the machines."""
UNSEEN_CAPACITY = 1e-9
"""Capacity of a cut that no flow has passed; every load is far larger."""


def opposite_cut(cut: Cut, num_nodes: int) -> Cut:
    """Return the same edge in the other direction."""
    return ((1 << num_nodes) - 1) ^ cut


def nodes_inside(cut: Cut, num_nodes: int) -> list[int]:
    """Return the indices of the nodes inside."""
    return np.flatnonzero(inside_matrix([cut], num_nodes)[0]).tolist()


def inside_matrix(cuts: Sequence[Cut], num_nodes: int) -> Bools:
    """Return a matrix of shape [cuts, nodes]: the nodes inside each cut."""
    width = num_nodes // 8 + 1
    octets = np.frombuffer(b"".join(cut.to_bytes(width, "little") for cut in cuts), np.uint8).reshape(-1, width)
    return np.unpackbits(octets, axis=1, count=num_nodes, bitorder="little").astype(bool)


class Observations:
    """Measured rates of the flows of all batches so far."""

    def __init__(self, num_nodes: int) -> None:
        self.num_nodes = num_nodes
        self.src: Indices = np.zeros(0, np.int64)
        """Sender of each flow."""
        self.dst: Indices = np.zeros(0, np.int64)
        """Receiver of each flow."""
        self.batch: Indices = np.zeros(0, np.int64)
        """Number of the batch of each flow."""
        self.rates: Floats = np.zeros(0)
        """Rate of each flow in bytes per second."""
        self.starts: list[int] = []
        """Index of the first flow of each batch."""
        self._nic_loads: list[Floats] = []
        self._best: Floats | None = None

    @property
    def num_batches(self) -> int:
        return len(self.starts)

    @property
    def nic_loads(self) -> Floats:
        """Shape [2 nodes, batches]: load of each NIC in each batch; outward of all nodes, then inward."""
        return np.stack(self._nic_loads, axis=1)

    def flows_of(self, number: int) -> tuple[Flow, ...]:
        start, end = [*self.starts, len(self.src)][number : number + 2]
        return tuple(map(Flow, self.src[start:end].tolist(), self.dst[start:end].tolist()))

    def flow(self, index: int) -> Flow:
        return Flow(int(self.src[index]), int(self.dst[index]))

    def add(self, batch: FlowBatch, rates: Sequence[float]) -> None:
        """Add a batch and the rates of its flows, in bytes per second."""
        src, dst = np.array([(flow.src, flow.dst) for flow in batch.flows], np.int64).T
        got = np.array(rates, np.float64)
        self.starts.append(len(self.src))
        self.src, self.dst = np.concatenate([self.src, src]), np.concatenate([self.dst, dst])
        self.batch = np.concatenate([self.batch, np.full(len(src), len(self.starts) - 1)])
        self.rates = np.concatenate([self.rates, got])
        self._nic_loads.append(np.concatenate([_sum_by_node(ends, got, self.num_nodes) for ends in (src, dst)]))
        self._best = None

    def best_rates(self) -> Floats:
        """Shape [nodes, nodes]: rate of the fastest flow from one to the other; 0 where there was none."""
        if self._best is None:
            self._best = np.zeros((self.num_nodes, self.num_nodes))
            np.maximum.at(self._best, (self.src, self.dst), self.rates)
        return self._best

    def crossed(self, inside: Bools) -> Bools:
        """Shape [cuts, flows]: the flows that pass each cut."""
        return inside[:, self.src] & ~inside[:, self.dst]

    def loads(self, crossed: Bools) -> Floats:
        """Shape [cuts, batches]: load of each cut in each batch."""
        return np.add.reduceat(crossed * self.rates, self.starts, axis=1)


def _sum_by_node(ends: Indices, rates: Floats, num_nodes: int) -> Floats:
    """Shape [nodes]: sum of the rates at each node, added in the order in which numpy adds the loads of edges."""
    passed = np.bincount(ends, rates, num_nodes).astype(np.float64)
    count = np.bincount(ends, minlength=num_nodes)
    busy = np.flatnonzero(count > 2)
    passed[busy] = np.add.reduceat((ends == busy[:, None]) * rates, [0], axis=1)[:, 0]
    return passed


def observed_capacities(loads: Floats) -> Floats:
    """Shape [cuts]: largest load of each cut, a lower bound of its capacity."""
    return np.maximum(loads.max(axis=1), UNSEEN_CAPACITY)


def rates_across_cut(rates: Mapping[Cut, float], cut: Cut, num_nodes: int) -> tuple[dict[int, float], dict[int, float]]:
    """Return the rate of each sender inside a cut and of each receiver outside, if all inside send to all outside.

    Nodes that share a link on their side get parts of it in proportion to their NICs.

    `rates`: cut -> bytes per second; includes the cuts around single nodes.
    """
    far = opposite_cut(cut, num_nodes)
    sends = {node: rates[1 << node] for node in nodes_inside(cut, num_nodes)}
    takes = {node: rates[opposite_cut(1 << node, num_nodes)] for node in nodes_inside(far, num_nodes)}
    inner = sorted(rates, key=int.bit_count)
    for side, cuts, limited in (
        (cut, [(each, each) for each in inner], sends),
        (far, [(each, opposite_cut(each, num_nodes)) for each in reversed(inner)], takes),
    ):
        for each, behind in cuts:
            if behind != side and behind & side == behind and behind.bit_count() > 1:
                _scale_to_capacity(limited, nodes_inside(behind, num_nodes), rates[each])
    return sends, takes


def _scale_to_capacity(rates: dict[int, float], nodes: Sequence[int], capacity: float) -> None:
    total = sum(rates[node] for node in nodes)
    if total > capacity:
        for node in nodes:
            rates[node] *= capacity / total
