"""Fluid model of the network: one in-order stream per ordered pair of ranks, all links shared max-min fairly.

A stream moves while it has bytes to send and the receiver has room: posted receives, and the kernel's buffer beyond
them. Moving streams share the links of their routes fairly, at once; between two changes of the set of moving streams
all rates are constant.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from statistics import NormalDist

from ringweave.cost.network import max_min_fair_rates
from ringweave.sim.scenario import HostModel

Callback = Callable[[], None]


class VirtualClock:
    """Event queue by time; events of equal time run in the order in which they were added."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callback]] = []
        self._num_asked = 0

    def call_at(self, time_s: float, action: Callback) -> None:
        """Run an action at a time, now at the earliest; never if the time is infinite."""
        if time_s < math.inf:
            self._num_asked += 1
            heapq.heappush(self._events, (max(time_s, self.now_s), self._num_asked, action))

    def run(self, settle: Callback) -> None:
        """Run all events; `settle` is called each time before time advances, and may add events."""
        settle()
        while self._events:
            time_s, _, action = heapq.heappop(self._events)
            self.now_s = time_s
            action()
            if not self._events or self._events[0][0] > time_s:
                settle()


TimeCallback = Callable[[float], None]
"""Called with the time at which a message has arrived or left."""


class FluidStream:
    """Stream from one rank to another; positions are bytes since the beginning."""

    __slots__ = (
        "arrivals",
        "awaited",
        "ends",
        "is_cut",
        "is_moving",
        "leaving",
        "posted",
        "queued",
        "rate",
        "route",
        "sent",
        "since_s",
        "version",
    )

    def __init__(self, route: tuple[int, ...]) -> None:
        self.route = route
        self.queued = self.posted = self.sent = 0.0
        self.ends: deque[float] = deque()
        """End positions of the messages that have not left the sender's node."""
        self.arrivals: list[float] = []
        """Arrival time of each message, in order, as far as known."""
        self.awaited: tuple[int, TimeCallback] | None = None
        """Message that the receiver waits for."""
        self.leaving: tuple[float, TimeCallback] | None = None
        """Position that the sender waits for."""
        self.rate = 0.0
        self.since_s = 0.0
        """Time at which `sent` was updated."""
        self.version = 0
        self.is_moving = self.is_cut = False

    def limit(self, kept: float) -> float:
        """Return the position up to which it may move; `kept` is the size of the receiver's kernel buffer."""
        return self.sent if self.is_cut else min(self.queued, self.posted + kept)


