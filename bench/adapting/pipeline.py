"""A device slows to half its speed, or a link is cut to a fifth, while a pipeline trains; later it is given back.

    python bench/adapting/pipeline.py --scenario device     # needs root (a lab of network namespaces); 4 minutes
    python bench/adapting/pipeline.py --scenario link
    python bench/adapting/pipeline.py --scenario noise      # devices and links jump by 5 %: nothing may move

Four real processes in a lab, each with a virtual device (blocks whose time is a timed wait), real transfers over
limited links. The same processes train, by turns of two steps, the pipeline that adapts and one without a controller,
which has the best partition for the conditions of the moment, by brute force over simulated steps. So whatever else
becomes slower or faster meanwhile does so for both: the same partition took 0.584 and 0.605 s a step in two runs. A
step's seconds are those from the end of the one before it, whosever that was, until all ranks have ended it.

Exit code 1 if from two windows and two steps behind a change on the partition still changes, or the throughput of all
those steps together is below 0.95 of that of the best partition. Under noise: if anything moves, or if steps that are
watched take more than 1 % longer than those that are not.
"""

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import lab_steps
import torch
from torch import Tensor, nn

from ringweave import telemetry, topology
from ringweave.lab import Lab
from ringweave.pipeline import Pipeline, Settings
from ringweave.pipeline.adapting import adapt
from ringweave.planning.repartition import PipelineConditions, PipelineWorkload, RepartitionPolicy
from ringweave_bench import pipeline_history
from ringweave_bench.virtual_device import TimedBlock, VirtualDevice

DEVICES, BLOCKS, SAMPLES, WINDOW = 4, 12, 8, 10
NARROW, WIDE = 1_000, 8_000
"""Floats of a sample that leave a block: little leaves the first one, so that its cut is the best over a slow link."""
RATE = 200e6 / 8
GOODPUT = 0.95
ALLOWED, WITHOUT_LOSS = 0.95, 0.99
TURN = 2
"""Steps of one pipeline before the other one's; the one that begins changes from turn to turn."""
ADAPTED, EVEN, CHANGED = "adapted", "even", "changed"
"""Pipelines: the one that adapts, and the best partitions without and with the change."""
NOISE = 0.05
BEGINNING = 14
"""Steps until connections stand, the first window has ended and what it moves has moved."""


class Row(NamedTuple):
    """One step of one pipeline."""

    name: str
    step: int
    splits: list[int]
    seconds: float


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
    parser.add_argument("--folder", type=Path, default=Path("runs/pipeline-adapt"))
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--picture", type=Path, help="stages over time and steps, PNG or SVG")
    options = parser.parse_args()
    if options.change % TURN or options.restore % TURN:
        parser.error(f"--change and --restore: expected multiples of {TURN}, the steps of a turn")
    return options


def widths() -> list[int]:
    """Return the bytes of each block's output."""
    return [NARROW, *[WIDE] * (BLOCKS - 1)]


def make_optimizer(block: nn.Module) -> torch.optim.Optimizer:
    """Plain and cheap."""
    return torch.optim.SGD(block.parameters(), lr=1e-4)


def work(options: argparse.Namespace) -> None:
    """Run the train steps of one rank, and write a line for each to its own file."""
    torch.set_num_threads(1)
    rank, device = int(os.environ["RANK"]), VirtualDevice()
    names = dict.fromkeys(name for name, _ in turns(options))
    pipelines = {name: make_pipeline(options, name, device) for name in names}
    adapt(pipelines[ADAPTED], make_optimizer, RepartitionPolicy(window_steps=WINDOW))
    x = torch.ones(SAMPLES * options.microbatches, NARROW)
    y = torch.ones(SAMPLES * options.microbatches, widths()[-1])
    lines = lab_steps.Lines(options.folder, rank)
    for name, step in turns(options):
        device.speed = speed(options, rank, step)
        begun_s = time.time()
        pipelines[name].train_step(x, target=y)
        lines.write(begun_s, name, step, pipelines[name].layout.splits)
    torch.distributed.destroy_process_group()


