"""Scripts in rings with a parameter server, run by real processes."""

import math
import os
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ringweave
from ringweave.environment import CREDENTIALS, SERVER
from ringweave.training import Asynchronous
from tests.training import training_functions
from tests.training.training_functions import Case, assert_same_everywhere, forever, make, weights_of


def meet_server(port: int, keys: str) -> None:
    """What `ringweave run --mode ps-hra` tells a worker."""
    os.environ[SERVER], os.environ[CREDENTIALS] = f"127.0.0.1:{port}", f"{keys}/{dist.get_rank()}"


def distance_in_one_ring(port: int, keys: str, case: Case) -> float:
    """The largest relative difference of a weight from the training in one process."""
    meet_server(port, keys)
    model, optimizer, loader = make(case)
    training_functions.train(model, optimizer, loader, case)
    alone = weights_of(model)
    settings = Asynchronous(rings=1)
    found = ringweave.prepare(*make(case), mode="ps-hra", asynchronous=settings, reduction=case.reduction)
    training_functions.train(*found, case)
    together = weights_of(found[0].module)
    assert_same_everywhere(together)
    found[2]._parts.places.leave()
    return ((together - alone).abs().max() / alone.abs().max()).item()


def distance_with_scaler(port: int, keys: str, num_steps: int) -> float:
    """Likewise with a GradScaler, which leaves out the step whose loss is infinite on one rank."""
    meet_server(port, keys)
    case = Case(num_steps=num_steps)
    model, optimizer, loader = make(case)
    alone = scaled(model, optimizer, forever(loader, num_steps), infinite_at=3)
    model, optimizer, shared = ringweave.prepare(*make(case), mode="ps-hra", asynchronous=Asynchronous(rings=1))
    at = 3 if dist.get_rank() == 0 else None
    together = scaled(model, optimizer, forever(shared, num_steps), infinite_at=at)
    assert_same_everywhere(together)
    shared._parts.places.leave()
    return ((together - alone).abs().max() / alone.abs().max()).item()


def scaled(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable,
    *,
    infinite_at: int | None = None,
    accumulate: int = 1,
    max_norm: float = 1.0,
) -> Tensor:
    """A loop with mixed precision's scaler, accumulation and clipping; the weights after it."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for number, (x, y) in enumerate(batches):
        loss = nn.functional.cross_entropy(model(x), y) / accumulate
        scaler.scale(loss * (math.inf if number == infinite_at else 1.0)).backward()
        if (number + 1) % accumulate:
            continue
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return weights_of(model)


def clip_in_two_rings(port: int, keys: str, num_epochs: int, max_norm: float) -> tuple[float, int, bool]:
    """(how far the weights have moved, train steps in an epoch, every account is exact); plain SGD with lr 1."""
    meet_server(port, keys)
    model, _, loader = make(Case(num_samples=480, batch=48))
    before = weights_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, shared = ringweave.prepare(
        model, optimizer, loader, mode="ps-hra", asynchronous=Asynchronous(rings=2)
    )
    ring = shared._parts.places.seat.index
    accounts = []
    for epoch in range(num_epochs):
        at = 3 if (ring, epoch) == (1, 0) else None  # one ring leaves a step out, the other one does not
        scaled(model, optimizer, shared, infinite_at=at, accumulate=2, max_norm=max_norm)
        accounts.append(shared.account is not None and shared.account.is_exact)
    assert_same_everywhere(weights_of(model))
    moved = (weights_of(model) - before).norm().item()
    shared._parts.places.leave()
    return moved, len(shared), all(accounts)
