"""Pipelines that real processes run."""

import dataclasses
import hashlib
import itertools
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from ringweave.errors import RingweaveError
from ringweave.pipeline import Pipeline, Settings, checkpoints, profiling
from ringweave.pipeline.runtime import boundaries

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
    autocast: torch.dtype | None = None
    wire: str | None = None
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
        autocast=case.autocast,
        wire=case.wire,
    )
    loss_fn = nn.CrossEntropyLoss(reduction=case.reduction)
    return Pipeline(make_blocks(case.widths), loss_fn, make_optimizer, torch.empty(BATCH, FEATURES), settings)


def fingerprints(pipeline: Pipeline) -> dict[int, str]:
    """Of every held block: all bits of its parameters, buffers and optimizer state."""
    found = {}
    for index in pipeline.blocks.held:
        optimizer = pipeline.optimizer.for_block(index)
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
        sender, receiver = layout.stage_of_block(block), new.stage_of_block(block)
        if sender == receiver or pipeline.rank not in (sender, receiver):
            continue
        message: list[Any] = [None]
        if pipeline.rank == sender:
            optimizer = pipeline.optimizer.for_block(block)
            message = [(pipeline.blocks[block].state_dict(), optimizer.state_dict() if optimizer else None)]
            dist.send_object_list(message, receiver)
        else:
            dist.recv_object_list(message, sender)
            pipeline.blocks.allocate(block).load_state_dict(message[0][0])
            pipeline.optimizer.add_block(block, message[0][1])
    pipeline.repartition(splits)


def train_counting_bytes(case: Case, partitions: list[tuple[int, ...]]) -> tuple[list[float], list[tuple[int, int]]]:
    """`change_partition`: loss of each step, and (bytes sent, bytes by the profile at the stage's cuts) of each."""
    pipeline, losses, counted = make_pipeline(case), [], []
    profile = profiling.profile(pipeline, make_optimizer, rounds=1)
    sent, encode = [0], boundaries.encode

    def counting(wire: str, values: Tensor) -> Tensor:
        message = encode(wire, values)
        sent[0] += message.nbytes
        return message

    boundaries.encode = counting
    for step in range(case.num_steps):
        sent[0] = 0
        x, y = batch_of(step)
        losses.append(pipeline.train_step(x, target=y, max_norm=case.max_norm).item())
        before, behind = (0, *pipeline.layout.splits, 0)[pipeline.stage :][:2]
        planned = profile.blocks[behind - 1].forward_bytes if behind else 0
        planned += profile.blocks[before - 1].backward_bytes if before else 0
        counted.append((sent[0], case.num_microbatches * planned))
        if partitions:
            move(pipeline, partitions[step % len(partitions)])
    boundaries.encode = encode
    return losses, counted


def disagree_about_wires() -> list[str]:
    """The texts of the errors: ranks with other formats, and one of `--wire` that stages lack."""
    texts = []
    for wire, environ in (("bf16" if dist.get_rank() else "int8", ""), (None, "int4")):
        os.environ["RINGWEAVE_WIRE"] = environ
        try:
            make_pipeline(Case(splits=(2,), wire=wire))
        except RingweaveError as error:
            texts.append(str(error))
    os.environ["RINGWEAVE_WIRE"] = "auto"
    assert make_pipeline(Case(splits=(2,))).settings.wire == "exact"
    os.environ["RINGWEAVE_WIRE"] = "int8"
    assert make_pipeline(Case(splits=(2,))).settings.wire == "int8"
    assert make_pipeline(Case(splits=(2,), wire="exact")).settings.wire == "exact"
    return texts


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


def save_and_go_on(directory: Path) -> dict[int, str]:
    """Three steps, a checkpoint, three more; the bits of the held blocks."""
    pipeline = make_pipeline(Case(splits=(2, 4), schedule="1f1b-overlap"))
    scheduler = LambdaLR(pipeline.optimizer, lambda step: 1 / (1 + step))
    _train_with(pipeline, scheduler, range(3))
    checkpoints.save(pipeline, directory, {"scheduler": scheduler.state_dict()})
    _train_with(pipeline, scheduler, range(3, 6))
    return fingerprints(pipeline)


def load_and_go_on(directory: Path, splits: tuple[int, ...]) -> tuple[dict[int, str], int]:
    """The last three steps from the checkpoint, with other stages; the bits, and the steps that were done before."""
    pipeline = make_pipeline(Case(splits=splits))
    scheduler = LambdaLR(pipeline.optimizer, lambda step: 1 / (1 + step))
    scheduler.load_state_dict(checkpoints.load(pipeline, directory)["scheduler"])
    before = pipeline.train_step_index
    _train_with(pipeline, scheduler, range(3, 6))
    return fingerprints(pipeline), before


def load_wrongly(directory: Path) -> list[str]:
    """The texts of the errors: nothing there, another number of blocks, other shapes."""
    texts = []
    for widths, place in (
        (Case().widths, directory / "none"),
        ((FEATURES, 16), directory),
        ((FEATURES, 8, 8, 8, 8), directory),
    ):
        try:
            checkpoints.load(make_pipeline(Case(widths=widths)), place)
        except RingweaveError as error:
            texts.append(without_checks(str(error).replace(str(directory), "DIR")))
    return texts


def without_checks(text: str) -> str:
    """Names of files with CHECK in the place of the check that each holds."""
    return re.sub(r"-[0-9a-f]{16}\.", "-CHECK.", text)


