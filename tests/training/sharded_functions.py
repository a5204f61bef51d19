"""Training of a sharded model on several ranks, against the same training in one process: run by real processes."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.utils.data import DataLoader, TensorDataset

import ringweave
from ringweave.training import SharedLoader, sharded_model
from ringweave.training.checkpoints import store
from tests.training import training_functions
from tests.training.training_functions import Case, make, train

Prepared = tuple[nn.Module, torch.optim.Optimizer, SharedLoader]


def shard(model: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """FSDP2 over a mesh of one dimension, HSDP over one of two."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for layer in model.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def make_sharded(case: Case, shape: tuple[int, ...]) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader]:
    """What a script has before it calls `prepare`."""
    model, _, loader = make(case)
    shard(model, shape)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader


def weights_of(model: nn.Module) -> Tensor:
    """The whole model's weights; a collective."""
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return torch.cat([each.detach().flatten() for each in whole]).double()


def distance_from_one_process(
    case: Case, shares: list[tuple[int, ...]], shape: tuple[int, ...], max_samples: int | None = None
) -> tuple[float, bool, bool]:
    """(largest relative difference of a weight from one process, every account is exact, shards were sharded)."""
    model, optimizer, loader = make(case)
    train(model, optimizer, loader, case)
    alone = training_functions.weights_of(model)
    made = make_sharded(case, shape)
    weight = training_functions.weight_of(case, made[2].dataset)
    options: dict[str, Any] = {"reduction": case.reduction, "weight": weight, "max_samples": max_samples}
    prepared, optimizer, shared = ringweave.prepare(*made, **options)
    assert prepared is made[0]
    accounts = training_functions.watch_accounts(shared)
    if shares:
        training_functions.change_shares(shared, 2, shares)
    train(prepared, optimizer, shared, case)
    together = weights_of(prepared)
    training_functions.assert_same_everywhere(together)
    is_sharded = sum(p.to_local().numel() for p in prepared.parameters()) < together.numel()
    return ((together - alone).abs().max() / alone.abs().max()).item(), all(accounts), is_sharded


def replicate_what_differs(shape: tuple[int, ...]) -> tuple[list[float], list[float]]:
    """(values of this rank's first shard, values of a buffer) after `prepare`; each rank begins with its own number."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(dist.get_rank())
    shard(model, shape)
    samples = TensorDataset(torch.randn(8, 4), torch.randn(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, _, _ = ringweave.prepare(model, optimizer, DataLoader(samples, batch_size=4))
    first = next(prepared.parameters()).to_local().flatten().tolist()
    return first, model[1].running_mean.tolist()


class OwnOutput:
    """No tensor, and no list of them."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Wrapping(nn.Module):
    """A model that hides its output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> OwnOutput:
        return OwnOutput(self.layer(x))


class FullyShardedDataParallel(nn.Linear):
    """In the place of FSDP1's, which needs a GPU."""


class FlatParameter(nn.Parameter):
    """In the place of FSDP1's."""


def refusals(environ: dict[str, str]) -> dict[str, str]:
    """What is said to scripts that do not go with a sharded model."""
    os.environ.update(environ)
    size, said = dist.get_world_size(), {}
    samples = TensorDataset(torch.randn(8, 4), torch.randn(8, 4))

    def attempt(name: str, model: nn.Module, **options: Any) -> None:
        optimizer = options.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            prepared, _, loader = ringweave.prepare(model, optimizer, DataLoader(samples, batch_size=4), **options)
            for x, _ in loader:
                prepared(x)
        except ringweave.errors.RingweaveError as error:
            said[name] = str(error)

    plain = nn.Linear(4, 4)
    early = torch.optim.SGD(plain.parameters(), lr=0.1)
    attempt("early optimizer", shard(plain, (size,)), optimizer=early)
    for mode in ("balanced", "ps", "ps-hra"):
        attempt(mode, shard(nn.Linear(4, 4), (size,)), mode=mode)
    attempt("ddp", shard(nn.Linear(4, 4), (size,)), ddp={"bucket_cap_mb": 1})
    partly = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(partly[0], mesh=init_device_mesh("cpu", (size,)))
    attempt("partly", partly)
    mesh = init_device_mesh("cpu", (size,))
    replicated = nn.Linear(4, 4)
    for name, value in list(replicated.named_parameters()):
        setattr(replicated, name, nn.Parameter(distribute_tensor(value.detach(), mesh, [Replicate()])))
    attempt("replicated", replicated)
    wrapped = FullyShardedDataParallel(4, 4)
    wrapped.weight.__class__ = FlatParameter
    attempt("fsdp1", wrapped)
    attempt("output", shard(Wrapping(), (size,)))
    os.environ["RINGWEAVE_COORDINATORS"] = "127.0.0.1:9"
    attempt("elastic", shard(nn.Linear(4, 4), (size,)))
    return said


