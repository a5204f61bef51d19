"""Pipelines whose stages have several devices, in real processes; float64, beside one process on the whole batch."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringweave.errors import RingweaveError
from ringweave.pipeline import Pipeline, Settings
from ringweave.pipeline.adapting import adapt
from ringweave.pipeline.migration import BlockMigrator, MigrationOutcome
from ringweave.planning.repartition import RepartitionPolicy
from ringweave.sim.pipeline_simulation import StageDevices
from ringweave_bench.virtual_device import TimedBlock, VirtualDevice
from tests.clock import Clock
from tests.pipeline.pipeline_functions import BATCH, CLASSES, FEATURES, batch_of, gradients_of, make_optimizer

NUM_MICROBATCHES = 3
SAMPLES = BATCH // NUM_MICROBATCHES


class Masked(nn.Module):
    """A block that takes a side input, one number for each sample."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        return self.linear(x) * weights


def wide_blocks() -> list[nn.Module]:
    torch.manual_seed(0)
    blocks = [nn.Linear(FEATURES, 12), Masked(12), nn.Tanh(), nn.Linear(12, 9), Masked(9), nn.Linear(9, CLASSES)]
    return [block.double() for block in blocks]


def side_of(index: int) -> Tensor:
    return torch.rand(BATCH, 1, generator=torch.Generator().manual_seed(99 + index), dtype=torch.float64)


def make_wide(
    devices: str, schedule: str, reduction: str, splits: tuple[int, ...], wire: str | None = None
) -> Pipeline:
    settings = Settings(
        num_microbatches=NUM_MICROBATCHES,
        schedule=schedule,
        splits=splits,
        devices=StageDevices.parse(devices),
        reduction=reduction,
        wire=wire,
    )
    blocks = wide_blocks()
    placed = StageDevices.parse(devices)
    if dist.get_rank() not in [min(placed.members(stage)) for stage in range(placed.num_stages)]:
        nn.init.zeros_(next(blocks[0].parameters()))  # ranks of a stage take the values of its first
    dtype = torch.float64 if wire is None else torch.float32
    blocks = [block.to(dtype) for block in blocks]
    example = torch.empty(BATCH, FEATURES, dtype=dtype)
    loss_fn = nn.CrossEntropyLoss(reduction=reduction)
    return Pipeline(blocks, loss_fn, make_optimizer, example, settings, {"weights": side_of(0).to(dtype)})


def train_wide(
    devices: str,
    splits: tuple[int, ...],
    schedules: list[str],
    reduction: str = "mean",
    later: str = "",
    wire: str | None = None,
) -> list[tuple[dict[int, list[float]], list[float], list[float]]]:
    """For each schedule: (parameters of the held blocks, losses with clipping, microbatches' losses of the last).

    In float32 if there is a wire format.
    """
    found = []
    for schedule in schedules:
        pipeline = make_wide(devices, schedule, reduction, splits, wire)
        replica, losses = pipeline.layout.replica_of_rank(pipeline.rank), []
        dtype = pipeline.boundaries[0].tensors[0].dtype
        for step in range(4):
            x, y = batch_of(step + 100 * replica)
            x, side = x.to(dtype), {"weights": side_of(step + 100 * replica).to(dtype)}
            losses.append(pipeline.train_step(x, target=y, max_norm=0.2, side=side).item())
            held_out = pipeline.evaluate(x, target=y, side=side)
            if later and step == 1:
                pipeline.repartition(pipeline.layout.splits, StageDevices.parse(later))
        held = {
            index: nn.utils.parameters_to_vector(pipeline.blocks[index].parameters()).tolist()
            for index in pipeline.blocks.held
            if any(True for _ in pipeline.blocks[index].parameters())
        }
        found.append((held, [*losses, held_out.item()], pipeline.microbatch_losses.flatten().tolist()))
    return found


def train_alone(num_replicas: int = 1, reduction: str = "mean") -> tuple[dict[int, list[float]], list[float]]:
    """The same by a plain loop on the batches of all replicas."""
    blocks = wide_blocks()
    model = nn.ModuleList(blocks)
    optimizers = [make_optimizer(block) for block in blocks if any(True for _ in block.parameters())]
    losses: list[float] = []

    def compute(step: int) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for replica in range(num_replicas):
            (x, y), weights = batch_of(step + 100 * replica), side_of(step + 100 * replica)
            value: Any = x.double()
            for block in blocks:
                value = block(value, weights) if isinstance(block, Masked) else block(value)
            total = total + nn.functional.cross_entropy(value, y, reduction=reduction)
        return total / num_replicas if reduction == "mean" else total

    for step in range(4):
        loss = compute(step)
        loss.backward()
        losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    with torch.no_grad():
        losses.append(compute(3).item())
    vectors = {
        index: nn.utils.parameters_to_vector(block.parameters()).tolist()
        for index, block in enumerate(blocks)
        if any(True for _ in block.parameters())
    }
    return vectors, losses