def _train_with(pipeline: Pipeline, scheduler: LambdaLR, steps: range) -> None:
    for step in steps:
        x, y = batch_of(step)
        pipeline.train_step(x, target=y, max_norm=0.5)
        scheduler.step()


def train_replicas(splits: tuple[int, ...], num_replicas: int, num_steps: int) -> tuple[dict[int, list[float]], float]:
    """(parameters of the held blocks, last loss) of float64 training in which each replica has its part of a batch."""
    torch.manual_seed(0)
    blocks: list[nn.Module] = [nn.Linear(FEATURES, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, CLASSES)]
    blocks = [block.double() for block in blocks]
    samples = BATCH // num_replicas
    example = torch.empty(samples, FEATURES, dtype=torch.float64)
    settings = Settings(num_microbatches=2, splits=splits)
    if dist.get_rank() >= len(splits) + 1:
        nn.init.zeros_(next(blocks[0].parameters()))  # replicas take the values of the first one
    pipeline = Pipeline(blocks, nn.CrossEntropyLoss(), make_optimizer, example, settings)
    replica = pipeline.layout.replica_of_rank(pipeline.rank)
    loss = torch.tensor(0.0)
    for step in range(num_steps):
        x, y = batch_of(step)
        own = slice(replica * samples, (replica + 1) * samples)
        loss = pipeline.train_step(x[own].double(), target=y[own], max_norm=0.3)
    held = {
        index: nn.utils.parameters_to_vector(pipeline.blocks[index].parameters()).tolist()
        for index in pipeline.blocks.held
        if any(True for _ in pipeline.blocks[index].parameters())
    }
    return held, loss.item()


def train_plainly(num_steps: int) -> tuple[dict[int, list[float]], float]:
    """The same training by a plain loop."""
    model = plain_model()
    optimizer = make_optimizer(model)
    loss = torch.tensor(0.0)
    for step in range(num_steps):
        x, y = batch_of(step)
        loss = nn.functional.cross_entropy(model(x.double()), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
    return {
        index: nn.utils.parameters_to_vector(model[index].parameters()).tolist() for index in (0, 2, 4)
    }, loss.item()


def accumulate(
    splits: tuple[int, ...], num_replicas: int, schedules: list[str], reduction: str
) -> list[tuple[dict[int, list[float]], list[float]]]:
    """For each schedule: (gradients of the held blocks after three batches, loss of each batch), in float64."""
    samples, found = BATCH // num_replicas, []
    for schedule in schedules:
        settings = Settings(num_microbatches=3, schedule=schedule, splits=splits, reduction=reduction)
        example = torch.empty(samples, FEATURES, dtype=torch.float64)
        loss_fn = nn.CrossEntropyLoss(reduction=reduction)
        pipeline = Pipeline(list(plain_model()), loss_fn, make_optimizer, example, settings)
        first = pipeline.layout.replica_of_rank(pipeline.rank) * samples
        own, losses = slice(first, first + samples), []
        for step in range(3):
            x, y = batch_of(step)
            losses.append(pipeline.forward_backward(x[own].double(), target=y[own]).item())
            pipeline.evaluate(x[own].double(), target=y[own])
        found.append((gradients_of(pipeline.blocks, pipeline.blocks.held), losses))
    return found


def accumulate_plainly(reduction: str) -> tuple[dict[int, list[float]], list[float]]:
    """The same on one device, by torch alone."""
    model, losses = plain_model(), []
    for step in range(3):
        x, y = batch_of(step)
        loss = nn.functional.cross_entropy(model(x.double()), y, reduction=reduction)
        loss.backward()
        losses.append(loss.item())
    return gradients_of(model, range(len(model))), losses


def plain_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, CLASSES)
    ).double()


def gradients_of(blocks: Any, indices: Iterable[int]) -> dict[int, list[float]]:
    found = {}
    for index in indices:
        gradients = [parameter.grad.flatten() for parameter in blocks[index].parameters()]
        if gradients:
            found[index] = torch.cat(gradients).tolist()
    return found


def scale_losses(splits: tuple[int, ...]) -> tuple[dict[int, str], float]:
    """Two updates under autocast with a scaler, and one that a gradient of the first stage forbids on all ranks."""
    pipeline = make_pipeline(Case(splits=splits, widths=(FEATURES, 16, 16, 16), autocast=torch.bfloat16))
    scaler = pipeline.grad_scaler(init_scale=2.0**10, growth_interval=1000)
    for step in range(3):
        x, y = batch_of(step)
        pipeline.forward_backward(x, target=y, scale=scaler.get_scale())
        if step == 1 and pipeline.is_first:
            gradient = next(pipeline.blocks[0].parameters()).grad
            assert gradient is not None
            gradient[0] = torch.inf
        scaler.unscale_(pipeline.optimizer)
        pipeline.clip_grad_norm(1.0)
        scaler.step(pipeline.optimizer)
        scaler.update()
        pipeline.optimizer.zero_grad()
    return fingerprints(pipeline), scaler.get_scale()


def give_wrong_batches() -> list[str]:
    """The texts of the errors."""
    pipeline = make_pipeline(Case())
    texts = []
    for samples in (BATCH - 1, BATCH + 4):
        x, y = batch_of(0, samples)
        try:
            pipeline.train_step(x, target=y)
        except RingweaveError as error:
            texts.append(str(error))
    return texts


def outputs(splits: tuple[int, ...]) -> list[float] | None:
    """What comes out of the last stage in evaluation mode."""
    pipeline = make_pipeline(Case(splits=splits))
    x, y = batch_of(0)
    output = pipeline.output(x, target=y)
    return None if output is None else output.flatten().tolist()
