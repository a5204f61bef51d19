"""Torch's pipeline schedules for a stage; other orders run in torch's runtime for schedules given as data.

`gpipe` and `1f1b` are `ScheduleGPipe` and `Schedule1F1B`. Any other order goes to `_PipelineScheduleRuntime`, with our
transfers. Over Gloo all receives of a step are posted at its start: each has its own buffer and needs no compute, so a
transfer begins when its data is there. NCCL keeps the order of posted operations, and a receive occupies the device
until it is done; there torch's own lowering places each receive near its use.

Where stages have several devices, all orders run as data: torch's loops couple a send with the next receive, which a
stage of other devices may answer later. A device sends and receives pieces of a microbatch: rows of the same tensors,
without a copy. In a format other than exact, each piece is encoded when it is sent, and decoded when it is used.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import _Action, _PipelineSchedule, _PipelineScheduleRuntime

from ringweave.environment import EXACT
from ringweave.errors import UsageError
from ringweave.pipeline.runtime import boundaries
from ringweave.pipeline.runtime.stopwatch import Stopwatch
from ringweave.sim import pipeline_schedules, pipeline_simulation
from ringweave.sim.pipeline_schedules import ActionKind, PipelineAction, PipelineSchedule
from ringweave.sim.pipeline_simulation import StageDevices

LossFunction = Callable[[Tensor, Tensor], Tensor]
_ValueT = TypeVar("_ValueT")


def resolve_order(schedule: str | PipelineSchedule, num_stages: int, num_microbatches: int) -> PipelineSchedule:
    """Return the actions of each stage, in order.

    Raises:
        UsageError: An unknown name; fewer microbatches than stages for `1f1b`; an order for another number of stages.
        ScheduleError: Stages of the order wait for each other for ever.
    """
    if isinstance(schedule, PipelineSchedule):
        if schedule.num_stages != num_stages:
            do = "Generate it for this number, or start as many workers"
            got, expected = schedule.num_stages, f"{num_stages}, as the pipeline has"
            raise UsageError("stages of the order", got=got, expected=expected, do=do)
        pipeline_simulation.PipelineTimeline(schedule)
        return schedule
    if schedule == "1f1b" and num_microbatches < num_stages:
        expected = f"at least {num_stages}, the number of stages, for 1f1b"
        do = "Cut the batch finer, or take gpipe or 1f1b-overlap"
        raise UsageError("microbatches", got=num_microbatches, expected=expected, do=do)
    return pipeline_schedules.generate_pipeline_schedule(schedule, num_stages, num_microbatches)


def build_schedule(
    schedule: str | PipelineSchedule, order: PipelineSchedule, stage: PipelineStage, loss_fn: LossFunction
) -> _PipelineSchedule:
    """Build torch's schedule that runs an order on a stage.

    It never divides gradients: torch would divide all present gradients, also those of earlier batches.

    Args:
        schedule: The name, or the order itself.
        order: Result of `resolve_order`.
        stage: This rank's stage.
        loss_fn: Loss of the output and target of one microbatch, where backward starts.
    """
    num = order.num_microbatches
    is_wide = isinstance(stage, _WideStage)
    if schedule == "gpipe" and not is_wide:
        return ScheduleGPipe(stage, num, loss_fn=loss_fn, scale_grads=False)
    if schedule == "1f1b" and not is_wide:
        return Schedule1F1B(stage, num, loss_fn=loss_fn, scale_grads=False)
    runtime = _AnyOrderRuntime([stage], num, loss_fn=loss_fn, scale_grads=False)
    runtime.microbatches = stage_microbatches(order, stage.stage_index)
    if stage.device.type == "cpu":
        lowered = {rank: _add_transfers(rank, order) for rank in range(order.num_stages)}
        runtime._prepare_schedule_with_comms(lowered, format="compute_comms")
    else:
        plain = {
            rank: [_Action.from_str(str(action)) for action in actions] for rank, actions in enumerate(order.stages)
        }
        runtime._prepare_schedule_with_comms(plain)
    return runtime


def stage_microbatches(
    order: PipelineSchedule, stage_index: int, kind: ActionKind = ActionKind.FORWARD
) -> tuple[int, ...]:
    """Return the microbatches of a stage's forwards (or backwards), in their order."""
    return tuple(action.microbatch_index for action in order.stages[stage_index] if action.kind == kind)


def sort_by_microbatch(microbatches: Sequence[int], values: Sequence[_ValueT]) -> list[_ValueT]:
    """Sort values of microbatches into batch order."""
    by_index: Mapping[int, _ValueT] = dict(zip(microbatches, values, strict=True))
    return [by_index[index] for index in sorted(by_index)]