def make_pipeline(options: argparse.Namespace, name: str, device: VirtualDevice) -> Pipeline:
    """Make a pipeline with the best partition; the adapting one begins with even stages if it is to move blocks."""
    torch.manual_seed(0)
    blocks = [TimedBlock(Spread(width), options.block_s, 2 * options.block_s, device) for width in widths()]
    even, changed = conditions_of(options.scenario)
    is_told = name != ADAPTED or options.scenario == "noise"
    settings = Settings(
        num_microbatches=options.microbatches,
        schedule="1f1b-overlap",
        splits=best_splits(options, changed if name == CHANGED else even) if is_told else None,
        device=torch.device("cpu"),
    )
    x = torch.ones(SAMPLES * options.microbatches, NARROW)
    return Pipeline(blocks, nn.MSELoss(), make_optimizer, x, settings)


def turns(options: argparse.Namespace) -> list[tuple[str, int]]:
    """Yield the pipeline of each step, and its number."""
    found = []
    for turn, first in enumerate(range(0, options.steps, TURN)):
        steps = range(first, min(first + TURN, options.steps))
        is_changed = options.scenario != "noise" and options.change <= first < options.restore
        names = [ADAPTED, CHANGED if is_changed else EVEN]
        found += [(name, step) for name in (names if turn % 2 else names[::-1]) for step in steps]
    return found


def speed(options: argparse.Namespace, rank: int, step: int) -> float:
    """Return the speed of a rank's device, the same for either pipeline."""
    if options.scenario == "noise":
        return 1 + random.Random(f"{rank} {step}").uniform(-NOISE, NOISE)
    is_slow = options.scenario == "device" and rank == 1 and options.change <= step < options.restore
    return 0.5 if is_slow else 1.0


