"""Fit of a switch tree to the observed rates: candidate edges, their scores, and the CPU time spent on the search.

TCP lets no flow wait for nothing: each flow fills some link on its way. So a flow is *explained* if it passes an edge
whose load was, in that batch, about the most that ever passed it. NICs explain most flows. The unexplained ones point
to an edge between switches. The search adds the edge that explains most of them, until none is left that matters. The
way in which flows share a rate does not matter, only the sums do.

An edge explains the flows that pass it in batches in which it is full. Its score is the sum of what it explains, over
both directions; an effect that occurred in one batch only counts nothing.
"""

import functools
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ringweave.topology.inference import observations
from ringweave.topology.inference.observations import TOLERANCE, Bools, Cut, Floats, Observations

_MIN_BATCHES = 2
_MAX_CELLS = 1 << 22
"""Sets times flows that are evaluated together: 32 MB for each column of numbers."""
_NEGLIGIBLE = 1e-6
"""Rounding errors of sums stay below this part of a flow; unexplained flows miss a tenth at least."""


def score_edges(observed: Observations, unexplained: Floats, inside: Bools) -> Floats:
    """Return the score of each edge, by the unexplained flows that it explains; shape [edges].

    Args:
        observed: The measured rates.
        unexplained: Shape [flows]: part of each flow that nothing explains yet.
        inside: Shape [edges, nodes]: one side of each.

    Cost:
        Edges times flows.
    """
    height = max(1, _MAX_CELLS // len(observed.src))
    parts = [inside[start : start + height] for start in range(0, len(inside), height)]
    return np.concatenate([_score_part(observed, unexplained, part) for part in parts]) if parts else np.zeros(0)


def _score_part(observed: Observations, unexplained: Floats, inside: Bools) -> Floats:
    scores, num_batches = np.zeros((2, len(inside)))
    for side in (inside, ~inside):
        crossed = observed.crossed(side)
        loads = observed.loads(crossed)
        full = loads >= (1 - TOLERANCE) * observations.observed_capacities(loads)[:, None]
        gained = (crossed & full[:, observed.batch]) * unexplained
        num_batches += (np.add.reduceat(gained, observed.starts, axis=1) > 0).sum(axis=1)
        scores += gained.sum(axis=1)
    return np.where(num_batches >= _MIN_BATCHES, scores, 0.0)


def score_moves(observed: Observations, unexplained: Floats, inside: Bools) -> tuple[float, Floats]:
    """Return the score of one set, and those of the sets that differ from it by one node; shape [nodes].

    A node that moves changes the loads of the edge by its own flows alone.

    Args:
        observed: The measured rates.
        unexplained: Shape [flows].
        inside: Shape [nodes]: the set.

    Cost:
        Flows, and nodes times batches.
    """
    shape = (observed.num_nodes, observed.num_batches)
    ends = [end * observed.num_batches + observed.batch for end in (observed.src, observed.dst)]
    moved_to = np.where(inside, -1.0, 1.0)[:, None]
    scores, num_batches = np.zeros((2, 1 + len(inside)))
    for sends, takes in ((inside, ~inside), (~inside, inside)):
        is_out, is_in = sends[observed.src], takes[observed.dst]
        sums = []
        for value in (observed.rates, unexplained):
            now = np.bincount(observed.batch, value * (is_out & is_in), shape[1]).astype(np.float64)
            own, others = (
                np.bincount(end, value * beside, shape[0] * shape[1]).reshape(shape)
                for end, beside in zip(ends, (is_in, is_out), strict=True)
            )
            toward = moved_to if sends is inside else -moved_to
            sums.append(np.concatenate([now[None], now + toward * (own - others)]))
        loads, missing = sums
        full = loads >= (1 - TOLERANCE) * observations.observed_capacities(loads)[:, None]
        gained = np.where(full & (missing > _NEGLIGIBLE), missing, 0.0)
        num_batches += (gained > 0).sum(axis=1)
        scores += gained.sum(axis=1)
    scores = np.where(num_batches >= _MIN_BATCHES, scores, 0.0)
    return float(scores[0]), scores[1:]


class ComputeBudget:
    """CPU time left for the current decision, and for all decisions.

    The cost of the search for switches depends on the cluster, and grows faster than the number of nodes. The search
    checks `is_spent` now and then, and stops with its current result once that is true. CPU time and not wall time: on
    a busy machine the result is as good, only later.
    """

    def __init__(self, step_s: float, total_s: float, clock: Callable[[], float] = time.thread_time) -> None:
        """Start the budget; `step_s` and `total_s` are seconds by `clock`, which is that of the calling thread."""
        self._step_s = step_s
        self._clock = clock
        self._begun_s = clock()
        self._end_s = self._begun_s + total_s
        self.was_cut_short = False
        """True once a caller has learnt that the budget is spent."""

    def begin_decision(self) -> None:
        """Start the budget of the next decision."""
        self._begun_s = self._clock()

    @property
    def is_spent(self) -> bool:
        """True once the CPU time of this decision, or of all, is spent."""
        now_s = self._clock()
        self.was_cut_short |= now_s > min(self._end_s, self._begun_s + self._step_s)
        return self.was_cut_short


_FEW_NODES = 12
"""Up to this number all edges are considered: 2^11 less those of the nodes themselves."""
_MAX_IMPROVED = 12
_MAX_MOVES = 40
_SAME_SCORE = 1e-9
"""Scores that differ by less are equal sums in another order."""
_MIN_MISSING_OF_BATCH = 0.3
"""A batch is evidence for an edge if its flows miss so much together (1 is a whole flow)."""


def candidate_edges(observed: Observations, unexplained: Floats, budget: ComputeBudget) -> Iterable[Cut]:
    """Return sets of nodes, two at least inside and outside, without node 0.

    Args:
        observed: The measured rates.
        unexplained: Shape [flows]: part of each flow that nothing explains yet.
        budget: Once it is spent, no more sets are improved.
    """
    if observed.num_nodes <= _FEW_NODES:
        return [cut for cut in range(0, 1 << observed.num_nodes, 2) if _is_between(cut, observed.num_nodes)]
    found = np.unique(
        np.concatenate([_linkage_sets(observed, unexplained), _sender_sets(observed, unexplained)]), axis=0
    )
    best = np.argsort(-score_edges(observed, unexplained, found), kind="stable")[:_MAX_IMPROVED]
    improved = {_cut_of_set(_improve_set(found[index], observed, unexplained, budget)) for index in best}
    return sorted(cut for cut in improved if _is_between(cut, observed.num_nodes))


def _is_between(cut: Cut, num_nodes: int) -> bool:
    return 2 <= cut.bit_count() <= num_nodes - 2


def _linkage_sets(observed: Observations, unexplained: Floats) -> Bools:
    """Return nodes between which little is unexplained, in sets of all sizes; shape [sets, nodes]."""
    from scipy.cluster.hierarchy import linkage

    num_nodes = observed.num_nodes
    missing, met = np.zeros((2, num_nodes, num_nodes))
    np.add.at(missing, (observed.src, observed.dst), unexplained)
    np.add.at(met, (observed.src, observed.dst), 1.0)
    apart = (missing + missing.T) / np.maximum(met + met.T, 1.0)
    distances = apart[np.triu_indices(num_nodes, 1)]
    sets = []
    for method in ("average", "complete", "single"):
        inside = list(np.eye(num_nodes, dtype=bool))
        for one, other, *_ in linkage(distances, method):
            inside.append(inside[int(one)] | inside[int(other)])
        sets += inside[num_nodes:]
    return np.array(sets)


def _sender_sets(observed: Observations, unexplained: Floats) -> Bools:
    """Return the senders of batches with much unexplained, and the senders of unexplained flows; shape [sets, nodes].

    The flows that one edge held back came from one side of it, so these sets are parts of a side, or all of it where
    the batch was an experiment on that edge.
    """
    shape = (observed.num_batches, observed.num_nodes)
    missing, sent = np.zeros(shape), np.zeros(shape)
    np.add.at(missing, (observed.batch, observed.src), unexplained)
    np.add.at(sent, (observed.batch, observed.src), 1.0)
    unexplained_batches = np.flatnonzero(missing.sum(axis=1) >= _MIN_MISSING_OF_BATCH)
    return np.concatenate([missing[unexplained_batches] > 0, sent[unexplained_batches] > 0])


def _improve_set(inside: Bools, observed: Observations, unexplained: Floats, budget: ComputeBudget) -> Bools:
    """Move single nodes in or out of the set as long as that improves its score."""
    for _ in range(_MAX_MOVES):
        if budget.is_spent:
            break
        now, scores = score_moves(observed, unexplained, inside)
        best = float(scores.max())
        if best <= now + _SAME_SCORE:
            break
        inside = inside.copy()
        inside[int((scores >= best - _SAME_SCORE).argmax())] ^= True
    return inside


def _cut_of_set(inside: Bools) -> Cut:
    """Return the side without node 0."""
    side = ~inside if inside[0] else inside
    return sum(1 << int(node) for node in np.flatnonzero(side))


CLEARLY_NOT_FULL = 0.15
"""A link that misses this fraction of its capacity is clearly not full."""
_MIN_UNEXPLAINED = 0.3
"""Unexplained flows that miss less than this in total (1 is a whole flow) are noise."""
_MIN_RIVAL_SHARE = 0.5


@dataclass(frozen=True)
class TreeFit:
    """Edges that explain the observations, each as two cuts, with the quality of the explanation."""

    num_nodes: int
    cuts: tuple[Cut, ...]
    """NICs outward, NICs inward, then the edges between switches, outward and inward in turn."""
    capacities: Floats
    """Shape [cuts]: largest load of each cut."""
    loads: Floats
    """Shape [cuts, batches]."""
    proofs: Bools
    """Shape [cuts, batches]: the cut was full and was the only bottleneck of some flow."""
    unexplained: Floats
    """Shape [flows]: part of a flow that nothing explains; 0 where something does."""

    not_searched: str | None = None
    """Sentence on unsearched parts; None if the search was complete."""

    @functools.cached_property
    def _index_of_cut(self) -> dict[Cut, int]:
        return {cut: index for index, cut in enumerate(self.cuts)}

    def capacity(self, cut: Cut) -> float:
        """Return the largest load of a cut."""
        return float(self.capacities[self._index_of_cut[cut]])

    def rate(self, cut: Cut) -> float:
        """Return the rate of a cut: the median load while it was the bottleneck, else the largest load."""
        index = self._index_of_cut[cut]
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
        """Return the number of batches in which the cut was the bottleneck; if 0, its true rate may be higher."""
        return int(self.proofs[self._index_of_cut[cut]].sum())

    def is_proved(self, cut: Cut) -> bool:
        """Return whether the cut was the bottleneck in any batch."""
        return self.num_proofs(cut) > 0


def fit_tree(
    observed: Observations, budget: ComputeBudget, refuted: Collection[Cut] = (), known: Collection[Cut] = ()
) -> TreeFit:
    """Return the NICs, and the edges between switches that the observations require.

    Args:
        observed: At least one batch.
        budget: Once it is spent, the edges are those found so far.
        refuted: Edges (the side without node 0) to leave out.
        known: Edges of an earlier fit; the result where there is no time to search again.
    """
    edges: list[Cut] = []
    while True:
        if budget.is_spent and len(edges) < len(known):
            edges = list(known)
        found = assess_edges(observed, edges)
        edge = None if budget.is_spent else _best_new_edge(observed, found, refuted, budget)
        if edge is None:
            return found
        edges.append(edge)


def are_compatible(one: Cut, other: Cut, num_nodes: int) -> bool:
    """Return whether one tree can have both edges: some side of one lies inside some side of the other."""
    sides = [(one, observations.opposite_cut(one, num_nodes)), (other, observations.opposite_cut(other, num_nodes))]
    return any(a & b == 0 for a in sides[0] for b in sides[1])


def assess_edges(observed: Observations, edges: Sequence[Cut]) -> TreeFit:
    """Return the fit with these edges (the sides without node 0) and no others.

    Cost:
        Flows times edges: every flow passes two NICs only.
    """
    num_nodes = observed.num_nodes
    outward = [1 << node for node in range(num_nodes)]
    nics = outward + [observations.opposite_cut(cut, num_nodes) for cut in outward]
    between = [cut for edge in edges for cut in (edge, observations.opposite_cut(edge, num_nodes))]
    crossed = observed.crossed(observations.inside_matrix(between, num_nodes))
    loads = np.concatenate([observed.nic_loads, observed.loads(crossed)])
    capacities = observations.observed_capacities(loads)
    full = loads / capacities[:, None]
    batch, ends = observed.batch, np.stack([observed.src, observed.dst + num_nodes])
    fullness = np.concatenate([full[ends, batch], np.where(crossed, full[2 * num_nodes :, batch], 0.0)])
    best_two = np.sort(fullness, axis=0)[-2:]
    slack = 1 - best_two[-1]
    alone = (fullness >= 1 - TOLERANCE) & (best_two[0] <= 1 - CLEARLY_NOT_FULL)
    proofs = np.zeros(loads.shape, bool)
    for direction, of_direction in zip(ends, alone, strict=False):
        proofs[direction[of_direction], batch[of_direction]] = True
    np.logical_or.at(proofs[2 * num_nodes :].T, batch, alone[2:].T)
    return TreeFit(num_nodes, (*nics, *between), capacities, loads, proofs, np.where(slack > TOLERANCE, slack, 0.0))


def rival_edges(observed: Observations, found: TreeFit, budget: ComputeBudget) -> list[Cut]:
    """Return edges that explain about as much as some edge of the fit: they may exist instead of it, or as well."""
    rivalling: dict[Cut, None] = {}
    for edge in found.edges[::2]:
        if budget.is_spent:
            break
        without = assess_edges(observed, [other for other in found.edges[::2] if other != edge])
        possible = [
            cut
            for cut in _compatible_candidates(observed, without, budget)
            if are_compatible(cut, edge, found.num_nodes)
        ]
        scores = score_edges(observed, without.unexplained, observations.inside_matrix(possible, found.num_nodes))
        good = np.flatnonzero(scores >= _MIN_RIVAL_SHARE * without.unexplained.sum())
        rivalling |= dict.fromkeys(possible[index] for index in good if possible[index] != edge)
    return list(rivalling)


def _best_new_edge(
    observed: Observations, found: TreeFit, refuted: Collection[Cut], budget: ComputeBudget
) -> Cut | None:
    """Return the edge that explains most of the unexplained flows; None if they are only noise."""
    if found.unexplained.sum() < _MIN_UNEXPLAINED:
        return None
    possible = [cut for cut in _compatible_candidates(observed, found, budget) if cut not in refuted]
    if not possible:
        return None
    scores = score_edges(observed, found.unexplained, observations.inside_matrix(possible, observed.num_nodes))
    best = int(scores.argmax())
    return possible[best] if scores[best] >= _MIN_UNEXPLAINED else None


def _compatible_candidates(observed: Observations, found: TreeFit, budget: ComputeBudget) -> list[Cut]:
    likely = candidate_edges(observed, found.unexplained, budget)
    return [
        cut
        for cut in likely
        if cut not in found.edges and all(are_compatible(cut, edge, found.num_nodes) for edge in found.edges[::2])
    ]
