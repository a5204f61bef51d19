"""Every partition of a problem tried, all of them at once: what the solvers are held against."""

import functools
import itertools
import math
import random
from collections.abc import Sequence

import numpy as np

from ringweave.planning.partition.problem import PartitionCosts, PartitionMemory, PartitionProblem


def random_problem(rng: random.Random) -> PartitionProblem:
    """At most 12 blocks on at most 5 devices, with everything that a problem may have switched on or off.

    Numbers are whole and capabilities powers of two, so that no sum or quotient rounds, and ties are real ties.
    """
    num_devices = rng.randint(1, 5)
    allow_empty = rng.random() < 0.4
    num_blocks = rng.randint(1 if allow_empty else num_devices, 12)
    num_kinds = rng.choice([1, 1, min(2, num_devices)])
    top = rng.choice([1, 3, 20, 1000])
    return PartitionProblem(
        work=tuple(tuple(rng.randint(rng.choice([0, 1]), top) for _ in range(num_blocks)) for _ in range(num_kinds)),
        kinds=tuple(rng.randrange(num_kinds) for _ in range(num_devices)),
        capability=tuple(rng.choice([0.25, 0.5, 1.0, 2.0, 4.0]) for _ in range(num_devices)),
        activation=tuple(rng.randint(0, 2 * top) for _ in range(num_blocks)) if rng.random() < 0.7 else (),
        bandwidth=tuple(rng.choice([0.5, 1.0, 2.0, 8.0]) for _ in range(num_devices - 1)) if rng.random() < 0.8 else (),
        memory=_memory(rng, num_blocks, num_devices) if rng.random() < 0.5 else None,
        allow_empty=allow_empty,
    )


def _memory(rng: random.Random, num_blocks: int, num_devices: int) -> PartitionMemory:
    state = [rng.randint(0, 9) for _ in range(num_blocks)]
    stash = [rng.randint(0, 3) for _ in range(num_blocks)]
    in_flight = [rng.randint(1, num_devices - device) for device in range(num_devices)]
    most = max(1, sum(state) + sum(stash))
    limit = [rng.randint(most // (2 * num_devices), most) for _ in range(num_devices)]
    return PartitionMemory(limit=tuple(limit), state=tuple(state), stash=tuple(stash), in_flight=tuple(in_flight))


def partitions(problem: PartitionProblem) -> list[tuple[int, ...]]:
    """Splits of all partitions that fit into memory."""
    fitting = _Table(problem)
    return list(map(tuple, fitting.edges[fitting.fits][:, 1:-1].tolist()))


Found = tuple[float, tuple[int, ...]] | None
"""The least time and, by the rule for ties, its splits; None where nothing fits."""


def least(problem: PartitionProblem, num_microbatches: int) -> tuple[Found, Found]:
    """Of the bottleneck, and of the step."""
    table = _Table(problem)
    if not table.fits.any():
        return None, None
    edges, computes = table.edges[table.fits], table.computes[table.fits]
    bottleneck_s = np.maximum(computes.max(axis=1), table.transfers[table.fits].max(axis=1))
    step_s = (num_microbatches - 1) * bottleneck_s + computes.sum(axis=1)
    # `argmin` and the stable `lexsort` both give the first of equals, and rows are in the order of the rule for ties.
    first, shortest = int(bottleneck_s.argmin()), int(np.lexsort((bottleneck_s, step_s))[0])
    return _found(bottleneck_s, edges, first), _found(step_s, edges, shortest)


def _found(seconds: np.ndarray, edges: np.ndarray, row: int) -> Found:
    return float(seconds[row]), tuple(edges[row, 1:-1].tolist())


@functools.cache
def _edges(num_blocks: int, num_devices: int, allow_empty: bool) -> np.ndarray:
    """Of all partitions, [partitions, devices + 1]: 0, splits, n. Smallest first, compared from the last split back."""
    if allow_empty:
        every = itertools.combinations_with_replacement(range(num_blocks + 1), num_devices - 1)
    else:
        every = itertools.combinations(range(1, num_blocks), num_devices - 1)
    ordered = sorted(every, key=lambda splits: splits[::-1])
    return np.array([(0, *splits, num_blocks) for splits in ordered])


class _Table:
    """All partitions of a problem at once. Every sum of blocks is taken anew, none from prefixes as solvers do."""

    def __init__(self, problem: PartitionProblem) -> None:
        self.edges = _edges(problem.num_blocks, problem.num_devices, problem.allow_empty)
        kinds = problem.kinds or (0,) * problem.num_devices
        sums = [_sums(row) for row in problem.work]
        columns = [self._of_stages(sums[kind], device) for device, kind in enumerate(kinds)]
        self.computes = np.stack(columns, axis=1) / np.array(problem.capability)
        """[partitions, devices]."""
        self.transfers = self._transfers(problem)
        """[partitions, devices]: into each of them."""
        self.fits = self._fits(problem)
        """[partitions]."""

    def _of_stages(self, sums: np.ndarray, device: int) -> np.ndarray:
        """What the blocks of a device's stage come to, in each partition."""
        return sums[self.edges[:, device], self.edges[:, device + 1]]

    def _transfers(self, problem: PartitionProblem) -> np.ndarray:
        found = np.zeros((len(self.edges), problem.num_devices))
        if problem.activation and problem.bandwidth:
            crossing = np.array([0.0, *problem.activation[:-1], 0.0])
            found[:, 1:] = crossing[self.edges[:, 1:-1]] / np.array(problem.bandwidth)
        return found

    def _fits(self, problem: PartitionProblem) -> np.ndarray:
        memory = problem.memory
        found = np.ones(len(self.edges), dtype=bool)
        if memory is not None:
            state, stash = _sums(memory.state), _sums(memory.stash)
            for device, (limit, depth) in enumerate(zip(memory.limit, memory.in_flight, strict=True)):
                found &= self._of_stages(state, device) + depth * self._of_stages(stash, device) <= limit
        return found


def _sums(row: Sequence[float]) -> np.ndarray:
    """[n + 1, n + 1]: of the blocks s+1..j."""
    cuts = range(len(row) + 1)
    return np.array([[math.fsum(row[s:j]) for j in cuts] for s in cuts])


def solve_by_recurrence(problem: PartitionProblem) -> tuple[tuple[int, ...], float]:
    """Return splits (last blocks of all stages but the last) and the least bottleneck; () and inf if nothing fits."""
    costs = PartitionCosts(problem)
    num_blocks, num_devices = problem.num_blocks, problem.num_devices
    cuts = range(num_blocks + 1)
    best = np.array([_stage_s_if_fits(costs, 0, 0, j) for j in cuts])
    choices = []
    for device in range(1, num_devices):
        table = np.full((num_blocks + 1, num_blocks + 1), math.inf)
        for j in cuts:
            for s in range(j + 1):
                table[j, s] = max(best[s], costs.transfer_s(device, s), _stage_s_if_fits(costs, device, s, j))
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


def _stage_s_if_fits(costs: PartitionCosts, device: int, s: int, j: int) -> float:
    if (s == j and not costs.problem.allow_empty) or not costs.fits(device, s, j):
        return math.inf
    return costs.compute_s(device, s, j)
