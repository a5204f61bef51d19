"""Whether collectives have become slower or faster than they were, for good. Pure."""

import enum
import statistics
from collections import deque

BASE, MAX_BASE = 8, 64
"""Collectives whose median is what later ones are compared with: at first so few, then as many steady ones."""
WINDOW = 6
"""The newest ones, of which all but one have to agree."""
SLOWER, FASTER = 1.25, 0.8
"""Beyond these multiples of what it was. Noise of 10 % stays inside: 1.1 / 0.9 = 1.22."""
HINT = 0.92
"""Of what it was: the median of the newest may be so by chance, so it only counts where there is reason to hope."""


class Verdict(enum.Enum):
    """What a watch says."""

    STEADY = "steady"
    SLOWER = "slower"
    FASTER = "faster"


class Watch:
    """Watches the times of one schedule at one class of sizes.

    A single slow collective is no drift, nor are some: five of the newest six must lie beyond the limit. Where the
    usual time is known well, normal noise of 10 % does that by chance once in 1e10 collectives.
    """

    def __init__(self) -> None:
        self._base: list[float] = []
        self._newest: deque[float] = deque(maxlen=WINDOW)

    @property
    def usual(self) -> float | None:
        """What a collective took, per byte, when the watch began; None while too few were seen."""
        return statistics.median(self._base) if len(self._base) >= BASE else None

    @property
    def now(self) -> float | None:
        """Median of the newest; None while too few were seen."""
        return statistics.median(self._newest) if len(self._newest) == WINDOW else None

    @property
    def may_be_faster(self) -> bool:
        """They are a little faster than usual: a plan that goes round a slow link gains little when that is over."""
        now, usual = self.now, self.usual
        return now is not None and usual is not None and now < HINT * usual

    def observe(self, seconds_per_byte: float) -> None:
        """One more collective took so long; what is not a positive number is left out."""
        if not seconds_per_byte > 0:
            return
        if len(self._base) < BASE:
            self._base.append(seconds_per_byte)
            return
        if len(self._newest) == WINDOW and len(self._base) < MAX_BASE and self.verdict is Verdict.STEADY:
            self._base.append(self._newest[0])
        self._newest.append(seconds_per_byte)

    @property
    def verdict(self) -> Verdict:
        """What the newest say of the usual time."""
        usual = self.usual
        if usual is None or len(self._newest) < WINDOW:
            return Verdict.STEADY
        if sum(seconds > SLOWER * usual for seconds in self._newest) >= WINDOW - 1:
            return Verdict.SLOWER
        if sum(seconds < FASTER * usual for seconds in self._newest) >= WINDOW - 1:
            return Verdict.FASTER
        return Verdict.STEADY
