"""Training in sites, run by real processes."""

import itertools
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ringweave
from ringweave.planning.sites import RoundSplit
from ringweave.training import Local, outer_steps
from tests.training.training_functions import weights_of

FEATURES = 6
Made = tuple[nn.Module, torch.optim.Optimizer, DataLoader]


def make(num_samples: int = 48, batch: int = 12, *, adam: bool = False, dtype: torch.dtype = torch.float64) -> Made:
    """What a script has before it calls `prepare`; the same on all ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)
    data = TensorDataset(torch.randn(num_samples, FEATURES, dtype=dtype), torch.randint(3, (num_samples,)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2) if adam else torch.optim.SGD(model.parameters(), 0.1)
    return model, optimizer, DataLoader(data, batch_size=batch, shuffle=True)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Sequence[Tensor]) -> None:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()


class ThreadClock(threading.local):
    """Clock of mode `local` in this process: each thread has its own, which only its work moves on."""

    now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


CLOCK = ThreadClock()


def use_virtual_time(exchange_s: float = 0.0) -> None:
    """Let inner steps take the time that `train` is told, and each exchange between sites this one."""
    outer_steps.time = CLOCK
    gather = dist.all_gather

    def timed_gather(*args: Any, **settings: Any) -> None:
        gather(*args, **settings)
        CLOCK.now_s += exchange_s

    outer_steps.dist = SimpleNamespace(**{**vars(dist), "all_gather": timed_gather})


def train(made: Any, num_epochs: int, step_s: float = 0.0) -> int:
    """Train so many epochs, with so much virtual time for each step; return the steps of this rank."""
    model, optimizer, loader = made
    steps = 0
    for _ in range(num_epochs):
        for batch in loader:
            step(model, optimizer, batch)
            CLOCK.now_s += step_s
            steps += 1
    return steps


def weights_in_mode(mode: str, local: Local | None, num_epochs: int = 2) -> tuple[list[float], bool]:
    """(weights, the last account is exact); the memory's limit keeps the shares equal."""
    prepared = ringweave.prepare(*make(adam=True), mode=mode, local=local, max_samples=6)
    train(prepared, num_epochs)
    return weights_of(prepared[0]).tolist(), prepared[2].account.is_exact


def first_round(settings: Local, adam: bool = False) -> tuple[list[float], list[int], list[float], int]:
    """(weights at the start, samples of this rank in the round, weights after it, train steps)."""
    made = make(num_samples=12, adam=adam)
    start = weights_of(made[0]).tolist()
    prepared = ringweave.prepare(*made, mode="local", local=settings)
    samples: list[int] = []
    for batch in prepared[2]:
        samples += prepared[2].latest_portion.batch.tolist()
        step(prepared[0], prepared[1], batch)
    return start, samples, weights_of(prepared[0]).tolist(), prepared[2].num_train_steps


def mean_and_sum(settings: Local) -> tuple[list[float], list[float], list[float]]:
    """Weights after two epochs with a mean of losses, their sum at a twelfth of the rate, and with equal weights."""
    RoundSplit.with_measured = lambda self, *_: self  # measured speeds differ from run to run
    found = []
    for reduction, weight in (("mean", None), ("sum", None), ("mean", [2.0] * 48)):
        model, optimizer, loader = make()
        optimizer.param_groups[0]["lr"] /= 12 if reduction == "sum" else 1
        prepared = ringweave.prepare(
            model, optimizer, loader, mode="local", local=settings, reduction=reduction, weight=weight, max_samples=6
        )
        for _ in range(2):
            for batch in prepared[2]:
                optimizer.zero_grad()
                nn.functional.cross_entropy(prepared[0](batch[0]), batch[1], reduction=reduction).backward()
                optimizer.step()
        found.append(weights_of(prepared[0]).tolist())
    return found[0], found[1], found[2]


def hook_refusal(settings: Local) -> str:
    """Text of the error when the script registers a communication hook."""
    model, _, _ = ringweave.prepare(*make(), mode="local", local=settings)
    try:
        model.register_comm_hook(None, lambda *_: None)
    except ringweave.errors.TrainingError as error:
        return str(error)
    return ""


