"""Hierarchical allreduces, and broadcast and reduce along a chain or a binomial tree.

The hierarchical allreduce runs rings inside groups, a ring of one representative per group, and a broadcast inside
groups. The leader matrix has two tiers: inside each machine, then over a matrix of the machines' leaders.

Source: the baseline of Huang and Yang, "A highly scalable distributed machine learning architecture based on Ring
All-Reduce" (2022). The leader matrix: a patent on parameter updates for clusters of many machines with many GPUs
(2021): reduce-scatter along the rows, allreduce along the columns, allgather along the rows, broadcast inside the
machines.
"""

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringweave.errors import ScheduleError
from ringweave.schedules.compose import concatenate_rounds, mirror
from ringweave.schedules.generators import ring
from ringweave.schedules.generators.ring import checked_rank_order
from ringweave.schedules.schedule import Collective, LazyRounds, ReceiveOp, Round, Schedule


def chain_broadcast(num_ranks: int, root: int = 0, order: Sequence[int] | None = None) -> Schedule:
    """Broadcast along a chain that starts at the root: each rank forwards the whole message.

    Args:
        num_ranks: Size of the group, N.
        root: The rank that has the message.
        order: The chain as a ring of ranks, started at the root; None is the order of the ranks.

    Returns:
        A schedule of one chunk and N-1 rounds of one operation; segments follow each other along the chain.

    Raises:
        ScheduleError: `order` does not name every rank once, or the root is no rank of the group.

    Cost:
        Every rank but the last sends the message once.
    """
    chain = _ranks_from_root("chain order", num_ranks, root, order)
    rounds = LazyRounds(
        num_ranks - 1, lambda index: Round.of(chain[index : index + 1], chain[index + 1], 0, ReceiveOp.COPY)
    )
    return Schedule("chain broadcast", Collective("broadcast", root=root), num_ranks, (1,), rounds)


def chain_reduce(num_ranks: int, root: int = 0, order: Sequence[int] | None = None) -> Schedule:
    """Reduce along the chain of `chain_broadcast`, reversed: each rank forwards its partial sum towards the root."""
    return mirror(chain_broadcast(num_ranks, root, order))


def binomial_broadcast(num_ranks: int, root: int = 0) -> Schedule:
    """Broadcast in ceil(log2 N) rounds: in each, every rank that has the message sends it to one that does not.

    In round t the ranks fewer than 2^t places after the root send to those 2^t further.

    Raises:
        ScheduleError: The root is no rank of the group.

    Cost:
        The root sends the message in every round.
    """
    ranks = _ranks_from_root("tree order", num_ranks, root, None)

    def make(index: int) -> Round:
        far = ranks[1 << index : 2 << index]
        return Round.of(ranks[: len(far)], far, 0, ReceiveOp.COPY)

    rounds = LazyRounds((num_ranks - 1).bit_length(), make)
    return Schedule("binomial broadcast", Collective("broadcast", root=root), num_ranks, (1,), rounds)


def binomial_reduce(num_ranks: int, root: int = 0) -> Schedule:
    """Reduce in ceil(log2 N) rounds: the tree of `binomial_broadcast`, reversed."""
    return mirror(binomial_broadcast(num_ranks, root))


def _ranks_from_root(what: str, num_ranks: int, root: int, order: Sequence[int] | None) -> NDArray[np.int32]:
    """Return the ranks in order, starting at the root."""
    ranks = checked_rank_order(what, num_ranks, order)
    if num_ranks >= 1 and not 0 <= root < num_ranks:
        expected = f"ranks 0..{num_ranks - 1}"
        raise ScheduleError("root", got=root, expected=expected, do="Name a rank of the group")
    return np.roll(ranks, -int(np.argmax(ranks == root))) if len(ranks) else ranks


_GRID_UNITS = 2**16


def check_groups(what: str, groups: Sequence[Sequence[int]]) -> int:
    """Return the number of ranks in all groups together.

    Raises:
        ScheduleError: There is no group, one is empty, or the groups do not name every rank once.
    """
    empty = [index for index, group in enumerate(groups) if not len(group)]
    if empty or not groups:
        got = f"group {empty[0]} of {len(groups)} is empty" if empty else "no group"
        raise ScheduleError(f"{what}: {got}, expected at least one rank in each. Leave empty groups out.")
    ranks = [rank for group in groups for rank in group]
    if sorted(ranks) != list(range(len(ranks))):
        expected = f"every rank from 0 to {len(ranks) - 1} in one group"
        raise ScheduleError(what, got=list(map(list, groups)), expected=expected, do="List each rank once")
    return len(ranks)


