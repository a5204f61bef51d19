import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringweave.errors import UsageError
from ringweave.jobs import worker_options
from ringweave.jobs.worker_options import RankOrder

COUNTS = [2, 1, 3]


def test_block_goes_through_the_nodes() -> None:
    found = worker_options.assign_ranks(COUNTS, worker_options.BLOCK_ORDER)
    assert found == [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2)]


def test_round_robin_takes_a_device_of_each_node_in_turn() -> None:
    assert worker_options.assign_ranks(COUNTS, worker_options.parse_rank_order("round-robin")) == [
        (0, 0),
        (1, 0),
        (2, 0),
        (0, 1),
        (2, 1),
        (2, 2),
    ]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 99))
def test_shuffled_deals_every_device_once_and_the_same_way_again(counts: list[int], seed: int) -> None:
    order = RankOrder(kind="shuffled", seed=seed)
    dealt = worker_options.assign_ranks(counts, order)
    assert sorted(dealt) == worker_options.assign_ranks(counts, worker_options.BLOCK_ORDER)
    assert dealt == worker_options.assign_ranks(counts, worker_options.parse_rank_order(str(order)))


def test_seeds_differ() -> None:
    dealt = [worker_options.assign_ranks([8], RankOrder(kind="shuffled", seed=seed)) for seed in range(5)]
    assert len({tuple(each) for each in dealt}) > 1


@pytest.mark.parametrize("text", ["block", "round-robin", "shuffled:0", "shuffled:17"])
def test_an_order_prints_as_it_is_read(text: str) -> None:
    assert str(worker_options.parse_rank_order(text)) == text
    assert worker_options.parse_rank_order("shuffled") == RankOrder(kind="shuffled", seed=0)


@pytest.mark.parametrize("text", ["", "blok", "shuffled:", "shuffled:x", "shuffled:-1", "shuffled:²", "block:1"])
def test_what_is_no_order_is_refused(text: str) -> None:
    expected = "--order: .*, expected block, round-robin, shuffled or shuffled:SEED with a whole number. Leave it out"
    with pytest.raises(UsageError, match=expected):
        worker_options.parse_rank_order(text)
