"""Runner of one rank's stage: its blocks as torch's stage module, seeded per block, train step and microbatch."""

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineSchedule

from ringweave.environment import EXACT
from ringweave.errors import TrainingError
from ringweave.pipeline.model_blocks import BlockStore
from ringweave.pipeline.runtime import boundaries, torch_schedules
from ringweave.pipeline.runtime.boundaries import Boundary, Precision, as_tuple
from ringweave.pipeline.runtime.stopwatch import Stopwatch
from ringweave.pipeline.runtime.torch_schedules import LossFunction
from ringweave.pipeline.stage_layout import Layout, PipelineGroups, Settings


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSeeds:
    """Seeds of one replica's blocks."""

    seed: int
    replica: int
    """Replicas draw different numbers, as workers of data-parallel training do."""
    first_sample: int = 0
    """First of this rank's samples in a microbatch: so do the devices of a stage."""

    def seed_for(self, block: int, train_step: int, microbatch: int) -> int:
        """Return the 64-bit seed of a block's forward of a microbatch in a train step."""
        parts = [self.seed % 2**64, self.replica, block, train_step, microbatch]
        parts += [self.first_sample] if self.first_sample else []
        return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(parts)}Q", *parts))

    @contextmanager
    def seeded(self, train_step: int, microbatch: int, device: torch.device) -> Iterator[Callable[[int], None]]:
        """Seed torch's generators per block inside the context, and restore their states afterwards.

        Yields:
            A function that is called before each block, with its index: it seeds that block's random numbers.
        """
        generators = [torch.default_generator]
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            generators.append(torch.cuda.default_generators[index])
        states = [generator.get_state() for generator in generators]

        def begin(block: int) -> None:
            for generator in generators:
                generator.manual_seed(self.seed_for(block, train_step, microbatch))

        try:
            yield begin
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


