"""Partition search: the partition with the shortest simulated step, and the block moves that lead to it.

The solver's formulas ignore the waits of a schedule (docs/explanation/pipeline-partition.md), so partitions are
simulated. Where there are few, all are, except those whose lower bound exceeds the best step so far. Otherwise the
search starts from the exact solutions of both formulas and shifts cuts by one block while that shortens the simulated
step.
"""

import bisect
import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from ringweave.planning.partition.problem import PartitionProblem
from ringweave.planning.partition.solve import solve_partition
from ringweave.planning.repartition.pipeline_workload import PipelineConditions, PipelineWorkload
from ringweave.sim.pipeline_simulation import StageDevices


@dataclass(frozen=True, slots=True, order=True)
class BlockMove:
    """Move of one block between two devices; all count from 0."""

    block: int
    src: int
    dst: int


def stage_of(splits: Sequence[int], block: int) -> int:
    """Return the stage that holds a block; both from 0."""
    return bisect.bisect_right(splits, block)


def block_moves(old: Sequence[int], new: Sequence[int], num_blocks: int) -> tuple[BlockMove, ...]:
    """Return all blocks whose stage differs, in order."""
    pairs = ((block, stage_of(old, block), stage_of(new, block)) for block in range(num_blocks))
    return tuple(BlockMove(block, src, dst) for block, src, dst in pairs if src != dst)


def predicted_pause_s(
    workload: PipelineWorkload, moved: Sequence[BlockMove], conditions: PipelineConditions, step_s: float
) -> float:
    """Predict the seconds that training pauses while blocks move.

    Their state is copied while a train step runs, so only time beyond the step counts; then the step's gradients are
    sent. The optimizer's step on the new device is not counted, since the old one makes it as well.

    `conditions`: rates of links; blocks that go further than to the next device load all links between.
    """
    copying_s = _slowest_link_s(workload.state_bytes, moved, conditions.rates)
    return max(0.0, copying_s - step_s) + _slowest_link_s(workload.gradient_bytes, moved, conditions.rates)


def moved_bytes(workload: PipelineWorkload, moved: Sequence[BlockMove]) -> float:
    """Return the state and gradient bytes of the blocks that move; zero if the workload has no sizes."""
    return sum(
        sizes[move.block] for sizes in (workload.state_bytes, workload.gradient_bytes) if sizes for move in moved
    )


def _slowest_link_s(sizes: Sequence[float], moved: Sequence[BlockMove], rates: Sequence[float]) -> float:
    """Return the longest transfer time over the directions of all links; zero if sizes or rates are unknown."""
    if not sizes or not rates:
        return 0.0
    load: dict[tuple[int, bool], float] = {}
    for move in moved:
        for link in range(min(move.src, move.dst), max(move.src, move.dst)):
            key = link, move.src < move.dst
            load[key] = load.get(key, 0.0) + sizes[move.block] / rates[link]
    return max(load.values(), default=0.0)


ACTIONS_PER_S = 200_000
"""Minimum number of actions that Python simulates in a second; it converts a share of the time into simulations."""
_BOUNDS_PER_SIMULATION = 2
"""Partitions that are bounded in the time of one simulation, at least."""
_BOUND_ROUNDING = 1 - 1e-9
"""Relative tolerance of bounds, which add up in another order than a simulation."""

Splits = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SimulatedPartition:
    """A partition and its simulated step."""

    splits: Splits
    step_s: float
    devices: StageDevices | None = None
    """Devices of the stages and their samples; None: one each."""


def simulations_within(workload: PipelineWorkload, seconds: float) -> int:
    """Return how many train steps Python simulates in that time."""
    return int(seconds * ACTIONS_PER_S / (2 * workload.num_devices * workload.num_microbatches))


def search_partitions(
    workload: PipelineWorkload,
    conditions: PipelineConditions,
    current: Splits,
    rejected: Collection[Splits] = (),
    max_simulations: int = 1000,
) -> SimulatedPartition:
    """Return the best partition that is not rejected; of equals the current one, then the one with the least bound.

    Args:
        workload: Blocks and schedule.
        conditions: Speeds and rates.
        current: The running partition; never rejected.
        rejected: Partitions that were tried and missed their prediction.
        max_simulations: Approximate limit on simulated steps; the solutions of the formulas are simulated in any case.

    Cost: where there are few partitions, a bound of each and a simulation of those that may be the best.
    """
    search = _PartitionSearch(workload, conditions, frozenset(rejected) - {current})
    num_all = math.comb(workload.num_blocks - 1, workload.num_stages - 1)
    if num_all <= max_simulations * _BOUNDS_PER_SIMULATION:
        everything = itertools.combinations(range(1, workload.num_blocks), workload.num_stages - 1)
        return search.best_of_all(current, everything, max_simulations)
    starts = [current, *(solve_partition(*asked).splits for asked in _solver_problems(workload, conditions))]
    best = search.best(starts)
    for start in dict.fromkeys([best.splits, *starts]):
        best = min(best, search.climb(start, max_simulations), key=lambda each: each.step_s)
    return best


