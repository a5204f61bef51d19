"""Step time where a transfer takes as long as a forward: `1f1b-overlap` beside torch's 1F1B, and beside the bound.

    python bench/pipeline/overlap.py            # 3 minutes; needs root: four nodes of a lab at 100 Mbit/s

Four stages of one virtual block, 32 microbatches, backward twice a forward. Links are measured first, and the forward
is made as long as the slowest transfer. The bound is that of `StageTimes.bound_s`, by the measured links: no order of a
step is faster. Steps of both are measured in turns. Exit code 1 if `1f1b-overlap` takes more than 1.05 times the bound.
"""

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path

import torch.distributed as dist
from settings import Setting, make_optimizer, make_pipeline, median, step_times

from ringweave import topology
from ringweave.pipeline import profiling
from ringweave_bench.lab_workers import lab_of, run_workers

NUM_STAGES, NUM_MICROBATCHES, ALLOWED = 4, 32, 1.05
ORDERS = ("1f1b", "1f1b-overlap")
RUN_TIMEOUT_S = 600


def parse_options() -> argparse.Namespace:
    """Returns the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", type=Path, default=Path(__file__).with_name("four-nodes.yaml"))
    parser.add_argument("--rounds", type=int, default=5, help="measured steps of each order")
    parser.add_argument("--bytes", type=int, default=400_000, help="that cross for one microbatch")
    parser.add_argument("--out", type=Path, default=Path("runs/pipeline-overlap"), help="folder for the run")
    return parser.parse_args()


def work(options: argparse.Namespace) -> None:
    """A worker; rank 0 writes what was found."""
    speeds = (1.0,) * NUM_STAGES
    trial = Setting(
        work_s=(0.001,) * NUM_STAGES,
        speeds=speeds,
        schedule=ORDERS[0],
        num_microbatches=NUM_MICROBATCHES,
        width=100,
        samples=options.bytes // 400,
    )
    pipeline = make_pipeline(trial)
    links = profiling.measure_links(pipeline.layout, pipeline.groups, pipeline.device, options.bytes, rounds=9)
    transfer_s = max(link.transfer_s(options.bytes) for direction in links for link in direction)
    made = {
        name: make_pipeline(dataclasses.replace(trial, schedule=name, work_s=(transfer_s,) * NUM_STAGES))
        for name in ORDERS
    }
    profile = profiling.profile(made["1f1b"], make_optimizer)
    laps: dict[str, list[float]] = {name: [] for name in ORDERS}
    for _ in range(options.rounds):
        for name, found in laps.items():
            found.extend(step_times(made[name], trial, 1, warm_ups=0 if found else 1))
    rows = []
    for name, each in made.items():
        transfers = profiling.transfer_mode(name)
        simulated = profiling.predict(profile, links, each.layout.splits, each.order, transfers=transfers)
        rows.append(
            {
                "order": name,
                "transfer_s": transfer_s,
                "bound_s": simulated.bound_s,
                "simulated_s": simulated.step_s,
                "measured_s": median(laps[name]),
                "measured_steps_s": laps[name],
            }
        )
    if dist.get_rank() == 0:
        (options.out / "measured.json").write_text(json.dumps(rows, indent=1) + "\n")
    dist.destroy_process_group()


def run_in_lab(options: argparse.Namespace) -> None:
    """Four workers, each in its node.

    Raises:
        SystemExit: The run failed; its output is shown.
    """
    out = options.out.absolute()
    own = ["--rounds", str(options.rounds), "--bytes", str(options.bytes), "--out", str(out)]
    with lab_of(topology.load(options.cluster), "pipeline-overlap") as place:
        run_workers(place, __file__, own, out, timeout_s=RUN_TIMEOUT_S)


def report(options: argparse.Namespace) -> int:
    """Print what the workers found; the exit code."""
    rows = {row["order"]: row for row in json.loads((options.out / "measured.json").read_text())}
    print(f"transfer and forward {1e3 * rows['1f1b']['transfer_s']:.1f} ms (measured)")
    print("order          bound s  simulated s  measured s  of the bound")
    for name, row in rows.items():
        print(
            f"{name:13}{row['bound_s']:9.3f}{row['simulated_s']:13.3f}{row['measured_s']:12.3f}"
            f"{row['measured_s'] / row['bound_s']:14.3f}"
        )
    overlap = rows["1f1b-overlap"]
    return int(overlap["measured_s"] > ALLOWED * overlap["bound_s"])


def main() -> None:
    """Under a launcher a worker; else bring the lab up, run the workers in it and print what they found."""
    options = parse_options()
    if "RANK" in os.environ:
        work(options)
        return
    run_in_lab(options)
    sys.exit(report(options))


if __name__ == "__main__":
    main()
