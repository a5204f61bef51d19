"""Which blocks change their device between two partitions, and what moving them is predicted to cost."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from ringweave.planning.repartitioning.workloads import Conditions, Workload


@dataclass(frozen=True, slots=True, order=True)
class Move:
    """One block goes from one device to another; all count from 0."""

    block: int
    src: int
    dst: int


def stage_of(splits: Sequence[int], block: int) -> int:
    """The stage that holds a block; both from 0."""
    return bisect.bisect_right(splits, block)


def moves(old: Sequence[int], new: Sequence[int], num_blocks: int) -> tuple[Move, ...]:
    """All blocks whose stage differs, in their order."""
    pairs = ((block, stage_of(old, block), stage_of(new, block)) for block in range(num_blocks))
    return tuple(Move(block, src, dst) for block, src, dst in pairs if src != dst)


def pause_s(workload: Workload, made: Sequence[Move], conditions: Conditions, step_s: float) -> float:
    """Predicted seconds that training stands still while blocks move.

    Their state is copied while a train step runs, so that only what takes longer than the step counts; then the step's
    gradients are sent. What is not counted: the optimizer's step on the new device, which the old one makes as well.

    Args:
        workload: What the blocks hold.
        made: The moves.
        conditions: Rates of links; blocks that go further than to the next device load all links between.
        step_s: Seconds of the step in which the state is copied.
    """
    copying_s = _slowest_s(workload.state_bytes, made, conditions.rates)
    return max(0.0, copying_s - step_s) + _slowest_s(workload.gradient_bytes, made, conditions.rates)


def moved_bytes(workload: Workload, made: Sequence[Move]) -> float:
    """State and gradients of the blocks that move; zero where the workload does not say."""
    return sum(sizes[move.block] for sizes in (workload.state_bytes, workload.gradient_bytes) if sizes for move in made)


def _slowest_s(sizes: Sequence[float], made: Sequence[Move], rates: Sequence[float]) -> float:
    """Of the directions of all links the longest time for what crosses it; zero where sizes or rates are not known."""
    if not sizes or not rates:
        return 0.0
    load: dict[tuple[int, bool], float] = {}
    for move in made:
        for link in range(min(move.src, move.dst), max(move.src, move.dst)):
            key = link, move.src < move.dst
            load[key] = load.get(key, 0.0) + sizes[move.block] / rates[link]
    return max(load.values(), default=0.0)