def wide_gradients(devices: str, splits: tuple[int, ...], schedule: str) -> dict[int, list[float]]:
    """Gradients of the held blocks after two batches."""
    pipeline = make_wide(devices, schedule, "mean", splits)
    for step in range(2):
        x, y = batch_of(step)
        pipeline.forward_backward(x.double(), target=y, side={"weights": side_of(step)})
    return gradients_of(pipeline.blocks, pipeline.blocks.held)


def wide_errors() -> list[str]:
    """Texts of what a pipeline of wide stages refuses."""
    texts = []
    for devices, splits in (("0:3+1:4 2:7", (3,)), ("0:8 1:8", (3,)), ("0:4+1:4 2:8", (2, 3))):
        try:
            make_wide(devices, "1f1b", "mean", splits)
        except RingweaveError as error:
            texts.append(str(error))
    pipeline = make_wide("0:3+1:5 2:8", "1f1b", "mean", (3,))
    for later in ("0:8 1:4+2:4", "0:3+1:4 2:7"):
        try:
            pipeline.repartition((3,), StageDevices.parse(later))
        except RingweaveError as error:
            texts.append(str(error))
    return texts


class Transposed(nn.Module):
    """A block whose output has samples in its second dimension."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1).contiguous()


def transposed_error() -> str:
    settings = Settings(num_microbatches=1, devices=StageDevices.parse("0:2+1:4 2:6"))
    blocks = [nn.Linear(6, 6), Transposed()]
    try:
        Pipeline(blocks, nn.MSELoss(), make_optimizer, torch.empty(6, 6), settings)
    except RingweaveError as error:
        return str(error)
    return "no error"


def train_moving(devices: str, moves: list[tuple[tuple[int, ...], str]]) -> tuple[dict[int, list[float]], list, str]:
    """(parameters of the held blocks, outcomes, devices in the end); a move starts after each step."""
    pipeline = make_wide(devices, "1f1b", "mean", (3,))
    outcomes: list[MigrationOutcome] = []
    moving, todo = BlockMigrator(pipeline, outcomes.append), list(moves)
    for step in range(4):
        x, y = batch_of(step)
        pipeline.train_step(x.double(), target=y, max_norm=0.2, side={"weights": side_of(step)})
        if todo:
            splits, later = todo.pop(0)
            moving.start(splits, StageDevices.parse(later) if later else None)
    held = {
        index: nn.utils.parameters_to_vector(pipeline.blocks[index].parameters()).tolist()
        for index in pipeline.blocks.held
        if any(True for _ in pipeline.blocks[index].parameters())
    }
    return held, outcomes, str(pipeline.layout.devices)


def follow_speeds(num_steps: int, at: int, factor: float) -> tuple[str, tuple[int, ...], list[MigrationOutcome]]:
    """From a step on rank 0's device takes `factor` times as long; two devices share the first of two stages."""
    ticks = Clock()
    device = VirtualDevice(clock=ticks, sleep=ticks.sleep)
    torch.manual_seed(0)
    blocks = [TimedBlock(nn.Linear(8, 8), each, 2 * each, device, SAMPLES) for each in (0.006, 0.003)]
    settings = Settings(
        num_microbatches=4,
        schedule="1f1b-overlap",
        devices=StageDevices.parse("0:4+1:4 2:8"),
        device=torch.device("cpu"),
    )
    x = torch.ones(4 * SAMPLES, 8)
    pipeline = Pipeline(blocks, nn.MSELoss(), make_optimizer, x, settings)
    balancer = adapt(pipeline, make_optimizer, RepartitionPolicy(window_steps=4), profile_rounds=1, clock=ticks)
    for step in range(num_steps):
        if step == at and pipeline.rank == 0:
            device.speed = 1 / factor
        pipeline.train_step(x, target=x)
    return str(pipeline.layout.devices), pipeline.layout.splits, balancer.outcomes
