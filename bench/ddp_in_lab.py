"""DDP on ringweave beside DDP on Gloo, in the lab: samples per second, losses, and what is hidden behind backward.

    python bench/ddp_in_lab.py --steps 10           # needs root; another cluster: --cluster FILE

One job, two process groups, two DDP models with the same first weights and samples, DDP's own bucket sizes. They take
turns A B, B A step by step, with a barrier in between, so both meet the same machine. A step is forward, backward with
allreduce, and update; its time is the slowest rank's. Also timed: the same step without allreduce (`no_sync`), and an
allreduce of as many bytes without anything else. What of the two a step does not add up to was hidden.
Exit code 1 if the losses differ by more than 1e-5, or ringweave has less than 1.4 times the samples per second.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ringweave import schedules, topology
from ringweave_bench.lab_workers import lab_of, run_workers

ROOT = Path(__file__).parents[1]
WIDTHS = (1024, 1536, 1536, 1024)
LEARNING_RATE = 0.1
NUM_CLASSES = 16
WARM_UP_STEPS = 20
"""DDP regroups its buckets after the first backward pass; then up to sixteen collectives of each class of sizes are
trials of four candidates, as in any job. What is measured comes after them."""
ALLOWED, TARGET = 1e-5, 1.4
RUN_TIMEOUT_S = 900
T = TypeVar("T")


@dataclass(kw_only=True, slots=True)
class Contender:
    """One model on one process group, and its measurements."""

    group: dist.ProcessGroup | None
    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    compute_s: list[float] = field(default_factory=list)
    allreduce_s: list[float] = field(default_factory=list)


def main() -> None:
    """Under a launcher a worker; else bring the lab up, run the workers in it and print what they found."""
    options = parse_options()
    if "RANK" in os.environ:
        work(options)
    else:
        sys.exit(report(run_in_lab(options)))


def parse_options() -> argparse.Namespace:
    """Returns the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", type=Path, default=ROOT / "examples" / "clusters" / "two-racks.yaml")
    parser.add_argument("--steps", type=int, default=10, help="measured train steps of each")
    parser.add_argument("--batch", type=int, default=8, help="samples of each rank in a step")
    parser.add_argument("--out", type=Path, default=Path("runs/ddp-in-lab"), help="folder for the run")
    return parser.parse_args()


def run_in_lab(options: argparse.Namespace) -> dict[str, Any]:
    """Run the workers; return their measurements and run.json's counts.

    Raises:
        SystemExit: The run failed; its output is shown.
    """
    out = options.out.absolute()
    own = ["--steps", str(options.steps), "--batch", str(options.batch), "--out", str(out)]
    with lab_of(topology.load(options.cluster), f"ddp-{options.cluster.stem}") as place:
        run_workers(place, __file__, own, out, timeout_s=RUN_TIMEOUT_S)
    counts = json.loads((out / "run.json").read_text())["collectives_by_schedule"]
    return json.loads((out / "measured.json").read_text()) | {"by_schedule": counts, "cluster": options.cluster.stem}


def work(options: argparse.Namespace) -> None:
    """Run one rank's measurements."""
    torch.set_num_threads(1)
    dist.init_process_group("ringweave")
    control = gloo_group()
    contenders = {"ringweave": contend(None), "gloo": contend(gloo_group())}
    for number in range(WARM_UP_STEPS + options.steps):
        for name in sorted(contenders, reverse=number % 2 == 1):
            take_turn(contenders[name], number, options.batch, control)
    measured = {name: summarize(each, options.batch) for name, each in contenders.items()}
    if dist.get_rank() == 0:
        sizes = [parameter.nbytes for parameter in contenders["gloo"].model.parameters()]
        weights = [nn.utils.parameters_to_vector(each.model.parameters()).double() for each in contenders.values()]
        apart = ((weights[0] - weights[1]).norm() / weights[1].norm()).item()
        about = {"weights_apart": apart, "workers": dist.get_world_size(), "gradient_bytes": sum(sizes)}
        document = about | {"steps": options.steps, "batch": options.batch} | measured
        (options.out / "measured.json").write_text(json.dumps(document, indent=2) + "\n")
    dist.destroy_process_group()


def gloo_group() -> dist.ProcessGroup:
    """A group of all ranks on Gloo itself."""
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return group


def contend(group: dist.ProcessGroup | None) -> Contender:
    """A model with the same first weights whatever the group; None is the default group."""
    torch.manual_seed(0)
    layers = [module for pair in itertools.pairwise(WIDTHS) for module in (nn.Linear(*pair), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers[:-1]), process_group=group)
    return Contender(group=group, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=LEARNING_RATE))


