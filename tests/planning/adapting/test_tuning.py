import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringweave.planning.autotune.tuner import MAX_TRIAL_ROUNDS, NUM_TRIAL_ROUNDS, NUM_UNCLEAR_ROUNDS, CandidateTrials
from ringweave.planning.autotune.tuning_messages import message_class

NAMES = ("ring", "direct", "multi-level", "native")


def run(tuner: CandidateTrials, seconds_of, num_bytes: int = 10**6) -> list[str]:
    """The trials until it is clear, each taking `seconds_of(name)`."""
    trials = []
    while tuner.next_trial is not None:
        trials.append(tuner.next_trial)
        tuner.observe(seconds_of(trials[-1]), num_bytes)
    return trials


def test_the_fastest_wins_after_a_warm_up_and_three_rounds() -> None:
    seconds = {"ring": 1.2, "direct": 1.0, "multi-level": 1.15, "native": 1.25}
    tuner = CandidateTrials(NAMES)
    trials = run(tuner, seconds.__getitem__)
    assert tuner.chosen == "direct"
    assert trials == [*NAMES, *NAMES[::-1], *NAMES, *NAMES[::-1]]
    assert tuner.measured() == pytest.approx({name: s / 10**6 for name, s in seconds.items()})


def test_what_is_hopeless_is_dropped_early() -> None:
    seconds = {"ring": 1.0, "direct": 1.1, "multi-level": 1.4, "native": 3.0}
    trials = run(tuner := CandidateTrials(NAMES), seconds.__getitem__)
    assert trials.count("native") == 1  # the warm-up
    assert trials.count("multi-level") == 2
    assert trials.count("direct") == 1 + NUM_TRIAL_ROUNDS
    assert tuner.chosen == "ring"
    assert set(tuner.measured()) == set(NAMES)


def test_short_messages_are_tried_more_often_and_never_dropped_at_once() -> None:
    seconds = {"ring": 0.001, "direct": 0.004, "multi-level": 0.002, "native": 0.0009}
    trials = run(tuner := CandidateTrials(NAMES), seconds.__getitem__)
    assert {trials.count(name) for name in NAMES} == {1 + MAX_TRIAL_ROUNDS}
    assert tuner.chosen == "native"


def test_among_equals_the_one_that_is_predicted_to_be_best_wins() -> None:
    tuner = CandidateTrials(NAMES)
    run(tuner, {"ring": 1.02, "direct": 1.0, "multi-level": 1.0, "native": 1.0}.__getitem__)
    assert tuner.chosen == "ring"


def test_noise_does_not_outvote_the_prediction() -> None:
    noisy = {
        "ring": iter([0.40, 0.42, 0.38, 0.41, 0.35, 0.42, 0.44]),
        "native": iter([0.40, 0.34, 0.39, 0.33, 0.41, 0.4, 0.39]),
    }
    tuner = CandidateTrials(list(noisy))
    trials = run(tuner, lambda name: 2 * next(noisy[name]))
    assert trials.count("ring") == trials.count("native") == 1 + NUM_UNCLEAR_ROUNDS, "three rounds are not enough here"
    assert tuner.chosen == "ring"


def test_what_is_faster_in_every_round_wins() -> None:
    seconds = {"ring": iter([0.9, 0.82, 0.80, 0.81]), "native": iter([0.9, 0.72, 0.75, 0.74])}
    tuner = CandidateTrials(list(seconds))
    run(tuner, lambda name: next(seconds[name]))
    assert tuner.chosen == "native"


def test_before_anything_was_measured_it_is_the_prediction() -> None:
    assert CandidateTrials(NAMES).chosen == "ring"


def test_a_lone_candidate_needs_no_trial() -> None:
    assert CandidateTrials(["native"]).next_trial is None
    with pytest.raises(ValueError, match="candidates: none, expected one or more"):
        CandidateTrials([])


def test_a_trial_that_nobody_measured_is_repeated() -> None:
    tuner = CandidateTrials(NAMES)
    tuner.observe(math.nan, 100)
    assert tuner.next_trial == "ring"


@given(
    true=st.lists(st.floats(0.2, 5.0), min_size=2, max_size=4),
    noise=st.lists(st.floats(0.96, 1.04), min_size=40, max_size=40),
)
def test_with_noise_the_choice_is_near_to_the_fastest(true: list[float], noise: list[float]) -> None:
    jumps = iter(noise * 10)
    seconds = dict(zip(NAMES, true, strict=False))
    tuner = CandidateTrials(list(seconds))
    trials = run(tuner, lambda name: seconds[name] * next(jumps))
    assert seconds[tuner.chosen] <= min(true) * 1.04 / 0.96 * 1.03
    assert len(trials) <= len(true) * (1 + MAX_TRIAL_ROUNDS)


@given(st.integers(1, 2**40))
def test_sizes_of_a_class_are_near_to_each_other(num_bytes: int) -> None:
    same = [size for size in (num_bytes, num_bytes * 9 // 8) if message_class(size) == message_class(num_bytes)]
    assert statistics.fmean(same) >= num_bytes
    assert int(message_class(2 * num_bytes).split()[1]) == int(message_class(num_bytes).split()[1]) + 2
