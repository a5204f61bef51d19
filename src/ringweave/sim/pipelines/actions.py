"""One thing that a stage does in a step of a pipeline, in the text of torch.distributed.pipelining: `2F0`, `3SEND_F1`.

The text is what `_Action.from_str` of torch parses and what it prints, so that the order which was simulated is the one
that is run. Kinds that our orders never contain (split backwards, sharding) are not known here.
"""

import re
from dataclasses import dataclass
from enum import StrEnum

from ringweave.errors import ScheduleError, explain

_TEXT = re.compile(r"(\d{1,9})(SEND_F|RECV_F|SEND_B|RECV_B|F|B)(\d{1,9})")


class Kind(StrEnum):
    """What is done."""

    FORWARD = "F"
    BACKWARD = "B"
    SEND_FORWARD = "SEND_F"
    RECEIVE_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECEIVE_BACKWARD = "RECV_B"


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """A stage does something for a microbatch. Prints as torch prints it, and parses back."""

    stage_index: int
    kind: Kind
    microbatch_index: int

    def __str__(self) -> str:
        """`2F0`."""
        return f"{self.stage_index}{self.kind.value}{self.microbatch_index}"

    @property
    def is_compute(self) -> bool:
        """Forward or backward, not a transfer."""
        return self.kind in (Kind.FORWARD, Kind.BACKWARD)


def parse_action(text: str) -> Action:
    """The action of a text such as `2F0`.

    Raises:
        ScheduleError: It is none, or of a kind that is not known here.
    """
    match = _TEXT.fullmatch(text.strip())
    if match is None:
        expected = "a stage, one of F, B, SEND_F, RECV_F, SEND_B, RECV_B, and a microbatch"
        raise ScheduleError(explain("action of a pipeline", got=text, expected=expected, do="Write it like 2F0"))
    stage, kind, microbatch = match.groups()
    return Action(int(stage), Kind(kind), int(microbatch))