def search_stages(
    workload: PipelineWorkload,
    conditions: PipelineConditions,
    current: Splits,
    rejected: Collection[tuple[Splits, StageDevices | None]] = (),
    max_simulations: int = 1000,
) -> SimulatedPartition:
    """Return the best partition together with the samples of each stage's devices; as `search_partitions`.

    Samples follow the speeds at the present splits, then at the splits that are best with them, as long as the
    simulated step becomes shorter.
    """
    found = _search_with_devices(workload, conditions, current, rejected, max_simulations)
    while workload.devices is not None:
        devices = workload.rebalanced(found.splits, conditions)
        other = replace(workload, devices=devices)
        if devices == found.devices or (found.splits, devices) in rejected or not other.fits(found.splits):
            break
        better = _search_with_devices(other, conditions, found.splits, rejected, max_simulations)
        if better.step_s >= found.step_s:
            break
        found = better
    return found


def _search_with_devices(
    workload: PipelineWorkload,
    conditions: PipelineConditions,
    current: Splits,
    rejected: Collection[tuple[Splits, StageDevices | None]],
    max_simulations: int,
) -> SimulatedPartition:
    """Search with the workload's own devices and samples."""
    refused = {splits for splits, devices in rejected if devices == workload.devices}
    found = search_partitions(workload, conditions, current, refused, max_simulations)
    return replace(found, devices=workload.devices)


class _PartitionSearch:
    """Simulates partitions, each at most once."""

    def __init__(self, workload: PipelineWorkload, conditions: PipelineConditions, rejected: frozenset[Splits]) -> None:
        self._workload, self._conditions, self._rejected = workload, conditions, rejected
        self._step_s: dict[Splits, float] = {}

    def best(self, among: Iterable[Splits]) -> SimulatedPartition:
        """Return the best of the allowed partitions; the first has to be allowed."""
        allowed = [splits for splits in dict.fromkeys(among) if splits not in self._rejected]
        allowed = [splits for place, splits in enumerate(allowed) if place == 0 or self._workload.fits(splits)]
        return min(
            (SimulatedPartition(splits, self._simulated_s(splits)) for splits in allowed), key=lambda each: each.step_s
        )

    def best_of_all(self, current: Splits, among: Iterable[Splits], max_simulations: int) -> SimulatedPartition:
        """Return the best of the current partition and the allowed ones, skipping those that cannot be the best.

        The most promising ones come first, so that the ones left out at the limit are unlikely to be the best.
        """
        best = SimulatedPartition(current, self._simulated_s(current))
        allowed = (splits for splits in among if splits not in self._rejected and self._workload.fits(splits))
        for bound_s, splits in sorted((self._bound_s(splits), splits) for splits in allowed):
            if bound_s >= best.step_s or len(self._step_s) > max_simulations:
                break
            best = min(best, SimulatedPartition(splits, self._simulated_s(splits)), key=lambda each: each.step_s)
        return best

    def climb(self, start: Splits, max_simulations: int) -> SimulatedPartition:
        """Climb from a partition to better neighbours, until none is better or the limit is reached."""
        found = (
            SimulatedPartition(start, math.inf)
            if start in self._rejected
            else SimulatedPartition(start, self._simulated_s(start))
        )
        while len(self._step_s) < max_simulations:
            better = self.best([found.splits, *_neighbour_splits(found.splits)]) if found.step_s < math.inf else found
            if better.step_s >= found.step_s:
                break
            found = better
        return found

    def _bound_s(self, splits: Splits) -> float:
        times = self._workload.times(splits, self._conditions)
        return times.bound_s(self._workload.num_microbatches) * _BOUND_ROUNDING

    def _simulated_s(self, splits: Splits) -> float:
        if splits not in self._step_s:
            self._step_s[splits] = self._workload.step_s(splits, self._conditions)
        return self._step_s[splits]


def _solver_problems(
    workload: PipelineWorkload, conditions: PipelineConditions
) -> list[tuple[PartitionProblem, int | None]]:
    """Return the solver's problems: either objective, and slower links too, since a schedule waits for them."""
    problem = workload.problem(conditions)
    problems: list[tuple[PartitionProblem, int | None]] = [(problem, None), (problem, workload.num_microbatches)]
    if problem.activation and problem.bandwidth:
        slower = replace(problem, activation=tuple(2 * each for each in problem.activation))
        problems += [(slower, None), (slower, workload.num_microbatches)]
    return problems


def _neighbour_splits(splits: Splits) -> list[Splits]:
    """Return partitions with one cut shifted by one block, or two adjacent cuts by one in the same direction."""
    found = []
    for first in range(len(splits)):
        for end in (first + 1, first + 2):
            for by in (-1, 1):
                if end <= len(splits):
                    moved = tuple(cut + by for cut in splits[first:end])
                    found.append((*splits[:first], *moved, *splits[end:]))
    return found
