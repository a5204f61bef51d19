"""Times and memory of stages, by prefix sums: every solver adds up in the same way, so that they agree to the bit."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ringweave.planning.partitioning.problem import Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """What one device gets."""

    device: int
    """From 0."""
    first: int
    """First block, from 1; larger than `last` where the stage is empty."""
    last: int
    """Last block."""
    compute_s: float
    """Predicted time of forward and backward of one microbatch."""
    transfer_s: float
    """Predicted time of what crosses the link into this device for one microbatch."""
    memory: float | None
    """What it holds at its peak; None where no memory was given."""

    @property
    def num_blocks(self) -> int:
        """Zero where it is empty."""
        return self.last - self.first + 1


class Costs:
    """A problem as prefix sums. Cut s lies behind block s; stage (s, j) is the blocks s+1..j. Devices count from 0."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        rows = [_prefix(row) for row in problem.work]
        kinds = problem.kinds or (0,) * problem.num_devices
        lists = [row.tolist() for row in rows]
        self.work = [rows[kind] for kind in kinds]
        self.work_list = [lists[kind] for kind in kinds]
        self.crossing = _crossing(problem)
        self.held = _held(problem)
        by_array = {id(held): held.tolist() for held in self.held}
        self.held_list = [by_array[id(held)] for held in self.held]

    def limit(self, device: int) -> float:
        """Memory of a device; infinite where none was given."""
        memory = self.problem.memory
        return math.inf if memory is None else memory.limit[device]

    def compute_s(self, device: int, s: int, j: int) -> float:
        """Time of the blocks s+1..j on a device."""
        work = self.work[device]
        return float(work[j] - work[s]) / self.problem.capability[device]

    def transfer_s(self, device: int, s: int) -> float:
        """Time of cut s on the link into a device; zero for the first, and where nothing crosses."""
        if not self.problem.bandwidth or device == 0:
            return 0.0
        return float(self.crossing[s]) / self.problem.bandwidth[device - 1]

    def memory(self, device: int, s: int, j: int) -> float:
        """What the blocks s+1..j hold on a device at its peak; zero where no memory was given."""
        return float(self.held[device][j] - self.held[device][s]) if self.held else 0.0

    def fits(self, device: int, s: int, j: int) -> bool:
        """The blocks s+1..j have room on a device."""
        return self.memory(device, s, j) <= self.limit(device)

    def stages(self, splits: Sequence[int]) -> tuple[Stage, ...]:
        """The stages of the partition with these splits."""
        edges = (0, *splits, self.problem.num_blocks)
        return tuple(self._stage(device, s, j) for device, (s, j) in enumerate(itertools.pairwise(edges)))

    def bottleneck_s(self, splits: Sequence[int]) -> float:
        """The largest time of a stage or a cut."""
        return max(max(stage.compute_s, stage.transfer_s) for stage in self.stages(splits))

    def _stage(self, device: int, s: int, j: int) -> Stage:
        return Stage(
            device=device,
            first=s + 1,
            last=j,
            compute_s=self.compute_s(device, s, j),
            transfer_s=self.transfer_s(device, s),
            memory=self.memory(device, s, j) if self.held else None,
        )


def furthest(prefix: np.ndarray, sources: np.ndarray, allowance: float) -> np.ndarray:
    """The last j for each source s with prefix[j] - prefix[s] <= allowance, as that difference is rounded.

    Args:
        prefix: Nondecreasing sums, [n + 1].
        sources: Indices into it, growing.
        allowance: 0 or more, or infinite.

    Returns:
        Indices, nondecreasing, each at least its source.
    """
    at = prefix[sources]
    last = prefix.searchsorted(at + allowance, side="right") - 1
    # The sum above rounds otherwise than the difference does: step back or on where that matters.
    while (over := prefix[last] - at > allowance).any():
        last = last - over
    while (under := prefix[np.minimum(last + 1, len(prefix) - 1)] - at <= allowance)[last < len(prefix) - 1].any():
        last = np.where(under & (last < len(prefix) - 1), last + 1, last)
    return last


def _prefix(values: Sequence[float]) -> np.ndarray:
    return np.concatenate(([0.0], np.cumsum(np.asarray(values, dtype=float))))


def _crossing(problem: Problem) -> np.ndarray:
    """What crosses each cut 0..n: nothing does before the first block and behind the last."""
    crossing = np.zeros(problem.num_blocks + 1)
    if problem.activation:
        crossing[1:-1] = problem.activation[:-1]
    return crossing


def _held(problem: Problem) -> list[np.ndarray]:
    memory = problem.memory
    if memory is None:
        return []
    state, stash = _prefix(memory.state), _prefix(memory.stash)
    by_depth = {depth: state + depth * stash for depth in set(memory.in_flight)}
    return [by_depth[depth] for depth in memory.in_flight]
