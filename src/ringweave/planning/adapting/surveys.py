"""A survey: which streams to run at the same time, and what their rates say of each link. Pure.

Nodes send to each other in a few patterns that fill every link once. What each stream should get follows from the
rates that are believed; where it gets less, some link on its way is slower than believed. Which one, the other streams
tell: a link that carried its rate in any pattern is innocent.
"""

import itertools
import statistics
from collections.abc import Iterable, Sequence

from ringweave.cost import Network
from ringweave.cost.sharing import fair_rates
from ringweave.planning.adapting.rulings import Stream

PHASE_S = 0.15
"""How long a stream is meant to take."""
_MIN_BYTES, _MAX_BYTES = 2**17, 2**22
_MAX_EXTRA_PHASES = 8
_MAX_STREAMS = 16
_FULL = 0.9
"""Of its rate: a link that is to carry this much counts as filled."""
_CHANGED = 1.15
"""A link has changed beyond this multiple of its rate, up or down."""
_SLOW, _FAST = 0.8, 1.2

Phase = tuple[Stream, ...]


class Survey:
    """Patterns for a network, and what follows from their rates."""

    def __init__(self, net: Network, nodes: Sequence[str]) -> None:
        """`net` has the rates that are believed, `nodes` the names in the order that streams count in."""
        vertex_of = {name: vertex for vertex, name in enumerate(net.names)}
        self._net = net
        self._vertices = [vertex_of[name] for name in nodes]
        self._rates = [*net.up_bytes_per_s.tolist(), *net.down_bytes_per_s.tolist()]

    def phases(self, only: Sequence[str] = ()) -> tuple[Phase, ...]:
        """Streams of each phase: shifts along the tree, then more streams through links that these leave half empty.

        Args:
            only: Names of links that alone are in question, if any: then each is filled once, and that is all.
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
            if len(pairs) < len(shifts) + _MAX_EXTRA_PHASES and carried[link] < _FULL * self._rates[link]:
                pairs.append(self._through(link))
                carried = self._carried(pairs)
        return tuple(self._sized(phase) for phase in pairs)

    def revised(self, phases: Sequence[Phase], measured: Sequence[float]) -> dict[str, float]:
        """Links whose rate is not the one that is believed, and what they carried, in bytes per second.

        Args:
            phases: What was run.
            measured: Bytes per second of each stream, phase after phase.
        """
        rows = iter(measured)
        seen = [[next(rows) for _ in phase] for phase in phases]
        expected = [self._expected(phase) for phase in phases]
        wanted = itertools.chain.from_iterable(expected)
        usual = _usual([rate / hoped for rate, hoped in zip(measured, wanted, strict=True)])
        seen = [[rate / usual for rate in phase] for phase in seen]
        carried = self._most_carried(phases, seen)
        revised: dict[int, float] = {}
        for phase, rates, hopes in zip(phases, seen, expected, strict=True):
            for stream, rate, hoped in zip(phase, rates, hopes, strict=True):
                links = self._path(stream)
                if rate < _SLOW * hoped:
                    least = min(carried[link] / self._rates[link] for link in links)
                    guilty = [link for link in links if carried[link] / self._rates[link] <= least * 1.05]
                elif rate > _FAST * hoped:
                    guilty = [link for link in links if carried[link] > self._rates[link]]
                else:
                    guilty = []
                revised |= {link: carried[link] for link in guilty if _differ(carried[link], self._rates[link])}
        return {self._name(link): rate for link, rate in sorted(revised.items())}

    def _name(self, link: int) -> str:
        count = len(self._net)
        return self._net.up_name(link) if link < count else self._net.down_name(link - count)

    def _used_links(self) -> list[int]:
        return [link for link in range(len(self._rates)) if self._net.parents[link % len(self._net)] >= 0]

    def _path(self, stream: Iterable[int]) -> list[int]:
        """Links from one node to another."""
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
        return fair_rates([self._path(stream) for stream in phase], self._rates)

    def _carried(self, pairs: Sequence[Sequence[tuple[int, int]]]) -> list[float]:
        return self._most_carried(pairs, [self._expected(phase) for phase in pairs])

    def _most_carried(self, phases: Sequence[Sequence[Sequence[int]]], rates: Sequence[Sequence[float]]) -> list[float]:
        """The most that each link carried in any phase."""
        most = [0.0] * len(self._rates)
        for phase, each in zip(phases, rates, strict=True):
            now = [0.0] * len(self._rates)
            for stream, rate in zip(phase, each, strict=True):
                for link in self._path(stream):
                    now[link] += rate
            most = [max(pair) for pair in zip(most, now, strict=True)]
        return most

    def _through(self, link: int) -> list[tuple[int, int]]:
        """As many streams as it takes to fill a link, or as there may be."""
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
            if sum(rates) >= _FULL * self._rates[link]:
                break
        return streams

    def _sized(self, phase: Sequence[tuple[int, int]]) -> Phase:
        sizes = [int(min(_MAX_BYTES, max(_MIN_BYTES, rate * PHASE_S))) for rate in self._expected(phase)]
        return tuple(Stream(src, dst, num_bytes) for (src, dst), num_bytes in zip(phase, sizes, strict=True))


def _usual(fractions: Sequence[float]) -> float:
    """What streams that nothing is wrong with get of the nominal rate: headers take a few per cent."""
    sound = [fraction for fraction in fractions if _SLOW < fraction <= 1.0]
    return statistics.median(sound) if sound else 1.0


def _differ(one: float, other: float) -> bool:
    return not 1 / _CHANGED <= one / other <= _CHANGED