class StageModule(nn.Module):
    """Computes its blocks one after the other, each with its own random numbers.

    `begin_step` names the train step; each forward then belongs to the next microbatch in the schedule's order. The
    blocks may change between two steps.
    """

    def __init__(self, seeds: BlockSeeds, precision: Precision) -> None:
        super().__init__()
        self.blocks: list[tuple[int, nn.Module]] = []
        """Index in the model and module; not registered as submodules, since the `BlockStore` owns the blocks."""
        self.output_boundary: Boundary | None = None
        """Form that the next stage expects; None for the last stage, whose output goes to the loss."""
        self.seeds, self._precision = seeds, precision
        self._train_step = 0
        self._side_inputs: Sequence[Mapping[str, Tensor]] = ()
        self._microbatches = iter(())

    def begin_step(self, train_step: int, microbatches: Sequence[int], side: Sequence[Mapping[str, Tensor]]) -> None:
        """Begin a step. `microbatches`: indices in the order of this stage's forwards."""
        self._train_step, self._side_inputs = train_step, side
        self._microbatches = iter(microbatches)

    def forward(self, *values: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the output of the last block; the input itself if there are no blocks."""
        microbatch = next(self._microbatches)
        with self._precision.autocast_context(), self._seeded(microbatch) as begin:
            for index, block in self.blocks:
                begin(index)
                values = as_tuple(block(*values, **boundaries.select_side_inputs(block, self._side_inputs[microbatch])))
        self._check_output(values)
        return values[0] if len(values) == 1 else values

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield the blocks' parameters, whose gradients torch's stage scales."""
        for _, block in self.blocks:
            yield from block.parameters(recurse)

    def train(self, mode: bool = True) -> "StageModule":
        for _, block in self.blocks:
            block.train(mode)
        return super().train(mode)

    def _seeded(self, microbatch: int) -> AbstractContextManager[Callable[[int], None]]:
        if not self.training:
            return nullcontext(lambda _: None)
        return self.seeds.seeded(self._train_step, microbatch, self._precision.device)

    def _check_output(self, values: tuple[Tensor, ...]) -> None:
        """Check the output's shapes and types, since Gloo would accept bytes of another type."""
        got = [(tuple(value.shape), value.dtype) for value in values]
        if self.output_boundary is not None and got != [
            (form.shape, form.dtype) for form in self.output_boundary.tensors
        ]:
            expected = f"{[(form.shape, form.dtype) for form in self.output_boundary.tensors]}, as in the example"
            do = "Compute in one precision (Settings.autocast), with shapes that do not depend on values"
            raise TrainingError("activations of a stage", got=got, expected=expected, do=do)


class StageRunner:
    """This rank's torch stage and schedule; call `set_blocks` before the first step and after each repartitioning."""

    def __init__(
        self, layout: Layout, settings: Settings, loss_fn: LossFunction, groups: PipelineGroups, device: torch.device
    ) -> None:
        self._settings, self.loss_fn, self._groups, self._device = settings, loss_fn, groups, device
        self._precision = Precision(device=device, autocast=settings.autocast)
        self._stage_index, self._num_stages = layout.stage_of_rank(groups.rank), layout.num_stages
        self._device_index, self._replica = layout.device_of_rank(groups.rank), layout.replica_of_rank(groups.rank)
        self._devices = layout.devices
        self.module = StageModule(self._seeds(), self._precision)
        """Module that computes this rank's stage."""
        self.stopwatch = Stopwatch(device)
        """Compute time of the stage; off at first."""
        self.order = torch_schedules.resolve_order(settings.schedule, layout.num_stages, settings.num_microbatches)
        """Actions of each stage, in order."""
        self._microbatches = torch_schedules.stage_microbatches(self.order, self._stage_index)
        self._built_for: object = None
        self._scale = 1.0
        self._losses: list[Tensor] = []
        """Losses in the order of computation."""
        self._schedule: _PipelineSchedule
        self._stage: PipelineStage

    def set_blocks(self, layout: Layout, blocks: BlockStore, boundaries: tuple[Boundary, ...]) -> None:
        """Compute these blocks from the next step on.

        If the boundaries at all splits are as before, torch's stages stay and only the blocks inside change. Else all
        ranks make new stages, and torch connects neighbours again at the next step. No block is computed.
        """
        self.module.blocks = [(index, blocks[index]) for index in layout.ranges[self._stage_index]]
        edges = (0, *layout.splits, layout.num_blocks)
        stage_boundaries = tuple(boundaries[edge] for edge in edges)
        if self._built_for == (stage_boundaries, layout.devices):
            return
        self._built_for = (stage_boundaries, layout.devices)
        self._devices = layout.devices
        self.module.seeds = self._seeds()
        arriving, leaving = (self.own_part(each) for each in stage_boundaries[self._stage_index :][:2])
        self.module.output_boundary = leaving if self._stage_index < self._num_stages - 1 else None
        place = torch_schedules.StagePlace(
            stage_index=self._stage_index,
            num_stages=self._num_stages,
            group=self._groups.pipeline,
            device_index=self._device_index,
            devices=layout.devices,
            alone=self._groups.alone,
            wire=self._settings.wire or EXACT,
        )
        crosses = (arriving.meta_tensors(), leaving.meta_tensors())
        self._stage = torch_schedules.make_stage(self.module, place, self._device, crosses, self.stopwatch)
        self._schedule = torch_schedules.build_schedule(
            self._settings.schedule, self.order, self._stage, self._scaled_loss
        )

    def train(
        self,
        train_step: int,
        inputs: tuple[Tensor, ...],
        target: Tensor,
        scale: float,
        side: Mapping[str, Tensor],
    ) -> list[Tensor]:
        """Run forward and backward of a batch; return each microbatch's loss on the last stage, elsewhere nothing."""
        is_mean = self._settings.reduction == "mean"
        self._scale = scale / self._settings.num_microbatches * self.loss_weight if is_mean else scale
        self.module.train()
        self._begin_step(train_step, side)
        given, targets = self._stage_inputs(inputs, target)
        self._schedule.step(*given, target=targets, return_outputs=False)
        return self._losses_in_batch_order()

    @torch.no_grad()
    def evaluate(
        self, inputs: tuple[Tensor, ...], target: Tensor, side: Mapping[str, Tensor]
    ) -> tuple[list[Tensor], Tensor | None]:
        """Run forward of a batch in evaluation mode; return losses and output on the last stage, elsewhere nothing."""
        self.module.eval()
        self._begin_step(0, side)
        given, targets = self._stage_inputs(inputs, target)
        output = self._schedule.eval(*given, target=targets)
        return self._losses_in_batch_order(), output

    @property
    def loss_weight(self) -> float:
        """Weight of this rank's loss of a microbatch in that of the whole one."""
        if self._devices is None or self._settings.reduction != "mean":
            return 1.0
        return self._devices.fraction(self._device_index)

    def _seeds(self) -> BlockSeeds:
        first = 0 if self._devices is None else self._devices.ranges[self._device_index].start
        return BlockSeeds(seed=self._settings.seed, replica=self._replica, first_sample=first)

    def own_part(self, boundary: Boundary) -> Boundary:
        """Return the boundary of this rank's samples."""
        if self._devices is None:
            return boundary
        return boundary.part(len(self._devices.ranges[self._device_index]), self._devices.num_samples)

    def _own_rows(self, batch: Tensor) -> Tensor:
        """Return this rank's samples of each microbatch of a batch."""
        if self._devices is None or len(self._devices.ranges[self._device_index]) == self._devices.num_samples:
            return batch
        own = self._devices.ranges[self._device_index]
        rows = len(batch) // (self._settings.num_microbatches * self._devices.num_samples)
        by_microbatch = batch.reshape(self._settings.num_microbatches, -1, *batch.shape[1:])
        return by_microbatch[:, own.start * rows : own.stop * rows].flatten(0, 1)

    def _begin_step(self, train_step: int, side: Mapping[str, Tensor]) -> None:
        self._losses = []
        on_device = {name: self._own_rows(value).to(self._device) for name, value in side.items()}
        parts = boundaries.split_side_inputs(on_device, self._settings.num_microbatches)
        self.module.begin_step(train_step, self._microbatches, parts)

    def _losses_in_batch_order(self) -> list[Tensor]:
        return torch_schedules.sort_by_microbatch(self._microbatches, self._losses) if self._stage.is_last else []

    def _stage_inputs(self, inputs: tuple[Tensor, ...], target: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
        given = tuple(self._own_rows(value).to(self._device) for value in inputs) if self._stage.is_first else ()
        return given, self._own_rows(target).to(self._device) if self._stage.is_last else None

    def _scaled_loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss that backward starts from; the unscaled loss is kept bit for bit."""
        with self._precision.autocast_context():
            loss = self.loss_fn(output, target)
            self._losses.append(loss.detach())
            return loss * self._scale
