"""When the links of a pipeline are timed: at once if something may be wrong with them, else as time allows. Pure.

Timing them takes all ranks some messages during which they do nothing else. A link that became slow shows in the train
step, which is longer than computing and the known links explain, or it costs nothing; one that is known to be slow is
looked at until it is given back, which may show nowhere. A device that became slow explains its step itself, and links
whose widest transfer is nothing beside what stages compute are left alone.
"""

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from ringweave.planning.repartitioning.estimating import newest_agreeing
from ringweave.planning.repartitioning.policies import Policy
from ringweave.planning.repartitioning.rulings import Window
from ringweave.planning.repartitioning.searching import Splits
from ringweave.planning.repartitioning.workloads import FELT, Conditions, Workload


class Lookout:
    """Of one pipeline's links."""

    def __init__(self, workload: Workload, policy: Policy) -> None:
        self._workload, self._policy = workload, policy
        num_windows = max(3, policy.every_steps // policy.window_steps)
        self._excess: deque[float] = deque(maxlen=num_windows)
        self._before: tuple[float, ...] = ()
        self._best: tuple[float, ...] = ()
        self._is_slow = False
        self._saved_s = 0.0
        self._took_s = 0.0

    def is_due(self, window: Window, splits: Splits, conditions: Conditions) -> bool:
        """Whether links are to be timed behind this window, which has none of them.

        They are if the train step is longer or shorter, beside what it should take, than since they were timed; and
        where they matter, if one is known to be slow, if they never were, or if it has been so long that the time is
        there.

        Cost: one simulation of a train step.
        """
        excess = self._excess_of(window, splits, conditions)
        usual = statistics.median(self._excess) if self._excess else excess
        self._saved_s += self._policy.probing_share * sum(window.step_s)
        has_changed = abs(excess - usual) > self._policy.min_gain * usual
        if not has_changed:
            self._excess.append(excess)
        is_time = self._saved_s >= self._took_s
        return has_changed or ((is_time or self._is_slow) and any(self._matter(splits, conditions)))

    def looked(self, window: Window, splits: Splits, conditions: Conditions, took_s: float) -> None:
        """They were timed behind this window, which has their rates; everybody stood still for so long.

        `conditions` are those of before. What a link is slower than has to have been seen twice in a row.
        """
        pairs = zip(window.rates, conditions.rates, strict=False)
        rates = tuple(max(row, default=believed) for row, believed in pairs)
        before, best = self._before or conditions.rates, self._best or conditions.rates
        self._best = tuple(map(max, best, map(min, before, rates)))
        self._before = rates
        matter = self._matter(splits, replace(conditions, rates=rates))
        slow = [now * self._policy.drift < best for now, best in zip(rates, self._best, strict=True)]
        self._is_slow = any(is_slow and matters for is_slow, matters in zip(slow, matter, strict=True))
        self._excess.clear()
        self._excess.append(self._excess_of(window, splits, replace(conditions, rates=rates)))
        self._saved_s, self._took_s = 0.0, took_s

    def _excess_of(self, window: Window, splits: Splits, conditions: Conditions) -> float:
        """The measured step over what it should take with stages that compute as in the window, and such links."""
        profiled_s = self._workload.profiled_s(splits)
        measured_s = map(self._usual_s, window.compute_s)
        known = zip(profiled_s, measured_s, conditions.speeds, strict=True)
        speeds = tuple(a / b if a > 0 and b > 0 else believed for a, b, believed in known)
        expected_s = self._workload.step_s(splits, replace(conditions, speeds=speeds))
        return self._usual_s(window.step_s) / expected_s

    def _usual_s(self, row: Sequence[float]) -> float:
        return statistics.median(newest_agreeing(row, self._policy.drift))

    def _matter(self, splits: Splits, conditions: Conditions) -> list[bool]:
        """Of each link: the widest of all cuts would take a part of what the slowest stage computes meanwhile."""
        load = self._workload
        widest = max((*load.forward_bytes[:-1], *load.backward_bytes[:-1]), default=0.0)
        slowest_s = load.times(splits, conditions).slowest_s
        return [widest / rate > FELT * slowest_s for rate in conditions.rates]
