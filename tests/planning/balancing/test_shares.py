"""Shares in whole samples, against every way to share."""

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringweave.errors import TrainingError
from ringweave.planning.balancing import Speed, apportion, rebalance, scale_shares, slowest_compute_s

speeds = st.builds(Speed, s_per_sample=st.floats(0.01, 10), overhead_samples=st.just(0.0) | st.floats(0, 5))


def compositions(total: int, caps: list[int]) -> Iterator[tuple[int, ...]]:
    """Every way to share, at least one sample each."""
    for shares in itertools.product(*(range(1, cap + 1) for cap in caps[:-1])):
        last = total - sum(shares)
        if 1 <= last <= caps[-1]:
            yield (*shares, last)


@given(st.lists(speeds, min_size=1, max_size=4), st.data())
def test_no_other_shares_are_faster(ranks, data) -> None:
    caps = [data.draw(st.integers(1, 9)) for _ in ranks]
    total = data.draw(st.integers(len(ranks), sum(caps)))
    shares = apportion(total, ranks, caps)
    assert sum(shares) == total
    assert all(1 <= share <= cap for share, cap in zip(shares, caps, strict=True))
    best = min(slowest_compute_s(other, ranks) for other in compositions(total, caps))
    assert slowest_compute_s(shares, ranks) == pytest.approx(best)


@given(st.lists(speeds, min_size=1, max_size=12), st.integers(0, 100_000))
def test_no_sample_is_better_off_elsewhere(ranks, more) -> None:
    """At any size: moving a sample away from the slowest rank makes another as slow."""
    total = len(ranks) + more
    shares = apportion(total, ranks)
    assert sum(shares) == total
    assert min(shares) >= 1
    slowest = slowest_compute_s(shares, ranks)
    busiest = [speed.seconds(share) for speed, share in zip(ranks, shares, strict=True)].index(slowest)
    if shares[busiest] > 1:
        for rank, speed in enumerate(ranks):
            assert rank == busiest or speed.seconds(shares[rank] + 1) >= slowest * (1 - 1e-9)


def test_shares_follow_speeds() -> None:
    fast, slow = Speed(s_per_sample=1.0), Speed(s_per_sample=4.0)
    assert apportion(29, [fast] * 7 + [slow]) == (4, 4, 4, 4, 4, 4, 4, 1)
    assert apportion(8, [fast] * 3) == (3, 3, 2)
    assert apportion(8, [fast, fast], caps=[2, 6]) == (2, 6)
    assert apportion(10, [fast, Speed(s_per_sample=1.0, overhead_samples=4)]) == (7, 3)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=9), st.data())
def test_a_smaller_batch_is_shared_in_proportion(shares, data) -> None:
    total = sum(shares)
    few = data.draw(st.integers(0, total))
    scaled = scale_shares(tuple(shares), few)
    assert sum(scaled) == few
    assert all(abs(part - share * few / total) < 1 for part, share in zip(scaled, shares, strict=True))
    assert all(part <= share for part, share in zip(scaled, shares, strict=True)), "caps still hold"


def test_shares_stay_until_others_are_clearly_better() -> None:
    nearly = [Speed(s_per_sample=1.0), Speed(s_per_sample=1.04)]
    assert rebalance((50, 50), nearly) is None
    change = rebalance((50, 50), [Speed(s_per_sample=1.0), Speed(s_per_sample=4.0)])
    assert change is not None
    assert (change.shares, change.before_s, change.after_s) == ((80, 20), 200.0, 80.0)
    assert rebalance(change.shares, [Speed(s_per_sample=1.0), Speed(s_per_sample=4.0)]) is None


def test_within_the_noise_nothing_is_changed() -> None:
    fast = Speed(s_per_sample=1.0)
    assert rebalance((50, 50), [fast, Speed(s_per_sample=1.5, noise=0.3)]) is None
    assert rebalance((50, 50), [fast, Speed(s_per_sample=1.5, noise=0.1)]) is not None
    assert rebalance((50, 50), [fast, Speed(s_per_sample=20.0, noise=3.0)]) is not None


def test_a_share_changes_by_a_factor_at_a_time() -> None:
    """A twentieth of the speed was measured with 50 samples: with two or three it has to be measured again."""
    ranks = [Speed(s_per_sample=1.0), Speed(s_per_sample=20.0)]
    first = rebalance((50, 50), ranks)
    assert first is not None
    assert first.shares == (87, 13)
    second = rebalance(first.shares, ranks)
    assert second is not None
    assert second.shares == (96, 4)
    back = rebalance((99, 1), [Speed(s_per_sample=1.0), Speed(s_per_sample=1.0, overhead_samples=5.0)])
    assert back is None or back.shares == (96, 4), "times of one sample say nothing of fifty"


def test_memory_that_has_become_less_is_no_reason_to_take_nothing() -> None:
    change = rebalance((60, 40), [Speed(s_per_sample=4.0), Speed(s_per_sample=1.0)], [50, 70])
    assert change is not None
    assert change.shares == (30, 70)


def test_impossible_batches_are_refused() -> None:
    ranks = [Speed(s_per_sample=1.0)] * 3
    with pytest.raises(
        TrainingError, match=r"^samples in a batch over all ranks: 2, expected at least 1 for each of 3 ranks\. Raise"
    ):
        apportion(2, ranks)
    with pytest.raises(
        TrainingError, match=r"^samples that fit .*: \[4, 4, 1\], expected at least 1 each and 10 together\. Raise"
    ):
        apportion(10, ranks, [4, 4, 1])


@pytest.mark.parametrize(("each_s", "overhead"), [(0.0, 0.0), (float("inf"), 0.0), (1.0, -1.0), (float("nan"), 0.0)])
def test_impossible_speeds_are_refused(each_s: float, overhead: float) -> None:
    with pytest.raises(ValueError, match=r"^speed of a rank: .*expected positive seconds per sample, overhead"):
        Speed(s_per_sample=each_s, overhead_samples=overhead)
