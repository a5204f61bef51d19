"""Mode `local` beside DDP on Gloo, in a lab of two sites of four nodes: time computing, bytes between, loss.

    python bench/training/local_in_lab.py --rounds 3          # needs root

One job, two byte-level GPTs (of examples/support) with the same first weights. They take turns: a round of `local`,
then a few train steps of DDP, so both meet the same machine. Bytes are those that both uplinks have sent, both ways,
by the counters of the lab, during the turns. DDP is too slow for as many samples as `local` trains on, so the loss at
equal samples is that of one process on whole batches, whose steps DDP's equal.
Exit code 1 if `local` sends more than a twentieth of DDP's bytes per sample.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import ringweave
from ringweave import lab, topology
from ringweave.telemetry import read_events
from ringweave.training import Local

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

from support import text  # noqa: E402
from support.gpt import GPT, GPTConfig  # noqa: E402

CLUSTER = """\
name: two-sites
nodes:
  - {name: a, switch: r0, nic: 1Gbit/s, devices: 1, count: 4}
  - {name: b, switch: r1, nic: 1Gbit/s, devices: 1, count: 4}
switches:
  - {name: r0, uplink: 10Mbit/s}
  - {name: r1, uplink: 10Mbit/s}
latency: 100us
"""
CONTEXT, HELD_OUT_ROWS = 64, 256
MAX_BYTES = 4_000_000
MIN_BYTES_RATIO = 20
RUN_TIMEOUT_S = 1500
SAMPLE_INTERVAL_S = 0.5
SIZES = ("rounds", "inner_steps", "ddp_steps", "batch", "layers", "width")
MEASURES: dict[str, Callable[[dict[str, Any]], float]] = {
    "bytes": lambda turn: turn["uplink_bytes"],
    "samples": lambda turn: turn["samples"],
    "seconds": lambda turn: turn["ended"] - turn["began"],
}


def main() -> None:
    """Under a launcher a worker; else bring the lab up, run the workers in it and print what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of local")
    parser.add_argument("--inner-steps", type=int, default=64, help="inner steps of a round")
    parser.add_argument("--ddp-steps", type=int, default=2, help="train steps of DDP after each round")
    parser.add_argument("--batch", type=int, default=32, help="sequences of a train step, over all ranks")
    parser.add_argument("--layers", type=int, default=2, help="blocks of the model")
    parser.add_argument("--width", type=int, default=128, help="width of the model")
    parser.add_argument("--out", type=Path, default=Path("runs/local-in-lab"), help="folder for the run")
    options = parser.parse_args()
    if "RANK" in os.environ:
        work(options)
    else:
        sys.exit(report(run_in_lab(options), options))


def run_in_lab(options: argparse.Namespace) -> dict[str, Any]:
    """Run the workers; return their measurements, with the bytes that the uplinks carried in each turn.

    Raises:
        SystemExit: The run failed; its output is shown.
    """
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    cluster = out / "two-sites.yaml"
    cluster.write_text(CLUSTER)
    place = lab.up(topology.load(cluster), "local-two-sites")
    verb = [sys.executable, "-c", "from ringweave.cli.main import main; main()", "lab", "run", "--lab", place.name]
    own = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in SIZES] + [f"--out={out}"]
    samples: list[tuple[float, float]] = []
    has_ended = threading.Event()
    sampler = threading.Thread(target=sample_uplinks, args=(place, samples, has_ended))
    try:
        sampler.start()
        command = [*verb, "--mode", "local", "--run-dir", str(out / "run"), __file__, *own]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=RUN_TIMEOUT_S)
    finally:
        has_ended.set()
        sampler.join()
        lab.down(place.name)
    if done.returncode != 0:
        raise SystemExit(f"workers: exit code {done.returncode}, expected 0.\n{done.stdout}{done.stderr}")
    measured = json.loads((out / "measured.json").read_text())
    for turn in measured["turns"]:
        first, last = (np.interp(turn[key], *zip(*samples, strict=True)) for key in ("began", "ended"))
        turn["uplink_bytes"] = float(last - first)
    steps = [event for event in read_events(out / "run" / "events.jsonl") if event["kind"] == "outer_step"]
    return measured | {"outer_steps": steps}


def sample_uplinks(place: lab.Lab, samples: list[tuple[float, float]], has_ended: threading.Event) -> None:
    """Append (time, bytes that both uplinks have sent, both ways) twice a second."""
    while not has_ended.wait(SAMPLE_INTERVAL_S):
        sent = place.bytes_on_links()
        samples.append((time.time(), sum(count for link, count in sent.items() if "core" in link)))


