import pytest

from ringweave import schedules
from ringweave.errors import ScheduleError
from ringweave.schedules import binomial_broadcast, binomial_reduce, chain_broadcast, chain_reduce
from tests.schedules.generated import moved


def hops(schedule) -> list[list[tuple[int, int]]]:
    return [[(src, dst) for src, dst, *_ in round_.rows()] for round_ in schedule.rounds]


def test_a_chain_begins_at_the_root_and_goes_round() -> None:
    assert hops(chain_broadcast(4, 2)) == [[(2, 3)], [(3, 0)], [(0, 1)]]
    assert hops(chain_broadcast(4, 2, [3, 2, 0, 1])) == [[(2, 0)], [(0, 1)], [(1, 3)]]
    assert hops(chain_reduce(4, 2)) == [[(1, 0)], [(0, 3)], [(3, 2)]]


def test_a_tree_doubles_those_who_have_it() -> None:
    assert hops(binomial_broadcast(6, 4)) == [[(4, 5)], [(4, 0), (5, 1)], [(4, 2), (5, 3)]]
    assert hops(binomial_reduce(6, 4)) == [[(2, 4), (3, 5)], [(0, 4), (1, 5)], [(5, 4)]]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8, 9])
def test_rounds_and_bytes(num_ranks: int) -> None:
    assert len(chain_broadcast(num_ranks).rounds) == len(chain_reduce(num_ranks).rounds) == num_ranks - 1
    num_doublings = (num_ranks - 1).bit_length()
    assert len(binomial_broadcast(num_ranks).rounds) == len(binomial_reduce(num_ranks).rounds) == num_doublings
    assert moved(chain_broadcast(num_ranks)) == ([1] * (num_ranks - 1) + [0], [0] + [1] * (num_ranks - 1))
    assert moved(binomial_broadcast(num_ranks))[0][0] == num_doublings
    assert moved(binomial_reduce(num_ranks))[1][0] == num_doublings


def test_reduce_then_broadcast_is_an_allreduce() -> None:
    for first, second in ((chain_reduce, chain_broadcast), (binomial_reduce, binomial_broadcast)):
        schedules.verify(schedules.compose_allreduce("there and back", first(7, 3), second(7, 3)))


@pytest.mark.parametrize("make", [chain_broadcast, chain_reduce, binomial_broadcast, binomial_reduce])
@pytest.mark.parametrize("root", [-1, 3])
def test_a_root_that_is_not_there(make, root: int) -> None:
    with pytest.raises(ScheduleError) as caught:
        make(3, root)
    assert str(caught.value) == f"root: {root}, expected ranks 0..2. Name a rank of the group."


@pytest.mark.parametrize("make", [chain_broadcast, chain_reduce])
def test_an_order_that_is_none(make) -> None:
    with pytest.raises(ScheduleError) as caught:
        make(3, 0, [0, 1, 1])
    assert str(caught.value) == (
        "chain order: [0, 1, 1], expected every rank from 0 to 2 once. List the ranks in the order of the chain."
    )


@pytest.mark.parametrize("make", [chain_broadcast, chain_reduce, binomial_broadcast, binomial_reduce])
def test_a_group_of_nobody(make) -> None:
    with pytest.raises(ScheduleError, match=r"^num_ranks: 0, expected at least 1\. Name the ranks\.$"):
        make(0)
