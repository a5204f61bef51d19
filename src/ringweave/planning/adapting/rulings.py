"""What the first rank rules, as text that all ranks follow. Pure data."""

import json
from dataclasses import asdict, dataclass
from typing import NamedTuple

from ringweave.errors import ScheduleError, explain, shorten
from ringweave.files import json_text
from ringweave.planning import plan_text

MAX_BYTES = 3 * plan_text.MAX_BYTES
"""Of a text that is read: a plan in it, whose quotation marks take two bytes each, and a survey."""


class Stream(NamedTuple):
    """One stream of a survey, between nodes in the order in which the group's ranks name them first."""

    src: int
    dst: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Ruling:
    """What comes next. `parse(str(ruling)) == ruling`."""

    num_bytes: int
    """Size of the message that it was made for."""
    schedule: str = ""
    """What that message takes; empty where a survey has to come first."""
    is_trial: bool = False
    """This collective is a trial: it runs alone, and its time is reported."""
    next_in: int = 1
    """After so many more collectives of the class the ranks consult again."""
    phases: tuple[tuple[Stream, ...], ...] = ()
    """The streams of a survey, phase by phase."""
    plan: str = ""
    """Text of a new plan that holds from this collective on; empty if the plan stays."""

    def __str__(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> "Ruling":
        """The ruling of a text.

        Raises:
            ScheduleError: The text is none.
        """
        try:
            document = json_text.loads(text, MAX_BYTES)
            document["phases"] = tuple(tuple(Stream(*stream) for stream in phase) for phase in document["phases"])
            return cls(**document)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as cause:
            do = f"Run the same version of ringweave on all ranks ({shorten(cause)})"
            raise ScheduleError(explain("ruling", got=text, expected="what the first rank sent", do=do)) from cause
