"""Mode `local` beside DDP on Gloo and torch's PowerSGD, in a lab: time computing, bytes between, loss.

    python bench/training/local_in_lab.py --train-steps 1024          # needs root
    python bench/training/local_in_lab.py --cluster slow-nic          # eight nodes, one NIC at a tenth

One job, byte-level GPTs (of examples/support) with the same first weights: an epoch of `local`, then a few train steps
of DDP, then DDP with PowerSGD's hook until it has the last loss of `local`, or has taken as many steps. Bytes are those
that the thin links have sent, both ways, by the counters of the lab, meanwhile. DDP is too slow for as many samples as
`local` trains on, so the loss at equal samples is that of one process on whole batches, whose steps DDP's equal; and
DDP's time to a loss is the time of its measured steps, times the steps of that process. Evaluations are not timed.
`--sample-ms` is a pause for each sample, in all of them alike, as on an accelerator that computes by itself: the ranks
share the processors of one machine. The default model has 22 MB of parameters.
Exit code 1 if a bar of the cluster is missed: two sites of four at 10 Mbit/s: 94 % of the time computing, a hundredth
of DDP's bytes per sample, a loss within 1 %, DDP's time to the last loss of `local` ten times as long; one slow NIC:
seven times DDP's samples per second, a loss within 1 %; both: PowerSGD's time to that loss 1.2 times as long.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import ringweave
from ringweave import topology
from ringweave.telemetry import read_events
from ringweave.training import Local
from ringweave_bench.lab_workers import LinkBytes, lab_of, run_workers, two_sites

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

from support import text  # noqa: E402
from support.gpt import GPT, GPTConfig  # noqa: E402

CONTEXT, HELD_OUT_ROWS = 64, 256
MAX_BYTES = 4_000_000
RUN_TIMEOUT_S = 1500
SAMPLE_INTERVAL_S = 0.5
EVALUATE_EVERY = 16
SIZES = (
    *("train_steps", "inner_steps", "fragments", "wire", "outer", "ddp_steps"),
    *("batch", "layers", "width", "rank", "sample_ms"),
)
FIRST_COMPRESSED = 10
"""Train step from which PowerSGD's hook compresses; torch's default of 1000 is beyond these trainings."""
SLOW_NIC = """\
name: slow-nic
nodes:
  - {name: a, nic: 100Mbit/s, devices: 1, count: 7}
  - {name: b, nic: 10Mbit/s, devices: 1}
latency: 100us
"""
CLUSTERS = {"two-sites": two_sites(4), "slow-nic": topology.loads(SLOW_NIC)}
THIN_LINKS = {"two-sites": "core", "slow-nic": "b"}
"""Part of the names of the links whose bytes count."""
BARS = {
    "two-sites": {"computing": 0.94, "bytes_ratio": 100.0, "loss": 0.01, "time_ratio": 10.0, "powersgd_ratio": 1.2},
    "slow-nic": {"rate_ratio": 7.0, "loss": 0.01, "powersgd_ratio": 1.2},
}


def main() -> None:
    """Under a launcher a worker; else bring the lab up, run the workers in it and print what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", default="two-sites", choices=list(CLUSTERS), help="cluster of the lab")
    parser.add_argument("--train-steps", type=int, default=256, help="train steps of local")
    parser.add_argument("--inner-steps", type=int, default=0, help="train steps of one outer step; 0 derives them")
    parser.add_argument("--fragments", type=int, default=Local().fragments, help="parts of the parameters")
    parser.add_argument("--wire", default=Local().wire, help="format of outer gradients")
    parser.add_argument("--outer", default="", help="LR/MOMENTUM of the outer optimizer, if not the default")
    parser.add_argument("--ddp-steps", type=int, default=3, help="train steps of DDP")
    parser.add_argument("--rank", type=int, default=2, help="rank of PowerSGD's matrices; 0 leaves PowerSGD out")
    parser.add_argument(
        "--skip-loss", action="store_true", help="leave out synchronous training, and the bars of losses"
    )
    parser.add_argument("--batch", type=int, default=32, help="sequences of a train step, over all ranks")
    parser.add_argument("--layers", type=int, default=1, help="blocks of the model")
    parser.add_argument("--width", type=int, default=656, help="width of the model")
    parser.add_argument("--sample-ms", type=float, default=100.0, help="pause for each sample of a rank")
    parser.add_argument("--out", type=Path, default=Path("runs/local-in-lab"), help="folder for the run")
    options = parser.parse_args()
    if "RANK" in os.environ:
        work(options)
    else:
        sys.exit(report(run_in_lab(options), options))


