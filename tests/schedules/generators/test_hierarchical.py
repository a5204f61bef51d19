from fractions import Fraction
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringweave import schedules
from ringweave.schedules import hierarchical, ring
from tests.schedules import samples
from tests.schedules.generated import RANDOM, moved

ROUNDING = Fraction(4, 2**16)


@pytest.mark.slow
@given(st.integers(1, 30), RANDOM)
def test_bytes_of_representatives_and_of_the_others(num_ranks: int, random: Random) -> None:
    groups = samples.random_groups(num_ranks, random)
    sent, _ = moved(hierarchical(groups))
    k = len(groups)
    for group in groups:
        n = len(group)
        for place, rank in enumerate(group):
            inside = Fraction(2 * (n - 1), n)
            among = Fraction(2 * (k - 1), k) if place == 0 else 0
            onwards = 1 if k > 1 and place < n - 1 else 0
            assert abs(sent[rank] - inside - among - onwards) <= ROUNDING


@given(st.integers(1, 30), RANDOM)
def test_rounds_are_those_of_the_largest_group(num_ranks: int, random: Random) -> None:
    groups = samples.random_groups(num_ranks, random)
    n, k = max(map(len, groups)), len(groups)
    expected = 2 * (n - 1) + 2 * (k - 1) + (n - 1 if k > 1 else 0)
    assert len(hierarchical(groups).rounds) == expected


def test_between_groups_only_representatives_talk() -> None:
    groups = [[3, 0], [1, 5, 4], [2]]
    group_of = {rank: index for index, group in enumerate(groups) for rank in group}
    for round_ in hierarchical(groups).rounds:
        for src, dst, *_ in round_.rows():
            assert group_of[src] == group_of[dst] or {src, dst} <= {3, 1, 2}


def test_one_group_and_groups_of_one_are_the_ring() -> None:
    assert hierarchical([[2, 0, 1]]) == ring(3, [2, 0, 1])
    assert hierarchical([[2], [0], [1]]) == ring(3, [2, 0, 1])


def test_phases_have_names() -> None:
    assert hierarchical([[0, 1], [2]]).phases == (
        (0, "allreduce inside groups"),
        (2, "allreduce among representatives"),
        (4, "broadcast inside groups"),
    )


@pytest.mark.parametrize("sizes", [range(1, 30), [64, 63, 61, 59]])
def test_many_sizes_at_once(sizes) -> None:
    groups, at = [], 0
    for size in sizes:
        groups.append(list(range(at, at + size)))
        at += size
    schedule = hierarchical(groups)
    assert schedule.num_chunks <= at + len(groups)
    schedules.verify(schedule)