def alone(samples: Sequence[Sequence[int]], adam: bool = False, factor: float = 1.0) -> list[float]:
    """Weights of one process after a step for each list of samples, with learning rates scaled by a factor."""
    model, optimizer, loader = make(num_samples=12, adam=adam)
    if factor != 1.0:
        optimizer.param_groups[0]["lr"] *= factor
        optimizer.param_groups[0]["weight_decay"] /= factor
    for each in samples:
        step(model, optimizer, [torch.stack(values) for values in zip(*(loader.dataset[i] for i in each), strict=True)])
    return weights_of(model).tolist()


def unequal_sites(num_epochs: int, settings: Local) -> tuple[list[int], list[bool], list[float]]:
    """(inner steps of this rank in each epoch, accounts are exact, weights); the last rank is slow."""
    use_virtual_time()
    prepared = ringweave.prepare(*make(num_samples=240), mode="local", local=settings)
    step_s = 0.03 if dist.get_rank() == dist.get_world_size() - 1 else 0.01
    steps, exact = [], []
    for _ in range(num_epochs):
        steps.append(train(prepared, 1, step_s))
        exact.append(prepared[2].account.is_exact)
    return steps, exact, weights_of(prepared[0]).tolist()


def derived_inner_steps(settings: Local, exchange_s: float, step_s: float) -> list[int]:
    """Inner steps of each round, as they were decided."""
    use_virtual_time(exchange_s)
    outer_steps.FIRST_INNER_STEPS = 64
    prepared = ringweave.prepare(*make(num_samples=1800), mode="local", local=settings)
    rounds = prepared[2].source.membership.rounds
    found = [rounds.split.inner_steps]
    rounds._record = lambda done: found.append(done.next_inner_steps)
    train(prepared, 1, step_s)
    return found


def save_or_resume(folder: Path, settings: Local, stops_in: tuple[int, int] | None, resumes: bool) -> dict[str, Any]:
    """Train three epochs, with a checkpoint asked for at each step; return what the training ends with."""
    RoundSplit.with_measured = lambda self, *_: self  # measured speeds differ from run to run
    model, optimizer, loader = ringweave.prepare(
        *make(num_samples=96, adam=True), mode="local", local=settings, max_samples=12 // dist.get_world_size()
    )
    checkpoints = ringweave.Checkpoints(folder, keep=100, model=model, optimizer=optimizer, loader=loader)
    done = checkpoints.load() if resumes else checkpoints.clear()
    for epoch in loader.epochs(3):
        for batch in loader:
            if stops_in == (epoch, loader.num_train_steps):
                checkpoints.wait()
                return {}
            step(model, optimizer, batch)
            checkpoints.save(0)
    checkpoints.wait()
    momentum = [each["exp_avg"].tolist() for each in optimizer.state_dict()["state"].values()]
    return {
        "done": done,
        "train_steps": loader.num_train_steps,
        "weights": weights_of(model).tolist(),
        "inner": momentum,
        "outer": [each.tolist() for each in loader.state_dict()["outer"]["momentum"]],
        "unsent": {key: each.tolist() for key, each in loader.state_dict()["outer"]["unsent"].items()},
        "exact": loader.account.is_exact,
    }


def break_off(settings: Local, steps: Sequence[int]) -> tuple[int, bool, list[float]]:
    """(batches of this rank in a pass that is broken off after so many, there is an account, weights a pass later)."""
    prepared = ringweave.prepare(*make(num_samples=96), mode="local", local=settings)
    count = 0
    for batch in itertools.islice(prepared[2], steps[dist.get_rank()]):
        step(prepared[0], prepared[1], batch)
        count += 1
    has_account = prepared[2].account is not None
    train(prepared, 1)
    assert prepared[2].account.is_exact
    return count, has_account, weights_of(prepared[0]).tolist()


def other_first_weights(settings: Local) -> list[float]:
    """Weights after a pass, where each rank's model begins with others."""
    model, optimizer, loader = make()
    torch.manual_seed(dist.get_rank())
    nn.init.normal_(model[0].weight)
    prepared = ringweave.prepare(model, optimizer, loader, mode="local", local=settings)
    train(prepared, 1)
    return weights_of(prepared[0]).tolist()


def refusal(settings: Local | None, stream: bool) -> str:
    """Text of the error of `prepare`."""
    model, optimizer, loader = make()
    if stream:

        class Stream(torch.utils.data.IterableDataset):
            def __iter__(self) -> Any:
                return iter(loader.dataset)

        loader = DataLoader(Stream(), batch_size=12)
    try:
        ringweave.prepare(model, optimizer, loader, mode="local", local=settings)
    except ringweave.errors.TrainingError as error:
        return str(error)
    return ""
