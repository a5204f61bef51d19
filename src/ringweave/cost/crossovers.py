"""Where one architecture overtakes another: exactly in the latency, between two whole numbers in the workers."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from ringweave.cost import architectures
from ringweave.cost.architectures import Setting


@dataclass(frozen=True, kw_only=True, slots=True)
class Crossover:
    """One architecture overtakes another."""

    faster_below: str
    """Faster below the crossover."""
    faster_above: str
    """Faster above it."""
    at: float
    """Latency in seconds; or the first number of workers at which `faster_above` is faster."""
    seconds: float
    """Predicted time there: of both, or (in workers) of the one that is faster now."""
    is_lowest: bool
    """No other architecture is faster there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Where one architecture is the fastest."""

    architecture: str
    first: float
    """Latency in seconds from which on; or the first number of workers."""
    last: float
    """Latency in seconds up to which, infinite for the last span; or the last number of workers."""


def over_latency(setting: Setting, names: Sequence[str]) -> list[Crossover]:
    """All crossovers at a latency above 0, by latency; computed in fractions, rounded at the end.

    Times are lines in the latency, so that two of them cross at most once. The setting's own latency is not looked at.
    """
    lines = _exact_lines(setting, names)
    found = []
    for one, other in itertools.combinations(names, 2):
        flat, steep = sorted((one, other), key=lambda name: lines[name][0])
        slope = lines[steep][0] - lines[flat][0]
        ahead_s = lines[flat][1] - lines[steep][1]
        if slope > 0 and ahead_s > 0:
            at = ahead_s / slope
            times = {name: latencies * at + rest_s for name, (latencies, rest_s) in lines.items()}
            crossover = Crossover(
                faster_below=steep,
                faster_above=flat,
                at=float(at),
                seconds=float(times[flat]),
                is_lowest=times[flat] == min(times.values()),
            )
            found.append(crossover)
    return sorted(found, key=lambda crossover: crossover.at)


def spans_over_latency(setting: Setting, names: Sequence[str]) -> list[Span]:
    """Which architecture is the fastest from latency 0 upwards; of equals the one that stays ahead."""
    lines = _exact_lines(setting, names)
    at, spans = Fraction(0), []
    best = min(names, key=lambda name: (lines[name][1], lines[name][0]))
    while True:
        overtaking = [
            ((lines[name][1] - lines[best][1]) / (lines[best][0] - lines[name][0]), lines[name][0], name)
            for name in names
            if lines[name][0] < lines[best][0]
        ]
        if not overtaking:
            return [*spans, Span(architecture=best, first=float(at), last=math.inf)]
        until, _, following = min(overtaking)
        if until > at:
            spans.append(Span(architecture=best, first=float(at), last=float(until)))
        at, best = until, following


def over_workers(settings: Sequence[Setting], names: Sequence[str]) -> list[Crossover]:
    """All crossovers between one setting and the next, which differ in their workers.

    Args:
        settings: By growing number of workers.
        names: The architectures that are compared.
    """
    found = []
    for before, after in itertools.pairwise(settings):
        old, new = _times(before, names), _times(after, names)
        for one, other in itertools.combinations(names, 2):
            for below, above in ((one, other), (other, one)):
                if old[below] <= old[above] and new[above] < new[below]:
                    crossover = Crossover(
                        faster_below=below,
                        faster_above=above,
                        at=after.num_workers,
                        seconds=new[above],
                        is_lowest=new[above] == min(new.values()),
                    )
                    found.append(crossover)
    return found


def spans_over_workers(settings: Sequence[Setting], names: Sequence[str]) -> list[Span]:
    """Which architecture is the fastest at each setting, runs of the same one put together."""
    spans: list[Span] = []
    for setting in settings:
        times = _times(setting, names)
        best = min(names, key=times.__getitem__)
        if spans and spans[-1].architecture == best:
            spans[-1] = dataclasses.replace(spans[-1], last=setting.num_workers)
        else:
            spans.append(Span(architecture=best, first=setting.num_workers, last=setting.num_workers))
    return spans


def settings_over_workers(setting: Setting, workers: Sequence[int], groups_of: Callable[[int], int]) -> list[Setting]:
    """The setting at other numbers of workers.

    Args:
        setting: What stays.
        workers: The numbers of workers.
        groups_of: The number of groups for a number of workers.
    """
    return [dataclasses.replace(setting, num_workers=count, num_groups=groups_of(count)) for count in workers]


def _times(setting: Setting, names: Sequence[str]) -> dict[str, float]:
    return {name: architectures.seconds(name, setting) for name in names}


def _exact_lines(setting: Setting, names: Sequence[str]) -> dict[str, tuple[Fraction, Fraction]]:
    """Coefficients without rounding: the formulas are evaluated in fractions, as decimal numbers were typed."""
    numbers: dict[str, Any] = {
        field.name: _exact(getattr(setting, field.name)) for field in dataclasses.fields(setting)
    }
    exact = dataclasses.replace(setting, **numbers)
    lines = {name: architectures.line(name, exact) for name in names}
    return {name: (Fraction(each.latencies), Fraction(each.rest_s)) for name, each in lines.items()}


def _exact(number: float) -> Fraction:
    return Fraction(repr(number)) if isinstance(number, float) else Fraction(number)
