"""The partition of the shortest step for a few microbatches: (microbatches - 1) x bottleneck + sum of compute times.

With a cap on the bottleneck the least sum is a shortest path, and since a stage's time is a difference of prefix sums,
each device takes one minimum over a sliding window. Which cap is best is searched by branch and bound: within an
interval of bottlenecks no step is shorter than (microbatches - 1) x its lower end + the least sum under its upper end.
"""

import bisect
import itertools
import math
from dataclasses import dataclass

import numpy as np

from ringweave.planning.partitioning.costs import Costs, furthest
from ringweave.planning.partitioning.probing import allowance, earliest

_ROUNDING = 1 + 1e-9
"""Sums that are compared were added up in other orders."""


@dataclass(frozen=True, slots=True)
class _Found:
    """A partition, ordered by the rule for ties."""

    step_s: float
    bottleneck_s: float
    sum_s: float
    splits: tuple[int, ...]

    @property
    def key(self) -> tuple[float, float, tuple[int, ...]]:
        return self.step_s, self.bottleneck_s, self.splits[::-1]


def least_step(costs: Costs, num_microbatches: int, splits: tuple[int, ...]) -> tuple[int, ...]:
    """Splits of the least step; of several the one with the least bottleneck, then the smallest from the last on.

    Args:
        costs: Of a problem that has a partition.
        num_microbatches: 1 or more.
        splits: A partition of the least bottleneck, to start from.

    Cost: some ten passes of O(M n log n); near to the least bottleneck few of the n cuts are looked at.
    """
    more = num_microbatches - 1
    best = _weighed(costs, more, splits)
    # Bottlenecks from the first up to the second, and what no sum of compute times there is below.
    intervals = [(best.bottleneck_s, math.inf, 0.0)]
    while intervals:
        low_s, high_s, least_sum_s = intervals.pop()
        if more:
            high_s = min(high_s, (best.step_s - least_sum_s) / more * _ROUNDING)
        cap_s = high_s if math.isinf(high_s) else math.nextafter(high_s, -math.inf)
        cheapest = _cheapest(costs, cap_s) if low_s <= cap_s else None
        if cheapest is None:
            continue
        found = _weighed(costs, more, cheapest)
        best = min(best, found, key=lambda each: each.key)
        if found.bottleneck_s > low_s:
            middle_s = (low_s + found.bottleneck_s) / 2
            intervals.append((middle_s, found.bottleneck_s, found.sum_s))
            if middle_s < found.bottleneck_s:
                intervals.append((low_s, math.nextafter(middle_s, math.inf), found.sum_s))
    return best.splits


def _weighed(costs: Costs, more: int, splits: tuple[int, ...]) -> _Found:
    bottleneck_s = costs.bottleneck_s(splits)
    sum_s = math.fsum(stage.compute_s for stage in costs.stages(splits))
    return _Found(more * bottleneck_s + sum_s, bottleneck_s, sum_s, splits)


def _cheapest(costs: Costs, cap_s: float) -> tuple[int, ...] | None:
    """Splits of the least sum of compute times among those whose bottleneck is not above the cap."""
    bands = _bands(costs, cap_s)
    if bands is None:
        return None
    sums = np.zeros(1)
    trail = []
    for device, (before, behind) in enumerate(itertools.pairwise(bands)):
        own_s = costs.work[device] / costs.problem.capability[device]
        ahead = np.where(_passes(costs, device, cap_s, before), sums - own_s[before], math.inf)
        window = _windows(costs, device, cap_s, before, behind)
        sums = own_s[behind] + _window_min(ahead, *window)
        trail.append((ahead, *window))
    if math.isinf(sums[-1]):
        return None
    splits, j = [], costs.problem.num_blocks
    for device in range(costs.problem.num_devices - 1, 0, -1):
        ahead, begin, end = trail[device]
        place = j - bands[device + 1].start
        j = bands[device].start + int(begin[place] + ahead[begin[place] : end[place]].argmin())
        splits.append(j)
    return tuple(reversed(splits))


def _bands(costs: Costs, cap_s: float) -> list[slice] | None:
    """For each number of devices the cuts that they may reach in time and the others finish from; None: there are none.

    Links and memory are not looked at: they only make it fewer.
    """
    num_blocks = costs.problem.num_blocks
    allowances = [allowance(cap_s, capability) for capability in costs.problem.capability]
    last, first = [0], [num_blocks]
    for work, allowed in zip(costs.work_list, allowances, strict=True):
        last.append(min(num_blocks, bisect.bisect_right(work, work[last[-1]] + allowed)))
    for work, allowed in zip(reversed(costs.work_list), reversed(allowances), strict=True):
        first.append(earliest(work, first[-1], allowed))
    bands = [slice(begin, end + 1) for begin, end in zip(reversed(first), last, strict=True)]
    return bands if all(band.start < band.stop for band in bands) and first[-1] == 0 else None


def _passes(costs: Costs, device: int, cap_s: float, cuts: slice) -> np.ndarray:
    """Which of the cuts pass the link into a device in time, bool [cuts]."""
    bandwidth = costs.problem.bandwidth
    if not bandwidth or device == 0:
        return np.ones(cuts.stop - cuts.start, dtype=bool)
    return costs.crossing[cuts] / bandwidth[device - 1] <= cap_s


def _windows(costs: Costs, device: int, cap_s: float, before: slice, behind: slice) -> tuple[np.ndarray, np.ndarray]:
    """For each cut behind a device, the places begin..end-1 before it from which its blocks are done in time."""
    sources = np.arange(before.start, before.stop)
    last = furthest(costs.work[device], sources, allowance(cap_s, costs.problem.capability[device]))
    if costs.held:
        last = np.minimum(last, furthest(costs.held[device], sources, costs.limit(device)))
    cuts = np.arange(behind.start, behind.stop)
    end = cuts - (before.start - (1 if costs.problem.allow_empty else 0))
    end = np.minimum(np.maximum(end, 0), len(sources))
    return np.minimum(last.searchsorted(cuts), end), end


def _window_min(values: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """The least of values[begin:end] for each pair; infinite where there is none. By minima of spans of 2^k."""
    lengths = end - begin
    levels = [values]
    while 2 ** len(levels) <= lengths.max(initial=0):
        half, below = 2 ** (len(levels) - 1), levels[-1]
        levels.append(np.concatenate((np.minimum(below[:-half], below[half:]), below[-half:])))
    table = np.array(levels)
    level = np.frexp(np.maximum(lengths, 1))[1] - 1
    first = np.minimum(begin, len(values) - 1)
    least = np.minimum(table[level, first], table[level, np.maximum(end - 2**level, first)])
    return np.where(lengths > 0, least, math.inf)
