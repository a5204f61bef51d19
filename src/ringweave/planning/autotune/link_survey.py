"""Link survey: the streams to run at the same time, and the link rates that follow from them. Pure.

Nodes send to each other in a few patterns that fill every link once. The expected rate of each stream follows from the
believed rates. A slower stream shows that some link on its path is slower than believed. The other streams show which
one: a link that carried its rate in any pattern is not it.
"""

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ringweave.cost import GroupNetwork
from ringweave.cost.network import max_min_fair_rates
from ringweave.planning.autotune.tuning_messages import SurveyStream

SURVEY_PHASE_S = 0.15
"""Intended duration of a stream."""
_MIN_STREAM_BYTES, _MAX_STREAM_BYTES = 2**17, 2**22
_MAX_EXTRA_PHASES = 8
_MAX_STREAMS = 16
_FILLED_FRACTION = 0.9
"""Fraction of its rate that must be planned on a link for the link to count as filled."""
_CHANGED_RATIO = 1.15
"""A link has changed if its rate differs from the believed one by more than this factor, up or down."""
_SLOW_RATIO, _FAST_RATIO = 0.8, 1.2

_SURVEY_TIME_FRACTION = 0.01
"""Long-run fraction of the time that surveys without findings may take."""
_FIRST_SURVEY_TIME_FRACTION = 0.1
"""The same fraction for the first survey; each further survey without findings has half of the one before."""

SurveyPhase = tuple[SurveyStream, ...]


@dataclass(slots=True)
class SurveyHistory:
    """Results of the surveys so far, and the times from which others are allowed.

    Groups that a process forms one after another share it: each would survey at once otherwise, and none would know the
    slow links that the one before has found, since it was never faster.
    """

    rates: dict[str, float] = field(default_factory=dict)
    """Bytes per second of links, by name, where they differ from those known before anything ran."""
    next_drift_survey_s: float = -math.inf
    """First rank's clock."""
    next_recheck_s: float = -math.inf
    """The same for surveys of links that were slow."""
    num_fruitless: int = 0
    """Surveys since the last one that changed a plan."""
    duration_s: float = 0.0
    """Duration of the last survey of all links, or the expected one of the first; 0 if none is expected yet."""

    def record_survey(self, now_s: float, duration_s: float, *, is_whole: bool) -> None:
        """Record a survey, of all links or of some, that has changed nothing so far."""
        fraction = max(_SURVEY_TIME_FRACTION, _FIRST_SURVEY_TIME_FRACTION / 2**self.num_fruitless)
        self.next_recheck_s = now_s + duration_s / _SURVEY_TIME_FRACTION
        self.next_drift_survey_s = now_s + duration_s / fraction
        self.num_fruitless += 1
        self.duration_s = duration_s if is_whole else self.duration_s

    def record_change(self, now_s: float) -> None:
        """Record that the survey has changed the plan."""
        self.num_fruitless, self.next_drift_survey_s = 0, now_s


