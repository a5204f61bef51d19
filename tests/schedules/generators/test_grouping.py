from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringweave import schedules
from ringweave.errors import ScheduleError
from ringweave.schedules.generators import hierarchical


@given(st.sets(st.integers(1, 60), min_size=1, max_size=5))
def test_the_message_falls_into_pieces_in_every_way(counts: set[int]) -> None:
    cut = hierarchical.chunk_grid(counts)
    total = sum(cut.shares)
    assert min(cut.shares) > 0
    assert len(cut.shares) <= sum(counts)
    offsets = np.cumsum([0, *cut.shares])
    for count in counts:
        borders = cut.borders[count].tolist()
        assert (borders[0], borders[-1], len(borders)) == (0, len(cut.shares), count + 1)
        sizes = [int(offsets[end] - offsets[begin]) for begin, end in pairwise(borders)]
        assert sum(sizes) == total
        exact = total % count == 0
        assert max(abs(size - total / count) for size in sizes) < (1e-9 if exact else 1)


def test_few_sizes_are_cut_exactly_at_the_union_of_their_borders() -> None:
    cut = hierarchical.chunk_grid([2, 3])
    assert cut.shares == (2, 1, 1, 2)
    assert {count: borders.tolist() for count, borders in cut.borders.items()} == {2: [0, 2, 4], 3: [0, 1, 3, 4]}


def test_many_sizes_are_cut_on_a_grid_that_the_largest_divides() -> None:
    cut = hierarchical.chunk_grid([7, 11, 13, 17, 19])
    assert sum(cut.shares) == 65550 == 19 * 3450
    assert len(cut.shares) == 7 + 11 + 13 + 17 + 19 - 4
    huge = hierarchical.chunk_grid([3, 100_000])
    assert sum(huge.shares) == 300_000 or sum(huge.shares) == 100_000
    assert len(huge.borders[100_000]) == 100_001


@pytest.mark.parametrize("make", [schedules.hierarchical, schedules.leader_matrix])
@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([], "no group, expected at least one rank in each. Leave empty groups out."),
        ([[0], []], "group 1 of 2 is empty, expected at least one rank in each. Leave empty groups out."),
        ([[0, 1], [1]], "[[0, 1], [1]], expected every rank from 0 to 2 in one group. List each rank once."),
        ([[1], [2]], "[[1], [2]], expected every rank from 0 to 1 in one group. List each rank once."),
    ],
)
def test_groups_that_are_none(make, groups: list[list[int]], expected: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        make(groups)
    assert str(caught.value) == f"{make.__name__.replace('_', '-')} groups: {expected}"