@dataclass(frozen=True, slots=True)
class ChunkGrid:
    """Chunks of a message that is cut into equal pieces in several ways at once."""

    shares: tuple[int, ...]
    """Relative size of each chunk."""
    borders: dict[int, NDArray[np.int32]]
    """For each number of pieces n: the first chunk of each piece, and the number of chunks; n + 1 numbers."""


def chunk_grid(counts: Collection[int]) -> ChunkGrid:
    """Return the coarsest grid in which the message falls into n equal pieces for each n of `counts`.

    The borders of the pieces are points of a grid: of the least common multiple of the counts, where that is at most
    2^16; else of the first multiple of the largest count from 2^16 up, to whose points the borders of the others are
    rounded down, so that pieces differ by less than their 65536th of the message. There is one chunk between any two
    neighbouring borders, so there are at most as many chunks as the different counts together.
    """
    units = math.lcm(*counts)
    if units > _GRID_UNITS:
        largest = max(counts)
        units = -(-_GRID_UNITS // largest) * largest
    points = {count: [units * piece // count for piece in range(count + 1)] for count in sorted(set(counts))}
    places = sorted({point for column in points.values() for point in column})
    shares = tuple(end - begin for begin, end in itertools.pairwise(places))
    borders = {count: np.searchsorted(places, column).astype(np.int32) for count, column in points.items()}
    return ChunkGrid(shares, borders)


def hierarchical(groups: Sequence[Sequence[int]]) -> Schedule:
    """Allreduce inside each group, among the groups' first ranks, then from these to their groups.

    The paper does not say how the broadcast works. Here it is a chain in the order of the group, in which each rank
    forwards the whole message, because segments follow each other along a chain and every link carries it once.

    Args:
        groups: The ranks of each group in the order of its ring, the representative first; sizes may differ.

    Returns:
        A schedule whose chunks lie between the borders of all cuts at once (`chunk_grid`): in n pieces for each size
        n of a group and in k pieces for k groups. With n the size of the largest group, it has 2(n-1) + 2(k-1) + (n-1)
        rounds; a single group needs no broadcast.

    Raises:
        ScheduleError: The groups do not name every rank once, or one is empty.

    Cost:
        In a group of n each rank sends 2(n-1)/n of the message, the representative 2(k-1)/k more, and all but the last
        of the chain once more the whole.
    """
    num_ranks = check_groups("hierarchical groups", groups)
    representatives = [group[0] for group in groups]
    grid = chunk_grid([len(groups), *map(len, groups)])
    rounds, phases = concatenate_rounds(
        ("allreduce inside groups", ring.ring_rounds(groups, [grid.borders[len(group)] for group in groups])),
        ("allreduce among representatives", ring.ring_rounds([representatives], [grid.borders[len(groups)]])),
        ("broadcast inside groups", ring.chain_rounds(groups, len(grid.shares)) if len(groups) > 1 else ()),
    )
    return Schedule("hierarchical", Collective("allreduce"), num_ranks, grid.shares, rounds, phases)


def leader_matrix(
    groups: Sequence[Sequence[int]], num_columns: int | None = None, *, nests_rings: bool = False
) -> Schedule:
    """Allreduce inside groups, then over the matrix of their leaders, then from these to their groups.

    The leaders, `arrange_leaders(...)`, have R rows and n columns. The message is cut into n subsets, one per column.
    1. Inside each group: allreduce round the ring of its ranks.
    2. Each row is a ring: in the first round the leader of column j sends subset j to the right, then what it merged
       last; after n-1 rounds it holds the row's subset (j+1) mod n.
    3. Each column is a ring of R leaders: allreduce of that subset, cut into R pieces.
    4. The complete subsets travel on round the rows in the same direction and overwrite.
    5. Inside each group: broadcast along the chain of its ranks (pipelines over segments).

    A ragged last row has n' < n leaders. It is a ring of n' whose leader j represents several neighbouring columns:
    it counts subsets floor(j n/n') up to floor((j+1) n/n') - 1 as one. After n'-1 rounds its leader j holds the row's
    subsets of leader (j+1) mod n', and takes part in the ring of each of these columns: so each column has R members,
    one of every row, whose sets of contributors are disjoint and together all ranks. The row needs fewer rounds than
    the others and no rank waits for it.

    Args:
        groups: The ranks of each group, the leader first; one group per NIC lets each NIC have a leader.
        num_columns: n; None takes the default of `arrange_leaders`.
        nests_rings: The rings of rows and columns are nested (`ring.nested_ring_rounds`): as many bytes, in far fewer
            messages where rows and columns are long.

    Returns:
        A schedule of 2(m-1) rounds for the largest group m, 2(n-1) + 2(R-1) for the matrix and m-1 for the broadcast;
        with nested rings 4(sqrt(n)-1) + 4(sqrt(R)-1) for the matrix if these are whole.

    Raises:
        ScheduleError: The groups do not name every rank once, one is empty, or no such number of columns.

    Cost:
        For the matrix a leader of a full row sends 2(L-1)/L of the message if L = R n. In a ragged row a leader that
        represents b columns, its right neighbour for b', sends 2 - (b' + b'')/n + 2 (R-1)/R b'/n, b'' being the
        next one's: at most 2 + 1/n; a row of one sends 2 (R-1)/R.
    """
    num_ranks = check_groups("leader-matrix groups", groups)
    rows = arrange_leaders([group[0] for group in groups], num_columns)
    num_rows, num_columns = len(rows), len(rows[0])
    grid = chunk_grid([num_rows * num_columns, *map(len, groups)])
    pieces = grid.borders[num_rows * num_columns]  # num_rows of them are a subset
    subsets = pieces[::num_rows]
    row_borders = [subsets[_first_subsets(len(row), num_columns)] for row in rows]
    columns = _column_leaders(rows, nests_rings=nests_rings)
    column_borders = [pieces[c * num_rows : (c + 1) * num_rows + 1] for c in range(num_columns)]
    rounds, phases = concatenate_rounds(
        ("allreduce inside groups", ring.ring_rounds(groups, [grid.borders[len(group)] for group in groups])),
        *_ring_parts("reduce-scatter along rows", rows, row_borders, "reduce-scatter", nests_rings=nests_rings),
        *_ring_parts("allreduce along columns", columns, column_borders, None, nests_rings=nests_rings),
        *_ring_parts("allgather along rows", rows, row_borders, "allgather", nests_rings=nests_rings),
        ("broadcast inside groups", ring.chain_rounds(groups, len(grid.shares)) if len(groups) > 1 else ()),
    )
    return Schedule("leader-matrix", Collective("allreduce"), num_ranks, grid.shares, rounds, phases)


def _ring_parts(
    name: str,
    rings: Sequence[Sequence[int]],
    borders: Sequence[NDArray[np.int32]],
    half: ring.RingHalf | None,
    *,
    nests_rings: bool,
) -> list[tuple[str, Sequence[Round]]]:
    if not nests_rings:
        return [(name, ring.ring_rounds(rings, borders, half))]
    parts = ring.nested_ring_rounds(rings, borders, half)
    return [(f"{name}, part {number}", rounds) for number, rounds in enumerate(parts, start=1)]


def arrange_leaders(leaders: Sequence[int], num_columns: int | None = None) -> tuple[tuple[int, ...], ...]:
    """Return the leaders in rows of `num_columns`, in their order; the last row may be ragged.

    Without a number of columns it is the most square factorisation, at least as wide as high, unless a ragged matrix
    of ceil(sqrt(L)) columns needs fewer rounds (as with 5, 7, 11, 13 or 14 leaders).

    Raises:
        ScheduleError: No leaders, or columns other than 1 to their number.
    """
    count = len(leaders)
    if num_columns is None and count:
        high = next(r for r in range(math.isqrt(count), 0, -1) if count % r == 0)
        square = math.isqrt(count - 1) + 1
        full = count // high
        num_columns = full if high + full <= math.ceil(count / square) + square else square
    if num_columns is None or not 1 <= num_columns <= count:
        expected = f"1 to {count}, the number of leaders"
        raise ScheduleError("columns of the matrix", got=num_columns, expected=expected, do="Change it")
    return tuple(tuple(leaders[at : at + num_columns]) for at in range(0, count, num_columns))


def _first_subsets(num_leaders: int, num_columns: int) -> np.ndarray:
    """Return the first subset of each leader of a row, and the number of subsets."""
    return np.arange(num_leaders + 1) * num_columns // num_leaders


def _column_leaders(rows: Sequence[Sequence[int]], *, nests_rings: bool) -> list[list[int]]:
    """Return, for each subset, the leaders (one of every row) that hold it after the rows are reduced."""
    num_columns = len(rows[0])
    columns: list[list[int]] = [[] for _ in range(num_columns)]
    for row in rows:
        firsts = _first_subsets(len(row), num_columns)
        for subset in range(num_columns):
            represented_by = int(np.searchsorted(firsts, subset, side="right")) - 1
            columns[subset].append(row[ring.holder_of_piece(len(row), represented_by, is_nested=nests_rings)])
    return columns
