"""Rings with a parameter server beside DDP on Gloo on workers of unequal speed: held-out loss against wall time.

    python bench/params_unequal.py --row half-quarter      # needs root; rows as in bench/unequal.py

One lab of eight nodes with CPU quotas, one job that trains two equal models on the same samples: one by
`ringweave.prepare` in mode `ps-hra`, which groups the workers by the speeds of the cluster file, one by
DistributedDataParallel on Gloo with equal parts. They take turns of whole epochs; the loss on held-out samples is taken
after each, outside of the time. The server has no quota of its own: it takes what the quotas leave of the machine.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import unequal
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler

import ringweave
from ringweave import lab, topology
from ringweave.lab.quotas import PERIOD_US
from ringweave.telemetry import read

HELD_OUT = 1797


def main() -> None:
    """Under a launcher a worker; else the lab."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", default="half-quarter", choices=list(unequal.ROWS))
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--samples", type=int, default=8192, help="of an epoch")
    parser.add_argument("--batch", type=int, default=256, help="samples of a train step over all ranks")
    parser.add_argument("--channels", type=int, default=32, help="of the convolutions: work of a sample")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/params-unequal"), help="folder for the run")
    options = parser.parse_args()
    if "RANK" in os.environ:
        work(options)
    else:
        print(report(run(options), options))


def run(options: argparse.Namespace) -> dict[str, Any]:
    """What the workers measured in a lab of these speeds.

    Raises:
        SystemExit: The run failed; its output is shown.
    """
    speeds, out = unequal.ROWS[options.row], options.out.absolute()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    nodes = [f"  - {{name: n{i}, nic: 400Mbit/s, devices: [{{speed: {speed}}}]}}" for i, speed in enumerate(speeds)]
    (out / "speeds.yaml").write_text("\n".join(["name: unequal", "nodes:", *nodes, "latency: 50us", ""]))
    place = lab.up(topology.load(out / "speeds.yaml"), f"params-{os.getpid()}", quotas="always")
    verb = [sys.executable, "-m", "ringweave", "lab", "run", "--lab", place.name, "--mode", "ps-hra", "--no-tuning"]
    keys = ("row", "epochs", "samples", "batch", "channels", "seed")
    command = [*verb, "--run-dir", str(out / "run"), __file__, *[f"--{key}={getattr(options, key)}" for key in keys]]
    try:
        unequal.limit(place, (1.0,) * len(speeds), of_one=PERIOD_US)
        with (out / "output").open("w") as output:
            running = subprocess.Popen([*command, f"--out={out}"], stdout=output, stderr=subprocess.STDOUT)
        unequal.wait_for(out / unequal.READY, running)
        unequal.limit(place, speeds)
        (out / f"{unequal.READY}.done").touch()
        code = running.wait(unequal.RUN_TIMEOUT_S)
    finally:
        lab.down(place.name)
    if code != 0:
        raise SystemExit(f"workers: exit code {code}, expected 0.\n{(out / 'output').read_text()}")
    counted = [event for event in read(out / "run" / "events.jsonl") if event["kind"] == "params_counted"][-1]
    rings = [event for event in read(out / "run" / "events.jsonl") if event["kind"] == "rings_formed"][-1]
    return json.loads((out / "measured.json").read_text()) | {"server": counted, "rings": rings["rings"]}


def work(options: argparse.Namespace) -> None:
    """What every rank does."""
    torch.set_num_threads(1)
    dist.init_process_group("ringweave")
    control = dist.new_group(backend="gloo")
    contenders = {"ps-hra": in_rings(options), "gloo": on_gloo(options)}
    unequal.signal(options.out / unequal.READY, control)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    for epoch in range(options.epochs):
        for name in sorted(contenders, reverse=epoch % 2 == 1):
            train, model = contenders[name]
            dist.barrier(group=control)
            started_s = time.perf_counter()
            train()
            dist.barrier(group=control)
            found[name].append({"seconds": time.perf_counter() - started_s, "loss": held_out_loss(model, options)})
    if dist.get_rank() == 0:
        (options.out / "measured.json").write_text(json.dumps(found) + "\n")
    dist.barrier(group=control)
    dist.destroy_process_group()


