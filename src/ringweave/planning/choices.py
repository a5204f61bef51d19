"""How a message of some size is run: the schedule, and how finely it is pipelined."""

import math
from dataclasses import dataclass

from ringweave.cost import Demand
from ringweave.schedules.programs import Pipelining

MIN_PIECE_BYTES = 16 * 10**3
MAX_PIECE_BYTES = 1500 * 10**3
MAX_SEGMENTS = 128
MAX_WINDOW = 64
"""Each receive that is posted ahead may need a buffer of a piece's size."""
_IN_FLIGHT = 8
_NUM_TRIED = 12
_AS_GOOD = 1.02
"""Where streams meet, the finest pieces are taken that are not predicted to cost more than that: coarse streams starve
each other, which the prediction does not know (docs/log.md)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One way to run a message."""

    schedule: str
    """A name of `schedules.NAMES`."""
    num_segments: int
    """Segments that run the schedule independently."""
    lag: int
    """Rounds by which a segment trails the one before it in the order of waiting; with 0 a round ends for all segments
    before the next one is waited for."""
    window: int
    """Receives that are posted ahead."""
    predicted_s: float
    """Predicted time; infinite where nothing was predicted."""

    @property
    def pipelining(self) -> Pipelining:
        """How the message is cut in time, for those who compile programs."""
        return Pipelining(num_segments=self.num_segments, lag=self.lag, window=self.window)


def pipelined(name: str, asked: Demand, num_bytes: int) -> Choice:
    """The pipelining of the least predicted time, with pieces of 16 kB to 1.5 MB and at most 128 segments.

    Segments always overlap, about eight of them at a time. Small pieces that go round the peers also keep the streams
    that meet at a link even: that, more than the overlap, is what measurements show (docs/log.md). The window holds
    what two segments receive. Inside one node pieces have the size that the plan's assumptions say.
    """
    largest = asked.largest_piece * num_bytes
    lag = max(1, math.ceil(asked.num_rounds / _IN_FLIGHT))
    if asked.num_latencies:
        few, many = _limited(math.ceil(largest / MAX_PIECE_BYTES)), _limited(int(largest / MIN_PIECE_BYTES))
        ratio = (max(few, many) / few) ** (1 / (_NUM_TRIED - 1))
        counts = sorted({round(few * ratio**power) for power in range(_NUM_TRIED)})
    else:
        counts = [_limited(round(largest / asked.local_piece_bytes))]
    times = {count: asked.predicted_s(num_bytes, num_segments=count, lag=lag) for count in counts}
    as_good_s = min(times.values()) * (_AS_GOOD if asked.streams_meet else 1)
    best = max(count for count in counts if times[count] <= as_good_s)
    window = max(2, min(MAX_WINDOW, 2 * asked.num_receives))
    return Choice(schedule=name, num_segments=best, lag=lag, window=window, predicted_s=times[best])


def _limited(num_segments: int) -> int:
    return max(1, min(MAX_SEGMENTS, num_segments))
