"""How long the first rank may think about what was measured, while all others wait."""

import time
from collections.abc import Callable


class Thinking:
    """Processor time that is left for the next decision, and for all of them.

    What it costs to look for switches depends on the cluster, and grows faster than the number of nodes. Whoever looks
    for them asks `is_over` now and then, and is content with what it has once that is so. Processor time, not the time
    that passes: a busy machine thinks no worse, only later.
    """

    def __init__(self, step_s: float, total_s: float, clock: Callable[[], float] = time.thread_time) -> None:
        """`step_s` and `total_s` are seconds by the clock, which is that of the thread that thinks."""
        self._step_s = step_s
        self._clock = clock
        self._begun_s = clock()
        self._end_s = self._begun_s + total_s
        self.was_cut_short = False
        """Somebody was told that it is over."""

    def begin(self) -> None:
        """The next decision."""
        self._begun_s = self._clock()

    @property
    def is_over(self) -> bool:
        """Whether the time of this decision, or of all, is spent."""
        now_s = self._clock()
        self.was_cut_short |= now_s > min(self._end_s, self._begun_s + self._step_s)
        return self.was_cut_short
