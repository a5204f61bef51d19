"""The tree that explains what was measured.

TCP lets no flow wait for nothing: each fills some link on its way. So a flow is *explained* if it passes an edge whose
load was, in that batch, about the most that ever passed it. NICs explain most flows; those that no NIC explains point
to an edge between switches, and the edge that explains most of them is added, until none is left that matters.
What shares the rates out among the flows does not matter, only their sums do.
"""

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from ringweave.topology.recovery import evidence as seen
from ringweave.topology.recovery.candidates import candidates
from ringweave.topology.recovery.evidence import TOLERANCE, Bools, Cut, Evidence, Floats
from ringweave.topology.recovery.scoring import score
from ringweave.topology.recovery.thinking import Thinking

CLEAR = 0.15
"""A link that misses this much of it is clearly not full."""
_LEAST_WEIGHT = 0.3
"""Unexplained flows that miss less than this altogether (1 is a whole flow) are noise."""
_RIVALLING = 0.5


@dataclass(frozen=True)
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

    unsought: str | None = None
    """What was not looked for, in words; None where everything was."""

    @functools.cached_property
    def _places(self) -> dict[Cut, int]:
        return {cut: index for index, cut in enumerate(self.cuts)}

    def capacity(self, cut: Cut) -> float:
        """The most that passed a cut."""
        return float(self.capacities[self._places[cut]])

    def rate(self, cut: Cut) -> float:
        """What a cut carries: typically when nothing else was in the way, else the most that was seen."""
        index = self._places[cut]
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
        return int(self.proofs[self._places[cut]].sum())

    def is_proved(self, cut: Cut) -> bool:
        """Whether that was so in any batch."""
        return self.num_proofs(cut) > 0


def fit(evidence: Evidence, thinking: Thinking, refuted: Collection[Cut] = (), known: Collection[Cut] = ()) -> Fit:
    """The NICs, and the edges between switches that the evidence asks for.

    Args:
        evidence: At least one batch.
        thinking: Where it is over, the edges are those found so far.
        refuted: Edges (the side without node 0) that are not to be considered.
        known: Edges of an earlier fit, which do for an answer where there is no time to look for them again.
    """
    edges: list[Cut] = []
    while True:
        if thinking.is_over and len(edges) < len(known):
            edges = list(known)
        found = assess(evidence, edges)
        edge = None if thinking.is_over else _most_wanted(evidence, found, refuted, thinking)
        if edge is None:
            return found
        edges.append(edge)


def are_compatible(one: Cut, other: Cut, num_nodes: int) -> bool:
    """Whether one tree can have both edges: some side of the one lies inside some side of the other."""
    sides = [(one, seen.other_side(one, num_nodes)), (other, seen.other_side(other, num_nodes))]
    return any(a & b == 0 for a in sides[0] for b in sides[1])


def assess(evidence: Evidence, edges: Sequence[Cut]) -> Fit:
    """The fit with these edges (the sides without node 0) and no others.

    Cost:
        Flows times edges: every flow passes two NICs only.
    """
    num_nodes = evidence.num_nodes
    outward = [1 << node for node in range(num_nodes)]
    nics = outward + [seen.other_side(cut, num_nodes) for cut in outward]
    between = [cut for edge in edges for cut in (edge, seen.other_side(edge, num_nodes))]
    crossed = evidence.crossed(seen.rows(between, num_nodes))
    loads = np.concatenate([evidence.nic_loads, evidence.loads(crossed)])
    capacities = seen.capacities(loads)
    full = loads / capacities[:, None]
    batch, ends = evidence.batch, np.stack([evidence.src, evidence.dst + num_nodes])
    fullness = np.concatenate([full[ends, batch], np.where(crossed, full[2 * num_nodes :, batch], 0.0)])
    best_two = np.sort(fullness, axis=0)[-2:]
    slack = 1 - best_two[-1]
    alone = (fullness >= 1 - TOLERANCE) & (best_two[0] <= 1 - CLEAR)
    proofs = np.zeros(loads.shape, bool)
    for way, of_way in zip(ends, alone, strict=False):
        proofs[way[of_way], batch[of_way]] = True
    np.logical_or.at(proofs[2 * num_nodes :].T, batch, alone[2:].T)
    return Fit(num_nodes, (*nics, *between), capacities, loads, proofs, np.where(slack > TOLERANCE, slack, 0.0))


def rivals(evidence: Evidence, found: Fit, thinking: Thinking) -> list[Cut]:
    """Edges that explain about what some edge of the fit does: they may be there instead, or as well."""
    rivalling: dict[Cut, None] = {}
    for edge in found.edges[::2]:
        if thinking.is_over:
            break
        without = assess(evidence, [other for other in found.edges[::2] if other != edge])
        wanted = [cut for cut in _possible(evidence, without, thinking) if are_compatible(cut, edge, found.num_nodes)]
        scores = score(evidence, without.unexplained, seen.rows(wanted, found.num_nodes))
        good = np.flatnonzero(scores >= _RIVALLING * without.unexplained.sum())
        rivalling |= dict.fromkeys(wanted[index] for index in good if wanted[index] != edge)
    return list(rivalling)


def _most_wanted(evidence: Evidence, found: Fit, refuted: Collection[Cut], thinking: Thinking) -> Cut | None:
    """The edge that explains most of what is unexplained; None if that is no more than noise."""
    if found.unexplained.sum() < _LEAST_WEIGHT:
        return None
    wanted = [cut for cut in _possible(evidence, found, thinking) if cut not in refuted]
    if not wanted:
        return None
    scores = score(evidence, found.unexplained, seen.rows(wanted, evidence.num_nodes))
    best = int(scores.argmax())
    return wanted[best] if scores[best] >= _LEAST_WEIGHT else None


def _possible(evidence: Evidence, found: Fit, thinking: Thinking) -> list[Cut]:
    """Edges that the tree of a fit could have besides."""
    likely = candidates(evidence, found.unexplained, thinking)
    return [
        cut
        for cut in likely
        if cut not in found.edges and all(are_compatible(cut, edge, found.num_nodes) for edge in found.edges[::2])
    ]
