"""Changes of shares that come to nothing make the next ones rarer."""

from collections.abc import Callable, Sequence

import pytest

from ringweave.planning.balancing import Change, Rebalancer, Speed, rebalance
from ringweave.planning.balancing.shares import MAX_NOISE, MIN_GAIN

Look = Callable[[tuple[int, ...], Sequence[Speed]], Change | None]
EQUAL = [Speed(s_per_sample=1.0)] * 4


def with_slow(rank: int, factor: float = 1.3) -> list[Speed]:
    return [Speed(s_per_sample=factor if each == rank else 1.0) for each in range(4)]


def test_the_first_change_is_that_of_the_rule_alone() -> None:
    assert Rebalancer().look((64, 64, 64, 64), with_slow(0)) == rebalance((64, 64, 64, 64), with_slow(0))
    assert Rebalancer().look((64, 64, 64, 64), EQUAL) is None


def changes_by_turns(look: Look, num_looks: int = 40) -> int:
    """How often shares change where another rank seems slow at each look."""
    shares, num_changes = (64, 64, 64, 64), 0
    for number in range(num_looks):
        change = look(shares, with_slow(number % 2))
        shares = change.shares if change else shares
        num_changes += change is not None
    return num_changes


def test_who_seems_slow_by_turns_is_soon_left_alone() -> None:
    rebalancer = Rebalancer()
    assert changes_by_turns(rebalance) == 40
    assert 1 <= changes_by_turns(rebalancer.look) <= 10
    assert changes_by_turns(rebalancer.look) <= 5
    assert 2 * MIN_GAIN < rebalancer.min_gain <= MAX_NOISE


def test_what_can_be_halved_is_halved_whatever_came_before() -> None:
    rebalancer = Rebalancer()
    changes_by_turns(rebalancer.look)
    assert rebalancer.look((64, 64, 64, 64), with_slow(3, 6.0)) is not None


def test_doubts_are_forgotten() -> None:
    rebalancer = Rebalancer()
    changes_by_turns(rebalancer.look, 6)
    assert rebalancer.min_gain > 2 * MIN_GAIN
    for _ in range(400):
        rebalancer.look((64, 64, 64, 64), EQUAL)
    assert rebalancer.min_gain == pytest.approx(MIN_GAIN, rel=0.05)


def test_further_changes_in_one_direction_are_no_doubt() -> None:
    rebalancer, shares = Rebalancer(), (64, 64, 64, 64)
    for factor in (1.3, 1.8, 2.6, 4.0):
        change = rebalancer.look(shares, with_slow(0, factor))
        assert change is not None
        shares = change.shares
    assert rebalancer.min_gain == MIN_GAIN


def test_another_number_of_ranks_is_a_new_beginning() -> None:
    rebalancer = Rebalancer()
    assert rebalancer.look((64, 64, 64, 64), with_slow(0)) is not None
    assert rebalancer.look((64, 64), with_slow(0, 4.0)[:2]) is not None
