"""Two-tier allreduce: inside each machine, then over a matrix of the machines' leaders.

Source: a patent on parameter updates for clusters of many machines with many GPUs (2021): reduce-scatter along the
rows, allreduce along the columns, allgather along the rows, broadcast inside the machines.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ringweave.errors import ScheduleError
from ringweave.schedules.compose import concatenate_rounds
from ringweave.schedules.generators import hierarchical, ring
from ringweave.schedules.schedule import Collective, Round, Schedule


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
    num_ranks = hierarchical.check_groups("leader-matrix groups", groups)
    rows = arrange_leaders([group[0] for group in groups], num_columns)
    num_rows, num_columns = len(rows), len(rows[0])
    grid = hierarchical.chunk_grid([num_rows * num_columns, *map(len, groups)])
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
