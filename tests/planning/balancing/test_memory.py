"""Memory of workers: fits, microbatches, and shares on a model of memory, against every way to share."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringweave.planning.balancing import MemoryLimit, MemoryUse, Speed, SpeedEstimator, apportion, slowest_compute_s
from ringweave.planning.balancing.memory import REPEATED_FORWARD, RESERVE

limits = st.builds(
    MemoryLimit, whole_samples=st.floats(0.5, 60), split_samples=st.floats(0, 4), waiting_samples=st.floats(0, 0.2)
)
speeds = st.builds(Speed, s_per_sample=st.floats(0.01, 10), overhead_samples=st.floats(0, 5), memory=st.none() | limits)


def least_s(speed: Speed, num_samples: int) -> float:
    """The best of all ways to compute a share: any part at once, the rest in microbatches of any size."""
    limit = speed.memory
    if limit is None or num_samples <= limit.whole_samples:
        return speed.s_per_sample * (speed.overhead_samples + num_samples)
    room = limit.whole_samples - limit.split_samples - limit.waiting_samples * num_samples
    works = [
        num_samples
        + REPEATED_FORWARD * (num_samples - kept)
        + speed.overhead_samples * (1 + -(-(num_samples - kept) // size))
        for kept in range(1, num_samples + 1)
        for size in range(1, num_samples + 1)
        if max(kept, size) <= room
    ]
    return speed.s_per_sample * min(works, default=float("inf"))


@pytest.mark.parametrize("seed", range(200))
def test_random_memory_and_speed_never_fail_and_are_as_fast_as_the_best_way_to_share(seed) -> None:
    """Memory is measured with noise on some sizes; the plan must fit the true memory."""
    rng = random.Random(seed)
    ranks = []
    for _ in range(2):
        true = MemoryUse(fixed_bytes=rng.uniform(1e8, 2e9), sample_bytes=10 ** rng.uniform(6, 8))
        limit_bytes = (true.fixed_bytes + true.sample_bytes * rng.uniform(2, 40)) / (1 - RESERVE)
        trials = [(size, true.peak_bytes(size) * rng.uniform(0.98, 1.02)) for size in (2, 8, 32)]
        split_bytes, waiting_bytes = rng.uniform(0, true.sample_bytes), rng.uniform(0, 0.01) * true.sample_bytes
        memory = MemoryLimit.of_bytes(MemoryUse.fit(trials), limit_bytes, split_bytes, waiting_bytes)
        speed = Speed(s_per_sample=10 ** rng.uniform(-4, 0), overhead_samples=rng.uniform(0, 4), memory=memory)
        ranks.append((speed, true, limit_bytes, split_bytes, waiting_bytes))
    found = [each[0] for each in ranks]
    batch = rng.randint(2, 48)
    shares = apportion(batch, found)
    for share, (speed, true, limit_bytes, split_bytes, waiting_bytes) in zip(shares, ranks, strict=True):
        passes = speed.memory.split(share)
        beside = 0.0 if len(passes) == 1 else split_bytes + waiting_bytes * share
        assert sum(passes) == share
        assert len(passes) == 1 or max(passes) <= speed.memory.room(share) or max(passes) == 1
        if speed.memory.room(share) >= 1 or len(passes) == 1:
            assert true.peak_bytes(max(passes)) + beside <= limit_bytes
    best_s = min(
        max(least_s(speed, share) for speed, share in zip(found, (first, batch - first), strict=True))
        for first in range(1, batch)
    )
    if best_s < float("inf"):
        assert all(len(s.memory.split(n)) == 1 or s.memory.room(n) >= 1 for s, n in zip(found, shares, strict=True))
        assert slowest_compute_s(shares, found) <= 1.05 * best_s


@given(st.lists(speeds, min_size=1, max_size=3), st.data())
def test_no_other_shares_are_faster_beside_limits_of_memory(ranks, data) -> None:
    total = data.draw(st.integers(len(ranks), 40))
    shares = apportion(total, ranks)
    others = (
        (*first, total - sum(first))
        for first in itertools.product(range(1, total), repeat=len(ranks) - 1)
        if sum(first) < total
    )
    best = min(slowest_compute_s(other, ranks) for other in others)
    assert slowest_compute_s(shares, ranks) == pytest.approx(best)


@given(limits, st.integers(1, 300))
def test_microbatches_fit_and_add_up(limit, num_samples) -> None:
    passes = limit.split(num_samples)
    assert sum(passes) == num_samples
    assert min(passes) >= 1
    if num_samples <= limit.whole_samples:
        assert passes == (num_samples,)
    else:
        assert max(passes) == passes[-1] == min(num_samples, max(1, limit.room(num_samples)))


@given(speeds, st.integers(1, 200))
def test_more_samples_take_longer_and_time_is_inverted(speed, num_samples) -> None:
    assert speed.seconds(num_samples + 1) > speed.seconds(num_samples)
    assert speed.samples_within(speed.seconds(num_samples) * (1 + 1e-12)) == pytest.approx(num_samples, abs=1)


@given(speeds)
def test_a_speed_passes_through_its_numbers(speed) -> None:
    assert Speed.of_numbers(speed.to_numbers()) == speed


def test_a_fit_lies_above_every_measurement() -> None:
    fit = MemoryUse.fit([(2, 120.0), (8, 180.0), (32, 430.0)])
    assert fit.sample_bytes == pytest.approx(10.36, abs=0.01)
    assert all(fit.peak_bytes(size) >= peak - 1e-9 for size, peak in [(2, 120.0), (8, 180.0), (32, 430.0)])
    assert MemoryUse.fit([(2, 500.0), (8, 400.0)]).sample_bytes == 1.0, "memory that shrinks says nothing of samples"


def test_a_worker_with_a_quarter_of_the_memory_gets_more_than_a_quarter_if_others_wait_for_that() -> None:
    roomy = Speed(s_per_sample=1.0, memory=MemoryLimit(whole_samples=80))
    small = Speed(s_per_sample=1.0, memory=MemoryLimit(whole_samples=10))
    assert apportion(40, [roomy, small]) == (22, 18), "18 samples, 8 of which are computed forward twice, take 20.7"
    assert apportion(12, [roomy, small]) == (6, 6), "all at once"


def test_steps_in_microbatches_do_not_count_as_another_speed() -> None:
    estimator = SpeedEstimator()
    estimator.memory = MemoryLimit(whole_samples=10)
    for _ in range(30):
        estimator.observe(19, 0.01 * (19 + 9 * REPEATED_FORWARD))
    assert estimator.speed is not None
    assert estimator.speed.s_per_sample == pytest.approx(0.01)
    assert estimator.speed.memory == estimator.memory


@pytest.mark.parametrize("numbers", [(0.0, 0.0, 0.0), (1.0, float("nan"), 0.0), (float("inf"), 0.0, 0.0)])
def test_a_limit_that_is_none_is_refused(numbers) -> None:
    with pytest.raises(ValueError, match="memory of a rank: "):
        MemoryLimit(whole_samples=numbers[0], split_samples=numbers[1], waiting_samples=numbers[2])
