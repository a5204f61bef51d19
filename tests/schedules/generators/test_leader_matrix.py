from collections import defaultdict
from fractions import Fraction
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringweave import schedules
from ringweave.errors import ScheduleError
from ringweave.schedules import ReceiveOp, Schedule, arrange_leaders, leader_matrix, ring
from ringweave.schedules.generators.ring import holder_of_piece
from tests.schedules import samples
from tests.schedules.generated import RANDOM, moved

ROUNDING = Fraction(8, 2**16)


def nodes_of_one(count: int) -> list[list[int]]:
    return [[rank] for rank in range(count)]


def in_phase(schedule: Schedule, name: str) -> list[list[tuple[int, int, int, int, ReceiveOp]]]:
    starts = [phase.first_round for phase in schedule.phases] + [len(schedule.rounds)]
    at = [phase.name for phase in schedule.phases].index(name)
    return [list(round_.rows()) for round_ in schedule.rounds[starts[at] : starts[at + 1]]]


@pytest.mark.parametrize(
    ("count", "lengths"),
    [
        (1, [1]), (2, [2]), (3, [3]), (4, [2, 2]), (5, [3, 2]), (6, [3, 3]), (7, [3, 3, 1]), (8, [4, 4]),
        (9, [3, 3, 3]), (10, [5, 5]), (11, [4, 4, 3]), (12, [4, 4, 4]), (13, [4, 4, 4, 1]), (14, [4, 4, 4, 2]),
        (15, [5, 5, 5]), (23, [5, 5, 5, 5, 3]), (64, [8] * 8),
    ],
)  # fmt: skip
def test_the_shape_that_is_taken(count: int, lengths: list[int]) -> None:
    leaders = [10 * i for i in range(count)]
    rows = arrange_leaders(leaders)
    assert [len(row) for row in rows] == lengths
    assert [leader for row in rows for leader in row] == leaders


