"""Deadlines learnt from what is usual: nobody sets them, and a job that is slow by nature is not taken for dead."""

from collections import deque
from dataclasses import dataclass

_KEPT = 64
"""Gaps that are remembered."""
_ENOUGH = 8
"""Gaps before anything counts as learnt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """How a deadline follows from gaps: the longest of late times a factor, within bounds."""

    factor: float
    least_s: float
    most_s: float


SILENCE = Tolerance(factor=3.0, least_s=1.4, most_s=10.0)
"""Between two heartbeats. They come from a thread of their own, so a long gap is a busy machine's, not the model's. A
member that stands still holds the others up for that long, and while they regroup: some tenths of a second."""
STANDSTILL = Tolerance(factor=8.0, least_s=5.0, most_s=3600.0)
"""Between two signs of progress of the thread that trains, while it computes and others wait for it."""


class Rhythm:
    """Gaps between signs of one kind from one member, and the deadline that follows."""

    def __init__(self, tolerance: Tolerance, now_s: float) -> None:
        self._tolerance = tolerance
        self._gaps: deque[float] = deque(maxlen=_KEPT)
        self._last_s = now_s

    def observe(self, now_s: float) -> None:
        """A sign has come."""
        self._gaps.append(max(0.0, now_s - self._last_s))
        self._last_s = max(now_s, self._last_s)

    def excuse(self, now_s: float) -> None:
        """What has passed since the last sign does not count."""
        self._last_s = max(now_s, self._last_s)

    @property
    def deadline_s(self) -> float:
        """Seconds after the last sign from which its absence is no longer usual."""
        tolerance = self._tolerance
        if len(self._gaps) < _ENOUGH:
            return tolerance.most_s
        return min(tolerance.most_s, max(tolerance.least_s, tolerance.factor * max(self._gaps)))

    def is_late(self, now_s: float) -> bool:
        """Whether the next sign is overdue."""
        return now_s - self._last_s > self.deadline_s
