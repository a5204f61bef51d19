"""Pipeline schedules as torch.distributed.pipelining prints them (GPipe, 1F1B), and the programs of their stages.

The text of an action (`2F0`, `3SEND_F1`) is what torch's `_Action.from_str` parses and prints, so the simulated
schedule is the one that runs. Action kinds that our schedules never contain (split backwards, sharding) are not known
here.

| name | forwards before the first backward of stage i of S | microbatches held |
|---|---|---|
| `gpipe` | all | all |
| `1f1b` | S - i, as torch's Schedule1F1B | S - i |
| `1f1b-overlap` | 1 + 2 (S - 1 - i) | up to twice as many |

With S - i a stage has one microbatch on its way to every later stage. No stage computes it during the transfer, so
transfers show. With 1 + 2 (S - 1 - i) each transfer has a microbatch of its own.

Transfers run in one of two modes:

- *blocking*: as torch 2.13 runs `ScheduleGPipe` and `Schedule1F1B`. In their steady state a send goes out together with
  the next receive, and both are waited for before the stage goes on.
- *asynchronous*: a result is sent as soon as it is there, receives are posted from the start, and a stage waits only
  for what it needs next. `_PipelineScheduleRuntime` comes near to this on devices whose transfers take no computing.

Source: torch/distributed/pipelining/schedules.py, `_step_microbatches` of both classes.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from ringweave.errors import ScheduleError, UsageError
from ringweave.files.problems import suggest_closest

_ACTION_TEXT = re.compile(r"(\d{1,9})(SEND_F|RECV_F|SEND_B|RECV_B|F|B)(\d{1,9})")


class ActionKind(StrEnum):
    """Kind of a pipeline action."""

    FORWARD = "F"
    BACKWARD = "B"
    SEND_FORWARD = "SEND_F"
    RECEIVE_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECEIVE_BACKWARD = "RECV_B"


@dataclass(frozen=True, slots=True, order=True)
class PipelineAction:
    """One action of a stage on a microbatch. Prints as torch prints it, and parses back."""

    stage_index: int
    kind: ActionKind
    microbatch_index: int

    def __str__(self) -> str:
        return f"{self.stage_index}{self.kind.value}{self.microbatch_index}"


def parse_action(text: str) -> PipelineAction:
    """Parse an action such as `2F0`.

    Raises:
        ScheduleError: It is none, or of a kind that is not known here.
    """
    match = _ACTION_TEXT.fullmatch(text.strip())
    if match is None:
        expected = "a stage, one of F, B, SEND_F, RECV_F, SEND_B, RECV_B, and a microbatch"
        raise ScheduleError("action of a pipeline", got=text, expected=expected, do="Write it like 2F0")
    stage, kind, microbatch = match.groups()
    return PipelineAction(int(stage), ActionKind(kind), int(microbatch))


PIPELINE_SCHEDULES = ("gpipe", "1f1b", "1f1b-overlap")


@dataclass(frozen=True, slots=True)
class PipelineSchedule:
    """Actions of each stage in order: for every microbatch a forward and, later, a backward.

    Prints as the CSV that torch's `_PipelineScheduleRuntime` loads (a line for each stage), and parses back.

    Raises:
        ScheduleError: A stage has not each microbatch's forward and backward once, or backward before forward.
    """

    stages: tuple[tuple[PipelineAction, ...], ...]

    def __post_init__(self) -> None:
        for stage_index, actions in enumerate(self.stages):
            _check_stage(stage_index, actions, self.num_microbatches)

    def __str__(self) -> str:
        return "\n".join(",".join(map(str, actions)) for actions in self.stages)

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def num_microbatches(self) -> int:
        return len(self.stages[0]) // 2 if self.stages else 0

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """Largest number of microbatches whose activations each stage holds at the same time."""
        return tuple(_peak_in_flight(actions) for actions in self.stages)


def generate_pipeline_schedule(name: str, num_stages: int, num_microbatches: int) -> PipelineSchedule:
    """Return the pipeline schedule of that name.

    Raises:
        UsageError: An unknown name, or a number below 1.
    """
    for what, number in (("stages", num_stages), ("microbatches", num_microbatches)):
        if number < 1:
            raise UsageError(what, got=number, expected="1 or more", do="Give how many there are")
    stages = []
    for stage_index in range(num_stages):
        ahead = num_warmup_forwards(name, stage_index, num_stages, num_microbatches)
        stages.append(_one_forward_one_backward(stage_index, ahead, num_microbatches))
    return PipelineSchedule(tuple(stages))


def num_warmup_forwards(name: str, stage_index: int, num_stages: int, num_microbatches: int | None = None) -> int:
    """Return the forwards of a stage before its first backward: the most microbatches that it holds.

    Args:
        name: One of `PIPELINE_SCHEDULES`.
        stage_index: From 0.
        num_stages: Number of stages.
        num_microbatches: Microbatches of a step; None: no limit.

    Raises:
        UsageError: An unknown name, or `gpipe` without a number of microbatches.
    """
    if name not in PIPELINE_SCHEDULES:
        do = suggest_closest(name, PIPELINE_SCHEDULES) or "Take one of these"
        raise UsageError("pipeline schedule", got=name, expected=f"one of {', '.join(PIPELINE_SCHEDULES)}", do=do)
    later = num_stages - 1 - stage_index
    if name == "gpipe":
        if num_microbatches is None:
            do = "Give it: gpipe holds all of them"
            raise UsageError("microbatches", got=None, expected="a number for gpipe", do=do)
        return num_microbatches
    ahead = 1 + later if name == "1f1b" else 1 + 2 * later
    return ahead if num_microbatches is None else min(num_microbatches, ahead)


def parse_pipeline_schedule(text: str) -> PipelineSchedule:
    """Parse a pipeline schedule from a text with a line for each stage.

    Raises:
        ScheduleError: A line holds something else than actions, or not each microbatch's forward and backward.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    return PipelineSchedule(
        tuple(tuple(parse_action(part) for part in line.split(",") if part.strip()) for line in lines)
    )


