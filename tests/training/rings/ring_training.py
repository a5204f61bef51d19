"""Scripts in rings with a parameter server, run by real processes."""

import math
import os
import time
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.utils.data import DataLoader, TensorDataset

import ringweave
from ringweave.environment import CREDENTIALS, MODE, SERVER
from ringweave.errors import DisagreementError, TrainingError
from ringweave.planning.balancing import Speed, SpeedEstimator
from ringweave.training import Asynchronous, speed_test
from ringweave.training.mode_choice import forecast
from ringweave.training.rings.ring_formation import RingShares
from tests.training import training_functions
from tests.training.training_functions import Case, assert_same_everywhere, forever, make, weights_of

SHORT_BLOCK_S = 0.02
"""Of a trial of the model, which measures for eight such blocks: a fifth of what scripts take."""


def meet_server(port: int, keys: str) -> None:
    """What `ringweave run --mode ps-hra` tells a worker."""
    os.environ[SERVER], os.environ[CREDENTIALS] = f"127.0.0.1:{port}", f"{keys}/{dist.get_rank()}"
    speed_test.BLOCK_S = SHORT_BLOCK_S


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
    found[2].source.membership.assignment.leave_server()
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
    shared.source.membership.assignment.leave_server()
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
    ring = shared.source.membership.assignment.current.index
    accounts = []
    for epoch in range(num_epochs):
        at = 3 if (ring, epoch) == (1, 0) else None  # one ring leaves a step out, the other one does not
        scaled(model, optimizer, shared, infinite_at=at, accumulate=2, max_norm=max_norm)
        accounts.append(shared.account is not None and shared.account.is_exact)
    assert_same_everywhere(weights_of(model))
    moved = (weights_of(model) - before).norm().item()
    shared.source.membership.assignment.leave_server()
    return moved, len(shared), all(accounts)


def sum_in_two_rings(port: int, keys: str) -> tuple[float, int]:
    """(how far the weights went beside where sums of gradients lead in any order, rings); with an uneven last batch.

    The loss is linear: gradients are the same wherever they are computed. What is late counts less, and
    what it shares a train step with counts more; inputs are positive, so that all of these are nearly the same.
    """
    meet_server(port, keys)
    torch.manual_seed(0)
    x = torch.rand(100, 6, dtype=torch.float64)
    model = nn.Linear(6, 1, bias=False, dtype=torch.float64)
    before, whole = model.weight.detach().clone(), 2 * 0.01 * x.sum(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(x), batch_size=16, shuffle=True)
    settings = Asynchronous(rings=2)
    model, optimizer, shared = ringweave.prepare(
        model, optimizer, loader, mode="ps-hra", reduction="sum", asynchronous=settings
    )
    num_rings = len(shared.source.membership.assignment.current.rings)
    for _ in range(2):
        for (inputs,) in shared:
            optimizer.zero_grad()
            model(inputs).sum().backward()
            optimizer.step()
    shared.source.membership.assignment.leave_server()
    moved = before - model.module.weight.detach()
    return ((moved * whole).sum() / whole.square().sum()).item(), num_rings


def refusals(port: int, keys: str) -> list[str]:
    """What is said where the optimizer has a state, or loads one; and where ranks load ahead unequally."""
    meet_server(port, keys)
    found = []

    def note(do: Callable[[], object]) -> None:
        try:
            do()
        except TrainingError as error:
            found.append(str(error))

    model, optimizer, loader = make_regression(48, 8)
    take_step(model, optimizer, torch.ones(2, 6), torch.ones(2, 2))  # SGD without momentum has no state
    stateful = torch.optim.Adagrad(model.parameters(), lr=0.1)
    take_step(model, stateful, torch.ones(2, 6), torch.ones(2, 2))
    note(lambda: ringweave.prepare(model, stateful, loader, mode="ps-hra"))
    workers = DataLoader(loader.dataset, batch_size=8, num_workers=dist.get_rank())
    try:
        ringweave.prepare(model, optimizer, workers, mode="ps-hra")
    except DisagreementError as error:
        found.append(str(error))
    fresh = torch.optim.Adagrad(model.parameters(), lr=0.1)
    _, prepared, shared = ringweave.prepare(model, fresh, loader, mode="ps-hra")
    prepared.load_state_dict(fresh.state_dict())
    note(lambda: prepared.load_state_dict(stateful.state_dict()))
    shared.source.membership.assignment.leave_server()
    return found


def wrapped_before(port: int, keys: str) -> tuple[int, bool]:
    """Two rings of a model with buffers that the script has put under DDP: groups of ranks that it is left in."""
    meet_server(port, keys)
    model, _, loader = make_regression(240, 24, nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.02)
    parallel, optimizer, shared = ringweave.prepare(
        wrapped, optimizer, loader, mode="ps-hra", asynchronous=Asynchronous(rings=2)
    )
    if dist.get_rank() == 0:
        time.sleep(1.0)  # the other ring has more of the batches
    for _ in range(2):
        for x, y in shared:
            take_step(parallel, optimizer, x, y)
    assert shared.account is not None
    is_exact = shared.account.is_exact
    shared.source.membership.assignment.leave_server()
    return dist.get_world_size(parallel.process_group), is_exact


