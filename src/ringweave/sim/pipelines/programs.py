"""What a stage really does: its computing with the transfers between, when they are begun and when they are waited for.

Two ways:

- *blocking*: as torch 2.13 runs `ScheduleGPipe` and `Schedule1F1B`. In their steady state a send goes out together with
  the next receive, and both are waited for before the stage goes on.
- *asynchronous*: a result is sent as soon as it is there, receives stand ready from the start, and a stage waits only
  for what it needs next. What `_PipelineScheduleRuntime` comes near to, on devices whose transfers take no computing.

Source: torch/distributed/pipelining/schedules.py, `_step_microbatches` of both classes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ringweave.errors import UsageError, explain
from ringweave.sim.pipelines.actions import Action, Kind
from ringweave.sim.pipelines.orders import Order

TRANSFERS = ("blocking", "asynchronous")


@dataclass(frozen=True, slots=True)
class Instruction:
    """Compute an action, begin transfers, or wait until transfers have ended."""

    what: Literal["compute", "begin", "wait"]
    actions: tuple[Action, ...]


def programs(order: Order, transfers: str) -> list[list[Instruction]]:
    """The instructions of each stage.

    Raises:
        UsageError: An unknown way of transferring.
    """
    if transfers not in TRANSFERS:
        expected = f"one of {', '.join(TRANSFERS)}"
        raise UsageError(explain("transfers", got=transfers, expected=expected, do="Take one of these"))
    made = _asynchronous if transfers == "asynchronous" else _by_phases if _has_phases(order) else _turning
    found = []
    for actions in order.stages:
        instructions = made(actions, order.num_stages)
        found.append([instruction for instruction in instructions if instruction.actions])
    return found


def _has_phases(order: Order) -> bool:
    """All forwards before all backwards in every stage, as GPipe has it; 1F1B's last stage turns after each."""
    half = order.num_microbatches
    return all(action.kind == Kind.FORWARD for actions in order.stages for action in actions[:half])


def _asynchronous(actions: Sequence[Action], num_stages: int) -> Iterator[Instruction]:
    yield Instruction("begin", tuple(each for action in actions for each in _received(action, num_stages)))
    for action in actions:
        yield Instruction("wait", _received(action, num_stages))
        yield Instruction("compute", (action,))
        yield Instruction("begin", _sent(action, num_stages))
    yield Instruction("wait", tuple(each for action in actions for each in _sent(action, num_stages)))


def _turning(actions: Sequence[Action], num_stages: int) -> Iterator[Instruction]:
    """Blocking 1F1B: a send goes out with the next receive where the direction turns, alone where it does not.

    Sent alone, it is waited for after the next computing.
    """
    left: tuple[Action, ...] = ()
    alone: tuple[Action, ...] = ()
    for index, action in enumerate(actions):
        together = left + _received(action, num_stages)
        yield Instruction("begin", together)
        yield Instruction("wait", together)
        yield Instruction("compute", (action,))
        yield Instruction("wait", alone)
        left, alone = _sent(action, num_stages), ()
        if index + 1 == len(actions) or actions[index + 1].kind == action.kind:
            yield Instruction("begin", left)
            left, alone = (), left
    yield Instruction("wait", alone)


def _by_phases(actions: Sequence[Action], num_stages: int) -> Iterator[Instruction]:
    """Blocking GPipe: each receive is waited for where it is needed, all sends of a phase at its end."""
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        phase = [action for action in actions if action.kind == kind]
        for action in phase:
            yield Instruction("begin", _received(action, num_stages))
            yield Instruction("wait", _received(action, num_stages))
            yield Instruction("compute", (action,))
            yield Instruction("begin", _sent(action, num_stages))
        yield Instruction("wait", tuple(each for action in phase for each in _sent(action, num_stages)))


def _received(action: Action, num_stages: int) -> tuple[Action, ...]:
    """What has to arrive for an action: nothing for the first stage's forwards and the last one's backwards."""
    if action.kind == Kind.FORWARD and action.stage_index > 0:
        return (Action(action.stage_index, Kind.RECEIVE_FORWARD, action.microbatch_index),)
    if action.kind == Kind.BACKWARD and action.stage_index < num_stages - 1:
        return (Action(action.stage_index, Kind.RECEIVE_BACKWARD, action.microbatch_index),)
    return ()


def _sent(action: Action, num_stages: int) -> tuple[Action, ...]:
    """What an action gives away: nothing at the last stage's forwards and the first one's backwards."""
    if action.kind == Kind.FORWARD and action.stage_index < num_stages - 1:
        return (Action(action.stage_index, Kind.SEND_FORWARD, action.microbatch_index),)
    if action.kind == Kind.BACKWARD and action.stage_index > 0:
        return (Action(action.stage_index, Kind.SEND_BACKWARD, action.microbatch_index),)
    return ()
