"""Queueing model of the network: streams move in bursts from link to link, and each link serves its queue in turn.

`streams` lets all links of a route carry the same bytes at the same time. Here a burst waits in a switch while the next
link is busy, and the sender's link does something else meanwhile. The bytes of a stream in flight are bounded, as by
TCP's window, and so are its bursts in the queue of its own node. Where streams meet whose senders could all send more,
each gets of the link its window's part of all windows. TCP's windows are not alike (`HostModel.unevenness`), which
affects a schedule that needs all streams at the same pace, such as a star. Streams that leave a node whose link is
slower than those they end with take uneven turns (`HostModel.uneven_turns`).
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from statistics import NormalDist

from ringweave.sim.scenario import HostModel
from ringweave.sim.streams import Callback, TimeCallback, VirtualClock

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
        """Bytes that each link has carried."""
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
        """Add a burst to the queue of a link."""
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
