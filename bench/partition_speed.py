"""Seconds that the partition of large models takes: 1,000 blocks on 64 devices, 2,000 on 1,024.

Run: `python bench/partition_speed.py [--rounds 7]`; measured, medians over random problems. Needs no torch.
"""

import argparse
import random
import statistics
import time

from ringweave.planning.partition.problem import PartitionMemory, PartitionProblem
from ringweave.planning.partition.solve import solve_partition

SIZES = ((1_000, 64), (2_000, 1_024))
CASES = ("alike", "unequal", "links", "kinds", "memory", "microbatches")


def problem(case: str, num_blocks: int, num_devices: int, rng: random.Random) -> PartitionProblem:
    """Return a random problem: with equal blocks, or each case with one property more than the one before."""
    level = CASES.index(case)
    num_kinds = 8 if level >= CASES.index("kinds") else 1
    work = tuple(tuple(rng.uniform(1, 10) if level else 1.0 for _ in range(num_blocks)) for _ in range(num_kinds))
    has_links = level >= CASES.index("links")
    return PartitionProblem(
        work=work,
        kinds=tuple(rng.randrange(num_kinds) for _ in range(num_devices)),
        capability=tuple(rng.uniform(1, 4) if level else 1.0 for _ in range(num_devices)),
        activation=tuple(rng.uniform(1, 100) for _ in range(num_blocks)) if has_links else (),
        bandwidth=tuple(rng.uniform(5, 20) for _ in range(num_devices - 1)) if has_links else (),
        memory=_memory(num_blocks, num_devices, rng) if level >= CASES.index("memory") else None,
    )


def _memory(num_blocks: int, num_devices: int, rng: random.Random) -> PartitionMemory:
    depths = [num_devices - device for device in range(num_devices)]
    fair = [(5.5 + 0.05 * depth) * num_blocks / num_devices for depth in depths]
    return PartitionMemory(
        limit=tuple(rng.uniform(3 * each, 6 * each) for each in fair),
        state=tuple(rng.uniform(1, 10) for _ in range(num_blocks)),
        stash=tuple(rng.uniform(0, 0.1) for _ in range(num_blocks)),
        in_flight=tuple(depths),
    )


def measure(case: str, num_blocks: int, num_devices: int, num_rounds: int) -> list[tuple[float, float]]:
    """Seconds by the clock and of the processor of each round, each on a problem of its own."""
    seconds = []
    for seed in range(num_rounds):
        asked = problem(case, num_blocks, num_devices, random.Random(seed))
        num_microbatches = 4 * num_devices if case == "microbatches" else None
        start, cpu_s = time.perf_counter(), time.process_time()
        solve_partition(asked, num_microbatches)
        seconds.append((time.perf_counter() - start, time.process_time() - cpu_s))
    return seconds


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    num_rounds = parser.parse_args().rounds
    print("| blocks x devices | case | median s | worst s | median s of CPU |\n|---|---|---|---|---|")
    for num_blocks, num_devices in SIZES:
        for case in CASES:
            by_clock, of_cpu = zip(*measure(case, num_blocks, num_devices, num_rounds), strict=True)
            numbers = f"{statistics.median(by_clock):.3f} | {max(by_clock):.3f} | {statistics.median(of_cpu):.3f}"
            print(f"| {num_blocks} x {num_devices} | {case} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