class FluidNetwork:
    """All streams and the links that they share; a stream uses all links of its route at once."""

    def __init__(self, clock: VirtualClock, capacities: Sequence[float], latency_s: float, machine: HostModel) -> None:
        """`capacities` are bytes per second by link."""
        self.carried = [0.0] * len(capacities)
        """Bytes that each link has carried."""
        self._clock = clock
        self._capacities = list(capacities)
        self._latency_s = latency_s
        self._kept, self._ahead = machine.receive_buffer_bytes, machine.send_buffer_bytes
        self._moving_on: list[dict[FluidStream, None]] = [{} for _ in capacities]
        self._changed: dict[int, None] = {}
        self.note_rate: Callable[[int, float], None] | None = None
        """Called with each link's new load in bytes per second, if set."""

    def open_stream(self, route: tuple[int, ...], on_burst: Callback) -> FluidStream:
        """Open a stream; `on_burst` is never called, as bytes flow continuously."""
        return FluidStream(route)

    def send_message(self, stream: FluidStream, num_bytes: float) -> float:
        """Queue a message; return its end position."""
        stream.queued += num_bytes
        stream.ends.append(stream.queued)
        self._update_motion(stream)
        return stream.queued

    def post_receive(self, stream: FluidStream, num_bytes: float) -> None:
        """Make room for the next message."""
        stream.posted += num_bytes
        self._update_motion(stream)

    def when_sent(self, stream: FluidStream, end: float, tell: TimeCallback) -> None:
        """Call back when everything up to `end` has left the sender's memory, also if it is in the kernel's buffer."""
        self._advance(stream)
        if end - stream.sent <= self._ahead:
            tell(self._clock.now_s)
        else:
            stream.leaving = end - self._ahead, tell
            self._schedule_next(stream)

    def when_arrived(self, stream: FluidStream, index: int, tell: TimeCallback) -> None:
        """Call back when message number `index` has arrived; at once if its time is known already."""
        if index < len(stream.arrivals):
            tell(stream.arrivals[index])
        else:
            stream.awaited = index, tell

    def set_capacity(self, link: int, bytes_per_s: float) -> None:
        """Set the rate of a link from now on."""
        self._capacities[link] = bytes_per_s
        self._changed[link] = None

    def close_stream(self, stream: FluidStream) -> None:
        """Stop all transfers of a stream."""
        self._advance(stream)
        stream.is_cut = True
        stream.awaited = stream.leaving = None
        self._update_motion(stream)

    def settle(self) -> None:
        """Recompute the rates of the streams that changes since the last call affect."""
        while self._changed:
            links, streams = self._affected()
            self._changed.clear()
            rates = max_min_fair_rates([stream.route for stream in streams], self._capacities)
            for stream, rate in zip(streams, rates, strict=True):
                if rate != stream.rate:
                    self._advance(stream)
                    stream.rate = rate
                    self._schedule_next(stream)
            if self.note_rate is not None:
                for link in links:
                    self.note_rate(link, sum(stream.rate for stream in self._moving_on[link]))

    def _update_motion(self, stream: FluidStream) -> None:
        """Update whether the stream moves, after more was queued or posted."""
        self._advance(stream)
        may_move = stream.limit(self._kept) > stream.sent
        if may_move != stream.is_moving:
            stream.is_moving = may_move
            stream.rate = 0.0
            for link in stream.route:
                if may_move:
                    self._moving_on[link][stream] = None
                else:
                    del self._moving_on[link][stream]
                self._changed[link] = None
        self._schedule_next(stream)

    def _advance(self, stream: FluidStream) -> None:
        """Advance `sent` to the current time."""
        now_s = self._clock.now_s
        if stream.rate and now_s > stream.since_s:
            self._move_to(stream, min(stream.sent + stream.rate * (now_s - stream.since_s), self._target(stream)))
        stream.since_s = now_s
        self._report_reached(stream)

    def _move_to(self, stream: FluidStream, position: float) -> None:
        moved, stream.sent = position - stream.sent, position
        for link in stream.route:
            self.carried[link] += moved

    def _target(self, stream: FluidStream) -> float:
        """Return the position of the next event: a message has left, the sender resumes, or the stream must stop."""
        target = stream.limit(self._kept)
        if stream.ends and stream.ends[0] < target:
            target = stream.ends[0]
        if stream.leaving and stream.sent < stream.leaving[0] < target:
            target = stream.leaving[0]
        return target

    def _schedule_next(self, stream: FluidStream) -> None:
        """Schedule the next event; an earlier schedule becomes void."""
        stream.version += 1
        if stream.rate:
            version, target = stream.version, self._target(stream)
            time_s = stream.since_s + (target - stream.sent) / stream.rate
            self._clock.call_at(time_s, lambda: self._on_reached(stream, version, target))

    def _on_reached(self, stream: FluidStream, version: int, target: float) -> None:
        if version != stream.version:
            return
        self._move_to(stream, target)
        stream.since_s = self._clock.now_s
        self._update_motion(stream)

    def _report_reached(self, stream: FluidStream) -> None:
        """Report all positions that were reached."""
        while stream.ends and stream.ends[0] <= stream.sent:
            stream.ends.popleft()
            self._record_arrival(stream, self._clock.now_s + self._latency_s)
        if stream.leaving and stream.sent >= stream.leaving[0]:
            tell, stream.leaving = stream.leaving[1], None
            tell(self._clock.now_s)

    def _record_arrival(self, stream: FluidStream, time_s: float) -> None:
        index = len(stream.arrivals)
        stream.arrivals.append(time_s)
        if stream.awaited and stream.awaited[0] == index:
            tell, stream.awaited = stream.awaited[1], None
            tell(time_s)

    def _affected(self) -> tuple[list[int], list[FluidStream]]:
        """Return the links and streams that are connected with a changed link by moving streams."""
        links, streams = dict.fromkeys(self._changed), dict[FluidStream, None]()
        waiting = list(links)
        while waiting:
            for stream in self._moving_on[waiting.pop()]:
                if stream not in streams:
                    streams[stream] = None
                    for link in stream.route:
                        if link not in links:
                            links[link] = None
                            waiting.append(link)
        return list(links), list(streams)


MAX_BURSTS_AT_SENDER = 2
"""Bursts of a stream in the queue of its first link; further bursts wait in the stream, so that streams of a node take
turns. Linux does the same ("TCP small queues")."""
UNEVEN_BURSTS_AT_SENDER = 8
"""Average number of such bursts where turns are uneven."""
_SAME_RATE_RATIO = 0.9
"""Measured rates whose ratio is at least this count as equal."""


