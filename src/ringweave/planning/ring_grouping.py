"""Ring grouping: workers of about equal speed form rings, by the order of a speed test or by the best split.

Source of the completion queue: Huang & Yang, "A highly scalable distributed machine learning architecture based on Ring
All-Reduce" (2022), algorithm 1. Two points that the text leaves open are decided here:

- k does not divide N: every ring has N // k workers, and the last one takes the remainder as well.
- A worker never reports: the caller that feeds the queue stops waiting for it (`training.rings`).
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ringweave.errors import TrainingError

MIN_REGROUPING_GAIN = 0.1
"""Predicted gain that new rings must have: they cost a stop, and speeds are known to a few per cent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RingCostModel:
    """Costs besides the speeds. Both functions must not depend on anything else."""

    exchange_s: Callable[[int, int], float]
    """(workers of a ring, number of rings) -> seconds of a round besides computing: the allreduce in the ring, the
    exchange with the server over a link that all rings share, the broadcast."""
    efficiency: Callable[[int], float]
    """Number of rings -> worth of a sample relative to synchronous training (1.0): gradients of k rings are k - 1
    versions old."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RingGrouping:
    """Rings, and their predicted throughput."""

    rings: tuple[tuple[int, ...], ...]
    """Workers of each ring, the fastest ring first."""
    rounds_per_s: float
    """Predicted rounds per second of a worker, summed over all rings, weighted by `efficiency`."""


def split_into_rings(round_s: Sequence[float], model: RingCostModel, num_rings: int | None = None) -> RingGrouping:
    """Return the rings with the highest predicted throughput.

    Each worker computes the same number of samples in a round, and a ring is as fast as its slowest member. Rings of
    neighbours in the order of speed are enough: other rings of the same sizes have maxima that are no smaller.

    Args:
        round_s: Seconds in which each worker computes its part of a round; infinite excludes the worker.
        model: Costs besides the speeds.
        num_rings: Number of rings; None searches for the best number.

    Returns:
        Every worker with a finite time in exactly one ring; among equals the fewest rings.

    Raises:
        TrainingError: There are more rings than workers with a finite time.

    Cost: O(k^2 n^2) for n workers and up to k rings, k = n if it is searched for.
    """
    line = sorted((seconds, worker) for worker, seconds in enumerate(round_s) if math.isfinite(seconds))
    numbers = range(1, len(line) + 1) if num_rings is None else [num_rings]
    if not line or numbers[-1] > len(line) or numbers[0] < 1:
        raise TrainingError(
            "rings",
            got=num_rings,
            expected=f"1 to {len(line)}, the workers that have reported",
            do="Choose fewer rings, or use more workers",
        )
    return max((_best_grouping(line, count, model) for count in numbers), key=lambda found: found.rounds_per_s)


def ring_throughput(rings: Sequence[Sequence[int]], round_s: Sequence[float], model: RingCostModel) -> float:
    """Return the predicted rounds per second of a worker, over all rings, weighted by the efficiency."""
    each = [
        len(ring) / (max(round_s[worker] for worker in ring) + model.exchange_s(len(ring), len(rings)))
        for ring in rings
    ]
    return math.fsum(each) * model.efficiency(len(rings))


def _best_grouping(line: Sequence[tuple[float, int]], count: int, model: RingCostModel) -> RingGrouping:
    """Return the best borders for that many rings, by dynamic programming over (rings so far, workers so far)."""
    num_workers = len(line)
    exchange_s = [0.0, *(model.exchange_s(size, count) for size in range(1, num_workers + 1))]
    best = [0.0] + [-math.inf] * num_workers
    choices: list[list[int]] = []
    for _ in range(count):
        after, chosen = [-math.inf] * (num_workers + 1), [0] * (num_workers + 1)
        for end in range(1, num_workers + 1):
            for begin in range(end):
                value = best[begin] + (end - begin) / (line[end - 1][0] + exchange_s[end - begin])
                if value > after[end]:
                    after[end], chosen[end] = value, begin
        best = after
        choices.append(chosen)
    rings: list[tuple[int, ...]] = []
    end = num_workers
    for chosen in reversed(choices):
        begin = chosen[end]
        rings.append(tuple(worker for _, worker in line[begin:end]))
        end = begin
    return RingGrouping(rings=tuple(reversed(rings)), rounds_per_s=best[num_workers] * model.efficiency(count))


Ring = tuple[int, ...]
"""Workers in the order in which they reported."""


class CompletionQueue:
    """Queue of completions: reports go in, rings come out. Pure, so that tests can try any order of events."""

    def __init__(self, num_workers: int, num_rings: int) -> None:
        if not 1 <= num_rings <= num_workers:
            raise TrainingError(
                "rings",
                got=num_rings,
                expected=f"1 to {num_workers}, one worker in each at least",
                do="Choose fewer rings, or use more workers",
            )
        self._num_workers, self._num_rings = num_workers, num_rings
        self._queue: deque[int] = deque()
        self._reported: set[int] = set()
        self._rings: list[Ring] = []

    @property
    def rings(self) -> tuple[Ring, ...]:
        """Return the rings formed so far, the fastest first."""
        return tuple(self._rings)

    def report(self, worker: int) -> Ring | None:
        """Record that a worker has finished; return the ring that this completes, if it does.

        A second report of a worker changes nothing.

        Raises:
            TrainingError: There is no such worker.
        """
        if not 0 <= worker < self._num_workers:
            expected = f"0 to {self._num_workers - 1}"
            raise TrainingError(
                "worker that reports", got=worker, expected=expected, do="Look into the log of that worker"
            )
        if worker in self._reported:
            return None
        self._reported.add(worker)
        self._queue.append(worker)
        return self._dequeue(self._next_ring_size) if len(self._queue) >= self._next_ring_size else None

    @property
    def _next_ring_size(self) -> int:
        size = self._num_workers // self._num_rings
        is_last = len(self._rings) == self._num_rings - 1
        return self._num_workers - size * (self._num_rings - 1) if is_last else size

    def _dequeue(self, count: int) -> Ring:
        self._rings.append(tuple(self._queue.popleft() for _ in range(count)))
        return self._rings[-1]