def best_splits(options: argparse.Namespace, conditions: PipelineConditions) -> tuple[int, ...]:
    """Find the best splits by brute force over simulated steps with the true times."""
    sizes = tuple(4.0 * SAMPLES * width for width in widths())
    load = PipelineWorkload(
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


def run(options: argparse.Namespace) -> list[Row]:
    """Train in a lab."""
    folder = (options.folder / options.scenario).absolute()
    given = ("scenario", "change", "restore", "steps", "block_s", "microbatches")
    own = [text for what in given for text in (f"--{what.replace('_', '-')}", str(getattr(options, what)))]
    numbers = [step for _, step in turns(options)]

    def on_step(place: Lab, done: int) -> None:
        if options.scenario == "link":
            cut(options, place, numbers, done)
        elif options.scenario == "noise" and done < len(numbers):
            jump(place, numbers[max(done, 0)])

    steps = lab_steps.run(
        __file__, [*own, "--folder", str(folder)], cluster(options.folder), folder, on_step, quotas="off"
    )
    return [
        Row(*step.more, step.ended_s - before_s)  # pyrefly: ignore - the more are three
        for step, before_s in zip(steps, [steps[0].first_begun_s, *(step.ended_s for step in steps)], strict=False)
    ]


def watch(options: argparse.Namespace) -> int:
    """Run everything and print it; the exit code."""
    rows = run(options)
    document = (judge_noise if options.scenario == "noise" else judge)(options, rows)
    if options.picture:
        events = telemetry.read_last_attempt(options.folder / options.scenario / "events.jsonl")
        pipeline_history.draw_history(pipeline_history.read_history(events), options.picture)
    document |= {"scenario": options.scenario, "commit": lab_steps.commit(), "steps": rows}
    shown = {key: value for key, value in document.items() if key != "steps"}
    print(json.dumps(shown, indent=1))
    if options.out:
        options.out.write_text(json.dumps(document) + "\n")
    return 0 if document["is_good"] else 1


def conditions_of(scenario: str) -> tuple[PipelineConditions, PipelineConditions]:
    """Before, and changed."""
    rate = GOODPUT * RATE
    even = PipelineConditions(speeds=(1.0,) * DEVICES, rates=(rate,) * (DEVICES - 1))
    if scenario == "device":
        return even, PipelineConditions(speeds=(1.0, 0.5, 1.0, 1.0), rates=even.rates)
    return even, PipelineConditions(speeds=even.speeds, rates=(rate / 5, rate, rate))


def seconds(rows: list[Row], first: int, end: int) -> tuple[list[float], list[float]]:
    """Return the steps of these numbers: of the pipeline that adapts, and of the one beside it."""
    among = sorted((row for row in rows if first <= row.step < end), key=lambda row: row.step)
    both = [[row.seconds for row in among if (row.name == ADAPTED) is is_adapted] for is_adapted in (True, False)]
    return both[0], both[1]


def compare(rows: list[Row], first: int, end: int) -> dict[str, float]:
    """Means over steps of these numbers, and throughput beside that of the best partition, with its standard error."""
    adapted, best = seconds(rows, first, end)
    ratios = [b / a for a, b in zip(adapted, best, strict=True)]
    return {
        "adapted_s": statistics.mean(adapted),
        "best_s": statistics.mean(best),
        "throughput_of_best": sum(best) / sum(adapted),
        "standard_error": statistics.stdev(ratios) / len(ratios) ** 0.5,
    }


def moves(rows: list[Row]) -> list[tuple[int, Any, Any]]:
    """(step, partition before, partition from it on) of the pipeline that adapts."""
    own = [row for row in rows if row.name == ADAPTED]
    return [(b.step, a.splits, b.splits) for a, b in itertools.pairwise(own) if a.splits != b.splits]


def judge(options: argparse.Namespace, rows: list[Row]) -> dict[str, Any]:
    """Throughput behind each change beside what it should be."""
    settled = {
        "changed": (options.change + 2 * WINDOW + 2, options.restore),
        "given_back": (options.restore + 2 * WINDOW + 2, options.steps),
    }
    found = {name: compare(rows, *span) for name, span in settled.items()}
    late = [step for step, *_ in moves(rows) if any(first < step < end for first, end in settled.values())]
    even, changed = conditions_of(options.scenario)
    return {
        "is_good": min(each["throughput_of_best"] for each in found.values()) >= ALLOWED and not late,
        "before": compare(rows, BEGINNING, options.change),
        "unmended": compare(rows, options.change + 1, options.change + 8),
        **found,
        "late_moves": late,
        "moves": moves(rows),
        "change": options.change,
        "restore": options.restore,
        "best_splits": {EVEN: best_splits(options, even), CHANGED: best_splits(options, changed)},
    }


def judge_noise(options: argparse.Namespace, rows: list[Row]) -> dict[str, Any]:
    """Judge a run under noise: no block moves, and measuring costs no time."""
    found = compare(rows, BEGINNING, options.steps)
    is_good = not moves(rows) and found["throughput_of_best"] >= WITHOUT_LOSS
    return {"is_good": is_good, "moves": moves(rows), **found}


def cut(options: argparse.Namespace, place: Lab, numbers: list[int], done: int) -> None:
    """The first device's NIC, in both directions: the link between the first two stages."""
    for link in ("d0->core", "core->d0"):
        if done == numbers.index(options.change):
            place.set_rate(link, RATE / 5)
        elif done == numbers.index(options.restore):
            place.set_rate(link, RATE)


def jump(place: Lab, step: int) -> None:
    """Give every link a rate near to its own at each step, the same for either pipeline."""
    for node, link in itertools.product(place.cluster.nodes, ("{}->core", "core->{}")):
        rate = RATE * random.Random(f"{link} {node.name} {step}").uniform(1 - NOISE, 1 + NOISE)
        place.set_rate(link.format(node.name), rate)


if __name__ == "__main__":
    chosen = parse_options()
    if "RANK" in os.environ:
        work(chosen)
    else:
        sys.exit(watch(chosen))
