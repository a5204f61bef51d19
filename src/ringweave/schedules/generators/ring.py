"""Ring allreduce: reduce-scatter, then allgather; each rank sends only to its right neighbour.

Source: Baidu Research's ring allreduce for deep learning (2017), after Patarasuk and Yuan, "Bandwidth optimal
all-reduce algorithms for clusters of workstations" (2009).
"""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ringweave.errors import ScheduleError
from ringweave.schedules.compose import compose_allreduce
from ringweave.schedules.schedule import Collective, CollectiveKind, LazyRounds, ReceiveOp, Round, Schedule


def ring(num_ranks: int, order: Sequence[int] | None = None) -> Schedule:
    """Allreduce along a ring: the rank at place n of the ring first sends chunk n to the right.

    Args:
        num_ranks: Size of the group, N; one rank needs no round.
        order: The ring as ranks from place 0 to place N-1; None is the order of the ranks.

    Returns:
        A schedule of N equal chunks and 2(N-1) rounds. After the first N-1 rounds place n holds the complete sum of
        chunk (n+1) mod N; in the others complete chunks travel on in the same direction and overwrite.

    Raises:
        ScheduleError: `order` does not name every rank once.

    Cost:
        Every rank sends 2(N-1)/N of the message in 2(N-1) rounds.
    """
    return compose_allreduce("ring", ring_reduce_scatter(num_ranks, order), ring_allgather(num_ranks, order))


def ring_reduce_scatter(num_ranks: int, order: Sequence[int] | None = None, first: int = 0) -> Schedule:
    """The first half of a ring: place n of the ring first sends chunk n + `first`, then its last partial sum.

    Args:
        num_ranks: Size of the group, N.
        order: The ring as ranks; None is the order of the ranks.
        first: The chunk that place 0 sends first; with -1 place n comes to own chunk n.

    Returns:
        A reduce-scatter of N equal chunks and N-1 rounds, after which place n owns chunk (n + `first` + 1) mod N.

    Raises:
        ScheduleError: `order` does not name every rank once.
    """
    return _ring_half("reduce-scatter", num_ranks, order, first, owned=first + 1)


def ring_allgather(num_ranks: int, order: Sequence[int] | None = None, first: int = 1) -> Schedule:
    """The second half of a ring: place n first sends its own chunk n + `first`, then the last one received.

    Args:
        num_ranks: Size of the group, N.
        order: The ring as ranks; None is the order of the ranks.
        first: The chunk that place 0 owns; with 1 it goes on where `ring_reduce_scatter` ends.

    Returns:
        An allgather of N equal chunks and N-1 rounds.

    Raises:
        ScheduleError: `order` does not name every rank once.
    """
    return _ring_half("allgather", num_ranks, order, first, owned=first)


def ring_block_allgather(
    num_ranks: int, order: Sequence[int] | None = None, block_shares: Sequence[int] | None = None
) -> Schedule:
    """Allgather along a ring, with one chunk per rank, in the order of the ranks: chunk r is the block of rank r.

    Args:
        num_ranks: Size of the group, N.
        order: The ring as ranks; None is the order of the ranks.
        block_shares: Relative size of each rank's block; None is the same for all.

    Returns:
        A schedule of N-1 rounds: each rank first sends its own block to the right, then the last one received.

    Raises:
        ScheduleError: `order` does not name every rank once, or there is not one share per rank.
    """
    at_place = checked_rank_order("ring order", num_ranks, order)
    right, one_block = np.roll(at_place, -1), np.ones_like(at_place)
    how = np.full_like(at_place, ReceiveOp.COPY, np.uint8)

    def make(index: int) -> Round:
        return Round(at_place, right, np.roll(at_place, index), one_block, how)

    owners, shares = tuple(range(num_ranks)), tuple(block_shares or (1,) * num_ranks)
    return Schedule(
        "ring allgather", Collective("allgather", owners), num_ranks, shares, LazyRounds(num_ranks - 1, make)
    )


def _ring_half(
    kind: CollectiveKind, num_ranks: int, order: Sequence[int] | None, first: int, *, owned: int
) -> Schedule:
    """Return half of a ring: in round i place n sends chunk n + `first` - i.

    Place n owns chunk n + `owned`, before an allgather or after a reduce-scatter.
    """
    at_place = checked_rank_order("ring order", num_ranks, order)
    right, one_chunk = np.roll(at_place, -1), np.ones_like(at_place)
    how = np.full_like(at_place, ReceiveOp.REDUCE if kind == "reduce-scatter" else ReceiveOp.COPY, np.uint8)
    twice_round = np.tile(np.arange(num_ranks, dtype=np.int32), 2)  # a slice of it is the chunks of all places

    def make(index: int) -> Round:
        chunk_of_place_0 = (first - index) % num_ranks
        return Round(at_place, right, twice_round[chunk_of_place_0 : chunk_of_place_0 + num_ranks], one_chunk, how)

    owners = tuple(np.roll(at_place, owned).tolist())
    return Schedule(
        f"ring {kind}", Collective(kind, owners), num_ranks, (1,) * num_ranks, LazyRounds(num_ranks - 1, make)
    )


