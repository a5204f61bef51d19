"""A device slows to half its speed, or a link is cut to a fifth, while a pipeline trains; later it is given back.

    python bench/adapting/pipeline.py --scenario device     # needs root (a lab of network namespaces); about 2 minutes
    python bench/adapting/pipeline.py --scenario link
    python bench/adapting/pipeline.py --scenario noise      # devices and links jump by 5 %: nothing may move

Four real processes in a lab, each with a virtual device (blocks whose time is a timed wait), real transfers over
limited links. Beside it the best partition for the changed conditions, by brute force over simulated steps, is measured
under them from the start, without moves. Exit code 1 if from two windows and two steps behind a change on the partition
still changes, or the throughput of all those steps together is below 0.95 of that (after giving back: of what it was
before). Under noise: if anything moves, or if steps with the balancer take more than 1 % longer than those of the best
partition without one, which is measured in the same way by turns.
"""

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lab_steps
import torch
from torch import Tensor, nn

from ringweave import telemetry, topology
from ringweave.lab import Lab
from ringweave.pictures import adapting
from ringweave.pipeline import Pipeline, Settings
from ringweave.pipeline.adapting import adapt
from ringweave.pipeline.virtual import TimedBlock, VirtualDevice
from ringweave.planning.repartitioning import Conditions, Policy, Workload

DEVICES, BLOCKS, SAMPLES, WINDOW = 4, 12, 8, 10
NARROW, WIDE = 1_000, 8_000
"""Floats of a sample that leave a block: little leaves the first one, so that its cut is the best over a slow link."""
RATE = 200e6 / 8
GOODPUT = 0.95
ALLOWED, WITHOUT_LOSS = 0.95, 0.99
BEGINNING = 14
"""Steps until connections stand, the first window has ended and what it moves has moved."""


class Spread(nn.Module):
    """Cheap, with parameters, and an output of any width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        """[samples, any] -> [samples, width]."""
        return x.mean(1, keepdim=True) * self.weight


def parse_options() -> argparse.Namespace:
    """Returns the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", choices=("device", "link", "noise"), default="device")
    parser.add_argument("--change", type=int, default=34, help="step at which it changes")
    parser.add_argument("--restore", type=int, default=84, help="step at which it is given back")
    parser.add_argument("--steps", type=int, default=134, help="of the whole job")
    parser.add_argument("--block-s", type=float, default=0.005, help="forward of a block; backward takes twice that")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--splits", default="", help="worker: this partition stays")
    parser.add_argument("--start", default="", help="worker: the partition that it begins with")
    parser.add_argument("--slow-from", type=int, default=-1, help="worker: step from which device 2 is slow")
    parser.add_argument("--slow-until", type=int, default=2**31)
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--turns", type=int, default=2, help="noise: runs with and without a balancer")
    parser.add_argument("--folder", type=Path, default=Path("runs/pipeline-adapt"))
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--picture", type=Path, help="stages over time and steps, PNG or SVG")
    return parser.parse_args()


def widths() -> list[int]:
    """Of each block's output."""
    return [NARROW, *[WIDE] * (BLOCKS - 1)]


def make_optimizer(block: nn.Module) -> torch.optim.Optimizer:
    """Plain and cheap."""
    return torch.optim.SGD(block.parameters(), lr=1e-4)


