"""Which rings have slow links, by how long their pushes take to arrive."""

import statistics

_SLOW = 3.0
"""So many times the median of all rings is slow."""


class Tempo:
    """Knows the last push of each ring."""

    def __init__(self) -> None:
        self._begun_s: dict[int, float] = {}
        self._took_s: dict[int, float] = {}

    def begin(self, ring: int, now_s: float) -> None:
        """The first bytes of a push are there."""
        self._begun_s[ring] = now_s

    def end(self, ring: int, now_s: float) -> None:
        """The last ones are."""
        begun_s = self._begun_s.pop(ring, None)
        if begun_s is not None:
            self._took_s[ring] = now_s - begun_s

    def is_slow(self, ring: int) -> bool:
        """Whether its last push took much longer than those of most rings; of two rings the lower median counts."""
        took_s = self._took_s.get(ring)
        return took_s is not None and took_s > _SLOW * statistics.median_low(self._took_s.values())
