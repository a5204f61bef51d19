"""Layout of a pipeline: consecutive blocks on stages, stages on ranks, replicas; its settings and process groups."""

import bisect
import itertools
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ringweave.comm import autoload
from ringweave.environment import EXACT
from ringweave.errors import UsageError
from ringweave.sim.pipeline_schedules import PipelineSchedule, num_warmup_forwards
from ringweave.sim.pipeline_simulation import StageDevices, one_device_each


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Placement of blocks on ranks. Pure: computed alike on every rank, without communication.

    The ranks of a replica are consecutive: device d of replica r is rank r x devices + d. With one device a stage,
    device d is stage d.

    Raises:
        UsageError: The splits are no partition of the blocks, or there is less than one replica.
    """

    num_blocks: int
    """Blocks of the whole model."""
    splits: tuple[int, ...]
    """Last blocks, counted from 1, of all stages but the last, as `ringweave partition` prints them. Equal neighbours
    make an empty stage between them, which passes its input on."""
    num_replicas: int = 1
    """Copies of the whole pipeline; each computes its own samples, and their gradients are averaged."""
    devices: StageDevices | None = None
    """Devices of each stage and their samples of a microbatch; None: one device a stage."""

    def __post_init__(self) -> None:
        edges = (0, *self.splits, self.num_blocks)
        if self.num_blocks < 1 or any(left > right for left, right in itertools.pairwise(edges)):
            expected = f"numbers from 0 to {self.num_blocks}, the blocks there are, none smaller than the one before it"
            raise UsageError("splits", got=self.splits, expected=expected, do="Take what `ringweave partition` prints")
        if self.num_replicas < 1:
            do = "Start a whole number of workers for each stage"
            raise UsageError("replicas of the pipeline", got=self.num_replicas, expected="1 or more", do=do)
        if self.devices is not None and self.devices.num_stages != self.num_stages:
            expected, do = f"{self.num_stages}, one more than there are splits", "Give devices for each stage"
            raise UsageError("stages with devices", got=self.devices.num_stages, expected=expected, do=do)

    @property
    def num_stages(self) -> int:
        return len(self.splits) + 1

    @property
    def placed(self) -> StageDevices:
        """Devices of each stage."""
        return self.devices or one_device_each(self.num_stages)

    @property
    def num_devices(self) -> int:
        """Devices of a replica."""
        return self.num_stages if self.devices is None else self.devices.num_devices

    @property
    def world_size(self) -> int:
        return self.num_devices * self.num_replicas

    @property
    def ranges(self) -> tuple[range, ...]:
        edges = (0, *self.splits, self.num_blocks)
        return tuple(range(first, end) for first, end in itertools.pairwise(edges))

    def with_stages(self, splits: tuple[int, ...], devices: StageDevices | None) -> "Layout":
        """Return the layout with other stages, on the same ranks.

        Raises:
            UsageError: A stage would have other devices.
        """
        if devices is not None:
            members = [self.placed.members(stage) for stage in range(self.num_stages)]
            if [devices.members(stage) for stage in range(devices.num_stages)] != members:
                do = "Change samples and splits only; other devices need another start"
                raise UsageError("devices of stages", got=str(devices), expected=f"those of {self.placed}", do=do)
            if self.devices is not None and devices.num_samples != self.devices.num_samples:
                expected, do = f"{self.devices.num_samples}, as a microbatch has", "Share these"
                raise UsageError("samples of devices", got=devices.num_samples, expected=expected, do=do)
        return replace(self, splits=splits, devices=devices or self.devices)

    def stage_of_rank(self, rank: int) -> int:
        return self.placed.stage_of_device[self.device_of_rank(rank)]

    def device_of_rank(self, rank: int) -> int:
        """Number of the rank's device in its replica."""
        return rank % self.num_devices

    def replica_of_rank(self, rank: int) -> int:
        return rank // self.num_devices

    def stage_of_block(self, block: int) -> int:
        return bisect.bisect_right(self.splits, block)

    def ranks_of_replica(self, replica: int) -> tuple[int, ...]:
        """Ranks of a replica, by device."""
        return tuple(range(replica * self.num_devices, (replica + 1) * self.num_devices))

    def ranks_of_stage(self, stage: int) -> tuple[int, ...]:
        """Ranks that hold the blocks of a stage: its devices in all replicas."""
        members = self.placed.members(stage)
        return tuple(sorted(rank for rank in range(self.world_size) if self.device_of_rank(rank) in members))

    def ranks_of_device(self, device: int) -> tuple[int, ...]:
        """Ranks of a device, one in each replica."""
        return tuple(range(device, self.world_size, self.num_devices))


