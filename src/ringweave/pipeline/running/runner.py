"""Runs train steps and evaluations of one rank's stage, whatever blocks it has."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineSchedule

from ringweave.pipeline.layouts import Layout
from ringweave.pipeline.models.holding import HeldBlocks
from ringweave.pipeline.running import schedules, sides
from ringweave.pipeline.running.boundaries import Boundary, Precision
from ringweave.pipeline.running.groups import Groups
from ringweave.pipeline.running.keys import Keys
from ringweave.pipeline.running.schedules import LossFunction
from ringweave.pipeline.running.stages import StageModule
from ringweave.pipeline.running.stopwatch import Stopwatch
from ringweave.pipeline.settings import Settings


class Runner:
    """Torch's stage and schedule of this rank. `place` before the first step, and again when the partition changes."""

    def __init__(
        self, layout: Layout, settings: Settings, loss_fn: LossFunction, groups: Groups, device: torch.device
    ) -> None:
        self._settings, self.loss_fn, self._groups, self._device = settings, loss_fn, groups, device
        self._precision = Precision(device=device, autocast=settings.autocast)
        self._index, self._num_stages = layout.stage_of(groups.rank), layout.num_stages
        keys = Keys(seed=settings.seed, replica=layout.replica_of(groups.rank))
        self.module = StageModule(keys, self._precision)
        """What this rank computes."""
        self.stopwatch = Stopwatch(device)
        """What the stage computes, once somebody turns it on."""
        self.order = schedules.order_of(settings.schedule, layout.num_stages, settings.num_microbatches)
        """What each stage computes, one after the other."""
        self._microbatches = schedules.microbatches_of(self.order, self._index)
        self._crossing: tuple[Boundary, ...] = ()
        self._scale = 1.0
        self._losses: list[Tensor] = []
        """In the order in which they are computed."""
        self._schedule: _PipelineSchedule
        self._stage: PipelineStage

    def place(self, layout: Layout, blocks: HeldBlocks, boundaries: tuple[Boundary, ...]) -> None:
        """Compute these blocks from the next step on.

        Where what crosses is the same at all cuts as before, torch's stages stay and only the blocks inside change.
        Else all ranks make new ones; then torch lets neighbours shake hands at the next step. No block is computed.
        """
        self.module.blocks = [(index, blocks[index]) for index in layout.ranges[self._index]]
        edges = (0, *layout.splits, layout.num_blocks)
        crossing = tuple(boundaries[edge] for edge in edges)
        if crossing == self._crossing:
            return
        self._crossing = crossing
        self.module.leaving = crossing[self._index + 1] if self._index < self._num_stages - 1 else None
        place = (self._index, self._num_stages)
        arriving, leaving = crossing[self._index].empty(), crossing[self._index + 1].empty()
        crosses = (arriving, leaving)
        self._stage = schedules.make_stage(
            self.module, place, self._device, crosses, self._groups.pipeline, self.stopwatch
        )
        self._schedule = schedules.build(self._settings.schedule, self.order, self._stage, self._scaled_loss)

    def train(
        self,
        train_step: int,
        inputs: tuple[Tensor, ...],
        target: Tensor,
        scale: float,
        side: Mapping[str, Tensor],
    ) -> list[Tensor]:
        """Forward and backward of a batch; returns the loss of each microbatch on the last stage, elsewhere nothing."""
        is_mean = self._settings.reduction == "mean"
        self._scale = scale / self._settings.num_microbatches if is_mean else scale
        self.module.train()
        self._begin(train_step, side)
        given, targets = self._given(inputs, target)
        self._schedule.step(*given, target=targets, return_outputs=False)
        return self._losses_of_batch()

    @torch.no_grad()
    def evaluate(
        self, inputs: tuple[Tensor, ...], target: Tensor, side: Mapping[str, Tensor]
    ) -> tuple[list[Tensor], Tensor | None]:
        """Forward of a batch in evaluation mode; returns losses and output on the last stage, elsewhere nothing."""
        self.module.eval()
        self._begin(0, side)
        given, targets = self._given(inputs, target)
        output = self._schedule.eval(*given, target=targets)
        return self._losses_of_batch(), output

    def _begin(self, train_step: int, side: Mapping[str, Tensor]) -> None:
        self._losses = []
        on_device = {name: value.to(self._device) for name, value in side.items()}
        parts = sides.parts(on_device, self._settings.num_microbatches)
        self.module.begin(train_step, self._microbatches, parts)

    def _losses_of_batch(self) -> list[Tensor]:
        return schedules.in_batch_order(self._microbatches, self._losses) if self._stage.is_last else []

    def _given(self, inputs: tuple[Tensor, ...], target: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
        given = tuple(value.to(self._device) for value in inputs) if self._stage.is_first else ()
        return given, target.to(self._device) if self._stage.is_last else None

    def _scaled_loss(self, output: Tensor, target: Tensor) -> Tensor:
        """What backward begins with; the loss itself is kept, to the bit."""
        with self._precision.apply():
            loss = self.loss_fn(output, target)
            self._losses.append(loss.detach())
            return loss * self._scale
