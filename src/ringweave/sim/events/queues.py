"""Streams of messages that go from link to link in bursts; each link serves what waits for it in turn.

Where `streams` lets all links of a route carry the same bytes at the same time, here a burst waits in a switch while
the next link is busy, and the sender's link does something else meanwhile. How much of a stream is under way is
bounded, as TCP's window bounds it, and so is what it has in the queue of its own node. Where streams meet whose senders
could all send more, each gets of the link what its window is of all windows; TCP's windows are not alike
(`Machine.unevenness`), which a schedule feels that needs them all at the same pace, such as a star. Streams that
leave a node whose link is slower than those they end with take uneven turns (`Machine.uneven_turns`).
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from statistics import NormalDist

from ringweave.sim.events.clock import Action, Clock
from ringweave.sim.events.streams import Told
from ringweave.sim.machine import Machine

MAX_AT_HOME = 2
"""Bursts of a stream that wait for the first link of its route; the others wait in the stream, so that streams of a
node take turns. Linux does the same ("TCP small queues")."""
UNEVEN_AT_HOME = 8
"""Likewise where turns are uneven, on average."""
_NEARLY = 0.9
"""Rates, which are measured, may differ by that much and be the same."""


class BurstyStream:
    """From one rank to another; positions are bytes since the beginning."""

    __slots__ = (
        "arrivals",
        "awaited",
        "delivered",
        "ends",
        "is_cut",
        "leaving",
        "num_at_home",
        "place",
        "poke",
        "posted",
        "queued",
        "route",
        "sent",
        "turn",
    )

    def __init__(self, route: tuple[int, ...], poke: Action) -> None:
        self.route, self.poke = route, poke
        self.queued = self.posted = self.sent = self.delivered = 0.0
        self.ends: deque[float] = deque()
        """Where the messages end that are not there."""
        self.arrivals: list[float] = []
        """When each message is there, in order, as far as it is known."""
        self.awaited: tuple[int, Told] | None = None
        """The message that the receiver waits for."""
        self.leaving: tuple[float, Told] | None = None
        """The position up to which the sender waits for."""
        self.num_at_home = 0
        """Bursts that wait for the first link."""
        self.place: int | None = None
        """Its number among the streams that end with the same link, in the order in which they were first posted."""
        self.turn: int | None = None
        """Likewise among those that begin with the same link."""
        self.is_cut = False


class _Link:
    """What waits for a link, and what it carries now."""

    __slots__ = ("bytes_per_s", "carried", "credit", "left", "since_s", "version", "waiting")

    def __init__(self, bytes_per_s: float, credit: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.credit = credit
        """Bytes that pass at once."""
        self.carried = 0.0
        self.waiting: deque[tuple[BurstyStream, int, float]] = deque()
        """Stream, place of this link in its route, bytes; the first one is being carried."""
        self.left = 0.0
        """Bytes of the first one that were not carried yet at `since_s`."""
        self.since_s = 0.0
        """When that was so, or when the link became idle."""
        self.version = 0


class Queues:
    """All streams, and the links that they wait for."""

    def __init__(self, clock: Clock, capacities: Sequence[float], latency_s: float, machine: Machine) -> None:
        """`capacities` are bytes per second by link."""
        self.note_rate: Callable[[int, float], None] | None = None
        """Told of each link's new load in bytes per second, where somebody wants to know."""
        self._clock = clock
        self._latency_s = latency_s
        self._machine = machine
        self._links = [_Link(rate, machine.bucket_bytes) for rate in capacities]
        self._num_into = [0] * len(self._links)
        """Streams that end with a link, of those that something was posted on."""
        self._num_from = [0] * len(self._links)
        """Likewise those that begin with it."""

    @property
    def carried(self) -> list[float]:
        """Bytes that each link has carried."""
        return [link.carried for link in self._links]

    def stream(self, route: tuple[int, ...], poke: Action) -> BurstyStream:
        """A new one; `poke` is called whenever a burst is there."""
        return BurstyStream(route, poke)

    def send(self, stream: BurstyStream, num_bytes: float) -> float:
        """Queue a message; returns where it ends."""
        stream.queued += num_bytes
        stream.ends.append(stream.queued)
        self._feed(stream)
        return stream.queued

    def post(self, stream: BurstyStream, num_bytes: float) -> None:
        """Make room for the next message."""
        if stream.place is None:
            stream.place = self._num_into[stream.route[-1]]
            self._num_into[stream.route[-1]] += 1
            stream.turn = self._num_from[stream.route[0]]
            self._num_from[stream.route[0]] += 1
        stream.posted += num_bytes
        self._feed(stream)

    def when_left(self, stream: BurstyStream, end: float, tell: Told) -> None:
        """Tell when all up to `end` has left the sender's memory, be it into the kernel."""
        if end - stream.delivered <= self._machine.send_buffer_bytes:
            tell(self._clock.now_s)
        else:
            stream.leaving = end - self._machine.send_buffer_bytes, tell

    def when_there(self, stream: BurstyStream, index: int, tell: Told) -> None:
        """Tell when message number `index` of the stream is there; at once if that is known already."""
        if index < len(stream.arrivals):
            tell(stream.arrivals[index])
        else:
            stream.awaited = index, tell

    def set_capacity(self, link: int, bytes_per_s: float) -> None:
        """From now on the link carries that."""
        changed, now_s = self._links[link], self._clock.now_s
        if changed.waiting:
            changed.left -= changed.bytes_per_s * (now_s - changed.since_s)
            changed.since_s, changed.bytes_per_s = now_s, bytes_per_s
            self._plan(link)
        changed.bytes_per_s = bytes_per_s

    def cut(self, stream: BurstyStream) -> None:
        """Nothing more moves on it; what waits in switches is thrown away there."""
        stream.is_cut = True
        stream.awaited = stream.leaving = None

    def settle(self) -> None:
        """Nothing is put off."""

    def _feed(self, stream: BurstyStream) -> None:
        """Send as many bursts as may be under way."""
        machine = self._machine
        limit = min(stream.queued, stream.posted + machine.receive_buffer_bytes)
        window_bytes, most_at_home = self._window(stream), self._at_home(stream)
        while (
            stream.sent < limit
            and stream.num_at_home < most_at_home
            and stream.sent - stream.delivered < window_bytes
            and not stream.is_cut
        ):
            size = min(machine.burst_bytes, limit - stream.sent)
            stream.sent += size
            stream.num_at_home += 1
            self._enter(stream, 0, size)

    def _window(self, stream: BurstyStream) -> float:
        """What a stream may have under way."""
        machine = self._machine
        if not machine.unevenness or stream.place is None:
            return machine.window_bytes
        score = normal_scores(self._num_into[stream.route[-1]])[stream.place]
        return machine.window_bytes * math.exp(machine.unevenness * score)

    def _at_home(self, stream: BurstyStream) -> int:
        """How many of its bursts may wait for the link of its node: who has more there leaves faster than the others.

        Streams take even turns where the link that they end with is as busy as the one that they leave by, as in
        schedules on equal nodes; where it is faster, nothing evens them out.
        """
        machine, first, last = self._machine, stream.route[0], stream.route[-1]
        count = self._num_from[first]
        if not machine.uneven_turns or stream.turn is None or count == 1:
            return MAX_AT_HOME
        if self._links[first].bytes_per_s >= _NEARLY * self._links[last].bytes_per_s:
            return MAX_AT_HOME
        place = (stream.turn + int(self._clock.now_s / machine.redeal_s)) % count
        return max(1, round(UNEVEN_AT_HOME * math.exp(machine.uneven_turns * normal_scores(count)[place])))

    def _enter(self, stream: BurstyStream, place: int, size: float) -> None:
        """A burst comes to a link."""
        number = stream.route[place]
        link = self._links[number]
        link.waiting.append((stream, place, size))
        if len(link.waiting) == 1:
            idle_s = self._clock.now_s - link.since_s
            link.credit = min(self._machine.bucket_bytes, link.credit + idle_s * link.bytes_per_s)
            self._begin(number, size)
            self._note(number)

    def _begin(self, number: int, size: float) -> None:
        link = self._links[number]
        at_once = min(size, link.credit)
        link.credit -= at_once
        link.left, link.since_s = size - at_once, self._clock.now_s
        self._plan(number)

    def _plan(self, number: int) -> None:
        """Ask for the end of what the link carries now; what was asked for before is void."""
        link = self._links[number]
        link.version += 1
        if link.bytes_per_s > 0:
            version = link.version
            self._clock.at(link.since_s + link.left / link.bytes_per_s, lambda: self._end(number, version))

    def _end(self, number: int, version: int) -> None:
        """A burst has passed a link: it goes on to the next one, or is there."""
        link = self._links[number]
        if version != link.version:
            return
        stream, place, size = link.waiting.popleft()
        link.carried += size
        if link.waiting:
            self._begin(number, link.waiting[0][2])
        else:
            link.since_s = self._clock.now_s
            self._note(number)
        if stream.is_cut:
            return
        if place + 1 < len(stream.route):
            self._enter(stream, place + 1, size)
        else:
            self._deliver(stream, size)
        if place == 0:
            stream.num_at_home -= 1
        self._feed(stream)

    def _deliver(self, stream: BurstyStream, size: float) -> None:
        stream.delivered += size
        now_s = self._clock.now_s
        is_awaited = False
        while stream.ends and stream.ends[0] <= stream.delivered:
            stream.ends.popleft()
            stream.arrivals.append(now_s + self._latency_s)
            if stream.awaited and stream.awaited[0] == len(stream.arrivals) - 1:
                tell, stream.awaited, is_awaited = stream.awaited[1], None, True
                tell(now_s + self._latency_s)
        if stream.leaving and stream.delivered >= stream.leaving[0]:
            tell, stream.leaving = stream.leaving[1], None
            tell(now_s)
        if not is_awaited:
            stream.poke()

    def _note(self, number: int) -> None:
        if self.note_rate is not None:
            link = self._links[number]
            self.note_rate(number, link.bytes_per_s if link.waiting else 0.0)


@cache
def normal_scores(count: int) -> tuple[float, ...]:
    """What so many draws from the standard normal distribution are expected to be, smallest to largest; then shuffled.

    Always the same, so that simulations are; and the first so many multiples of the golden ratio, modulo one, shuffle
    them so that neighbours are not alike.

    Source: G. Blom, Statistical Estimates and Transformed Beta-Variables, 1958: (i - 3/8) / (n + 1/4).
    """
    shuffled = sorted(range(count), key=lambda place: (place + 1) * (5**0.5 - 1) / 2 % 1)
    scores = {place: NormalDist().inv_cdf((i + 0.625) / (count + 0.25)) for i, place in enumerate(shuffled)}
    return tuple(scores[place] for place in range(count))
