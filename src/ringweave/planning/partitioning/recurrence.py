"""The recurrence of the patent, word for word: the reference that the fast solver is held against.

    A(j, 1) = T_1(1, j)
    A(j, m) = min over s of max(A(s, m-1), C_m(s), T_m(s+1, j)),   S(j, m) = the s that attains it

with m-1 <= s < j, or 0 <= s <= j where stages may be empty. A stage without room takes infinitely long. Of several s
the smallest attains; so each prefix of blocks is cut at its own optimum, where `solving` keeps to the whole's.

Cost: O(M n^2) time, O(M n) memory.
"""

import math

import numpy as np

from ringweave.planning.partitioning.costs import Costs
from ringweave.planning.partitioning.problem import Problem


def recurrence(problem: Problem) -> tuple[tuple[int, ...], float]:
    """Splits, which are last blocks of all stages but the last, and the least bottleneck; () and inf: nothing fits."""
    costs = Costs(problem)
    num_blocks, num_devices = problem.num_blocks, problem.num_devices
    cuts = range(num_blocks + 1)
    best = np.array([_stage_s(costs, 0, 0, j) for j in cuts])
    choices = []
    for device in range(1, num_devices):
        table = np.full((num_blocks + 1, num_blocks + 1), math.inf)
        for j in cuts:
            for s in range(j + 1):
                table[j, s] = max(best[s], costs.transfer_s(device, s), _stage_s(costs, device, s, j))
        choices.append(table.argmin(axis=1))
        best = table.min(axis=1)
    bottleneck_s = float(best[num_blocks])
    if math.isinf(bottleneck_s):
        return (), bottleneck_s
    splits, j = [], num_blocks
    for chosen in reversed(choices):
        j = int(chosen[j])
        splits.append(j)
    return tuple(reversed(splits)), bottleneck_s


def _stage_s(costs: Costs, device: int, s: int, j: int) -> float:
    if (s == j and not costs.problem.allow_empty) or not costs.fits(device, s, j):
        return math.inf
    return costs.compute_s(device, s, j)