class LinkSurvey:
    """Stream patterns for a network, and the link rates that their measurements imply."""

    def __init__(self, net: GroupNetwork, nodes: Sequence[str]) -> None:
        """`net` has the believed rates; `nodes` has the names in the order in which streams number them."""
        vertex_of = {name: vertex for vertex, name in enumerate(net.names)}
        self._net = net
        self._vertices = [vertex_of[name] for name in nodes]
        self._rates = [*net.up_bytes_per_s.tolist(), *net.down_bytes_per_s.tolist()]

    def phases(self, only: Sequence[str] = ()) -> tuple[SurveyPhase, ...]:
        """Return each phase's streams: shifts along the tree, then more streams on links that these leave half empty.

        Args:
            only: Names of the links to survey: each is then filled once. Empty surveys all.
        """
        if only:
            suspects = [link for link in self._used_links() if self._name(link) in only]
            return tuple(self._sized(self._through(link)) for link in suspects)
        along = sorted(range(len(self._vertices)), key=lambda node: self._vertices[node])
        count = len(along)
        shifts = dict.fromkeys(shift % count for shift in (1, 2, count // 2, count - 1))
        pairs = [[(along[i], along[(i + shift) % count]) for i in range(count)] for shift in shifts if shift]
        carried = self._carried(pairs)
        for link in self._used_links():
            if len(pairs) < len(shifts) + _MAX_EXTRA_PHASES and carried[link] < _FILLED_FRACTION * self._rates[link]:
                pairs.append(self._through(link))
                carried = self._carried(pairs)
        return tuple(self._sized(phase) for phase in pairs)

    def intended_s(self) -> float:
        """Return the intended duration of a survey of all links."""
        return SURVEY_PHASE_S * len(self.phases())

    def revised_rates(self, phases: Sequence[SurveyPhase], measured: Sequence[float]) -> dict[str, float]:
        """Return the rate that each changed link carried, in bytes per second, by link name.

        `measured`: bytes per second of each stream, phase after phase.
        """
        rows = iter(measured)
        seen = [[next(rows) for _ in phase] for phase in phases]
        expected = [self._expected(phase) for phase in phases]
        wanted = itertools.chain.from_iterable(expected)
        usual = _typical_fraction([rate / hoped for rate, hoped in zip(measured, wanted, strict=True)])
        seen = [[rate / usual for rate in phase] for phase in seen]
        carried = self._most_carried(phases, seen)
        revised: dict[int, float] = {}
        for phase, rates, hopes in zip(phases, seen, expected, strict=True):
            for stream, rate, hoped in zip(phase, rates, hopes, strict=True):
                links = self._path(stream)
                if rate < _SLOW_RATIO * hoped:
                    least = min(carried[link] / self._rates[link] for link in links)
                    guilty = [link for link in links if carried[link] / self._rates[link] <= least * 1.05]
                elif rate > _FAST_RATIO * hoped:
                    guilty = [link for link in links if carried[link] > self._rates[link]]
                else:
                    guilty = []
                revised |= {link: carried[link] for link in guilty if _rates_differ(carried[link], self._rates[link])}
        return {self._name(link): rate for link, rate in sorted(revised.items())}

    def _name(self, link: int) -> str:
        count = len(self._net)
        return self._net.up_name(link) if link < count else self._net.down_name(link - count)

    def _used_links(self) -> list[int]:
        return [link for link in range(len(self._rates)) if self._net.parents[link % len(self._net)] >= 0]

    def _path(self, stream: Iterable[int]) -> list[int]:
        src, dst, *_ = stream
        low, high = self._vertices[src], self._vertices[dst]
        ups, downs = [], []
        while low != high:
            if low > high:  # in preorder the larger of two different vertices is never above the other one
                ups.append(low)
                low = int(self._net.parents[low])
            else:
                downs.append(high + len(self._net))
                high = int(self._net.parents[high])
        return ups + downs[::-1]

    def _expected(self, phase: Sequence[Sequence[int]]) -> list[float]:
        return max_min_fair_rates([self._path(stream) for stream in phase], self._rates)

    def _carried(self, pairs: Sequence[Sequence[tuple[int, int]]]) -> list[float]:
        return self._most_carried(pairs, [self._expected(phase) for phase in pairs])

    def _most_carried(self, phases: Sequence[Sequence[Sequence[int]]], rates: Sequence[Sequence[float]]) -> list[float]:
        """Return the most that each link carried in any phase."""
        most = [0.0] * len(self._rates)
        for phase, each in zip(phases, rates, strict=True):
            now = [0.0] * len(self._rates)
            for stream, rate in zip(phase, each, strict=True):
                for link in self._path(stream):
                    now[link] += rate
            most = [max(pair) for pair in zip(most, now, strict=True)]
        return most

    def _through(self, link: int) -> list[tuple[int, int]]:
        """Return as many streams as it takes to fill a link, or as there may be."""
        vertex = link % len(self._net)
        end = int(self._net.ends[vertex])
        inside = [node for node, v in enumerate(self._vertices) if vertex <= v < end]
        outside = [node for node, v in enumerate(self._vertices) if not vertex <= v < end]
        streams: list[tuple[int, int]] = []
        for number in range(min(_MAX_STREAMS, len(inside) * len(outside))):
            # Every node of the larger side takes part before one of them does twice.
            turn = number // max(len(inside), len(outside))
            pair = inside[number % len(inside)], outside[(number + turn) % len(outside)]
            streams.append(pair if link < len(self._net) else pair[::-1])
            rates = self._expected(streams)
            if sum(rates) >= _FILLED_FRACTION * self._rates[link]:
                break
        return streams

    def _sized(self, phase: Sequence[tuple[int, int]]) -> SurveyPhase:
        sizes = [
            int(min(_MAX_STREAM_BYTES, max(_MIN_STREAM_BYTES, rate * SURVEY_PHASE_S))) for rate in self._expected(phase)
        ]
        return tuple(SurveyStream(src, dst, num_bytes) for (src, dst), num_bytes in zip(phase, sizes, strict=True))


def _typical_fraction(fractions: Sequence[float]) -> float:
    """Return the fraction of the nominal rate that undisturbed streams get: headers take a few per cent."""
    sound = [fraction for fraction in fractions if _SLOW_RATIO < fraction <= 1.0]
    return statistics.median(sound) if sound else 1.0


def _rates_differ(one: float, other: float) -> bool:
    return not 1 / _CHANGED_RATIO <= one / other <= _CHANGED_RATIO
