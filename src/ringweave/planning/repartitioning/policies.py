"""When a pipeline's partition is thought over, and when blocks move."""

import math
from dataclasses import dataclass

from ringweave.errors import UsageError, explain


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Settings of the controller.

    Raises:
        UsageError: A value outside of what its field allows.
    """

    window_steps: int = 10
    """Train steps whose measurements are put together; 3 or more. Ranks tell rank 0 at the end of each."""
    every_steps: int = 100
    """Train steps between two solutions when nothing drifts: the method's own example."""
    drift: float = 1.15
    """A speed or rate beyond this factor of what was believed has changed, and is not waited for. Noise of 5 % stays
    inside, even between a device that seems 5 % faster and one that seems 5 % slower: 1.05 / 0.95 = 1.105."""
    min_gain: float = 0.03
    """Fraction of the step that must be predicted to be saved: below it nothing moves."""
    certainty: float = 3.0
    """The saving must also be so many standard errors of the least certain measurement."""
    horizon_steps: int = 1000
    """Train steps over which a saving is held against the pause that it costs."""
    cooldown_windows: int = 1
    """Windows after a move before another; doubled each time a move was taken back or failed."""
    thinking_share: float = 0.002
    """Of the time, what rank 0 may take to look for a better partition; a model of few blocks takes less."""
    probing_share: float = 0.001
    """Of the time, what all may take to time links as long as nothing seems to be wrong with them."""
    unconditional: bool = False
    """Move to what is solved every `every_steps`, whatever is gained, and never back: as the method was published."""

    def __post_init__(self) -> None:
        for what, least in (("window_steps", 3), ("every_steps", 1), ("horizon_steps", 1), ("cooldown_windows", 0)):
            _check(what, getattr(self, what), getattr(self, what) >= least, f"{least} or more")
        _check("drift", self.drift, self.drift > 1, "a factor above 1")
        for what in ("min_gain", "certainty", "thinking_share", "probing_share"):
            _check(what, getattr(self, what), getattr(self, what) >= 0, "0 or more")


def _check(what: str, value: float, is_allowed: bool, expected: str) -> None:
    if not (is_allowed and math.isfinite(value)):
        raise UsageError(explain(f"{what} of the policy", got=value, expected=expected, do="Mend it, or leave it out"))
