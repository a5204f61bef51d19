"""Bytes on their way between nodes: one stream for each ordered pair of ranks, in order, as on a TCP connection.

A stream moves while there is something to send and the other end has room: what receives are posted for, and what the
kernel keeps beyond that. Streams that move share the links of their routes fairly, at once; between two changes of the
set of streams that move, all rates are constant.
"""

from collections import deque
from collections.abc import Callable, Sequence

from ringweave.cost.sharing import fair_rates
from ringweave.sim.events.clock import Action, Clock
from ringweave.sim.machine import Machine

Told = Callable[[float], None]
"""Called with the time at which a message is there."""


class Stream:
    """From one rank to another; positions are bytes since the beginning."""

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
        """Where the messages end that have not left the sender's node."""
        self.arrivals: list[float] = []
        """When each message is there, in order, as far as it is known."""
        self.awaited: tuple[int, Told] | None = None
        """The message that the receiver waits for."""
        self.leaving: tuple[float, Told] | None = None
        """The position up to which the sender waits for."""
        self.rate = 0.0
        self.since_s = 0.0
        """When `sent` was true."""
        self.version = 0
        self.is_moving = self.is_cut = False

    def limit(self, kept: float) -> float:
        """How far it may move: `kept` is what the receiver's kernel takes ahead."""
        return self.sent if self.is_cut else min(self.queued, self.posted + kept)


class SharedLinks:
    """All streams and the links that they share, each at all links of its route at once."""

    def __init__(self, clock: Clock, capacities: Sequence[float], latency_s: float, machine: Machine) -> None:
        """`capacities` are bytes per second by link."""
        self.carried = [0.0] * len(capacities)
        """Bytes that each link has carried."""
        self._clock = clock
        self._capacities = list(capacities)
        self._latency_s = latency_s
        self._kept, self._ahead = machine.receive_buffer_bytes, machine.send_buffer_bytes
        self._moving_on: list[dict[Stream, None]] = [{} for _ in capacities]
        self._changed: dict[int, None] = {}
        self.note_rate: Callable[[int, float], None] | None = None
        """Told of each link's new load in bytes per second, where somebody wants to know."""

    def stream(self, route: tuple[int, ...], poke: Action) -> Stream:
        """A new one. Nobody is told of bytes, as they flow."""
        return Stream(route)

    def send(self, stream: Stream, num_bytes: float) -> float:
        """Queue a message; returns where it ends."""
        stream.queued += num_bytes
        stream.ends.append(stream.queued)
        self._look(stream)
        return stream.queued

    def post(self, stream: Stream, num_bytes: float) -> None:
        """Make room for the next message."""
        stream.posted += num_bytes
        self._look(stream)

    def when_left(self, stream: Stream, end: float, tell: Told) -> None:
        """Tell when all up to `end` has left the sender's memory, be it into the kernel."""
        self._advance(stream)
        if end - stream.sent <= self._ahead:
            tell(self._clock.now_s)
        else:
            stream.leaving = end - self._ahead, tell
            self._plan(stream)

    def when_there(self, stream: Stream, index: int, tell: Told) -> None:
        """Tell when message number `index` of the stream is there; at once if that is known already."""
        if index < len(stream.arrivals):
            tell(stream.arrivals[index])
        else:
            stream.awaited = index, tell

    def set_capacity(self, link: int, bytes_per_s: float) -> None:
        """From now on the link carries that."""
        self._capacities[link] = bytes_per_s
        self._changed[link] = None

    def cut(self, stream: Stream) -> None:
        """Nothing more moves on it."""
        self._advance(stream)
        stream.is_cut = True
        stream.awaited = stream.leaving = None
        self._look(stream)

    def settle(self) -> None:
        """Share the links anew among the streams that the changes since the last time concern."""
        while self._changed:
            links, streams = self._concerned()
            self._changed.clear()
            rates = fair_rates([stream.route for stream in streams], self._capacities)
            for stream, rate in zip(streams, rates, strict=True):
                if rate != stream.rate:
                    self._advance(stream)
                    stream.rate = rate
                    self._plan(stream)
            if self.note_rate is not None:
                for link in links:
                    self.note_rate(link, sum(stream.rate for stream in self._moving_on[link]))

    def _look(self, stream: Stream) -> None:
        """Whether it moves, after more was queued or posted."""
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
        self._plan(stream)

    def _advance(self, stream: Stream) -> None:
        """Bring `sent` up to now."""
        now_s = self._clock.now_s
        if stream.rate and now_s > stream.since_s:
            self._move_to(stream, min(stream.sent + stream.rate * (now_s - stream.since_s), self._target(stream)))
        stream.since_s = now_s
        self._tell(stream)

    def _move_to(self, stream: Stream, position: float) -> None:
        moved, stream.sent = position - stream.sent, position
        for link in stream.route:
            self.carried[link] += moved

    def _target(self, stream: Stream) -> float:
        """Where something happens next: a message has left, or the sender goes on, or nothing more may move."""
        target = stream.limit(self._kept)
        if stream.ends and stream.ends[0] < target:
            target = stream.ends[0]
        if stream.leaving and stream.sent < stream.leaving[0] < target:
            target = stream.leaving[0]
        return target

    def _plan(self, stream: Stream) -> None:
        """Ask for the time of the next happening; what was asked for before is void."""
        stream.version += 1
        if stream.rate:
            version, target = stream.version, self._target(stream)
            time_s = stream.since_s + (target - stream.sent) / stream.rate
            self._clock.at(time_s, lambda: self._reach(stream, version, target))

    def _reach(self, stream: Stream, version: int, target: float) -> None:
        if version != stream.version:
            return
        self._move_to(stream, target)
        stream.since_s = self._clock.now_s
        self._look(stream)

    def _tell(self, stream: Stream) -> None:
        """Tell of all that was reached."""
        while stream.ends and stream.ends[0] <= stream.sent:
            stream.ends.popleft()
            self._arrive(stream, self._clock.now_s + self._latency_s)
        if stream.leaving and stream.sent >= stream.leaving[0]:
            tell, stream.leaving = stream.leaving[1], None
            tell(self._clock.now_s)

    def _arrive(self, stream: Stream, time_s: float) -> None:
        index = len(stream.arrivals)
        stream.arrivals.append(time_s)
        if stream.awaited and stream.awaited[0] == index:
            tell, stream.awaited = stream.awaited[1], None
            tell(time_s)

    def _concerned(self) -> tuple[list[int], list[Stream]]:
        """The links and streams that are connected with a changed link by streams that move."""
        links, streams = dict.fromkeys(self._changed), dict[Stream, None]()
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
