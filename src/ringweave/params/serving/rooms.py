"""Memory that pushes are received into, and parameters are sent from: a fixed number of rooms, used again and again.

Fresh memory for each push would not do: it is asked for by a thread of its own every time, and the C library keeps what
each of them frees. A room is free again when nobody refers to what was received into it, whether that was applied, or
the connection broke halfway.

Whoever stops in the midst of a push holds its room until the connection is cut, which may take minutes. The others do
not wait for that: a room that is held for too long is counted as lost, and another one is made in its place.
"""

import itertools
import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import numpy as np

_LOOK_S = 0.1
"""How often a waiting thread looks whether a room is held for too long."""


class Rooms:
    """Rooms of one size, made when they are first needed; whoever needs one while all are taken waits."""

    def __init__(
        self,
        count: int,
        sizes: Sequence[int],
        *,
        patience_s: Callable[[], float] = lambda: math.inf,
        most: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """No memory is taken yet.

        Args:
            count: How many rooms there are.
            sizes: Bytes of the buffers of one push.
            patience_s: How long one may be held now, before another one is made in its place.
            most: How many there may be at once, those in place of held ones included; None means `count`.
            clock: Gives seconds.
        """
        self._ends = list(itertools.accumulate(sizes))
        self._sizes = list(sizes)
        self._count, self._most = count, most or count
        self._patience_s, self._clock = patience_s, clock
        self._free: list[np.ndarray] = []
        self._held: dict[int, float] = {}
        """Number of each room that is taken -> since when."""
        self._numbers = itertools.count()
        self._changed = threading.Condition()

    @property
    def memory_bytes(self) -> int:
        """Bytes of all rooms that there are."""
        with self._changed:
            return (len(self._held) + len(self._free)) * sum(self._sizes)

    def take(self) -> list[memoryview]:
        """A room, as one piece of memory for each buffer."""
        with self._changed:
            while not self._has_one():
                self._changed.wait(_LOOK_S)
            return self._taken()

    def take_nowait(self) -> list[memoryview] | None:
        """Likewise; None if all are taken."""
        with self._changed:
            return self._taken() if self._has_one() else None

    def _has_one(self) -> bool:
        if self._free:
            return True
        patience_s, now_s = self._patience_s(), self._clock()
        num_used = sum(now_s - since_s < patience_s for since_s in self._held.values())
        return num_used < self._count and len(self._held) < self._most

    def _taken(self) -> list[memoryview]:
        room = self._free.pop() if self._free else np.empty(sum(self._sizes), np.uint8)
        used, number = room[:], next(self._numbers)  # what refers to the memory refers to this view of it
        self._held[number] = self._clock()
        weakref.finalize(used, self._give_back, number, room)
        return [used.data[end - size : end] for end, size in zip(self._ends, self._sizes, strict=True)]

    def _give_back(self, number: int, room: np.ndarray) -> None:
        with self._changed:
            del self._held[number]
            if len(self._held) + len(self._free) < self._count:
                self._free.append(room)
            self._changed.notify()


class Lanes:
    """Rooms for rings whose links are quick, and a room for those that are slow, so that these hold nobody else up."""

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        num_rings: int,
        num_kept: int = 0,
        patience_s: Callable[[], float] = lambda: math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """One room for what is on its way to or from quick rings, one for slow ones; made when they are first needed.

        Args:
            sizes: Bytes of the buffers of one push.
            num_rings: How many rings there are: as many may have stopped in the midst of a push.
            num_kept: Rooms in either lane beside those, for what is kept after it was sent: rings that wait for each
                other while all of them keep one must not wait for rooms too.
            patience_s: As `Rooms` has it; not looked at where rooms are kept.
            clock: Gives seconds.
        """
        count, wait_s = 1 + num_kept, (lambda: math.inf) if num_kept else patience_s
        self._quick, self._slow = (
            Rooms(count, sizes, patience_s=wait_s, most=count + num_rings, clock=clock) for _ in range(2)
        )

    def of(self, *, is_slow: bool) -> Rooms:
        """The rooms of such a ring."""
        return self._slow if is_slow else self._quick

    @property
    def memory_bytes(self) -> int:
        """Bytes of all rooms that there are."""
        return self._quick.memory_bytes + self._slow.memory_bytes
