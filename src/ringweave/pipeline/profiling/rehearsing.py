"""What a step takes beside computing blocks and moving bytes: found by rehearsing the very order that is run.

Stages that only wait, for known times, run some steps on the pipeline's own ranks and groups. What its actions take
longer than their waits is torch's and ours; and as much as the simulator must add to each transfer to come to the
measured step is what starting one takes. Stages wait longer than transfers take: else what is rehearsed would be the
links, and all that a link does otherwise than in its model would be laid on the stages. Nothing of the model is
computed or changed.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ringweave.pipeline.layouts import Layout
from ringweave.pipeline.models.holding import HeldBlocks
from ringweave.pipeline.pipeline import Pipeline
from ringweave.pipeline.profiling.predicting import Links, transfers_of
from ringweave.pipeline.running import filling
from ringweave.pipeline.running.boundaries import Boundary
from ringweave.pipeline.running.runner import Runner
from ringweave.sim import pipelines
from ringweave.sim.pipelines import Overheads, StageTimes

_WAIT_S, _OVER_TRANSFER = 0.002, 1.5
"""Of a rehearsed forward, and of a backward: at least, and at least so many times what the slowest transfer takes."""
_Times = tuple[Callable[[], float], Callable[[float], object]]
"""A clock, and what waits by it."""
_MOST_MESSAGE_S = 0.02
_HALVINGS = 14
"""Of that, until what a message takes is known to some microseconds."""


def rehearse(
    pipeline: Pipeline,
    links: Links,
    *,
    target: Tensor | None = None,
    rounds: int = 5,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], object] = time.sleep,
) -> Overheads:
    """What the pipeline's steps take beside its blocks; the same on every rank. All ranks call it at the same time.

    On an accelerator nothing: there the host runs ahead of what is computed, and what it does beside is not seen.

    Args:
        pipeline: It stays as it is.
        links: As `measure_links` gave them.
        target: Of a batch, in the form that is trained with: the loss is counted too. None: it is not.
        rounds: Steps that are measured, after one that is not; their median counts.
        clock: In seconds.
        sleep: Waits that long.

    Cost: (rounds + 1) steps of 4 ms for each microbatch, more over slow links.
    """
    if pipeline.device.type != "cpu":
        return Overheads()
    transfers = _transfers(pipeline, links)
    with torch.random.fork_rng(devices=[]):
        stand_in = _Rehearsal(pipeline, target, _wait_s(transfers), (clock, sleep))
        laps = [stand_in.step() for _ in range(rounds + 1)][1:]
    own = torch.tensor(laps, dtype=torch.float64).median(0).values
    table = torch.zeros(pipeline.layout.num_stages, len(own), dtype=torch.float64)
    table[pipeline.stage] = own
    rows = pipeline.groups.greatest(table).tolist()
    waited, actions, steps, ends = zip(*rows, strict=True)
    found = Overheads(action_s=actions, step_s=max(ends))
    times = replace(transfers, forward_s=waited, backward_s=waited)
    return replace(found, message_s=_message_s(pipeline, times, found, max(steps)))


def _transfers(pipeline: Pipeline, links: Links) -> StageTimes:
    """Of the present cuts, with stages that take no time."""
    crossing = [pipeline.boundaries[cut] for cut in pipeline.layout.splits]
    nothing = (0.0,) * pipeline.layout.num_stages
    there = zip(links[0], crossing, strict=True)
    back = zip(links[1], crossing, strict=True)
    return StageTimes(
        forward_s=nothing,
        backward_s=nothing,
        forward_transfer_s=tuple(link.transfer_s(each.forward_bytes) for link, each in there),
        backward_transfer_s=tuple(link.transfer_s(each.backward_bytes) for link, each in back),
    )


def _wait_s(transfers: StageTimes) -> float:
    """So long that no link holds a stage up."""
    slowest_s = max((*transfers.forward_transfer_s, *transfers.backward_transfer_s), default=0.0)
    return max(_WAIT_S, _OVER_TRANSFER * slowest_s)


def _message_s(pipeline: Pipeline, times: StageTimes, found: Overheads, measured_s: float) -> float:
    """With what the simulated rehearsal is as long as the measured one."""
    transfers = transfers_of(pipeline.settings.schedule)
    low_s, high_s = 0.0, _MOST_MESSAGE_S
    for _ in range(_HALVINGS):
        middle_s = (low_s + high_s) / 2
        trial = times.beside(replace(found, message_s=middle_s, step_s=0.0))
        is_short = pipelines.simulate(pipeline.order, trial, transfers).step_s < measured_s
        low_s, high_s = (middle_s, high_s) if is_short else (low_s, middle_s)
    return low_s


class _Rehearsal:
    """The pipeline's order on stages of one block each, which waits."""

    def __init__(self, pipeline: Pipeline, target: Tensor | None, wait_s: float, times: _Times) -> None:
        clock = times[0]
        self._pipeline, self._clock = pipeline, clock
        whole, num = pipeline.layout, pipeline.settings.num_microbatches
        layout = Layout(
            num_blocks=whole.num_stages, splits=tuple(range(1, whole.num_stages)), num_replicas=whole.num_replicas
        )
        crossing = tuple(pipeline.boundaries[edge] for edge in (0, *whole.splits, whole.num_blocks))
        loss_fn = _sum if target is None else self._timed(pipeline.loss_fn)
        self._runner = Runner(layout, pipeline.settings, loss_fn, pipeline.groups, pipeline.device)
        self._runner.stopwatch.clock, self._runner.stopwatch.is_on = clock, True
        stages = [_Waiting(each, wait_s, times) for each in crossing[1:]]
        self._own = stages[pipeline.stage]
        self._runner.place(layout, HeldBlocks(stages, [pipeline.stage], pipeline.device), crossing)
        self._inputs = tuple(_batch(value, num) for value in crossing[0].empty())
        self._side = {name: _batch(value, num) for name, value in pipeline.side_forms.items()}
        self._target = torch.zeros(num) if target is None else target

    def step(self) -> tuple[float, float, float, float]:
        """Seconds on this rank: of a wait, an action beside it, all actions and transfers, and what ends a step."""
        groups, num_actions = self._pipeline.groups, 2 * self._pipeline.settings.num_microbatches
        groups.wait_for_all()
        self._own.waited_s = 0.0
        begun_s = self._clock()
        self._runner.train(0, self._inputs, self._target, 1.0, self._side)
        middle_s = self._clock()
        groups.wait_for_all()
        ending_s = self._clock()
        groups.total(torch.zeros(len(self._target), dtype=torch.float64))
        ended_s = self._clock()
        waited_s = self._own.waited_s / num_actions
        beside_s = max(0.0, self._runner.stopwatch.lap().compute_s / num_actions - waited_s)
        return waited_s, beside_s, middle_s - begun_s, ended_s - ending_s

    def _timed(self, loss_fn: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda output, target: self._runner.stopwatch.time(loss_fn, output, target, is_forward=False)


class _Waiting(nn.Module):
    """Waits, and gives what the next stage expects."""

    def __init__(self, leaving: Boundary, wait_s: float, times: _Times) -> None:
        super().__init__()
        self.waited_s = 0.0
        """So far."""
        self.trained = nn.Parameter(torch.zeros(()))
        """Without it the first stage would have nothing to go back to."""
        self._leaving = [filling.like(form, torch.device("cpu")) for form in leaving.empty()]
        self._wait_s, (self._clock, self._sleep) = wait_s, times

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Whatever comes in: something in the form of what leaves."""
        self.wait()
        return _Passing.apply(self, self._leaving, self.trained, *values)

    def wait(self) -> None:
        """One action's time."""
        begun_s = self._clock()
        self._sleep(self._wait_s)
        self.waited_s += self._clock() - begun_s


class _Passing(torch.autograd.Function):
    """Whatever comes in, given tensors go out; backward waits, and gradients of zero go back."""

    @staticmethod
    def forward(ctx: Any, stage: _Waiting, leaving: list[Tensor], *values: Tensor) -> tuple[Tensor, ...]:
        ctx.stage = stage
        ctx.save_for_backward(*values)
        given = tuple(value.detach() for value in leaving)
        ctx.mark_non_differentiable(*(new for new, old in zip(given, leaving, strict=True) if not old.requires_grad))
        return given

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.stage.wait()
        return None, None, *(torch.zeros_like(value) if value.requires_grad else None for value in ctx.saved_tensors)


def _batch(form: Tensor, num_microbatches: int) -> Tensor:
    """So many microbatches of this form, with values."""
    whole = torch.empty((len(form) * num_microbatches, *form.shape[1:]), dtype=form.dtype, device="meta")
    return filling.like(whole, torch.device("cpu"))


def _sum(output: Tensor | tuple[Tensor, ...], _: Tensor) -> Tensor:
    """Something to go back from."""
    first = output if isinstance(output, Tensor) else next(value for value in output if value.requires_grad)
    return first.sum()
