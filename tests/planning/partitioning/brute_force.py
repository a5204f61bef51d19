"""Every partition of a problem tried, in Python's own arithmetic: what the solvers are held against."""

import itertools
import math
import random
from collections.abc import Iterator

from ringweave.planning.partitioning import Memory, Problem


def random_problem(rng: random.Random) -> Problem:
    """At most 12 blocks on at most 5 devices, with everything that a problem may have switched on or off.

    Numbers are whole and capabilities powers of two, so that no sum or quotient rounds, and ties are real ties.
    """
    num_devices = rng.randint(1, 5)
    allow_empty = rng.random() < 0.4
    num_blocks = rng.randint(1 if allow_empty else num_devices, 12)
    num_kinds = rng.choice([1, 1, min(2, num_devices)])
    top = rng.choice([1, 3, 20, 1000])
    return Problem(
        work=tuple(tuple(rng.randint(rng.choice([0, 1]), top) for _ in range(num_blocks)) for _ in range(num_kinds)),
        kinds=tuple(rng.randrange(num_kinds) for _ in range(num_devices)),
        capability=tuple(rng.choice([0.25, 0.5, 1.0, 2.0, 4.0]) for _ in range(num_devices)),
        activation=tuple(rng.randint(0, 2 * top) for _ in range(num_blocks)) if rng.random() < 0.7 else (),
        bandwidth=tuple(rng.choice([0.5, 1.0, 2.0, 8.0]) for _ in range(num_devices - 1)) if rng.random() < 0.8 else (),
        memory=_memory(rng, num_blocks, num_devices) if rng.random() < 0.5 else None,
        allow_empty=allow_empty,
    )


def _memory(rng: random.Random, num_blocks: int, num_devices: int) -> Memory:
    state = [rng.randint(0, 9) for _ in range(num_blocks)]
    stash = [rng.randint(0, 3) for _ in range(num_blocks)]
    in_flight = [rng.randint(1, num_devices - device) for device in range(num_devices)]
    most = max(1, sum(state) + sum(stash))
    limit = [rng.randint(most // (2 * num_devices), most) for _ in range(num_devices)]
    return Memory(limit=tuple(limit), state=tuple(state), stash=tuple(stash), in_flight=tuple(in_flight))


def partitions(problem: Problem) -> Iterator[tuple[int, ...]]:
    """Splits of all partitions that fit into memory."""
    n, m = problem.num_blocks, problem.num_devices
    if problem.allow_empty:
        every = itertools.combinations_with_replacement(range(n + 1), m - 1)
    else:
        every = itertools.combinations(range(1, n), m - 1)
    return (splits for splits in every if _fits(problem, splits))


def least(problem: Problem, num_microbatches: int | None = None) -> tuple[float, tuple[int, ...]] | None:
    """The least bottleneck (or step) and, by the rule for ties, its splits; None where nothing fits."""
    found = min((_key(problem, splits, num_microbatches) for splits in partitions(problem)), default=None)
    return None if found is None else (found[0], found[-1][::-1])


def _key(problem: Problem, splits: tuple[int, ...], num_microbatches: int | None) -> tuple:
    computes, transfers = _times(problem, splits)
    bottleneck_s = max(computes + transfers)
    if num_microbatches is None:
        return bottleneck_s, splits[::-1]
    return (num_microbatches - 1) * bottleneck_s + sum(computes), bottleneck_s, splits[::-1]


def _times(problem: Problem, splits: tuple[int, ...]) -> tuple[list[float], list[float]]:
    edges = [0, *splits, problem.num_blocks]
    computes = []
    for device, (s, j) in enumerate(itertools.pairwise(edges)):
        row = problem.work[problem.kinds[device] if problem.kinds else 0]
        computes.append(math.fsum(row[s:j]) / problem.capability[device])
    transfers = [0.0]
    if problem.activation and problem.bandwidth:
        for device, s in enumerate(splits):
            crossing = problem.activation[s - 1] if 0 < s < problem.num_blocks else 0.0
            transfers.append(crossing / problem.bandwidth[device])
    return computes, transfers


def _fits(problem: Problem, splits: tuple[int, ...]) -> bool:
    memory = problem.memory
    if memory is None:
        return True
    return all(
        sum(memory.state[s:j]) + memory.in_flight[device] * sum(memory.stash[s:j]) <= memory.limit[device]
        for device, (s, j) in enumerate(itertools.pairwise([0, *splits, problem.num_blocks]))
    )
