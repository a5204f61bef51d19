"""Pipelines that real processes run."""

import dataclasses
import hashlib
import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringweave.errors import RingweaveError
from ringweave.pipeline import Pipeline, Settings

FEATURES, CLASSES, BATCH = 6, 3, 24


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to train."""

    schedule: str = "1f1b"
    splits: tuple[int, ...] = ()
    later_splits: tuple[int, ...] | None = None
    num_microbatches: int = 4
    num_steps: int = 4
    reduction: str = "mean"
    max_norm: float | None = 0.1
    widths: tuple[int, ...] = field(default=(FEATURES, 16, 16, 16, 16))


def make_blocks(widths: tuple[int, ...] = (FEATURES, 16, 16, 16, 16)) -> list[nn.Module]:
    """Blocks with parameters, buffers that every forward moves on, and dropout; the same everywhere."""
    torch.manual_seed(0)
    blocks: list[nn.Module] = [
        nn.Sequential(nn.Linear(a, b), nn.BatchNorm1d(b), nn.Tanh(), nn.Dropout(0.3))
        for a, b in itertools.pairwise(widths)
    ]
    return [*blocks, nn.Linear(widths[-1], CLASSES)]


def make_optimizer(block: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(block.parameters(), lr=1e-2)


def batch_of(index: int, samples: int = BATCH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(samples, FEATURES, generator=generator)
    return x, torch.randint(CLASSES, (samples,), generator=generator)


def make_pipeline(case: Case) -> Pipeline:
    settings = Settings(
        num_microbatches=case.num_microbatches,
        schedule=case.schedule,
        splits=case.splits,
        reduction=case.reduction,
        seed=7,
    )
    loss_fn = nn.CrossEntropyLoss(reduction=case.reduction)
    return Pipeline(make_blocks(case.widths), loss_fn, make_optimizer, torch.empty(BATCH, FEATURES), settings)


def fingerprints(pipeline: Pipeline) -> dict[int, str]:
    """Of every held block: all bits of its parameters, buffers and optimizer state."""
    found = {}
    for index in pipeline.blocks.held:
        optimizer = pipeline.optimizer.of(index)
        state: Any = optimizer.state_dict()["state"] if optimizer else {}
        tensors = [*pipeline.blocks[index].state_dict().values()]
        tensors += [state[key][name] for key in sorted(state) for name in sorted(state[key])]
        digest = hashlib.sha256()
        for tensor in tensors:
            digest.update(tensor.numpy().tobytes())
        found[index] = digest.hexdigest()
    return found


def train(case: Case) -> tuple[dict[int, str], list[list[float]], list[float]]:
    """(bits of the held blocks, losses of all microbatches of each step, held-out losses)."""
    pipeline = make_pipeline(case)
    losses, held_out = [], []
    for step in range(case.num_steps):
        x, y = batch_of(step)
        pipeline.train_step(x, target=y, max_norm=case.max_norm)
        losses.append(pipeline.microbatch_losses.flatten().tolist())
        if step % 2:
            x, y = batch_of(1000)
            held_out.append(pipeline.evaluate(x, target=y).item())
    return fingerprints(pipeline), losses, held_out


def train_all(cases: list[Case]) -> list[tuple[dict[int, str], list[list[float]], list[float]]]:
    """`train` for each, one after the other in the same processes."""
    return [train(case) for case in cases]


def change_partition(case: Case, partitions: list[tuple[int, ...]]) -> tuple[dict[int, str], list[list[float]]]:
    """`train`, with another partition after every step; blocks travel with all that belongs to them."""
    pipeline = make_pipeline(case)
    losses = []
    for step in range(case.num_steps):
        x, y = batch_of(step)
        pipeline.train_step(x, target=y, max_norm=case.max_norm)
        losses.append(pipeline.microbatch_losses.flatten().tolist())
        if partitions:
            move(pipeline, partitions[step % len(partitions)])
    return fingerprints(pipeline), losses


def move(pipeline: Pipeline, splits: tuple[int, ...]) -> None:
    """Send all blocks that change their rank, and begin to use the new partition."""
    layout = pipeline.layout
    new = dataclasses.replace(layout, splits=splits)
    for block in range(layout.num_blocks):
        sender, receiver = layout.stage_with(block), new.stage_with(block)
        if sender == receiver or pipeline.rank not in (sender, receiver):
            continue
        message: list[Any] = [None]
        if pipeline.rank == sender:
            optimizer = pipeline.optimizer.of(block)
            message = [(pipeline.blocks[block].state_dict(), optimizer.state_dict() if optimizer else None)]
            dist.send_object_list(message, receiver)
        else:
            dist.recv_object_list(message, sender)
            pipeline.blocks.hold(block).load_state_dict(message[0][0])
            pipeline.optimizer.take(block, message[0][1])
    pipeline.repartition(splits)


def repartition_wrongly() -> list[str]:
    """The texts of the errors."""
    pipeline = make_pipeline(Case(splits=(2,)))
    texts = []
    for splits in ((1, 2), (4,)):
        try:
            pipeline.repartition(splits)
        except RingweaveError as error:
            texts.append(str(error))
    return texts
