"""Memory that the ranks of a node share: each rank shows content in its own, the others read it.

It is made by memfd_create: it has no name, so there is nothing to remove, and it ends with the processes that have it
open, however they end. It does not live in /dev/shm, which containers keep small.
"""

import fcntl
import mmap
import os
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringweave.schedules.programs.staging import NO_STAGE, Layout

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Its size is fixed: nobody can cut off what another rank is reading."""

_GRAIN_BYTES = 2 * 2**20
_NUM_REGIONS = 2
"""Collectives of a lane that may have content in it: while slow readers are at one, the next is under way."""


class Arena:
    """Shared memory of a fixed size, mapped into this process; it ends when nobody refers to it any more."""

    def __init__(self, descriptor: int) -> None:
        """Map what another rank or `make_arena` has made, and take over its descriptor.

        Raises:
            OSError: It is not such memory.
        """
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)  # first of all: whatever fails, it is closed, and once
        os.set_inheritable(descriptor, False)  # what comes over a socket is
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise OSError("shared memory whose size is not fixed")
        self.num_bytes = os.fstat(descriptor).st_size
        self._map = mmap.mmap(descriptor, self.num_bytes)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self.array: Any = np.frombuffer(self._map, dtype=np.uint8)


class ArenaContent:
    """A piece that another rank shows in its arena."""

    def __init__(self, arena: Arena, offset: int, num_bytes: int) -> None:
        """Where it lies, in bytes."""
        self._bytes = arena.tensor[offset : offset + num_bytes]

    def copy_to(self, region: Tensor) -> None:
        """Copied once."""
        region.copy_(self._bytes.view(region.dtype))

    def combine_into(self, region: Tensor, scratch: Tensor, combine: Callable[[Tensor, Tensor], object]) -> None:
        """Straight out of the arena."""
        combine(region, self._bytes.view(region.dtype))


class Showing:
    """What one collective shows, in a region of an arena."""

    def __init__(
        self, arena: Arena, start: int, layout: Layout, element_bytes: int, before: "Showing | None" = None
    ) -> None:
        """`before` is the collective that had the region; its readers have to be through first."""
        self.arena = arena
        self._start = start
        self._layout = layout
        self._element_bytes = element_bytes
        self._before = before
        self._unread = [stage.num_readers for stage in layout.stages]
        self._num_unread = sum(self._unread)
        self._shown = [False] * len(layout.stages)

    @property
    def is_read(self) -> bool:
        """Whether every reader of every stage is through."""
        return self._num_unread == 0

    def place(self, stage: int, payload: Any) -> int | None:
        """Where the content of a stage is shown, in bytes; None while readers are at what was there before."""
        offset = self._start + self._layout.stages[stage].offset * self._element_bytes
        if self._shown[stage]:
            return offset
        if self._before is not None and not self._before.is_read:
            return None
        self._before = None
        if not self._is_free(stage):
            return None
        self.arena.array[offset : offset + payload.nbytes] = payload
        self._shown[stage] = True
        return offset

    def _is_free(self, stage: int) -> bool:
        """Whether all who read what was at its place are through; what was lent never was there, but others before."""
        stages, after = self._layout.stages, self._layout.stages[stage].after
        while after != NO_STAGE and not self._unread[after] and not self._shown[after]:
            after = stages[after].after
        return after == NO_STAGE or not self._unread[after]

    def is_awaited(self, stage: int) -> bool:
        """Whether its place is needed again by the same collective."""
        return self._layout.stages[stage].is_awaited

    def note_read(self, stage: int) -> bool:
        """One reader is through, or needs no memory; True if it was the last."""
        self._unread[stage] -= 1
        self._num_unread -= 1
        return self._unread[stage] == 0


class ShowRoom:
    """A rank's own shared memory, which the collectives of a lane use in turn."""

    def __init__(self) -> None:
        self._arena: Arena | None = None
        self._region_bytes = 0
        self._last: list[Showing | None] = []
        self._num_begun = 0

    def begin(self, layout: Layout, element_bytes: int) -> Showing | None:
        """Where the next collective shows its content; None if it has none to show."""
        if not layout.stages:
            return None
        num_bytes = layout.num_elements * element_bytes
        if self._arena is None or num_bytes > self._region_bytes:
            self._region_bytes = -(-num_bytes // _GRAIN_BYTES) * _GRAIN_BYTES
            self._arena = make_arena(_NUM_REGIONS * self._region_bytes)
            self._last = [None] * _NUM_REGIONS
        region = self._num_begun % _NUM_REGIONS
        self._num_begun += 1
        before = self._last[region]
        if before is not None and before.is_read:
            before = None  # or they would hold each other for ever, where nothing of them is ever shown
        showing = Showing(self._arena, region * self._region_bytes, layout, element_bytes, before)
        self._last[region] = showing
        return showing


def make_arena(num_bytes: int) -> Arena:
    """New shared memory, zeroed when first touched."""
    descriptor = os.memfd_create("ringweave", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, num_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return Arena(descriptor)
