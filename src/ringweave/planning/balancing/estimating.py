"""From measured steps to a rank's speed: medians, so that a stall is no change of speed, over a short past."""

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ringweave.planning.balancing.speeds import Speed

WARM_UP_STEPS = 2
"""The first steps allocate, verify schedules, and rebuild DDP's buckets."""
BLOCK_S = 0.1
"""Steps shorter than this are put together: the kernel throttles in periods of 40 to 100 ms, so that of short steps
each takes either nothing of that or all of it, and their median would be neither."""
BLOCK_STEPS = 4
"""But no more steps than these: a fast rank computes for a small part of each step, and all must have measured."""
WINDOW = 15
"""Blocks that count, as long as the speed stays the same: medians of many are steady."""
_ENOUGH = 3
"""Blocks that are needed, and that must agree to be taken for another speed; a stall in one or two is none."""
_ANOTHER_SPEED = 1.25
"""How far all of the latest blocks must lie on one side of the median for the older ones to be forgotten."""
_DOUBT = 0.5
"""Divided by the number of blocks: what few of them say is not certain, however near they lie to each other."""
_SLOWEST_OF_EQUALS = 2.0
"""Of eight equal ranks with normal noise the slowest seems so many median deviations slower than their mean (1.42 /
0.67); so much is seemingly gained by giving it less."""
_LEAST_APART = 0.3
"""Two shares must differ by this fraction before the fixed work of a step is read off from them: otherwise noise of a
few per cent in the times would drown it."""
_MOST_OVERHEAD = 3.0
"""Overhead in multiples of the smaller share. Guards the arithmetic: shares are measured again after each change."""

_CERTAIN = 2.0
"""So many times their scatter, measured times may be wrong when the fixed work is read off from them."""

Block = tuple[float, float]
"""Samples and seconds, means over its steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Settled:
    """What one share has taken."""

    samples: float
    seconds: float
    scatter: float
    """Median deviation of the times, as a fraction."""


class SpeedEstimator:
    """Learns the speed of one rank from its steps.

    A step of b samples takes s (q + b). At an unchanged share, other times mean another s: the machine has another
    speed. Times before and after a change of the share tell q, the fixed work. Where both happen at once q comes out
    wrong, and is mended after the next change; what is predicted for the present share is right in any case.
    """

    def __init__(self) -> None:
        self._num_seen = 0
        self._unfinished: list[tuple[float, float, float]] = []
        self._outside: deque[float] = deque(maxlen=WINDOW)
        """Work beside computing of each block, in samples."""
        self._recent: deque[Block] = deque(maxlen=WINDOW)
        self._overhead_samples = 0.0
        self._before: _Settled | None = None
        self._has_compared = False
        self._speed: Speed | None = None
        """As the blocks say that are complete."""

    def observe(self, num_samples: int, seconds: float, outside: float = 0.0) -> None:
        """Take in one step of this rank.

        Args:
            num_samples: What it computed; a step without any is left out.
            seconds: How long that took it, without waiting for others.
            outside: What it worked beside that, in multiples of it: communicating takes who is throttled long.
        """
        self._num_seen += 1
        if self._num_seen <= WARM_UP_STEPS or num_samples < 1 or seconds <= 0:
            return
        beside = min(outside * (self._overhead_samples + num_samples), _MOST_OVERHEAD * num_samples)
        self._unfinished.append((num_samples, seconds, beside))
        samples, times_s, besides = zip(*self._unfinished, strict=True)
        if sum(times_s) >= BLOCK_S or len(times_s) >= BLOCK_STEPS:
            self._outside.append(statistics.fmean(besides))
            self._complete((statistics.fmean(samples), statistics.fmean(times_s)))
            self._unfinished.clear()

    @property
    def speed(self) -> Speed | None:
        """The speed by now; None before enough steps were seen."""
        return self._speed

    @property
    def recent_s(self) -> tuple[float, ...]:
        """Seconds of a sample in each of the blocks that count now: how much they differ tells stalls."""
        return tuple(self._each_s())

    def _complete(self, block: Block) -> None:
        if self._recent and block[0] != self._recent[-1][0]:
            settled = self._settled()
            if settled is not None:
                self._before, self._has_compared = settled, False
        self._recent.append(block)
        self._forget()
        self._compare()
        self._speed = self._estimate()

    def _estimate(self) -> Speed | None:
        if len(self._recent) < _ENOUGH:
            return None
        each_s = self._each_s()
        middle, scatter = _middle(each_s)
        return Speed(
            s_per_sample=middle,
            overhead_samples=self._overhead_samples + statistics.median(self._outside),
            noise=max(_SLOWEST_OF_EQUALS * scatter, _DOUBT / len(each_s)),
        )

    def _each_s(self) -> list[float]:
        """Seconds of a sample by each block."""
        return [seconds / (self._overhead_samples + samples) for samples, seconds in self._recent]

    def _forget(self) -> None:
        """Drop what was measured before the speed changed."""
        each_s = self._each_s()
        middle, latest = statistics.median(each_s), each_s[-_ENOUGH:]
        if len(each_s) > _ENOUGH and (min(latest) > middle * _ANOTHER_SPEED or max(latest) < middle / _ANOTHER_SPEED):
            self._recent = deque(list(self._recent)[-_ENOUGH:], maxlen=WINDOW)
            self._outside = deque(list(self._outside)[-_ENOUGH:], maxlen=WINDOW)

    def _settled(self) -> _Settled | None:
        """The latest share and its median time, if there are enough blocks with it."""
        share = self._recent[-1][0]
        times_s = [seconds for samples, seconds in self._recent if samples == share]
        if len(times_s) < _ENOUGH:
            return None
        middle, scatter = _middle(times_s)
        return _Settled(samples=share, seconds=middle, scatter=scatter)

    def _compare(self) -> None:
        """Read the overhead off once the new share is settled as well.

        It is changed no further than the scatter of the times demands: times that lie apart by noise would else be
        taken for much fixed work, or for none.
        """
        after = self._settled()
        if self._before is None or after is None or self._has_compared or after.samples == self._before.samples:
            return
        self._has_compared = True
        few, many = sorted((self._before, after), key=lambda settled: settled.samples)
        if many.samples < few.samples * (1 + _LEAST_APART):
            return
        wrong = 1 + _CERTAIN * (few.scatter + many.scatter)
        least, most = (_overhead(few, many, factor) for factor in (wrong, 1 / wrong))
        found = min(max(self._overhead_samples, least), most)
        self._overhead_samples = (self._overhead_samples + found) / 2


def _middle(values: Sequence[float]) -> tuple[float, float]:
    """The median, and the median deviation from it as a fraction."""
    middle = statistics.median(values)
    return middle, statistics.median(abs(value - middle) for value in values) / middle


def _overhead(few: _Settled, many: _Settled, factor: float) -> float:
    """The fixed work, in samples, if the larger share takes so many times as long as was measured."""
    many_s = many.seconds * factor
    if many_s <= few.seconds:
        return _MOST_OVERHEAD * few.samples
    found = (few.seconds * many.samples - many_s * few.samples) / (many_s - few.seconds)
    return min(max(found, 0.0), _MOST_OVERHEAD * few.samples)
