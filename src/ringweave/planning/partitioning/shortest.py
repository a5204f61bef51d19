"""The partition of the shortest step for a few microbatches: (microbatches - 1) x bottleneck + sum of compute times.

With a cap on the bottleneck the least sum is a shortest path, and since a stage's time is a difference of prefix sums,
each device takes one minimum over a sliding window. Which cap is best is searched by branch and bound: within an
interval of bottlenecks no step is shorter than (microbatches - 1) x its lower end + the least sum under its upper end.
"""

import math
from dataclasses import dataclass

import numpy as np

from ringweave.planning.partitioning.costs import Costs, furthest
from ringweave.planning.partitioning.probing import allowance


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

    Cost: some tens of passes of O(M n log n).
    """
    more = num_microbatches - 1
    best = _weighed(costs, more, splits)
    intervals = [(best.bottleneck_s, math.inf)]
    while intervals:
        low_s, high_s = intervals.pop()
        cheapest = _cheapest(costs, high_s if math.isinf(high_s) else math.nextafter(high_s, -math.inf))
        if cheapest is None:
            continue
        found = _weighed(costs, more, cheapest)
        best = min(best, found, key=lambda each: each.key)
        if found.bottleneck_s > low_s and more * low_s + found.sum_s <= best.step_s:
            middle_s = (low_s + found.bottleneck_s) / 2
            intervals.append((middle_s, found.bottleneck_s))
            if middle_s < found.bottleneck_s:
                intervals.append((low_s, math.nextafter(middle_s, math.inf)))
    return best.splits


def _weighed(costs: Costs, more: int, splits: tuple[int, ...]) -> _Found:
    bottleneck_s = costs.bottleneck_s(splits)
    sum_s = math.fsum(stage.compute_s for stage in costs.stages(splits))
    return _Found(more * bottleneck_s + sum_s, bottleneck_s, sum_s, splits)


def _cheapest(costs: Costs, cap_s: float) -> tuple[int, ...] | None:
    """Splits of the least sum of compute times among those whose bottleneck is not above the cap."""
    num_blocks, num_devices = costs.problem.num_blocks, costs.problem.num_devices
    cuts = np.arange(num_blocks + 1)
    sums = np.where(cuts == 0, 0.0, math.inf)
    trail = []
    for device in range(num_devices):
        own_s = costs.work[device] / costs.problem.capability[device]
        ahead = np.where(_passes(costs, device, cap_s), sums - own_s, math.inf)
        window = _windows(costs, device, cap_s)
        sums = own_s + _window_min(ahead, *window)
        trail.append((ahead, *window))
    if math.isinf(sums[-1]):
        return None
    splits, j = [], num_blocks
    for ahead, begin, end in reversed(trail[1:]):
        j = int(begin[j] + ahead[begin[j] : end[j]].argmin())
        splits.append(j)
    return tuple(reversed(splits))


def _passes(costs: Costs, device: int, cap_s: float) -> np.ndarray:
    """Which of the cuts 0..n pass the link into a device in time, bool [n + 1]."""
    bandwidth = costs.problem.bandwidth
    if not bandwidth or device == 0:
        return np.ones(len(costs.crossing), dtype=bool)
    return costs.crossing / bandwidth[device - 1] <= cap_s


def _windows(costs: Costs, device: int, cap_s: float) -> tuple[np.ndarray, np.ndarray]:
    """For each cut j, the sources begin..end-1 from which a device does the blocks up to j in time; [n + 1] each."""
    cuts = np.arange(len(costs.crossing))
    last = furthest(costs.work[device], cuts, allowance(cap_s, costs.problem.capability[device]))
    if costs.held:
        last = np.minimum(last, furthest(costs.held[device], cuts, costs.limit(device)))
    end = cuts + (1 if costs.problem.allow_empty else 0)
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
    least = np.minimum(table[level, begin], table[level, np.maximum(end - 2**level, begin)])
    return np.where(lengths > 0, least, math.inf)
