"""Predicted against measured step time of pipelines on unequal virtual devices.

    python bench/pipeline/prediction.py --settings 24        # 3 minutes, four processes

Every setting draws speeds, works, splits, a schedule and a number of microbatches. Blocks and links are measured
(`ringweave.pipeline.profiling`), the overhead of an action is found by a benchmark in which every stage waits as
long, the order that is run is simulated with all that, and steps are timed. Exit code 1 if the
median error is above 3 % or the 95th percentile above 8 %.
"""

import argparse
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist
from settings import Setting, batch, make_optimizer, make_pipeline, median, percentile, step_times

from ringweave.pipeline import profiling
from ringweave.sim.pipeline_schedules import PIPELINE_SCHEDULES

NUM_STAGES, MEDIAN_ALLOWED, P95_ALLOWED = 4, 0.03, 0.08


def parse_options() -> argparse.Namespace:
    """Returns the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", type=int, default=24)
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each setting")
    parser.add_argument("--block-s", type=float, default=0.004, help="mean forward of a block on a device of speed 1")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/pipeline-prediction.json"))
    return parser.parse_args()


def draw(index: int, options: argparse.Namespace) -> Setting:
    """A setting, the same on all ranks."""
    rng = random.Random(1000 * options.seed + index)
    num_blocks = rng.randint(6, 16)
    cuts = sorted(rng.sample(range(1, num_blocks), NUM_STAGES - 1))
    return Setting(
        work_s=tuple(options.block_s * rng.uniform(0.5, 1.5) for _ in range(num_blocks)),
        speeds=tuple(rng.uniform(0.4, 2.0) for _ in range(NUM_STAGES)),
        schedule=PIPELINE_SCHEDULES[index % len(PIPELINE_SCHEDULES)],
        num_microbatches=rng.choice((4, 8, 12)),
        splits=tuple(cuts),
        width=rng.choice((32, 1024)),
    )


def work(options: argparse.Namespace) -> None:
    """A worker: measures every setting; rank 0 writes what was found."""
    rows = []
    for index in range(options.settings):
        setting = draw(index, options)
        pipeline = make_pipeline(setting)
        profile = profiling.profile(pipeline, make_optimizer, rounds=3)
        largest = max(cost.forward_bytes for cost in profile.blocks)
        links = profiling.measure_links(pipeline.layout, pipeline.groups, pipeline.device, largest)
        target = batch(setting)
        overheads = profiling.measure_overheads(pipeline, links, target=target, rounds=3)
        simulated = profiling.predict(
            profile,
            links,
            pipeline.layout.splits,
            pipeline.order,
            transfers=profiling.transfer_mode(setting.schedule),
            overheads=overheads,
        )
        measured_s = median(step_times(pipeline, setting, options.steps))
        rows.append(
            {
                "schedule": setting.schedule,
                "splits": setting.splits,
                "speeds": [round(speed, 3) for speed in setting.speeds],
                "microbatches": setting.num_microbatches,
                "predicted_s": simulated.step_s,
                "measured_s": measured_s,
                "action_s": overheads.action_s,
                "message_s": overheads.message_s,
                "after_s": overheads.step_s,
                "error": abs(simulated.step_s - measured_s) / measured_s,
            }
        )
    if dist.get_rank() == 0:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    dist.destroy_process_group()


def report(options: argparse.Namespace) -> int:
    """Print what the workers found; the exit code."""
    rows = json.loads(options.out.read_text())
    print("schedule      microbatches  predicted ms  measured ms  error %")
    for row in rows:
        print(
            f"{row['schedule']:14}{row['microbatches']:12d}{1e3 * row['predicted_s']:14.1f}"
            f"{1e3 * row['measured_s']:13.1f}{100 * row['error']:9.2f}"
        )
    errors = [row["error"] for row in rows]
    middle, high = median(errors), percentile(errors, 95)
    print(f"{len(rows)} settings: median error {100 * middle:.2f} %, 95th percentile {100 * high:.2f} %")
    return int(middle > MEDIAN_ALLOWED or high > P95_ALLOWED)


def main() -> None:
    """Under a launcher a worker; else start the workers and report."""
    options = parse_options()
    if "RANK" in os.environ:
        work(options)
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_STAGES}"]
    subprocess.run([*command, __file__, *sys.argv[1:]], env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
    sys.exit(report(options))


if __name__ == "__main__":
    main()
