"""How fast a large state is read: at full speed, or so that others who use the same links hardly notice."""

import threading
from collections.abc import Callable
from typing import Protocol

from ringweave.errors import DeadlineError, explain

CHUNK_BYTES = 4 << 20
"""Large enough that asking costs nothing, small enough that a lost connection loses little."""
WINDOW = 3
"""Chunks under way at once: one arrives, one leaves, one is asked for."""


class Pace(Protocol):
    """Says how much to ask for next, and hears how long it took."""

    @property
    def window(self) -> int:
        """Chunks that are under way at once."""
        ...

    @property
    def chunk_bytes(self) -> int:
        """Of the next chunk, at most."""
        ...

    def wait(self, num_bytes: int, seconds: float) -> None:
        """A chunk of so many bytes has taken so long; returns when the next one may be asked for."""
        ...


class FullSpeed:
    """Nobody else needs the link."""

    window, chunk_bytes = WINDOW, CHUNK_BYTES

    def wait(self, num_bytes: int, seconds: float) -> None:
        """At once."""


_LEAST_BYTES = 64 << 10
_CHUNK_S = 0.05
"""A chunk takes about so long: short beside a train step, long beside what a limited link lets through at once."""
_SLOW = 0.7
"""Of the best rate so far: below it somebody else uses the link. Half of it, beside one other stream, is below it for a
while after the best rate was seen; pieces that come a little late are not."""
_FORGET = 0.98
"""Of the best rate, with each chunk: what a link could do once it may not be able to do now."""
_RESTED_S = 0.02
"""After a pause, what the link has saved up is through when chunks have taken so long: it passes in no time."""
_MOST_S = 2.0
"""No pause is longer: a chunk that took seconds was held up by something else, such as a link that was cut."""
_LOOK_S = 0.1
"""After which a pause looks whether there is haste by now."""
_YIELD = 3.0
"""After a slow chunk nothing is asked for that many times as long as it took: with half of the link while a chunk is
under way, an eighth of it all in all."""


class GivingWay:
    """One chunk after another; where they come slowly, since others use the link, with pauses in between.

    So a link that is idle between two bursts of collectives is used there, and the collectives keep most of it.

    How fast the link is, the first chunks do not say, nor those after a pause: one that is limited by a token bucket
    lets so much through at once then that later ones would seem slow, though nobody else is there. Such chunks show
    only whether others are.
    """

    window = 1

    def __init__(self, haste: Callable[[], float], ended: threading.Event) -> None:
        """`haste` is between 0, give way, and 1, no time for that; once `ended` is set nothing more is read."""
        self._haste, self._ended = haste, ended
        self._best = self._last = 0.0
        self._busy_s = 0.0
        """What chunks have taken since the last pause."""
        self._num_bytes, self._seconds = 0, 0.0

    @property
    def chunk_bytes(self) -> int:
        """What arrives in a twentieth of a second."""
        return max(_LEAST_BYTES, min(CHUNK_BYTES, round(self._last * _CHUNK_S)))

    def wait(self, num_bytes: int, seconds: float) -> None:
        """Give way, if others seem to use the link.

        Raises:
            DeadlineError: It is not needed any more.
        """
        waited_s, longest_s = 0.0, self._longest_s(num_bytes, seconds)
        while not self._ended.wait(look_s := min(_LOOK_S, self._left_s(longest_s, waited_s))):
            if look_s == 0:
                break
            waited_s, self._busy_s = waited_s + look_s, 0.0
        else:
            raise DeadlineError(explain("state", got="unfinished", expected="all of it", do="It was given up"))

    def _left_s(self, longest_s: float, waited_s: float) -> float:
        """Of a pause, with the haste that there is by now."""
        return max(0.0, longest_s * (1.0 - min(1.0, max(0.0, self._haste()))) - waited_s) if longest_s > 0 else 0.0

    def pause_s(self, num_bytes: int, seconds: float) -> float:
        """Seconds until the next chunk may be asked for, if haste stays what it is."""
        pause_s = self._left_s(self._longest_s(num_bytes, seconds), 0.0)
        if pause_s > 0:
            self._busy_s = 0.0
        return pause_s

    def _longest_s(self, num_bytes: int, seconds: float) -> float:
        """The same without haste."""
        self._num_bytes, self._seconds = self._num_bytes + num_bytes, self._seconds + seconds
        if self._num_bytes < _LEAST_BYTES or self._seconds <= 0:  # a few bytes say nothing of the link
            return 0.0
        took_s, rate = self._seconds, self._num_bytes / self._seconds
        self._num_bytes, self._seconds = 0, 0.0
        self._best *= _FORGET
        if self._busy_s >= _RESTED_S:
            self._last, self._best = rate, max(rate, self._best)
        self._busy_s += took_s
        if rate >= _SLOW * self._best:
            return 0.0
        return min(_MOST_S, _YIELD * took_s)
