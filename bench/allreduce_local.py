"""Allreduce of ringweave beside Gloo's, on this machine, interleaved in one run; every result is checked.

    ringweave run --workers 4 bench/allreduce_local.py --bytes 25000000 --rounds 15

Completion is the slowest rank's. Prints one JSON document on rank 0: medians, interquartile ranges, ratio of medians.
"""

import argparse
import json
import statistics
import time

import torch
import torch.distributed as dist


def time_one(group: dist.ProcessGroup, tensor: torch.Tensor, control: dist.ProcessGroup) -> float:
    """Seconds that the slowest rank took for one allreduce, values checked."""
    size = dist.get_world_size()
    tensor.fill_(dist.get_rank() + 1.0)
    dist.barrier(group=control)
    started = time.perf_counter()
    dist.all_reduce(tensor, group=group)
    taken = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX, group=control)
    if not (tensor == size * (size + 1) / 2).all():
        raise AssertionError(f"wrong sum on rank {dist.get_rank()}")
    return taken.item()


def summarize(seconds: list[float]) -> dict[str, float]:
    """Median and interquartile range."""
    low, middle, high = statistics.quantiles(seconds, n=4)
    return {"median_s": middle, "iqr_s": high - low, "min_s": min(seconds)}


def main() -> None:
    """Interleaves both systems."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=25_000_000, help="size of the float32 message")
    parser.add_argument("--rounds", type=int, default=15, help="of each system, alternating")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("ringweave")
    gloo = dist.new_group(backend="gloo")
    systems = {"ringweave": dist.group.WORLD, "gloo": gloo}
    tensor = torch.empty(options.bytes // 4)
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for group in systems.values():
        time_one(group, tensor, gloo)
    for number in range(options.rounds):
        for name in sorted(systems, reverse=number % 2 == 1):
            seconds[name].append(time_one(systems[name], tensor, gloo))
    if dist.get_rank() == 0:
        measured = {name: summarize(values) for name, values in seconds.items()}
        ratio = measured["gloo"]["median_s"] / measured["ringweave"]["median_s"]
        summary = {"bytes": options.bytes, "workers": dist.get_world_size(), "rounds": options.rounds}
        print(json.dumps({"kind": "measured", **summary, **measured, "speed_relative_to_gloo": round(ratio, 3)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
