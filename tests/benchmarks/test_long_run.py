"""What the soak concludes from samples: growth, none, or that it was too short or too noisy to tell."""

import argparse
import importlib
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).parents[2] / "bench"
WINDOW_S, PERIOD_S = 2700.0, 2.0
"""What an hour leaves after the warm-up."""


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("long_run")


def sampled(figure: Callable[[float], float], name: str, window_s: float = WINDOW_S) -> list[tuple[float, dict]]:
    """Samples of a figure by the hours since the first one."""
    return [(900.0 + at, {name: figure(at / 3600)}) for at in (PERIOD_S * i for i in range(int(window_s / PERIOD_S)))]


def slope(bench: ModuleType, samples: Sequence[tuple[float, dict]], name: str) -> dict:
    return bench.slope(samples, name, is_warm=True)


def test_what_never_changes_is_flat_once_a_step_would_have_been_seen(bench: ModuleType) -> None:
    for name in ("memory_mb", "descriptors", "threads"):
        found = slope(bench, sampled(lambda _: 50.0, name), name)
        assert (found["verdict"], found["per_hour"]) == ("flat", 0.0)
        assert found["high"] == pytest.approx(bench.STEPS[name] / (0.95 * WINDOW_S / 3600), abs=0.05)
        short = slope(bench, sampled(lambda _: 50.0, name, 135.0), name)
        assert short["verdict"] == "undecided", "three minutes"


def test_a_leak_grows_in_noise_and_in_many_steps(bench: ModuleType) -> None:
    rng = random.Random(1)
    found = slope(bench, sampled(lambda hours: 50 + 6 * hours + rng.gauss(0, 0.5), "memory_mb"), "memory_mb")
    assert found["verdict"] == "grows"
    assert 5.5 < found["per_hour"] < 6.5
    stairs = slope(bench, sampled(lambda hours: 50 + 0.25 * int(24 * hours), "memory_mb"), "memory_mb")
    assert stairs["verdict"] == "grows"
    leaking = slope(bench, sampled(lambda hours: 40 + int(120 * hours), "descriptors"), "descriptors")
    assert leaking["verdict"] == "grows", "one of two deaths leaves one"


def test_a_step_or_two_are_no_growth_that_goes_on(bench: ModuleType) -> None:
    one = slope(bench, sampled(lambda hours: 50 + 4 * (hours > 0.3), "memory_mb"), "memory_mb")
    assert one["verdict"] == "undecided"
    two = slope(bench, sampled(lambda hours: 40 + (hours > 0.2) + (hours > 0.6), "descriptors"), "descriptors")
    assert two["verdict"] != "grows"


def test_a_level_that_wanders_is_seldom_called_growth(bench: ModuleType) -> None:
    """Each span is near the one before it: values that are not independent look like a slope."""
    grown = 0
    for seed in range(200):
        rng, level, levels = random.Random(seed), 0.0, []
        for _ in range(20):
            level = 0.8 * level + rng.gauss(0, 1.5)
            levels += [50 + level] * 67
        grown += (
            slope(bench, sampled(lambda hours, of=levels: of[int(hours * 1800)], "memory_mb", 2680), "memory_mb")[
                "verdict"
            ]
            == "grows"
        )
    assert grown <= 10


@pytest.mark.parametrize("num", [1, 2, 7])
def test_a_few_samples_tell_nothing(bench: ModuleType, num: int) -> None:
    found = slope(bench, sampled(lambda _: 50.0, "threads", num * PERIOD_S), "threads")
    assert found == {"name": "threads", "median": 50.0, "allowed": 1.0, "verdict": "undecided"}


def results(roles: Sequence[str]) -> dict:
    training = {"events": 5, "events_written": 5, "gone": 0, "steps": 7}
    return {
        "has_lasted": True,
        "processes": [{"role": role, "pid": 1, "slopes": []} for role in roles],
        "trainings": [training],
        "run_json_steps": 7,
        "log_bytes": {"largest": 1, "allowed": 2},
    }


def test_each_kind_of_process_has_to_be_judged(bench: ModuleType) -> None:
    assert bench.missed(results(bench.KINDS)) == []
    assert bench.missed(results(bench.KINDS[1:])) == ["no run was sampled for half of the measured time"]


def test_the_warm_up_is_a_quarter_of_the_time_within_bounds(bench: ModuleType) -> None:
    for minutes, first in ((4, 120.0), (15, 300.0), (40, 600.0), (60, 900.0), (600, 900.0)):
        made = bench.Samples()
        made.totals = [(at * 60.0 * minutes / 1000, {"processes": 9 if at else 0}) for at in range(1001)]
        made.series["run", 1] = [(at, dict.fromkeys(bench.MEASURES, float(at < first))) for at, _ in made.totals]
        rows = {row["role"]: row["slopes"] for row in made.rows()}
        assert [each["median"] for each in rows["run"]] == [0.0] * 4
        assert [each["name"] for each in rows["all processes"]] == ["processes"]


@pytest.mark.parametrize(("minutes", "verdict"), [(3, "undecided"), (9, "undecided"), (10, "grows"), (60, "grows")])
def test_growth_of_the_first_minutes_may_be_warm_up(bench: ModuleType, minutes: float, verdict: str) -> None:
    made = bench.Samples()
    times = [2.0 * index for index in range(int(30 * minutes))]
    made.totals = [(at, {"processes": 9}) for at in times]
    made.series["ui", 1] = [(at, dict.fromkeys(bench.MEASURES, 50 + at / 10)) for at in times]
    of_ui = next(row["slopes"] for row in made.rows() if row["role"] == "ui")
    assert [each["verdict"] for each in of_ui] == [verdict] * 4


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf"])
def test_a_length_is_some_time(bench: ModuleType, text: str) -> None:
    assert bench._minutes("0.2") == 0.2
    with pytest.raises(argparse.ArgumentTypeError, match=f"{text} minutes, expected more than none"):
        bench._minutes(text)
