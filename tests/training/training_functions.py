"""Training on several ranks, against the same training in one process: run by real processes."""

import dataclasses
import itertools
import math
import multiprocessing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import ringweave
from ringweave.errors import DisagreementError
from ringweave.planning.balancing import ShareChange
from ringweave.training import SharedLoader
from ringweave.training.gradients import SampleWeights
from ringweave.training.memory import meters
from ringweave.training.timing import HostTimeline
from tests.training.fakes import Card

FEATURES = 6
NUM_TOKENS = 4
"""Most tokens of a ragged sample; some samples have none."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to train."""

    num_samples: int = 47
    batch: int = 12
    num_steps: int = 100
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
    weighs: str = ""
    """The loss is a mean over tokens of ragged samples, whose numbers `prepare` gets by `sample` or by `batch`."""
    fitting: int = 0
    """Samples that fit into the memory of a rank at once; 0: all."""
    hook: str = ""
    """Communication hook that the script registers: torch's `allreduce`, or `PowerSGD` of so high a rank that it loses
    nothing."""


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
    shape = (case.num_samples, NUM_TOKENS) if case.weighs else (case.num_samples,)
    labels = torch.randint(3, shape)
    if case.weighs:
        labels[torch.arange(NUM_TOKENS) >= torch.randint(NUM_TOKENS + 1, (case.num_samples, 1))] = -100
    samples = TensorDataset(torch.randn(*shape, FEATURES, dtype=case.dtype), labels)
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
        logits = model(x).reshape(-1, 3)
        loss = nn.functional.cross_entropy(logits, y.reshape(-1), reduction=case.reduction) / case.accumulate
        if case.has_regularizer:
            own = [each.to_local() if isinstance(each, DTensor) else each for each in model.parameters()]
            loss = loss + 1e-2 * sum(parameter.square().sum() for parameter in own)
        if case.uses_no_sync and isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(is_update)
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
    """So many batches, of one epoch after the other; none more is asked for."""
    return itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), num_steps)


def weight_of(case: Case, dataset: Any) -> Any:
    """What `prepare` gets as weight."""
    if case.weighs == "sample":
        return [count_tokens(labels) for _, labels in dataset]
    return (lambda batch: count_tokens(batch[1])) if case.weighs else None


def count_tokens(labels: Tensor) -> int:
    return int((labels != -100).sum())


