"""Round times of five training architectures (PS, ring, hierarchical, PS-HRA) by formula, and their crossovers.

The formulas assume an unstructured network: one rate and one latency for all workers. The rest of this package costs
schedules on the links of a cluster. A round's time is linear in the latency; `latency_line` returns both coefficients,
from which the crossovers follow exactly.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Any

from ringweave.errors import UsageError
from ringweave.files import problems


@dataclass(frozen=True, kw_only=True, slots=True)
class ArchitectureSetting:
    """Inputs of the formulas. Times that follow from them are predicted."""

    num_workers: int
    num_groups: int
    """k: rings of workers. Only the architectures of `GROUPED_ARCHITECTURES` use it."""
    num_bytes: float
    """S: bytes of the gradients, and of the parameters, of one worker."""
    latency_s: float
    """a: in the paper it includes the wait for slow workers, so it may be far larger than a network's."""
    bandwidth_bytes_per_s: float
    """B: rate of every worker and of the server, in each direction."""
    reduce_s_per_byte: float
    """C: time to add a byte of a gradient."""

    def __post_init__(self) -> None:
        _check_input("workers", self.num_workers, "at least one", is_allowed=self.num_workers >= 1)
        allowed = f"from 1 to the number of workers, {self.num_workers}"
        _check_input("groups", self.num_groups, allowed, is_allowed=1 <= self.num_groups <= self.num_workers)
        _check_input("rate", self.bandwidth_bytes_per_s, "a positive rate", is_allowed=self.bandwidth_bytes_per_s > 0)
        for what, value in (
            ("bytes", self.num_bytes),
            ("latency", self.latency_s),
            ("time to reduce a byte", self.reduce_s_per_byte),
        ):
            _check_input(what, value, "zero or more", is_allowed=value >= 0)

    @property
    def ring_size(self) -> float:
        """N/k, as in the formulas; a fraction where k does not divide N."""
        return self.num_workers / self.num_groups

    @property
    def largest_ring(self) -> int:
        """Workers of the last ring: N/k rounded down, plus the remainder."""
        return self.num_workers // self.num_groups + self.num_workers % self.num_groups


@dataclass(frozen=True, kw_only=True, slots=True)
class LatencyLine:
    """A time as a linear function of the latency a: `latencies` a + `rest_s`."""

    latencies: float
    """Number of messages in sequence."""
    rest_s: float
    """Part that does not depend on the latency."""

    def seconds_at(self, latency_s: float) -> float:
        return self.latencies * latency_s + self.rest_s


def round_seconds(architecture: str, setting: ArchitectureSetting) -> float:
    """Return the predicted time of one round.

    Where k does not divide N, the formula uses the fraction N/k.

    Raises:
        UsageError: No such architecture.
    """
    return latency_line(architecture, setting).seconds_at(setting.latency_s)


def round_seconds_of_largest_ring(architecture: str, setting: ArchitectureSetting) -> float:
    """Return the predicted time of a round that waits for the ring with the remainder.

    It equals `round_seconds` where k divides N, and for an architecture without groups.

    Raises:
        UsageError: No such architecture.
    """
    return _apply_formula(architecture, setting, setting.largest_ring).seconds_at(setting.latency_s)


def latency_line(architecture: str, setting: ArchitectureSetting) -> LatencyLine:
    """Return the predicted time as a function of the latency; the latency of the setting is ignored.

    Raises:
        UsageError: No such architecture.

    Source:
        Huang and Yang, "A highly scalable distributed machine learning architecture based on Ring All-Reduce" (2022);
        `ps-hra-shared-link` is our own.
    """
    return _apply_formula(architecture, setting, setting.ring_size)


def check_architecture(architecture: str) -> str:
    """Return the name if it is an architecture.

    Raises:
        UsageError: It is none.
    """
    if architecture not in ARCHITECTURES:
        do = problems.suggest_closest(architecture, ARCHITECTURES) or "Use one of these names"
        expected = f"one of {', '.join(ARCHITECTURES)}"
        raise UsageError("architecture", got=architecture, expected=expected, do=do)
    return architecture


