"""When the links of a pipeline are timed: at once if something may be wrong with them, else as time allows. Pure.

Timing them takes all ranks some messages during which they do nothing else. A link that became slow shows in the train
step, or costs nothing; one that is known to be slow is looked at until it is given back, which may show nowhere.
"""

import statistics

from ringweave.planning.repartitioning.estimating import newest_agreeing
from ringweave.planning.repartitioning.policies import Policy
from ringweave.planning.repartitioning.rulings import Window


class Lookout:
    """Of one pipeline's links."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._splits: tuple[int, ...] | None = None
        self._usual_s = 0.0
        self._best_rates: tuple[float, ...] = ()
        self._is_slow = False
        self._saved_s = 0.0
        self._took_s = 0.0

    def is_due(self, window: Window, splits: tuple[int, ...]) -> bool:
        """Whether links are to be timed behind this window, which has none of them.

        They are, in the first window under a partition, if train steps have changed since they were timed, if a link is
        known to be slow, or if it has been so long that the time is there.
        """
        step_s = self._step_s(window)
        self._saved_s += self._policy.probing_share * step_s * len(window.step_s)
        has_changed = abs(step_s - self._usual_s) > self._policy.min_gain * self._usual_s
        return splits != self._splits or has_changed or self._is_slow or self._saved_s >= self._took_s

    def looked(self, window: Window, splits: tuple[int, ...], took_s: float) -> None:
        """They were timed behind this window, which has their rates; everybody stood still for so long."""
        rates = tuple(max(row, default=0.0) for row in window.rates)
        best = self._best_rates or rates
        self._best_rates = tuple(map(max, best, rates))
        self._is_slow = any(now * self._policy.drift < best for now, best in zip(rates, self._best_rates, strict=True))
        self._splits, self._usual_s = splits, self._step_s(window)
        self._saved_s, self._took_s = 0.0, took_s

    def _step_s(self, window: Window) -> float:
        return statistics.median(newest_agreeing(window.step_s, self._policy.drift))
