"""How well an edge between switches would explain what nothing explains yet.

An edge explains the flows that pass it in batches in which it is full. So it is worth what it explains of them, summed
over both directions; what happened in one batch only counts nothing.
"""

import numpy as np

from ringweave.topology.recovery import evidence as seen
from ringweave.topology.recovery.evidence import TOLERANCE, Bools, Evidence, Floats

_LEAST_BATCHES = 2
_MOST_CELLS = 1 << 22
"""Sets times flows that are looked at together: 32 MB of each number."""
_NOTHING = 1e-6
"""Less than that of a flow is what sums leave over; flows that are not explained miss a tenth at least."""


def score(evidence: Evidence, unexplained: Floats, inside: Bools) -> Floats:
    """Shape [edges]: how much each explains of what is not explained yet.

    Args:
        evidence: What was measured.
        unexplained: Shape [flows]: what part of each flow nothing explains yet.
        inside: Shape [edges, nodes]: one side of each.

    Cost:
        Edges times flows.
    """
    height = max(1, _MOST_CELLS // len(evidence.src))
    parts = [inside[start : start + height] for start in range(0, len(inside), height)]
    return np.concatenate([_of_some(evidence, unexplained, part) for part in parts]) if parts else np.zeros(0)


def _of_some(evidence: Evidence, unexplained: Floats, inside: Bools) -> Floats:
    scores, num_batches = np.zeros((2, len(inside)))
    for side in (inside, ~inside):
        crossed = evidence.crossed(side)
        loads = evidence.loads(crossed)
        full = loads >= (1 - TOLERANCE) * seen.capacities(loads)[:, None]
        gained = (crossed & full[:, evidence.batch]) * unexplained
        num_batches += (np.add.reduceat(gained, evidence.starts, axis=1) > 0).sum(axis=1)
        scores += gained.sum(axis=1)
    return np.where(num_batches >= _LEAST_BATCHES, scores, 0.0)


def score_moves(evidence: Evidence, unexplained: Floats, inside: Bools) -> tuple[float, Floats]:
    """The score of one set, and those of the sets that differ from it by one node; shape [nodes].

    A node that moves changes the loads of the edge by its own flows alone.

    Args:
        evidence: What was measured.
        unexplained: Shape [flows].
        inside: Shape [nodes]: the set.

    Cost:
        Flows, and nodes times batches.
    """
    shape = (evidence.num_nodes, evidence.num_batches)
    ends = [end * evidence.num_batches + evidence.batch for end in (evidence.src, evidence.dst)]
    moved_to = np.where(inside, -1.0, 1.0)[:, None]
    scores, num_batches = np.zeros((2, 1 + len(inside)))
    for sends, takes in ((inside, ~inside), (~inside, inside)):
        is_out, is_in = sends[evidence.src], takes[evidence.dst]
        sums = []
        for value in (evidence.rates, unexplained):
            now = np.bincount(evidence.batch, value * (is_out & is_in), shape[1]).astype(np.float64)
            own, others = (
                np.bincount(end, value * beside, shape[0] * shape[1]).reshape(shape)
                for end, beside in zip(ends, (is_in, is_out), strict=True)
            )
            toward = moved_to if sends is inside else -moved_to
            sums.append(np.concatenate([now[None], now + toward * (own - others)]))
        loads, missing = sums
        full = loads >= (1 - TOLERANCE) * seen.capacities(loads)[:, None]
        gained = np.where(full & (missing > _NOTHING), missing, 0.0)
        num_batches += (gained > 0).sum(axis=1)
        scores += gained.sum(axis=1)
    scores = np.where(num_batches >= _LEAST_BATCHES, scores, 0.0)
    return float(scores[0]), scores[1:]
