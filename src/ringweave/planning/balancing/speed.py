"""Speed of a rank: seconds as an affine function of the number of samples, estimated from measured train steps."""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ringweave.errors import explain
from ringweave.planning.balancing.memory import MemoryLimit
from ringweave.topology.cgroups import CpuQuota


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """Time that a rank needs for its part of a train step, apart from communication and waiting for others.

    The fixed part is in samples, not in seconds: a slower machine slows down in everything, so only `s_per_sample` has
    to be learnt anew.
    """

    s_per_sample: float
    """Seconds of one more sample; positive."""
    overhead_samples: float = 0.0
    """Fixed work of a step (the update, calling kernels), as the number of samples that take as long."""
    noise: float = 0.0
    """Uncertainty, as a fraction: a smaller gain is no reason for a change."""
    memory: MemoryLimit | None = None
    """Limit beyond which samples take longer, since they are computed in microbatches; None means no limit is known."""

    def __post_init__(self) -> None:
        if not (0 < self.s_per_sample < math.inf and 0 <= self.overhead_samples < math.inf and self.noise >= 0):
            raise ValueError(
                explain(
                    "speed of a rank",
                    got=(self.s_per_sample, self.overhead_samples, self.noise),
                    expected="positive seconds per sample, overhead and noise of zero or more",
                    do="Measure it again",
                )
            )

    def seconds(self, num_samples: float) -> float:
        return self.s_per_sample * (self.overhead_samples + self.work_samples(num_samples))

    def work_samples(self, num_samples: float) -> float:
        """Return the work of a share, as samples that take as long: more than its samples if it is in microbatches."""
        if self.memory is None:
            return num_samples
        return num_samples + self.memory.extra_samples(num_samples, self.overhead_samples)

    def samples_within(self, limit_s: float) -> float:
        """Return the samples that it is predicted to compute in that time; negative if not even the fixed work."""
        found = limit_s / self.s_per_sample - self.overhead_samples
        if self.memory is None or found <= self.memory.whole_samples:
            return found
        low, high = math.floor(self.memory.whole_samples), math.floor(found) + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.seconds(middle) <= limit_s else (low, middle)
        return low

    def to_numbers(self) -> tuple[float, ...]:
        """Return `NUM_SPEED_NUMBERS` floats, for other processes; all are finite."""
        limit = self.memory
        memory = (0.0, 0.0, 0.0) if limit is None else (limit.whole_samples, limit.split_samples, limit.waiting_samples)
        return self.s_per_sample, self.overhead_samples, self.noise, *memory

    @classmethod
    def of_numbers(cls, numbers: Sequence[float]) -> "Speed":
        """Return the speed whose `to_numbers` these are."""
        s_per_sample, overhead, noise, whole, split, waiting = numbers
        memory = MemoryLimit(whole_samples=whole, split_samples=split, waiting_samples=waiting) if whole > 0 else None
        return cls(s_per_sample=s_per_sample, overhead_samples=overhead, noise=noise, memory=memory)


NUM_SPEED_NUMBERS = 6


SPEED_WARM_UP_STEPS = 2
"""The first steps allocate, verify schedules, and rebuild DDP's buckets."""
BLOCK_S = 0.1
"""Shorter steps are put together. The kernel throttles in periods of 40 to 100 ms: a short step takes either nothing of
that or all of it, and the median would be neither."""
BLOCK_STEPS = 4
"""Limit on the steps of a block: a fast rank computes for a small part of each step, and all must have measured."""
MAX_BLOCKS = 15
"""Number of blocks that count at unchanged speed: medians of many are steady."""
_MIN_BLOCKS = 3
"""Number of blocks that are needed, and that must agree on another speed; a stall in one or two is none."""
_SPEED_CHANGE_RATIO = 1.25
"""Distance from the median, on one side, that all of the latest blocks must have for older ones to be forgotten."""
_FEW_BLOCKS_NOISE = 0.5
"""Noise of one block; it is divided by the number of blocks, because few blocks are uncertain even if they agree."""
_SLOWEST_OF_EQUALS_DEVIATIONS = 2.0
"""Apparent lag of the slowest of eight equal ranks with normal noise, in median deviations (1.42 / 0.67): the gain that
giving it less only seems to have."""
_MIN_SHARE_DIFFERENCE = 0.3
"""Fraction by which two shares must differ before the fixed work is inferred from them: noise of a few per cent in the
times would otherwise drown it."""
_MAX_OVERHEAD = 3.0
"""Limit of the overhead, in multiples of the smaller share. It guards the arithmetic: shares are measured again after
each change."""

