"""Program of every rank: equal models on the same samples, trained in different modes, taking turns of whole epochs."""

import argparse
import copy
import json
import os
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rows import GLOO, ROWS
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import ringweave
from ringweave.environment import WorkerEnvironment
from ringweave.jobs import modes
from ringweave.training import Asynchronous
from ringweave.training.collectives import ControlGroup
from ringweave.training.data import order
from ringweave.training.mode_choice import forecast, step_benchmark
from ringweave.training.options import Script

READY, TURNED = "ready", "turned"
"""Files by which rank 0 asks for quotas."""
NUM_IMAGES = 1797


@dataclass(kw_only=True, slots=True)
class Contender:
    """One way to train."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: Iterable[Any]
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    marks: list[tuple[int, float, int]] = field(default_factory=list)
    """(epoch, seconds since its begin, samples) of each batch of this rank, at its end."""


def main() -> None:
    """Train, and write what was measured."""
    parser = argparse.ArgumentParser()
    for name, kind in (("row", str), ("epochs", int), ("samples", int), ("batch", int), ("channels", int)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--contenders", required=True, help="separated by commas; one with a parameter server at most")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    wait_for_quotas(options.out / READY)  # before there are groups: pieces are made for parts of processors
    dist.init_process_group("ringweave")
    control = dist.new_group(backend="gloo")
    auto = chosen_by_auto(options)
    names = options.contenders.split(",")
    contenders = {name: (on_gloo if name == GLOO else prepared(name))(options) for name in names}
    train(contenders, options, control)
    marks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(marks, {name: each.marks for name, each in contenders.items()}, group=control)
    if dist.get_rank() == 0:
        found: dict[str, Any] = {
            name: {
                "seconds": each.seconds,
                "losses": each.losses,
                "marks": sorted(mark for of_rank in marks for mark in of_rank[name]),
            }
            for name, each in contenders.items()
        }
        (options.out / "measured.json").write_text(json.dumps({"auto": auto, "measured": found}) + "\n")
    dist.barrier(group=control)
    dist.destroy_process_group()


def train(contenders: dict[str, Contender], options: argparse.Namespace, control: Any) -> None:
    """Epochs in turns; the first one of each is a warm-up that counts for the loss and not for the speed."""
    has_turned = False
    for epoch in range(options.epochs):
        if ROWS[options.row].later_speeds and not has_turned and epoch >= options.epochs // 2:
            signal(options.out / TURNED, control)
            has_turned = True
        for name in sorted(contenders, reverse=epoch % 2 == 1):
            each = contenders[name]
            for group in each.optimizer.param_groups:  # as a scheduler would, the same for all
                group["lr"] = learning_rate(options) * (1 - epoch / options.epochs)
            dist.barrier(group=control)
            started_s = time.perf_counter()
            if isinstance(sampler := getattr(each.loader, "sampler", None), DistributedSampler):
                sampler.set_epoch(epoch)  # as torch's documentation has it: another order in each epoch
            one_epoch(each, epoch)
            dist.barrier(group=control)
            each.seconds.append(time.perf_counter() - started_s)
            each.losses.append(held_out_loss(each.model, options))


LEARNING_RATE, MOST_SCALED = 0.02 / 2048, 3072
"""By each sample of a batch, and the largest batch that it is for. Two orders of the samples end within 1 % of each
other with it after six epochs, with batches of 2048 and 3072, and of 4096 and 5120 at the rate of 3072; at a rate of
4096 they end up to 4 % apart (one process, two seeds)."""


def learning_rate(options: argparse.Namespace) -> float:
    """Return a rate in proportion to the batch (arXiv 1706.02677, section 2.1), but not above the steady limit."""
    return LEARNING_RATE * min(options.batch, MOST_SCALED)


def chosen_by_auto(options: argparse.Namespace) -> list[str]:
    """Return the mode that `prepare` would choose here if it was free, and the reason; no mode has to run for it."""
    model, optimizer, samples, _ = make(options)
    loader = DataLoader(samples, batch_size=options.batch, shuffle=True)
    reading, messages = order.read_loader(loader), ControlGroup()
    environment = WorkerEnvironment.from_environ(os.environ)
    own = forecast.describe_own_rank(model, loader, reading, environment, is_needed=True)
    own |= {"optimizer": type(optimizer).__name__, "cap": None, "batch_samples": reading.batch_samples}
    own["num_samples"] = reading.num_samples
    said = messages.gather_json(own)
    settings = Asynchronous(local_steps=ROWS[options.row].local_steps)
    decided = modes.decide_mode(modes.AUTO, modes.AUTO, messages.world_size)
    script = Script(
        model=model,
        optimizer=optimizer,
        loader=loader,
        spec=reading,
        seed=options.seed,
        mode=modes.AUTO,
        reduction="mean",
        max_samples=None,
        ddp={},
        settings=settings,
        extra_state={},
        on_failure="recompute",
    )
    said, _ = step_benchmark.benchmark_if_useful(said, script, messages, environment, decided[0], is_open=True)
    return list(forecast.choose_mode(decided, said, None, is_open=True, local_steps=settings.local_steps)[:2])


def make(options: argparse.Namespace) -> tuple[nn.Module, torch.optim.Optimizer, Dataset[Any], TensorDataset]:
    """A small convolutional model, its optimizer, digits to train on and others; wide where links are to be busy."""
    torch.manual_seed(options.seed)
    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    wide = options.channels
    model = nn.Sequential(
        *(nn.Conv2d(1, wide, 3, padding=1), nn.ReLU(), nn.Conv2d(wide, wide, 3, padding=1), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * wide, 10)),
    )
    if ROWS[options.row].is_communication_bound:
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU())
        model = nn.Sequential(model, nn.Linear(1024, 10))
    if ROWS[options.row].stall:
        model = Stalling(model, ROWS[options.row].stall, random.Random(f"{options.seed} {dist.get_rank()}"))
    samples = TensorDataset((images.float() / 16).view(-1, 1, 8, 8), labels)
    # Every fifth image is held out; the others come again and again until there are enough.
    train_on = [index for index in range(NUM_IMAGES) if index % 5]
    train_on = (train_on * (options.samples // len(train_on) + 1))[: options.samples]
    held_out = torch.arange(NUM_IMAGES) % 5 == 0
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate(options), momentum=0.9)
    return model, optimizer, Subset(samples, train_on), TensorDataset(*(each[held_out] for each in samples.tensors))


def on_gloo(options: argparse.Namespace) -> Contender:
    """Set DDP up on Gloo, as torch's documentation does."""
    model, optimizer, samples, _ = make(options)
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    sampler: DistributedSampler[Any] = DistributedSampler(samples, seed=options.seed)
    loader = DataLoader(samples, batch_size=options.batch // dist.get_world_size(), sampler=sampler)
    parallel = DistributedDataParallel(model, process_group=group)
    return Contender(model=parallel, optimizer=optimizer, loader=loader)


def prepared(mode: str) -> Callable[[argparse.Namespace], Contender]:
    """Three lines more than a script that trains alone."""

    def made(options: argparse.Namespace) -> Contender:
        model, optimizer, samples, _ = make(options)
        loader = DataLoader(samples, batch_size=options.batch, shuffle=True)
        settings = Asynchronous(local_steps=ROWS[options.row].local_steps)
        found = ringweave.prepare(model, optimizer, loader, mode=mode, asynchronous=settings)
        return Contender(model=found[0], optimizer=found[1], loader=found[2])

    return made


def one_epoch(each: Contender, epoch: int) -> None:
    """Train one pass."""
    began_s = time.perf_counter()
    for images, labels in each.loader:
        each.optimizer.zero_grad()
        nn.functional.cross_entropy(each.model(images), labels).backward()
        each.optimizer.step()
        each.marks.append((epoch, round(time.perf_counter() - began_s, 4), len(labels)))


class Stalling(nn.Module):
    """A model that now and then does the work of a step three times more, before the step itself."""

    def __init__(self, model: nn.Module, chance: float, draw: random.Random) -> None:
        super().__init__()
        self.model, self._chance, self._draw = model, chance, draw

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """The model's output."""
        if torch.is_grad_enabled() and self._draw.random() < self._chance:
            twin = copy.deepcopy(self.model)
            for _ in range(3):
                twin(images).square().mean().backward()
        return self.model(images)


@torch.no_grad()
def held_out_loss(model: nn.Module, options: argparse.Namespace) -> float:
    """Return the held-out loss on rank 0; the others wait at the next barrier."""
    if dist.get_rank() != 0:
        return 0.0
    images, labels = make(options)[3].tensors
    return nn.functional.cross_entropy(getattr(model, "module", model)(images), labels).item()


def wait_for_quotas(path: Path) -> None:
    """Tell the process outside that all ranks have started, and wait until they have their quotas."""
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    Path(f"{path}.{rank}").touch()
    if rank == 0:
        for other in range(num_ranks):
            wait_for(Path(f"{path}.{other}"))
        path.touch()
    wait_for(Path(f"{path}.done"))


def signal(path: Path, control: Any) -> None:
    """Tell the process outside that the quotas shall change, and wait until they have."""
    dist.barrier(group=control)
    if dist.get_rank() == 0:
        path.touch()
        wait_for(Path(f"{path}.done"))
    dist.barrier(group=control)


def wait_for(path: Path) -> None:
    """Wait until the file exists."""
    while not path.exists():
        time.sleep(0.05)


if __name__ == "__main__":
    assert "RANK" in os.environ, "started by table.py"
    main()