def even_splits(num_blocks: int, num_stages: int) -> tuple[int, ...]:
    """Split into stages with equal numbers of blocks; earlier stages get one more if the number is uneven."""
    each, more = divmod(num_blocks, num_stages)
    return tuple(stage * each + min(stage, more) for stage in range(1, num_stages))


REDUCTIONS = ("mean", "sum")
BOUNDARY_WIRES = (EXACT, "bf16", "int8")
"""Formats of tensors between stages, by growing error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of pipeline training, the same on every rank.

    Raises:
        UsageError: A value that makes no sense.
    """

    num_microbatches: int
    """Microbatches per batch; the batch size must be a multiple of it."""
    schedule: str | PipelineSchedule = "1f1b"
    """`gpipe`, `1f1b`, `1f1b-overlap`, or any order that has each microbatch's forward and backward in each stage and
    no deadlock."""
    splits: tuple[int, ...] | None = None
    """Last blocks, from 1, of all stages but the last, as `ringweave partition` prints them; None: equal numbers of
    blocks."""
    num_stages: int | None = None
    """None: follows from `splits`, or without splits, all ranks are stages of one pipeline. Fewer stages than ranks
    make replicas."""
    devices: StageDevices | None = None
    """Devices of each stage and the samples of a microbatch that each computes, as `ringweave plan --pipeline`
    prints them; None: one device a stage. Device d is rank d of its replica."""
    reduction: str = "mean"
    """`mean` if the loss of a batch is the mean over its microbatches and replicas, `sum` if it is their sum."""
    seed: int = 0
    """Seed of the blocks' random numbers (dropout). Each block draws by seed, block, train step, microbatch and
    replica, so that the partition does not matter."""
    autocast: torch.dtype | None = None
    """Blocks and loss are computed under torch.autocast with this type; None: without. It is set here and not around
    the loop, because the activations between stages may have this type."""
    wire: str | None = None
    """Format in which activations and their gradients pass from stage to stage: `exact`, `bf16`, or `int8` with a shift
    and a scale for each channel. None: that of `ringweave run --wire` (`auto` stands for `exact`), else `exact`."""
    device: torch.device | None = None
    """Device of this rank; None: its own GPU (LOCAL_RANK) if there is one, else the CPU."""

    def __post_init__(self) -> None:
        if self.num_microbatches < 1:
            do = "Say how many parts a batch is cut into"
            raise UsageError("microbatches", got=self.num_microbatches, expected="1 or more", do=do)
        if isinstance(self.schedule, str):
            num_warmup_forwards(self.schedule, 0, 1, self.num_microbatches)
        elif self.schedule.num_microbatches != self.num_microbatches:
            expected = f"{self.num_microbatches}, as in num_microbatches"
            got = self.schedule.num_microbatches
            do = "Generate the order for this number"
            raise UsageError("microbatches of the order", got=got, expected=expected, do=do)
        if self.reduction not in REDUCTIONS:
            do = "Say how the loss of a batch follows from those of its microbatches"
            raise UsageError("reduction", got=self.reduction, expected="mean or sum", do=do)
        if self.wire is not None:
            check_boundary_wire(self.wire)
        _check_stages(self.num_stages, self.splits)
        if self.devices is not None:
            _check_stages(self.devices.num_stages, self.splits)


