"""All that was measured, seen as loads of cuts.

A *cut* is a set of nodes, written as an integer whose bit i stands for node i: it is passed by what nodes of the set
send to nodes outside. Every edge of a tree is two cuts, one for each direction.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ringweave.topology.recovery.batches import Batch, Flow

Cut = int
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

TOLERANCE = 0.1
"""A link whose load is within this of the most that it carried is full: TCP's and the machines' noise."""
UNSEEN = 1e-9
"""Capacity of a cut that nothing has passed: every load of it is nothing beside this."""


def other_side(cut: Cut, num_nodes: int) -> Cut:
    """The same edge in the other direction."""
    return ((1 << num_nodes) - 1) ^ cut


def members(cut: Cut, num_nodes: int) -> list[int]:
    """Indices of the nodes inside."""
    return np.flatnonzero(rows([cut], num_nodes)[0]).tolist()


def rows(cuts: Sequence[Cut], num_nodes: int) -> Bools:
    """Shape [cuts, nodes]: who is inside of which."""
    width = num_nodes // 8 + 1
    octets = np.frombuffer(b"".join(cut.to_bytes(width, "little") for cut in cuts), np.uint8).reshape(-1, width)
    return np.unpackbits(octets, axis=1, count=num_nodes, bitorder="little").astype(bool)


class Evidence:
    """Rates of the flows of all batches so far."""

    def __init__(self, num_nodes: int) -> None:
        self.num_nodes = num_nodes
        self.src: Indices = np.zeros(0, np.int64)
        """Sender of each flow."""
        self.dst: Indices = np.zeros(0, np.int64)
        """Receiver of each flow."""
        self.batch: Indices = np.zeros(0, np.int64)
        """Number of the batch of each flow."""
        self.rates: Floats = np.zeros(0)
        """What each flow got, in bytes per second."""
        self.starts: list[int] = []
        """The first flow of each batch."""
        self._nic_loads: list[Floats] = []
        self._best: Floats | None = None

    @property
    def num_batches(self) -> int:
        """How many batches were seen."""
        return len(self.starts)

    @property
    def nic_loads(self) -> Floats:
        """Shape [2 nodes, batches]: what passed each NIC in each batch; outward of all nodes, then inward."""
        return np.stack(self._nic_loads, axis=1)

    def flows_of(self, number: int) -> tuple[Flow, ...]:
        """The flows of a batch."""
        start, end = [*self.starts, len(self.src)][number : number + 2]
        return tuple(map(Flow, self.src[start:end].tolist(), self.dst[start:end].tolist()))

    def flow(self, index: int) -> Flow:
        """The flow of that index."""
        return Flow(int(self.src[index]), int(self.dst[index]))

    def add(self, batch: Batch, rates: Sequence[float]) -> None:
        """Note what the flows of a batch got, in bytes per second."""
        src, dst = np.array([(flow.src, flow.dst) for flow in batch.flows], np.int64).T
        got = np.array(rates, np.float64)
        self.starts.append(len(self.src))
        self.src, self.dst = np.concatenate([self.src, src]), np.concatenate([self.dst, dst])
        self.batch = np.concatenate([self.batch, np.full(len(src), len(self.starts) - 1)])
        self.rates = np.concatenate([self.rates, got])
        self._nic_loads.append(np.concatenate([_passed(ends, got, self.num_nodes) for ends in (src, dst)]))
        self._best = None

    def best_rates(self) -> Floats:
        """Shape [nodes, nodes]: the fastest that a flow from one to the other was; 0 where there was none."""
        if self._best is None:
            self._best = np.zeros((self.num_nodes, self.num_nodes))
            np.maximum.at(self._best, (self.src, self.dst), self.rates)
        return self._best

    def crossed(self, inside: Bools) -> Bools:
        """Shape [cuts, flows]: which flow passes which cut."""
        return inside[:, self.src] & ~inside[:, self.dst]

    def loads(self, crossed: Bools) -> Floats:
        """Shape [cuts, batches]: what passed each cut in each batch."""
        return np.add.reduceat(crossed * self.rates, self.starts, axis=1)


def _passed(ends: Indices, rates: Floats, num_nodes: int) -> Floats:
    """Shape [nodes]: the sum of rates at each; of several flows in the order in which numpy sums the loads of edges."""
    passed = np.bincount(ends, rates, num_nodes).astype(np.float64)
    count = np.bincount(ends, minlength=num_nodes)
    busy = np.flatnonzero(count > 2)
    passed[busy] = np.add.reduceat((ends == busy[:, None]) * rates, [0], axis=1)[:, 0]
    return passed


def capacities(loads: Floats) -> Floats:
    """Shape [cuts]: the most that ever passed each, which its capacity is at least."""
    return np.maximum(loads.max(axis=1), UNSEEN)