class _AnyOrderRuntime(_PipelineScheduleRuntime):
    """Torch's runtime, for a last stage with its microbatches in any order.

    Torch's own assigns the first computed loss and output to microbatch 0, and so on.
    """

    microbatches: tuple[int, ...]
    """Indices in the order of the stage's forwards."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._losses: dict[int, Tensor] = {}
        """Losses of microbatches whose backward has not run yet."""

    def _maybe_compute_loss(
        self, stage: Any, output: Any, target_mbs: Any, mb_index: int, loss_kwargs: dict[str, Any] | None = None
    ) -> None:
        if self._should_compute_loss(stage):
            self._losses[mb_index] = self._compute_loss(output, target_mbs[mb_index], loss_kwargs)

    def _maybe_get_loss(self, stage: Any, mb_index: int) -> Tensor | None:
        return self._losses.pop(mb_index) if self._should_compute_loss(stage) else None

    def _merge_outputs(self, output_chunks: list[Any]) -> Any:
        return super()._merge_outputs(sort_by_microbatch(self.microbatches, output_chunks))


def _add_transfers(stage: int, order: PipelineSchedule) -> list[_Action | None]:
    """Add all receives at the start, and each send right after its result is computed.

    Messages carry no microbatch index: the neighbour's first send matches this stage's first receive. So receives are
    in the order of the neighbour's sends, which need not be the order of use.
    """
    is_first, is_last = stage == 0, stage == order.num_stages - 1
    forwards = () if is_first else stage_microbatches(order, stage - 1)
    backwards = () if is_last else stage_microbatches(order, stage + 1, ActionKind.BACKWARD)
    receives = [PipelineAction(stage, ActionKind.RECEIVE_FORWARD, index) for index in forwards]
    receives += [PipelineAction(stage, ActionKind.RECEIVE_BACKWARD, index) for index in backwards]
    rest = []
    for action in order.stages[stage]:
        is_forward = action.kind == ActionKind.FORWARD
        rest.append(action)
        if not (is_last if is_forward else is_first):
            kind = ActionKind.SEND_FORWARD if is_forward else ActionKind.SEND_BACKWARD
            rest.append(PipelineAction(stage, kind, action.microbatch_index))
    texts = [*map(str, receives), *map(str, rest), f"{stage}REDUCE_GRAD"]
    return [_Action.from_str(text) for text in texts]


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlace:
    """Place of a rank's stage in its pipeline."""

    stage_index: int
    num_stages: int
    group: dist.ProcessGroup
    """Ranks of the replica; device i is rank i."""
    device_index: int
    """This rank in it."""
    devices: StageDevices | None = None
    """Devices of the stages; None: one each."""
    alone: dist.ProcessGroup | None = None
    """This rank alone; needed unless device i is stage i."""
    wire: str = EXACT
    """Format in which tensors pass from stage to stage."""


def make_stage(
    module: torch.nn.Module,
    place: StagePlace,
    device: torch.device,
    crossing: tuple[tuple[Tensor, ...], tuple[Tensor, ...]],
    stopwatch: Stopwatch,
) -> PipelineStage:
    """Make a stage with given shapes, so that torch infers nothing.

    Args:
        module: Module that the stage computes.
        place: The stage's place in the pipeline.
        device: Device of the stage.
        crossing: (input tensors, output tensors) of this rank's samples, on the meta device.
        stopwatch: Counts the stage's compute time.
    """
    arriving, leaving = crossing
    forms = {"input_args": arriving, "output_args": leaving}
    if place.alone is None or place.devices is None:
        stage = _CodedStage(module, place.stage_index, place.num_stages, device, **forms, group=place.group)
    else:
        stage = _WideStage(module, place.stage_index, place.num_stages, device, **forms, group=place.alone)
        stage.connect(place, place.devices)
    stage.stopwatch, stage.wire = stopwatch, place.wire
    return stage


