"""FSDP2 and HSDP on ringweave beside the same on Gloo, in the lab: seconds per train step, and losses.

    python bench/fsdp_in_lab.py --steps 8                # needs root; another cluster: --cluster FILE

One job, and four GPTs (of examples/support) with the same first weights and samples: FSDP2 over all ranks, and HSDP
with two replicas of half of the ranks each, on ringweave and on Gloo. They take turns, with a barrier in between, so
all meet the same machine. A step is forward, backward and update; its time is the slowest rank's. The first steps warm
up: in them, ringweave's schedules are tried.
Exit code 1 if a loss differs by more than 1e-6 from that on Gloo, or a step is less than 1.5 times faster.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from ddp_in_lab import clock, gloo_group

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from ringweave import lab, topology  # noqa: E402
from support.gpt import GPT, NUM_BYTES, GPTConfig  # noqa: E402

LEARNING_RATE = 1e-3
WARM_UP_STEPS = 10
"""FSDP gathers each block twice a step: the class of sizes of a block has its trials in the first steps."""
ALLOWED, TARGET = 1e-6, 1.5
RUN_TIMEOUT_S = 1800


@dataclass(kw_only=True, slots=True)
class Contender:
    """One sharded model, and its measurements."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)


def main() -> None:
    """Under a launcher a worker; else bring the lab up, run the workers in it and print what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", type=Path, default=ROOT / "examples" / "clusters" / "two-racks.yaml")
    parser.add_argument("--steps", type=int, default=8, help="measured train steps of each")
    parser.add_argument("--layers", type=int, default=4, help="blocks of the model")
    parser.add_argument("--width", type=int, default=256, help="width of the model: 4 blocks of 256 are 13 MB")
    parser.add_argument("--out", type=Path, default=Path("runs/fsdp-in-lab"), help="folder for the run")
    options = parser.parse_args()
    if "RANK" in os.environ:
        work(options)
    else:
        sys.exit(report(run_in_lab(options), options))


def run_in_lab(options: argparse.Namespace) -> dict[str, Any]:
    """Run the workers; return their measurements and run.json's counts.

    Raises:
        SystemExit: The run failed; its output is shown.
    """
    place = lab.up(topology.load(options.cluster), f"fsdp-{options.cluster.stem}")
    out = options.out.absolute()
    verb = [sys.executable, "-c", "from ringweave.cli.main import main; main()", "lab", "run", "--lab", place.name]
    own = [f"--{name}={getattr(options, name)}" for name in ("steps", "layers", "width")] + [f"--out={out}"]
    try:
        command = [*verb, "--run-dir", str(out), __file__, *own]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=RUN_TIMEOUT_S)
    finally:
        lab.down(place.name)
    if done.returncode != 0:
        raise SystemExit(f"workers: exit code {done.returncode}, expected 0.\n{done.stdout}{done.stderr}")
    counts = json.loads((out / "run.json").read_text())["collectives_by_schedule"]
    return json.loads((out / "measured.json").read_text()) | {"by_schedule": counts, "cluster": options.cluster.stem}


def work(options: argparse.Namespace) -> None:
    """Run one rank's measurements."""
    torch.set_num_threads(1)
    dist.init_process_group("ringweave")
    control = gloo_group()
    config = GPTConfig(layers=options.layers, width=options.width)
    contenders = {
        f"{kind} {backend}": shard(config, mesh(kind, backend))
        for kind in ("FSDP2", "HSDP")
        for backend in ("ringweave", "gloo")
    }
    for number in range(WARM_UP_STEPS + options.steps):
        for name in sorted(contenders, reverse=number % 2 == 1):
            take_turn(contenders[name], number, control)
    if dist.get_rank() == 0:
        num_bytes = sum(parameter.nbytes for parameter in GPT(config).parameters())
        measured = {name: {"losses": each.losses, "steps_s": each.step_s} for name, each in contenders.items()}
        document = {"workers": dist.get_world_size(), "model_bytes": num_bytes, "contenders": measured}
        (options.out / "measured.json").write_text(json.dumps(document, indent=2) + "\n")
    dist.destroy_process_group()


def mesh(kind: str, backend: str) -> DeviceMesh:
    """Return a mesh of all ranks on a backend: one dimension, or two replicas of shards."""
    size, rank = dist.get_world_size(), dist.get_rank()

    def group_of_own(groups: list[list[int]]) -> dist.ProcessGroup:
        made = {tuple(ranks): dist.new_group(ranks, backend=backend) for ranks in groups}
        return next(group for ranks, group in made.items() if rank in ranks)

    if kind == "FSDP2":
        return DeviceMesh.from_group(group_of_own([list(range(size))]), "cpu")
    rows = torch.arange(size).view(2, size // 2)
    pair, half = group_of_own(rows.t().tolist()), group_of_own(rows.tolist())
    return DeviceMesh.from_group([pair, half], "cpu", mesh=rows, mesh_dim_names=("replicas", "shards"))


def shard(config: GPTConfig, over: DeviceMesh) -> Contender:
    """Return a model with the same first weights whatever the mesh."""
    torch.manual_seed(0)
    model = GPT(config)
    for block in model.blocks:
        fully_shard(block, mesh=over)
    fully_shard(model, mesh=over)
    return Contender(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE))


def take_turn(contender: Contender, number: int, control: dist.ProcessGroup) -> None:
    """Run a train step."""
    generator = torch.Generator().manual_seed(number * dist.get_world_size() + dist.get_rank())
    content = torch.randint(NUM_BYTES, (1, 17), generator=generator)

    def step() -> torch.Tensor:
        contender.optimizer.zero_grad()
        loss = contender.model(content[:, :-1], content[:, 1:])
        loss.backward()
        contender.optimizer.step()
        return loss.detach()

    loss, seconds = clock(step, control)
    dist.all_reduce(loss, group=control)
    contender.losses.append(loss.item() / dist.get_world_size())
    if number >= WARM_UP_STEPS:
        contender.step_s.append(seconds)


def report(found: dict[str, Any], options: argparse.Namespace) -> int:
    """Print the comparison; the exit code."""
    print(f"{found['cluster']}: {found['workers']} workers, {found['model_bytes'] / 1e6:.1f} MB of parameters,")
    print(f"{options.steps} steps of each; medians of the slowest rank; measured\n")
    missed = False
    for kind in ("FSDP2", "HSDP"):
        ours, gloo = found["contenders"][f"{kind} ringweave"], found["contenders"][f"{kind} gloo"]
        times = statistics.median(ours["steps_s"]), statistics.median(gloo["steps_s"])
        apart = max(abs(a - b) / abs(b) for a, b in zip(ours["losses"], gloo["losses"], strict=True))
        print(f"{kind:6} ringweave {times[0]:.3f} s, gloo {times[1]:.3f} s a step: {times[1] / times[0]:.2f} times")
        print(f"       losses {ours['losses'][0]:.4f} to {ours['losses'][-1]:.4f}, apart by {apart:.1e} at most")
        missed |= times[1] / times[0] < TARGET or apart > ALLOWED
    carried = {name: counts["collectives"] for name, counts in found["by_schedule"].items()}
    print(f"\nringweave's collectives by schedule: {carried}")
    print(f"expected: {TARGET} times or more, losses apart by {ALLOWED:g} or less")
    return 1 if missed else 0


if __name__ == "__main__":
    main()
