"""What an estimator makes of steps of a rank whose speed is known."""

import math
import random
from dataclasses import replace

import pytest

from ringweave.planning.balancing import Rebalancer, Speed, SpeedEstimator, apportion, slowest_compute_s
from ringweave.planning.balancing.speed import MAX_BLOCKS, SPEED_WARM_UP_STEPS


def watch(estimator: SpeedEstimator, truth: Speed, num_samples: int, num_steps: int) -> None:
    for _ in range(num_steps):
        estimator.observe(num_samples, truth.seconds(num_samples))


def test_the_first_steps_do_not_count() -> None:
    estimator = SpeedEstimator()
    watch(estimator, Speed(s_per_sample=100.0), 4, SPEED_WARM_UP_STEPS)
    watch(estimator, Speed(s_per_sample=2.0), 4, 2)
    assert estimator.speed is None
    watch(estimator, Speed(s_per_sample=2.0), 4, 1)
    assert estimator.speed is not None
    assert estimator.speed.s_per_sample == 2.0


def test_stalls_are_no_change_of_speed() -> None:
    estimator = SpeedEstimator()
    watch(estimator, Speed(s_per_sample=2.0), 4, SPEED_WARM_UP_STEPS + MAX_BLOCKS)
    watch(estimator, Speed(s_per_sample=50.0), 4, 2)
    assert estimator.speed is not None
    assert estimator.speed.s_per_sample == 2.0


def test_a_lasting_change_shows_after_three_steps() -> None:
    estimator = SpeedEstimator()
    watch(estimator, Speed(s_per_sample=2.0), 4, SPEED_WARM_UP_STEPS + MAX_BLOCKS)
    watch(estimator, Speed(s_per_sample=8.0), 4, 3)
    assert estimator.speed is not None
    assert estimator.speed.s_per_sample == 8.0


def test_of_noise_much_is_averaged_and_nothing_forgotten() -> None:
    estimator, generator = SpeedEstimator(), random.Random(1)
    for _ in range(SPEED_WARM_UP_STEPS + MAX_BLOCKS):
        estimator.observe(4, 8.0 * generator.uniform(0.8, 1.2))
    assert estimator.speed is not None
    assert estimator.speed.s_per_sample == pytest.approx(2.0, rel=0.05)
    assert estimator.speed.noise == pytest.approx(0.2, abs=0.12)


def test_overhead_is_read_off_two_shares() -> None:
    truth = Speed(s_per_sample=0.5, overhead_samples=6.0)
    estimator = SpeedEstimator()
    watch(estimator, truth, 20, SPEED_WARM_UP_STEPS + MAX_BLOCKS)
    for share in (10, 20, 10, 20, 10, 20):
        watch(estimator, truth, share, 3)
    assert estimator.speed is not None
    assert estimator.speed.overhead_samples == pytest.approx(6.0, rel=0.05)
    assert estimator.speed.s_per_sample == pytest.approx(0.5, rel=0.05)


def test_work_beside_computing_is_fixed_work() -> None:
    """It is no part of the time of a sample, however many there are; shares follow it from the first look on."""
    estimator = SpeedEstimator()
    for _ in range(SPEED_WARM_UP_STEPS + MAX_BLOCKS):
        estimator.observe(10, 20.0, other_work=0.3)
    assert estimator.speed is not None
    assert estimator.speed.s_per_sample == 2.0
    assert estimator.speed.overhead_samples == pytest.approx(3.0)
    for _ in range(MAX_BLOCKS):
        estimator.observe(4, 8.0, other_work=0.75)
    assert estimator.speed.s_per_sample == 2.0
    assert estimator.speed.overhead_samples == pytest.approx(3.0)


def test_steps_shorter_than_a_period_of_the_kernel_are_put_together() -> None:
    """A step of 10 ms at half the processor takes 0 or 20 ms more: the mean is its speed, each step alone is not."""
    estimator = SpeedEstimator()
    for number in range(200):
        estimator.observe(10, 0.03 if number % 2 else 0.01)
    assert estimator.speed is not None
    assert estimator.speed.s_per_sample == pytest.approx(0.002, rel=0.1)
    assert estimator.speed.noise < 0.2


def test_noise_is_what_times_lie_apart() -> None:
    estimator = SpeedEstimator()
    watch(estimator, Speed(s_per_sample=2.0), 4, SPEED_WARM_UP_STEPS)
    for seconds in (8.0, 10.0, 8.0, 6.0, 4.0):
        estimator.observe(4, seconds)
    assert estimator.speed == Speed(s_per_sample=2.0, noise=0.5)