def check_boundary_wire(wire: str) -> str:
    """Return the name if tensors can pass from stage to stage in this format.

    Raises:
        UsageError: They cannot.
    """
    if wire not in BOUNDARY_WIRES:
        expected = f"one of {', '.join(BOUNDARY_WIRES)}"
        do = "Give another one as Settings(wire=...), which --wire does not change"
        raise UsageError("wire format between stages", got=wire, expected=expected, do=do)
    return wire


def _check_stages(num_stages: int | None, splits: tuple[int, ...] | None) -> None:
    if num_stages is None:
        return
    if num_stages < 1:
        raise UsageError("stages", got=num_stages, expected="1 or more", do="Leave it out for one on each rank")
    if splits is not None and len(splits) + 1 != num_stages:
        expected = f"{len(splits) + 1}, one more than there are splits"
        raise UsageError("stages", got=num_stages, expected=expected, do="Give one of the two")


class PipelineGroups:
    """Process groups of one pipeline; activations, gradients and small messages never queue up together."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.rank = dist.get_rank()
        backend = "nccl" if device.type == "cuda" else "gloo"
        replicas = [_new_group(layout.ranks_of_replica(replica), backend) for replica in range(layout.num_replicas)]
        self.pipeline = replicas[layout.replica_of_rank(self.rank)]
        """Ranks of this replica; device i is rank i of it."""
        self.device_ranks = layout.ranks_of_replica(layout.replica_of_rank(self.rank))
        """Ranks of this replica's devices in `control`."""
        self.alone: dist.ProcessGroup | None = None
        """This rank alone, where stages have other devices than torch's stages know: one each, in order."""
        if not layout.placed.is_plain:
            self.alone = [_new_group((rank,), "gloo") for rank in range(layout.world_size)][self.rank]
        self.stage_replicas: dist.ProcessGroup | None = None
        """Ranks that hold the same blocks: the devices of the stage in all replicas. None if this is the only one."""
        for stage in range(layout.num_stages):
            ranks = layout.ranks_of_stage(stage)
            group = _new_group(ranks, "ringweave") if len(ranks) > 1 else None
            if self.rank in ranks:
                self.stage_replicas = group
        self.control = _new_group(tuple(range(layout.world_size)), "gloo")
        """All ranks, for messages of some bytes."""

    def sum_over_ranks(self, own: Tensor) -> Tensor:
        """Return a small vector's sum over all ranks, in host memory; exact if only one rank's value is nonzero."""
        dist.all_reduce(own, group=self.control)
        return own

    def barrier(self) -> None:
        """Wait until every rank has called it."""
        dist.barrier(group=self.control)

    def max_over_ranks(self, own: Tensor) -> Tensor:
        """Return the elementwise maximum over all ranks of a small vector in host memory."""
        dist.all_reduce(own, op=dist.ReduceOp.MAX, group=self.control)
        return own


def _new_group(ranks: tuple[int, ...], backend: str) -> dist.ProcessGroup:
    group = autoload.new_native_group(list(ranks), backend)  # also where `--replace-backend` replaces the script's
    assert isinstance(group, dist.ProcessGroup) or dist.get_rank() not in ranks
    return group  # pyrefly: ignore - ranks outside of a group get a mark instead, and never use it


class Piggyback(Protocol):
    """Numbers that travel to all ranks with the losses of each train step, and arrive at its end."""

    def outgoing(self) -> Tensor:
        """Return this rank's numbers, float64 [n] in host memory; n is the same on all ranks."""
        ...

    def receive(self, totals: Tensor) -> None:
        """Receive the sums over all ranks, float64 [n]; exact where only one rank sent a nonzero value."""
        ...


def sum_with_piggyback(piggyback: Piggyback | None, table: Tensor, groups: PipelineGroups) -> Tensor:
    """Sum a float64 table over all ranks; the piggyback's numbers travel in the same message."""
    if piggyback is None:
        return groups.sum_over_ranks(table)
    totals = groups.sum_over_ranks(torch.cat((table.flatten(), piggyback.outgoing())))
    piggyback.receive(totals[table.numel() :])
    return totals[: table.numel()].reshape(table.shape)
