"""Partition solver: the partition with the least bottleneck, or with the shortest step for a few microbatches.

Ties: of all partitions that attain the least, the solver takes the one with the smallest splits, compared from the
last to the first. Later stages are thus filled first; under 1F1B they hold fewer activations than earlier ones.
"""

import bisect
import itertools
import math
from dataclasses import dataclass

import numpy as np

from ringweave.errors import UsageError, explain
from ringweave.planning.partition.problem import PartitionCosts, PartitionProblem, PartitionStage, last_within

_FIXES = "give the devices more memory, hold fewer microbatches in flight"


def explain_infeasible(costs: PartitionCosts) -> str:
    """Return the error text for a problem without a partition."""
    return _explain_large_block(costs) or _explain_small_device(costs) or _explain_full_devices(costs)


def _explain_large_block(costs: PartitionCosts) -> str | None:
    """Explain a block that no device can hold even alone."""
    devices = range(costs.problem.num_devices)
    for block in range(1, costs.problem.num_blocks + 1):
        spare = [costs.limit(device) - costs.memory(device, block - 1, block) for device in devices]
        best = int(np.argmax(spare))
        if spare[best] < 0:
            return explain(
                f"memory of block {block}",
                got=costs.memory(best, block - 1, block),
                expected=f"at most {costs.limit(best):.10g}, what device {best + 1} has, the one with most to spare",
                do=f"Cut block {block} finer, give the devices more memory, or hold fewer microbatches in flight",
            )
    return None


def _explain_small_device(costs: PartitionCosts) -> str | None:
    """Explain a device that can hold no block though each has to get one."""
    if costs.problem.allow_empty:
        return None
    blocks = range(1, costs.problem.num_blocks + 1)
    for device in range(costs.problem.num_devices):
        smallest = min(blocks, key=lambda block: costs.memory(device, block - 1, block))
        if not costs.fits(device, smallest - 1, smallest):
            return explain(
                f"memory of device {device + 1}",
                got=costs.limit(device),
                expected=f"at least {costs.memory(device, smallest - 1, smallest):.10g} for block {smallest}",
                do="Leave the device out, allow empty stages (--allow-empty), or hold fewer microbatches in flight",
            )
    return None


