"""What a class of sizes is expected to take at other rates than it was measured at. Pure."""

import statistics
from collections.abc import Mapping

from ringweave import cost
from ringweave.planning.adapting.situations import Situation
from ringweave.planning.plans import Plan
from ringweave.schedules import HOST

LIKE_HOST = "ring"
"""What the host library is taken for: Gloo and NCCL pass large messages round a ring."""


class Expectation:
    """Formulas corrected by what was measured: a schedule that took 1.1 times its prediction will again.

    So the host library, for which there is no formula, is expected to take what it took, times what a ring takes more
    now than it did. A schedule that was not measured is corrected as those that were, in the middle.
    """

    def __init__(
        self,
        situation: Situation,
        plan: Plan,
        num_bytes: int,
        measured: Mapping[str, float],
        rates: Mapping[str, float],
    ) -> None:
        """`measured` has seconds per byte by schedule, with `plan`, while links had these rates."""
        self._situation, self._plan, self._num_bytes = situation, plan, num_bytes
        self._corrections = {
            name: s_per_byte * num_bytes / self._predicted_s(plan, name, rates) for name, s_per_byte in measured.items()
        }
        known = [correction for name, correction in self._corrections.items() if name != HOST]
        self._usual = statistics.median(known) if known else 1.0

    def now_s(self, name: str, rates: Mapping[str, float]) -> float:
        """Seconds by a schedule of the plan, or the host library, at other rates."""
        return self._predicted_s(self._plan, name, rates) * self._correction(name)

    def best_s(self, fresh: Plan, rates: Mapping[str, float]) -> float:
        """Seconds by the best that trials could find with another plan, made for other rates."""
        found = [choice.predicted_s * self._correction(choice.schedule) for choice in fresh.choices(self._num_bytes)]
        if HOST in self._corrections:
            found.append(self._predicted_s(fresh, HOST, rates) * self._corrections[HOST])
        return min(found)

    def _correction(self, name: str) -> float:
        return self._corrections.get(name, self._usual)

    def _predicted_s(self, plan: Plan, name: str, rates: Mapping[str, float]) -> float:
        """By formula, as the plan runs it."""
        choice = plan.choose(self._num_bytes, LIKE_HOST if name == HOST else name)
        net = self._situation.network(rates)
        where = cost.vertices(net, self._situation.nodes)
        asked = cost.demand(plan.generate(choice.schedule), net, where, self._situation.assumptions)
        return asked.predicted_s(self._num_bytes, num_segments=choice.num_segments, lag=choice.lag)
