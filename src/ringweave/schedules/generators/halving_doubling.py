"""Recursive halving and doubling: the allreduce of few rounds, for small messages.

Source: Rabenseifner's algorithm, as in Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
Operations in MPICH" (2005). The extra ranks of a group that is no power of two fold in as in MPICH's own code
(pmodels/mpich:src/mpi/coll/allreduce.c): one round of whole messages. Rabenseifner has them exchange halves first,
which balances the bytes and needs another round.
"""

import numpy as np
from numpy.typing import NDArray

from ringweave.schedules.joining import one_after_the_other
from ringweave.schedules.schedule import Collective, How, Round, Rounds, Schedule


def halving_doubling(num_ranks: int) -> Schedule:
    """Allreduce in which ranks exchange halves of what is left with partners at half the distance, then back.

    Among p ranks, p the largest power of two in the group: in the first round a rank sends its partner p/2 further the
    half of the message that the partner keeps, in the next one p/4 further half of that half, until each has one chunk
    complete; then they exchange what they have, at distances 1, 2, .. p/2. The other N-p ranks first send all to
    a partner among the p and get the result back at the end: ranks 2i send to 2i+1 for i < N-p, so that they are
    neighbours.

    Args:
        num_ranks: Size of the group, N.

    Returns:
        A schedule of p equal chunks and 2 log2 p rounds, 2 more where N is no power of two.

    Raises:
        ScheduleError: A group of nobody.

    Cost:
        Each of the p ranks sends 2(p-1)/p of the message; one with a partner once more the whole, which the partner
        sends alone.
    """
    num_chunks = 1 << max(0, num_ranks.bit_length() - 1)
    num_extra = max(0, num_ranks - num_chunks)
    extra = np.arange(num_extra, dtype=np.int32) * 2
    seated = np.delete(np.arange(max(0, num_ranks), dtype=np.int32), extra)  # the rank at each of p seats
    num_halvings = num_chunks.bit_length() - 1
    rounds, phases = one_after_the_other(
        ("fold", _fold(extra, extra + 1, How.REDUCE, num_chunks)),
        ("halving", Rounds(num_halvings, lambda index: _halve(seated, num_chunks >> (index + 1)))),
        ("doubling", Rounds(num_halvings, lambda index: _double(seated, 1 << index))),
        ("unfold", _fold(extra + 1, extra, How.COPY, num_chunks)),
    )
    return Schedule("halving-doubling", Collective("allreduce"), num_ranks, (1,) * num_chunks, rounds, phases)


def _halve(seated: NDArray[np.int32], distance: int) -> Round:
    """Of the 2 x `distance` chunks that are left to a seat, the half on its partner's side goes to the partner."""
    seats = np.arange(len(seated))
    partner = seats ^ distance
    return Round.of(seated, seated[partner], partner & -distance, How.REDUCE, distance)


def _double(seated: NDArray[np.int32], distance: int) -> Round:
    """The `distance` chunks around its own that a seat has complete go to its partner."""
    seats = np.arange(len(seated))
    return Round.of(seated, seated[seats ^ distance], seats & -distance, How.COPY, distance)


def _fold(src: NDArray[np.int32], dst: NDArray[np.int32], how: How, num_chunks: int) -> Rounds:
    return Rounds(min(1, len(src)), lambda _: Round.of(src, dst, 0, how, num_chunks))
