"""Throughput of a planned partition on devices 19.5 : 14.4 : 5.5 : 5.5, beside other ways to cut; virtual devices.

    python bench/pipeline/virtual_devices.py            # 3 minutes, four processes

24 equal blocks, 128 microbatches. Cuts: what `ringweave.pipeline.profiling.partition` chooses from what it measured; as
many blocks each; blocks in proportion to speed, rounded; DeepSpeed's rule `parameters` (as many parameters each, which
with equal blocks is as many blocks each); and the best of all integer partitions, by simulation of every one with the
true speeds. Steps of all of them are measured, interleaved. Exit code 1 if the planned partition has less than 95 % of
the throughput of the best one or less than 1.9 times that of the even one.
"""

import argparse
import dataclasses
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist
from settings import Setting, batch, make_optimizer, make_pipeline, median, step_times

from ringweave.pipeline import even_splits, profiling
from ringweave.planning.partition.problem import PartitionProblem
from ringweave.planning.partition.solve import solve_partition
from ringweave.sim import pipeline_schedules, pipeline_simulation
from ringweave.sim.pipeline_simulation import StageTimes

SPEEDS = (19.5, 14.4, 5.5, 5.5)
NUM_BLOCKS, NUM_MICROBATCHES, SCHEDULE = 24, 128, "1f1b-overlap"
OF_BEST, OVER_EVEN = 0.95, 1.9


def parse_options() -> argparse.Namespace:
    """Returns the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="measured steps of each partition")
    parser.add_argument("--block-s", type=float, default=0.02, help="forward of a block on a device of speed 1")
    parser.add_argument("--out", type=Path, default=Path("runs/pipeline-virtual-devices.json"))
    return parser.parse_args()


def proportional(num_blocks: int) -> tuple[int, ...]:
    """Cuts where the devices' share of the speed ends, rounded."""
    ends = itertools.accumulate(SPEEDS)
    return tuple(round(num_blocks * end / sum(SPEEDS)) for end in ends)[:-1]


def by_parameters(parameters: tuple[float, ...]) -> tuple[int, ...]:
    """DeepSpeed's `partition_method="parameters"`: the least largest sum of parameters, whatever the speeds are."""
    problem = PartitionProblem(work=(parameters,), capability=(1.0,) * len(SPEEDS))
    return solve_partition(problem).splits


def best(setting: Setting) -> tuple[int, ...]:
    """Return the partition into non-empty stages with the shortest step, simulated with the true speeds."""
    order = pipeline_schedules.generate_pipeline_schedule(setting.schedule, len(SPEEDS), setting.num_microbatches)
    cuts = itertools.combinations(range(1, NUM_BLOCKS), len(SPEEDS) - 1)
    return min(
        cuts, key=lambda splits: pipeline_simulation.simulate_pipeline(order, true_times(setting, splits)).step_s
    )


def true_times(setting: Setting, splits: tuple[int, ...]) -> StageTimes:
    """Return the times of stages if nothing but the blocks' waits took time."""
    edges = itertools.pairwise((0, *splits, NUM_BLOCKS))
    forward = [sum(setting.work_s[a:b]) / speed for (a, b), speed in zip(edges, setting.speeds, strict=True)]
    return StageTimes(forward_s=tuple(forward), backward_s=tuple(2 * each for each in forward))


def work(options: argparse.Namespace) -> None:
    """A worker; rank 0 writes what was found."""
    setting = Setting(
        work_s=(options.block_s,) * NUM_BLOCKS,
        speeds=SPEEDS,
        schedule=SCHEDULE,
        num_microbatches=NUM_MICROBATCHES,
        splits=even_splits(NUM_BLOCKS, len(SPEEDS)),
    )
    pipeline = make_pipeline(setting)
    profile = profiling.profile(pipeline, make_optimizer, rounds=9)
    links = profiling.measure_links(pipeline.layout, pipeline.groups, pipeline.device, 2**16)
    overheads = profiling.measure_overheads(pipeline, links, target=batch(setting), rounds=3)
    cuts = {
        "planned": profiling.partition(profile, links, num_microbatches=NUM_MICROBATCHES).splits,
        "best integer": best(setting),
        "even": even_splits(NUM_BLOCKS, len(SPEEDS)),
        "parameters": by_parameters((1.0,) * NUM_BLOCKS),
        "proportional": proportional(NUM_BLOCKS),
    }
    made = {splits: make_pipeline(dataclasses.replace(setting, splits=splits)) for splits in sorted(set(cuts.values()))}
    laps: dict[tuple[int, ...], list[float]] = {splits: [] for splits in sorted(made)}
    for _ in range(options.rounds):
        for splits, found in laps.items():
            found.extend(step_times(made[splits], setting, 1, warm_ups=0 if found else 1))
    rows = [
        {
            "cut": name,
            "splits": splits,
            "predicted_s": profiling.predict(profile, links, splits, pipeline.order, overheads=overheads).step_s,
            "waits_alone_s": pipeline_simulation.simulate_pipeline(pipeline.order, true_times(setting, splits)).step_s,
            "measured_s": median(laps[splits]),
            "measured_steps_s": laps[splits],
        }
        for name, splits in cuts.items()
    ]
    if dist.get_rank() == 0:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    dist.destroy_process_group()


def report(options: argparse.Namespace) -> int:
    """Print what the workers found; the exit code."""
    rows = {row["cut"]: row for row in json.loads(options.out.read_text())}
    print("cut           last blocks      predicted s  measured s  throughput of the best  over even")
    best_s, even_s = (rows[name]["measured_s"] for name in ("best integer", "even"))
    for name, row in rows.items():
        splits = ", ".join(map(str, row["splits"]))
        print(
            f"{name:14}{splits:16}{row['predicted_s']:12.3f}{row['measured_s']:12.3f}"
            f"{best_s / row['measured_s']:24.3f}{even_s / row['measured_s']:11.3f}"
        )
    alone = rows["even"]["waits_alone_s"] / rows["planned"]["waits_alone_s"]
    print(f"simulated, if nothing but the blocks' waits took time: planned over even {alone:.3f}")
    planned_s = rows["planned"]["measured_s"]
    return int(best_s / planned_s < OF_BEST or even_s / planned_s < OVER_EVEN)


def main() -> None:
    """Under a launcher a worker; else start the workers and report."""
    options = parse_options()
    if "RANK" in os.environ:
        work(options)
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={len(SPEEDS)}"]
    subprocess.run([*command, __file__, *sys.argv[1:]], env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
    sys.exit(report(options))


if __name__ == "__main__":
    main()
