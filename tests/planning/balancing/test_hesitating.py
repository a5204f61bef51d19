"""Changes of shares that come to nothing make the next ones rarer."""

from collections.abc import Callable, Sequence

import pytest

from ringweave.planning.balancing import Rebalancer, ShareChange, Speed, rebalance
from ringweave.planning.balancing.shares import MAX_NOISE, MIN_GAIN

Look = Callable[[tuple[int, ...], Sequence[Speed]], ShareChange | None]
EQUAL = [Speed(s_per_sample=1.0)] * 4
EVEN = (64, 64, 64, 64)
LONG = 50
"""Train steps after which 18 % are believed."""


def with_slow(rank: int, factor: float = 1.3) -> list[Speed]:
    return [Speed(s_per_sample=factor if each == rank else 1.0) for each in range(4)]


def patient(rebalancer: Rebalancer) -> Look:
    """Looks that each come so late that patience is no matter."""
    return lambda current, speeds: rebalancer.propose_change(current, speeds, num_steps=LONG)


def looks_until_a_change(rebalancer: Rebalancer, speeds: Sequence[Speed]) -> int:
    return next(number for number in range(1, 1000) if rebalancer.propose_change(EVEN, speeds))


def test_the_first_change_is_that_of_the_rule_alone() -> None:
    assert Rebalancer().propose_change(EVEN, with_slow(0), num_steps=LONG) == rebalance(EVEN, with_slow(0))
    assert Rebalancer().propose_change(EVEN, EQUAL, num_steps=LONG) is None


def test_the_smaller_the_gain_the_longer_it_must_be_promised() -> None:
    """With one slow rank of four the gain is 0.62, 0.45, 0.27 and 0.18."""
    waits = [looks_until_a_change(Rebalancer(), with_slow(2, factor)) for factor in (4.0, 2.2, 1.5, 1.3)]
    assert waits == sorted(waits)
    assert waits[0] <= 2
    assert 10 < waits[2] < 20 < waits[3] < LONG
    assert Rebalancer().propose_change(EVEN, with_slow(2, 1.5), num_steps=waits[2]), (
        "steps count, however often one looks"
    )


def test_it_must_be_the_same_rank_all_the_time() -> None:
    rebalancer = Rebalancer()
    assert not any(rebalancer.propose_change(EVEN, with_slow(number // 10 % 4, 1.5)) for number in range(200))
    assert looks_until_a_change(rebalancer, with_slow(1, 1.5)) < 20


def test_ranks_that_are_slow_together_may_take_turns_as_the_slowest() -> None:
    rebalancer = Rebalancer()
    turns = (
        [Speed(s_per_sample=each) for each in (1.0, 1.0, 1.5, 1.55)],
        [Speed(s_per_sample=each) for each in (1.0, 1.0, 1.5, 1.5)],
    )
    found = [number for number in range(40) if rebalancer.propose_change(EVEN, turns[number % 2])]
    assert 10 < found[0] < 30


def test_a_guess_is_given_up_sooner() -> None:
    waits = [
        looks_until_a_change(Rebalancer(begins_with_guess=is_guess), with_slow(2, 1.5)) for is_guess in (True, False)
    ]
    assert waits[0] < waits[1] / 3
    rebalancer = Rebalancer(begins_with_guess=True)
    looks_until_a_change(rebalancer, with_slow(2, 1.5))
    assert looks_until_a_change(rebalancer, with_slow(1, 1.5)) > 10, "the first change alone"


def test_after_a_large_change_further_ones_need_not_wait() -> None:
    rebalancer = Rebalancer()
    looks_until_a_change(rebalancer, with_slow(0, 6.0))
    assert rebalancer.propose_change(EVEN, with_slow(0, 1.5)), "speeds are learnt anew"
    for _ in range(40):
        rebalancer.propose_change(EVEN, EQUAL)
    assert looks_until_a_change(rebalancer, with_slow(0, 1.5)) > 10


def changes_by_turns(look: Look, num_looks: int = 40) -> int:
    """How often shares change where another rank seems slow at each look."""
    shares, num_changes = EVEN, 0
    for number in range(num_looks):
        change = look(shares, with_slow(number % 2))
        shares = change.shares if change else shares
        num_changes += change is not None
    return num_changes


def test_who_seems_slow_by_turns_is_soon_left_alone() -> None:
    rebalancer = Rebalancer()
    assert changes_by_turns(rebalance) == 40
    assert 1 <= changes_by_turns(patient(rebalancer)) <= 10
    assert changes_by_turns(patient(rebalancer)) <= 5
    assert 2 * MIN_GAIN < rebalancer.min_gain <= MAX_NOISE


def test_what_can_be_halved_is_halved_whatever_came_before() -> None:
    rebalancer = Rebalancer()
    changes_by_turns(patient(rebalancer))
    assert looks_until_a_change(rebalancer, with_slow(3, 6.0)) <= 2


def test_doubts_are_forgotten() -> None:
    rebalancer = Rebalancer()
    changes_by_turns(patient(rebalancer), 6)
    assert rebalancer.min_gain > 2 * MIN_GAIN
    for _ in range(400):
        rebalancer.propose_change(EVEN, EQUAL)
    assert rebalancer.min_gain == pytest.approx(MIN_GAIN, rel=0.05)


def test_further_changes_in_one_direction_are_no_doubt() -> None:
    rebalancer, shares = Rebalancer(), EVEN
    for factor in (1.3, 1.8, 2.6, 4.0):
        change = rebalancer.propose_change(shares, with_slow(0, factor), num_steps=LONG)
        assert change is not None
        shares = change.shares
    assert rebalancer.min_gain == MIN_GAIN


def test_another_number_of_ranks_is_a_new_beginning() -> None:
    rebalancer = Rebalancer()
    assert rebalancer.propose_change(EVEN, with_slow(0), num_steps=LONG) is not None
    assert rebalancer.propose_change((64, 64), with_slow(0, 4.0)[:2], num_steps=LONG) is not None
