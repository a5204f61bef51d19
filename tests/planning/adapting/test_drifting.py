import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringweave.planning.autotune.tuner import BASELINE_LENGTH, DRIFT_WINDOW, DriftDetector, DriftVerdict

NOISE = st.lists(st.floats(0.9, 1.1), min_size=BASELINE_LENGTH + DRIFT_WINDOW, max_size=400)


def watched(*seconds: float) -> DriftDetector:
    watch = DriftDetector()
    for each in seconds:
        watch.observe(each)
    return watch


@given(NOISE)
def test_noise_of_ten_per_cent_is_never_drift(noise: list[float]) -> None:
    watch = DriftDetector()
    for seconds in noise:
        watch.observe(seconds)
        assert watch.verdict is DriftVerdict.STEADY


@pytest.mark.parametrize("seed", range(20))
def test_normal_noise_of_ten_per_cent_is_none_either(seed: int) -> None:
    watch, rng = DriftDetector(), random.Random(seed)
    for _ in range(2000):
        watch.observe(max(0.01, rng.gauss(1.0, 0.1)))
        assert watch.verdict is DriftVerdict.STEADY


@given(NOISE, st.floats(1.6, 10.0), st.integers(0, 30))
def test_a_slow_link_shows_within_a_window(noise: list[float], factor: float, more: int) -> None:
    watch = watched(*noise)
    for count in range(1, 21):
        watch.observe(noise[(more + count) % len(noise)] * factor)
        if watch.verdict is DriftVerdict.SLOWER:
            break
    assert count <= DRIFT_WINDOW


@given(NOISE, st.floats(0.1, 0.6))
def test_a_fast_one_too(noise: list[float], factor: float) -> None:
    watch = watched(*noise, *(each * factor for each in noise[:DRIFT_WINDOW]))
    assert watch.verdict is DriftVerdict.FASTER
    assert watch.current is not None
    assert watch.baseline is not None
    assert watch.current < watch.baseline


def test_a_few_slow_ones_are_none() -> None:
    watch = watched(*[1.0] * 20, 5.0, 5.0, 5.0, 5.0, 1.0, 1.0)
    assert watch.verdict is DriftVerdict.STEADY


def test_too_few_say_nothing() -> None:
    watch = watched(*[1.0] * (BASELINE_LENGTH - 1), math.nan, -1.0)
    assert (watch.baseline, watch.current) == (None, None)
    watch.observe(1.0)
    assert watch.baseline == 1.0
    for _ in range(DRIFT_WINDOW - 1):
        watch.observe(9.0)
    assert watch.verdict is DriftVerdict.STEADY