_CERTAINTY_FACTOR = 2.0
"""Assumed error of measured times, in multiples of their scatter, when the fixed work is inferred."""

StepBlock = tuple[float, float]
"""Samples and seconds, means over the block's steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _ShareTiming:
    """Median time of one share."""

    samples: float
    seconds: float
    scatter: float
    """Median deviation of the times, as a fraction."""


class SpeedEstimator:
    """Learns the speed of one rank from its steps.

    A step of b samples takes s (q + b). At an unchanged share, other times mean another s: the machine has another
    speed. Times before and after a change of the share tell q, the fixed work. Where both happen at once q comes out
    wrong until the next change; the prediction for the present share is right in any case.
    """

    def __init__(self) -> None:
        self._num_steps = 0
        self._open_block: list[tuple[float, float, float]] = []
        self._other_work: deque[float] = deque(maxlen=MAX_BLOCKS)
        """Work besides computing of each block, in samples."""
        self._blocks: deque[StepBlock] = deque(maxlen=MAX_BLOCKS)
        self._overhead_samples = 0.0
        self._previous_share: _ShareTiming | None = None
        self._has_compared = False
        self._speed: Speed | None = None
        """Speed by the complete blocks."""
        self.memory: MemoryLimit | None = None
        """Limit of this rank's memory, once it is measured."""

    def observe(self, num_samples: int, seconds: float, other_work: float = 0.0) -> None:
        """Record one step of this rank.

        Args:
            num_samples: Samples computed; a step without any is ignored.
            seconds: Time for these, without waiting for others.
            other_work: Other processor work, as a multiple of that time: communication takes a throttled rank long.
        """
        self._num_steps += 1
        if self._num_steps <= SPEED_WARM_UP_STEPS or num_samples < 1 or seconds <= 0:
            return
        beside = min(other_work * (self._overhead_samples + num_samples), _MAX_OVERHEAD * num_samples)
        extra = 0.0 if self.memory is None else self.memory.extra_samples(num_samples, self._overhead_samples)
        self._open_block.append((num_samples + extra, seconds, beside))
        samples, times_s, besides = zip(*self._open_block, strict=True)
        if sum(times_s) >= BLOCK_S or len(times_s) >= BLOCK_STEPS:
            self._other_work.append(statistics.fmean(besides))
            self._add_block((statistics.fmean(samples), statistics.fmean(times_s)))
            self._open_block.clear()

    @property
    def speed(self) -> Speed | None:
        """Return the current speed; None before enough steps were observed."""
        return None if self._speed is None else replace(self._speed, memory=self.memory)

    @property
    def recent_s(self) -> tuple[float, ...]:
        """Return the seconds per sample of each counted block; their differences show stalls."""
        return tuple(self._s_per_sample())

    def _add_block(self, block: StepBlock) -> None:
        if self._blocks and block[0] != self._blocks[-1][0]:
            settled = self._share_timing()
            if settled is not None:
                self._previous_share, self._has_compared = settled, False
        self._blocks.append(block)
        self._drop_outdated()
        self._update_overhead()
        self._speed = self._estimate()

    def _estimate(self) -> Speed | None:
        if len(self._blocks) < _MIN_BLOCKS:
            return None
        each_s = self._s_per_sample()
        middle, scatter = _median_and_scatter(each_s)
        return Speed(
            s_per_sample=middle,
            overhead_samples=self._overhead_samples + statistics.median(self._other_work),
            noise=max(_SLOWEST_OF_EQUALS_DEVIATIONS * scatter, _FEW_BLOCKS_NOISE / len(each_s)),
        )

    def _s_per_sample(self) -> list[float]:
        return [seconds / (self._overhead_samples + samples) for samples, seconds in self._blocks]

    def _drop_outdated(self) -> None:
        """Drop measurements from before the speed changed."""
        each_s = self._s_per_sample()
        middle, latest = statistics.median(each_s), each_s[-_MIN_BLOCKS:]
        if len(each_s) > _MIN_BLOCKS and (
            min(latest) > middle * _SPEED_CHANGE_RATIO or max(latest) < middle / _SPEED_CHANGE_RATIO
        ):
            self._blocks = deque(list(self._blocks)[-_MIN_BLOCKS:], maxlen=MAX_BLOCKS)
            self._other_work = deque(list(self._other_work)[-_MIN_BLOCKS:], maxlen=MAX_BLOCKS)

    def _share_timing(self) -> _ShareTiming | None:
        """Return the latest share and its median time, if enough blocks have it."""
        share = self._blocks[-1][0]
        times_s = [seconds for samples, seconds in self._blocks if samples == share]
        if len(times_s) < _MIN_BLOCKS:
            return None
        middle, scatter = _median_and_scatter(times_s)
        return _ShareTiming(samples=share, seconds=middle, scatter=scatter)

    def _update_overhead(self) -> None:
        """Infer the overhead once the new share is settled as well.

        It changes no further than the scatter of the times demands: noise would otherwise be taken for much fixed work,
        or for none.
        """
        after = self._share_timing()
        if (
            self._previous_share is None
            or after is None
            or self._has_compared
            or after.samples == self._previous_share.samples
        ):
            return
        self._has_compared = True
        few, many = sorted((self._previous_share, after), key=lambda settled: settled.samples)
        if many.samples < few.samples * (1 + _MIN_SHARE_DIFFERENCE):
            return
        wrong = 1 + _CERTAINTY_FACTOR * (few.scatter + many.scatter)
        least, most = (_infer_overhead(few, many, factor) for factor in (wrong, 1 / wrong))
        found = min(max(self._overhead_samples, least), most)
        self._overhead_samples = (self._overhead_samples + found) / 2


