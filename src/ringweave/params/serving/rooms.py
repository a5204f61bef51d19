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

    def __init__(self, quick: int, sizes: Sequence[int]) -> None:
        """`quick` is how many rooms quick rings have together; slow ones have one, made when there is such a ring."""
        self._quick, self._slow = Rooms(quick, sizes), Rooms(1, sizes)

    def of(self, *, is_slow: bool) -> Rooms:
        """The rooms of such a ring."""
        return self._slow if is_slow else self._quick

    @property
    def memory_bytes(self) -> int:
        """Bytes of all rooms that were made."""
        return self._quick.memory_bytes + self._slow.memory_bytes
