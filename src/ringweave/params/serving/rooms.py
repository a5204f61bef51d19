"""Memory that pushes are received into: a fixed number of rooms, used again and again.

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
    """Rooms of one size; whoever needs one while all are taken waits."""

    def __init__(self, count: int, sizes: Sequence[int]) -> None:
        """`sizes` are the bytes of the buffers of one push."""
        self._ends = list(itertools.accumulate(sizes))
        self._sizes = list(sizes)
        self._free = [np.empty(sum(sizes), np.uint8) for _ in range(count)]
        self._changed = threading.Condition()

    def take(self) -> list[memoryview]:
        """A room, as one piece of memory for each buffer."""
        with self._changed:
            self._changed.wait_for(lambda: self._free)
            room = self._free.pop()
        used = room[:]  # what refers to the memory refers to this view of it
        weakref.finalize(used, self._give_back, room)
        return [used.data[end - size : end] for end, size in zip(self._ends, self._sizes, strict=True)]

    def _give_back(self, room: np.ndarray) -> None:
        with self._changed:
            self._free.append(room)
            self._changed.notify()
