"""Torch's own schedules for a stage. Orders that torch has no class for run in its runtime for orders as data.

`gpipe` and `1f1b` are `ScheduleGPipe` and `Schedule1F1B`. Everything else goes to `_PipelineScheduleRuntime`, with our
transfers. Over Gloo all receives of a step are posted at its start: each has a buffer of its own and takes no
computing, so a transfer begins when its data is there. NCCL keeps the order of what is posted, and a receive occupies
the device until it is done; there torch's own lowering puts each receive near its use.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import _Action, _PipelineSchedule, _PipelineScheduleRuntime

from ringweave.errors import UsageError, explain
from ringweave.pipeline.running.stopwatch import Stopwatch, WatchedStage
from ringweave.sim import pipelines
from ringweave.sim.pipelines import Action, Kind, Order

LossFunction = Callable[[Tensor, Tensor], Tensor]
_Value = TypeVar("_Value")


def order_of(schedule: str | Order, num_stages: int, num_microbatches: int) -> Order:
    """What each stage computes, one after the other.

    Raises:
        UsageError: An unknown name; fewer microbatches than stages for `1f1b`; an order for another number of stages.
        ScheduleError: An order whose stages wait for each other for ever.
    """
    if isinstance(schedule, Order):
        if schedule.num_stages != num_stages:
            do = "Generate it for this number, or start as many workers"
            got, expected = schedule.num_stages, f"{num_stages}, as the pipeline has"
            raise UsageError(explain("stages of the order", got=got, expected=expected, do=do))
        pipelines.Course(schedule)
        return schedule
    if schedule == "1f1b" and num_microbatches < num_stages:
        expected = f"at least {num_stages}, the number of stages, for 1f1b"
        do = "Cut the batch finer, or take gpipe or 1f1b-overlap"
        raise UsageError(explain("microbatches", got=num_microbatches, expected=expected, do=do))
    return pipelines.generate(schedule, num_stages, num_microbatches)


def build(schedule: str | Order, order: Order, stage: PipelineStage, loss_fn: LossFunction) -> _PipelineSchedule:
    """Torch's schedule that runs an order on a stage.

    It never divides gradients: torch would divide all there are, those of earlier batches too.

    Args:
        schedule: The name, or the order itself.
        order: What `order_of` made of it.
        stage: This rank's, of the order's number of stages.
        loss_fn: Of the output and target of one microbatch; what backward begins with.
    """
    num = order.num_microbatches
    if schedule == "gpipe":
        return ScheduleGPipe(stage, num, loss_fn=loss_fn, scale_grads=False)
    if schedule == "1f1b":
        return Schedule1F1B(stage, num, loss_fn=loss_fn, scale_grads=False)
    runtime = _Runtime([stage], num, loss_fn=loss_fn, scale_grads=False)
    runtime.microbatches = microbatches_of(order, stage.stage_index)
    if stage.device.type == "cpu":
        lowered = {rank: _with_transfers(rank, order) for rank in range(order.num_stages)}
        runtime._prepare_schedule_with_comms(lowered, format="compute_comms")
    else:
        plain = {
            rank: [_Action.from_str(str(action)) for action in actions] for rank, actions in enumerate(order.stages)
        }
        runtime._prepare_schedule_with_comms(plain)
    return runtime


def microbatches_of(order: Order, stage_index: int, kind: Kind = Kind.FORWARD) -> tuple[int, ...]:
    """The microbatches of a stage's forwards (or backwards), in their order."""
    return tuple(action.microbatch_index for action in order.stages[stage_index] if action.kind == kind)


def in_batch_order(microbatches: Sequence[int], values: Sequence[_Value]) -> list[_Value]:
    """Values of microbatches as the batch has them.

    Args:
        microbatches: In the order in which the values came.
        values: One for each.
    """
    by_index: Mapping[int, _Value] = dict(zip(microbatches, values, strict=True))
    return [by_index[index] for index in sorted(by_index)]


class _Runtime(_PipelineScheduleRuntime):
    """Torch's runtime, for a last stage with its microbatches in any order.

    Torch's own takes the first loss and output that is computed for that of microbatch 0, and so on.
    """

    microbatches: tuple[int, ...]
    """In the order of the stage's forwards."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._losses: dict[int, Tensor] = {}
        """Of the microbatches whose backward is still to come."""

    def _maybe_compute_loss(
        self, stage: Any, output: Any, target_mbs: Any, mb_index: int, loss_kwargs: dict[str, Any] | None = None
    ) -> None:
        if self._should_compute_loss(stage):
            self._losses[mb_index] = self._compute_loss(output, target_mbs[mb_index], loss_kwargs)

    def _maybe_get_loss(self, stage: Any, mb_index: int) -> Tensor | None:
        return self._losses.pop(mb_index) if self._should_compute_loss(stage) else None

    def _merge_outputs(self, output_chunks: list[Any]) -> Any:
        return super()._merge_outputs(in_batch_order(self.microbatches, output_chunks))


def _with_transfers(stage: int, order: Order) -> list[_Action | None]:
    """All receives at the start; each result is sent as soon as it is there.

    Nothing on its way says of which microbatch it is: what a neighbour sends first is what the first receive gets. So
    receives come in the order in which that neighbour sends, which need not be that of their use.
    """
    is_first, is_last = stage == 0, stage == order.num_stages - 1
    forwards = () if is_first else microbatches_of(order, stage - 1)
    backwards = () if is_last else microbatches_of(order, stage + 1, Kind.BACKWARD)
    receives = [Action(stage, Kind.RECEIVE_FORWARD, index) for index in forwards]
    receives += [Action(stage, Kind.RECEIVE_BACKWARD, index) for index in backwards]
    rest = []
    for action in order.stages[stage]:
        is_forward = action.kind == Kind.FORWARD
        rest.append(action)
        if not (is_last if is_forward else is_first):
            kind = Kind.SEND_FORWARD if is_forward else Kind.SEND_BACKWARD
            rest.append(Action(stage, kind, action.microbatch_index))
    texts = [*map(str, receives), *map(str, rest), f"{stage}REDUCE_GRAD"]
    return [_Action.from_str(text) for text in texts]


def make_stage(
    module: torch.nn.Module,
    place: tuple[int, int],
    device: torch.device,
    crossing: tuple[tuple[Tensor, ...], tuple[Tensor, ...]],
    group: torch.distributed.ProcessGroup,
    stopwatch: Stopwatch,
) -> PipelineStage:
    """A stage whose shapes are given, so that torch infers nothing.

    Args:
        module: What it computes.
        place: Its index, and the number of stages.
        device: Where it computes.
        crossing: What arrives and what leaves, on the meta device.
        group: Of the replica's ranks, stage i at rank i.
        stopwatch: Told what it computes.
    """
    index, num_stages = place
    arriving, leaving = crossing
    stage = WatchedStage(module, index, num_stages, device, input_args=arriving, output_args=leaving, group=group)
    stage.stopwatch = stopwatch
    return stage