def run_in_lab(options: argparse.Namespace) -> dict[str, Any]:
    """Run the workers; return their measurements, with the bytes that the uplinks carried in each phase.

    Raises:
        SystemExit: The run failed; its output is shown.
    """
    out = options.out.absolute()
    own = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in SIZES] + [f"--out={out}"]
    with (
        lab_of(CLUSTERS[options.cluster], f"local-{options.cluster}") as place,
        LinkBytes(place, lambda link: THIN_LINKS[options.cluster] in link, SAMPLE_INTERVAL_S) as uplinks,
    ):
        run_workers(place, __file__, own, out / "run", timeout_s=RUN_TIMEOUT_S, options=["--mode", "local"])
    measured = json.loads((out / "measured.json").read_text())
    for phase in measured["phases"].values():
        phase["uplink_bytes"] = uplinks.sent_between(phase["began"], phase["ended"])
    events, began = (
        read_events(out / "run" / "events.jsonl"),
        measured["phases"]["local"]["began"],
    )  # of earlier runs too
    steps = [each for each in events if each["kind"] == "outer_step" and each["time"] > began]
    return measured | {"outer_steps": steps}


def settings_of(options: argparse.Namespace) -> Local:
    """Return the settings of mode local."""
    rates = [float(each) for each in options.outer.split("/") if each]
    outer = dict(zip(("outer_lr", "outer_momentum"), rates, strict=False))
    return Local(inner_steps=options.inner_steps or None, wire=options.wire, fragments=options.fragments, **outer)


def work(options: argparse.Namespace) -> None:
    """Run one rank: an epoch of local, then train steps of its peers."""
    torch.set_num_threads(1)
    dist.init_process_group("ringweave")
    train, held_out = corpus()
    num_samples = options.train_steps * options.batch
    loader = DataLoader(TensorDataset(*(each[:num_samples] for each in train.tensors)), batch_size=options.batch)
    model, optimizer, shared = ringweave.prepare(*make(options), loader, mode="local", local=settings_of(options))
    gloo = dist.new_group(backend="gloo")
    dist.barrier(gloo)
    began = time.time()
    for inputs, targets in shared:
        step(model, optimizer, inputs, targets)
    phases, loss, peers = {"local": phase(began, num_samples)}, held_out_loss(model.module, held_out), {}
    for name in ("ddp", "powersgd")[: 2 if options.rank else 1]:
        peers[name] = train_peer(name, options, gloo, loss)
        phases[name] = peers[name].pop("phase")
    if dist.get_rank() == 0:
        document = {
            "phases": phases,
            "local_loss": loss,
            "peers": peers,
            "model_bytes": sum(each.nbytes for each in model.parameters()),
            "load": os.getloadavg(),
        }
        (options.out / "measured.json").write_text(json.dumps(document, indent=2) + "\n")
    dist.barrier(gloo)
    dist.destroy_process_group()


def train_peer(name: str, options: argparse.Namespace, group: Any, target: float) -> dict[str, Any]:
    """Train with DDP on Gloo, or with PowerSGD until it has that held-out loss.

    Returns:
        `phase`, `step_s` of each step, and `losses`: (train step, held-out loss) of PowerSGD.
    """
    model, optimizer = make(options)
    parallel = DistributedDataParallel(model, process_group=group, init_sync=False)  # the same first weights
    num_steps, losses, step_s = options.ddp_steps, list[tuple[int, float]](), list[float]()
    if name == "powersgd":
        num_steps = options.train_steps
        state = powerSGD_hook.PowerSGDState(
            group, matrix_approximation_rank=options.rank, start_powerSGD_iter=FIRST_COMPRESSED
        )
        parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    (train, held_out), own = corpus(), options.batch // dist.get_world_size()
    dist.barrier(group)
    began = time.time()
    for number in range(num_steps):
        first = number * options.batch + dist.get_rank() * own
        dist.barrier(group)
        began_s = time.perf_counter()
        step(parallel, optimizer, *(each[first : first + own] for each in train.tensors))
        step_s.append(time.perf_counter() - began_s)
        if name == "powersgd" and (number + 1) % EVALUATE_EVERY == 0:
            losses.append((number + 1, held_out_loss(model, held_out)))  # the same on all ranks
            if losses[-1][1] <= target:
                break
    dist.barrier(group)
    return {"phase": phase(began, len(step_s) * options.batch), "step_s": step_s, "losses": losses}


def phase(began: float, num_samples: int) -> dict[str, Any]:
    """Return a phase that ends now."""
    return {"began": began, "ended": time.time(), "samples": num_samples}