def work(options: argparse.Namespace) -> None:
    """What every rank does: train steps, and a line for each in a file of its own."""
    torch.set_num_threads(1)
    rank, rng = int(os.environ["RANK"]), random.Random(int(os.environ["RANK"]))
    device = VirtualDevice()
    torch.manual_seed(0)
    blocks = [TimedBlock(Spread(width), options.block_s, 2 * options.block_s, device) for width in widths()]
    given = options.splits or options.start
    splits = tuple(map(int, given.split(","))) if given else None
    x = torch.ones(SAMPLES * options.microbatches, NARROW)
    y = torch.ones(SAMPLES * options.microbatches, widths()[-1])
    settings = Settings(
        num_microbatches=options.microbatches, schedule="1f1b-overlap", splits=splits, device=torch.device("cpu")
    )
    pipeline = Pipeline(blocks, nn.MSELoss(), make_optimizer, x, settings)
    if not options.splits:
        adapt(pipeline, make_optimizer, Policy(window_steps=WINDOW))
    lines = lab_steps.Lines(options.folder, rank)
    for step in range(options.steps):
        slow = rank == 1 and options.slow_from <= step < options.slow_until and options.slow_from >= 0
        device.speed = (0.5 if slow else 1.0) * (1 + rng.uniform(-options.noise, options.noise))
        begun_s = time.time()
        pipeline.train_step(x, target=y)
        lines.write(begun_s, pipeline.layout.splits)
    torch.distributed.destroy_process_group()


def best_splits(options: argparse.Namespace, conditions: Conditions) -> tuple[int, ...]:
    """By brute force over simulated steps with the true times."""
    sizes = tuple(4.0 * SAMPLES * width for width in widths())
    load = Workload(
        forward_s=((options.block_s,) * BLOCKS,),
        backward_s=((2 * options.block_s,) * BLOCKS,),
        num_devices=DEVICES,
        num_microbatches=options.microbatches,
        forward_bytes=sizes,
        backward_bytes=sizes,
        schedule="1f1b-overlap",
    )
    return min(
        itertools.combinations(range(1, BLOCKS), DEVICES - 1), key=lambda splits: load.step_s(splits, conditions)
    )


