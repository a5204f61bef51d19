"""Processor time of one split over many nodes of unequal capacity.

    python bench/jobs/splitting.py [--nodes 10000] [--rounds 100]

Prints the median and the least of the rounds, measured.
"""

import argparse
import json
import platform
import random
import statistics
import time
from pathlib import Path

from ringweave.jobs import split

BAR_S = 20e-3


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    asked = parser.parse_args()
    chosen = random.Random(1)
    capacities = [chosen.randint(0, 16) for _ in range(asked.nodes)]
    total = sum(capacity for capacity in capacities if capacity >= split.MIN_PER_NODE) - 5
    taken_s = []
    for _ in range(asked.rounds):
        begun_s = time.thread_time()
        split.split_workers(total, capacities)
        taken_s.append(time.thread_time() - begun_s)
    median_s = statistics.median(taken_s)
    print(f"{asked.nodes} nodes: median {1e3 * median_s:.1f} ms, least {1e3 * min(taken_s):.1f} ms (measured)")
    if asked.out:
        said = {"kind": "measured", "machine": platform.platform(), "nodes": asked.nodes, "median_s": median_s}
        asked.out.write_text(json.dumps(said | {"rounds_s": taken_s}) + "\n")
    if median_s > BAR_S:
        raise SystemExit(f"missed: {1e3 * BAR_S:g} ms")


if __name__ == "__main__":
    main()