@given(st.integers(1, 3000))
def test_no_other_shape_needs_fewer_rounds(count: int) -> None:
    def rounds(columns: int) -> int:
        return 2 * (columns - 1) + 2 * (-(-count // columns) - 1)

    rows = arrange_leaders(range(count))
    assert len(rows[0]) >= len(rows)
    assert rounds(len(rows[0])) == min(map(rounds, range(1, count + 1)))


def test_columns_can_be_named() -> None:
    assert arrange_leaders([4, 1, 0, 2, 3], 2) == ((4, 1), (0, 2), (3,))
    assert leader_matrix(nodes_of_one(6), 6) == leader_matrix([[i] for i in range(6)], num_columns=6)


@pytest.mark.parametrize("columns", [0, -1, 5])
def test_columns_that_cannot_be(columns: int) -> None:
    with pytest.raises(ScheduleError) as caught:
        arrange_leaders(range(4), columns)
    assert str(caught.value) == (
        f"columns of the matrix: {columns}, expected 1 to 4, the number of leaders. Change it."
    )


def test_a_row_or_a_column_alone_is_a_ring() -> None:
    assert leader_matrix(nodes_of_one(5), 5) == ring(5)
    assert leader_matrix(nodes_of_one(5), 1) == ring(5)
    assert leader_matrix([[1, 0, 2]]) == ring(3, [1, 0, 2])


@pytest.mark.parametrize(("num_rows", "n"), [(2, 3), (3, 3), (3, 4), (1, 4), (4, 5)])
def test_the_order_of_the_published_description(num_rows: int, n: int) -> None:
    """Subset j is num_rows neighbouring chunks; rank i*n + j is the leader in row i and column j."""
    schedule = leader_matrix(nodes_of_one(num_rows * n), n)
    downstream = {i * n + j: i * n + (j + 1) % n for i in range(num_rows) for j in range(n)}
    sends_next = {rank: rank % n for rank in downstream}  # first the subset of its own column
    for name, how in (("reduce-scatter along rows", ReceiveOp.REDUCE), ("allgather along rows", ReceiveOp.COPY)):
        rounds = in_phase(schedule, name)
        assert len(rounds) == n - 1
        for rows in rounds:
            expected = {
                (rank, downstream[rank], subset * num_rows, num_rows, how) for rank, subset in sends_next.items()
            }
            assert set(rows) == expected
            sends_next = {downstream[rank]: subset for rank, subset in sends_next.items()}
        if how == ReceiveOp.REDUCE:
            assert sends_next == {rank: (rank + 1) % n for rank in downstream}
    if num_rows > 1:
        for rows in in_phase(schedule, "allreduce along columns"):
            assert all(src % n == dst % n and first // num_rows == (src + 1) % n for src, dst, first, _, _ in rows)


@pytest.mark.slow
@given(st.integers(1, 30), RANDOM)
def test_every_subset_is_reduced_by_one_leader_of_every_row(count: int, random: Random) -> None:
    rows = arrange_leaders(range(count), random.randint(1, count))
    schedule, num_rows = leader_matrix(nodes_of_one(count), len(rows[0])), len(rows)
    if num_rows == 1:
        return
    meeting = defaultdict(set)
    for ops in in_phase(schedule, "allreduce along columns"):
        for src, dst, first, count_, _ in ops:
            assert count_ == 1
            meeting[first // num_rows] |= {src, dst}
    assert len(meeting) == len(rows[0])
    for leaders in meeting.values():
        assert sorted(leader // len(rows[0]) for leader in leaders) == list(range(num_rows))


def stand_ins(length: int, n: int) -> list[int]:
    """Columns that each leader of a row of that length stands in for."""
    firsts = [j * n // length for j in range(length + 1)]
    return [end - begin for begin, end in pairwise(firsts)]


@pytest.mark.slow
@given(st.integers(1, 30), RANDOM)
def test_bytes_of_leaders_of_full_and_ragged_rows(count: int, random: Random) -> None:
    rows = arrange_leaders(range(count), random.choice([None, random.randint(1, count)]))
    n, num_rows = len(rows[0]), len(rows)
    sent, _ = moved(leader_matrix(nodes_of_one(count), n))
    for row in rows:
        carried = stand_ins(len(row), n)
        for j, leader in enumerate(row):
            right, next_one = carried[(j + 1) % len(row)], carried[(j + 2) % len(row)]
            along_rows = 2 - Fraction(right + next_one, n) if len(row) > 1 else 0
            along_columns = 2 * Fraction(num_rows - 1, num_rows) * Fraction(right, n)
            assert sent[leader] == along_rows + along_columns
            assert sent[leader] <= 2 + Fraction(1, n)
            if len(row) == n:
                assert sent[leader] == 2 - Fraction(2, n * num_rows)


@pytest.mark.slow
@given(st.integers(1, 30), RANDOM)
def test_inside_groups_as_in_the_hierarchical_allreduce(num_ranks: int, random: Random) -> None:
    groups = samples.random_groups(num_ranks, random)
    schedule = leader_matrix(groups)
    sent, _ = moved(schedule)
    for group in groups:
        for place, rank in enumerate(group[1:], start=1):
            onwards = 1 if len(groups) > 1 and place < len(group) - 1 else 0
            assert abs(sent[rank] - 2 + Fraction(2, len(group)) - onwards) <= ROUNDING


@given(st.integers(1, 30), RANDOM)
def test_rounds(num_ranks: int, random: Random) -> None:
    groups = samples.random_groups(num_ranks, random)
    rows = arrange_leaders([group[0] for group in groups])
    largest = max(map(len, groups))
    expected = 2 * (largest - 1) + 2 * (len(rows[0]) - 1) + 2 * (len(rows) - 1)
    assert len(leader_matrix(groups).rounds) == expected + (largest - 1 if len(groups) > 1 else 0)


def test_one_leader_per_nic() -> None:
    """Two nodes of four ranks with two NICs each are four groups; rows inside a node, columns across nodes."""
    schedule = leader_matrix([[0, 1], [2, 3], [4, 5], [6, 7]])
    schedules.verify(schedule)
    assert arrange_leaders([0, 2, 4, 6]) == ((0, 2), (4, 6))
    for rows in in_phase(schedule, "allreduce along columns"):
        assert {frozenset((src, dst)) for src, dst, *_ in rows} == {frozenset((0, 4)), frozenset((2, 6))}


@pytest.mark.parametrize(("num_leaders", "num_columns", "num_rounds"), [(100, 10, 20), (36, 6, 12), (49, 7, 24)])
def test_nested_rings_send_as_many_bytes_in_fewer_rounds(num_leaders: int, num_columns: int, num_rounds: int) -> None:
    """10 is 5 x 2 and 6 is 3 x 2; 7 has no divisors, so that nothing is nested."""
    groups = [[rank] for rank in range(num_leaders)]
    nested = schedules.leader_matrix(groups, num_columns, nests_rings=True)
    plain = schedules.leader_matrix(groups, num_columns)
    schedules.verify(nested)
    assert len(nested.rounds) == num_rounds <= len(plain.rounds)
    assert moved(nested) == moved(plain)


@pytest.mark.parametrize(("num_leaders", "num_columns"), [(50, 12), (30, 7), (90, 16)])
def test_rings_of_a_ragged_matrix_can_be_nested(num_leaders: int, num_columns: int) -> None:
    schedules.verify(schedules.leader_matrix([[rank] for rank in range(num_leaders)], num_columns, nests_rings=True))


def test_pieces_of_nested_rings_have_holders() -> None:
    for num_ranks in range(1, 40):
        for is_nested in (False, True):
            held = [holder_of_piece(num_ranks, piece, is_nested=is_nested) for piece in range(num_ranks)]
            assert sorted(held) == list(range(num_ranks))