def cluster(folder: Path) -> topology.Cluster:
    """Four nodes on one switch."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "cluster.yaml"
    nodes = "\n".join(f"  - {{name: d{node}, nic: 200Mbit/s, devices: 1}}" for node in range(DEVICES))
    path.write_text(f"name: pipeline\nnodes:\n{nodes}\n")
    return topology.load(path)


def run(options: argparse.Namespace, name: str, own: list[str], on_step: Callable[[Lab, int], None]) -> dict[str, Any]:
    """Run workers in a lab of their own; `on_step` is called with each step that the first rank has begun."""
    folder = (options.folder / name).absolute()
    fixed = ["--folder", str(folder), "--block-s", str(options.block_s), "--microbatches", str(options.microbatches)]
    steps = lab_steps.run(__file__, [*fixed, *own], cluster(options.folder), folder, on_step, quotas="off")
    return {
        "steps_s": [step.ended_s - step.first_begun_s for step in steps],
        "splits": [step.more[0] for step in steps],
    }


def watch(options: argparse.Namespace) -> int:
    """Run everything and print it; the exit code."""
    steps = ["--steps", str(options.steps)]
    if options.scenario == "noise":
        document, adapted = under_noise(options)
    else:
        even, changed = conditions_of(options.scenario)
        optimum = best_splits(options, changed)
        static = ["--steps", "14", "--splits", ",".join(map(str, optimum))]
        slow = ["--slow-from", "0"] if options.scenario == "device" else []
        beside = run(options, "static", [*static, *slow], lambda place, step: cut(options, place, step, at=-1))
        timing = ["--slow-from", str(options.change), "--slow-until", str(options.restore)] if slow else []
        adapted = run(options, "adapted", [*steps, *timing], lambda place, step: cut(options, place, step))
        document = judge(options, adapted, beside) | {"best_splits": optimum, "best_even": best_splits(options, even)}
    if options.picture:
        name = "noise-0" if options.scenario == "noise" else "adapted"
        events = telemetry.read_last_attempt(options.folder / name / "events.jsonl")
        adapting.draw(adapting.history(events), options.picture)
    document |= {"scenario": options.scenario, "commit": lab_steps.commit(), "steps_s": adapted["steps_s"]}
    shown = {key: value for key, value in document.items() if key != "steps_s"}
    print(json.dumps(shown, indent=1))
    if options.out:
        options.out.write_text(json.dumps(document) + "\n")
    return 0 if document["is_good"] else 1


def under_noise(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """With a balancer and without, by turns, under the same noise; what follows, and the first run with one."""
    best = ",".join(map(str, best_splits(options, conditions_of("noise")[0])))
    common = ["--steps", str(options.steps), "--noise", "0.05"]
    adapted, static = [], []
    for turn in range(options.turns):
        adapted.append(run(options, f"noise-{turn}", [*common, "--start", best], jump))
        static.append(run(options, f"noise-static-{turn}", [*common, "--splits", best], jump))
    changes = sum(a != b for each in adapted for a, b in itertools.pairwise(each["splits"]))
    means = [[statistics.mean(each["steps_s"][BEGINNING:]) for each in runs] for runs in (adapted, static)]
    of_static = statistics.median(s / a for a, s in zip(*means, strict=True))
    found = {"moves": changes, "splits": best, "mean_step_s": means[0], "static_mean_step_s": means[1]}
    found |= {"throughput_of_static": of_static, "is_good": changes == 0 and of_static >= WITHOUT_LOSS}
    return found, adapted[0]


def conditions_of(scenario: str) -> tuple[Conditions, Conditions]:
    """Before, and changed."""
    rate = GOODPUT * RATE
    even = Conditions(speeds=(1.0,) * DEVICES, rates=(rate,) * (DEVICES - 1))
    if scenario == "device":
        return even, Conditions(speeds=(1.0, 0.5, 1.0, 1.0), rates=even.rates)
    return even, Conditions(speeds=even.speeds, rates=(rate / 5, rate, rate))


def judge(options: argparse.Namespace, adapted: dict[str, Any], beside: dict[str, Any]) -> dict[str, Any]:
    """Throughput behind each change beside what it should be."""
    steps_s, grace = adapted["steps_s"], 2 * WINDOW + 2
    before_s = statistics.mean(steps_s[BEGINNING : options.change])
    behind_s = statistics.mean(steps_s[options.change + grace : options.restore])
    after_s = statistics.mean(steps_s[options.restore + grace :])
    optimum_s = statistics.mean(beside["steps_s"][2:])
    speeds = {"changed": optimum_s / behind_s, "given_back": before_s / after_s}
    moved = [step for step, pair in enumerate(itertools.pairwise(adapted["splits"]), 1) if pair[0] != pair[1]]
    settled = [(options.change + grace, options.restore), (options.restore + grace, len(steps_s))]
    late = [step for step in moved if any(first < step < end for first, end in settled)]
    return {
        "is_good": min(speeds.values()) >= ALLOWED and not late,
        "late_moves": late,
        "throughput_of_optimum": speeds,
        "mean_step_s": {
            "before": before_s,
            "unmended": statistics.mean(steps_s[options.change + 1 : options.change + 8]),
            "changed": behind_s,
            "optimum": optimum_s,
            "given_back": after_s,
        },
        "moves": [[step, adapted["splits"][step - 1], adapted["splits"][step]] for step in moved],
        "change": options.change,
        "restore": options.restore,
    }


def cut(options: argparse.Namespace, place: Lab, step: int, at: int | None = None) -> None:
    """The first device's NIC, in both directions: the link between the first two stages."""
    if options.scenario != "link":
        return
    for link in ("d0->core", "core->d0"):
        if step == (options.change if at is None else at):
            place.set_rate(link, RATE / 5)
        elif step == options.restore and at is None:
            place.set_rate(link, RATE)


def jump(place: Lab, step: int) -> None:
    """Every link gets a rate near to its own at each step."""
    for node, link in itertools.product(place.cluster.nodes, ("{}->core", "core->{}")):
        place.set_rate(link.format(node.name), RATE * random.Random(step).uniform(0.95, 1.05))


if __name__ == "__main__":
    chosen = parse_options()
    if "RANK" in os.environ:
        work(chosen)
    else:
        sys.exit(watch(chosen))