def _explain_full_devices(costs: PartitionCosts) -> str:
    """Fill all devices one after the other, and explain the first block without a place."""
    cut = 0
    for device in range(costs.problem.num_devices):
        cut = int(last_within(costs.held[device], np.array([cut]), costs.limit(device))[0])
    num_blocks, num_devices = costs.problem.num_blocks, costs.problem.num_devices
    if cut == num_blocks:
        do = f"Allow empty stages (--allow-empty), {_FIXES}, or put the devices in another order"
        return explain(
            "memory of devices",
            got="no way to give each device a block",
            expected=f"blocks that fit devices 1 to {num_devices} in this order",
            do=do,
        )
    need = costs.memory(num_devices - 1, cut, cut + 1)
    return explain(
        "memory of devices",
        got=f"full after block {cut} of {num_blocks}",
        expected=f"room for block {cut + 1} ({need:.10g} on device {num_devices}) and what follows it",
        do=f"Add a device, {_FIXES}, or recompute activations",
    )


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Result of one probed time."""

    splits: tuple[int, ...] | None
    """Splits within the time, the smallest ones, compared from the last to the first; None if there are none."""
    next_s: float
    """Without splits: the next larger time that would let anything more through; else infinite."""


@dataclass(frozen=True, slots=True)
class _DeviceReach:
    """For one device: the cuts that it can begin from, and the cuts that it reaches from them."""

    cuts: np.ndarray
    """Cuts that the device before reaches, ascending."""
    sources: np.ndarray
    """Those of them that pass the link in time."""
    begin: int
    """First of the examined cuts."""
    last_source: np.ndarray
    """For each of these, the last source before it; -1 if there is none."""
    is_reached: np.ndarray
    """True for each cut that is reached."""


class PartitionProber:
    """Answers probes of one problem for many times."""

    def __init__(self, costs: PartitionCosts) -> None:
        self._costs = costs
        problem = costs.problem
        self._min_blocks = 0 if problem.allow_empty else 1
        self._num_blocks, self._num_devices = problem.num_blocks, problem.num_devices

    def probe(self, limit_s: float) -> ProbeResult:
        """Look for a partition within a time.

        Cost: O(M n) at worst; the nearer the time is to the least, the fewer cuts are examined.
        """
        allowances = [max_work_within(limit_s, capability) for capability in self._costs.problem.capability]
        lowest = self._earliest_cuts(allowances)
        cuts = np.zeros(1, dtype=np.intp)
        visits: list[_DeviceReach] = []
        for device, allowed in enumerate(allowances):
            visit = self._reach_of_device(device, cuts, limit_s, allowed, lowest[device + 1])
            visits.append(visit)
            cuts = visit.is_reached.nonzero()[0] + visit.begin
            if not len(cuts):
                return ProbeResult(None, self._next_s(visits, allowances, lowest, limit_s))
        return ProbeResult(self._trace_splits(visits, allowances), math.inf)

    def _earliest_cuts(self, allowances: list[float]) -> list[int]:
        """Return for each device the earliest cut from which it and all later ones could finish; then n."""
        lowest = [self._num_blocks]
        for device in range(self._num_devices - 1, -1, -1):
            lowest.append(first_within(self._costs.work_list[device], lowest[-1], allowances[device]))
        return lowest[::-1]

    def _reach_of_device(
        self, device: int, cuts: np.ndarray, limit_s: float, allowed: float, lowest: int
    ) -> _DeviceReach:
        sources = cuts
        if (transfer_s := self._transfer_s(device, cuts)) is not None:
            sources = cuts[transfer_s <= limit_s]
        if not len(sources):
            return _DeviceReach(cuts, sources, 0, sources, np.zeros(0, dtype=bool))
        work = self._costs.work[device]
        first, final = int(sources[0]), int(sources[-1])
        begin = max(first + self._min_blocks, lowest)
        # One cut beyond what the last source reaches, for the time in which it would be reached.
        end = 2 + bisect.bisect_right(self._costs.work_list[device], float(work[final]) + allowed)
        end = min(end, self._num_blocks + 1 - self._min_blocks * (self._num_devices - 1 - device))
        if begin >= end:
            return _DeviceReach(cuts, sources, begin, sources[:0], np.zeros(0, dtype=bool))
        last_source = _last_source_before(sources, begin - self._min_blocks, end - self._min_blocks)
        is_reached = work[begin:end] - work[last_source] <= allowed
        if self._costs.problem.memory is not None:
            is_reached &= self._has_room(device, begin, last_source)
        return _DeviceReach(cuts, sources, begin, last_source, is_reached)

    def _transfer_s(self, device: int, cuts: np.ndarray) -> np.ndarray | None:
        bandwidth = self._costs.problem.bandwidth
        return self._costs.crossing[cuts] / bandwidth[device - 1] if bandwidth and device else None

    def _has_room(self, device: int, begin: int, last_source: np.ndarray) -> np.ndarray:
        held = self._costs.held[device]
        return held[begin : begin + len(last_source)] - held[last_source] <= self._costs.limit(device)

    def _next_s(self, visits: list[_DeviceReach], allowances: list[float], lowest: list[int], limit_s: float) -> float:
        """Return the least time that lets a cut pass a link, a device reach a cut, or more cuts be kept."""
        times = [math.inf]
        for device, visit in enumerate(visits):
            capability, work = self._costs.problem.capability[device], self._costs.work[device]
            transfer_s = self._transfer_s(device, visit.cuts)
            if transfer_s is not None and len(visit.sources) < len(visit.cuts):
                times.append(float(transfer_s[transfer_s > limit_s].min()))
            missed = ~visit.is_reached
            if self._costs.problem.memory is not None and len(missed):
                missed &= self._has_room(device, visit.begin, visit.last_source)
            if missed.any():
                ends = missed.nonzero()[0]
                beyond = work[ends + visit.begin] - work[visit.last_source[ends]]
                times.append(float(beyond[beyond > allowances[device]].min(initial=math.inf)) / capability)
        for device, (first, after) in enumerate(itertools.pairwise(lowest)):
            if first > 0:
                work = self._costs.work_list[device]
                times.append((work[after] - work[first - 1]) / self._costs.problem.capability[device])
        return min(times)

    def _trace_splits(self, visits: list[_DeviceReach], allowances: list[float]) -> tuple[int, ...]:
        """Trace back from the last block: at each device the earliest source that reaches so far."""
        splits, j = [], self._num_blocks
        for device in range(self._num_devices - 1, 0, -1):
            first = first_within(self._costs.work_list[device], j, allowances[device])
            if self._costs.problem.memory is not None:
                room = first_within(self._costs.held_list[device], j, self._costs.limit(device))
                first = max(first, room)
            sources = visits[device].sources
            j = int(sources[sources.searchsorted(first)])
            splits.append(j)
        return tuple(reversed(splits))


def max_work_within(limit_s: float, capability: float) -> float:
    """Return the most work that, divided by the capability, is not above the limit."""
    work = limit_s * capability
    if work == 0:
        return 0.0
    while work / capability > limit_s:
        work = math.nextafter(work, -math.inf)
    while (more := math.nextafter(work, math.inf)) / capability <= limit_s and more > work:
        work = more
    return work


def first_within(prefix: list[float], j: int, allowed: float) -> int:
    """Return the first s with prefix[j] - prefix[s] <= allowed, as that difference is rounded."""
    first = bisect.bisect_left(prefix, prefix[j] - allowed, 0, j)
    while first > 0 and prefix[j] - prefix[first - 1] <= allowed:
        first -= 1
    while prefix[j] - prefix[first] > allowed:
        first += 1
    return first


def _last_source_before(sources: np.ndarray, begin: int, end: int) -> np.ndarray:
    """Return for each index from begin to end - 1 the last source not above it; the first is not above `begin`."""
    counts = np.zeros(end - begin, dtype=np.intp)
    inside = sources[sources.searchsorted(begin, side="right") : sources.searchsorted(end)]
    counts[inside - begin] = 1
    return sources[counts.cumsum() + (sources.searchsorted(begin, side="right") - 1)]


_SUM_ROUNDING = 1 + 1e-9
"""Relative tolerance for comparing sums that were added up in different orders."""


@dataclass(frozen=True, slots=True)
class _StepPartition:
    """A partition, ordered by the rule for ties."""

    step_s: float
    bottleneck_s: float
    sum_s: float
    splits: tuple[int, ...]

    @property
    def key(self) -> tuple[float, float, tuple[int, ...]]:
        return self.step_s, self.bottleneck_s, self.splits[::-1]


def shortest_step_splits(costs: PartitionCosts, num_microbatches: int, splits: tuple[int, ...]) -> tuple[int, ...]:
    """Return splits of the shortest step; of several the least bottleneck, then the smallest from the last on.

    `num_microbatches`: 1 or more.

    Cost: some ten passes of O(M n log n); near the least bottleneck few of the n cuts are examined.
    """
    more = num_microbatches - 1
    best = _evaluate_step(costs, more, splits)
    # Intervals of bottlenecks, each with a lower bound of the sums of compute times in it.
    intervals = [(best.bottleneck_s, math.inf, 0.0)]
    while intervals:
        low_s, high_s, least_sum_s = intervals.pop()
        if more:
            high_s = min(high_s, (best.step_s - least_sum_s) / more * _SUM_ROUNDING)
        cap_s = high_s if math.isinf(high_s) else math.nextafter(high_s, -math.inf)
        cheapest = _least_sum_splits(costs, cap_s) if low_s <= cap_s else None
        if cheapest is None:
            continue
        found = _evaluate_step(costs, more, cheapest)
        best = min(best, found, key=lambda each: each.key)
        if found.bottleneck_s > low_s:
            middle_s = (low_s + found.bottleneck_s) / 2
            intervals.append((middle_s, found.bottleneck_s, found.sum_s))
            if middle_s < found.bottleneck_s:
                intervals.append((low_s, math.nextafter(middle_s, math.inf), found.sum_s))
    return best.splits


def _evaluate_step(costs: PartitionCosts, more: int, splits: tuple[int, ...]) -> _StepPartition:
    bottleneck_s = costs.bottleneck_s(splits)
    sum_s = math.fsum(stage.compute_s for stage in costs.stages(splits))
    return _StepPartition(more * bottleneck_s + sum_s, bottleneck_s, sum_s, splits)


def _least_sum_splits(costs: PartitionCosts, cap_s: float) -> tuple[int, ...] | None:
    """Return splits of the least sum of compute times among those whose bottleneck is not above the cap."""
    bands = _reachable_cuts(costs, cap_s)
    if bands is None:
        return None
    sums = np.zeros(1)
    trail = []
    for device, (before, behind) in enumerate(itertools.pairwise(bands)):
        own_s = costs.work[device] / costs.problem.capability[device]
        ahead = np.where(_passes_link(costs, device, cap_s, before), sums - own_s[before], math.inf)
        window = _source_windows(costs, device, cap_s, before, behind)
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


def _reachable_cuts(costs: PartitionCosts, cap_s: float) -> list[slice] | None:
    """Return for each device count the cuts reachable in time from both ends; None: there are none.

    Links and memory are ignored: they only reduce the cuts.
    """
    num_blocks = costs.problem.num_blocks
    allowances = [max_work_within(cap_s, capability) for capability in costs.problem.capability]
    last, first = [0], [num_blocks]
    for work, allowed in zip(costs.work_list, allowances, strict=True):
        last.append(min(num_blocks, bisect.bisect_right(work, work[last[-1]] + allowed)))
    for work, allowed in zip(reversed(costs.work_list), reversed(allowances), strict=True):
        first.append(first_within(work, first[-1], allowed))
    bands = [slice(begin, end + 1) for begin, end in zip(reversed(first), last, strict=True)]
    return bands if all(band.start < band.stop for band in bands) and first[-1] == 0 else None


def _passes_link(costs: PartitionCosts, device: int, cap_s: float, cuts: slice) -> np.ndarray:
    """Return a mask of the cuts that pass the link into a device in time, bool [cuts]."""
    bandwidth = costs.problem.bandwidth
    if not bandwidth or device == 0:
        return np.ones(cuts.stop - cuts.start, dtype=bool)
    return costs.crossing[cuts] / bandwidth[device - 1] <= cap_s


def _source_windows(
    costs: PartitionCosts, device: int, cap_s: float, before: slice, behind: slice
) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each cut behind a device, the places begin..end-1 before it from which its blocks finish in time."""
    sources = np.arange(before.start, before.stop)
    last = last_within(costs.work[device], sources, max_work_within(cap_s, costs.problem.capability[device]))
    if costs.held:
        last = np.minimum(last, last_within(costs.held[device], sources, costs.limit(device)))
    cuts = np.arange(behind.start, behind.stop)
    end = cuts - (before.start - (1 if costs.problem.allow_empty else 0))
    end = np.minimum(np.maximum(end, 0), len(sources))
    return np.minimum(last.searchsorted(cuts), end), end


