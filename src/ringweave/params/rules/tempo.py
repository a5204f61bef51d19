"""Which rings have slow links, by how long their pushes take to arrive."""

import statistics
from collections import deque

_SLOW = 3.0
"""So many times the median of all rings is slow."""
_LATEST = 3
_ENOUGH = 2
"""Pushes that are looked at, and that are needed: one takes long when others share the link with it; on a slow link
all do, so that the shortest of them counts."""
_PATIENT = 5.0
_PATIENCE_S = 2.0
_FIRST_PATIENCE_S = 10.0
"""A push that takes so many times the usual, and this at least, has stopped; the last where nothing is known yet."""


class Tempo:
    """Knows the last pushes of each ring."""

    def __init__(self) -> None:
        self._begun_s: dict[int, float] = {}
        self._took_s: dict[int, deque[float]] = {}
        self.patience_s = _FIRST_PATIENCE_S
        """How long a push may take before the others do not wait for it any more; any thread may read it."""

    def begin(self, ring: int, now_s: float) -> None:
        """The first bytes of a push are there."""
        self._begun_s[ring] = now_s

    def end(self, ring: int, now_s: float) -> None:
        """The last ones are."""
        begun_s = self._begun_s.pop(ring, None)
        if begun_s is not None:
            self._took_s.setdefault(ring, deque(maxlen=_LATEST)).append(now_s - begun_s)
            usual_s = statistics.median_high(min(took_s) for took_s in self._took_s.values())
            self.patience_s = max(_PATIENCE_S, _PATIENT * usual_s)

    def is_slow(self, ring: int) -> bool:
        """Whether its pushes take much longer than those of most rings; of two rings the lower median counts.

        Even the shortest of its own does, beside what is usual of each other ring, not beside the shortest of that: of
        a push that had to wait for its turn much has come meanwhile, so that the rest may take no time at all.
        """
        known = {each: took_s for each, took_s in self._took_s.items() if len(took_s) >= _ENOUGH}
        usual_s = [statistics.median_low(took_s) for took_s in known.values()]
        return ring in known and min(known[ring]) > _SLOW * statistics.median_low(usual_s)
