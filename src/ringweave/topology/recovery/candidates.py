"""Edges between switches that are worth considering: all of them among a few nodes, likely ones among many."""

from collections.abc import Iterable

import numpy as np

from ringweave.topology.recovery.evidence import Bools, Cut, Evidence, Floats
from ringweave.topology.recovery.scoring import score, score_moves
from ringweave.topology.recovery.thinking import Thinking

_FEW_NODES = 12
"""Up to here all edges are considered: 2^11 less those of the nodes themselves."""
_MAX_CLIMBED = 12
_MAX_MOVES = 40
_ALIKE = 1e-9
"""Scores that differ by less are the same sum in another order."""
_LEAST_MISSING = 0.3
"""A batch says something of an edge if flows of it miss so much together (1 is a whole flow)."""


def candidates(evidence: Evidence, unexplained: Floats, thinking: Thinking) -> Iterable[Cut]:
    """Sets of nodes, two at least inside and outside, without node 0.

    Args:
        evidence: What was measured.
        unexplained: Shape [flows]: what part of each flow nothing explains yet.
        thinking: Where it is over, fewer sets are improved.
    """
    if evidence.num_nodes <= _FEW_NODES:
        return [cut for cut in range(0, 1 << evidence.num_nodes, 2) if _is_between(cut, evidence.num_nodes)]
    found = np.unique(np.concatenate([_clusters(evidence, unexplained), _senders(evidence, unexplained)]), axis=0)
    best = np.argsort(-score(evidence, unexplained, found), kind="stable")[:_MAX_CLIMBED]
    climbed = {_cut(_climb(found[index], evidence, unexplained, thinking)) for index in best}
    return sorted(cut for cut in climbed if _is_between(cut, evidence.num_nodes))


def _is_between(cut: Cut, num_nodes: int) -> bool:
    return 2 <= cut.bit_count() <= num_nodes - 2


def _clusters(evidence: Evidence, unexplained: Floats) -> Bools:
    """Nodes between which little is unexplained, in sets of all sizes; shape [sets, nodes]."""
    from scipy.cluster.hierarchy import linkage

    num_nodes = evidence.num_nodes
    missing, met = np.zeros((2, num_nodes, num_nodes))
    np.add.at(missing, (evidence.src, evidence.dst), unexplained)
    np.add.at(met, (evidence.src, evidence.dst), 1.0)
    apart = (missing + missing.T) / np.maximum(met + met.T, 1.0)
    distances = apart[np.triu_indices(num_nodes, 1)]
    sets = []
    for method in ("average", "complete", "single"):
        inside = list(np.eye(num_nodes, dtype=bool))
        for one, other, *_ in linkage(distances, method):
            inside.append(inside[int(one)] | inside[int(other)])
        sets += inside[num_nodes:]
    return np.array(sets)


def _senders(evidence: Evidence, unexplained: Floats) -> Bools:
    """Who sent in each batch that leaves much unexplained, and who sent what is unexplained; shape [sets, nodes].

    What one edge held back came from one side of it, so these are parts of a side, or all of it where the batch was a
    trial of that edge.
    """
    shape = (evidence.num_batches, evidence.num_nodes)
    missing, sent = np.zeros(shape), np.zeros(shape)
    np.add.at(missing, (evidence.batch, evidence.src), unexplained)
    np.add.at(sent, (evidence.batch, evidence.src), 1.0)
    much = np.flatnonzero(missing.sum(axis=1) >= _LEAST_MISSING)
    return np.concatenate([missing[much] > 0, sent[much] > 0])


def _climb(inside: Bools, evidence: Evidence, unexplained: Floats, thinking: Thinking) -> Bools:
    """The set with single nodes moved in or out for as long as that makes it better."""
    for _ in range(_MAX_MOVES):
        if thinking.is_over:
            break
        now, scores = score_moves(evidence, unexplained, inside)
        best = float(scores.max())
        if best <= now + _ALIKE:
            break
        inside = inside.copy()
        inside[int((scores >= best - _ALIKE).argmax())] ^= True
    return inside


def _cut(inside: Bools) -> Cut:
    """The side without node 0."""
    side = ~inside if inside[0] else inside
    return sum(1 << int(node) for node in np.flatnonzero(side))
