"""What the stages of an order do, in one row: each instruction stands behind those that it waits for.

A transfer starts when both its ends have begun it and the link's direction is free, and takes the link's time. Which
instruction can be followed when does not depend on times. So the row is made once, for any times of stages and links;
they are then the longest ways through what depends on what, and no queue of events is needed.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ringweave.errors import ScheduleError, explain
from ringweave.sim.pipelines.actions import Action, Kind
from ringweave.sim.pipelines.orders import Order
from ringweave.sim.pipelines.programs import Instruction, programs
from ringweave.sim.pipelines.times import StageTimes

_SENDS = {Kind.SEND_FORWARD: 0, Kind.SEND_BACKWARD: 1}
_RECEIVES = {Kind.RECEIVE_FORWARD: 0, Kind.RECEIVE_BACKWARD: 1}
_COMPUTE, _FIRST, _SECOND, _WAIT = range(4)
_Transfer = tuple[int, int, int]
_Op = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class ComputeSpan:
    """An action and when it was computed, in simulated seconds."""

    action: Action
    begin_s: float
    end_s: float


class Course:
    """An order's row of instructions.

    Raises:
        ScheduleError: The stages wait for each other for ever.
        UsageError: An unknown way of transferring.
    """

    def __init__(self, order: Order, transfers: str = "asynchronous") -> None:
        """`transfers` is one of `programs.TRANSFERS`."""
        self.num_stages = order.num_stages
        self._actions: list[Action] = []
        self._numbers: dict[_Transfer, int] = {}
        self._ops = list(self._row(programs(order, transfers)))

    def step_s(self, times: StageTimes) -> float:
        """Until the last stage has done everything.

        Raises:
            ScheduleError: Times for another number of stages.

        Cost: O(stages x microbatches), a microsecond for some instructions.
        """
        return max(self._run(times)[0]) + times.after_s

    def followed(self, times: StageTimes) -> tuple[float, list[ComputeSpan]]:
        """The same, and when each action is computed; errors as those of `step_s`."""
        now_s, begun_s = self._run(times)
        durations = {Kind.FORWARD: times.forward_s, Kind.BACKWARD: times.backward_s}
        pairs = zip(self._actions, begun_s, strict=True)
        spans = [ComputeSpan(each, at_s, at_s + durations[each.kind][each.stage_index]) for each, at_s in pairs]
        return max(now_s) + times.after_s, spans

    def _run(self, times: StageTimes) -> tuple[list[float], list[float]]:
        """(end of each stage, begin of each action)."""
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

    def _row(self, stages: list[list[Instruction]]) -> Iterator[_Op]:
        """Let every stage go on as far as it can until all are done.

        Raises:
            ScheduleError: None can go on.
        """
        at = [0] * len(stages)
        ends: dict[_Transfer, int] = {}
        while any(done < len(program) for done, program in zip(at, stages, strict=True)):
            before = list(at)
            for stage, program in enumerate(stages):
                while at[stage] < len(program) and _is_free(program[at[stage]], ends):
                    yield from self._ops_of(stage, program[at[stage]], ends)
                    at[stage] += 1
            if before == at:
                raise ScheduleError(_stuck(stages, at))

    def _ops_of(self, stage: int, instruction: Instruction, ends: dict[_Transfer, int]) -> Iterator[_Op]:
        for action in instruction.actions:
            if instruction.what == "compute":
                self._actions.append(action)
                yield _COMPUTE, stage, int(action.kind == Kind.BACKWARD), 0
                continue
            key = _transfer(action)
            number = self._numbers.setdefault(key, len(self._numbers))
            if instruction.what == "wait":
                yield _WAIT, stage, number, 0
            else:
                ends[key] = ends.get(key, 0) + 1
                yield _FIRST if ends[key] == 1 else _SECOND, stage, number, 2 * key[0] + key[1]


def _is_free(instruction: Instruction, ends: dict[_Transfer, int]) -> bool:
    """It waits for nothing whose ends have not both begun."""
    return instruction.what != "wait" or all(ends.get(_transfer(action), 0) > 1 for action in instruction.actions)


def _stuck(stages: list[list[Instruction]], at: list[int]) -> str:
    waiting = [
        f"stage {stage} waits for {', '.join(map(str, program[done].actions))}"
        for stage, (program, done) in enumerate(zip(stages, at, strict=True))
        if done < len(program)
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
