"""Effort of the tests: what is enough for every day, or far more under `make test-thorough`.

Daily the examples are always the same ones: a rare failure is found by the thorough run, which draws others each time,
and stops nobody's work on something else.
"""

import contextlib
import gc
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

_DAILY, _THOROUGH = "daily", "thorough"
# How long examples take to make and to run depends on what else runs; pytest's own time-out ends what hangs.
_PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(_DAILY, _PATIENT, max_examples=20, derandomize=True)
settings.register_profile(_THOROUGH, _PATIENT, max_examples=200)


def load() -> None:
    """Takes the daily profile, if the option --hypothesis-profile does not name another."""
    settings.load_profile(_DAILY)


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of tests that differ little and take long, one is for every day; those marked as thorough are skipped then."""
    if config.getoption("hypothesis_profile") != _THOROUGH:
        skipped = pytest.mark.skip(reason="another one like it is enough for every day: make test-thorough runs all")
        for item in items:
            if item.get_closest_marker(_THOROUGH):
                item.add_marker(skipped)


def only_one_daily(request: pytest.FixtureRequest, life: object, daily: object) -> None:
    """Skips lives of a job that is killed at every boundary, but for the one of every day; --all-crashes takes all."""
    if life != daily and not request.config.getoption("--all-crashes"):
        pytest.skip("one life is enough for every day: --all-crashes takes all (make test-crashes)")


def alternating(*factors: Sequence[object], every: int = 2) -> list[object]:
    """Cases of all factors together, of which one in `every` is for every day.

    No value is left out if another factor has as many values as `every`.
    """
    found = []
    for places in itertools.product(*(range(len(factor)) for factor in factors)):
        values = [factor[place] for factor, place in zip(factors, places, strict=True)]
        found.append(pytest.param(*values, marks=pytest.mark.thorough if sum(places) % every else ()))
    return found


def is_thorough() -> bool:
    """Return whether this is the thorough run; known when test modules are imported."""
    return settings.default.max_examples == settings.get_profile(_THOROUGH).max_examples


def share_of(thorough: int) -> int:
    """How many to try, where the thorough run tries so many."""
    return max(1, thorough * settings.default.max_examples // settings.get_profile(_THOROUGH).max_examples)


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Make many objects that stay, as those of a syntax tree: to look for garbage among them takes longer than that."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def peak_kib() -> int:
    """Return the most KiB of memory that this process has had; ru_maxrss is also that of the process it began as."""
    return int(Path("/proc/self/status").read_text(encoding="ascii").split("VmHWM:")[1].split()[0])