def _one_forward_one_backward(stage_index: int, ahead: int, num_microbatches: int) -> tuple[PipelineAction, ...]:
    """Return `ahead` forwards, then backward and forward in turn, then the remaining backwards."""
    forwards = [PipelineAction(stage_index, ActionKind.FORWARD, index) for index in range(num_microbatches)]
    backwards = [PipelineAction(stage_index, ActionKind.BACKWARD, index) for index in range(num_microbatches)]
    later = forwards[ahead:]
    turns = [action for pair in zip(backwards, later, strict=False) for action in pair]
    return (*forwards[:ahead], *turns, *backwards[len(later) :])


def _check_stage(stage_index: int, actions: Sequence[PipelineAction], num_microbatches: int) -> None:
    places = {action: place for place, action in enumerate(actions)}
    for index in range(num_microbatches):
        pair = [PipelineAction(stage_index, kind, index) for kind in (ActionKind.FORWARD, ActionKind.BACKWARD)]
        at = [places.get(action) for action in pair]
        if at[0] is None or at[1] is None or at[1] < at[0]:
            expected = f"{pair[0]} and, later, {pair[1]}"
            got = [str(action) for action in actions]
            do = "Give each microbatch a forward and a backward"
            raise ScheduleError(f"order of stage {stage_index}", got=got, expected=expected, do=do)
    if len(actions) != 2 * num_microbatches:
        expected = f"{2 * num_microbatches} actions, as many as stage 0 has"
        do = "Give every stage the same microbatches, once"
        raise ScheduleError(f"order of stage {stage_index}", got=len(actions), expected=expected, do=do)


def _peak_in_flight(actions: Sequence[PipelineAction]) -> int:
    held = most = 0
    for action in actions:
        held += 1 if action.kind == ActionKind.FORWARD else -1
        most = max(most, held)
    return most


TRANSFER_MODES = ("blocking", "asynchronous")


@dataclass(frozen=True, slots=True)
class StageInstruction:
    """Compute an action, begin transfers, or wait until transfers have ended."""

    what: Literal["compute", "begin", "wait"]
    actions: tuple[PipelineAction, ...]