def make(options: argparse.Namespace) -> tuple[nn.Module, torch.optim.Optimizer, Dataset[Any], Dataset[Any]]:
    """The model of bench/unequal.py, its optimizer, samples to train on and others."""
    model, _, samples = unequal.make(options)
    torch.manual_seed(options.seed)
    for layer in model.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            layer.reset_parameters()
    # The digits repeat every 1797 samples: every fifth is held out, wherever it comes again.
    train = [index for index in range(len(samples)) if index % 1797 % 5][: options.samples]
    held = [index for index in range(1797) if index % 5 == 0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    return model, optimizer, Subset(samples, train), Subset(samples, held)


def in_rings(options: argparse.Namespace) -> tuple[Callable[[], None], nn.Module]:
    """Three lines more than a script that trains alone."""
    model, optimizer, samples, _ = make(options)
    loader = DataLoader(samples, batch_size=options.batch, shuffle=True)
    model, optimizer, loader = ringweave.prepare(model, optimizer, loader)
    return lambda: epoch_of(model, optimizer, loader), model.module


def on_gloo(options: argparse.Namespace) -> tuple[Callable[[], None], nn.Module]:
    """As torch's documentation has it."""
    model, optimizer, samples, _ = make(options)
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    sampler: DistributedSampler[Any] = DistributedSampler(samples, seed=options.seed)
    loader = DataLoader(samples, batch_size=options.batch // dist.get_world_size(), sampler=sampler)
    parallel = DistributedDataParallel(model, process_group=group)
    return lambda: epoch_of(parallel, optimizer, loader), parallel.module


def epoch_of(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
    """One pass."""
    for images, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()


@torch.no_grad()
def held_out_loss(model: nn.Module, options: argparse.Namespace) -> float:
    """On rank 0; the others wait."""
    if dist.get_rank() != 0:
        return 0.0
    images, labels = next(iter(DataLoader(make(options)[3], batch_size=HELD_OUT)))
    return nn.functional.cross_entropy(model(images), labels).item()


def report(found: dict[str, Any], options: argparse.Namespace) -> str:
    """Samples per second, losses, and the time to the loss that DDP ends with."""
    lines = [
        f"row {options.row}, rings {found['rings']}, {options.epochs} epochs of {options.samples} samples (measured)"
    ]
    for name in ("gloo", "ps-hra"):
        rate = options.samples / statistics.median(each["seconds"] for each in found[name])
        losses = ", ".join(f"{each['loss']:.4f}" for each in found[name])
        seconds = ", ".join(f"{each['seconds']:.1f}" for each in found[name])
        lines.append(f"{name:7} {rate:7.1f} samples/s; held-out loss after each epoch {losses}; seconds {seconds}")
    ideal = unequal.ideal(unequal.ROWS[options.row])
    ratio = [sum(each["seconds"] for each in found[name]) for name in ("gloo", "ps-hra")]
    goal = found["gloo"][-1]["loss"]
    lines.append(f"ratio of the times of all epochs {ratio[0] / ratio[1]:.2f}; ideal {ideal:.2f}")
    passed_s = 0.0
    for each in found["ps-hra"]:
        passed_s += each["seconds"]
        if each["loss"] <= goal:
            lines.append(f"DDP's last loss {goal:.4f} reached by ps-hra {ratio[0] / passed_s:.2f} times as fast")
            break
    else:
        lines.append(f"DDP's last loss {goal:.4f} not reached by ps-hra in as many epochs")
    server = found["server"]
    lines.append(f"staleness {server['staleness']}, pushes {server['pushes']}, peers {server['most_peers']}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
