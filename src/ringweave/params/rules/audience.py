"""Which rings a server hears: what it knows of its own network when it does not hear the other server. Pure."""

from collections.abc import Collection
from enum import Enum, auto


class Reach(Enum):
    """What a server hears of rings."""

    NOBODY = auto()
    """None: nobody needs it, or its node is cut off."""
    SOME = auto()
    """Few, or none but those of its own node, which it would hear without any network."""
    MOST = auto()
    """More than half of those that there are, and at least one from another node."""


class Audience:
    """Who was heard when."""

    def __init__(self, fresh_s: float) -> None:
        """`fresh_s`: what was heard so long ago does not count any more. Rings speak several times in that."""
        self._fresh_s = fresh_s
        self._heard: dict[int, float] = {}
        self._elsewhere_s: float | None = None

    def heard(self, ring: int, at_s: float, *, is_elsewhere: bool) -> None:
        """A worker of the ring has spoken, from this node or elsewhere; any number while no rings are known."""
        self._heard[ring] = at_s
        if is_elsewhere:
            self._elsewhere_s = at_s

    def fresh(self, now_s: float) -> set[int]:
        """The rings that were heard lately."""
        return {ring for ring, at_s in self._heard.items() if now_s - at_s < self._fresh_s}

    def reach(self, rings: Collection[int], now_s: float) -> Reach:
        """What is heard of the rings that there are; of none as long as they are not known: then anybody counts."""
        fresh = self.fresh(now_s)
        if not fresh:
            return Reach.NOBODY
        if self._elsewhere_s is None or now_s - self._elsewhere_s >= self._fresh_s:
            return Reach.SOME
        return Reach.MOST if not rings or 2 * len(fresh.intersection(rings)) > len(rings) else Reach.SOME