def stage_programs(schedule: PipelineSchedule, transfers: str) -> list[list[StageInstruction]]:
    """Return the instructions of each stage.

    Raises:
        UsageError: Unknown transfer mode.
    """
    if transfers not in TRANSFER_MODES:
        expected = f"one of {', '.join(TRANSFER_MODES)}"
        raise UsageError("transfers", got=transfers, expected=expected, do="Take one of these")
    made = (
        _asynchronous_instructions
        if transfers == "asynchronous"
        else _blocking_gpipe_instructions
        if _has_phases(schedule)
        else _blocking_1f1b_instructions
    )
    found = []
    for actions in schedule.stages:
        instructions = made(actions, schedule.num_stages)
        found.append([instruction for instruction in instructions if instruction.actions])
    return found


def _has_phases(schedule: PipelineSchedule) -> bool:
    """Return whether every stage runs all forwards before all backwards, like GPipe."""
    half = schedule.num_microbatches
    return all(action.kind == ActionKind.FORWARD for actions in schedule.stages for action in actions[:half])


def _asynchronous_instructions(actions: Sequence[PipelineAction], num_stages: int) -> Iterator[StageInstruction]:
    yield StageInstruction("begin", tuple(each for action in actions for each in _receives_before(action, num_stages)))
    for action in actions:
        yield StageInstruction("wait", _receives_before(action, num_stages))
        yield StageInstruction("compute", (action,))
        yield StageInstruction("begin", _sends_after(action, num_stages))
    yield StageInstruction("wait", tuple(each for action in actions for each in _sends_after(action, num_stages)))


def _blocking_1f1b_instructions(actions: Sequence[PipelineAction], num_stages: int) -> Iterator[StageInstruction]:
    """Yield blocking 1F1B: a send goes with the next receive where the direction turns, else alone.

    A send that goes alone is waited for after the next compute action.
    """
    left: tuple[PipelineAction, ...] = ()
    alone: tuple[PipelineAction, ...] = ()
    for index, action in enumerate(actions):
        together = left + _receives_before(action, num_stages)
        yield StageInstruction("begin", together)
        yield StageInstruction("wait", together)
        yield StageInstruction("compute", (action,))
        yield StageInstruction("wait", alone)
        left, alone = _sends_after(action, num_stages), ()
        if index + 1 == len(actions) or actions[index + 1].kind == action.kind:
            yield StageInstruction("begin", left)
            left, alone = (), left
    yield StageInstruction("wait", alone)


def _blocking_gpipe_instructions(actions: Sequence[PipelineAction], num_stages: int) -> Iterator[StageInstruction]:
    """Yield blocking GPipe: each receive is waited for before its use, all sends of a phase at its end."""
    for kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
        phase = [action for action in actions if action.kind == kind]
        for action in phase:
            yield StageInstruction("begin", _receives_before(action, num_stages))
            yield StageInstruction("wait", _receives_before(action, num_stages))
            yield StageInstruction("compute", (action,))
            yield StageInstruction("begin", _sends_after(action, num_stages))
        yield StageInstruction("wait", tuple(each for action in phase for each in _sends_after(action, num_stages)))


def _receives_before(action: PipelineAction, num_stages: int) -> tuple[PipelineAction, ...]:
    """Return the receives of an action: none for the first stage's forwards and the last one's backwards."""
    if action.kind == ActionKind.FORWARD and action.stage_index > 0:
        return (PipelineAction(action.stage_index, ActionKind.RECEIVE_FORWARD, action.microbatch_index),)
    if action.kind == ActionKind.BACKWARD and action.stage_index < num_stages - 1:
        return (PipelineAction(action.stage_index, ActionKind.RECEIVE_BACKWARD, action.microbatch_index),)
    return ()


def _sends_after(action: PipelineAction, num_stages: int) -> tuple[PipelineAction, ...]:
    """Return the sends of an action: none for the last stage's forwards and the first one's backwards."""
    if action.kind == ActionKind.FORWARD and action.stage_index < num_stages - 1:
        return (PipelineAction(action.stage_index, ActionKind.SEND_FORWARD, action.microbatch_index),)
    if action.kind == ActionKind.BACKWARD and action.stage_index > 0:
        return (PipelineAction(action.stage_index, ActionKind.SEND_BACKWARD, action.microbatch_index),)
    return ()
