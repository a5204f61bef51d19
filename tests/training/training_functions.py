"""Training on several ranks, against the same training in one process: run by real processes."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import ringweave
from ringweave.training import SharedLoader

FEATURES = 6


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to train."""

    num_samples: int = 47
    batch: int = 12
    num_steps: int = 30
    accumulate: int = 1
    uses_no_sync: bool = False
    clips: bool = False
    schedules: bool = False
    reduction: str = "mean"
    drop_last: bool = False
    num_workers: int = 0
    streams: bool = False
    has_regularizer: bool = False
    dtype: torch.dtype = torch.float64


class Stream(IterableDataset):
    """Samples without an index."""

    def __init__(self, samples: TensorDataset) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return iter([self._samples[index] for index in range(len(self._samples))])


def make(case: Case) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader]:
    """What a script has before it calls `prepare`; the same everywhere."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
    model = model.to(case.dtype)
    samples = TensorDataset(
        torch.randn(case.num_samples, FEATURES, dtype=case.dtype), torch.randint(3, (case.num_samples,))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(
        Stream(samples) if case.streams else samples,
        batch_size=case.batch,
        drop_last=case.drop_last,
        num_workers=case.num_workers,
    )
    return model, optimizer, loader


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Iterable, case: Case) -> None:
    """An ordinary loop. It knows nothing of ranks."""
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, case.num_steps)
    for number, (x, y) in enumerate(forever(loader, case.num_steps), start=1):
        is_update = number % case.accumulate == 0
        loss = nn.functional.cross_entropy(model(x), y, reduction=case.reduction) / case.accumulate
        if case.has_regularizer:
            loss = loss + 1e-2 * sum(parameter.square().sum() for parameter in model.parameters())
        if case.uses_no_sync and not is_update and hasattr(model, "no_sync"):
            with model.no_sync():
                loss.backward()
        else:
            loss.backward()
        if is_update:
            if case.clips:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1)
            optimizer.step()
            optimizer.zero_grad()
            if case.schedules:
                scheduler.step()


def forever(loader: Iterable, num_steps: int) -> Iterator[Any]:
    """Batches of one epoch after the other."""
    given = 0
    while given < num_steps:
        for batch in loader:
            if given == num_steps:
                return
            given += 1
            yield batch


def weights_of(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().double()


def change_shares(loader: SharedLoader, every: int, shares: list[tuple[int, ...]]) -> Callable[[], Any]:
    """Give batches other shares at every few borders, as rebalancing does."""
    balancer = loader._parts.balancer
    border = balancer.border

    def change(batch_number: int) -> None:
        border(batch_number)
        if batch_number % every == 0:
            now = shares[batch_number // every % len(shares)]
            first = batch_number + balancer._num_prefetched
            balancer._history = [*balancer._history, (first, now)]

    balancer.border = change
    return change


def distance_from_one_process(case: Case, shares: list[tuple[int, ...]], every: int = 3) -> tuple[float, bool]:
    """(largest relative difference of a weight from the training in one process, every account is exact)."""
    model, optimizer, loader = make(case)
    train(model, optimizer, loader, case)
    alone = weights_of(model)
    parallel, optimizer, shared = ringweave.prepare(*make(case), mode="sync", reduction=case.reduction)
    change_shares(shared, every, shares)
    train(parallel, optimizer, shared, case)
    together = weights_of(parallel.module)
    everywhere = [torch.empty_like(together) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, together)
    assert all(torch.equal(other, together) for other in everywhere), "the same bits on all ranks"
    is_exact = shared.account is not None and shared.account.is_exact
    return ((together - alone).abs().max() / alone.abs().max()).item(), is_exact