def take_turn(contender: Contender, number: int, batch: int, control: dist.ProcessGroup) -> None:
    """Run a train step, a pass without allreduce whose gradients are dropped, and an allreduce of as many bytes."""
    generator = torch.Generator().manual_seed(number * dist.get_world_size() + dist.get_rank())
    labels = torch.randint(NUM_CLASSES, (batch,), generator=generator)
    samples = torch.randn(batch, WIDTHS[0], generator=generator) + 4 * nn.functional.one_hot(labels, WIDTHS[0])
    loss, step_s = clock(lambda: train_step(contender, samples, labels), control)
    with contender.model.no_sync():
        _, compute_s = clock(lambda: train_step(contender, samples, labels, is_dry=True), control)
    content = torch.ones(sum(parameter.numel() for parameter in contender.model.parameters()))
    _, allreduce_s = clock(lambda: dist.all_reduce(content, group=contender.group), control)
    dist.all_reduce(loss, group=control)
    contender.losses.append(loss.item() / dist.get_world_size())
    if number >= WARM_UP_STEPS:
        contender.step_s.append(step_s)
        contender.compute_s.append(compute_s)
        contender.allreduce_s.append(allreduce_s)


def train_step(
    contender: Contender, samples: torch.Tensor, labels: torch.Tensor, *, is_dry: bool = False
) -> torch.Tensor:
    """The loss before the update; a dry step computes the same with a rate of zero."""
    contender.optimizer.zero_grad()
    contender.optimizer.param_groups[0]["lr"] = 0.0 if is_dry else LEARNING_RATE
    loss = nn.functional.cross_entropy(contender.model(samples), labels)
    loss.backward()
    contender.optimizer.step()
    return loss.detach()


def clock(action: Callable[[], T], control: dist.ProcessGroup) -> tuple[T, float]:
    """Return an action's result, and the seconds of the slowest rank; all begin together."""
    dist.barrier(group=control)
    started_s = time.perf_counter()
    result = action()
    taken = torch.tensor(time.perf_counter() - started_s, dtype=torch.float64)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX, group=control)
    return result, taken.item()


def summarize(contender: Contender, batch: int) -> dict[str, object]:
    """Medians, and the samples of all ranks per second over all measured steps."""
    samples = batch * dist.get_world_size() * len(contender.step_s)
    step_s, compute_s, allreduce_s = map(
        statistics.median, (contender.step_s, contender.compute_s, contender.allreduce_s)
    )
    return {
        "samples_per_s": samples / sum(contender.step_s),
        "step_s": step_s,
        "compute_s": compute_s,
        "allreduce_s": allreduce_s,
        "hidden_s": compute_s + allreduce_s - step_s,
        "losses": contender.losses,
        "steps_s": contender.step_s,
    }


def report(found: dict[str, Any]) -> int:
    """Print the comparison; the exit code."""
    ours, gloo = found["ringweave"], found["gloo"]
    print(
        f"{found['cluster']}: DDP on {found['workers']} workers, {found['gradient_bytes'] / 1e6:.1f} MB of gradients,"
    )
    print(f"{found['steps']} steps of each, {found['batch']} samples a rank; medians of the slowest rank; measured\n")
    print(f"{'system':12}{'samples/s':>10}{'step s':>9}{'without allreduce s':>21}{'allreduce s':>13}{'hidden s':>10}")
    for name, one in (("ringweave", ours), ("gloo", gloo)):
        times = f"{one['step_s']:9.3f}{one['compute_s']:21.3f}{one['allreduce_s']:13.3f}{one['hidden_s']:10.3f}"
        print(f"{name:12}{one['samples_per_s']:10.1f}{times}")
    ratio = ours["samples_per_s"] / gloo["samples_per_s"]
    largest = max(abs(a - b) / abs(b) for a, b in zip(ours["losses"], gloo["losses"], strict=True))
    carried = {name: counts["collectives"] for name, counts in found["by_schedule"].items() if name != schedules.NATIVE}
    print(f"\nringweave's collectives by schedule: {carried}")
    print(f"samples/s relative to gloo: {ratio:.2f}, expected {TARGET} or more")
    print(f"loss {gloo['losses'][0]:.3f} at the first step, {gloo['losses'][-1]:.3f} at the last")
    print(f"largest relative difference of a loss: {largest:.1e}, expected {ALLOWED:g} or less")
    print(f"weights apart at the end, relative to their norm: {found['weights_apart']:.1e}")
    is_carried = sum(carried.values()) >= found["steps"]
    return 0 if ratio >= TARGET and largest <= ALLOWED and is_carried else 1


if __name__ == "__main__":
    main()
