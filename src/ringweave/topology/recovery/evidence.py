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

UNSEEN = 1e-9
"""Capacity of a cut that nothing has passed: every load of it is nothing beside this."""


def other_side(cut: Cut, num_nodes: int) -> Cut:
    """The same edge in the other direction."""
    return ((1 << num_nodes) - 1) ^ cut


def members(cut: Cut, num_nodes: int) -> list[int]:
    """Indices of the nodes inside."""
    return [node for node in range(num_nodes) if cut >> node & 1]


def rows(cuts: Sequence[Cut], num_nodes: int) -> Bools:
    """Shape [cuts, nodes]: who is inside of which."""
    return np.array([[cut >> node & 1 for node in range(num_nodes)] for cut in cuts], bool).reshape(-1, num_nodes)


class Evidence:
    """Rates of the flows of all batches so far."""

    def __init__(self, num_nodes: int) -> None:
        self.num_nodes = num_nodes
        self._flows: list[Flow] = []
        self._rates: list[float] = []
        self._starts: list[int] = []

    @property
    def num_batches(self) -> int:
        """How many batches were seen."""
        return len(self._starts)

    @property
    def src(self) -> NDArray[np.int64]:
        """Sender of each flow."""
        return np.array([flow.src for flow in self._flows], np.int64)

    @property
    def dst(self) -> NDArray[np.int64]:
        """Receiver of each flow."""
        return np.array([flow.dst for flow in self._flows], np.int64)

    @property
    def batch(self) -> NDArray[np.int64]:
        """Number of the batch of each flow."""
        lengths = np.diff([*self._starts, len(self._flows)])
        return np.repeat(np.arange(len(self._starts)), lengths)

    def flows_of(self, number: int) -> tuple[Flow, ...]:
        """The flows of a batch."""
        ends = [*self._starts[1:], len(self._flows)]
        return tuple(self._flows[self._starts[number] : ends[number]])

    def flow(self, index: int) -> Flow:
        """The flow of that index."""
        return self._flows[index]

    def add(self, batch: Batch, rates: Sequence[float]) -> None:
        """Note what the flows of a batch got, in bytes per second."""
        self._starts.append(len(self._flows))
        self._flows.extend(batch.flows)
        self._rates.extend(rates)

    def best_rates(self) -> Floats:
        """Shape [nodes, nodes]: the fastest that a flow from one to the other was; 0 where there was none."""
        best = np.zeros((self.num_nodes, self.num_nodes))
        np.maximum.at(best, (self.src, self.dst), self._rates)
        return best

    def crossed(self, inside: Bools) -> Bools:
        """Shape [cuts, flows]: which flow passes which cut."""
        return inside[:, self.src] & ~inside[:, self.dst]

    def loads(self, crossed: Bools) -> Floats:
        """Shape [cuts, batches]: what passed each cut in each batch."""
        return np.add.reduceat(crossed * np.array(self._rates), self._starts, axis=1)


def capacities(loads: Floats) -> Floats:
    """Shape [cuts]: the most that ever passed each, which its capacity is at least."""
    return np.maximum(loads.max(axis=1), UNSEEN)
