"""In which order each stage of a pipeline computes: GPipe, 1F1B, and a 1F1B whose transfers overlap with computing.

| name | forwards before the first backward of stage i of S | microbatches held |
|---|---|---|
| `gpipe` | all | all |
| `1f1b` | S - i, as torch's Schedule1F1B | S - i |
| `1f1b-overlap` | 1 + 2 (S - 1 - i) | up to twice as many |

With S - i a stage has one microbatch on its way to every later stage; while that is being transferred nobody computes
it, so that transfers show. With 1 + 2 (S - 1 - i) each transfer has a microbatch of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ringweave.errors import ScheduleError, UsageError, explain
from ringweave.files.problems import closest
from ringweave.sim.pipelines.actions import Action, Kind, parse_action

NAMES = ("gpipe", "1f1b", "1f1b-overlap")


@dataclass(frozen=True, slots=True)
class Order:
    """What each stage computes, one after the other; of every microbatch a forward and, later, a backward.

    Prints as the CSV that torch's `_PipelineScheduleRuntime` loads (a line for each stage), and parses back.

    Raises:
        ScheduleError: A stage has not each microbatch's forward and backward once, or backward before forward.
    """

    stages: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        for stage_index, actions in enumerate(self.stages):
            _check_stage(stage_index, actions, self.num_microbatches)

    def __str__(self) -> str:
        """One line for each stage, actions between commas."""
        return "\n".join(",".join(map(str, actions)) for actions in self.stages)

    @property
    def num_stages(self) -> int:
        """S."""
        return len(self.stages)

    @property
    def num_microbatches(self) -> int:
        """Of a step."""
        return len(self.stages[0]) // 2 if self.stages else 0

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """Of each stage: the most microbatches whose activations it holds at the same time."""
        return tuple(_peak(actions) for actions in self.stages)


def generate(name: str, num_stages: int, num_microbatches: int) -> Order:
    """The order of that name.

    Raises:
        UsageError: An unknown name, or a number below 1.
    """
    for what, number in (("stages", num_stages), ("microbatches", num_microbatches)):
        if number < 1:
            raise UsageError(explain(what, got=number, expected="1 or more", do="Give how many there are"))
    stages = []
    for stage_index in range(num_stages):
        ahead = warm_up(name, stage_index, num_stages, num_microbatches)
        stages.append(_one_by_one(stage_index, ahead, num_microbatches))
    return Order(tuple(stages))


def warm_up(name: str, stage_index: int, num_stages: int, num_microbatches: int | None = None) -> int:
    """Forwards of a stage before its first backward, which is also how many microbatches it holds at most.

    Args:
        name: One of `NAMES`.
        stage_index: From 0.
        num_stages: All.
        num_microbatches: Of a step; None: so many that they are no limit.

    Raises:
        UsageError: An unknown name, or `gpipe` without a number of microbatches.
    """
    if name not in NAMES:
        do = closest(name, NAMES) or "Take one of these"
        raise UsageError(explain("pipeline schedule", got=name, expected=f"one of {', '.join(NAMES)}", do=do))
    later = num_stages - 1 - stage_index
    if name == "gpipe":
        if num_microbatches is None:
            do = "Give it: gpipe holds all of them"
            raise UsageError(explain("microbatches", got=None, expected="a number for gpipe", do=do))
        return num_microbatches
    ahead = 1 + later if name == "1f1b" else 1 + 2 * later
    return ahead if num_microbatches is None else min(num_microbatches, ahead)


def parse_order(text: str) -> Order:
    """The order of a text with a line for each stage.

    Raises:
        ScheduleError: A line holds something else than actions, or not each microbatch's forward and backward.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    return Order(tuple(tuple(parse_action(part) for part in line.split(",") if part.strip()) for line in lines))


def _one_by_one(stage_index: int, ahead: int, num_microbatches: int) -> tuple[Action, ...]:
    """That many forwards, then backward and forward in turn, then the backwards that are left."""
    forwards = [Action(stage_index, Kind.FORWARD, index) for index in range(num_microbatches)]
    backwards = [Action(stage_index, Kind.BACKWARD, index) for index in range(num_microbatches)]
    later = forwards[ahead:]
    turns = [action for pair in zip(backwards, later, strict=False) for action in pair]
    return (*forwards[:ahead], *turns, *backwards[len(later) :])


def _check_stage(stage_index: int, actions: Sequence[Action], num_microbatches: int) -> None:
    places = {action: place for place, action in enumerate(actions)}
    for index in range(num_microbatches):
        pair = [Action(stage_index, kind, index) for kind in (Kind.FORWARD, Kind.BACKWARD)]
        at = [places.get(action) for action in pair]
        if at[0] is None or at[1] is None or at[1] < at[0]:
            expected = f"{pair[0]} and, later, {pair[1]}"
            got = [str(action) for action in actions]
            do = "Give each microbatch a forward and a backward"
            raise ScheduleError(explain(f"order of stage {stage_index}", got=got, expected=expected, do=do))
    if len(actions) != 2 * num_microbatches:
        expected = f"{2 * num_microbatches} actions, as many as stage 0 has"
        do = "Give every stage the same microbatches, once"
        raise ScheduleError(explain(f"order of stage {stage_index}", got=len(actions), expected=expected, do=do))


def _peak(actions: Sequence[Action]) -> int:
    held = most = 0
    for action in actions:
        held += 1 if action.kind == Kind.FORWARD else -1
        most = max(most, held)
    return most