def _window_min(values: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return the least of values[begin:end] for each pair; infinite where empty. Uses minima of spans of 2^k."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """A partition and its predicted times."""

    splits: tuple[int, ...]
    """Last blocks, from 1, of all stages but the last."""
    stages: tuple[PartitionStage, ...]
    """One for each device, in their order."""
    bottleneck_s: float
    """Predicted: the largest time of a stage or a cut."""
    predicted_step_s: float
    """Predicted: (microbatches - 1) x bottleneck + sum of the stages' times. Without a number of microbatches: the
    bottleneck, which is the time per microbatch of a step with many."""


def solve_partition(problem: PartitionProblem, num_microbatches: int | None = None) -> Partition:
    """Return the partition of the least bottleneck; with a number of microbatches, that of the shortest step.

    The step is (microbatches - 1) x bottleneck + sum of the stages' compute times. This formula ignores a schedule's
    waits, which `ringweave.sim.pipeline_simulation` simulates.

    Raises:
        UsageError: No partition fits into the devices' memory, or a number of microbatches below 1.

    Cost: for the bottleneck some 20 probes; for the step about as many passes of O(M n log n).

    Source: `docs/decisions/0012-exact-partition.md`.
    """
    if num_microbatches is not None and num_microbatches < 1:
        do = "Give how many a step is cut into"
        raise UsageError("microbatches", got=num_microbatches, expected="1 or more", do=do)
    costs = PartitionCosts(problem)
    splits = least_bottleneck_splits(costs)
    if splits is None:
        raise UsageError(explain_infeasible(costs))
    if num_microbatches is not None:
        splits = shortest_step_splits(costs, num_microbatches, splits)
    return evaluate_partition(problem, splits, num_microbatches)


def evaluate_partition(
    problem: PartitionProblem, splits: tuple[int, ...], num_microbatches: int | None = None
) -> Partition:
    """Return a given partition with its predicted times; memory limits are not checked."""
    costs = PartitionCosts(problem)
    stages, bottleneck_s = costs.stages(splits), costs.bottleneck_s(splits)
    step_s = bottleneck_s
    if num_microbatches is not None:
        step_s = (num_microbatches - 1) * bottleneck_s + math.fsum(stage.compute_s for stage in stages)
    return Partition(splits=splits, stages=stages, bottleneck_s=bottleneck_s, predicted_step_s=step_s)


def least_bottleneck_splits(costs: PartitionCosts) -> tuple[int, ...] | None:
    """Return splits of the least bottleneck; None if nothing fits into memory.

    Narrows the interval of times that may be the least. Its ends are times of stages or cuts: a partition that was
    found lowers the upper end to its own bottleneck, a time that is too short lifts the lower one to the next that
    lets anything more through. When they meet, the upper one is the least, exactly.
    """
    prober = PartitionProber(costs)
    low_s = limit_s = _lower_bound_s(costs)
    high_s = math.inf
    while low_s < high_s:
        probe = prober.probe(limit_s)
        if probe.splits is not None:
            high_s = costs.bottleneck_s(probe.splits)
        elif math.isinf(probe.next_s):
            return None
        else:
            low_s = max(low_s, probe.next_s)
        limit_s = _next_limit_s(low_s, high_s)
    return prober.probe(high_s).splits


def _next_limit_s(low_s: float, high_s: float) -> float:
    """Return the next time to try; upwards in large steps as long as none was long enough."""
    if math.isinf(high_s):
        return low_s * 1.125
    return min((low_s + high_s) / 2, math.nextafter(high_s, -math.inf))


def _lower_bound_s(costs: PartitionCosts) -> float:
    """Return a lower bound of the bottleneck: all work spread evenly, and every block on its best device."""
    problem = costs.problem
    work = np.diff(costs.work, axis=1)
    spread_s = float(work.min(axis=0).sum()) / math.fsum(problem.capability)
    alone_s = float((work / np.array(problem.capability)[:, None]).min(axis=0).max())
    # The rounding of other orders of summing must not lift it above the least.
    return max(spread_s, alone_s) * (1 - 1e-9)
