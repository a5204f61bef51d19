"""Stages of several devices beside one device a stage: two slow workers and one that is twice as fast.

    python bench/pipeline/slow_beside_fast.py                       # 1 minute; needs root: three nodes of a lab
    python bench/pipeline/slow_beside_fast.py --devices quotas      # 5 minutes, on a machine that does nothing else

Virtual devices wait instead of computing; with quotas, blocks are matrix products on parts of this machine's CPUs.
Models: `coarse` has blocks of 6, 5 and 1 units, `fine` has twelve blocks of one unit. No device has
memory for the whole model. Each model's blocks, links and overheads are measured, then planned with several devices a
stage and with one device a stage, in the best order of devices. Steps of both, and of as many blocks on each device,
are measured by turns. Exit code 1 if the planned stages are not 1.3 times as fast as the best partition with one device
a stage where that is predicted, or if a prediction is off by more than 10 %.
"""

import argparse
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from settings import median
from torch import Tensor, nn

from ringweave import topology
from ringweave.lab.lab import QuotaMode
from ringweave.pipeline import Pipeline, Settings, profiling
from ringweave.pipeline.adapting import build_workload
from ringweave.planning.partition.problem import PartitionMemory
from ringweave.planning.stage_planner import DeviceConditions, StagePlan, plan_stages
from ringweave.sim.pipeline_simulation import StageDevices, one_device_each
from ringweave_bench.lab_workers import lab_of, run_workers
from ringweave_bench.virtual_device import TimedBlock, VirtualDevice

MODELS = {"coarse": (6, 5, 1), "fine": (1,) * 12}
NUM_DEVICES, NUM_MICROBATCHES, SAMPLES, WIDTH, SCHEDULE = 3, 8, 8, 256, "1f1b-overlap"
SPEEDS, UNIT_S = (1.0, 1.0, 2.0), 0.008
"""Speeds of virtual devices, as in the cluster file; seconds of a unit's forward at speed 1."""
QUOTA_ROWS = 512
"""Rows of a sample; so many that a forward is longer than some periods of a quota."""
_DEVICES = "SLOW_BESIDE_FAST_DEVICES"
CLUSTER_FILE = Path(__file__).parents[2] / "examples/clusters/slow-beside-fast.yaml"
MEMORY_SHARE = 0.7
"""Memory of each device, as a fraction of the state of the whole model; activations are not limited."""
WANTED, ALLOWED_ERROR, RUN_TIMEOUT_S = 1.3, 0.10, 900


class Unit(nn.Module):
    """Residual matrix products, four for each unit of work."""

    def __init__(self, num_units: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4 * num_units))

    def forward(self, x: Tensor) -> Tensor:
        """Return [samples, rows, width]."""
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def parse_options() -> argparse.Namespace:
    """Returns the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", type=Path, default=CLUSTER_FILE)
    parser.add_argument("--rounds", type=int, default=5, help="measured steps of each plan")
    parser.add_argument("--models", default="coarse,fine")
    parser.add_argument("--devices", choices=("virtual", "quotas"), default="virtual")
    parser.add_argument("--out", type=Path, default=Path("runs/pipeline-slow-beside-fast"), help="folder for the run")
    return parser.parse_args()


def make_optimizer(block: nn.Module) -> torch.optim.Optimizer:
    """Plain and cheap."""
    return torch.optim.SGD(block.parameters(), lr=1e-4)


def make_blocks(units: tuple[int, ...]) -> list[nn.Module]:
    """Blocks of so many units; virtual ones where the environment says so."""
    if os.environ[_DEVICES] == "quotas":
        return [Unit(each) for each in units]
    device = VirtualDevice(SPEEDS[int(os.environ["RANK"])])
    times = [UNIT_S * each for each in units]
    return [TimedBlock(nn.Linear(WIDTH, WIDTH), each, 2 * each, device, SAMPLES) for each in times]


def make_pipeline(units: tuple[int, ...], splits: tuple[int, ...], devices: StageDevices) -> Pipeline:
    """Make this rank's part; all ranks make the same call."""
    torch.manual_seed(0)
    settings = Settings(
        num_microbatches=NUM_MICROBATCHES,
        schedule=SCHEDULE,
        splits=splits,
        devices=devices,
        device=torch.device("cpu"),
    )
    return Pipeline(make_blocks(units), nn.MSELoss(), make_optimizer, batch(), settings)


def batch() -> Tensor:
    """Inputs; targets may be the same."""
    rows = QUOTA_ROWS if os.environ[_DEVICES] == "quotas" else 1
    return torch.ones(NUM_MICROBATCHES * SAMPLES, rows, WIDTH) / WIDTH


