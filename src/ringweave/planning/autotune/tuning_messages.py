"""Tuning messages: the report that all ranks combine, and the decision that all ranks follow. Pure data."""

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar, NamedTuple

import pydantic

from ringweave.errors import ScheduleError, shorten
from ringweave.files import file_io
from ringweave.planning import plans
from ringweave.schedules.schedule import COLLECTIVE_KINDS, CollectiveKind

REPORT_WINDOW = 16
"""Collectives of one message class in a report."""


def message_class(num_bytes: int, kind: CollectiveKind = "allreduce", *, is_on_device: bool = False) -> str:
    """Return the class of a message: two for each doubling of the size; one schedule serves all messages of a class.

    Messages of a device have classes of their own where the native backend is another one for them.
    """
    place = " on a device" if is_on_device else ""
    return f"{kind}{place} {round(2 * math.log2(max(1, num_bytes)))}"


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningReport:
    """Report of one rank, or of several combined.

    It has two kinds of times. A *trial* begins with a barrier, so its time is that of the slowest rank. Any other
    collective begins when the last rank arrives; earlier ranks wait, which is not the network's fault. After the last
    arrival no rank waits, so the *shortest* time of any rank is the network's.
    """

    num_bytes: int
    """Size of the message that waits for the decision; the smallest if ranks differ."""
    kind: CollectiveKind = "allreduce"
    """Its collective."""
    is_on_device: bool = False
    """It has a class of a device's messages (`tuner.message_class`)."""
    is_equal: bool = True
    """All ranks have a message of that kind and size."""
    trial_s: float = math.nan
    """Time of the last trial on the slowest rank; not a number without a trial."""
    window: tuple[float, ...] = ()
    """Seconds per byte of the newest collectives of the class, on the rank that waited least."""

    def to_vector(self) -> list[float]:
        """Return numbers whose minimum over ranks, ignoring not-a-number, is the combined report."""
        window = [*self.window[-REPORT_WINDOW:], *[math.nan] * (REPORT_WINDOW - len(self.window))]
        number = float(COLLECTIVE_KINDS.index(self.kind) + len(COLLECTIVE_KINDS) * self.is_on_device)
        return [float(self.num_bytes), -float(self.num_bytes), number, -number, -self.trial_s, *window]

    @classmethod
    def from_vector(cls, vector: Sequence[float]) -> "TuningReport":
        smallest, largest, first_kind, last_kind, trial, *window = vector
        return cls(
            num_bytes=int(smallest),
            kind=COLLECTIVE_KINDS[int(first_kind) % len(COLLECTIVE_KINDS)],
            is_on_device=first_kind >= len(COLLECTIVE_KINDS),
            is_equal=(smallest, first_kind) == (-largest, -last_kind),
            trial_s=-trial,
            window=tuple(seconds for seconds in window if not math.isnan(seconds)),
        )


MAX_DECISION_BYTES = 3 * plans.MAX_PLAN_BYTES
"""Limit on a text that is read: a plan in it, whose quotation marks take two bytes each, and a survey."""


class SurveyStream(NamedTuple):
    """One stream of a survey, between nodes numbered in the order in which the group's ranks first name them."""

    src: int
    dst: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningDecision:
    """The next action. `parse(str(decision)) == decision`."""

    __pydantic_config__: ClassVar[pydantic.ConfigDict] = pydantic.ConfigDict(strict=True, extra="forbid")

    num_bytes: int
    """Size of the message that it was made for."""
    schedule: str = ""
    """Schedule of that message; empty if a survey has to come first."""
    is_trial: bool = False
    """This collective is a trial: it runs alone, and its time is reported."""
    next_in: int = 1
    """Collectives of the class until the ranks consult again."""
    phases: tuple[tuple[SurveyStream, ...], ...] = ()
    """Streams of a survey, phase by phase."""
    plan: str = ""
    """Text of a new plan that holds from this collective on; empty keeps the plan."""

    def __str__(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> "TuningDecision":
        """Parse a decision.

        Raises:
            ScheduleError: The text is no decision.
        """
        try:
            return _decision_adapter().validate_json(file_io.bounded(text, MAX_DECISION_BYTES))
        except ValueError as cause:
            do = f"Run the same version of ringweave on all ranks ({shorten(cause)})"
            raise ScheduleError("tuning decision", got=text, expected="what the first rank sent", do=do) from cause


@functools.cache
def _decision_adapter() -> pydantic.TypeAdapter[TuningDecision]:
    return pydantic.TypeAdapter(TuningDecision)
