"""What ranks tell rank 0 about a window of train steps, and what it rules; both as text. Pure data."""

import json
from dataclasses import asdict, dataclass

from ringweave.errors import ScheduleError, explain, shorten
from ringweave.files import json_text


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Consecutive train steps under one partition, measured. `parse(str(window)) == window`."""

    first_step: int
    """Number of its first train step."""
    compute_s: tuple[tuple[float, ...], ...]
    """Of each stage, of each step: seconds of computing, forward and backward of all microbatches, without waiting."""
    step_s: tuple[float, ...]
    """Of each step: seconds from begin to begin on the first rank."""
    rates: tuple[tuple[float, ...], ...] = ()
    """Of the link into each stage but the first: bytes per second, timed with the receiver posted; any number."""

    @property
    def end_step(self) -> int:
        """Number of the step behind its last."""
        return self.first_step + len(self.step_s)

    def __str__(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> "Window":
        """The window of a text.

        Raises:
            ScheduleError: The text is none.
        """
        try:
            document = json_text.loads(text)
            for what in ("compute_s", "rates"):
                document[what] = tuple(tuple(map(float, row)) for row in document[what])
            document["step_s"] = tuple(map(float, document["step_s"]))
            return cls(**document)
        except (ValueError, TypeError, KeyError, OverflowError) as cause:
            raise ScheduleError(_refusal("window of measurements", text, cause)) from cause


@dataclass(frozen=True, kw_only=True, slots=True)
class Ruling:
    """What follows from a window. `parse(str(ruling)) == ruling`."""

    splits: tuple[int, ...]
    """The partition to go to; the present one if everything stays."""
    is_move: bool = False
    """Blocks move to it: their state is copied during the next train step, and from the one behind it holds."""
    is_return: bool = False
    """It takes a move back that did not help."""
    why: str = ""
    """In words."""
    predicted_before_s: float = 0.0
    """Simulated train step of the present partition under the conditions that were measured."""
    predicted_after_s: float = 0.0
    """The same of the new one."""
    predicted_pause_s: float = 0.0
    """How long training is to stand still."""

    def __str__(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> "Ruling":
        """The ruling of a text.

        Raises:
            ScheduleError: The text is none.
        """
        try:
            document = json_text.loads(text)
            document["splits"] = tuple(map(int, document["splits"]))
            return cls(**document)
        except (ValueError, TypeError, KeyError, OverflowError) as cause:
            raise ScheduleError(_refusal("ruling on a partition", text, cause)) from cause


def _refusal(what: str, text: str, cause: Exception) -> str:
    do = f"Run the same version of ringweave on all ranks ({shorten(cause)})"
    return explain(what, got=text, expected="what another rank sent", do=do)