class BurstyStream:
    """Stream from one rank to another; positions are bytes since the beginning."""

    __slots__ = (
        "arrivals",
        "awaited",
        "delivered",
        "ends",
        "is_cut",
        "leaving",
        "num_at_sender",
        "on_burst",
        "place",
        "posted",
        "queued",
        "route",
        "sent",
        "turn",
    )

    def __init__(self, route: tuple[int, ...], poke: Callback) -> None:
        self.route, self.on_burst = route, poke
        self.queued = self.posted = self.sent = self.delivered = 0.0
        self.ends: deque[float] = deque()
        """End positions of the messages that have not arrived."""
        self.arrivals: list[float] = []
        """Arrival time of each message, in order, as far as known."""
        self.awaited: tuple[int, TimeCallback] | None = None
        """Message that the receiver waits for."""
        self.leaving: tuple[float, TimeCallback] | None = None
        """Position that the sender waits for."""
        self.num_at_sender = 0
        """Bursts in the queue of the first link."""
        self.place: int | None = None
        """Index among the streams that end with the same link, in the order of their first posted receive."""
        self.turn: int | None = None
        """Index among the streams that begin with the same link."""
        self.is_cut = False


class _QueuedLink:
    """A link with its queue and the burst that it carries now."""

    __slots__ = ("bytes_per_s", "carried", "credit", "left", "since_s", "version", "waiting")

    def __init__(self, bytes_per_s: float, credit: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.credit = credit
        """Bytes that pass at once."""
        self.carried = 0.0
        self.waiting: deque[tuple[BurstyStream, int, float]] = deque()
        """Stream, index of this link in its route, bytes; the link carries the first one now."""
        self.left = 0.0
        """Bytes of the first one that were not carried by `since_s`."""
        self.since_s = 0.0
        """Time of the last update, or when the link became idle."""
        self.version = 0


class QueuedNetwork:
    """All streams, and the links in whose queues their bursts wait."""

    def __init__(self, clock: VirtualClock, capacities: Sequence[float], latency_s: float, machine: HostModel) -> None:
        """`capacities` are bytes per second by link."""
        self.note_rate: Callable[[int, float], None] | None = None
        """Called with each link's new load in bytes per second, if set."""
        self._clock = clock
        self._latency_s = latency_s
        self._machine = machine
        self._links = [_QueuedLink(rate, machine.bucket_bytes) for rate in capacities]
        self._num_into = [0] * len(self._links)
        """Number of streams with a posted receive that end with each link."""
        self._num_from = [0] * len(self._links)
        """Number of such streams that begin with each link."""

    @property
    def carried(self) -> list[float]:
        return [link.carried for link in self._links]

    def open_stream(self, route: tuple[int, ...], on_burst: Callback) -> BurstyStream:
        """Open a stream; `on_burst` is called whenever a burst arrives."""
        return BurstyStream(route, on_burst)

    def send_message(self, stream: BurstyStream, num_bytes: float) -> float:
        """Queue a message; return its end position."""
        stream.queued += num_bytes
        stream.ends.append(stream.queued)
        self._send_bursts(stream)
        return stream.queued

    def post_receive(self, stream: BurstyStream, num_bytes: float) -> None:
        """Make room for the next message."""
        if stream.place is None:
            stream.place = self._num_into[stream.route[-1]]
            self._num_into[stream.route[-1]] += 1
            stream.turn = self._num_from[stream.route[0]]
            self._num_from[stream.route[0]] += 1
        stream.posted += num_bytes
        self._send_bursts(stream)

    def when_sent(self, stream: BurstyStream, end: float, tell: TimeCallback) -> None:
        """Call back when everything up to `end` has left the sender's memory, also if it is in the kernel's buffer."""
        if end - stream.delivered <= self._machine.send_buffer_bytes:
            tell(self._clock.now_s)
        else:
            stream.leaving = end - self._machine.send_buffer_bytes, tell

    def when_arrived(self, stream: BurstyStream, index: int, tell: TimeCallback) -> None:
        """Call back when message number `index` has arrived; at once if its time is known already."""
        if index < len(stream.arrivals):
            tell(stream.arrivals[index])
        else:
            stream.awaited = index, tell

    def set_capacity(self, link: int, bytes_per_s: float) -> None:
        """Set the rate of a link from now on."""
        changed, now_s = self._links[link], self._clock.now_s
        if changed.waiting:
            changed.left -= changed.bytes_per_s * (now_s - changed.since_s)
            changed.since_s, changed.bytes_per_s = now_s, bytes_per_s
            self._schedule_end(link)
        changed.bytes_per_s = bytes_per_s

    def close_stream(self, stream: BurstyStream) -> None:
        """Stop all transfers of a stream; its bursts in switches are dropped there."""
        stream.is_cut = True
        stream.awaited = stream.leaving = None

    def settle(self) -> None:
        """Do nothing: no update is deferred."""

    def _send_bursts(self, stream: BurstyStream) -> None:
        """Send as many bursts as may be in flight."""
        machine = self._machine
        limit = min(stream.queued, stream.posted + machine.receive_buffer_bytes)
        window_bytes, max_at_sender = self._window(stream), self._max_bursts_at_sender(stream)
        while (
            stream.sent < limit
            and stream.num_at_sender < max_at_sender
            and stream.sent - stream.delivered < window_bytes
            and not stream.is_cut
        ):
            size = min(machine.burst_bytes, limit - stream.sent)
            stream.sent += size
            stream.num_at_sender += 1
            self._enqueue_burst(stream, 0, size)

    def _window(self, stream: BurstyStream) -> float:
        """Return the bytes that a stream may have in flight."""
        machine = self._machine
        if not machine.unevenness or stream.place is None:
            return machine.window_bytes
        score = normal_scores(self._num_into[stream.route[-1]])[stream.place]
        return machine.window_bytes * math.exp(machine.unevenness * score)

    def _max_bursts_at_sender(self, stream: BurstyStream) -> int:
        """Return the limit of its bursts in the queue of its node's link; streams with a higher limit leave faster.

        Streams take even turns where the link that they end with is as slow as the one that they leave by, as in
        schedules on equal nodes; where it is faster, nothing evens them out.
        """
        machine, first, last = self._machine, stream.route[0], stream.route[-1]
        count = self._num_from[first]
        if not machine.uneven_turns or stream.turn is None or count == 1:
            return MAX_BURSTS_AT_SENDER
        if self._links[first].bytes_per_s >= _SAME_RATE_RATIO * self._links[last].bytes_per_s:
            return MAX_BURSTS_AT_SENDER
        place = (stream.turn + int(self._clock.now_s / machine.redeal_s)) % count
        return max(1, round(UNEVEN_BURSTS_AT_SENDER * math.exp(machine.uneven_turns * normal_scores(count)[place])))

    def _enqueue_burst(self, stream: BurstyStream, place: int, size: float) -> None:
        number = stream.route[place]
        link = self._links[number]
        link.waiting.append((stream, place, size))
        if len(link.waiting) == 1:
            idle_s = self._clock.now_s - link.since_s
            link.credit = min(self._machine.bucket_bytes, link.credit + idle_s * link.bytes_per_s)
            self._start_burst(number, size)
            self._report_load(number)

    def _start_burst(self, number: int, size: float) -> None:
        link = self._links[number]
        at_once = min(size, link.credit)
        link.credit -= at_once
        link.left, link.since_s = size - at_once, self._clock.now_s
        self._schedule_end(number)

    def _schedule_end(self, number: int) -> None:
        """Schedule the end of the burst that the link carries now; an earlier schedule becomes void."""
        link = self._links[number]
        link.version += 1
        if link.bytes_per_s > 0:
            version = link.version
            self._clock.call_at(
                link.since_s + link.left / link.bytes_per_s, lambda: self._finish_burst(number, version)
            )

    def _finish_burst(self, number: int, version: int) -> None:
        """Finish a burst on a link: it enters the next link, or arrives."""
        link = self._links[number]
        if version != link.version:
            return
        stream, place, size = link.waiting.popleft()
        link.carried += size
        if link.waiting:
            self._start_burst(number, link.waiting[0][2])
        else:
            link.since_s = self._clock.now_s
            self._report_load(number)
        if stream.is_cut:
            return
        if place + 1 < len(stream.route):
            self._enqueue_burst(stream, place + 1, size)
        else:
            self._deliver_burst(stream, size)
        if place == 0:
            stream.num_at_sender -= 1
        self._send_bursts(stream)

    def _deliver_burst(self, stream: BurstyStream, size: float) -> None:
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
            stream.on_burst()

    def _report_load(self, number: int) -> None:
        if self.note_rate is not None:
            link = self._links[number]
            self.note_rate(number, link.bytes_per_s if link.waiting else 0.0)


@cache
def normal_scores(count: int) -> tuple[float, ...]:
    """Return the expected values of `count` sorted draws from the standard normal distribution, shuffled.

    The result is always the same, so that simulations are reproducible. The first `count` multiples of the golden
    ratio, modulo one, define the shuffle, so that neighbours differ.

    Source: G. Blom, Statistical Estimates and Transformed Beta-Variables, 1958: (i - 3/8) / (n + 1/4).
    """
    shuffled = sorted(range(count), key=lambda place: (place + 1) * (5**0.5 - 1) / 2 % 1)
    scores = {place: NormalDist().inv_cdf((i + 0.625) / (count + 0.25)) for i, place in enumerate(shuffled)}
    return tuple(scores[place] for place in range(count))
