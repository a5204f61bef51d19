"""Training on several ranks, against the same training in one process: run by real processes."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.comm.rank_functions import digest, everywhere

ROWS, FEATURES = 12, 256


def make_model() -> nn.Module:
    """Large enough for buckets that a schedule carries; float64, so that only the order of additions differs."""
    torch.manual_seed(0)
    layers = [nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, FEATURES), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(FEATURES, 8)).double()


def batch_of(train_step: int) -> tuple[Tensor, Tensor]:
    """The same global batch everywhere."""
    generator = torch.Generator().manual_seed(train_step)
    shape = (ROWS, FEATURES)
    return (
        torch.randn(shape, generator=generator, dtype=torch.float64),
        torch.randn((ROWS, 8), generator=generator, dtype=torch.float64),
    )


def train_alone(num_steps: int) -> nn.Module:
    """The reference: one process, the whole batch."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for train_step in range(num_steps):
        optimizer.zero_grad()
        x, y = batch_of(train_step)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model


def _own_rows() -> slice:
    share = ROWS // dist.get_world_size()
    return slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)


def _train(model: nn.Module, parameters: list[Tensor], num_steps: int) -> None:
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    for train_step in range(num_steps):
        optimizer.zero_grad()
        x, y = batch_of(train_step)
        nn.functional.mse_loss(model(x[_own_rows()]), y[_own_rows()]).backward()
        optimizer.step()


def _assert_same(mine: dict[str, Tensor], reference: nn.Module) -> None:
    for name, value in reference.state_dict().items():
        assert torch.allclose(mine[name], value, rtol=1e-9, atol=1e-11), name


def check_ddp(num_steps: int, bucket_mb: float) -> dict[str, dict[str, int]]:
    """DDP with several buckets in flight equals one process; the same bits on all ranks."""
    model = make_model()
    parallel = DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
    _train(parallel, list(model.parameters()), num_steps)
    _assert_same(model.state_dict(), train_alone(num_steps))
    digests = [digest(parameter) for parameter in model.parameters()]
    assert all(other == digests for other in everywhere(digests))
    return dist.group.WORLD.collectives_by_schedule()


def finish_buckets_within_backward(num_steps: int, bucket_mb: float) -> list[int]:
    """For each train step how many buckets were reduced before the backward pass had come to the first layer.

    The pass stands still there until one is, or gives up: it would for ever if buckets waited for the end of the pass.
    In the first step they do, since DDP makes its final buckets after it, and it does not stand still.
    """
    parallel = DistributedDataParallel(make_model(), bucket_cap_mb=bucket_mb)
    finished: list[int] = []

    def num_reduced() -> int:
        return dist.group.WORLD.collectives_by_schedule().get("ring", {"collectives": 0})["collectives"]

    def wait_reduced(_: Tensor) -> None:
        deadline = time.monotonic() + (120 if finished else 0)
        while num_reduced() == before and time.monotonic() < deadline:
            time.sleep(0.001)
        finished.append(num_reduced() - before)

    parallel.module[0].register_forward_hook(
        lambda _layer, _inputs, output: output.register_hook(wait_reduced) and None
    )
    for train_step in range(num_steps):
        before = num_reduced()
        x, y = batch_of(train_step)
        nn.functional.mse_loss(parallel(x[_own_rows()]), y[_own_rows()]).backward()
    return finished


def check_fsdp(num_steps: int, shape: tuple[int, ...]) -> None:
    """FSDP2, and with a two-dimensional mesh HSDP, equal one process."""
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = make_model()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    _train(model, list(model.parameters()), num_steps)
    whole = {name: value.full_tensor() for name, value in get_model_state_dict(model).items()}
    _assert_same(whole, train_alone(num_steps))


def check_checkpoint(folder: str) -> None:
    """torch.distributed.checkpoint saves a sharded model and loads it into one that is sharded otherwise."""
    path = Path(folder)
    model = make_model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=path)
    other = make_model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    state = {"model": get_model_state_dict(other)}
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(other, state["model"])
    _assert_same(other.state_dict(), make_model())


def names_of_groups() -> tuple[str, str, str]:
    """(class of the world group, its own name, class of a sub-group that asks for ringweave by name)."""
    group = dist.new_group([0, 1], backend="ringweave")
    dist.barrier(group=group)  # a rank that ends while the other one still connects would fail it
    return type(dist.group.WORLD).__name__, dist.group.WORLD.name(), type(group).__name__


def environment_of_torch() -> dict[str, str]:
    """Which backend each device takes by default."""
    return {**dist.Backend.default_device_backend_map, "pid": str(os.getpid())}
