"""Rings cut where speeds really differ: the best borders in the line of workers, and how many rings there should be."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ringweave.errors import TrainingError, explain

MIN_GAIN = 0.1
"""New rings cost a stop, and speeds are known to a few per cent: they must be predicted to be this much faster."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """What is known beside the speeds. Both must not depend on anything else."""

    exchange_s: Callable[[int, int], float]
    """(workers of a ring, number of rings) -> seconds of a round that are not computing: the allreduce in the ring, the
    exchange with the server whose link all rings share, the broadcast."""
    efficiency: Callable[[int], float]
    """Number of rings -> what a sample is worth beside one of synchronous training (1.0): gradients of k rings are
    k - 1 versions old."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grouping:
    """Rings, and what they are predicted to do together."""

    rings: tuple[tuple[int, ...], ...]
    """Workers of each ring, the fastest ring first."""
    rounds_per_s: float
    """Predicted: over all rings the rounds of a worker in a second, each weighed by `efficiency`."""


def split(round_s: Sequence[float], model: Model, num_rings: int | None = None) -> Grouping:
    """The rings with the highest predicted throughput.

    Each worker computes the same number of samples in a round, and a ring is as fast as its slowest member. Rings of
    neighbours in the order of speed are enough: other rings of the same sizes have maxima that are no smaller.

    Args:
        round_s: Seconds in which each worker computes its part of a round; infinite for one that takes no part.
        model: What is known beside the speeds.
        num_rings: How many there shall be; None searches for the best number.

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
            explain(
                "rings",
                got=num_rings,
                expected=f"1 to {len(line)}, the workers that have reported",
                do="Choose fewer rings, or use more workers",
            )
        )
    return max((_best_cut(line, count, model) for count in numbers), key=lambda found: found.rounds_per_s)


def throughput(rings: Sequence[Sequence[int]], round_s: Sequence[float], model: Model) -> float:
    """Predicted rounds of a worker in a second, over all rings, weighed by the efficiency."""
    each = [
        len(ring) / (max(round_s[worker] for worker in ring) + model.exchange_s(len(ring), len(rings)))
        for ring in rings
    ]
    return math.fsum(each) * model.efficiency(len(rings))


def _best_cut(line: Sequence[tuple[float, int]], count: int, model: Model) -> Grouping:
    """The best borders for that many rings, by dynamic programming over (rings so far, workers so far)."""
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
    return Grouping(rings=tuple(reversed(rings)), rounds_per_s=best[num_workers] * model.efficiency(count))