def plan(units: tuple[int, ...]) -> tuple[dict[str, StagePlan], Pipeline]:
    """Measure a model on stages of two slow devices and a fast one; plan with several and with one device a stage."""
    trial = make_pipeline(units, (1,), StageDevices.parse("0:4+1:4 2:8"))
    profile = profiling.profile(trial, make_optimizer, rounds=9)
    largest = max(each.forward_bytes for each in profile.blocks)
    links = profiling.measure_links(trial.layout, trial.groups, trial.device, largest)
    overheads = profiling.measure_overheads(trial, links, target=batch(), rounds=3)
    load = build_workload(trial, profile, links, overheads)
    memory = PartitionMemory(
        limit=(MEMORY_SHARE * sum(each.state_bytes for each in profile.blocks),) * NUM_DEVICES,
        state=tuple(float(each.state_bytes) for each in profile.blocks),
        stash=(0.0,) * len(units),
        in_flight=(1,) * NUM_DEVICES,
    )
    rate = 1 / max(link.s_per_byte for direction in links for link in direction)
    conditions = DeviceConditions(speeds=(1.0,) * NUM_DEVICES, rates=(rate,) * NUM_DEVICES)
    load = replace(load, memory=memory)
    plans = {
        "stages of several devices": plan_stages(load, conditions, SAMPLES),
        "one device a stage": plan_stages(load, conditions, SAMPLES, max_width=1),
    }
    placed = one_device_each(NUM_DEVICES, SAMPLES)
    count = len(units) // NUM_DEVICES
    splits, stages = (count, 2 * count), conditions.of_stages(placed)
    even = replace(load, devices=placed, memory=None, latency_s=(max(load.latency_s),) * (NUM_DEVICES - 1))
    step_s = even.step_s(splits, stages)
    plans["as many blocks each"] = StagePlan(
        splits=splits, devices=placed, step_s=step_s, workload=even, conditions=stages
    )
    return plans, trial


def work(options: argparse.Namespace) -> None:
    """A worker; rank 0 writes what was found."""
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for name in options.models.split(","):
        plans, _ = plan(MODELS[name])
        made = {what: make_pipeline(MODELS[name], each.splits, each.devices) for what, each in plans.items()}
        laps: dict[str, list[float]] = {what: [] for what in plans}
        for _ in range(options.rounds):
            for what, pipeline in made.items():
                laps[what] += timed_steps(pipeline, warm_ups=0 if laps[what] else 2)
        rows += [
            {
                "model": name,
                "plan": what,
                "devices": str(each.devices),
                "splits": each.splits,
                "predicted_s": each.step_s,
                "measured_s": median(laps[what]),
                "measured_steps_s": laps[what],
            }
            for what, each in plans.items()
        ]
    if dist.get_rank() == 0:
        (options.out / "measured.json").write_text(json.dumps(rows, indent=1) + "\n")
    dist.destroy_process_group()


def timed_steps(pipeline: Pipeline, warm_ups: int) -> list[float]:
    """Seconds of two train steps in a row, each: a quota's period is shorter, and one step's end lies in the next."""
    x = batch()
    for _ in range(warm_ups):
        pipeline.train_step(x, target=x)
    pipeline.groups.barrier()
    begun_s = time.perf_counter()
    for _ in range(2):
        pipeline.train_step(x, target=x)
    return [(time.perf_counter() - begun_s) / 2]


def run_in_lab(options: argparse.Namespace) -> None:
    """Three workers, each in its node, with its quota.

    Raises:
        SystemExit: The run failed; its output is shown.
    """
    mode: QuotaMode = "always" if options.devices == "quotas" else "never"
    own = [f"--{name}={getattr(options, name)}" for name in ("rounds", "models", "devices")]
    out = options.out.absolute()
    environ = {"OMP_NUM_THREADS": "1", _DEVICES: options.devices}
    with lab_of(topology.load(options.cluster), "slow-beside-fast", mode) as place:
        run_workers(place, __file__, [*own, f"--out={out}"], out, timeout_s=RUN_TIMEOUT_S, environ=environ)


def report(options: argparse.Namespace) -> int:
    """Print what the workers found; the exit code."""
    rows = json.loads((options.out / "measured.json").read_text())
    print("model   plan                       devices           splits           predicted s  measured s  error %")
    is_bad = False
    for row in rows:
        error = row["predicted_s"] / row["measured_s"] - 1
        splits = ",".join(map(str, row["splits"]))
        print(
            f"{row['model']:8}{row['plan']:27}{row['devices']:18}{splits:17}"
            f"{row['predicted_s']:11.3f}{row['measured_s']:12.3f}{100 * error:9.1f}"
        )
        is_bad |= abs(error) > ALLOWED_ERROR
    for name in dict.fromkeys(row["model"] for row in rows):
        wide, alone = (row for row in rows if row["model"] == name and row["plan"] != "as many blocks each")
        predicted, measured = (alone[what] / wide[what] for what in ("predicted_s", "measured_s"))
        print(f"{name}: steps per second over the best with one device a stage: predicted {predicted:.3f}", end=", ")
        print(f"measured {measured:.3f}")
        is_bad |= predicted >= WANTED and measured < WANTED
    return int(is_bad)


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
