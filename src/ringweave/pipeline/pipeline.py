"""`Pipeline`: a model cut into stages, one on each rank, and a train step of all of them."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringweave.comm import joining
from ringweave.errors import TrainingError, UsageError, explain
from ringweave.pipeline.layouts import Layout, even_splits
from ringweave.pipeline.models.holding import HeldBlocks
from ringweave.pipeline.optimizing import gradients
from ringweave.pipeline.optimizing.optimizer import BlockOptimizers, MakeOptimizer
from ringweave.pipeline.optimizing.scaling import GradScaler
from ringweave.pipeline.running import boundaries
from ringweave.pipeline.running.boundaries import Boundary, Precision, TensorForm
from ringweave.pipeline.running.groups import Groups
from ringweave.pipeline.running.riding import Rider, total_with
from ringweave.pipeline.running.runner import Runner
from ringweave.pipeline.running.schedules import LossFunction
from ringweave.pipeline.running.stopwatch import Stopwatch
from ringweave.pipeline.settings import Settings
from ringweave.sim.pipelines import Order

Inputs = Tensor | tuple[Tensor, ...]


class Pipeline:
    """Blocks on ranks, trained together as one model would be.

    ```python
    pipeline = Pipeline(blocks, loss_fn, make_optimizer, example, settings)
    for x, y in loader:
        loss = pipeline.train_step(x, target=y, max_norm=1.0)
    ```

    Every rank makes it with the same blocks and calls the same methods in the same order, with the same batch (with
    replicas: the same within a replica). The blocks are taken over: each rank keeps the values of its own ones only.

    `boundaries` say what crosses before each block and behind the last one, of one microbatch; `train_step_index` is
    the number of train steps done, by which blocks draw. What a `rider` has to say goes along with each one's losses.

    Raises:
        UsageError: Settings that do not fit the blocks or the number of ranks.
        TrainingError: Blocks that cannot be followed without data, share weights, or have nothing to train.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        loss_fn: LossFunction,
        make_optimizer: MakeOptimizer,
        example: Inputs,
        settings: Settings,
        side: Mapping[str, Tensor] | None = None,
    ) -> None:
        """`example` (and `side`) are the inputs of a batch; only their form matters, they may be on the meta device."""
        joining.join(os.environ)
        self.settings = settings
        self.layout = _layout(len(blocks), settings)
        self.device = settings.device or own_device()
        self._batch = _forms(_as_inputs(example), side or {}, settings.num_microbatches)
        first, self.side_forms = _first_microbatch(_as_inputs(example), side or {}, settings.num_microbatches)
        self.boundaries: tuple[Boundary, ...] = boundaries.follow(blocks, first, self.side_forms, self.precision)
        self.rank = dist.get_rank()
        self.stage = self.layout.stage_of(self.rank)
        self.groups = Groups(self.layout, self.device)
        self.blocks = HeldBlocks(blocks, self.layout.ranges[self.stage], self.device)
        gradients.spread_first(self.blocks, self.groups)
        self.optimizer = BlockOptimizers(make_optimizer, self.blocks)
        self.train_step_index = 0
        self.rider: Rider | None = None
        self._runner = Runner(self.layout, settings, loss_fn, self.groups, self.device)
        self._runner.place(self.layout, self.blocks, self.boundaries)

    @property
    def precision(self) -> Precision:
        """In what blocks are computed."""
        return Precision(device=self.device, autocast=self.settings.autocast)

    @property
    def order(self) -> Order:
        """What each stage computes in a step, one after the other: what the simulator takes."""
        return self._runner.order

    @property
    def loss_fn(self) -> LossFunction:
        """Of the output and target of a microbatch."""
        return self._runner.loss_fn

    @property
    def stopwatch(self) -> Stopwatch:
        """Times what this rank's stage computes, apart from waiting, once it is turned on."""
        return self._runner.stopwatch

    @property
    def is_first(self) -> bool:
        """This rank's stage gets the inputs."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """This rank's stage computes the loss."""
        return self.stage == self.layout.num_stages - 1

    def train_step(
        self, *inputs: Tensor, target: Tensor, max_norm: float | None = None, side: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Forward and backward of a batch, and one update of all blocks.

        Args:
            inputs: Of this replica's batch, in the form of the example.
            target: What the loss function compares with, as many samples.
            max_norm: Gradients are clipped to this 2-norm, taken over all stages; None: they are not.
            side: Side inputs, in the form of the example's.

        Returns:
            The loss of the batch, over all replicas, on every rank: a number in host memory.
        """
        loss = self.forward_backward(*inputs, target=target, side=side)
        if max_norm is not None:
            self.clip_grad_norm(max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def forward_backward(
        self, *inputs: Tensor, target: Tensor, scale: float = 1.0, side: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Gradients of a batch, added to those there are; arguments and result as those of `train_step`.

        Args:
            inputs: As in `train_step`.
            target: As in `train_step`.
            scale: The loss is multiplied by it before backward, as `GradScaler` asks for; the result is not.
            side: As in `train_step`.
        """
        self._check(inputs, target, side or {})
        earlier = gradients.set_aside(self.blocks, self.groups)
        losses = self._runner.train(self.train_step_index, inputs, target, scale, side or {})
        gradients.reduce_replicas(self.blocks, self.groups, is_mean=self._is_mean)
        gradients.put_back(earlier)
        self.train_step_index += 1
        return self._combined(losses, self.rider)

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their 2-norm over all stages is at most that; returns the norm there was."""
        norm = gradients.global_norm(self.blocks, self.groups, num_replicas=self.layout.num_replicas)
        factor = max_norm / (float(norm) + 1e-6)
        if factor < 1:
            gradients.scale(self.blocks, factor)
        return norm

    def grad_scaler(self, **options: Any) -> GradScaler:
        """For float16: a GradScaler whose verdict is that of all ranks, with `torch.amp.GradScaler`'s options."""
        return GradScaler(self.groups, self.device, **options)

    def evaluate(self, *inputs: Tensor, target: Tensor, side: Mapping[str, Tensor] | None = None) -> Tensor:
        """The loss of a batch in evaluation mode, without gradients; arguments and result as those of `train_step`."""
        self._check(inputs, target, side or {})
        return self._combined(self._runner.evaluate(inputs, target, side or {})[0])

    def output(self, *inputs: Tensor, target: Tensor, side: Mapping[str, Tensor] | None = None) -> Tensor | None:
        """The output of a batch in evaluation mode, on the ranks of the last stage; None on the others."""
        self._check(inputs, target, side or {})
        return self._runner.evaluate(inputs, target, side or {})[1]

    def repartition(self, splits: tuple[int, ...]) -> None:
        """Between two steps: other stages from now on, on all ranks at the same time.

        Blocks that stay keep everything. Those that this rank gets must be held already, with values and optimizer
        (`blocks.hold`, `optimizer.take`); those that it gives away are dropped here. Nothing is computed and nothing is
        drawn, so training goes on with the same bits.

        Raises:
            UsageError: Splits for another number of stages.
            TrainingError: A block of the new stage is not held.
        """
        if len(splits) != len(self.layout.splits):
            do = "A pipeline keeps its number of stages; leave one empty if need be"
            expected = f"{len(self.layout.splits)} splits"
            raise UsageError(explain("splits", got=splits, expected=expected, do=do))
        layout = Layout(num_blocks=len(self.blocks), splits=splits, num_replicas=self.layout.num_replicas)
        own = layout.ranges[self.stage]
        missing = sorted(set(own) - set(self.blocks.held))
        if missing:
            do = "Move their values and optimizer state here first"
            raise TrainingError(
                explain(
                    "blocks of the new stage",
                    got=missing,
                    expected="blocks that are held",
                    do=do,
                    where=f"rank {self.rank}",
                )
            )
        for block in set(self.blocks.held) - set(own):
            self.optimizer.release(block)
            self.blocks.drop(block)
        self.layout = layout
        self._runner.place(layout, self.blocks, self.boundaries)

    @property
    def _is_mean(self) -> bool:
        return self.settings.reduction == "mean"

    def _combined(self, losses: Sequence[Tensor], rider: Rider | None = None) -> Tensor:
        """The losses of all microbatches and replicas as that of the batch."""
        table = torch.zeros(self.layout.num_replicas, self.settings.num_microbatches, dtype=torch.float64)
        if self.is_last:
            table[self.layout.replica_of(self.rank)] = torch.stack([loss.detach().double().cpu() for loss in losses])
        self.microbatch_losses = total_with(rider, table, self.groups)
        return self.microbatch_losses.mean() if self._is_mean else self.microbatch_losses.sum()

    def _check(self, inputs: tuple[Tensor, ...], target: Tensor, side: Mapping[str, Tensor]) -> None:
        got = _forms(inputs, side, self.settings.num_microbatches)
        if got != self._batch or (len(target) % self.settings.num_microbatches):
            do = "Drop an incomplete last batch (drop_last=True), and give the same side inputs"
            shapes = {name: shape for name, (shape, _) in got.items()}
            expected = f"{ {name: shape for name, (shape, _) in self._batch.items()} }, as in the example"
            raise TrainingError(explain("batch", got=shapes, expected=expected, do=do, where=f"rank {self.rank}"))


def own_device() -> torch.device:
    """This process's own GPU, by LOCAL_RANK, where there is one; else the CPU."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.device("cuda", local_rank) if torch.cuda.device_count() > local_rank else torch.device("cpu")


def _layout(num_blocks: int, settings: Settings) -> Layout:
    world_size = dist.get_world_size()
    asked = settings.num_stages or (len(settings.splits) + 1 if settings.splits is not None else world_size)
    if world_size % asked:
        expected = f"a multiple of {asked}, the number of stages"
        do = "Start as many workers, or cut the model into another number of stages"
        raise UsageError(explain("number of workers", got=world_size, expected=expected, do=do))
    splits = settings.splits if settings.splits is not None else even_splits(num_blocks, asked)
    return Layout(num_blocks=num_blocks, splits=splits, num_replicas=world_size // asked)


def _as_inputs(example: Inputs) -> tuple[Tensor, ...]:
    return (example,) if isinstance(example, Tensor) else tuple(example)


def _first_microbatch(
    inputs: tuple[Tensor, ...], side: Mapping[str, Tensor], num_microbatches: int
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Inputs and side inputs of one microbatch, without values."""
    cut = [TensorForm.of(value[: len(value) // num_microbatches]).empty() for value in (*inputs, *side.values())]
    return tuple(cut[: len(inputs)]), dict(zip(side, cut[len(inputs) :], strict=True))


def _forms(inputs: tuple[Tensor, ...], side: Mapping[str, Tensor], num_microbatches: int) -> dict[str, tuple]:
    """Shape and type of all that a batch consists of.

    Raises:
        TrainingError: Something does not divide into microbatches.
    """
    named = {**{f"input {index}": value for index, value in enumerate(inputs)}, **side}
    for name, value in named.items():
        if value.ndim == 0 or len(value) == 0 or len(value) % num_microbatches:
            got = tuple(value.shape)
            expected = f"samples in its first dimension, a multiple of {num_microbatches}, the number of microbatches"
            raise TrainingError(explain(f"batch, {name}", got=got, expected=expected, do="Choose another batch size"))
    return {name: (tuple(value.shape), value.dtype) for name, value in named.items()}