def _median_and_scatter(values: Sequence[float]) -> tuple[float, float]:
    """The median, and the median deviation from it as a fraction."""
    middle = statistics.median(values)
    return middle, statistics.median(abs(value - middle) for value in values) / middle


def _infer_overhead(few: _ShareTiming, many: _ShareTiming, factor: float) -> float:
    """Return the fixed work, in samples, if the larger share takes so many times as long as the smaller."""
    many_s = many.seconds * factor
    if many_s <= few.seconds:
        return _MAX_OVERHEAD * few.samples
    found = (few.seconds * many.samples - many_s * few.samples) / (many_s - few.seconds)
    return min(max(found, 0.0), _MAX_OVERHEAD * few.samples)


_MAX_EXTRA_PAUSES = 2
"""A rank that has waited has the rest of this period's quota and all of the next one's, and works through both without
a pause; a rank that begins late in a period pauses once more than its work demands."""


def steady_state_s(wall_s: float, processor_s: float, quota: CpuQuota) -> float:
    """Return the seconds that throttled work takes on average.

    The work of a step lasts a few periods, so that its time on the wall says as much about when it began as about the
    work: of eight ranks with equal quotas, some seemed twice as fast as others for many steps (measured). Processor
    time over the quota does not, and consecutive steps take that. Other processes under the quota (loader workers)
    lengthen the wall time, which counts as far as pauses do not explain it.
    """
    doubt_s = _MAX_EXTRA_PAUSES * quota.period_s * max(0.0, 1 - quota.cores)
    return min(max(processor_s / quota.cores, wall_s - doubt_s), wall_s + doubt_s)
