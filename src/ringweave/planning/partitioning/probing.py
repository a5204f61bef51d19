"""Whether the blocks can be cut so that no stage and no transfer takes longer than some time.

Device by device the set of reachable cuts is followed: cut j is reachable by device m if some cut s before it is
reachable by the device before, what crosses s passes the link in time, and the blocks s+1..j are done in time and have
room. Taking the furthest cut alone is wrong as soon as cuts differ in what crosses them: it may be the dear one.

Of all sources s of a cut j the last one leaves the fewest blocks, so that a cut is reachable if it is from that one:
one subtraction of prefix sums for each cut. Cuts so early that the remaining devices could not finish, even if
transfers took no time and memory had no end, are left out.
"""

import bisect
import itertools
import math
from dataclasses import dataclass

import numpy as np

from ringweave.planning.partitioning.costs import Costs


@dataclass(frozen=True, slots=True)
class Probe:
    """What was found for one time."""

    splits: tuple[int, ...] | None
    """Those that keep within the time, the smallest ones, compared from the last to the first; None: none do."""
    next_s: float
    """Where none do: the smallest time above this one that would let anything more through; else infinite."""


@dataclass(frozen=True, slots=True)
class _Visit:
    """One device: which cuts it can begin from, and which cuts it reaches from them."""

    cuts: np.ndarray
    """Reachable by the device before, growing."""
    sources: np.ndarray
    """Those of them that pass the link in time."""
    begin: int
    """First of the cuts that were looked at."""
    last_source: np.ndarray
    """For each of these, the last source before it; -1 where there is none."""
    is_reached: np.ndarray
    """Whether it is reached."""


class Prober:
    """Answers for one problem and many times."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        problem = costs.problem
        self._least = 0 if problem.allow_empty else 1
        self._num_blocks, self._num_devices = problem.num_blocks, problem.num_devices

    def probe(self, limit_s: float) -> Probe:
        """Look for a partition within a time.

        Cost: O(M n) at worst; fewer cuts are looked at the nearer the time is to the least.
        """
        allowances = [allowance(limit_s, capability) for capability in self._costs.problem.capability]
        lowest = self._lowest(allowances)
        cuts = np.zeros(1, dtype=np.intp)
        visits: list[_Visit] = []
        for device, allowed in enumerate(allowances):
            visit = self._visit(device, cuts, limit_s, allowed, lowest[device + 1])
            visits.append(visit)
            cuts = visit.is_reached.nonzero()[0] + visit.begin
            if not len(cuts):
                return Probe(None, self._next_s(visits, allowances, lowest, limit_s))
        return Probe(self._traced(visits, allowances), math.inf)

    def _lowest(self, allowances: list[float]) -> list[int]:
        """For each device the earliest cut from which it and all after it could finish; then n."""
        lowest = [self._num_blocks]
        for device in range(self._num_devices - 1, -1, -1):
            lowest.append(earliest(self._costs.work_list[device], lowest[-1], allowances[device]))
        return lowest[::-1]

    def _visit(self, device: int, cuts: np.ndarray, limit_s: float, allowed: float, lowest: int) -> _Visit:
        sources = cuts
        if (transfer_s := self._transfer_s(device, cuts)) is not None:
            sources = cuts[transfer_s <= limit_s]
        if not len(sources):
            return _Visit(cuts, sources, 0, sources, np.zeros(0, dtype=bool))
        work = self._costs.work[device]
        first, final = int(sources[0]), int(sources[-1])
        begin = max(first + self._least, lowest)
        # One cut beyond what the last source reaches, for the time in which it would be reached.
        end = 2 + bisect.bisect_right(self._costs.work_list[device], float(work[final]) + allowed)
        end = min(end, self._num_blocks + 1 - self._least * (self._num_devices - 1 - device))
        if begin >= end:
            return _Visit(cuts, sources, begin, sources[:0], np.zeros(0, dtype=bool))
        last_source = _last_before(sources, begin - self._least, end - self._least)
        is_reached = work[begin:end] - work[last_source] <= allowed
        if self._costs.problem.memory is not None:
            is_reached &= self._has_room(device, begin, last_source)
        return _Visit(cuts, sources, begin, last_source, is_reached)

    def _transfer_s(self, device: int, cuts: np.ndarray) -> np.ndarray | None:
        bandwidth = self._costs.problem.bandwidth
        return self._costs.crossing[cuts] / bandwidth[device - 1] if bandwidth and device else None

    def _has_room(self, device: int, begin: int, last_source: np.ndarray) -> np.ndarray:
        held = self._costs.held[device]
        return held[begin : begin + len(last_source)] - held[last_source] <= self._costs.limit(device)

    def _next_s(self, visits: list[_Visit], allowances: list[float], lowest: list[int], limit_s: float) -> float:
        """The least time in which a link lets a cut pass, a device reaches a cut, or fewer cuts may be left out."""
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

    def _traced(self, visits: list[_Visit], allowances: list[float]) -> tuple[int, ...]:
        """Back from the last block: at each device the earliest source that reaches so far."""
        splits, j = [], self._num_blocks
        for device in range(self._num_devices - 1, 0, -1):
            first = earliest(self._costs.work_list[device], j, allowances[device])
            if self._costs.problem.memory is not None:
                room = earliest(self._costs.held_list[device], j, self._costs.limit(device))
                first = max(first, room)
            sources = visits[device].sources
            j = int(sources[sources.searchsorted(first)])
            splits.append(j)
        return tuple(reversed(splits))


def allowance(limit_s: float, capability: float) -> float:
    """The most work that, divided by the capability, is not above the limit."""
    work = limit_s * capability
    if work == 0:
        return 0.0
    while work / capability > limit_s:
        work = math.nextafter(work, -math.inf)
    while (more := math.nextafter(work, math.inf)) / capability <= limit_s and more > work:
        work = more
    return work


def earliest(prefix: list[float], j: int, allowed: float) -> int:
    """The first s with prefix[j] - prefix[s] <= allowed, as that difference is rounded."""
    first = bisect.bisect_left(prefix, prefix[j] - allowed, 0, j)
    while first > 0 and prefix[j] - prefix[first - 1] <= allowed:
        first -= 1
    while prefix[j] - prefix[first] > allowed:
        first += 1
    return first


def _last_before(sources: np.ndarray, begin: int, end: int) -> np.ndarray:
    """For each index from begin to end - 1 the last source not above it; the first source is not above `begin`."""
    counts = np.zeros(end - begin, dtype=np.intp)
    inside = sources[sources.searchsorted(begin, side="right") : sources.searchsorted(end)]
    counts[inside - begin] = 1
    return sources[counts.cumsum() + (sources.searchsorted(begin, side="right") - 1)]