def test_few_measurements_are_uncertain() -> None:
    estimator = SpeedEstimator()
    watch(estimator, Speed(s_per_sample=2.0), 4, SPEED_WARM_UP_STEPS + 4)
    assert estimator.speed == Speed(s_per_sample=2.0, noise=0.125)


def test_steps_without_samples_and_short_batches_do_not_count() -> None:
    estimator = SpeedEstimator()
    watch(estimator, Speed(s_per_sample=2.0), 4, SPEED_WARM_UP_STEPS + MAX_BLOCKS)
    estimator.observe(0, 7.0)
    estimator.observe(1, 2.0)
    assert estimator.speed is not None
    assert estimator.speed.s_per_sample == 2.0


class Team:
    """Ranks whose times are noisy, balanced as in training."""

    def __init__(self, num_samples: int, truth: list[Speed], noise: float, seed: int) -> None:
        self.truth, self.noise, self.generator = truth, noise, random.Random(seed)
        self.shares = apportion(num_samples, [Speed(s_per_sample=1.0)] * len(truth))
        self.estimators, self.rebalancer = [SpeedEstimator() for _ in truth], Rebalancer()
        self.num_steps, self.num_changes = 0, 0

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.num_steps += 1
            for estimator, speed, share in zip(self.estimators, self.truth, self.shares, strict=True):
                factor = self.generator.uniform(1 - self.noise, 1 + self.noise)
                estimator.observe(share, speed.seconds(share) * factor)
            known = [estimator.speed for estimator in self.estimators]
            if self.num_steps % 2 == 0 and all(known):
                change = self.rebalancer.propose_change(self.shares, [speed for speed in known if speed])
                self.shares = change.shares if change else self.shares
                self.num_changes += change is not None

    def disturb(self, num_steps: int, weight: float, memory: float) -> float:
        """Train beside neighbours that come and go, so that noise lasts for some steps; times beside the best ones."""
        levels, taken_s, best_s = [0.0] * len(self.truth), 0.0, 0.0
        truth, best = self.truth, apportion(sum(self.shares), self.truth)
        for _ in range(num_steps):
            fresh = (1 - memory**2) ** 0.5
            levels = [memory * level + fresh * self.generator.gauss(0, weight) for level in levels]
            self.truth = [
                replace(speed, s_per_sample=speed.s_per_sample * math.exp(level))
                for speed, level in zip(truth, levels, strict=True)
            ]
            self.train(1)
            taken_s, best_s = (
                taken_s + slowest_compute_s(self.shares, self.truth),
                best_s + slowest_compute_s(best, self.truth),
            )
        self.truth = truth
        return taken_s / best_s

    def slowness(self) -> float:
        """Time of a step beside that of the best shares."""
        return slowest_compute_s(self.shares, self.truth) / slowest_compute_s(
            apportion(sum(self.shares), self.truth), self.truth
        )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("overhead", [0.0, 5.0])
def test_shares_come_near_the_best_ones_from_noisy_times(overhead: float, seed: int) -> None:
    slow, fast = (Speed(s_per_sample=each_s, overhead_samples=overhead) for each_s in (4.0, 1.0))
    team = Team(96, [fast] * 7 + [slow], noise=0.03, seed=seed)
    team.train(30)
    assert team.slowness() <= 1.1


@pytest.mark.parametrize("seed", range(10))
def test_noise_alone_moves_little(seed: int) -> None:
    team = Team(4096, [Speed(s_per_sample=1.0)] * 8, noise=0.1, seed=seed)
    for _ in range(10):
        team.train(6)
        assert team.slowness() <= 1.06


@pytest.mark.parametrize("seed", range(10))
def test_ten_steps_after_a_change_of_speeds_shares_fit_again(seed: int) -> None:
    fast, slow = Speed(s_per_sample=1.0), Speed(s_per_sample=4.0)
    team = Team(4096, [fast] * 8, noise=0.05, seed=seed)
    team.train(40)
    team.truth = [fast] * 6 + [slow] * 2
    team.train(10)
    assert 1 / team.slowness() >= 0.85
    team.truth = [fast] * 4 + [slow] * 4
    team.train(10)
    assert 1 / team.slowness() >= 0.85


@pytest.mark.parametrize("seed", range(5))
def test_noise_that_lasts_for_some_steps_is_not_taken_for_fixed_work(seed: int) -> None:
    """What came of that: shares that took three times as long as fixed ones."""
    team = Team(1024, [Speed(s_per_sample=1.0)] * 8, noise=0.05, seed=seed)
    team.disturb(60, weight=0.4, memory=0.9)
    team.truth = [Speed(s_per_sample=1.0)] * 6 + [Speed(s_per_sample=4.0)] * 2
    assert team.disturb(60, weight=0.4, memory=0.9) <= 1.5