def _check_input(what: str, got: float, allowed: str, *, is_allowed: bool) -> None:
    if not is_allowed:
        raise UsageError(what, got=got, expected=allowed, do="Change it")


def _apply_formula(architecture: str, setting: ArchitectureSetting, ring_size: float) -> LatencyLine:
    return _FORMULAS[check_architecture(architecture)](setting, ring_size)


def _parameter_server_line(setting: ArchitectureSetting, _: float) -> LatencyLine:
    """2(a + N S/B) + N S C: the server's link, and its processor, serve all workers."""
    return _server_exchange_line(setting, setting.num_workers)


def _ring_line(setting: ArchitectureSetting, _: float) -> LatencyLine:
    """2(N-1)(a + S/(N B)) + (N-1)(S/N) C."""
    return _ring_allreduce_line(setting, setting.num_workers)


def _hierarchical_line(setting: ArchitectureSetting, ring_size: float) -> LatencyLine:
    """A ring in each group, a ring of the k representatives, a broadcast in each group."""
    return _sum_lines(
        _ring_allreduce_line(setting, ring_size),
        _ring_allreduce_line(setting, setting.num_groups),
        _message_line(setting),
    )


def _ps_hra_line(setting: ArchitectureSetting, ring_size: float) -> LatencyLine:
    """A ring in each group, an exchange with the server as if no other group had one, a broadcast in each group."""
    return _sum_lines(
        _ring_allreduce_line(setting, ring_size), _server_exchange_line(setting, 1), _message_line(setting)
    )


def _ps_hra_shared_link_line(setting: ArchitectureSetting, ring_size: float) -> LatencyLine:
    """As `_ps_hra_line`, but the k representatives share the server's link, as the workers of PS do."""
    return _sum_lines(
        _ring_allreduce_line(setting, ring_size),
        _server_exchange_line(setting, setting.num_groups),
        _message_line(setting),
    )


def _ring_allreduce_line(setting: ArchitectureSetting, num_members: float) -> LatencyLine:
    """A ring allreduce: reduce-scatter, then allgather."""
    steps = num_members - 1
    chunk_bytes = setting.num_bytes / num_members
    moved_s = 2 * steps * chunk_bytes / setting.bandwidth_bytes_per_s
    return LatencyLine(latencies=2 * steps, rest_s=moved_s + steps * chunk_bytes * setting.reduce_s_per_byte)


def _server_exchange_line(setting: ArchitectureSetting, num_peers: int) -> LatencyLine:
    """All peers at once send S to the server, which adds it, and receive S back."""
    served_bytes = num_peers * setting.num_bytes
    moved_s = 2 * served_bytes / setting.bandwidth_bytes_per_s
    return LatencyLine(latencies=2, rest_s=moved_s + served_bytes * setting.reduce_s_per_byte)


def _message_line(setting: ArchitectureSetting) -> LatencyLine:
    return LatencyLine(latencies=1, rest_s=setting.num_bytes / setting.bandwidth_bytes_per_s)


def _sum_lines(*lines: LatencyLine) -> LatencyLine:
    return LatencyLine(latencies=sum(each.latencies for each in lines), rest_s=sum(each.rest_s for each in lines))


