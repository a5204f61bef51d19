"""Random partitions beside brute force: 100,000 cases of at most 12 blocks on at most 5 devices.

Run: `python bench/partition_exactness.py [--cases 100000] [--seed 1]`; ends with 1 at the first difference. Needs no
torch.
"""

import argparse
import random
import sys
import time
from pathlib import Path

from ringweave.errors import UsageError
from ringweave.planning.partition.problem import PartitionProblem
from ringweave.planning.partition.solve import solve_partition
from tests.planning.partitioning.brute_force import Found, least, random_problem, solve_by_recurrence

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def differing(problem: PartitionProblem, num_microbatches: int, expected: Found, shortest: Found) -> str | None:
    """Return the differences from brute force: the two solvers' bottleneck, the splits, the step and its splits."""
    _, by_recurrence_s = solve_by_recurrence(problem)
    if expected is None or shortest is None:
        try:
            return f"solved {solve_partition(problem)}, brute force finds none"
        except UsageError:
            return None if by_recurrence_s == float("inf") else f"recurrence {by_recurrence_s}, brute force finds none"
    found, quickest = solve_partition(problem), solve_partition(problem, num_microbatches)
    if (found.bottleneck_s, found.splits) != expected or by_recurrence_s != expected[0]:
        return f"solver {found.bottleneck_s} {found.splits}, recurrence {by_recurrence_s}, brute force {expected}"
    if (quickest.predicted_step_s, quickest.splits) != shortest:
        return f"{num_microbatches} microbatches: {quickest}, brute force {shortest}"
    return None


def main() -> int:
    """Try all cases and say how many were equal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    rng, start, without = random.Random(asked.seed), time.perf_counter(), 0
    for case in range(asked.cases):
        problem, num_microbatches = random_problem(rng), rng.randint(1, 40)
        expected, shortest = least(problem, num_microbatches)
        without += expected is None
        difference = differing(problem, num_microbatches, expected, shortest)
        if difference is not None:
            print(f"case {case}: {problem}\n{difference}")
            return 1
    seconds = time.perf_counter() - start
    print(f"{asked.cases} cases equal brute force, {without} without a partition, seed {asked.seed}, {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
