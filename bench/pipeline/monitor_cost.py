"""Cost of measuring: the same pipeline of virtual devices with and without a rebalancer, by turns.

    python bench/pipeline/monitor_cost.py        # four processes, a minute and a half

Devices are alike and the partition is even, so that nothing moves; windows end, links are probed and rank 0 solves
as in any run. Both pipelines live in the same processes and take turns of whole windows, the one that begins changes
from pair to pair. Links are not probed in every window, so that the sums over all turns are compared, not a usual
turn. Exit code 1 if they differ by more than 0.5 %.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from settings import Setting, batch, commit, make_optimizer, make_pipeline

from ringweave.pipeline import Pipeline
from ringweave.pipeline.adapting import adapt

ALLOWED, DEVICES = 0.005, 4


def parse_options() -> argparse.Namespace:
    """Returns the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help="turns of each")
    parser.add_argument("--steps", type=int, default=10, help="in a turn; a multiple of ten, the steps of a window")
    parser.add_argument("--block-s", type=float, default=0.005, help="forward of a block; backward takes twice that")
    parser.add_argument("--out", type=Path, default=Path("runs/pipeline-monitor-cost.json"))
    return parser.parse_args()


def work(options: argparse.Namespace) -> None:
    """A worker: both pipelines by turns; rank 0 writes seconds of a step for each turn."""
    setting = Setting(
        work_s=(options.block_s,) * 12,
        speeds=(1.0,) * DEVICES,
        schedule="1f1b-overlap",
        num_microbatches=8,
        splits=(3, 6, 9),
    )
    plain, watched = make_pipeline(setting), make_pipeline(setting)
    balancer = adapt(watched, make_optimizer)
    found: dict[str, list[float]] = {"plain": [], "watched": []}
    for turn in range(-1, options.rounds):
        for name, pipeline in ([("plain", plain), ("watched", watched)])[:: 1 if turn % 2 else -1]:
            seconds = steps(pipeline, batch(setting), options.steps)
            if turn >= 0:
                found[name].append(seconds)
    assert not balancer.outcomes
    if dist.get_rank() == 0:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found) + "\n")
    dist.destroy_process_group()


def steps(pipeline: Pipeline, x: torch.Tensor, count: int) -> float:
    """Seconds of a train step, mean over a turn: what is done only at some steps counts with its share."""
    dist.barrier()
    begun_s = time.perf_counter()
    for _ in range(count):
        pipeline.train_step(x, target=x)
    dist.barrier()
    return (time.perf_counter() - begun_s) / count


def main() -> None:
    """Under a launcher a worker; else start the workers and report."""
    options = parse_options()
    if "RANK" in os.environ:
        work(options)
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={DEVICES}"]
    subprocess.run([*command, __file__, *sys.argv[1:]], env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
    found = json.loads(options.out.read_text())
    ratios = [watched / plain - 1 for plain, watched in zip(found["plain"], found["watched"], strict=True)]
    middle = {name: statistics.median(row) for name, row in found.items()}
    print(f"median step (measured): {1e3 * middle['plain']:.2f} ms without, {1e3 * middle['watched']:.2f} ms with")
    whole = sum(found["watched"]) / sum(found["plain"]) - 1
    error = statistics.stdev(ratios) / len(ratios) ** 0.5
    print(f"{len(ratios)} pairs of turns: median difference {100 * statistics.median(ratios):+.2f} %")
    print(f"all turns together: {100 * whole:+.2f} % (standard error {100 * error:.2f} %)")
    options.out.write_text(json.dumps({"commit": commit(), "difference": whole, "error": error, **found}) + "\n")
    sys.exit(int(whole > ALLOWED))


if __name__ == "__main__":
    main()
