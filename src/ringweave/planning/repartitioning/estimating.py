"""What a device's speed or a link's rate is by now, from windows of measurements: medians, forgotten when it drifts.

Within a window the newest steps that agree with each other count, where there are enough of them: a device that changed
in the middle of a window has not the median speed of before and after.
"""

import math
import statistics
from collections import deque
from collections.abc import Sequence

LEAST_AGREEING = 3
"""Steps that must agree before they are taken for another speed; a stall in one or two is none."""
_SPREAD = 1.4826
"""Standard deviation of normal noise, in median deviations."""
_MEDIAN = math.sqrt(math.pi / 2)
"""Standard error of a median of normal noise, in those of a mean."""


class Estimator:
    """One positive quantity that is measured again and again."""

    def __init__(self, prior: float, *, drift: float, num_windows: int) -> None:
        """`prior` is believed until something is measured; beyond a factor of `drift` older windows are forgotten."""
        self._prior = prior
        self._drift = drift
        self._windows: deque[tuple[float, float]] = deque(maxlen=num_windows)

    @property
    def value(self) -> float:
        """What is believed."""
        return statistics.median(value for value, _ in self._windows) if self._windows else self._prior

    @property
    def noise(self) -> float:
        """Standard error of the value, as a fraction of it; infinite before anything was measured."""
        if not self._windows:
            return math.inf
        within = math.sqrt(sum(error**2 for _, error in self._windows)) / len(self._windows)
        between = _error([value for value, _ in self._windows]) if len(self._windows) > 2 else 0.0
        return max(within, between)

    def observe(self, values: Sequence[float]) -> bool:
        """Take in a window of one value for each step.

        Returns:
            Whether it lies so far from what was believed that that is forgotten.
        """
        agreeing = newest_agreeing([value for value in values if 0 < value < math.inf], self._drift)
        if not agreeing:
            return False
        newest, before = statistics.median(agreeing), self.value
        is_drift = not before / self._drift <= newest <= before * self._drift
        if is_drift:
            self._windows.clear()
        self._windows.append((newest, _error(agreeing)))
        return is_drift

    def rebase(self) -> None:
        """Other blocks are measured from now on: keep the value only until something is measured."""
        self._prior = self.value
        self._windows.clear()


def newest_agreeing(values: Sequence[float], ratio: float) -> Sequence[float]:
    """The longest end of the row within a factor of its newest values' median, one outlier at a time left in.

    All of the row where fewer than `LEAST_AGREEING` agree: then the newest are a stall, or a change that the next row
    will show.
    """
    if len(values) <= LEAST_AGREEING:
        return values
    middle = statistics.median(values[-LEAST_AGREEING:])
    agrees = [middle / ratio <= value <= middle * ratio for value in values]
    first = len(values)
    while first > 0 and (agrees[first - 1] or (first > 1 and agrees[first - 2])):
        first -= 1
    return values[first:] if sum(agrees[first:]) >= LEAST_AGREEING else values


def _error(values: Sequence[float]) -> float:
    """Standard error of the median of values, as a fraction of it."""
    middle = statistics.median(values)
    deviation = statistics.median(abs(value - middle) for value in values)
    return _MEDIAN * _SPREAD * deviation / middle / math.sqrt(len(values))