_FORMULAS = MappingProxyType(
    {
        "ps": _parameter_server_line,
        "ring": _ring_line,
        "hierarchical": _hierarchical_line,
        "ps-hra": _ps_hra_line,
        "ps-hra-shared-link": _ps_hra_shared_link_line,
    }
)
ARCHITECTURES: tuple[str, ...] = tuple(_FORMULAS)
PAPER_ARCHITECTURES: tuple[str, ...] = ("ps", "ring", "hierarchical", "ps-hra")
"""The four architectures that the paper compares."""
CORRECTED_ARCHITECTURES: tuple[str, ...] = ("ps", "ring", "hierarchical", "ps-hra-shared-link")
"""The same four, with the server's link shared; PS has it shared in the paper already."""
GROUPED_ARCHITECTURES: frozenset[str] = frozenset({"hierarchical", "ps-hra", "ps-hra-shared-link"})
"""Architectures that depend on the number of groups."""
ARCHITECTURE_LABELS: Mapping[str, str] = MappingProxyType(
    {
        "ps": "PS",
        "ring": "ring",
        "hierarchical": "hierarchical",
        "ps-hra": "PS-HRA",
        "ps-hra-shared-link": "PS-HRA, server's link shared",
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Crossover:
    """A point at which one architecture overtakes another."""

    faster_below: str
    """The faster architecture below the crossover."""
    faster_above: str
    """The faster architecture above it."""
    at: float
    """Latency in seconds; or the first number of workers at which `faster_above` is faster."""
    seconds: float
    """Predicted time there: of both, or (in workers) of the one that is now faster."""
    is_lowest: bool
    """No other architecture is faster at this point."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FastestRange:
    """A range in which one architecture is the fastest."""

    architecture: str
    first: float
    """Lowest latency in seconds, or lowest number of workers."""
    last: float
    """Highest latency in seconds, infinite for the last range; or highest number of workers."""


def crossovers_over_latency(setting: ArchitectureSetting, names: Sequence[str]) -> list[Crossover]:
    """Return all crossovers at a latency above 0, by latency; computed in fractions, rounded at the end.

    Times are linear in the latency, so two of them cross at most once. The setting's own latency is ignored.
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


def fastest_over_latency(setting: ArchitectureSetting, names: Sequence[str]) -> list[FastestRange]:
    """Return the fastest architecture of each range of latencies from 0; among equals, the one that stays ahead."""
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
            return [*spans, FastestRange(architecture=best, first=float(at), last=math.inf)]
        until, _, following = min(overtaking)
        if until > at:
            spans.append(FastestRange(architecture=best, first=float(at), last=float(until)))
        at, best = until, following


def crossovers_over_workers(settings: Sequence[ArchitectureSetting], names: Sequence[str]) -> list[Crossover]:
    """Return all crossovers between one setting and the next, which differ in their workers.

    `settings`: by growing number of workers.
    """
    found = []
    for before, after in itertools.pairwise(settings):
        old, new = _seconds_by_architecture(before, names), _seconds_by_architecture(after, names)
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


def fastest_over_workers(settings: Sequence[ArchitectureSetting], names: Sequence[str]) -> list[FastestRange]:
    """Return the fastest architecture at each setting, with runs of the same one merged."""
    spans: list[FastestRange] = []
    for setting in settings:
        times = _seconds_by_architecture(setting, names)
        best = min(names, key=times.__getitem__)
        if spans and spans[-1].architecture == best:
            spans[-1] = dataclasses.replace(spans[-1], last=setting.num_workers)
        else:
            spans.append(FastestRange(architecture=best, first=setting.num_workers, last=setting.num_workers))
    return spans


def settings_over_workers(
    setting: ArchitectureSetting, workers: Sequence[int], groups_of: Callable[[int], int]
) -> list[ArchitectureSetting]:
    """Return the setting at other numbers of workers."""
    return [dataclasses.replace(setting, num_workers=count, num_groups=groups_of(count)) for count in workers]


def _seconds_by_architecture(setting: ArchitectureSetting, names: Sequence[str]) -> dict[str, float]:
    return {name: round_seconds(name, setting) for name in names}


def _exact_lines(setting: ArchitectureSetting, names: Sequence[str]) -> dict[str, tuple[Fraction, Fraction]]:
    """Return the coefficients without rounding: formulas are evaluated in fractions, from decimal numbers as typed."""
    numbers: dict[str, Any] = {
        field.name: _exact_fraction(getattr(setting, field.name)) for field in dataclasses.fields(setting)
    }
    exact = dataclasses.replace(setting, **numbers)
    lines = {name: latency_line(name, exact) for name in names}
    return {name: (Fraction(each.latencies), Fraction(each.rest_s)) for name, each in lines.items()}


def _exact_fraction(number: float) -> Fraction:
    return Fraction(repr(number)) if isinstance(number, float) else Fraction(number)
