"""What workers in rings run that save checkpoints, and go on from them."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import ringweave
from ringweave.errors import TrainingError
from ringweave.training import speed_test
from ringweave.training.checkpoints import store
from ringweave.training.speed_test import ModelTrial
from tests.fakes.elastic_job import send_message
from tests.training.rings.elastic.ring_functions import BATCH, make_data, make_model, way_of
from tests.training.rings.ring_training import meet_server


def build(rings: int, local_steps: int, fragments: int = 0) -> tuple[nn.Module, torch.optim.Optimizer, Any, Any]:
    """(model, optimizer, loader, schedule) of this worker, in rings; adaptive, so that a lost state would show."""
    speed_test.run_model_trial = lambda *_, **__: ModelTrial()  # on a busy machine it would form other rings
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = loader_of(torch.Generator().manual_seed(3))
    model, optimizer, loader = ringweave.prepare(model, optimizer, data, **way_of(rings, local_steps, fragments))
    return model, optimizer, loader, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)


def loader_of(generator: torch.Generator) -> DataLoader:
    """The script's own; the third of what it gives are numbers of samples."""
    return DataLoader(make_data(), batch_size=BATCH, shuffle=True, generator=generator)


def train(
    folder: str,
    num_epochs: int,
    rings: int,
    local_steps: int = 0,
    every: int = 2,
    pause_s: float = 0.0,
    fragments: int = 0,
    *,
    tell: Callable[[tuple], object] = send_message,
) -> dict[str, Any]:
    """Go on from the newest checkpoint, and save after every so many of this ring's steps.

    Tells of each batch ("drawn", epoch, samples), and of where it began ("loaded", train steps, epoch, loss).
    """
    model, optimizer, loader, schedule = build(rings, local_steps, fragments)
    checkpoints = ringweave.Checkpoints(folder, model=model, optimizer=optimizer, loader=loader, schedule=schedule)
    train_step = loaded = checkpoints.load()
    tell(("loaded", loaded, loader.next_epoch, loss_of(model)))
    accounts = []
    for epoch in range(loader.next_epoch, num_epochs):
        loader.set_epoch(epoch)
        for inputs, targets, samples in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            schedule.step()
            if loader.fraction:  # a member without samples computes one that does not count
                tell(("drawn", epoch, samples.tolist()))
            train_step += 1
            if train_step % every == 0:
                checkpoints.save(train_step)
            time.sleep(pause_s)
        accounts.append(loader.account)
    checkpoints.wait()
    parameters = [each.detach().numpy().copy() for each in model.module.parameters()]
    return {"accounts": accounts, "loaded": loaded, "loss": loss_of(model), "parameters": parameters}


def train_together(port: int, keys: str, *settings: Any) -> dict[str, Any]:
    """The same without `--elastic`; what was told is returned with the rest."""
    meet_server(port, keys)
    told: list[tuple] = []
    found = train(*settings, tell=told.append)
    return {**found, "told": told}


def break_off(port: int, keys: str, folder: str) -> tuple[Any, ...]:
    """Breaks off its first pass and saves; (epoch that a checkpoint goes on with, what a second `load` says)."""
    meet_server(port, keys)
    model, optimizer, loader, _ = build(2, 0)
    checkpoints = ringweave.Checkpoints(folder, model=model, optimizer=optimizer, loader=loader)
    before = checkpoints.clear()
    for number, (inputs, targets, _) in enumerate(loader):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        if number == 1:
            break
    dist.barrier()
    checkpoints.save(2)
    checkpoints.wait()
    dist.barrier()
    saved = store.list_checkpoints(Path(folder))[0]
    try:
        checkpoints.load()
    except TrainingError as error:
        return before, store.read_checkpoint(saved).parts["loader"], str(error)
    return before, None, ""


@torch.no_grad()
def loss_of(model: nn.Module) -> float:
    inputs, targets, _ = make_data().tensors
    model = getattr(model, "module", model)
    return float(nn.functional.mse_loss(model(inputs), targets))
