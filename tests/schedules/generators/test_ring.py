from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringweave import schedules
from ringweave.errors import ScheduleError
from ringweave.schedules import ReceiveOp
from ringweave.schedules.generators.ring import ring
from tests.schedules.generated import moved

GOLDEN = Path(__file__).parent / "golden"


def test_the_first_sends_of_five(check_golden) -> None:
    """The table of the published description, made from the schedule."""
    first = list(ring(5).rounds[0].rows())
    sent = {src: f"chunk {chunk}" for src, _, chunk, _, _ in first}
    received = {dst: f"chunk {chunk}" for _, dst, chunk, _, _ in first}
    rows = [f"| {worker} | {sent[worker]} | {received[worker]} |" for worker in range(5)]
    table = "\n".join(["| worker | sends | receives |", "|---|---|---|", *rows])
    check_golden(GOLDEN / "ring-5-first-sends.txt", table + "\n")


@given(st.permutations(range(7)))
def test_each_rank_sends_to_its_right_what_arrived_the_round_before(order: list[int]) -> None:
    right = dict(zip(order, order[1:] + order[:1], strict=True))
    arrived: dict[int, int] = {}
    for index, round_ in enumerate(ring(7, order).rounds):
        rows = list(round_.rows())
        assert sorted(src for src, *_ in rows) == list(range(7))
        for src, dst, chunk, count, how in rows:
            assert dst == right[src]
            assert count == 1
            assert how == (ReceiveOp.REDUCE if index < 6 else ReceiveOp.COPY)
            assert chunk == arrived.get(src, order.index(src))
        arrived = {dst: chunk for _, dst, chunk, _, _ in rows}


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 64])
def test_rounds_and_chunks(num_ranks: int) -> None:
    schedule = ring(num_ranks)
    assert len(schedule.rounds) == 2 * (num_ranks - 1)
    assert schedule.shares == (1,) * num_ranks
    assert schedule.name == "ring"


@pytest.mark.parametrize(
    ("order", "shown"),
    [([0, 1], "[0, 1]"), ([0, 1, 1], "[0, 1, 1]"), ([1, 2, 3], "[1, 2, 3]"), ([0, -1, 2], "[0, -1, 2]"), ([], "[]")],
)
def test_an_order_that_is_none(order: list[int], shown: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        ring(3, order)
    assert str(caught.value) == (
        f"ring order: {shown}, expected every rank from 0 to 2 once. List the ranks in the order of the ring."
    )


@pytest.mark.parametrize("num_ranks", [0, -1])
def test_a_ring_of_nobody(num_ranks: int) -> None:
    with pytest.raises(ScheduleError, match=f"num_ranks: {num_ranks}, expected at least 1"):
        ring(num_ranks)


def test_rounds_are_made_when_asked_for_and_indexed_like_a_sequence() -> None:
    rounds = ring(4).rounds
    assert [list(r.rows()) for r in rounds[-2:]] == [list(rounds[4].rows()), list(rounds[5].rows())]
    assert list(rounds[-1].rows()) == list(rounds[5].rows())
    for outside in (6, -7):
        with pytest.raises(IndexError, match=f"round {outside} of 6"):
            rounds[outside]
    assert np.shares_memory(rounds[0].src, rounds[1].src)


@given(st.permutations(range(6)), st.integers(-3, 8))
def test_the_halves_begin_where_they_are_told(order: list[int], first: int) -> None:
    scatter, gather = schedules.ring_reduce_scatter(6, order, first), schedules.ring_allgather(6, order, first)
    for half in (scatter, gather):
        schedules.verify(half)
        assert {src: chunk for src, _, chunk, _, _ in half.rounds[0].rows()} == {
            rank: (place + first) % 6 for place, rank in enumerate(order)
        }
    owners = {rank: (place + first) % 6 for place, rank in enumerate(order)}
    assert gather.collective.owners == tuple(sorted(owners, key=owners.__getitem__))
    owners = {rank: (place + first + 1) % 6 for place, rank in enumerate(order)}
    assert scatter.collective.owners == tuple(sorted(owners, key=owners.__getitem__))


def test_minus_one_gives_every_place_its_own_chunk() -> None:
    assert schedules.ring_reduce_scatter(4, first=-1).collective.owners == (0, 1, 2, 3)
    assert schedules.ring_allgather(4, first=0).collective.owners == (0, 1, 2, 3)


@pytest.mark.parametrize("num_ranks", [1, 2, 5, 8])
def test_every_rank_moves_2_n_minus_1_over_n(num_ranks: int) -> None:
    volume = [Fraction(2 * (num_ranks - 1), num_ranks)] * num_ranks
    assert moved(ring(num_ranks)) == (volume, volume)
