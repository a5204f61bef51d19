"""The tree that explains what was measured.

TCP lets no flow wait for nothing: each fills some link on its way. So a flow is *explained* if it passes an edge whose
load was, in that batch, about the most that ever passed it. NICs explain most flows; those that no NIC explains point
to an edge between switches, and the edge that explains most of them is added, until none is left that matters.
What shares the rates out among the flows does not matter, only their sums do.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from ringweave.topology.recovery import evidence as seen
from ringweave.topology.recovery.candidates import candidates
from ringweave.topology.recovery.evidence import Bools, Cut, Evidence, Floats

TOLERANCE = 0.1
"""A link whose load is within this of the most that it carried is full: TCP's and the machines' noise."""
CLEAR = 0.15
"""A link that misses this much of it is clearly not full."""
_LEAST_WEIGHT = 0.3
"""Unexplained flows that miss less than this altogether (1 is a whole flow) are noise."""
_LEAST_BATCHES = 2
_RIVALLING = 0.5


@dataclass(frozen=True, slots=True)
class Fit:
    """Edges that explain the evidence, each as two cuts, and how well."""

    num_nodes: int
    cuts: tuple[Cut, ...]
    """NICs outward, NICs inward, then the edges between switches, outward and inward in turn."""
    capacities: Floats
    """Shape [cuts]: the most that passed each."""
    loads: Floats
    """Shape [cuts, batches]."""
    proofs: Bools
    """Shape [cuts, batches]: it was full, and some flow had nothing else in its way."""
    unexplained: Floats
    """Shape [flows]: what part of a flow nothing explains; 0 where something does."""

    def rate(self, cut: Cut) -> float:
        """What a cut carries: typically when nothing else was in the way, else the most that was seen."""
        index = self.cuts.index(cut)
        proofs = self.loads[index][self.proofs[index]]
        return float(np.median(proofs) if len(proofs) else self.capacities[index])

    @property
    def nics(self) -> tuple[Cut, ...]:
        """The cuts around single nodes: outward, then inward."""
        return self.cuts[: 2 * self.num_nodes]

    @property
    def edges(self) -> tuple[Cut, ...]:
        """The cuts between switches: outward and inward in turn."""
        return self.cuts[2 * self.num_nodes :]

    def num_proofs(self, cut: Cut) -> int:
        """In how many batches the cut was seen to be what held flows back; if in none, it carries at least its rate."""
        return int(self.proofs[self.cuts.index(cut)].sum())

    def is_proved(self, cut: Cut) -> bool:
        """Whether that was so in any batch."""
        return self.num_proofs(cut) > 0


def fit(evidence: Evidence, refuted: Collection[Cut] = ()) -> Fit:
    """The NICs, and the edges between switches that the evidence asks for.

    Args:
        evidence: At least one batch.
        refuted: Edges (the side without node 0) that are not to be considered.
    """
    num_nodes = evidence.num_nodes
    outward = [1 << node for node in range(num_nodes)]
    cuts = outward + [seen.other_side(cut, num_nodes) for cut in outward]
    while True:
        found = _assess(evidence, cuts)
        edge = _most_wanted(evidence, found, refuted)
        if edge is None:
            return found
        cuts = [*cuts, edge, seen.other_side(edge, num_nodes)]


def are_compatible(one: Cut, other: Cut, num_nodes: int) -> bool:
    """Whether one tree can have both edges: some side of the one lies inside some side of the other."""
    sides = [(one, seen.other_side(one, num_nodes)), (other, seen.other_side(other, num_nodes))]
    return any(a & b == 0 for a in sides[0] for b in sides[1])


def _assess(evidence: Evidence, cuts: Sequence[Cut]) -> Fit:
    crossed = evidence.crossed(seen.rows(cuts, evidence.num_nodes))
    loads = evidence.loads(crossed)
    capacities = seen.capacities(loads)
    fullness = np.where(crossed, (loads / capacities[:, None])[:, evidence.batch], 0.0)
    best_two = np.sort(fullness, axis=0)[-2:]
    slack = 1 - best_two[-1]
    alone = (fullness >= 1 - TOLERANCE) & (best_two[0] <= 1 - CLEAR)
    proofs = np.zeros(loads.shape, bool)
    np.logical_or.at(proofs.T, evidence.batch, alone.T)
    return Fit(evidence.num_nodes, tuple(cuts), capacities, loads, proofs, np.where(slack > TOLERANCE, slack, 0.0))


def rivals(evidence: Evidence, found: Fit) -> list[Cut]:
    """Edges that explain about what some edge of the fit does: they may be there instead, or as well."""
    rivalling: dict[Cut, None] = {}
    for edge in found.edges[::2]:
        rest = [cut for cut in found.cuts if cut not in (edge, seen.other_side(edge, found.num_nodes))]
        without = _assess(evidence, rest)
        wanted = [cut for cut in _possible(evidence, without) if are_compatible(cut, edge, found.num_nodes)]
        scores = _scores(evidence, without, seen.rows(wanted, found.num_nodes)) if wanted else np.zeros(0)
        good = np.flatnonzero(scores >= _RIVALLING * without.unexplained.sum())
        rivalling |= dict.fromkeys(wanted[index] for index in good if wanted[index] != edge)
    return list(rivalling)


def _most_wanted(evidence: Evidence, found: Fit, refuted: Collection[Cut]) -> Cut | None:
    """The edge that explains most of what is unexplained; None if that is no more than noise."""
    if found.unexplained.sum() < _LEAST_WEIGHT:
        return None
    wanted = [cut for cut in _possible(evidence, found) if cut not in refuted]
    if not wanted:
        return None
    scores = _scores(evidence, found, seen.rows(wanted, evidence.num_nodes))
    best = int(scores.argmax())
    return wanted[best] if scores[best] >= _LEAST_WEIGHT else None


def _possible(evidence: Evidence, found: Fit) -> list[Cut]:
    """Edges that the tree of a fit could have besides."""
    likely = candidates(evidence, lambda inside: _scores(evidence, found, inside), found.unexplained)
    return [
        cut
        for cut in likely
        if cut not in found.edges and all(are_compatible(cut, edge, found.num_nodes) for edge in found.edges[::2])
    ]


def _scores(evidence: Evidence, found: Fit, inside: Bools) -> Floats:
    """Shape [edges]: how much each explains of what is not explained yet; 0 for what happened only once."""
    scores, num_batches = np.zeros((2, len(inside)))
    starts = np.searchsorted(evidence.batch, np.arange(evidence.num_batches))
    for side in (inside, ~inside):
        crossed = evidence.crossed(side)
        loads = evidence.loads(crossed)
        full = loads >= (1 - TOLERANCE) * seen.capacities(loads)[:, None]
        gained = (crossed & full[:, evidence.batch]) * found.unexplained
        num_batches += (np.add.reduceat(gained, starts, axis=1) > 0).sum(axis=1)
        scores += gained.sum(axis=1)
    return np.where(num_batches >= _LEAST_BATCHES, scores, 0.0)