def checked_rank_order(what: str, num_ranks: int, order: Sequence[int] | None) -> np.ndarray:
    """Return `order` as a column, or by default the order of the ranks.

    Raises:
        ScheduleError: It does not name every rank once.
    """
    ranks = Round.of(range(num_ranks) if order is None else order, 0, 0, ReceiveOp.COPY).src
    if not np.array_equal(np.sort(ranks), np.arange(num_ranks)):
        raise ScheduleError(
            what,
            got=ranks.tolist(),
            expected=f"every rank from 0 to {num_ranks - 1} once",
            do=f"List the ranks in the order of the {what.split(maxsplit=1)[0]}",
        )
    return ranks


RingHalf = Literal["reduce-scatter", "allgather"]


def ring_rounds(
    rings: Sequence[Sequence[int]], borders: Sequence[NDArray[np.int32]], half: RingHalf | None = None
) -> Sequence[Round]:
    """Return the rounds of parallel ring allreduces, each over a part of the message with its own borders.

    The rank at place p of a ring of n first sends piece p to the right, then its last partial sum; after n-1 rounds it
    holds piece (p+1) mod n complete, and the pieces travel on in the same direction and overwrite. A smaller ring ends
    earlier. Several rings may share a rank or a piece, but not both.

    Args:
        rings: The ranks of each ring in order; a ring of one does nothing.
        borders: For each ring of n ranks n + 1 chunks: the first chunk of each piece, and the end of the last one.
        half: The first or the second half alone; None is both.
    """
    sizes = np.array([len(ring) for ring in rings], np.int32)
    first_turns = sizes - 1 if half == "allgather" else 0 * sizes
    num_turns = sizes - 1 if half else 2 * (sizes - 1)
    size, base = np.repeat(sizes, sizes), np.repeat(np.cumsum(sizes, dtype=np.int32) - sizes, sizes)
    at = np.arange(len(size), dtype=np.int32)
    src = np.concatenate([np.asarray(ring, np.int32) for ring in rings])
    right = src[base + (at - base + 1) % size]
    begins = np.concatenate([border[:-1] for border in borders])
    widths = np.concatenate([np.diff(border) for border in borders])

    def make(index: int) -> Round:
        turns = first_turns + np.int32(index)  # of each ring, as all that is divided or compared below
        piece = at - np.repeat(turns % sizes, sizes)
        piece += np.where(piece < base, size, 0)
        how = np.where(turns < sizes - 1, np.uint8(ReceiveOp.REDUCE), np.uint8(ReceiveOp.COPY))
        ops = Round(src, right, begins[piece], widths[piece], np.repeat(how, sizes))
        is_turning = index < num_turns
        return ops if is_turning.all() else ops.select(np.repeat(is_turning, sizes))

    return LazyRounds(int(num_turns.max()), make)


def nested_ring_rounds(
    rings: Sequence[Sequence[int]], borders: Sequence[NDArray[np.int32]], half: RingHalf | None = None
) -> list[Sequence[Round]]:
    """Return the rounds of parallel ring allreduces that are nested: rings of neighbours, then rings across these.

    A ring of n = a b ranks, a and b as equal as they can be, is b rings of a neighbours; their sums of a-th parts are
    added up round a rings of b. Each rank sends as much as round one ring, in 2(a-1) + 2(b-1) messages instead of
    2(n-1). `holder_of_piece` tells which place holds a piece complete in the middle.

    Args:
        rings: As for `ring_rounds`.
        borders: As for `ring_rounds`.
        half: As for `ring_rounds`.

    Returns:
        The rounds of each part, one after the other.
    """
    inner, outer = list[Sequence[int]](), list[Sequence[int]]()
    inner_borders, outer_borders = list[NDArray[np.int32]](), list[NDArray[np.int32]]()
    for members, border in zip(rings, borders, strict=True):
        width = nested_ring_width(len(members))
        height = len(members) // width
        inner += [members[row * width : (row + 1) * width] for row in range(height)]
        inner_borders += [border[::height]] * height
        for place in range(width):
            first = (place + 1) % width * height
            outer.append(members[place::width])
            outer_borders.append(border[first : first + height + 1])
    parts = [
        ring_rounds(inner, inner_borders, "reduce-scatter"),
        ring_rounds(outer, outer_borders, "reduce-scatter"),
        ring_rounds(outer, outer_borders, "allgather"),
        ring_rounds(inner, inner_borders, "allgather"),
    ]
    return parts if half is None else parts[:2] if half == "reduce-scatter" else parts[2:]


def nested_ring_width(num_ranks: int) -> int:
    """Return the length of the rings of neighbours in a nested ring: the divisor next to the square root."""
    return next(width for width in range(math.isqrt(num_ranks - 1) + 1, num_ranks + 1) if num_ranks % width == 0)


def holder_of_piece(num_ranks: int, piece: int, *, is_nested: bool) -> int:
    """Return the place in a ring, or nested ring, that holds the piece complete after the reduce-scatter."""
    if not is_nested:
        return (piece - 1) % num_ranks
    width = nested_ring_width(num_ranks)
    height = num_ranks // width
    column, row = divmod(piece, height)
    return (row - 1) % height * width + (column - 1) % width


def chain_rounds(chains: Sequence[Sequence[int]], num_chunks: int) -> Sequence[Round]:
    """Return the rounds of broadcasts along chains: in round t the rank at place t sends all chunks to place t+1."""

    def make(index: int) -> Round:
        links = [chain[index : index + 2] for chain in chains if len(chain) > index + 1]
        src, dst = np.array(links, np.int32).T
        return Round.of(src, dst, 0, ReceiveOp.COPY, num_chunks)

    return LazyRounds(max(map(len, chains)) - 1, make)
