"""The partition whose simulated step is shortest.

The solver's formulas do not know the waits of a schedule (`docs/pipeline-planning.md`), so partitions are simulated:
all where they are few, but for those that no order of a step could make shorter than the best one so far; else the
exact solutions of both formulas, and cuts are shifted by one block as long as that makes the simulated step shorter.
"""

import itertools
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from ringweave.planning.partitioning import Problem, solve
from ringweave.planning.repartitioning.workloads import Conditions, Workload

ACTIONS_PER_S = 200_000
"""Simulated by Python in a second, at least: with it a share of the time becomes a number of simulations."""
_BOUNDS_A_SIMULATION = 2
"""So many partitions are bounded in the time in which one is simulated, at least."""
_ROUNDING = 1 - 1e-9
"""A bound adds up in another order than a simulation does."""

Splits = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A partition and its simulated step."""

    splits: Splits
    step_s: float


def num_simulations(workload: Workload, seconds: float) -> int:
    """Of a train step that Python does in that time."""
    return int(seconds * ACTIONS_PER_S / (2 * workload.num_devices * workload.num_microbatches))


def search(
    workload: Workload,
    conditions: Conditions,
    current: Splits,
    refused: Collection[Splits] = (),
    max_simulations: int = 1000,
) -> Candidate:
    """The best partition that is not refused; of equals the current one, then the one with the least bound.

    Args:
        workload: Blocks and schedule.
        conditions: Speeds and rates.
        current: What runs; never refused.
        refused: Partitions that were tried and did not hold what was predicted of them.
        max_simulations: About so many steps are simulated; the solutions of the formulas in any case.

    Cost: where there are few partitions, a bound of each and a simulation of those that may be the best.
    """
    search = _Search(workload, conditions, frozenset(refused) - {current})
    num_all = math.comb(workload.num_blocks - 1, workload.num_devices - 1)
    if num_all <= max_simulations * _BOUNDS_A_SIMULATION:
        everything = itertools.combinations(range(1, workload.num_blocks), workload.num_devices - 1)
        return search.best_of_all(current, everything, max_simulations)
    starts = [current, *(solve(*asked).splits for asked in _formulas(workload, conditions))]
    best = search.best(starts)
    for start in dict.fromkeys([best.splits, *starts]):
        best = min(best, search.climb(start, max_simulations), key=lambda each: each.step_s)
    return best


class _Search:
    """Partitions that were simulated."""

    def __init__(self, workload: Workload, conditions: Conditions, refused: frozenset[Splits]) -> None:
        self._workload, self._conditions, self._refused = workload, conditions, refused
        self._step_s: dict[Splits, float] = {}

    def best(self, among: Iterable[Splits]) -> Candidate:
        """The best of those that are allowed; the first has to be."""
        allowed = [splits for splits in dict.fromkeys(among) if splits not in self._refused]
        allowed = [splits for place, splits in enumerate(allowed) if place == 0 or self._workload.fits(splits)]
        return min((Candidate(splits, self._simulated_s(splits)) for splits in allowed), key=lambda each: each.step_s)

    def best_of_all(self, current: Splits, among: Iterable[Splits], most: int) -> Candidate:
        """The best of the current one and those that are allowed; what cannot be the best is not simulated.

        Those that may be best come first: should so many have been simulated that thinking ends, the rest is unlikely.
        """
        best = Candidate(current, self._simulated_s(current))
        allowed = (splits for splits in among if splits not in self._refused and self._workload.fits(splits))
        for bound_s, splits in sorted((self._bound_s(splits), splits) for splits in allowed):
            if bound_s >= best.step_s or len(self._step_s) > most:
                break
            best = min(best, Candidate(splits, self._simulated_s(splits)), key=lambda each: each.step_s)
        return best

    def climb(self, start: Splits, most: int) -> Candidate:
        """From a partition to better ones beside it, until none is or so many were simulated."""
        found = Candidate(start, math.inf) if start in self._refused else Candidate(start, self._simulated_s(start))
        while len(self._step_s) < most:
            better = self.best([found.splits, *_neighbours(found.splits)]) if found.step_s < math.inf else found
            if better.step_s >= found.step_s:
                break
            found = better
        return found

    def _bound_s(self, splits: Splits) -> float:
        times = self._workload.times(splits, self._conditions)
        return times.bound_s(self._workload.num_microbatches) * _ROUNDING

    def _simulated_s(self, splits: Splits) -> float:
        if splits not in self._step_s:
            self._step_s[splits] = self._workload.step_s(splits, self._conditions)
        return self._step_s[splits]


def _formulas(workload: Workload, conditions: Conditions) -> list[tuple[Problem, int | None]]:
    """What the solver is asked: either objective, and links as if they were slower, since a schedule waits for them."""
    problem = workload.problem(conditions)
    asked: list[tuple[Problem, int | None]] = [(problem, None), (problem, workload.num_microbatches)]
    if problem.activation and problem.bandwidth:
        slower = replace(problem, activation=tuple(2 * each for each in problem.activation))
        asked += [(slower, None), (slower, workload.num_microbatches)]
    return asked


def _neighbours(splits: Splits) -> list[Splits]:
    """One cut shifted by one block, or two neighbouring cuts by one in the same direction."""
    found = []
    for first in range(len(splits)):
        for end in (first + 1, first + 2):
            for by in (-1, 1):
                if end <= len(splits):
                    moved = tuple(cut + by for cut in splits[first:end])
                    found.append((*splits[:first], *moved, *splits[end:]))
    return found
