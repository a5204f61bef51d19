"""Where the ranks' own work is done."""

import heapq


class OwnProcessors:
    """Each rank has one for itself."""

    def work(self, now_s: float, seconds: float) -> float:
        """When work that is ready now is done."""
        return now_s + seconds


class SharedProcessors:
    """All ranks share a few: whoever is ready first is served first."""

    def __init__(self, count: int) -> None:
        self._free_s = [0.0] * count

    def work(self, now_s: float, seconds: float) -> float:
        """When work that is ready now is done."""
        done_s = max(now_s, self._free_s[0]) + seconds
        heapq.heapreplace(self._free_s, done_s)
        return done_s
