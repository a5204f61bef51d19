"""Memory that pushes are received into, and parameters are sent from: a fixed number of rooms, used again and again.

Fresh memory for each push would not do: it is asked for by a thread of its own every time, and the C library keeps what
each of them frees. A room is free again when nobody refers to what was received into it, whether that was applied, or
the connection broke halfway.
"""

import itertools
import threading
import weakref
from collections.abc import Sequence

import numpy as np


class Rooms:
    """Rooms of one size, made when they are first needed; whoever needs one while all are taken waits."""

    def __init__(self, count: int, sizes: Sequence[int]) -> None:
        """`sizes` are the bytes of the buffers of one push."""
        self._ends = list(itertools.accumulate(sizes))
        self._sizes = list(sizes)
        self._free: list[np.ndarray] = []
        self._num_to_make = count
        self._num_made = 0
        self._changed = threading.Condition()

    @property
    def memory_bytes(self) -> int:
        """Bytes of all rooms that were made."""
        return self._num_made * sum(self._sizes)

    def take(self) -> list[memoryview]:
        """A room, as one piece of memory for each buffer."""
        with self._changed:
            self._changed.wait_for(self._has_one)
            return self._taken()

    def take_nowait(self) -> list[memoryview] | None:
        """Likewise; None if all are taken."""
        with self._changed:
            return self._taken() if self._has_one() else None

    def _has_one(self) -> bool:
        return bool(self._free) or self._num_made < self._num_to_make

    def _taken(self) -> list[memoryview]:
        if self._free:
            room = self._free.pop()
        else:
            room = np.empty(sum(self._sizes), np.uint8)
            self._num_made += 1
        used = room[:]  # what refers to the memory refers to this view of it
        weakref.finalize(used, self._give_back, room)
        return [used.data[end - size : end] for end, size in zip(self._ends, self._sizes, strict=True)]

    def _give_back(self, room: np.ndarray) -> None:
        with self._changed:
            self._free.append(room)
            self._changed.notify()


class Lanes:
    """Rooms for rings whose links are quick, and a room for those that are slow, so that these hold nobody else up."""

    def __init__(self, quick: int, sizes: Sequence[int], *, num_kept: int = 0) -> None:
        """How many rooms there are; each is made when it is first needed.

        Args:
            quick: For what is on its way to quick rings together; slow ones have one for that.
            sizes: Bytes of the buffers of one push.
            num_kept: Rooms in either lane beside those, for what is kept after it was sent: rings that wait for each
                other while all of them keep one must not wait for rooms too.
        """
        self._quick, self._slow = Rooms(quick + num_kept, sizes), Rooms(1 + num_kept, sizes)

    def of(self, *, is_slow: bool) -> Rooms:
        """The rooms of such a ring."""
        return self._slow if is_slow else self._quick

    @property
    def memory_bytes(self) -> int:
        """Bytes of all rooms that were made."""
        return self._quick.memory_bytes + self._slow.memory_bytes
