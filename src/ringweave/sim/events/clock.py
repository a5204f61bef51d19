"""Virtual time: what happens next, in the order of time and then of asking."""

import heapq
import math
from collections.abc import Callable

Action = Callable[[], None]


class Clock:
    """Events by time; those of one time in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Action]] = []
        self._num_asked = 0

    def at(self, time_s: float, action: Action) -> None:
        """Have something happen at a time, now at the earliest; never if that is infinite."""
        if time_s < math.inf:
            self._num_asked += 1
            heapq.heappush(self._events, (max(time_s, self.now_s), self._num_asked, action))

    def run(self, settle: Action) -> None:
        """Let everything happen; `settle` is called each time before time moves on, and may ask for more."""
        settle()
        while self._events:
            time_s, _, action = heapq.heappop(self._events)
            self.now_s = time_s
            action()
            if not self._events or self._events[0][0] > time_s:
                settle()
