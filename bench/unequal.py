"""Balanced training beside DDP on Gloo on workers of unequal speed: samples per second, beside the ideal.

    python bench/unequal.py --rows equal,one-quarter,half-quarter       # needs root; all rows: leave --rows out

Each row is a lab of eight nodes whose speeds are CPU quotas (40 ms period, at most 1.6 cores together, so that what
moves the data has the rest). One job trains two equal models on the same samples: one with `ringweave.prepare` in mode
`balanced`, one with DistributedDataParallel on Gloo, with equal parts. They take turns of some steps. Shares are
learnt from measured steps; the speeds in the cluster file are hidden from `prepare`. Workers start with all the
processors, since importing torch takes minutes on 0.05 of a core, and get their quotas before the first step. In the
row `changed` two workers become slow after the first turns, and balanced alone is measured from there on.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import ringweave
from ringweave import lab, topology
from ringweave.lab.quotas import PERIOD_US

ROWS = {
    "equal": (1.0,) * 8,
    "one-quarter": (1.0,) * 7 + (0.25,),
    "half-quarter": (1.0,) * 4 + (0.25,) * 4,
    "mixed": (1.0,) * 4 + (0.5,) * 2 + (0.25,) * 2,
}
CHANGED = "changed"
BEFORE, AFTER = (1.0,) * 8, (1.0,) * 6 + (0.25,) * 2
"""Speeds of the row in which they change."""
BARS = {"equal": 0.97, "one-quarter": 2.9, "half-quarter": 2.1, "mixed": 2.3}
WARM_UP_STEPS = {"balanced": 16, "gloo": 2}
"""Balanced learns the speeds in these steps; they are reported apart."""
RUN_TIMEOUT_S = 900
READY, TURNED = "ready", "turned"
"""Files by which rank 0 asks for quotas."""


@dataclass(kw_only=True, slots=True)
class Contender:
    """One model, and the seconds of its steps on the slowest rank."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterator[Any]
    process_group: dist.ProcessGroup | None
    step_s: list[float] = field(default_factory=list)


def main() -> None:
    """Under a launcher a worker; else one lab after the other."""
    options = parse_options()
    if "RANK" in os.environ:
        work(options)
        return
    rows = []
    for name in options.rows.split(","):
        rows.append(run_row(name, options))
        if options.json:
            options.json.write_text(json.dumps(rows) + "\n")
    print(report(rows))


