"""Which schedules are tried, and which of them is the fastest: trials by turns, slow ones dropped early. Pure."""

import math
import statistics
from collections.abc import Mapping, Sequence

from ringweave.planning.plans import Plan
from ringweave.schedules import HOST

NUM_CANDIDATES = 3
"""Schedules that are tried beside the host library."""
NUM_ROUNDS, MAX_ROUNDS = 3, 9
"""Measured rounds after the one that warms up; more than the first number only while they take next to no time."""

_AS_GOOD = 1.03
"""Candidates this near to the fastest count as equals, and the one that is predicted to be best is taken."""
_HOPELESS_COLD, _HOPELESS = 2.0, 1.3
"""Dropped at so many times the fastest, after the round that warms up and after the others."""
_CHEAP_S = 0.05
"""Nothing is dropped that takes no more than this beyond the fastest: short times jump, and cost nothing."""
_SHORT_S = 2.0
"""While all rounds together took less, another one is added: seven of four candidates that take 80 ms. Medians of three
such rounds differed by more than candidates do."""


def size_class(num_bytes: int) -> int:
    """Messages of a class take the same schedule: two classes for each doubling of the size."""
    return round(2 * math.log2(max(1, num_bytes)))


def candidates(plan: Plan, num_bytes: int, estimates: Mapping[str, float] | None = None) -> tuple[str, ...]:
    """What is tried for messages of a size: the best three, and the host library.

    Args:
        plan: The group's.
        num_bytes: Size of the message.
        estimates: Seconds by name of schedule, from simulations; nothing if the formulas alone are to say. The first of
            the three is the plan's own choice, whatever they say of it.
    """
    ranked = [plan.choose(num_bytes).schedule]
    ranked += [plan.fastest(estimates), *sorted(estimates, key=estimates.__getitem__)] if estimates else []
    ranked += [choice.schedule for choice in plan.choices(num_bytes)]
    return (*list(dict.fromkeys(ranked))[:NUM_CANDIDATES], HOST)


class Tuner:
    """The trials of one class of sizes.

    The first round warms up (connections, programs, memory). Every other round goes through the candidates backwards,
    so that what changes slowly meets all of them alike. After each round the hopeless ones are dropped: trials are
    the user's own collectives, and a candidate that is twice as slow need not show it three times.
    """

    def __init__(self, candidates: Sequence[str]) -> None:
        """`candidates` are different names, the one that is predicted to be best first.

        Raises:
            ValueError: There are none.
        """
        if not candidates:
            raise ValueError("candidates: none, expected one or more")
        self._left = list(candidates)
        self._seconds: dict[str, list[float]] = {name: [] for name in candidates}
        self._cold: dict[str, float] = {}
        self._queue = list(candidates)
        self._round = 0
        self._spent_s = 0.0
        self._num_bytes = 1

    @property
    def next_trial(self) -> str | None:
        """The candidate whose turn it is; None once it is clear which one is the fastest."""
        is_enough = self._round > (NUM_ROUNDS if self._spent_s > _SHORT_S else MAX_ROUNDS)
        return None if len(self._left) == 1 or is_enough else self._queue[0]

    @property
    def chosen(self) -> str:
        """The fastest one so far; before anything was measured the one that is predicted to be."""
        times = {name: self.typical(name) for name in self._left}
        fastest = min(times.values())
        return next(name for name in self._left if times[name] <= fastest * _AS_GOOD or math.isinf(fastest))

    def typical(self, name: str) -> float:
        """Median of what was measured of a candidate per byte; the first round counts only while it is alone."""
        seconds = self._seconds[name]
        return statistics.median(seconds) if seconds else self._cold.get(name, math.inf)

    def measured(self) -> dict[str, float]:
        """Median seconds per byte of each candidate that was tried, dropped ones too."""
        return {name: self.typical(name) for name in self._seconds if self.typical(name) < math.inf}

    def warm(self) -> dict[str, float]:
        """The same of those that were tried beyond the round that warms up."""
        return {name: statistics.median(seconds) for name, seconds in self._seconds.items() if seconds}

    def observe(self, seconds: float, num_bytes: int) -> None:
        """The trial of `next_trial` took so long; not a number where nobody measured it: it is repeated."""
        if self.next_trial is None or not seconds > 0:
            return
        seconds_per_byte = seconds / num_bytes
        self._num_bytes = num_bytes
        self._spent_s += seconds if self._round else 0.0
        name = self._queue.pop(0)
        if self._round:
            self._seconds[name].append(seconds_per_byte)
        else:
            self._cold[name] = seconds_per_byte
        if not self._queue:
            self._end_round()

    def _end_round(self) -> None:
        fastest = min(self.typical(name) for name in self._left)
        limit = max(fastest * (_HOPELESS if self._round else _HOPELESS_COLD), fastest + _CHEAP_S / self._num_bytes)
        self._left = [name for name in self._left if self.typical(name) <= limit]
        self._round += 1
        self._queue = self._left[::-1] if self._round % 2 else list(self._left)
