"""A step of a pipeline on virtual time.

Stages follow their programs. A transfer starts when both its ends have begun it and the link's direction is free, and
takes the link's time. That order is fixed by the programs, so no queue of events is needed: each stage goes on as far
as it can, and times are the longest ways through what depends on what.
"""

from dataclasses import dataclass

from ringweave.errors import ScheduleError, explain
from ringweave.sim.pipelines.actions import Action, Kind
from ringweave.sim.pipelines.orders import Order
from ringweave.sim.pipelines.programs import Instruction, programs
from ringweave.sim.pipelines.times import StageTimes

_SENDS = {Kind.SEND_FORWARD: 0, Kind.SEND_BACKWARD: 1}
_RECEIVES = {Kind.RECEIVE_FORWARD: 0, Kind.RECEIVE_BACKWARD: 1}
_Transfer = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class ComputeSpan:
    """An action and when it was computed, in simulated seconds."""

    action: Action
    begin_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSimulation:
    """A simulated step."""

    step_s: float
    """Until the last stage has done everything."""
    bound_s: float
    """A time that no order beats for these stages and links."""
    busy_s: tuple[float, ...]
    """Of each stage: computing."""
    peak_in_flight: tuple[int, ...]
    """Of each stage: the most microbatches whose activations it holds."""
    spans: tuple[ComputeSpan, ...]
    """By stage, then by time."""

    @property
    def bubble_fraction(self) -> float:
        """The part of all stages' time in which they do not compute."""
        whole = self.step_s * len(self.busy_s)
        return 1 - sum(self.busy_s) / whole if whole else 0.0


def simulate(order: Order, times: StageTimes, transfers: str = "asynchronous") -> PipelineSimulation:
    """What a step of an order takes.

    Args:
        order: What each stage computes.
        times: Of its stages and links.
        transfers: One of `programs.TRANSFERS`.

    Raises:
        ScheduleError: The stages wait for each other for ever, or their number is not that of the times.
        UsageError: An unknown way of transferring.

    Cost: O(stages x microbatches).
    """
    if order.num_stages != times.num_stages:
        expected, do = f"{order.num_stages}, as in the order", "Give times for these stages"
        raise ScheduleError(explain("number of stages in times", got=times.num_stages, expected=expected, do=do))
    run = _Run(times, programs(order, transfers))
    run.finish()
    return PipelineSimulation(
        step_s=max(run.now_s) + times.after_s,
        bound_s=times.bound_s(order.num_microbatches),
        busy_s=tuple(order.num_microbatches * (f + b) for f, b in zip(times.forward_s, times.backward_s, strict=True)),
        peak_in_flight=order.peak_in_flight,
        spans=tuple(sorted(run.spans, key=lambda span: (span.action.stage_index, span.begin_s))),
    )


class _Run:
    """Programs while they are followed."""

    def __init__(self, times: StageTimes, stages: list[list[Instruction]]) -> None:
        self.now_s = list(times.before_s or (0.0,) * len(stages))
        self.spans: list[ComputeSpan] = []
        self._times = times
        self._stages = stages
        self._at = [0] * len(stages)
        self._begun: dict[_Transfer, float] = {}
        self._ended: dict[_Transfer, float] = {}
        self._free_s: dict[tuple[int, int], float] = {}

    def finish(self) -> None:
        """Let every stage go on as far as it can until all are done.

        Raises:
            ScheduleError: None can go on.
        """
        while any(at < len(program) for at, program in zip(self._at, self._stages, strict=True)):
            before = list(self._at)
            for stage in range(len(self._stages)):
                while self._at[stage] < len(self._stages[stage]) and self._follow(stage):
                    self._at[stage] += 1
            if before == self._at:
                raise ScheduleError(self._stuck())

    def _follow(self, stage: int) -> bool:
        """Do a stage's next instruction; False if it has to wait for what is not known yet."""
        instruction = self._stages[stage][self._at[stage]]
        if instruction.what == "compute":
            self._compute(stage, instruction.actions[0])
        elif instruction.what == "begin":
            for action in instruction.actions:
                self._begin(stage, action)
        else:
            ends = [self._ended.get(_transfer(action)) for action in instruction.actions]
            known = [end for end in ends if end is not None]
            if len(known) < len(ends):
                return False
            self.now_s[stage] = max([self.now_s[stage], *known])
        return True

    def _compute(self, stage: int, action: Action) -> None:
        took = self._times.forward_s if action.kind == Kind.FORWARD else self._times.backward_s
        begin_s = self.now_s[stage]
        self.now_s[stage] = begin_s + took[stage]
        self.spans.append(ComputeSpan(action, begin_s, self.now_s[stage]))

    def _begin(self, stage: int, action: Action) -> None:
        """The second of a transfer's two ends lets it start."""
        self.now_s[stage] += self._times.message_s
        key = _transfer(action)
        if key not in self._begun:
            self._begun[key] = self.now_s[stage]
            return
        link, direction, _ = key
        start_s = max(self._begun[key], self.now_s[stage], self._free_s.get((link, direction), 0.0))
        end_s = start_s + self._times.transfer_s(link)[direction]
        self._ended[key] = self._free_s[link, direction] = end_s

    def _stuck(self) -> str:
        waiting = [
            f"stage {stage} waits for {', '.join(map(str, self._stages[stage][at].actions))}"
            for stage, at in enumerate(self._at)
            if at < len(self._stages[stage])
        ]
        do = "Begin transfers in the same order at both of their ends"
        return explain("pipeline", got="; ".join(waiting), expected="a stage that can go on", do=do)


def _transfer(action: Action) -> _Transfer:
    """Link, direction and microbatch: the same for the send and its receive."""
    if action.kind in _SENDS:
        direction = _SENDS[action.kind]
        return action.stage_index - direction, direction, action.microbatch_index
    direction = _RECEIVES[action.kind]
    return action.stage_index - 1 + direction, direction, action.microbatch_index
