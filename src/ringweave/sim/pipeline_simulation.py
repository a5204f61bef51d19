"""Simulation of one pipeline step: time of the step, idle time of the stages, activations held.

A transfer starts when both its ends have begun it and the link's direction is free, and takes the link's time. The
order in which instructions can run does not depend on times. So it is computed once, for any times of stages and links;
the end times are then the longest paths through the dependencies, and no event queue is needed.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import add

from ringweave.errors import ScheduleError, UsageError, explain
from ringweave.sim.pipeline_schedules import (
    ActionKind,
    PipelineAction,
    PipelineSchedule,
    StageInstruction,
    stage_programs,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Overheads:
    """Seconds of a step for the host's work, beyond computing blocks and moving bytes."""

    action_s: tuple[float, ...] = ()
    """For each stage: added to a forward or a backward; empty: none."""
    message_s: float = 0.0
    """For each transfer that a stage begins."""
    step_s: float = 0.0
    """For a step, after all stages are done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """Seconds for one microbatch. Links are full duplex; in one direction a transfer waits for the one before it.

    Raises:
        UsageError: Lengths that do not fit each other, or a time below zero.
    """

    forward_s: tuple[float, ...]
    """For each stage."""
    backward_s: tuple[float, ...]
    """For each stage."""
    forward_transfer_s: tuple[float, ...] = ()
    """Activations, from each stage except the last to the next one; empty: no time."""
    backward_transfer_s: tuple[float, ...] = ()
    """Gradients, to each stage except the last from the next one; empty: no time."""
    before_s: tuple[float, ...] = ()
    """For each stage, before its first action: the optimizer step of the train step before; empty: none."""
    message_s: float = 0.0
    """Time of a stage for each transfer that it begins, sending or receiving."""
    after_s: float = 0.0
    """After all stages are done: until all know the loss."""

    def __post_init__(self) -> None:
        num_links = len(self.forward_s) - 1
        _check_times("backward_s", self.backward_s, len(self.forward_s))
        _check_times("forward_s", self.forward_s, max(1, len(self.forward_s)))
        if self.before_s:
            _check_times("before_s", self.before_s, self.num_stages)
        _check_times("message_s and after_s", (self.message_s, self.after_s), 2)
        for what in ("forward_transfer_s", "backward_transfer_s"):
            if getattr(self, what):
                _check_times(what, getattr(self, what), num_links)

    @property
    def num_stages(self) -> int:
        """Number of stages, S."""
        return len(self.forward_s)

    @property
    def slowest_s(self) -> float:
        """Forward and backward time of the slowest stage."""
        return max(map(add, self.forward_s, self.backward_s))

    def with_overheads(self, overheads: Overheads) -> "StageTimes":
        """Return the times with the overheads of the host added.

        Raises:
            UsageError: Overheads for another number of stages.
        """
        actions = overheads.action_s or (0.0,) * self.num_stages
        _check_times("action_s", actions, self.num_stages)
        return replace(
            self,
            forward_s=tuple(map(add, self.forward_s, actions)),
            backward_s=tuple(map(add, self.backward_s, actions)),
            message_s=self.message_s + overheads.message_s,
            after_s=self.after_s + overheads.step_s,
        )

    def transfer_s(self, link: int) -> tuple[float, float]:
        """Return forward and backward transfer time between stages `link` and `link + 1`."""
        forward, backward = self.forward_transfer_s, self.backward_transfer_s
        return forward[link] if forward else 0.0, backward[link] if backward else 0.0

    def bound_s(self, num_microbatches: int) -> float:
        """Return a lower bound for any schedule: the first microbatch arrives, all are computed, the last one returns.

        It is the maximum over the stages, and in the same way over the directions of the links.
        """
        links = [self.transfer_s(link) for link in range(self.num_stages - 1)]
        there = [0.0, *itertools.accumulate(f + x[0] for f, x in zip(self.forward_s[:-1], links, strict=True))]
        back = [0.0, *itertools.accumulate(b + x[1] for b, x in zip(self.backward_s[:-1], links, strict=True))]
        own = [f + b for f, b in zip(self.forward_s, self.backward_s, strict=True)]
        stages = [there[i] + num_microbatches * own[i] + back[i] for i in range(self.num_stages)]
        more = num_microbatches - 1
        whole = there[-1] + own[-1] + back[-1]
        return max([*stages, *(whole + more * max(pair) for pair in links)])


def _check_times(what: str, values: tuple[float, ...], count: int) -> None:
    if len(values) != count:
        do = "Give one for each stage, or for each link between two"
        raise UsageError(explain(f"{what}: how many", got=len(values), expected=str(count), do=do))
    for index, value in enumerate(values):
        if not 0 <= value < float("inf"):
            raise UsageError(
                explain(f"{what}[{index}]", got=value, expected="a finite time, 0 or more", do="Correct it")
            )


_SENDS = {ActionKind.SEND_FORWARD: 0, ActionKind.SEND_BACKWARD: 1}
_RECEIVES = {ActionKind.RECEIVE_FORWARD: 0, ActionKind.RECEIVE_BACKWARD: 1}
_COMPUTE, _FIRST, _SECOND, _WAIT = range(4)
_TransferKey = tuple[int, int, int]
_Op = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class ComputeSpan:
    """An action and its time span, in simulated seconds."""

    action: PipelineAction
    begin_s: float
    end_s: float


class PipelineTimeline:
    """The instructions of a pipeline schedule in one sequence that respects all dependencies.

    Raises:
        ScheduleError: The stages deadlock.
        UsageError: Unknown transfer mode.
    """

    def __init__(self, order: PipelineSchedule, transfers: str = "asynchronous") -> None:
        self.num_stages = order.num_stages
        self._actions: list[PipelineAction] = []
        self._numbers: dict[_TransferKey, int] = {}
        self._ops = list(self._linearize(stage_programs(order, transfers)))

    def step_s(self, times: StageTimes) -> float:
        """Return the time until the last stage is done.

        Raises:
            ScheduleError: Times for another number of stages.

        Cost: O(stages x microbatches), a microsecond for some instructions.
        """
        return max(self._run(times)[0]) + times.after_s

    def step_and_spans(self, times: StageTimes) -> tuple[float, list[ComputeSpan]]:
        """Return the same, and the time span of each action; it raises the same errors as `step_s`."""
        now_s, begun_s = self._run(times)
        durations = {ActionKind.FORWARD: times.forward_s, ActionKind.BACKWARD: times.backward_s}
        pairs = zip(self._actions, begun_s, strict=True)
        spans = [ComputeSpan(each, at_s, at_s + durations[each.kind][each.stage_index]) for each, at_s in pairs]
        return max(now_s) + times.after_s, spans

    def _run(self, times: StageTimes) -> tuple[list[float], list[float]]:
        """Return (end of each stage, begin of each action)."""
        if self.num_stages != times.num_stages:
            expected, do = f"{self.num_stages}, as in the order", "Give times for these stages"
            raise ScheduleError(explain("number of stages in times", got=times.num_stages, expected=expected, do=do))
        now_s = list(times.before_s or (0.0,) * self.num_stages)
        durations, message_s = (times.forward_s, times.backward_s), times.message_s
        crossing = [times.transfer_s(link) for link in range(self.num_stages - 1)]
        known_s, free_s = [0.0] * len(self._numbers), [[0.0, 0.0] for _ in crossing]
        begun_s: list[float] = []
        for what, stage, number, link in self._ops:
            if what == _COMPUTE:
                begun_s.append(now_s[stage])
                now_s[stage] += durations[number][stage]
            elif what == _WAIT:
                now_s[stage] = max(now_s[stage], known_s[number])
            else:
                now_s[stage] += message_s
                if what == _FIRST:
                    known_s[number] = now_s[stage]
                    continue
                place, direction = divmod(link, 2)
                start_s = max(known_s[number], now_s[stage], free_s[place][direction])
                known_s[number] = free_s[place][direction] = start_s + crossing[place][direction]
        return now_s, begun_s

    def _linearize(self, stages: list[list[StageInstruction]]) -> Iterator[_Op]:
        """Yield operations by running every stage as far as it can, until all are done.

        Raises:
            ScheduleError: No stage can go on.
        """
        at = [0] * len(stages)
        ends: dict[_TransferKey, int] = {}
        while any(done < len(program) for done, program in zip(at, stages, strict=True)):
            before = list(at)
            for stage, program in enumerate(stages):
                while at[stage] < len(program) and _can_run(program[at[stage]], ends):
                    yield from self._ops_of_instruction(stage, program[at[stage]], ends)
                    at[stage] += 1
            if before == at:
                raise ScheduleError(_deadlock_text(stages, at))

    def _ops_of_instruction(
        self, stage: int, instruction: StageInstruction, ends: dict[_TransferKey, int]
    ) -> Iterator[_Op]:
        for action in instruction.actions:
            if instruction.what == "compute":
                self._actions.append(action)
                yield _COMPUTE, stage, int(action.kind == ActionKind.BACKWARD), 0
                continue
            key = _transfer_key(action)
            number = self._numbers.setdefault(key, len(self._numbers))
            if instruction.what == "wait":
                yield _WAIT, stage, number, 0
            else:
                ends[key] = ends.get(key, 0) + 1
                yield _FIRST if ends[key] == 1 else _SECOND, stage, number, 2 * key[0] + key[1]


def _can_run(instruction: StageInstruction, ends: dict[_TransferKey, int]) -> bool:
    """Return whether both ends of each awaited transfer have begun."""
    return instruction.what != "wait" or all(ends.get(_transfer_key(action), 0) > 1 for action in instruction.actions)


def _deadlock_text(stages: list[list[StageInstruction]], at: list[int]) -> str:
    waiting = [
        f"stage {stage} waits for {', '.join(map(str, program[done].actions))}"
        for stage, (program, done) in enumerate(zip(stages, at, strict=True))
        if done < len(program)
    ]
    do = "Begin transfers in the same order at both of their ends"
    return explain("pipeline", got="; ".join(waiting), expected="a stage that can go on", do=do)


def _transfer_key(action: PipelineAction) -> _TransferKey:
    """Return link, direction and microbatch: equal for the send and its receive."""
    if action.kind in _SENDS:
        direction = _SENDS[action.kind]
        return action.stage_index - direction, direction, action.microbatch_index
    direction = _RECEIVES[action.kind]
    return action.stage_index - 1 + direction, direction, action.microbatch_index


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSimulation:
    """Result of a simulated pipeline step."""

    step_s: float
    """Time until the last stage is done."""
    bound_s: float
    """Lower bound on the time of any schedule for these stages and links."""
    busy_s: tuple[float, ...]
    """Compute time of each stage."""
    peak_in_flight: tuple[int, ...]
    """Largest number of microbatches whose activations each stage holds."""
    spans: tuple[ComputeSpan, ...]
    """By stage, then by time."""

    @property
    def bubble_fraction(self) -> float:
        """Fraction of all stages' time in which they do not compute."""
        whole = self.step_s * len(self.busy_s)
        return 1 - sum(self.busy_s) / whole if whole else 0.0


def simulate_pipeline(
    schedule: PipelineSchedule, times: StageTimes, transfers: str = "asynchronous"
) -> PipelineSimulation:
    """Simulate one step of a pipeline schedule.

    Args:
        schedule: Actions of each stage.
        times: Times of its stages and links.
        transfers: One of `TRANSFER_MODES`.

    Raises:
        ScheduleError: The stages deadlock, or their number is not that of the times.
        UsageError: Unknown transfer mode.

    Cost: O(stages x microbatches).
    """
    step_s, spans = PipelineTimeline(schedule, transfers).step_and_spans(times)
    return PipelineSimulation(
        step_s=step_s,
        bound_s=times.bound_s(schedule.num_microbatches),
        busy_s=tuple(
            schedule.num_microbatches * (f + b) for f, b in zip(times.forward_s, times.backward_s, strict=True)
        ),
        peak_in_flight=schedule.peak_in_flight,
        spans=tuple(sorted(spans, key=lambda span: (span.action.stage_index, span.begin_s))),
    )