def parse_options() -> argparse.Namespace:
    """Returns the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS), help="which, separated by commas")
    parser.add_argument("--turns", type=int, default=4, help="turns of each contender")
    parser.add_argument("--steps", type=int, default=4, help="train steps of a turn")
    parser.add_argument("--batch", type=int, default=4096, help="samples of a train step over all ranks")
    parser.add_argument("--channels", type=int, default=64, help="of the convolutions: work of a sample")
    parser.add_argument("--out", type=Path, default=Path("runs/unequal"), help="folder for the runs")
    parser.add_argument("--changes", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="file for everything that was measured")
    return parser.parse_args()


def run_row(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """What the workers measured in a lab of these speeds.

    Raises:
        SystemExit: The run failed; its output is shown.
    """
    speeds = BEFORE if name == CHANGED else ROWS[name]
    out = (options.out / name).absolute()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    nodes = [f"  - {{name: n{i}, nic: 400Mbit/s, devices: [{{speed: {speed}}}]}}" for i, speed in enumerate(speeds)]
    (out / "speeds.yaml").write_text("\n".join(["name: unequal", "nodes:", *nodes, "latency: 50us", ""]))
    place = lab.up(topology.load(out / "speeds.yaml"), f"unequal-{os.getpid()}", quotas="always")
    verb = [sys.executable, "-c", "from ringweave.cli.main import main; main()", "lab", "run", "--lab", place.name]
    own = [f"--{key}={getattr(options, key)}" for key in ("turns", "steps", "batch", "channels")] + [f"--out={out}"]
    try:
        limit(place, (1.0,) * len(speeds), of_one=PERIOD_US)
        command = [*verb, "--run-dir", str(out / "run"), __file__, *own, *(["--changes"] if name == CHANGED else [])]
        with (out / "output").open("w") as output:
            running = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        for moment, then in ((READY, speeds), *([(TURNED, AFTER)] if name == CHANGED else [])):
            wait_for(out / moment, running)
            limit(place, then)
            (out / f"{moment}.done").touch()
        code = running.wait(RUN_TIMEOUT_S)
    finally:
        lab.down(place.name)
    if code != 0:
        raise SystemExit(f"workers: exit code {code}, expected 0.\n{(out / 'output').read_text()}")
    return {"row": name, "speeds": speeds, **json.loads((out / "measured.json").read_text())}


def limit(place: lab.Lab, speeds: tuple[float, ...], of_one: float | None = None) -> None:
    """Give the devices quotas in proportion to these speeds, 1.6 cores together."""
    of_one = of_one or 1.6 * PERIOD_US / sum(speeds)
    for node, speed in zip(place.cluster.nodes, speeds, strict=True):
        place.set_quota(node.name, 0, int(speed * of_one))


def wait_for(path: Path, running: subprocess.Popen[bytes]) -> None:
    """Until the workers have come so far, or ended."""
    while not path.exists() and running.poll() is None:
        time.sleep(0.05)


def work(options: argparse.Namespace) -> None:
    """What every rank does."""
    torch.set_num_threads(1)
    dist.init_process_group("ringweave")
    os.environ.pop("RINGWEAVE_CLUSTER", None)  # has the speeds, which shall be learnt
    control = dist.new_group(backend="gloo")
    contenders = {"balanced": balanced(options)} | ({} if options.changes else {"gloo": on_gloo(options)})
    signal(options.out / READY, control)
    learning_s = {name: turn(contenders[name], WARM_UP_STEPS[name], control) for name in contenders}
    for number in range(options.turns):
        for name in sorted(contenders, reverse=number % 2 == 1):
            contenders[name].step_s += turn(contenders[name], options.steps, control)
    changed_s: list[float] = []
    if options.changes:
        signal(options.out / TURNED, control)
        changed_s = turn(contenders["balanced"], 30, control)
    if dist.get_rank() == 0:
        seconds = {name: each.step_s for name, each in contenders.items()}
        document = {"batch": options.batch, "step_s": seconds, "learning_s": learning_s, "changed_s": changed_s}
        (options.out / "measured.json").write_text(json.dumps(document) + "\n")
    dist.destroy_process_group()


def signal(path: Path, control: Any) -> None:
    """Tell the process outside that the quotas shall change, and wait until they have."""
    dist.barrier(group=control)
    if dist.get_rank() == 0:
        path.touch()
        while not Path(f"{path}.done").exists():
            time.sleep(0.05)
    dist.barrier(group=control)


def make(options: argparse.Namespace) -> tuple[nn.Module, torch.optim.Optimizer, TensorDataset]:
    """A small convolutional model, and handwritten digits in which it sees every image several times."""
    torch.manual_seed(0)
    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    wide = options.channels
    model = nn.Sequential(
        nn.Unflatten(1, (1, 8)),
        *(nn.Conv2d(1, wide, 3, padding=1), nn.ReLU(), nn.Conv2d(wide, wide, 3, padding=1), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * wide, 10)),
    )
    samples = TensorDataset((images.float() / 16).repeat(16, 1).unflatten(1, (8, 8)), labels.repeat(16))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), samples


def balanced(options: argparse.Namespace) -> Contender:
    """Three lines more than a script that trains alone."""
    model, optimizer, samples = make(options)
    loader = DataLoader(samples, batch_size=options.batch, shuffle=True, drop_last=True)
    prepared = ringweave.prepare(model, optimizer, loader, mode="balanced")
    return Contender(model=prepared[0], optimizer=prepared[1], batches=forever(prepared[2]), process_group=None)


def on_gloo(options: argparse.Namespace) -> Contender:
    """As torch's documentation has it."""
    model, optimizer, samples = make(options)
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    sampler = DistributedSampler(samples, drop_last=True)
    loader = DataLoader(samples, batch_size=options.batch // dist.get_world_size(), sampler=sampler, drop_last=True)
    parallel = DistributedDataParallel(model, process_group=group)
    return Contender(model=parallel, optimizer=optimizer, batches=forever(loader), process_group=group)


def forever(loader: Any) -> Iterator[Any]:
    """Batches of one epoch after the other."""
    while True:
        yield from loader


def turn(contender: Contender, num_steps: int, control: Any) -> list[float]:
    """Seconds of each step. All ranks end a step together, up to their updates, so rank 0 can tell for all."""
    dist.barrier(group=control)
    seconds = []
    for _ in range(num_steps):
        started_s = time.perf_counter()
        images, labels = next(contender.batches)
        contender.optimizer.zero_grad()
        nn.functional.cross_entropy(contender.model(images), labels).backward()
        contender.optimizer.step()
        seconds.append(time.perf_counter() - started_s)
    dist.barrier(group=control)
    return seconds


def ideal(speeds: tuple[float, ...]) -> float:
    """Speed-up of perfect balance over equal parts: N equal parts take 1 / min v, balanced ones N / sum v."""
    return sum(speeds) / (len(speeds) * min(speeds))


def report(rows: list[dict[str, Any]]) -> str:
    """A table: samples per second of both, their ratio, the ideal and the bar."""
    titles = ("speeds", "DDP + Gloo samples/s", "balanced samples/s", "ratio", "by means", "ideal", "bar")
    head = f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}\n"
    lines = [changed_line(row) if row["changed_s"] else line(row) for row in rows]
    return head + "".join(lines) + "Measured, by the median step, but for the ideal and where means are named."


def line(row: dict[str, Any]) -> str:
    """One cluster."""
    middle, mean = (
        {name: row["batch"] / average(seconds) for name, seconds in row["step_s"].items()}
        for average in (statistics.median, statistics.mean)
    )
    figures = f"{middle['gloo']:.0f} | {middle['balanced']:.0f} | {middle['balanced'] / middle['gloo']:.2f}"
    by_means = f"{mean['balanced'] / mean['gloo']:.2f}"
    return f"| {row['row']} | {figures} | {by_means} | {ideal(row['speeds']):.2f} | {BARS[row['row']]} |\n"


def changed_line(row: dict[str, Any]) -> str:
    """Ten steps after the change, and the steps after those, beside balance that knows at once.

    All workers together have 1.6 cores before and after it, so that perfect balance takes as long as before.
    """
    before, soon, later = (
        row["batch"] / statistics.mean(part)
        for part in (row["step_s"]["balanced"], row["changed_s"][:10], row["changed_s"][10:])
    )
    figures = f"{before:.0f} before, {soon:.0f} in ten steps, {later:.0f} then"
    return f"| {row['row']} | | {figures} | | {later / before:.2f} | 1.00 | 0.85 |\n"


if __name__ == "__main__":
    main()