class _CodedStage(PipelineStage):
    """Torch's stage with timed forwards and backwards, and encoded transfers; evaluation is not timed."""

    stopwatch: Stopwatch
    wire: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._arriving: dict[tuple[ActionKind, int], list[tuple[Tensor, Tensor]]] = {}
        """Messages whose transfers are posted, and what they are decoded into, by kind and microbatch."""

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        return self._time(super().forward_one_chunk, *args, is_forward=True, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        return self._time(super().backward_one_chunk, *args, is_forward=False, **kwargs)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        ops = self._pieces_before(super().get_fwd_recv_ops(fwd_chunk_id))
        return self._receive(ops, (ActionKind.FORWARD, fwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._encode(self._pieces_behind(super().get_fwd_send_ops(fwd_chunk_id)))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        ops = self._pieces_behind(super().get_bwd_recv_ops(bwd_chunk_id))
        return self._receive(ops, (ActionKind.BACKWARD, bwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._encode(self._pieces_before(super().get_bwd_send_ops(bwd_chunk_id)))

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> Any:
        self._decode((ActionKind.FORWARD, fwd_chunk_id))
        return super()._retrieve_recv_activations(fwd_chunk_id)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        self._decode((ActionKind.BACKWARD, bwd_chunk_id))
        return super()._retrieve_recv_grads(bwd_chunk_id)

    def _pieces_before(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        """Return the transfers with each device of the stage before."""
        return ops

    def _pieces_behind(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        """Return the transfers with each device of the next stage."""
        return ops

    def _time(self, compute: Callable[..., Any], *args: Any, is_forward: bool, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return compute(*args, **kwargs)
        return self.stopwatch.time(compute, *args, is_forward=is_forward, **kwargs)

    def _encode(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        if self.wire == EXACT:
            return ops
        made = self._time(lambda: [boundaries.encode(self.wire, op.tensor.detach()) for op in ops], is_forward=False)
        return [_with_message(op, message) for op, message in zip(ops, made, strict=True)]

    def _receive(self, ops: list[dist.P2POp], key: tuple[ActionKind, int]) -> list[dist.P2POp]:
        if self.wire == EXACT:
            return ops
        found, self._arriving[key] = [], []
        for op in ops:
            message = boundaries.empty_message(self.wire, op.tensor)
            if message is not None:
                self._arriving[key].append((message, op.tensor))
            found.append(op if message is None else _with_message(op, message))
        return found

    def _decode(self, key: tuple[ActionKind, int]) -> None:
        where = f"stage {self.stage_index}, {key[0].name.lower()} of microbatch {key[1]}"
        for message, values in self._arriving.pop(key, ()):
            boundaries.decode(self.wire, message, values, where=where)


def _with_message(op: dist.P2POp, message: Tensor) -> dist.P2POp:
    return dist.P2POp(op.op, message, group=op.group, group_peer=op.group_peer)


class _WideStage(_CodedStage):
    """A stage of one or more ranks, in any order: exchanges rows with each neighbour that has them.

    Torch's stage takes one rank for each stage, so it is made with a group of this rank alone, and then told its place.
    """

    def connect(self, place: StagePlace, devices: StageDevices) -> None:
        """Take the place in the pipeline; before torch's schedule is made."""
        self.group = place.group  # pyrefly: ignore - may be None in torch's class, never here
        self.group_rank, self.group_size = place.stage_index, place.num_stages
        samples = devices.ranges[place.device_index]
        self._first, self._num_samples = samples.start, len(samples)
        own = place.device_index
        self._before = [(each.src, each.first, each.num_samples) for each in devices.pieces if each.dst == own]
        self._behind = [(each.dst, each.first, each.num_samples) for each in devices.pieces if each.src == own]

    def _pieces_before(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        return list(self._by_piece(ops, self._before))

    def _pieces_behind(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        return list(self._by_piece(ops, self._behind))

    def _by_piece(self, ops: Sequence[dist.P2POp], pieces: Sequence[tuple[int, int, int]]) -> Iterator[dist.P2POp]:
        """Divide transfers of whole tensors into those of their rows, by neighbour."""
        for op in ops:
            rows = len(op.tensor) // self._num_samples
            for peer, first, count in pieces:
                begin = (first - self._first) * rows
                part = op.tensor.detach()[begin : begin + count * rows]
                yield dist.P2POp(op.op, part, group=self.group, group_peer=peer)

    def _resolve_peer_global_rank(self, stage_idx: int) -> int:
        """Name some rank, for transfers that are divided afterwards."""
        del stage_idx
        assert self.group is not None
        return dist.get_global_rank(self.group, 0)

    def _warmup_forward_vote(self, has_backward: bool, received_acc: Tensor | None = None) -> Tensor:
        """Vote for the given shapes without asking neighbours, which have them too."""
        del has_backward, received_acc
        return torch.ones(1, dtype=torch.int32)

    def _warmup_backward_result(self, received_result: Tensor | None = None) -> Tensor:
        del received_result
        return torch.ones(1, dtype=torch.int32)
