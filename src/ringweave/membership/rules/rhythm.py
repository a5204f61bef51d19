"""Deadlines learnt from what is usual: nobody sets them, and a job that is slow by nature is not taken for dead."""

from collections import deque
from dataclasses import dataclass

BEAT_S = 0.25
"""From one heartbeat to the next. Each takes a millisecond of a processor that a train step may be waiting for; nobody
is missed before 0.9 s."""
_DECAY = 0.997
"""Of the longest gap, with each that follows: of heartbeats it is half forgotten after a minute. A machine that was
busy will be so again."""
_WINDOW_S = 12.0
"""For so long one's own delays are remembered."""
_ENOUGH = 8
"""Gaps before anything counts as learnt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """How a deadline follows from gaps: the longest of late times a factor, within bounds."""

    factor: float
    least_s: float
    most_s: float


SILENCE = Tolerance(factor=3.0, least_s=0.9, most_s=10.0)
"""Between two heartbeats. They come from a thread of their own, so a long gap is a busy machine's, not the model's. A
member that stands still holds the others up for that long, and while they regroup: some tenths of a second."""
ANSWERS = Tolerance(factor=3.0, least_s=0.8, most_s=3.0)
"""Between two answers of the coordinator to heartbeats: then a member asks the other one. Less than `SILENCE`, so that
it can, before the one that it has left would put it out; to ask without need costs nothing."""
STANDSTILL = Tolerance(factor=8.0, least_s=5.0, most_s=3600.0)
"""Between two signs of progress of the thread that trains, while it computes and others wait for it."""
WAITS = Tolerance(factor=8.0, least_s=20.0, most_s=3600.0)
"""From when a member begins to wait until a reduction counts: one that usually takes a minute has eight."""


_USUAL_S = 0.15
"""Between two looks of a process that gets the processor when it wants to."""
_GRACE_FACTOR = 4.0
_LONGEST_S = 1.0


class Delays:
    """How late the one who listens is itself: on a machine that busy, the others' signs are late as well."""

    def __init__(self, now_s: float, usual_s: float = _USUAL_S) -> None:
        """It looks every `usual_s` where it gets the processor when it wants to."""
        self._delays: deque[tuple[float, float]] = deque()
        self._usual_s = usual_s
        self.last_s = now_s
        """When it looked last."""

    def observe(self, now_s: float) -> float:
        """It looks; seconds since it did so last."""
        delay_s = max(0.0, now_s - self.last_s)
        self._delays.append((now_s, min(delay_s, _LONGEST_S)))
        while now_s - self._delays[0][0] > _WINDOW_S:
            self._delays.popleft()
        self.last_s = now_s
        return delay_s

    def forget(self) -> None:
        """What was observed so far is not usual."""
        self._delays.clear()

    @property
    def grace_s(self) -> float:
        """What is added to every deadline."""
        longest_s = max((delay_s for _, delay_s in self._delays), default=0.0)
        return _GRACE_FACTOR * max(0.0, longest_s - self._usual_s)


class Rhythm:
    """Gaps between signs of one kind from one member, and the deadline that follows."""

    def __init__(self, tolerance: Tolerance, now_s: float, first_s: float | None = None) -> None:
        """Until enough is learnt the deadline is `first_s`, within the bounds; None is the longest."""
        self._tolerance = tolerance
        first_s = tolerance.most_s if first_s is None else first_s
        self._first_s = min(tolerance.most_s, max(tolerance.least_s, first_s))
        self._num_gaps, self._longest_s = 0, 0.0
        self._last_s = now_s

    def observe(self, now_s: float) -> None:
        """A sign has come."""
        self._num_gaps += 1
        self._longest_s = max(now_s - self._last_s, _DECAY * self._longest_s)
        self._last_s = max(now_s, self._last_s)

    def forget(self) -> None:
        """What was observed so far is not usual: what is comes from the gaps that follow.

        Until those are enough the deadline stays as it is: none is made of too few, and nobody is held to the shortest
        in the very moment in which nothing is known.
        """
        self._first_s, self._num_gaps, self._longest_s = self.deadline_s, 0, 0.0

    def excuse(self, now_s: float) -> None:
        """What has passed since the last sign does not count."""
        self._last_s = max(now_s, self._last_s)

    def shift(self, seconds: float) -> None:
        """So much of what has passed since the last sign does not count."""
        self._last_s += seconds

    @property
    def deadline_s(self) -> float:
        """Seconds after the last sign from which its absence is no longer usual."""
        tolerance = self._tolerance
        if self._num_gaps < _ENOUGH:
            return self._first_s
        return min(tolerance.most_s, max(tolerance.least_s, tolerance.factor * self._longest_s))

    @property
    def due_s(self) -> float:
        """When that is for the next sign."""
        return self._last_s + self.deadline_s

    def late_s(self, now_s: float, grace_s: float = 0.0) -> float:
        """By how much more than the grace the next sign is overdue."""
        return max(0.0, now_s - self._last_s - self.deadline_s - grace_s)

    def is_late(self, now_s: float, grace_s: float = 0.0) -> bool:
        """Whether the next sign is overdue, and by more than the grace."""
        return self.late_s(now_s, grace_s) > 0.0
