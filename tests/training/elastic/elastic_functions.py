"""What workers of elastic jobs in tests run."""

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ringweave
from ringweave.comm.regrouping import EpochGroups
from ringweave.planning.balancing import Speed, SpeedEstimator
from ringweave.testing.elastic import own_member, say

NUM_SAMPLES, BATCH, WIDTH = 96, 12, 6


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(NUM_SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.sin(inputs.sum(1, keepdim=True)), torch.arange(NUM_SAMPLES))


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train(
    num_epochs: int = 2,
    faults: Mapping[str, tuple[int, str]] | None = None,
    pause_s: float = 0.0,
    awaited: str = "",
    mode: str = "sync",
) -> dict[str, Any]:
    """Train, telling what is drawn and done.

    `faults` are member -> (step, moment) of its death. Until the member that is `awaited` has joined, pauses are five
    times as long.
    """
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = DataLoader(make_data(), batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(3))
    model, optimizer, loader = ringweave.prepare(model, optimizer, data, mode=mode, ddp={"bucket_cap_mb": 0.001})
    say(("prepared",))
    at, moment = (faults or {}).get(own_member(), (-1, ""))
    accounts, has_come = [], not awaited
    for epoch in loader.epochs(num_epochs):
        for number, (inputs, targets, indices) in enumerate(loader, start=loader.state_dict()["position"] // BATCH):
            step = epoch * (NUM_SAMPLES // BATCH) + number
            say(("drawn", step, indices.tolist() if loader.fraction else []))
            if step == at:
                arm(moment, model, optimizer)
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            say(("done", step, loader.members))
            has_come = has_come or awaited in loader.members
            time.sleep(pause_s if has_come else 5 * pause_s)
        accounts.append(loader.account)
    return {"parameters": [each.detach().numpy().copy() for each in model.module.parameters()], "accounts": accounts}


def train_richly(num_members: int, num_steps: int, pause_s: float = 0.0) -> dict[str, Any]:
    """With all that a script may make of gradients: accumulation, clipping, a schedule, layers with buffers.

    In every train step it sums over all members, in a collective of its own, what the step is. It ends when so many
    members have had samples for so many steps. Speeds are told: measured ones could leave a member a single sample, of
    which batch normalisation makes nothing.
    """
    slot = int(own_member().partition(".")[0])
    SpeedEstimator.speed = property(lambda _: Speed(s_per_sample=0.01 * (1 + slot % 2 / 2)))  # pyrefly: ignore
    torch.manual_seed(1)
    layers = [nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)]
    model = nn.Sequential(*layers).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    data = DataLoader(make_data(), batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(3))
    model, optimizer, loader = ringweave.prepare(
        model, optimizer, data, mode="balanced", carried={"schedule": schedule}, ddp={"bucket_cap_mb": 0.0001}
    )
    step, num_together = loader.num_train_steps, 0
    for _ in loader.epochs(1_000_000):
        for inputs, targets, _ in loader:
            with model.no_sync() if loader.state_dict()["position"] // BATCH % 2 else contextlib.nullcontext():
                nn.functional.mse_loss(model(inputs), targets).backward()
            if loader.state_dict()["position"] // BATCH % 2:
                continue
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
            total = torch.tensor(step)
            dist.all_reduce(total)
            say(("done", step, total.item()))
            num_together += sum(share > 0 for share in loader.shares) == num_members
            if num_together == num_steps:
                return {"state": {name: each.numpy().copy() for name, each in model.module.state_dict().items()}}
            time.sleep(pause_s)
    raise AssertionError("more epochs than steps")


def train_from_checkpoints(folder: str, num_steps: int, pause_s: float = 0.0) -> dict[str, Any]:
    """Train with checkpoints, from the last one on, until so many train steps are done; tells what it does."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = DataLoader(make_data(), batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(3))
    model, optimizer, loader = ringweave.prepare(model, optimizer, data, mode="sync")
    checkpoints = ringweave.Checkpoints(folder, model=model, optimizer=optimizer, loader=loader)
    train_step = checkpoints.load()
    say(("loaded", train_step))
    for _ in loader.epochs(1_000_000):
        for inputs, targets, _ in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            train_step += 1
            say(("done", train_step, loader.members))
            if train_step == 5:
                checkpoints.save(train_step)
            if train_step == num_steps:
                return {"parameters": [each.detach().numpy().copy() for each in model.module.parameters()]}
            time.sleep(pause_s)
    raise AssertionError("more epochs than steps")


def arm(fault: str, model: Any, optimizer: Any) -> None:
    """Die when that moment of the present step comes."""
    parameters = list(model.module.parameters())
    if fault == "forward":
        model.module[2].register_forward_hook(lambda *_: kill_self())
    elif fault == "backward":
        model.module[2].register_full_backward_hook(lambda *_: kill_self())
    elif fault.startswith("bucket"):
        parameters[-1 - int(fault.removeprefix("bucket"))].register_post_accumulate_grad_hook(lambda _: kill_self())
    elif fault == "commit":
        EpochGroups.exchange = lambda *_: kill_self()
    elif fault == "committed":
        real = EpochGroups.exchange
        EpochGroups.exchange = lambda *args: (real(*args), kill_self())
    elif fault == "optimizer":
        optimizer.register_step_pre_hook(lambda *_: kill_self())
    else:
        raise AssertionError(fault)
