"""What workers in rings that may lose members run."""

import os
import signal
import time
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ringweave
from ringweave.param_server.client import RingClient
from ringweave.training import Asynchronous, Local, speed_test
from ringweave.training.speed_test import ModelTrial
from tests.fakes.elastic_job import own_member, send_message

NUM_SAMPLES, BATCH, WIDTH = 240, 24, 6
Faults = Mapping[str, tuple[int, str]]
"""Member -> (its step, moment) of its death."""


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(NUM_SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.sin(inputs.sum(1, keepdim=True)), torch.arange(NUM_SAMPLES))


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train(
    num_epochs: int,
    rings: int,
    faults: Faults,
    pause_s: float = 0.0,
    until: Collection[tuple[str, ...]] = (),
    local_steps: int = 0,
    fragments: int = 0,
) -> dict[str, Any]:
    """Train, telling what is done; the accounts of all epochs and the parameters at the end.

    With fragments the rings are two sites of mode local, which push a fragment after so many local steps.

    "done" has the step's number here, the members, the step's number in the ring, and the sum of the parameters.

    A ring with the members that `until` has ends with the third epoch in which these are its members: all of them know.
    """
    speed_test.run_model_trial = lambda *_, **__: ModelTrial()  # on a busy machine it would form other rings
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    data = DataLoader(make_data(), batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(3))
    how = way_of(rings, local_steps, fragments)
    model, optimizer, loader = ringweave.prepare(model, optimizer, data, **how)
    at, moment = faults.get(own_member(), (-1, ""))
    cursor = loader.source.membership.progress.cursor
    send_message(("prepared", loader.members, cursor.num_pushed))
    accounts, num_steps, num_whole = [], 0, 0
    for _ in loader.epochs(num_epochs):
        for inputs, targets, _ in loader:
            num_steps += 1
            if num_steps == at:
                arm(moment, model)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            total = sum(float(each.detach().sum()) for each in model.parameters())
            send_message(("done", num_steps, loader.members, cursor.num_shards, total))
            time.sleep(pause_s)
        accounts.append(loader.account)
        num_whole += loader.members in until
        if num_whole == 3:
            break
    return {
        "parameters": [each.detach().numpy().copy() for each in model.module.parameters()],
        "accounts": accounts,
        "ring": cursor.ring,
        "num_pushed": cursor.num_pushed,
    }


def way_of(rings: int, local_steps: int, fragments: int) -> dict[str, Any]:
    """Options of `prepare`: rings, or as many sites of mode local of about as many workers."""
    if not fragments:
        return {"mode": "ps-hra", "asynchronous": Asynchronous(rings=rings, local_steps=local_steps)}
    sites = [each.tolist() for each in np.array_split(np.arange(int(os.environ["WORLD_SIZE"])), rings)]
    return {"mode": "local", "local": Local(inner_steps=local_steps * fragments, fragments=fragments, sites=sites)}


def arm(moment: str, model: Any) -> None:
    """Die when that moment of the present step comes."""
    if moment == "backward":
        model.module[2].register_full_backward_hook(lambda *_: kill_self())
    elif moment in ("push_and_pull", "take_shard", "wait_barrier", "push"):
        # Of the representative: the server has heard it, nobody else has.
        real = getattr(RingClient, moment)
        setattr(RingClient, moment, lambda *args, **more: (real(*args, **more), kill_self()))
    else:
        raise AssertionError(moment)