def losses_of(
    case: Case, shape: tuple[int, ...] | None, folder: str, first: int, second: int, keeps: bool = True
) -> list[float]:
    """Losses of the whole batches of the steps that this run takes: it saves after `first`, and after all steps.

    Without a shape the model is not sharded. A folder with a checkpoint is gone on from.
    """
    made = make(case) if shape is None else make_sharded(case, shape)
    model, optimizer, loader = ringweave.prepare(*made, mode="sync")
    checkpoints = ringweave.Checkpoints(Path(folder), model=model, optimizer=optimizer, loader=loader)
    done, losses = checkpoints.load(), []
    for step, (x, y) in enumerate(training_functions.forever(loader, first + second - done), start=done + 1):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        total = loss.detach() * loader.fraction
        dist.all_reduce(total)
        losses.append(total.item())
        if keeps and step in (first, first + second):
            checkpoints.save(step)
        if step == first and second and keeps:
            break
    checkpoints.wait()
    dist.barrier()
    return losses


def steps_that_are_kept(folder: str, num_saves: int) -> list[int]:
    """Steps of the complete checkpoints after so many saves."""
    model, optimizer, loader = ringweave.prepare(*make_sharded(Case(), (dist.get_world_size(),)))
    checkpoints = ringweave.Checkpoints(Path(folder), model=model, optimizer=optimizer, loader=loader)
    for step in range(1, num_saves + 1):
        checkpoints.save(step)
        checkpoints.wait()
        dist.barrier()  # as a train step is
    return [files[0].train_step for files in store.complete_sets(Path(folder))]


def load_elsewhere(case: Case, folder: str) -> str:
    """What is said where each rank has a folder of its own, and rank 0's has a checkpoint."""
    model, optimizer, loader = ringweave.prepare(*make_sharded(case, (dist.get_world_size(),)))
    own = Path(folder) / str(dist.get_rank())
    checkpoints = ringweave.Checkpoints(own, model=model, optimizer=optimizer, loader=loader)
    try:
        checkpoints.load()
    except ringweave.errors.TrainingError as error:
        return str(error)
    raise AssertionError("it was loaded")


def is_sharded(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)


class ReadingHook:
    """Hook of a parameter that reads its gradient as soon as it is accumulated."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.seen: list[Tensor] = []
        parameter.register_post_accumulate_grad_hook(self)

    def __call__(self, parameter: Tensor) -> None:
        self.seen.append(parameter.grad.to_local().clone())


def overlapped_beside_waited(
    shape: tuple[int, ...], accumulate: int, has_hook: bool
) -> tuple[bool, int, dict[str, int]]:
    """(gradients and weights are the same bits with and without, groups that may overlap, reductions that did)."""
    pairs, hooks = [], []
    for is_overlapped in (False, True):
        torch.manual_seed(0)
        model = shard(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 4)), shape)
        num_groups = sharded_model.overlap_collectives(model) if is_overlapped else 0
        if len(shape) == 2:
            replicas = next(sharded_model._param_groups(model)).mesh_info.replicate_process_group
            assert dist.get_process_group_ranks(replicas) == [dist.get_rank() % 2, dist.get_rank() % 2 + 2]
            assert dist.get_backend(replicas) == "ringweave"
        hooks += [ReadingHook(next(model[2].parameters()))] if has_hook else []
        pairs.append((model, torch.optim.SGD(model.parameters(), lr=0.1)))
    counts = {"scatter": 0, "sum": 0}

    def count(name: str) -> None:
        own = getattr(sharded_model.OpenReductions, name)

        def counted(reductions: sharded_model.OpenReductions, tensor: Tensor, start: Any) -> None:
            counts[name] += 1
            own(reductions, tensor, start)

        setattr(sharded_model.OpenReductions, name, counted)

    for name in counts:
        count(name)
    generator, is_same = torch.Generator().manual_seed(dist.get_rank()), True
    for _ in range(3):
        batches = [torch.randn(4, 8, generator=generator) for _ in range(accumulate)]
        for model, optimizer in pairs:
            optimizer.zero_grad()
            for batch in batches:
                model(batch).square().mean().backward()
        states = [[t.to_local() for p in model.parameters() for t in (p, p.grad)] for model, _ in pairs]
        is_same &= all(map(torch.equal, *states)) and all(t.abs().sum() > 0 for t in states[0][1::2])
        for _, optimizer in pairs:
            optimizer.step()
    is_same &= not hooks or all(map(torch.equal, hooks[0].seen, hooks[1].seen))
    following = [
        each._get_fsdp_state()._states_to_forward_prefetch for each in pairs[1][0].modules() if is_sharded(each)
    ]
    assert following == [[each._get_fsdp_state()] for each in pairs[1][0] if is_sharded(each)] + [[]]
    return is_same, num_groups, counts
