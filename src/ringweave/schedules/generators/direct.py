"""Direct reduce-scatter and allgather with unequal shares: each chunk goes straight to its owner.

Unequal shares reach the bound of a group with unequal NICs, max(1/B_min, 2(N-1)/sum B) seconds per byte: a slow rank
owns little or nothing, so it sends the message once and receives it once. It sends only in the first phase and receives
only in the second, so the phases must overlap: run the schedule in several segments.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ringweave.errors import ScheduleError
from ringweave.schedules.compose import compose_allreduce, mirror
from ringweave.schedules.schedule import Collective, LazyRounds, ReceiveOp, Round, Schedule


def direct(num_ranks: int, shares: Sequence[int] | None = None) -> Schedule:
    """Allreduce in which each rank reduces its own share of the message and sends it to all.

    Args:
        num_ranks: Size of the group, N; one rank needs no round.
        shares: Relative share of each rank, as whole numbers; None is the same for all. A rank with share 0 owns no
            chunk: the chunks are those of the owners, in the order of their ranks.

    Returns:
        A schedule of one chunk per owner and 2(N-1) rounds. In round t = 1..N-1 rank i sends the chunk of rank
        (i+t) mod N to that rank; after that, owner i sends its chunk to rank (i+t) mod N.

    Raises:
        ScheduleError: Shares that are not one whole number per rank, none negative and not all 0.

    Cost:
        Rank i with the fraction x_i of the shares sends and receives 1 + (N-2) x_i of the message.
    """
    return compose_allreduce("direct", direct_reduce_scatter(num_ranks, shares), direct_allgather(num_ranks, shares))


def direct_reduce_scatter(num_ranks: int, shares: Sequence[int] | None = None) -> Schedule:
    """The first half of `direct`: rank i sends 1 - x_i of the message and receives (N-1) x_i, in N-1 rounds."""
    return mirror(direct_allgather(num_ranks, shares))


def direct_allgather(num_ranks: int, shares: Sequence[int] | None = None) -> Schedule:
    """The second half of `direct`: rank i sends (N-1) x_i of the message and receives 1 - x_i, in N-1 rounds."""
    owners, kept = _owners_and_shares(num_ranks, shares)
    chunks, ones = np.arange(len(owners), dtype=np.int32), np.ones_like(owners)
    how = np.full_like(owners, ReceiveOp.COPY, np.uint8)

    def make(index: int) -> Round:
        return Round(owners, (owners + np.int32(index + 1)) % num_ranks, chunks, ones, how)

    collective = Collective("allgather", tuple(owners.tolist()))
    return Schedule("direct allgather", collective, num_ranks, kept, LazyRounds(num_ranks - 1, make))


def direct_broadcast(num_ranks: int, root: int = 0) -> Schedule:
    """Broadcast in which the root sends the whole message to each other rank, those after it first.

    Returns:
        A schedule of one chunk and N-1 rounds of one operation, none of which waits for another.

    Raises:
        ScheduleError: The root is no rank of the group.

    Cost:
        The root sends the message N-1 times: for ranks of one node, which read it from the same memory, and for small
        messages.
    """
    root_column = np.array([root], np.int32)

    def make(index: int) -> Round:
        return Round.of(root_column, (root_column + np.int32(index + 1)) % num_ranks, 0, ReceiveOp.COPY)

    collective = Collective("broadcast", root=root)
    return Schedule("direct broadcast", collective, num_ranks, (1,), LazyRounds(max(0, num_ranks - 1), make))


def _owners_and_shares(num_ranks: int, shares: Sequence[int] | None) -> tuple[NDArray[np.int32], tuple[int, ...]]:
    """Return the ranks that own a chunk, and the chunks' shares."""
    shares = (1,) * num_ranks if shares is None else tuple(shares)
    if len(shares) != max(0, num_ranks):
        raise ScheduleError(
            "shares",
            got=shares,
            expected=f"one whole number for each of {num_ranks} ranks",
            do="Give a rank that shall own nothing the share 0",
        )
    owners = [rank for rank, share in enumerate(shares) if share]
    if not owners:
        owners = list(range(num_ranks))  # nothing to share: for Schedule to refuse
    return np.array(owners, np.int32), tuple(shares[rank] for rank in owners)
