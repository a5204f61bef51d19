"""The best partition: least bottleneck, or least step for a few microbatches.

Ties: of all partitions that attain the least, the one whose splits are smallest, compared from the last to the first.
So later stages are filled first; under 1F1B they hold fewer activations than the earlier ones.
"""

import math
from dataclasses import dataclass

import numpy as np

from ringweave.errors import UsageError, explain
from ringweave.planning.partitioning.costs import Costs, Stage
from ringweave.planning.partitioning.infeasible import explain_no_room
from ringweave.planning.partitioning.probing import Prober
from ringweave.planning.partitioning.problem import Problem
from ringweave.planning.partitioning.shortest import least_step


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """A partition and what it is predicted to take."""

    splits: tuple[int, ...]
    """Last blocks, from 1, of all stages but the last."""
    stages: tuple[Stage, ...]
    """One for each device, in their order."""
    bottleneck_s: float
    """Predicted: the largest time of a stage or a cut."""
    predicted_step_s: float
    """Predicted: (microbatches - 1) x bottleneck + sum of the stages' times; the bottleneck where no number of
    microbatches was given, which is the time per microbatch of a step with many."""


def solve(problem: Problem, num_microbatches: int | None = None) -> Partition:
    """The partition of the least bottleneck; with a number of microbatches, that of the least step.

    The step is (microbatches - 1) x bottleneck + sum of the stages' compute times. It is a formula: the time that a
    schedule takes, with its waits, is simulated by `ringweave.sim.pipelines`.

    Raises:
        UsageError: No partition fits into the devices' memory, or a number of microbatches below 1.

    Cost: for the bottleneck some 20 probes; for the step about as many passes of O(M n log n).

    Source: `docs/decisions/0014-partition.md`.
    """
    if num_microbatches is not None and num_microbatches < 1:
        do = "Give how many a step is cut into"
        raise UsageError(explain("microbatches", got=num_microbatches, expected="1 or more", do=do))
    costs = Costs(problem)
    splits = least_bottleneck(costs)
    if splits is None:
        raise UsageError(explain_no_room(costs))
    if num_microbatches is not None:
        splits = least_step(costs, num_microbatches, splits)
    return assessed(problem, splits, num_microbatches)


def assessed(problem: Problem, splits: tuple[int, ...], num_microbatches: int | None = None) -> Partition:
    """What a given partition is predicted to take; whether it fits into memory is not looked at."""
    costs = Costs(problem)
    stages, bottleneck_s = costs.stages(splits), costs.bottleneck_s(splits)
    step_s = bottleneck_s
    if num_microbatches is not None:
        step_s = (num_microbatches - 1) * bottleneck_s + math.fsum(stage.compute_s for stage in stages)
    return Partition(splits=splits, stages=stages, bottleneck_s=bottleneck_s, predicted_step_s=step_s)


def least_bottleneck(costs: Costs) -> tuple[int, ...] | None:
    """Splits of the least bottleneck; None where nothing fits into memory.

    Narrows the interval of times that may be the least. Its ends are times of stages or cuts: a partition that was
    found lowers the upper end to its own bottleneck, a time that is too short lifts the lower one to the next that
    lets anything more through. When they meet, the upper one is the least, exactly.
    """
    prober = Prober(costs)
    low_s = limit_s = _at_least(costs)
    high_s = math.inf
    while low_s < high_s:
        probe = prober.probe(limit_s)
        if probe.splits is not None:
            high_s = costs.bottleneck_s(probe.splits)
        elif math.isinf(probe.next_s):
            return None
        else:
            low_s = max(low_s, probe.next_s)
        limit_s = _between(low_s, high_s)
    return prober.probe(high_s).splits


def _between(low_s: float, high_s: float) -> float:
    """The next time to try; upwards in large steps as long as none was long enough."""
    if math.isinf(high_s):
        return low_s * 1.125
    return min((low_s + high_s) / 2, math.nextafter(high_s, -math.inf))


def _at_least(costs: Costs) -> float:
    """A time that no bottleneck is below: all work spread evenly, and every block on the device that is best for it."""
    problem = costs.problem
    work = np.diff(costs.work, axis=1)
    spread_s = float(work.min(axis=0).sum()) / math.fsum(problem.capability)
    alone_s = float((work / np.array(problem.capability)[:, None]).min(axis=0).max())
    # The rounding of other orders of summing must not lift it above the least.
    return max(spread_s, alone_s) * (1 - 1e-9)
