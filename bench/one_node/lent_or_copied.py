"""Allreduce on one machine with cross-memory reads, beside the same with copies, turn by turn.

    ringweave run --workers 2 bench/one_node/lent_or_copied.py --rounds 25 [--small-pages]

Both are groups of one job, so what the machine does besides meets both. Completion is the slowest rank's; every result
is checked. Memory is numpy's, which asks for huge pages as the benchmark of all systems does, or with `--small-pages`
torch's. Prints one JSON document on rank 0: seconds and processor seconds of the busiest rank.
"""

import argparse
import functools
import json
import statistics
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ringweave.comm.transport import sockets
from ringweave.comm.transport.sockets import SocketTransport


def _connect(is_lent: bool, /, *args: Any, **named: Any) -> SocketTransport:
    return SocketTransport(*args, **{**named, "allows_cross_memory": is_lent})


def make_groups() -> dict[str, Any]:
    """Make one group of each kind."""
    groups = {}
    for name, lends in (("lent", True), ("copied", False)):
        sockets.SocketTransport = functools.partial(_connect, lends)
        groups[name] = dist.new_group(backend="ringweave")
    return groups


def slowest(seconds: float, control: Any) -> float:
    """The largest of all ranks."""
    taken = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX, group=control)
    return taken.item()


def time_one(group: Any, tensor: torch.Tensor, control: Any) -> tuple[float, float]:
    """Seconds and processor seconds of one allreduce, values checked."""
    size = dist.get_world_size()
    tensor.fill_(dist.get_rank() + 1.0)
    dist.barrier(group=control)
    started_s, used_s = time.perf_counter(), time.process_time()
    dist.all_reduce(tensor, group=group)
    taken_s, used_s = time.perf_counter() - started_s, time.process_time() - used_s
    if not (tensor == size * (size + 1) / 2).all():
        raise AssertionError(f"wrong sum on rank {dist.get_rank()}")
    return slowest(taken_s, control), slowest(used_s, control)


def summarize(pairs: list[tuple[float, float]]) -> dict[str, float]:
    """Medians, quartile and least."""
    seconds, used = zip(*pairs, strict=True)
    low, middle, _ = statistics.quantiles(seconds, n=4)
    return {"median_s": middle, "q1_s": low, "min_s": min(seconds), "processor_s": statistics.median(used)}


def main() -> None:
    """Interleaves both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=25_000_000, help="size of the float32 message")
    parser.add_argument("--rounds", type=int, default=25, help="of each kind, alternating")
    parser.add_argument("--small-pages", action="store_true", help="memory of torch's, without huge pages")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    control, groups = dist.group.WORLD, make_groups()
    count = options.bytes // 4
    tensor = torch.empty(count) if options.small_pages else torch.from_numpy(np.zeros(count, np.float32))
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in groups}
    for number in range(-2, options.rounds):
        for name in sorted(groups, reverse=number % 2 == 1):
            found = time_one(groups[name], tensor, control)
            if number >= 0:
                taken[name].append(found)
    if dist.get_rank() == 0:
        measured = {name: summarize(pairs) for name, pairs in taken.items()}
        ratio = measured["copied"]["median_s"] / measured["lent"]["median_s"]
        summary = {"bytes": options.bytes, "workers": dist.get_world_size(), **vars(options)}
        print(json.dumps({"kind": "measured", **summary, **measured, "speed_relative_to_copied": round(ratio, 3)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
