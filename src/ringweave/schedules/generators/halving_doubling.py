"""Recursive halving and doubling: an allreduce of few rounds, for small messages.

Source: Rabenseifner's algorithm, as in Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
Operations in MPICH" (2005). If the group size is no power of two, the extra ranks fold in as in MPICH's own code
(pmodels/mpich:src/mpi/coll/allreduce.c): one round of whole messages. Rabenseifner exchanges halves first, which
balances the bytes and needs another round.
"""

import numpy as np
from numpy.typing import NDArray

from ringweave.schedules.compose import concatenate_rounds
from ringweave.schedules.schedule import Collective, LazyRounds, ReceiveOp, Round, Schedule


def halving_doubling(num_ranks: int) -> Schedule:
    """Allreduce in which partners exchange halves of the remaining data at halved distances, then back.

    p is the largest power of two in the group. In the first round each of p ranks sends its partner at distance p/2 the
    half of the message that the partner keeps; in the next round, at distance p/4, half of that half; until each has
    one complete chunk. Then they exchange complete chunks at distances 1, 2, .. p/2. The other N-p ranks first send the
    whole message to a partner among the p and receive the result at the end: ranks 2i send to 2i+1 for i < N-p, so that
    they are neighbours.

    Args:
        num_ranks: Size of the group, N.

    Returns:
        A schedule of p equal chunks and 2 log2 p rounds, 2 more where N is no power of two.

    Raises:
        ScheduleError: The group is empty.

    Cost:
        Each of the p ranks sends 2(p-1)/p of the message; one with a partner once more the whole, which the partner
        sends alone.
    """
    num_chunks = 1 << max(0, num_ranks.bit_length() - 1)
    num_extra = max(0, num_ranks - num_chunks)
    extra = np.arange(num_extra, dtype=np.int32) * 2
    active_ranks = np.delete(np.arange(max(0, num_ranks), dtype=np.int32), extra)  # the rank at each of p positions
    num_halvings = num_chunks.bit_length() - 1
    rounds, phases = concatenate_rounds(
        ("fold", _fold_rounds(extra, extra + 1, ReceiveOp.REDUCE, num_chunks)),
        ("halving", LazyRounds(num_halvings, lambda index: _halving_round(active_ranks, num_chunks >> (index + 1)))),
        ("doubling", LazyRounds(num_halvings, lambda index: _doubling_round(active_ranks, 1 << index))),
        ("unfold", _fold_rounds(extra + 1, extra, ReceiveOp.COPY, num_chunks)),
    )
    return Schedule("halving-doubling", Collective("allreduce"), num_ranks, (1,) * num_chunks, rounds, phases)


def _halving_round(active_ranks: NDArray[np.int32], distance: int) -> Round:
    """Return the round in which ranks send the partner's half of their 2 x `distance` remaining chunks."""
    positions = np.arange(len(active_ranks))
    partner = positions ^ distance
    return Round.of(active_ranks, active_ranks[partner], partner & -distance, ReceiveOp.REDUCE, distance)


def _doubling_round(active_ranks: NDArray[np.int32], distance: int) -> Round:
    """Return the round in which each rank sends its `distance` complete chunks to its partner."""
    positions = np.arange(len(active_ranks))
    return Round.of(active_ranks, active_ranks[positions ^ distance], positions & -distance, ReceiveOp.COPY, distance)


def _fold_rounds(src: NDArray[np.int32], dst: NDArray[np.int32], how: ReceiveOp, num_chunks: int) -> LazyRounds:
    return LazyRounds(min(1, len(src)), lambda _: Round.of(src, dst, 0, how, num_chunks))
