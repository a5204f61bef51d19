"""Buffer pools for received pushes and sent parameters: a fixed number of buffers, used again and again.

Fresh memory for each push would be allocated by a different thread every time, and the C library retains part of
the memory that each thread frees. A buffer is free again when nothing refers to the data received into it, whether
they were applied or the connection broke halfway.

A ring that stops in the middle of a push holds its buffer until the connection is cut, which may take minutes.
Other rings do not wait for that: a buffer that is held for too long is counted as lost, and another one is
allocated in its place.
"""

import itertools
import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import numpy as np

_HELD_CHECK_S = 0.1
"""Interval in which a waiting thread checks whether a buffer is held for too long."""


class BufferPool:
    """Pool of buffers of one size, allocated on demand; a caller waits while all are in use."""

    def __init__(
        self,
        count: int,
        sizes: Sequence[int],
        *,
        max_held_s: Callable[[], float] = lambda: math.inf,
        max_count: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Store the arguments; allocate nothing yet.

        Args:
            count: Number of buffers.
            sizes: Bytes of the parts of one push.
            max_held_s: Returns how long a buffer may be held, before another one is allocated in its place.
            max_count: Maximum number at once, including those in place of held ones; None means `count`.
            clock: Returns seconds.
        """
        self._ends = list(itertools.accumulate(sizes))
        self._sizes = list(sizes)
        self._count, self._max_count = count, max_count or count
        self._max_held_s, self._clock = max_held_s, clock
        self._free: list[np.ndarray] = []
        self._held: dict[int, float] = {}
        """Number of each buffer in use -> since when."""
        self._numbers = itertools.count()
        self._changed = threading.Condition()

    @property
    def memory_bytes(self) -> int:
        with self._changed:
            return (len(self._held) + len(self._free)) * sum(self._sizes)

    def acquire(self) -> list[memoryview]:
        """Return a buffer, as one piece of memory for each part; wait for one if all are in use."""
        with self._changed:
            while not self._is_available():
                self._changed.wait(_HELD_CHECK_S)
            return self._acquire()

    def acquire_nowait(self) -> list[memoryview] | None:
        """Return a buffer; None if all are in use."""
        with self._changed:
            return self._acquire() if self._is_available() else None

    def _is_available(self) -> bool:
        if self._free:
            return True
        max_held_s, now_s = self._max_held_s(), self._clock()
        num_used = sum(now_s - since_s < max_held_s for since_s in self._held.values())
        return num_used < self._count and len(self._held) < self._max_count

    def _acquire(self) -> list[memoryview]:
        buffer = self._free.pop() if self._free else np.empty(sum(self._sizes), np.uint8)
        used, number = buffer[:], next(self._numbers)  # all references to the memory go through this view
        self._held[number] = self._clock()
        weakref.finalize(used, self._release, number, buffer)
        return [used.data[end - size : end] for end, size in zip(self._ends, self._sizes, strict=True)]

    def _release(self, number: int, buffer: np.ndarray) -> None:
        with self._changed:
            del self._held[number]
            if len(self._held) + len(self._free) < self._count:
                self._free.append(buffer)
            self._changed.notify()


class LinkBufferPools:
    """Two buffer pools: one for rings with quick links, one for slow rings, which so delay no other ring."""

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        num_rings: int,
        num_kept: int = 0,
        max_held_s: Callable[[], float] = lambda: math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make a pool of one buffer for quick rings and one for slow ones, allocated on demand.

        Args:
            sizes: Bytes of the parts of one push.
            num_rings: Number of rings: as many may stop in the middle of a push.
            num_kept: Additional buffers in either pool, for data kept after it was sent: rings that wait for each other
                while each keeps one must not wait for buffers too.
            max_held_s: As in `BufferPool`; ignored where buffers are kept.
            clock: Returns seconds.
        """
        count, wait_s = 1 + num_kept, (lambda: math.inf) if num_kept else max_held_s
        self._quick, self._slow = (
            BufferPool(count, sizes, max_held_s=wait_s, max_count=count + num_rings, clock=clock) for _ in range(2)
        )

    def pool_for(self, *, is_slow: bool) -> BufferPool:
        """Return the pool for slow or for quick rings."""
        return self._slow if is_slow else self._quick

    @property
    def memory_bytes(self) -> int:
        return self._quick.memory_bytes + self._slow.memory_bytes