def make_regression(
    num_samples: int, batch: int, *layers: nn.Module
) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader]:
    """A model that learns to repeat two numbers of six, the same everywhere."""
    torch.manual_seed(0)
    x = torch.randn(num_samples, 6)
    model = nn.Sequential(*(layers or [nn.Linear(6, 2)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    return model, optimizer, DataLoader(TensorDataset(x, x[:, :2]), batch_size=batch, shuffle=True)


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()


def break_off(port: int, keys: str) -> list[float]:
    """Rank 0 breaks two of three epochs off at their first batch; after each, all ranks meet as if they evaluated.

    In these two it draws first: the other ring could else use the epoch up before.

    Returns the weights.
    """
    meet_server(port, keys)
    model, optimizer, loader = ringweave.prepare(*make_regression(400, 40), mode="ps-hra")
    for epoch in range(3):
        breaks = epoch < 2
        if breaks and dist.get_rank() == 1:
            dist.barrier()
        for x, y in loader:
            if breaks and dist.get_rank() == 0:
                dist.barrier()
                take_step(model, optimizer, x, y)
                break
            take_step(model, optimizer, x, y)
        dist.barrier()
    loader.source.membership.assignment.leave_server()
    return weights_of(model).tolist()


def look_first(port: int, keys: str) -> list[tuple[int, int, bool]]:
    """Takes a batch to look at, and then trains from epoch 0 on; (epoch, samples, exact) of each account."""
    meet_server(port, keys)
    model, optimizer, loader = ringweave.prepare(*make_regression(100, 10), mode="ps-hra")
    first = iter(loader)
    next(first)
    dist.barrier()  # all have one: who breaks off ends the pass for all
    first.close()
    seen = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        for x, y in loader:
            take_step(model, optimizer, x, y)
        account = loader.account
        seen.append((account.epoch, account.expected.num_samples, account.is_exact) if account else (-1, 0, False))
    loader.source.membership.assignment.leave_server()
    return seen


def drift(port: int, keys: str, epochs: Sequence[Sequence[float]]) -> list[float]:
    """Two rings, and how many seconds each rank takes for a sample in each epoch.

    What is measured on a busy machine says little: nothing is, and speeds are told, after the ranks have met for
    theirs. Returns the weights.
    """
    meet_server(port, keys)
    speed_test.run_model_trial = lambda *_, **__: speed_test.ModelTrial()  # pyrefly: ignore
    SpeedEstimator.speed = property(lambda _: None)  # pyrefly: ignore
    triple = make_regression(480, 96, nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    model, optimizer, loader = ringweave.prepare(*triple, mode="ps-hra", asynchronous=Asynchronous(rings=2))
    shares = loader.source.membership.ring_shares
    assert shares._timer.open_span in model._forward_pre_hooks.values(), "the wait for buffers is told apart"
    measure, num_groups = shares.rebalance_at_barrier, len(distributed_c10d._world.pg_map)
    for seconds in epochs:
        told = [Speed(s_per_sample=each_s) for each_s in seconds]
        shares.rebalance_at_barrier = lambda told=told: (measure(), told)[1]
        for x, y in loader:
            take_step(model, optimizer, x, y)
    assert len(distributed_c10d._world.pg_map) == num_groups, "rings that are left leave no groups behind"
    loader.source.membership.assignment.leave_server()
    return weights_of(model).tolist()


def stall_in_one_ring(port: int, keys: str, num_epochs: int) -> tuple[list, bool]:
    """(rings of each epoch and after the last one, every account is exact), where `auto` begins with one ring."""
    meet_server(port, keys)
    os.environ[MODE] = "auto"
    everyone = (tuple(range(dist.get_world_size())),)
    forecast.choose_mode = lambda *_, **__: ("ps-hra", "a trial without stalls", everyone)  # pyrefly: ignore
    RingShares.recent_s = property(lambda _: (0.01,) * 7 + (0.04,))  # pyrefly: ignore - noise of this machine is none
    model, optimizer, loader = make(Case(num_samples=480, batch=24))
    model, optimizer, shared = ringweave.prepare(model, optimizer, loader)
    seen, are_exact = [], True
    for _ in range(num_epochs):
        seen.append(shared.source.membership.assignment.current.rings)
        for x, y in shared:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        are_exact &= shared.account is not None and shared.account.is_exact
        assert_same_everywhere(weights_of(model))
    shared.source.membership.assignment.leave_server()
    return [*seen, shared.source.membership.assignment.current.rings], are_exact


def move_with_local_steps(port: int, keys: str, local_steps: int) -> dict[str, list]:
    """Two rings of two kinds of ranks with AdamW; speeds change after the first epoch, and so do rings.

    Returns, for each epoch: rings, steps, pushes, and the sum of all weights after each step.
    """
    meet_server(port, keys)
    speed_test.run_model_trial = lambda *_, **__: speed_test.ModelTrial(
        sample_s=[(0.001, 0.001, 0.004, 0.004)[dist.get_rank()]] * 4
    )
    SpeedEstimator.speed = property(lambda _: None)  # pyrefly: ignore
    model, _, loader = make_regression(480, 40, nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    settings = Asynchronous(rings=2, local_steps=local_steps)
    model, optimizer, shared = ringweave.prepare(model, optimizer, loader, mode="ps-hra", asynchronous=settings)
    ring, seen = shared.source.membership, {"rings": [], "pushes": [], "steps": []}
    measure = ring.ring_shares.rebalance_at_barrier
    told = [Speed(s_per_sample=each_s) for each_s in (0.001, 0.004, 0.001, 0.004)]
    ring.ring_shares.rebalance_at_barrier = lambda: (measure(), told)[1]
    for _ in range(2):
        seat, sums = ring.assignment.current, []
        for x, y in shared:
            take_step(model, optimizer, x, y)
            sums.append(weights_of(model.module).sum().item())
            time.sleep(0.02)  # else one ring may be through with the epoch before the other one gets the processor
        seen["rings"].append(seat.rings)
        seen["pushes"].append(seat.worker.ring.cursor.num_pushed)
        seen["steps"].append(sums)
        assert shared.account is not None
        assert shared.account.is_exact
    ring.assignment.leave_server()
    return seen
