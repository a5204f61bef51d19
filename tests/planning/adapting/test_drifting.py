import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringweave.planning.adapting.drifting import BASE, WINDOW, Verdict, Watch

NOISE = st.lists(st.floats(0.9, 1.1), min_size=BASE + WINDOW, max_size=400)


def watched(*seconds: float) -> Watch:
    watch = Watch()
    for each in seconds:
        watch.observe(each)
    return watch


@given(NOISE)
def test_noise_of_ten_per_cent_is_never_drift(noise: list[float]) -> None:
    watch = Watch()
    for seconds in noise:
        watch.observe(seconds)
        assert watch.verdict is Verdict.STEADY


@pytest.mark.parametrize("seed", range(20))
def test_normal_noise_of_ten_per_cent_is_none_either(seed: int) -> None:
    watch, rng = Watch(), random.Random(seed)
    for _ in range(2000):
        watch.observe(max(0.01, rng.gauss(1.0, 0.1)))
        assert watch.verdict is Verdict.STEADY


@given(NOISE, st.floats(1.6, 10.0), st.integers(0, 30))
def test_a_slow_link_shows_within_a_window(noise: list[float], factor: float, more: int) -> None:
    watch = watched(*noise)
    for count in range(1, 21):
        watch.observe(noise[(more + count) % len(noise)] * factor)
        if watch.verdict is Verdict.SLOWER:
            break
    assert count <= WINDOW


@given(NOISE, st.floats(0.1, 0.6))
def test_a_fast_one_too(noise: list[float], factor: float) -> None:
    watch = watched(*noise, *(each * factor for each in noise[:WINDOW]))
    assert watch.verdict is Verdict.FASTER
    assert watch.now is not None
    assert watch.usual is not None
    assert watch.now < watch.usual


def test_a_few_slow_ones_are_none() -> None:
    watch = watched(*[1.0] * 20, 5.0, 5.0, 5.0, 5.0, 1.0, 1.0)
    assert watch.verdict is Verdict.STEADY


def test_too_few_say_nothing() -> None:
    watch = watched(*[1.0] * (BASE - 1), math.nan, -1.0)
    assert (watch.usual, watch.now) == (None, None)
    watch.observe(1.0)
    assert watch.usual == 1.0
    for _ in range(WINDOW - 1):
        watch.observe(9.0)
    assert watch.verdict is Verdict.STEADY
