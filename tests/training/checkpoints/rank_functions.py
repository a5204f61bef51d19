"""Training that is interrupted and goes on elsewhere: run by real processes."""

import itertools
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

import ringweave
from ringweave.planning import balancing
from ringweave.training.data import order as data_order

NUM_SAMPLES, BATCH = 51, 8


class Numbered(TensorDataset):
    """Samples that say who they are."""

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return (index, *super().__getitem__(index))


def make() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    samples = Numbered(torch.randn(NUM_SAMPLES, 4).double(), torch.randn(NUM_SAMPLES, 1).double())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, DataLoader(samples, batch_size=BATCH, shuffle=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> list[int]:
    """One pass, or what is given of it; the samples that this process computed."""
    seen: list[int] = []
    for indices, x, y in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        seen += indices.tolist()
    return seen


def go_on(folder: Path, num_steps: int | None, mode: str = "sync") -> dict[str, Any]:
    """Train from the last checkpoint: so many steps and save, or to the end of the epoch."""
    model, optimizer, loader = ringweave.prepare(*make(), mode=mode)
    checkpoints = ringweave.Checkpoints(folder, model=model, optimizer=optimizer, loader=loader)
    done = checkpoints.load()
    epoch = loader.next_epoch
    seen = train(model, optimizer, _computed(loader, num_steps))
    if num_steps is not None:
        checkpoints.save(done + num_steps)
        assert checkpoints.wait(60)
    weights = nn.utils.parameters_to_vector(model.module.parameters()).detach()
    account = loader.account
    return {
        "done": done,
        "epoch": epoch,
        "seen": seen,
        "weights": weights.tolist(),
        "exact": account is not None and account.is_exact,
    }


def _computed(loader: Any, num_steps: int | None) -> Iterator[Any]:
    """So many batches; of those that do not count, as this rank has no samples of them, without their numbers."""
    for indices, x, y in itertools.islice(loader, num_steps):
        yield indices if loader.fraction else indices[:0], x, y


def weights_of_one_process() -> list[float]:
    """After an epoch without any rank, in the order of samples that ranks use."""
    model, optimizer, loader = make()
    order = balancing.shuffle_indices(NUM_SAMPLES, data_order.shuffle_seed(loader), 0)
    samples = default_collate([loader.dataset[int(index)] for index in order])
    whole = [[values[first : first + BATCH] for values in samples] for first in range(0, NUM_SAMPLES, BATCH)]
    train(model, optimizer, whole)
    return nn.utils.parameters_to_vector(model.parameters()).tolist()


def load_and_save(folder: Path) -> int:
    """Save at once what was loaded, before any batch."""
    model, optimizer, loader = ringweave.prepare(*make(), mode="sync")
    checkpoints = ringweave.Checkpoints(folder, model=model, optimizer=optimizer, loader=loader)
    done = checkpoints.load()
    checkpoints.save(done)
    assert checkpoints.wait(60)
    return done


def go_on_apart(folder: Path, num_steps: int | None) -> dict[str, Any]:
    """No two ranks reach the same disk."""
    return go_on(folder / f"disk-of-{dist.get_rank()}", num_steps)


def draw_saving(folder: Path, train_step: int) -> list[float]:
    """Random numbers of this rank after it saved."""
    checkpoints = _seeded(folder, train_step)
    checkpoints.save(train_step)
    assert checkpoints.wait(60)
    return torch.rand(3).tolist()


def draw_loading(folder: Path, train_step: int) -> list[float]:
    """Random numbers of this rank after it loaded."""
    _seeded(folder, train_step).load()
    return torch.rand(3).tolist()


def _seeded(folder: Path, train_step: int) -> ringweave.Checkpoints:
    checkpoints = ringweave.Checkpoints(folder, model=make()[0])
    torch.manual_seed(100 * train_step + dist.get_rank())
    return checkpoints


def save_for_ever(folder: str, teller: Connection) -> None:
    """Go on from the newest checkpoint, and save again and again; a step is told before it is saved."""
    model = nn.Linear(1000, 1000)
    checkpoints = ringweave.Checkpoints(folder, model=model, keep=2)
    train_step = checkpoints.load()
    assert train_step == 0 or model.weight.unique().tolist() == [train_step], "the state is that of its step"
    while True:
        train_step += 1
        nn.init.constant_(model.weight, train_step)
        teller.send(train_step)
        checkpoints.save(train_step)
        checkpoints.wait()
