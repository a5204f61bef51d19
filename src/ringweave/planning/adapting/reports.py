"""What all ranks together say before the first one rules, as a vector that is combined by minimum. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

WINDOW = 16
"""Collectives of the same class that a report tells of."""
LENGTH = 3 + WINDOW
"""Numbers of the vector."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """One rank's word, or that of several combined.

    Two times are meant here. A *trial* begins with a barrier, so the slowest rank's time is how long it took. Other
    collectives begin when the last rank comes; who comes early waits, and that is not the network's doing. From the
    last arrival on nobody waits any more, so the *shortest* time of any rank is what the network took.
    """

    num_bytes: int
    """Size of the message that is about to be reduced; infinite sizes tell that ranks differ."""
    is_equal: bool = True
    """All ranks have a message of that size."""
    trial_s: float = math.nan
    """What the last trial took on the slowest rank; not a number where there was none."""
    window: tuple[float, ...] = ()
    """Seconds per byte of the newest collectives of the class, on the rank that waited least."""

    def to_vector(self) -> list[float]:
        """Numbers whose minimum over ranks, not-a-number left out, is the combined report."""
        window = [*self.window[-WINDOW:], *[math.nan] * (WINDOW - len(self.window))]
        return [float(self.num_bytes), -float(self.num_bytes), -self.trial_s, *window]

    @classmethod
    def from_vector(cls, vector: Sequence[float]) -> "Report":
        """The report of a vector that was combined."""
        smallest, largest, trial, *window = vector
        return cls(
            num_bytes=int(smallest),
            is_equal=smallest == -largest,
            trial_s=-trial,
            window=tuple(seconds for seconds in window if not math.isnan(seconds)),
        )
