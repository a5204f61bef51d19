"""What each rank of a group says in a few words, heard by all."""

import pytest

from ringweave.testing.ranks import Ranks
from tests.comm import exchange_functions

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SOON_S = 250.0


@pytest.mark.parametrize(
    "nodes", [["a0"] * 10, [f"a{rank // 2}" for rank in range(10)]], ids=["one node", "five nodes"]
)
def test_every_rank_hears_what_each_says_also_through_two_levels_of_the_tree(nodes: list[str]) -> None:
    with Ranks(exchange_functions.exchange_between_sums, 10, timeout_s=200, nodes=nodes) as ranks:
        heard = ranks.values(timeout_s=SOON_S)
    assert heard == [[[[rank, turn, -rank * 2**40] for rank in range(10)] for turn in range(3)]] * 10


def test_a_rank_that_is_gone_is_named_and_the_group_ends() -> None:
    with Ranks(exchange_functions.exchange_without_rank_1, 3, timeout_s=200, nodes=["a0", "a1", "a2"]) as ranks:
        for outcome in ranks.outcomes([0, 2], timeout_s=SOON_S):
            first, second = outcome.value
            assert "PeerError: exchange #2 (1 x torch.int64)" in first
            assert "rank 1 (node a1) is gone" in first
            assert "exchange #3 (1 x torch.int64): this process group has failed before: exchange #2" in second


def test_a_future_that_is_asked_for_when_all_is_over_has_the_result() -> None:
    with Ranks(exchange_functions.ask_late_for_the_future, 2, timeout_s=200, nodes=["a0", "a1"]) as ranks:
        assert ranks.values(timeout_s=SOON_S) == [[2.0, 2.0]] * 2


def test_another_width_is_a_disagreement() -> None:
    with Ranks(exchange_functions.exchange_different_widths, 2, 1, timeout_s=200, nodes=["a0", "a1"]) as ranks:
        (outcome,) = ranks.outcomes([0], timeout_s=SOON_S)
    error, culprits = outcome.value
    assert error.startswith("exchange #1")
    assert "rank 1 (node a1) runs something else: a message of 24 bytes in collective #1 came" in error
    assert culprits == (), "of two ranks any may be the wrong one"


@pytest.mark.parametrize("odd", [0, 2])
def test_the_rank_whose_row_is_of_another_size_than_most_is_named_by_all_wherever_it_is_in_the_tree(odd: int) -> None:
    nodes = ["a0", "a1", "a2", "a3"]
    with Ranks(exchange_functions.exchange_different_widths, 4, odd, timeout_s=200, nodes=nodes) as ranks:
        found = ranks.values(timeout_s=SOON_S)
    text = (
        f"exchange #1: rank {odd} (node a{odd}) sent a row of 3 x torch.int64, expected 2 x torch.int64, as of 3 ranks."
    )
    assert [(error.startswith(text), culprits) for error, culprits in found] == [(True, (odd,))] * 4
