"""Repartition decisions: the policy, the measured window that ranks send to rank 0, and its decision. Pure data."""

import functools
import json
import math
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import pydantic

from ringweave.errors import ScheduleError, UsageError, explain, shorten
from ringweave.files import file_io


@dataclass(frozen=True, kw_only=True, slots=True)
class RepartitionPolicy:
    """Settings of the controller.

    Raises:
        UsageError: A value outside of what its field allows.
    """

    window_steps: int = 10
    """Train steps per window, 3 or more. Ranks send their measurements to rank 0 at the end of each."""
    every_steps: int = 100
    """Train steps between two solutions when nothing drifts: the method's own example."""
    drift: float = 1.15
    """A speed or rate that differs from the believed one by more than this factor has changed, and triggers a search.
    Noise of 5 % stays inside, even between a device that seems 5 % faster and one that seems 5 % slower: 1.05 / 0.95 =
    1.105."""
    min_gain: float = 0.03
    """Fraction of the step that a move must be predicted to save."""
    certainty: float = 3.0
    """The saving must also be this many standard errors of the least certain measurement."""
    horizon_steps: int = 1000
    """Train steps over which the saving must pay for the pause."""
    cooldown_windows: int = 1
    """Windows after a move before another; doubled each time a move was reverted or failed."""
    thinking_share: float = 0.002
    """Fraction of the time that rank 0 may search for a better partition; a model of few blocks takes less."""
    probing_share: float = 0.001
    """Fraction of the time that all ranks may time links while they show no sign of trouble."""
    unconditional: bool = False
    """Move to the solution every `every_steps`, whatever the gain, and never back: the method as published."""

    def __post_init__(self) -> None:
        for what, least in (("window_steps", 3), ("every_steps", 1), ("horizon_steps", 1), ("cooldown_windows", 0)):
            _check_policy_value(what, getattr(self, what), getattr(self, what) >= least, f"{least} or more")
        _check_policy_value("drift", self.drift, self.drift > 1, "a factor above 1")
        for what in ("min_gain", "certainty", "thinking_share", "probing_share"):
            _check_policy_value(what, getattr(self, what), getattr(self, what) >= 0, "0 or more")


def _check_policy_value(name: str, value: float, is_allowed: bool, expected: str) -> None:
    if not (is_allowed and math.isfinite(value)):
        raise UsageError(f"{name} of the policy", got=value, expected=expected, do="Correct it, or leave it out")


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasurementWindow:
    """Consecutive train steps under one partition, measured. `parse(str(window)) == window`."""

    __pydantic_config__: ClassVar[pydantic.ConfigDict] = pydantic.ConfigDict(strict=True, extra="forbid")

    first_step: int
    """Number of its first train step."""
    compute_s: tuple[tuple[float, ...], ...]
    """For each device and step: seconds of computing, forward and backward of all microbatches, without waiting."""
    step_s: tuple[float, ...]
    """For each step: seconds from begin to begin on the first rank."""
    rates: tuple[tuple[float, ...], ...] = ()
    """For the link into each stage but the first: bytes per second, timed with the receiver posted; any number of
    values."""

    @property
    def end_step(self) -> int:
        """Return the number of the step after its last."""
        return self.first_step + len(self.step_s)

    def __str__(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> "MeasurementWindow":
        """Parse a window.

        Raises:
            ScheduleError: The text is no window.
        """
        try:
            return _adapter_of(cls).validate_json(file_io.bounded(text))
        except ValueError as cause:
            raise ScheduleError(_parse_error_text("window of measurements", text, cause)) from cause


@dataclass(frozen=True, kw_only=True, slots=True)
class RepartitionDecision:
    """Decision that follows from a window. `parse(str(decision)) == decision`."""

    __pydantic_config__: ClassVar[pydantic.ConfigDict] = pydantic.ConfigDict(strict=True, extra="forbid")

    splits: tuple[int, ...]
    """The next partition; the present one if nothing moves."""
    devices: str = ""
    """Devices of the stages with their samples, as `StageDevices` prints them; empty: as they are."""
    is_move: bool = False
    """True if blocks move to it: their state is copied during the next train step, and it holds from the step after
    that."""
    is_return: bool = False
    """True if it reverts a move that did not help."""
    why: str = ""
    """Reason in words."""
    predicted_before_s: float = 0.0
    """Simulated train step of the present partition under the measured conditions."""
    predicted_after_s: float = 0.0
    """The same of the new one."""
    predicted_pause_s: float = 0.0
    """Predicted pause of training."""

    def __str__(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> "RepartitionDecision":
        """Parse a decision.

        Raises:
            ScheduleError: The text is no decision.
        """
        try:
            return _adapter_of(cls).validate_json(file_io.bounded(text))
        except ValueError as cause:
            raise ScheduleError(_parse_error_text("decision on a partition", text, cause)) from cause


@functools.cache
def _adapter_of(kind: type) -> pydantic.TypeAdapter[Any]:
    return pydantic.TypeAdapter(kind)


def _parse_error_text(description: str, text: str, cause: Exception) -> str:
    do = f"Run the same version of ringweave on all ranks ({shorten(cause)})"
    return explain(description, got=text, expected="what another rank sent", do=do)
