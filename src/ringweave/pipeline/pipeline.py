"""`Pipeline`: a model cut into stages, each on one or more ranks, and a train step of all of them."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringweave.comm import default_group, peer_data
from ringweave.environment import AUTO_WIRE, EXACT, WorkerEnvironment
from ringweave.errors import DisagreementError, TrainingError, UsageError
from ringweave.pipeline import optimizer
from ringweave.pipeline.model_blocks import BlockStore
from ringweave.pipeline.optimizer import BlockOptimizers, GradScaler, MakeOptimizer
from ringweave.pipeline.runtime import boundaries
from ringweave.pipeline.runtime.boundaries import Boundary, Precision, TensorMeta
from ringweave.pipeline.runtime.runner import StageRunner
from ringweave.pipeline.runtime.stopwatch import Stopwatch
from ringweave.pipeline.runtime.torch_schedules import LossFunction
from ringweave.pipeline.stage_layout import (
    BOUNDARY_WIRES,
    Layout,
    Piggyback,
    PipelineGroups,
    Settings,
    check_boundary_wire,
    even_splits,
    sum_with_piggyback,
)
from ringweave.sim.pipeline_schedules import PipelineSchedule
from ringweave.sim.pipeline_simulation import StageDevices

Inputs = Tensor | tuple[Tensor, ...]


class Pipeline:
    """Blocks on ranks, trained together like one model.

    ```python
    pipeline = Pipeline(blocks, loss_fn, make_optimizer, example, settings)
    for x, y in loader:
        loss = pipeline.train_step(x, target=y, max_norm=1.0)
    ```

    Every rank makes it with the same blocks and calls the same methods in the same order, with the same batch (with
    replicas: the same within a replica). The pipeline owns the blocks: each rank keeps only the values of its own.

    `boundaries` describe the tensors of one microbatch before each block and after the last one. `train_step_index`
    counts the train steps done; it is part of the blocks' seeds. A `piggyback`'s numbers travel with the losses.

    Raises:
        UsageError: Settings do not fit the blocks or the number of ranks.
        DisagreementError: Ranks have other wire formats.
        TrainingError: Blocks cannot be traced without data, share weights, or have nothing to train.
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
        """`example` (and `side`) are a batch's inputs; only their form matters, so they may be on the meta device."""
        default_group.ensure_process_group(os.environ)
        self.settings = settings = replace(settings, wire=_wire_of(settings))
        self.layout = _make_layout(len(blocks), settings)
        self.device = settings.device or default_device()
        default_group.use_gpu_of([self.device])
        self._batch_form = _batch_tensor_forms(_as_inputs(example), side or {}, settings.num_microbatches)
        if settings.devices is not None:
            _check_samples(self._batch_form, settings)
        first, self.side_input_metas = _first_microbatch(_as_inputs(example), side or {}, settings.num_microbatches)
        self.boundaries: tuple[Boundary, ...] = boundaries.trace_boundaries(
            blocks, first, self.side_input_metas, self.precision
        )
        if settings.devices is not None and settings.devices.is_wide:
            self._check_parts(blocks, first, settings.devices)
        self.rank = dist.get_rank()
        self.stage = self.layout.stage_of_rank(self.rank)
        self.groups = PipelineGroups(self.layout, self.device)
        _check_same_wire(settings, self.groups)
        self.blocks = BlockStore(blocks, self.layout.ranges[self.stage], self.device)
        optimizer.broadcast_first_replica(self.blocks, self.groups)
        self.optimizer = BlockOptimizers(make_optimizer, self.blocks)
        self.train_step_index = 0
        self.piggyback: Piggyback | None = None
        self._runner = StageRunner(self.layout, settings, loss_fn, self.groups, self.device)
        self._runner.set_blocks(self.layout, self.blocks, self.boundaries)

    @property
    def precision(self) -> Precision:
        """Precision in which blocks are computed."""
        return Precision(device=self.device, autocast=self.settings.autocast)

    @property
    def order(self) -> PipelineSchedule:
        """Actions of each stage in a step, in order; the simulator's input."""
        return self._runner.order

    @property
    def loss_fn(self) -> LossFunction:
        """Loss function of the output and target of a microbatch."""
        return self._runner.loss_fn

    @property
    def stopwatch(self) -> Stopwatch:
        """Stopwatch of this rank's stage, which counts computing but not waiting; off at first."""
        return self._runner.stopwatch

    @property
    def is_first(self) -> bool:
        """True if this rank's stage receives the inputs."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """True if this rank's stage computes the loss."""
        return self.stage == self.layout.num_stages - 1

    def train_step(
        self, *inputs: Tensor, target: Tensor, max_norm: float | None = None, side: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Run forward and backward of a batch, and one update of all blocks.

        Args:
            inputs: Inputs of this replica's batch, in the form of the example.
            target: Second argument of the loss function, with as many samples as the inputs.
            max_norm: Gradients are clipped to this 2-norm over all stages; None: no clipping.
            side: Side inputs, in the form of the example's.

        Returns:
            The loss of the batch over all replicas, on every rank: a number in host memory.
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
        """Add a batch's gradients to the present ones; arguments and result as in `train_step`.

        Args:
            inputs: As in `train_step`.
            target: As in `train_step`.
            scale: The loss is multiplied by it before backward, as `GradScaler` requires; the result is not.
            side: As in `train_step`.
        """
        self._check_batch(inputs, target, side or {})
        earlier = optimizer.stash_gradients(self.blocks, self.groups)
        losses = self._runner.train(self.train_step_index, inputs, target, scale, side or {})
        divide_by = self.layout.num_replicas if self._is_mean else 1
        optimizer.allreduce_replicas(self.blocks, self.groups, divide_by=divide_by)
        optimizer.restore_gradients(earlier)
        self.train_step_index += 1
        return self._combine_losses(losses, self.piggyback)

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their 2-norm over all stages is at most `max_norm`; return the norm before."""
        norm = optimizer.global_norm(self.blocks, self.groups)
        factor = max_norm / (float(norm) + 1e-6)
        if factor < 1:
            optimizer.scale_gradients(self.blocks, factor)
        return norm

    def grad_scaler(self, **options: Any) -> GradScaler:
        """Return a GradScaler for float16 that decides alike on all ranks; options as in `torch.amp.GradScaler`."""
        return GradScaler(self.groups, self.device, **options)

    def evaluate(self, *inputs: Tensor, target: Tensor, side: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return a batch's loss in evaluation mode, without gradients; arguments and result as in `train_step`."""
        self._check_batch(inputs, target, side or {})
        return self._combine_losses(self._runner.evaluate(inputs, target, side or {})[0])

    def output(self, *inputs: Tensor, target: Tensor, side: Mapping[str, Tensor] | None = None) -> Tensor | None:
        """Return a batch's output in evaluation mode on the ranks of the last stage; None on the others.

        Where the last stage has several devices, each returns the output of its own samples of each microbatch.
        """
        self._check_batch(inputs, target, side or {})
        return self._runner.evaluate(inputs, target, side or {})[1]

    def repartition(self, splits: tuple[int, ...], devices: StageDevices | None = None) -> None:
        """Switch to other stages between two steps; all ranks call it at the same time.

        Devices of a stage may get other numbers of samples (`devices`; None: as before).

        Blocks that stay keep everything. Blocks that this rank receives must be held already, with values and optimizer
        (`blocks.set_block`, `optimizer.add_block`); blocks that it gives away are dropped here. Nothing is computed, no
        random number is drawn: training continues with the same bits.

        Raises:
            UsageError: The splits are for another number of stages, or stages have other devices.
            TrainingError: A block of the new stage is not held.
        """
        if len(splits) != len(self.layout.splits):
            do = "A pipeline keeps its number of stages; leave one empty if need be"
            expected = f"{len(self.layout.splits)} splits"
            raise UsageError("splits", got=splits, expected=expected, do=do)
        layout = self.layout.with_stages(splits, devices)
        own = layout.ranges[self.stage]
        missing = sorted(set(own) - set(self.blocks.held))
        if missing:
            do = "Move their values and optimizer state here first"
            raise TrainingError(
                "blocks of the new stage",
                got=missing,
                expected="blocks that are held",
                do=do,
                where=f"rank {self.rank}",
            )
        for block in set(self.blocks.held) - set(own):
            self.optimizer.remove_block(block)
            self.blocks.drop_values(block)
        self.layout = layout
        self._runner.set_blocks(layout, self.blocks, self.boundaries)

    def _check_parts(self, blocks: Sequence[nn.Module], first: tuple[Tensor, ...], devices: StageDevices) -> None:
        """Raise unless each block maps samples to samples, so that devices may compute some of them."""
        for num in sorted({len(each) for each in devices.ranges} - {devices.num_samples}):
            parts = [
                value[: len(value) // devices.num_samples * num] for value in (*first, *self.side_input_metas.values())
            ]
            side = dict(zip(self.side_input_metas, parts[len(first) :], strict=True))
            found = boundaries.trace_boundaries(blocks, tuple(parts[: len(first)]), side, self.precision)
            for index, (whole, part) in enumerate(zip(self.boundaries, found, strict=True)):
                if whole.part(num, devices.num_samples) != part:
                    got, where = [form.shape for form in part.tensors], f"boundary behind block {index - 1}"
                    expected = f"{num} of the rows of {[form.shape for form in whole.tensors]} for {num} samples"
                    do = "Give each stage one device"
                    raise TrainingError("tensor between blocks", got=got, expected=expected, do=do, where=where)

    @property
    def _is_mean(self) -> bool:
        return self.settings.reduction == "mean"

    def _combine_losses(self, losses: Sequence[Tensor], piggyback: Piggyback | None = None) -> Tensor:
        """Combine the losses of all microbatches and replicas into the loss of the batch."""
        table = torch.zeros(self.layout.num_replicas, self.settings.num_microbatches, dtype=torch.float64)
        if self.is_last:
            own = torch.stack([loss.detach().double().cpu() for loss in losses])
            table[self.layout.replica_of_rank(self.rank)] = own * self._runner.loss_weight
        self.microbatch_losses = sum_with_piggyback(piggyback, table, self.groups)
        return self.microbatch_losses.mean() if self._is_mean else self.microbatch_losses.sum()

    def _check_batch(self, inputs: tuple[Tensor, ...], target: Tensor, side: Mapping[str, Tensor]) -> None:
        got = _batch_tensor_forms(inputs, side, self.settings.num_microbatches)
        if got != self._batch_form or (len(target) % self.settings.num_microbatches):
            do = "Drop an incomplete last batch (drop_last=True), and give the same side inputs"
            shapes = {name: shape for name, (shape, _) in got.items()}
            expected = f"{ {name: shape for name, (shape, _) in self._batch_form.items()} }, as in the example"
            raise TrainingError("batch", got=shapes, expected=expected, do=do, where=f"rank {self.rank}")


def default_device() -> torch.device:
    """Return this process's own GPU, by LOCAL_RANK, if there is one; else the CPU."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.device("cuda", local_rank) if torch.cuda.device_count() > local_rank else torch.device("cpu")


def _wire_of(settings: Settings) -> str:
    """Return the format between stages; `auto` never encodes, since nothing makes up for its errors later."""
    if settings.wire is not None:
        return settings.wire
    wire = WorkerEnvironment.from_environ(os.environ).wire
    return EXACT if wire == AUTO_WIRE else check_boundary_wire(wire)


def _check_same_wire(settings: Settings, groups: PipelineGroups) -> None:
    """Raise unless all ranks have the same format, since a message of another length would end the process."""
    code = BOUNDARY_WIRES.index(settings.wire or EXACT)
    last, first = groups.max_over_ranks(torch.tensor([code, -code])).tolist()
    if last != -first:
        expected = f"{BOUNDARY_WIRES[-first]}, as on another rank"
        got, do = BOUNDARY_WIRES[last], "Give all ranks the same Settings(wire=...) and --wire"
        raise DisagreementError("wire format between stages", got=got, expected=expected, do=do)


def _make_layout(num_blocks: int, settings: Settings) -> Layout:
    world_size, devices = dist.get_world_size(), settings.devices
    num_stages = settings.num_stages or (len(settings.splits) + 1 if settings.splits is not None else world_size)
    num_stages, num_devices = (num_stages, num_stages) if devices is None else (devices.num_stages, devices.num_devices)
    if world_size % num_devices:
        noun = "stages" if devices is None else "devices in all stages"
        expected = f"a multiple of {num_devices}, the number of {noun}"
        do = "Start as many workers, or cut the model into another number of stages"
        raise UsageError("number of workers", got=world_size, expected=expected, do=do)
    splits = settings.splits if settings.splits is not None else even_splits(num_blocks, num_stages)
    num_replicas = world_size // num_devices
    return Layout(num_blocks=num_blocks, splits=splits, num_replicas=num_replicas, devices=devices)


def _check_samples(form: Mapping[str, tuple], settings: Settings) -> None:
    """Raise unless the stages' devices share as many samples as a microbatch has."""
    assert settings.devices is not None
    shape = next(iter(form.values()))[0]
    num_samples = shape[0] // settings.num_microbatches
    if num_samples != settings.devices.num_samples:
        do = "Give the devices of each stage as many, or change the batch size or the number of microbatches"
        expected = f"{num_samples}, as many as a microbatch has"
        raise UsageError("samples of devices", got=settings.devices.num_samples, expected=expected, do=do)


def _as_inputs(example: Inputs) -> tuple[Tensor, ...]:
    return (example,) if isinstance(example, Tensor) else tuple(example)


def _first_microbatch(
    inputs: tuple[Tensor, ...], side: Mapping[str, Tensor], num_microbatches: int
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Return inputs and side inputs of one microbatch, without values."""
    cut = [
        TensorMeta.from_tensor(value[: len(value) // num_microbatches]).meta_tensor()
        for value in (*inputs, *side.values())
    ]
    return tuple(cut[: len(inputs)]), dict(zip(side, cut[len(inputs) :], strict=True))


def _batch_tensor_forms(
    inputs: tuple[Tensor, ...], side: Mapping[str, Tensor], num_microbatches: int
) -> dict[str, tuple]:
    """Return shape and type of each tensor of a batch."""
    named = {**{f"input {index}": value for index, value in enumerate(inputs)}, **side}
    for name, value in named.items():
        if value.ndim == 0 or len(value) == 0 or len(value) % num_microbatches:
            got = tuple(value.shape)
            expected = f"samples in its first dimension, a multiple of {num_microbatches}, the number of microbatches"
            raise TrainingError(f"batch, {name}", got=got, expected=expected, do="Choose another batch size")
    return {name: (tuple(value.shape), value.dtype) for name, value in named.items()}


def broadcast_text(text: str, group: dist.ProcessGroup, src: int = 0) -> str:
    """Send one rank's text to all ranks.

    Args:
        text: The text; ignored on ranks other than `src`.
        group: Process group with tensors in host memory.
        src: The sending rank, as a rank of the group.

    Raises:
        DisagreementError: The text is longer than any rank may send.
    """
    raw = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8)
    length = torch.tensor([len(raw)])
    dist.broadcast(length, group=group, group_src=src)
    peer_data.check_length(int(length), "text of another rank", min_bytes=1, where=f"rank {src} of the group")
    if dist.get_rank(group) != src:
        raw = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(raw, group=group, group_src=src)
    return raw.numpy().tobytes().rstrip(b"\0").decode(errors="replace")
