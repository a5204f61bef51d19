"""What a class of sizes is expected to take at other rates than it was measured at. Pure."""

import statistics
from collections.abc import Mapping

from ringweave import cost
from ringweave.planning.adapting.situations import Situation
from ringweave.planning.plans import Plan
from ringweave.schedules import HOST

LIKE_HOST = "ring"
"""What the host library is taken for: Gloo and NCCL pass large messages round a ring."""


class Formulas:
    """Predicted seconds of plans at any rates; what schedules ask of links is counted once for all sizes.

    Plans are told apart as objects: those that were asked for have to last as long as this.
    """

    def __init__(self, situation: Situation) -> None:
        self._situation = situation
        self._demands: dict[tuple[int, str, tuple[tuple[str, float], ...]], cost.Demand] = {}

    def predicted_s(self, plan: Plan, name: str, num_bytes: int, rates: Mapping[str, float]) -> float:
        """Of a schedule, or the host library, as the plan runs it."""
        choice = plan.choose(num_bytes, LIKE_HOST if name == HOST else name)
        key = id(plan), choice.schedule, tuple(sorted(rates.items()))
        if key not in self._demands:
            net = self._situation.network(rates)
            where = cost.vertices(net, self._situation.nodes)
            schedule = plan.generate(choice.schedule)
            self._demands[key] = cost.demand(schedule, net, where, self._situation.assumptions)
        return self._demands[key].predicted_s(num_bytes, num_segments=choice.num_segments, lag=choice.lag)


class Expectation:
    """Formulas corrected by what was measured: a schedule that took 1.1 times its prediction will again.

    So the host library, for which there is no formula, is expected to take what it took, times what a ring takes more
    now than it did. A schedule that was not measured is corrected as those that were, in the middle.
    """

    def __init__(
        self,
        formulas: Formulas,
        plan: Plan,
        num_bytes: int,
        measured: Mapping[str, float],
        rates: Mapping[str, float],
    ) -> None:
        """`measured` has seconds per byte by schedule, with `plan`, while links had these rates."""
        self._formulas, self._plan, self._num_bytes = formulas, plan, num_bytes
        self._corrections = {
            name: s_per_byte * num_bytes / formulas.predicted_s(plan, name, num_bytes, rates)
            for name, s_per_byte in measured.items()
        }
        known = [correction for name, correction in self._corrections.items() if name != HOST]
        self._usual = statistics.median(known) if known else 1.0

    def now_s(self, name: str, rates: Mapping[str, float]) -> float:
        """Seconds by a schedule of the plan, or the host library, at other rates."""
        return self._formulas.predicted_s(self._plan, name, self._num_bytes, rates) * self._correction(name)

    def best_s(self, fresh: Plan, rates: Mapping[str, float]) -> float:
        """Seconds by the best that trials could find with another plan, made for other rates."""
        found = [choice.predicted_s * self._correction(choice.schedule) for choice in fresh.choices(self._num_bytes)]
        if HOST in self._corrections:
            by_host_s = self._formulas.predicted_s(fresh, HOST, self._num_bytes, rates)
            found.append(by_host_s * self._corrections[HOST])
        return min(found)

    def _correction(self, name: str) -> float:
        return self._corrections.get(name, self._usual)