def weights_of(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().double()


def change_shares(loader: SharedLoader, every: int, shares: list[tuple[int, ...]]) -> None:
    """Give batches other shares every few borders, in the way in which rebalancing does."""
    members: Any = loader.source.membership
    balancer = members.balancer
    border = balancer.pass_step_boundary

    def change(batch_number: int) -> None:
        border(batch_number)
        if batch_number % every == 0:
            found = ShareChange(shares=shares[batch_number // every % len(shares)], before_s=1.0, after_s=0.5)
            balancer._change(batch_number, found)

    balancer.pass_step_boundary = change


def register_hook(parallel: Any, case: Case) -> list[Any]:
    """Do what a script does that has a communication hook, after `prepare`; return what comes to the hook."""
    hooks = {"allreduce": default_hooks.allreduce_hook, "PowerSGD": powerSGD_hook.powerSGD_hook}
    found: list[Any] = []

    def watch(state: Any, bucket: dist.GradBucket) -> Any:
        found.append(bucket.index())
        return hooks[case.hook](state, bucket)

    if case.hook:
        exact: Any = {"matrix_approximation_rank": 16, "start_powerSGD_iter": 2, "min_compression_rate": 0.01}
        state = powerSGD_hook.PowerSGDState(None, **exact) if case.hook == "PowerSGD" else None
        parallel.register_comm_hook(state, watch)
    return found


def distance_from_one_process(case: Case, shares: list[tuple[int, ...]], every: int = 2) -> tuple[float, bool]:
    """(largest relative difference of a weight from the training in one process, every account is exact)."""
    multiprocessing.current_process()._config["daemon"] = False  # the loader has workers of its own
    model, optimizer, loader = make(case)
    train(model, optimizer, loader, case)
    alone = weights_of(model)
    made = make(case)
    weight = weight_of(case, made[2].dataset)
    if case.fitting:
        limit_memory(made[0], case.fitting)
    parallel, optimizer, shared = ringweave.prepare(*made, mode="sync", reduction=case.reduction, weight=weight)
    buckets = register_hook(parallel, case)
    accounts = watch_accounts(shared)
    change_shares(shared, every, shares)
    train(parallel, optimizer, shared, case)
    together = weights_of(parallel.module)
    assert_same_everywhere(together)
    assert accounts
    assert bool(buckets) is bool(case.hook)
    return ((together - alone).abs().max() / alone.abs().max()).item(), all(accounts)


def limit_memory(model: nn.Module, fitting: int) -> None:
    """Let so many samples fit at once, half as many as the card says: there are errors too, and smaller passes."""
    card = Card(100e3 + 10e3 * fitting, says_bytes=(100e3 + 20e3 * fitting) / 0.9)

    def allocate(_model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if torch.is_grad_enabled():
            card.allocate(len(inputs[0]))

    model.register_forward_pre_hook(allocate)
    meters.find_meter = lambda *_: card


class Branches(nn.Module):
    """Uses one layer always, one in some passes, and one never."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = (nn.Linear(FEATURES, 3).double() for _ in range(3))
        self.is_on = False

    def forward(self, x: Tensor) -> Tensor:
        return self.always(x) + self.sometimes(x) if self.is_on else self.always(x)


def train_with_unused(num_epochs: int) -> tuple[bool, float]:
    """(the unused layer has no gradient, sum of all weights), where three samples fit into the memory at once."""
    torch.manual_seed(0)
    model = Branches()
    limit_memory(model, 3)
    samples = TensorDataset(torch.randn(48, FEATURES, dtype=torch.float64), torch.randn(48, 3, dtype=torch.float64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    parallel, optimizer, loader = ringweave.prepare(
        model, optimizer, DataLoader(samples, batch_size=24), mode="sync", ddp={"find_unused_parameters": True}
    )
    has_none = True
    for number, (x, y) in enumerate(forever(loader, 2 * num_epochs)):
        model.is_on = number % 2 == 1 or dist.get_rank() == 1
        optimizer.zero_grad()
        nn.functional.mse_loss(parallel(x), y).backward()
        has_none &= model.never.weight.grad is None
        optimizer.step()
    return has_none, weights_of(model).sum().item()


def distance_without_weights(case: Case, shares: list[tuple[int, ...]]) -> tuple[float, bool]:
    """As `distance_from_one_process`, if each rank's gradient counted the same, however many samples it had."""
    SampleWeights.factor = property(lambda _: 1.0)  # pyrefly: ignore - in this process alone
    return distance_from_one_process(case, shares)


def watch_accounts(loader: SharedLoader) -> list[bool]:
    """Whether each account of an epoch is exact, as they come."""
    found: list[bool] = []
    members: Any = loader.source.membership
    note = members._record_account
    members._record_account = lambda account: (note(account), found.append(account.is_exact))
    return found


def assert_same_everywhere(weights: Tensor) -> None:
    """The same bits on all ranks."""
    everywhere = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, weights)
    assert all(torch.equal(other, weights) for other in everywhere)


@dataclass(frozen=True, kw_only=True)
class Balanced:
    """What training in mode `balanced` was like, and how far it ended from one process."""

    shares: list[tuple[int, ...]]
    """At each step."""
    weights: float
    """Largest difference of a weight, by the largest weight."""
    held_out_loss: float
    """Relative difference, on samples that nobody has trained on."""


def held_out_loss(model: nn.Module, dtype: torch.dtype) -> Tensor:
    """Of samples from the same source as those of `make`."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(500, FEATURES, generator=generator, dtype=dtype)
    with torch.no_grad():
        return nn.functional.cross_entropy(model(x), torch.randint(3, (500,), generator=generator)).double()


def train_balanced(slow_rank: int, sample_s: float, num_steps: int, dtype: torch.dtype) -> Balanced:
    """Training where one rank is slow.

    The clock stands still but for samples, which take `sample_s` each, on the slow rank four times as long.
    """
    case = Case(num_samples=470, batch=48, num_steps=num_steps, dtype=dtype)
    model, optimizer, loader = make(case)
    train(model, optimizer, loader, case)
    alone, alone_loss = weights_of(model), held_out_loss(model, dtype)
    model, optimizer, loader = make(case)
    now_s, each_s = 0.0, sample_s * (4 if dist.get_rank() == slow_rank else 1)

    def pass_time(_layer: nn.Module, inputs: tuple[Tensor, ...], _output: Tensor) -> None:
        nonlocal now_s
        now_s += each_s * len(inputs[0])

    HostTimeline.mark = lambda _: (now_s, 0.0, 0.0)  # pyrefly: ignore
    model[0].register_forward_hook(pass_time)
    parallel, optimizer, shared = ringweave.prepare(model, optimizer, loader, mode="balanced")
    seen: list[tuple[int, ...]] = []
    parallel.register_forward_pre_hook(lambda *_: seen.append(shared.shares))
    train(parallel, optimizer, shared, case)
    together = weights_of(parallel.module)
    assert_same_everywhere(together)
    together_loss = held_out_loss(parallel.module, dtype)
    return Balanced(
        shares=seen,
        weights=((together - alone).abs().max() / alone.abs().max()).item(),
        held_out_loss=abs(together_loss - alone_loss).item() / alone_loss.item(),
    )


def resume(first: int, second: int) -> None:
    """Trained in two parts, with a state in between, is trained in one part."""
    case = Case()
    whole = ringweave.prepare(*make(case), mode="sync")
    train(*whole, dataclasses.replace(case, num_steps=first + second))
    parallel, optimizer, loader = ringweave.prepare(*make(case), mode="sync")
    train(parallel, optimizer, loader, dataclasses.replace(case, num_steps=first))
    resumed = ringweave.prepare(*make(case), mode="sync")
    for new, old in zip(resumed, (parallel, optimizer, loader), strict=True):
        new.load_state_dict(old.state_dict())
    train(*resumed, dataclasses.replace(case, num_steps=second))
    assert torch.equal(weights_of(resumed[0]), weights_of(whole[0]))


def scale_gradients(num_steps: int, casts: bool) -> float:
    """Mixed precision with a GradScaler, unequal parts: the relative difference of a weight from one process."""
    case = Case(dtype=torch.float32 if casts else torch.float64, num_steps=num_steps)

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Iterable) -> Tensor:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for number, (x, y) in enumerate(forever(loader, num_steps)):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=casts):
                loss = nn.functional.cross_entropy(model(x), y)
            if number == 3:
                loss = loss * (math.inf if not dist.get_rank() else 1.0)  # all ranks must skip this update
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0**9
        return weights_of(model)

    model, optimizer, loader = make(case)
    if dist.get_rank() == 0:
        alone = loop(model, optimizer, loader)
    parallel, optimizer, shared = ringweave.prepare(*make(case), mode="sync")
    change_shares(shared, 2, [(1, 2, 9), (7, 4, 1)])
    together = loop(parallel, optimizer, shared)
    assert_same_everywhere(together)
    return ((together - alone).abs().max() / alone.abs().max()).item() if dist.get_rank() == 0 else 0.0


def batch_norm(num_steps: int) -> None:
    """A model with buffers, on unequal ranks: it trains, and evaluation counts every sample once."""
    case = Case(num_samples=47, num_steps=num_steps)
    model, _, loader = make(case)
    model.insert(1, nn.BatchNorm1d(16).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallel, optimizer, shared = ringweave.prepare(model, optimizer, loader, mode="sync")
    change_shares(shared, 2, [(2, 4, 6), (6, 4, 2)])
    train(parallel, optimizer, shared, case)
    assert_same_everywhere(weights_of(parallel))
    seen = torch.cat([x for x, _ in shared.split(loader)])
    counts = torch.tensor([len(seen)])
    dist.all_reduce(counts)
    total = seen.sum()
    dist.all_reduce(total)
    assert counts.item() == 47
    assert torch.isclose(total, loader.dataset.tensors[0].sum())


def prepare_differently(what: str) -> str:
    """The error where one rank prepares something else."""
    case = Case(batch=12 + (dist.get_rank() if what == "batch" else 0))
    mode = "balanced" if what == "mode" and dist.get_rank() else "sync"
    try:
        ringweave.prepare(*make(case), mode=mode)
    except DisagreementError as error:
        return str(error)
    return ""
