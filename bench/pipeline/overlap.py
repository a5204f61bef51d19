"""Step time where a transfer takes as long as a forward: `1f1b-overlap` beside torch's 1F1B, and beside the bound.

    python bench/pipeline/overlap.py            # 3 minutes; needs root: four nodes of a lab at 100 Mbit/s
    python bench/pipeline/overlap.py --thin 12  # a link whose transfer takes twelve forwards: exact, bf16 and int8

Four stages of one virtual block, 32 microbatches, backward twice a forward. Links are measured first, and the forward
is made as long as the slowest transfer. The bound is that of `StageTimes.bound_s`, by the measured links: no order of a
step is faster. Steps of both are measured in turns. Exit code 1 if `1f1b-overlap` takes more than 1.05 times the bound;
with `--thin`, if int8 is not twice as fast as exact, or a simulated step is off by more than 10 %.
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
CASES = {name: (name, "exact") for name in ("1f1b", "1f1b-overlap")}
"""Schedule and wire format of each case."""
THIN_CASES = {wire: ("1f1b-overlap", wire) for wire in ("exact", "bf16", "int8")}
THIN_GAIN, THIN_ERROR = 2.0, 0.10
RUN_TIMEOUT_S = 600


def parse_options() -> argparse.Namespace:
    """Returns the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", type=Path, help="default: four-nodes.yaml; with --thin, thin-link.yaml")
    parser.add_argument("--rounds", type=int, default=5, help="measured steps of each order")
    parser.add_argument("--bytes", type=int, default=400_000, help="that cross for one microbatch")
    parser.add_argument("--thin", type=float, metavar="F", help="a transfer takes so many forwards; compare formats")
    parser.add_argument("--out", type=Path, default=Path("runs/pipeline-overlap"), help="folder for the run")
    return parser.parse_args()


def work(options: argparse.Namespace) -> None:
    """A worker; rank 0 writes what was found."""
    speeds = (1.0,) * NUM_STAGES
    trial = Setting(
        work_s=(0.001,) * NUM_STAGES,
        speeds=speeds,
        schedule="1f1b",
        num_microbatches=NUM_MICROBATCHES,
        width=100,
        samples=options.bytes // 400,
    )
    pipeline = make_pipeline(trial)
    links = profiling.measure_links(pipeline.layout, pipeline.groups, pipeline.device, options.bytes, rounds=9)
    transfer_s = max(link.transfer_s(options.bytes) for direction in links for link in direction)
    trial = dataclasses.replace(trial, work_s=(transfer_s / (options.thin or 1),) * NUM_STAGES)
    cases = THIN_CASES if options.thin else CASES
    made = {
        name: make_pipeline(dataclasses.replace(trial, schedule=schedule, wire=wire))
        for name, (schedule, wire) in cases.items()
    }
    laps: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(options.rounds):
        for name, found in laps.items():
            found.extend(step_times(made[name], trial, 1, warm_ups=0 if found else 1))
    rows = []
    for name, each in made.items():
        profile = profiling.profile(each, make_optimizer)
        transfers = profiling.transfer_mode(cases[name][0])
        simulated = profiling.predict(profile, links, each.layout.splits, each.order, transfers=transfers)
        rows.append(
            {
                "order": name,
                "transfer_s": transfer_s,
                "num_bytes": profile.blocks[0].forward_bytes,
                "coding_s": profile.blocks[0].coding_s,
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
    default = Path(__file__).with_name("thin-link.yaml" if options.thin else "four-nodes.yaml")
    out = options.out.absolute()
    own = ["--thin", str(options.thin)] if options.thin else []
    own += ["--rounds", str(options.rounds), "--bytes", str(options.bytes), "--out", str(out)]
    with lab_of(topology.load(options.cluster or default), "pipeline-overlap") as place:
        run_workers(place, __file__, own, out, timeout_s=RUN_TIMEOUT_S)


def report(options: argparse.Namespace) -> int:
    """Print what the workers found; the exit code."""
    rows = {row["order"]: row for row in json.loads((options.out / "measured.json").read_text())}
    first, num_samples = next(iter(rows.values())), NUM_MICROBATCHES * (options.bytes // 400)
    print(f"exact transfer {1e3 * first['transfer_s']:.1f} ms (measured), {options.thin or 1:g} forwards")
    print("case           bytes  bound s  simulated s  measured s  of the bound  samples/s, measured  of the first")
    for name, row in rows.items():
        print(
            f"{name:13}{row['num_bytes']:8}{row['bound_s']:9.3f}{row['simulated_s']:13.3f}{row['measured_s']:12.3f}"
            f"{row['measured_s'] / row['bound_s']:14.3f}{num_samples / row['measured_s']:21.0f}"
            f"{first['measured_s'] / row['measured_s']:14.2f}"
        )
    if options.thin:
        errors = [abs(row["simulated_s"] / row["measured_s"] - 1) for row in rows.values()]
        gain = rows["exact"]["measured_s"] / rows["int8"]["measured_s"]
        return int(gain < THIN_GAIN or max(errors) > THIN_ERROR)
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