def work(options: argparse.Namespace) -> None:
    """Run one rank's turns."""
    torch.set_num_threads(1)
    dist.init_process_group("ringweave")
    train, held_out = corpus()
    num_samples = options.rounds * options.inner_steps * options.batch
    loader = DataLoader(TensorDataset(*(each[:num_samples] for each in train.tensors)), batch_size=options.batch)
    local = Local(inner_steps=options.inner_steps)
    model, optimizer, shared = ringweave.prepare(*make(options), loader, mode="local", local=local)
    gloo = dist.new_group(backend="gloo")
    reference, its_optimizer = make(options)
    other = DistributedDataParallel(reference, process_group=gloo)  # pyrefly: ignore - every rank is in it
    turns, num_done, ddp_done = [], 0, 0
    dist.barrier(gloo)
    began = time.time()
    for inputs, targets in shared:
        if shared.num_train_steps > num_done:
            num_done = shared.num_train_steps
            turns.append(turn("local", began, options.inner_steps * options.batch))
            ddp_done = take_ddp_turn(options, other, its_optimizer, train, ddp_done, turns, gloo)
            began = time.time()
        step(model, optimizer, inputs, targets)
    turns.append(turn("local", began, options.inner_steps * options.batch))
    take_ddp_turn(options, other, its_optimizer, train, ddp_done, turns, gloo)
    if dist.get_rank() == 0:
        document = {
            "turns": turns,
            "local_loss": held_out_loss(model.module, held_out),
            "model_bytes": sum(each.nbytes for each in model.parameters()),
            "load": os.getloadavg(),
        }
        (options.out / "measured.json").write_text(json.dumps(document, indent=2) + "\n")
    dist.barrier(gloo)
    dist.destroy_process_group()


def turn(name: str, began: float, num_samples: int) -> dict[str, Any]:
    """Return a turn that ends now."""
    return {"name": name, "began": began, "ended": time.time(), "samples": num_samples}


def take_ddp_turn(
    options: argparse.Namespace,
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    train: TensorDataset,
    first: int,
    turns: list[dict[str, Any]],
    group: Any,
) -> int:
    """Run some train steps of DDP; return the number of steps so far."""
    dist.barrier(group)
    began, last = time.time(), first + options.ddp_steps
    own = options.batch // dist.get_world_size()
    for number in range(first, last):
        begin = number * options.batch + dist.get_rank() * own
        step(model, optimizer, *(each[begin : begin + own] for each in train.tensors))
    dist.barrier(group)
    turns.append(turn("ddp", began, options.ddp_steps * options.batch))
    return last


def step(model: Any, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    """Do a train step."""
    optimizer.zero_grad()
    model(inputs, targets).backward()
    optimizer.step()


def train_alone(options: argparse.Namespace) -> float:
    """Return the held-out loss of one process after the same batches in whole, which DDP's steps equal."""
    train, held_out = corpus()
    model, optimizer = make(options)
    for number in range(options.rounds * options.inner_steps):
        begin = number * options.batch
        step(model, optimizer, *(each[begin : begin + options.batch] for each in train.tensors))
    return held_out_loss(model, held_out)


@torch.no_grad()
def held_out_loss(model: GPT, held_out: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Return nats per byte."""
    return model(*held_out).item()


def report(measured: dict[str, Any], options: argparse.Namespace) -> int:
    """Print what was measured; return the exit code."""
    by_name = {name: [each for each in measured["turns"] if each["name"] == name] for name in ("local", "ddp")}
    totals = {
        name: {key: sum(value(each) for each in turns) for key, value in MEASURES.items()}
        for name, turns in by_name.items()
    }
    lost_s = sum(each["wait_s"] + each["exchange_s"] for each in measured["outer_steps"])
    computing = 1 - lost_s / totals["local"]["seconds"]
    per_sample = {name: each["bytes"] / each["samples"] for name, each in totals.items()}
    rates = {name: each["samples"] / each["seconds"] for name, each in totals.items()}
    alone = train_alone(options)
    print(f"measured, {measured['model_bytes'] / 1e6:.2f} MB of parameters, load {measured['load']}:")
    print(f"  local: {computing:.1%} of the time computing, {options.inner_steps} train steps a round")
    print(f"  uplink bytes per sample: local {per_sample['local']:.0f}, DDP on Gloo {per_sample['ddp']:.0f}")
    print(f"  ratio of bytes: {per_sample['ddp'] / per_sample['local']:.1f}")
    gain = rates["local"] / rates["ddp"]
    print(f"  samples per second: local {rates['local']:.1f}, DDP {rates['ddp']:.1f}, ratio {gain:.1f}")
    loss = measured["local_loss"]
    print(f"  held-out loss at equal samples: local {loss:.4f}, synchronous {alone:.4f} ({loss / alone - 1:+.2%})")
    return int(per_sample["ddp"] / per_sample["local"] < MIN_BYTES_RATIO)


def corpus(seed: int = 0) -> tuple[TensorDataset, tuple[torch.Tensor, torch.Tensor]]:
    """Return sequences to train on and held-out ones, (inputs, targets)."""
    found = text.load_corpus(MAX_BYTES, torch.device("cpu"))
    train, held_out = (shuffle(sequences(each), seed) for each in (found.train, found.held_out))
    return TensorDataset(*train), (held_out[0][:HELD_OUT_ROWS], held_out[1][:HELD_OUT_ROWS])


def shuffle(rows: tuple[torch.Tensor, torch.Tensor], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same pairs in another order, by the seed: neighbours are from one document."""
    places = torch.randperm(len(rows[0]), generator=torch.Generator().manual_seed(seed))
    return rows[0][places], rows[1][places]


def sequences(content: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (inputs, targets), (sequences, context) int64 each."""
    rows = content[: len(content) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1).long()
    return rows[:, :-1], rows[:, 1:]


def make(options: argparse.Namespace, seed: int = 0) -> tuple[GPT, torch.optim.AdamW]:
    """Return a model with the same first weights everywhere, and its optimizer."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(layers=options.layers, width=options.width, context=CONTEXT))
    return model, torch.optim.AdamW(model.parameters(), lr=2e-3)


if __name__ == "__main__":
    main()
