"""Descriptors, threads, connections, memory and time of a rank by the size of its group, on this machine.

    python bench/scale.py [--sizes 8,32,128] [--bytes 1000000] [--schedule ring]

So many processes form the default group and sum one message, values checked: by Gloo, or by a schedule of ringweave.
Each reads its own /proc after that. Printed as one JSON document: the most of any rank, and rank 0, which makes the
plan; then what one more rank costs each rank, from the least squares of the sizes. A figure of one process that grows
faster than the group does is a miss, and so is a wrong sum. All measured. Memory is that of a process alone: the
processes are forked and share the pages of torch, which a process that is started by itself has for itself.
"""

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ringweave.testing.ranks import run_ranks

_KEYS = ("descriptors", "sockets", "threads", "private_mb")
_MAX_GROWTH = 1.15
"""Most by which a figure may grow beyond the growth of the group; ranks of a crowded machine differ by a few."""


def reduce_once(num_elements: int) -> dict[str, float]:
    """Run one rank: sum a message in the default group, which is formed, and return what this process holds."""
    started = time.perf_counter()
    tensor = torch.full((num_elements,), float(dist.get_rank()))
    dist.all_reduce(tensor)
    size = dist.get_world_size()
    if not (tensor == size * (size - 1) / 2).all():
        raise AssertionError(f"sum {tensor[0].item()}, expected {size * (size - 1) / 2}")
    taken_s = time.perf_counter() - started
    dist.barrier()
    held = {"first_sum_s": taken_s, **process_figures()}
    dist.barrier()  # nobody ends while others count their connections
    return held


def process_figures() -> dict[str, float]:
    """Return this process's descriptors, sockets among them, threads and private memory."""
    proc = Path("/proc/self")
    targets = []
    for entry in (proc / "fd").iterdir():
        try:
            targets.append(str(entry.readlink()))
        except FileNotFoundError:  # the descriptor of the listing
            continue
    rows = [line.split() for line in (proc / "smaps_rollup").read_text().splitlines() if line.startswith("Private_")]
    return {
        "descriptors": len(targets),
        "sockets": sum(target.startswith("socket:") for target in targets),
        "threads": len(list((proc / "task").iterdir())),
        "private_mb": sum(int(row[1]) for row in rows) / 1000,
    }


def measure(size: int, num_bytes: int, schedule: str) -> dict[str, Any]:
    """Return the figures of a group of so many ranks."""
    started = time.perf_counter()
    settings: dict[str, Any] = {"nodes": ["a0"] * size, "environ": {"RINGWEAVE_SCHEDULE": schedule}}
    ranks = run_ranks(reduce_once, size, num_bytes // 4, timeout_s=600.0, wait_s=900.0, **settings)
    names = ("first_sum_s", *_KEYS)
    return {
        "ranks": size,
        "whole_s": round(time.perf_counter() - started, 2),
        "most": {name: round(max(rank[name] for rank in ranks), 3) for name in names},
        "rank_0": {name: round(ranks[0][name], 3) for name in names},
        "private_mb_of_all": round(sum(rank["private_mb"] for rank in ranks), 1),
    }


def growth(measured: list[dict[str, Any]]) -> dict[str, str]:
    """Return `a + b n` of each figure for n ranks, by least squares over the sizes."""
    sizes = [each["ranks"] for each in measured]
    found = {}
    for name in _KEYS:
        slope, start = np.polyfit(sizes, [each["most"][name] for each in measured], 1)
        found[name] = f"{start:.1f} + {slope:.2f} n"
    return found


def missed(measured: list[dict[str, Any]]) -> list[str]:
    """Return the figures of one process that grow faster than the group."""
    pairs = itertools.pairwise(measured)
    return [
        f"{name}: {before['most'][name]:g} at {before['ranks']} ranks, {after['most'][name]:g} at {after['ranks']}"
        for before, after in pairs
        for name in _KEYS
        if after["most"][name] / before["most"][name] > _MAX_GROWTH * after["ranks"] / before["ranks"]
    ]


def main() -> None:
    """Measure all sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="8,32,128")
    parser.add_argument("--bytes", type=int, default=1_000_000)
    parser.add_argument("--schedule", default="native", help="schedule of the sum; native is Gloo")
    options = parser.parse_args()
    measured = [measure(int(size), options.bytes, options.schedule) for size in options.sizes.split(",")]
    formulas = growth(measured) if len(measured) > 1 else {}
    print(
        json.dumps(
            {"kind": "measured", "schedule": options.schedule, "sizes": measured, "of_a_rank": formulas}, indent=2
        )
    )
    if faults := missed(measured):
        raise SystemExit("missed: " + "; ".join(faults))


if __name__ == "__main__":
    main()