def step(model: Any, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    """Do a train step."""
    optimizer.zero_grad()
    model(inputs, targets).backward()
    optimizer.step()


def train_alone(options: argparse.Namespace) -> list[float]:
    """Return held-out losses of one process on the same batches in whole, every so many train steps and at the end."""
    train, held_out = corpus()
    model, optimizer = make(argparse.Namespace(**{**vars(options), "sample_ms": 0.0}))
    losses = []
    for number in range(options.train_steps):
        begin = number * options.batch
        step(model, optimizer, *(each[begin : begin + options.batch] for each in train.tensors))
        if (number + 1) % EVALUATE_EVERY == 0 or number + 1 == options.train_steps:
            losses.append(held_out_loss(model, held_out))
    return losses


@torch.no_grad()
def held_out_loss(model: GPT, held_out: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Return nats per byte."""
    return model(*held_out).item()


def report(measured: dict[str, Any], options: argparse.Namespace) -> int:
    """Print what was measured; return the exit code."""
    seconds = {name: each["ended"] - each["began"] for name, each in measured["phases"].items()}
    lost_s = sum(each["wait_s"] + each["blocked_s"] for each in measured["outer_steps"])
    per_sample = {name: each["uplink_bytes"] / each["samples"] for name, each in measured["phases"].items()}
    found = {"computing": 1 - lost_s / seconds["local"], "bytes_ratio": per_sample["ddp"] / per_sample["local"]}
    derived = [each["next_inner_steps"] for each in measured["outer_steps"]]
    print(f"measured, {measured['model_bytes'] / 1e6:.2f} MB of parameters, load {measured['load']}:")
    print(f"  {len(derived)} outer steps, inner steps {derived[0]} to {derived[-1]}, {settings_of(options)}")
    print(f"  local: {found['computing']:.1%} of the time computing; {shown_rest(measured['outer_steps'])}")
    print(f"  bytes over thin links per sample: {', '.join(f'{name} {each:.0f}' for name, each in per_sample.items())}")
    print(f"  ratio of bytes: {found['bytes_ratio']:.1f}")
    steps_s = {name: each["step_s"] for name, each in measured["peers"].items()}
    rates = {name: options.batch * len(each) / sum(each) for name, each in steps_s.items()}
    rates["local"] = measured["phases"]["local"]["samples"] / seconds["local"]
    found["rate_ratio"] = rates["local"] / rates["ddp"]
    print(f"  samples per second: {', '.join(f'{name} {each:.1f}' for name, each in rates.items())}")
    print(f"  local is {found['rate_ratio']:.1f} times as fast as DDP")
    if "powersgd" in steps_s:
        found["powersgd_ratio"] = compare_powersgd(measured, seconds["local"])
    if not options.skip_loss:
        step_s = sum(steps_s["ddp"]) / options.ddp_steps
        found |= compare_losses(measured["local_loss"], options, step_s / seconds["local"])
    bars = BARS[options.cluster]
    missed = [name for name, each in found.items() if name in bars and (each > bars[name]) == (name == "loss")]
    print(f"  missed: {', '.join(missed) or 'nothing'}")
    return int(bool(missed))


def shown_rest(outer_steps: Sequence[Mapping[str, Any]]) -> str:
    """Return the seconds of rank 0 that were no computing, by what it did: measured."""
    *of_one, last = outer_steps
    waits_s, blocked_s = [each["wait_s"] for each in of_one], sum(each["blocked_s"] for each in outer_steps)
    return (
        f"waits for fragments {sum(waits_s):.2f} s (the longest {max(waits_s, default=0.0):.2f} s), for all fragments "
        f"at the end {last['wait_s']:.2f} s, outer steps {blocked_s:.2f} s"
    )


def compare_powersgd(measured: dict[str, Any], local_s: float) -> float:
    """Print PowerSGD's time to the last loss of local; return it as a multiple of local's time.

    Where it has not reached that loss after as many train steps, the time of these steps is a lower limit.
    """
    peer, target = measured["peers"]["powersgd"], measured["local_loss"]
    (steps, loss), needed_s = peer["losses"][-1], sum(peer["step_s"])
    least = "" if loss <= target else "more than "
    print(f"  PowerSGD: held-out loss {loss:.4f} after {steps} train steps, local {target:.4f} at its end")
    print(f"  time to that loss: PowerSGD {least}{needed_s / local_s:.2f} times as long")
    return needed_s / local_s


def compare_losses(loss: float, options: argparse.Namespace, step_ratio: float) -> dict[str, float]:
    """Print how the loss of local compares with synchronous training; `step_ratio` is DDP's step over local's time."""
    losses = train_alone(options)
    steps = next((index for index, each in enumerate(losses, 1) if each <= loss), len(losses)) * EVALUATE_EVERY
    steps = min(steps, options.train_steps)
    found = {"loss": loss / losses[-1] - 1, "time_ratio": steps * step_ratio}
    print(f"  held-out loss after {options.train_steps} train steps: local {loss:.4f}, synchronous {losses[-1]:.4f}")
    print(f"  that is {found['loss']:+.2%}; synchronous training reaches local's loss after about {steps} train steps")
    print(f"  time to that loss: DDP {found['time_ratio']:.1f} times as long")
    return found


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


class PausedGPT(GPT):
    """GPT whose samples take their time where gradients are wanted."""

    sample_s = 0.0

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss, (), after the pause."""
        if torch.is_grad_enabled():
            time.sleep(len(inputs) * self.sample_s)
        return super().forward(inputs, targets)


def make(options: argparse.Namespace, seed: int = 0) -> tuple[GPT, torch.optim.AdamW]:
    """Return a model with the same first weights everywhere, and its optimizer."""
    torch.manual_seed(seed)
    model = PausedGPT(GPTConfig(layers=options.layers, width=options.width, context=CONTEXT))
    model.sample_s = options.sample_ms / 1e3
    return model, torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)


if __name__ == "__main__":
    main()
