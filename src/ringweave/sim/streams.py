"""Fluid model of the network: one in-order stream per ordered pair of ranks, all links shared max-min fairly.

A stream moves while it has bytes to send and the receiver has room: posted receives, and the kernel's buffer beyond
them. Moving streams share the links of their routes fairly, at once; between two changes of the set of moving streams
all rates are constant.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence

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
