"""What workers in rings run that save checkpoints, and go on from them."""

import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import ringweave
from ringweave.testing.elastic import say
from ringweave.training import Asynchronous
from ringweave.training.choosing import trials
from ringweave.training.choosing.trials import Trial
from tests.training.rings.elastic.ring_functions import BATCH, make_data, make_model


def build(rings: int, local_steps: int) -> tuple[nn.Module, torch.optim.Optimizer, Any, Any]:
    """(model, optimizer, loader, schedule) of this worker, in rings; adaptive, so that a lost state would show."""
    trials.measure = lambda *_, **__: Trial()  # on a busy machine it would form other rings
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = loader_of(torch.Generator().manual_seed(3))
    asynchronous = Asynchronous(rings=rings, local_steps=local_steps)
    model, optimizer, loader = ringweave.prepare(model, optimizer, data, mode="ps-hra", asynchronous=asynchronous)
    return model, optimizer, loader, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)


def loader_of(generator: torch.Generator) -> DataLoader:
    """The script's own; the third of what it gives are numbers of samples."""
    return DataLoader(make_data(), batch_size=BATCH, shuffle=True, generator=generator)


def train(
    folder: str, num_epochs: int, rings: int, local_steps: int = 0, every: int = 2, pause_s: float = 0.0
) -> dict[str, Any]:
    """Go on from the newest checkpoint, and save after every so many of this ring's steps.

    Tells of each batch ("drawn", epoch, samples), and of where it began ("loaded", train steps, epoch, loss).
    """
    model, optimizer, loader, schedule = build(rings, local_steps)
    checkpoints = ringweave.Checkpoints(folder, model=model, optimizer=optimizer, loader=loader, schedule=schedule)
    train_step = loaded = checkpoints.load()
    say(("loaded", loaded, loader.next_epoch, loss_of(model)))
    accounts = []
    for epoch in range(loader.next_epoch, num_epochs):
        loader.set_epoch(epoch)
        for inputs, targets, samples in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            schedule.step()
            if loader.fraction:  # a member without samples computes one that does not count
                say(("drawn", epoch, samples.tolist()))
            train_step += 1
            if train_step % every == 0:
                checkpoints.save(train_step)
            time.sleep(pause_s)
        accounts.append(loader.account)
    checkpoints.wait()
    parameters = [each.detach().numpy().copy() for each in model.module.parameters()]
    return {"accounts": accounts, "loaded": loaded, "loss": loss_of(model), "parameters": parameters}


@torch.no_grad()
def loss_of(model: nn.Module) -> float:
    inputs, targets, _ = make_data().tensors
    model = getattr(model, "module", model)
    return float(nn.functional.mse_loss(model(inputs), targets))
