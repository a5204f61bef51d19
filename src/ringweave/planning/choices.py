"""How a message of some size is run: the schedule, and how finely it is pipelined."""

import math
from dataclasses import dataclass

from ringweave.cost import Demand

MIN_PIECE_BYTES = 256 * 10**3
MAX_PIECE_BYTES = 1500 * 10**3
LOCAL_PIECE_BYTES = 10**6
"""Inside one node."""
MAX_SEGMENTS = 64
MAX_WINDOW = 64
"""Each receive that is posted ahead may need a buffer of a piece's size."""
_IN_FLIGHT = 4
_WORTH_OVERLAPPING = 1.02
_NUM_TRIED = 8


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


def pipelined(name: str, asked: Demand, num_bytes: int) -> Choice:
    """The pipelining of the least predicted time, with pieces of 256 kB to 1.5 MB and at most 64 segments.

    Segments overlap (lag above 0) only where that is predicted to save 2 %: that is where the phases of a schedule load
    different links, or different directions. Then about four segments are in flight. The window holds what two segments
    receive. These are starting values: a run measures better ones.
    """
    largest = asked.largest_piece * num_bytes
    if not asked.num_latencies:
        counts = [_limited(round(largest / LOCAL_PIECE_BYTES))]
    else:
        few, many = _limited(math.ceil(largest / MAX_PIECE_BYTES)), _limited(int(largest / MIN_PIECE_BYTES))
        ratio = (max(few, many) / few) ** (1 / (_NUM_TRIED - 1))
        counts = sorted({round(few * ratio**power) for power in range(_NUM_TRIED)})
    overlapping = max(1, math.ceil(asked.num_rounds / _IN_FLIGHT))
    best: tuple[float, Choice] | None = None
    for lag in (0, overlapping):
        for count in counts:
            predicted_s = asked.predicted_s(num_bytes, num_segments=count, lag=lag)
            compared_s = predicted_s * (_WORTH_OVERLAPPING if lag else 1)
            if best is None or compared_s < best[0]:
                best = (
                    compared_s,
                    Choice(
                        schedule=name, num_segments=count, lag=lag, window=_window(asked, lag), predicted_s=predicted_s
                    ),
                )
    assert best is not None
    return best[1]


def _window(asked: Demand, lag: int) -> int:
    ahead = 2 * (asked.num_receives if lag else asked.receives_in_a_round)
    return max(2, min(MAX_WINDOW, ahead))


def _limited(num_segments: int) -> int:
    return max(1, min(MAX_SEGMENTS, num_segments))
