"""The shared memory itself, without a peer."""

import gc
import os
import threading
import weakref

import pytest

from ringweave.comm.transport import shared_memory
from tests.comm.transport.test_shared import layout


def test_the_size_of_an_arena_is_fixed() -> None:
    arena = shared_memory.make_arena(4096)
    with pytest.raises(PermissionError):
        os.ftruncate(arena.descriptor, 0)


def test_what_is_read_is_not_kept_even_if_nothing_was_shown() -> None:
    room, seen = shared_memory.ArenaPool(), []
    for _ in range(5):
        showing = room.begin_collective(layout(1, size=10), 4)
        assert showing is not None
        showing.record_read(0)  # by a rank that was reached over TCP
        seen.append(weakref.ref(showing))
    del showing
    assert [ref() is None for ref in seen] == [True, True, True, False, False]


def test_memory_that_cannot_be_mapped_is_closed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # what earlier tests left must not go in between
    closed: list[int] = []
    close, own_thread = os.close, threading.get_ident()

    def note(descriptor: int) -> None:
        if threading.get_ident() == own_thread:  # others may have something to close, too
            closed.append(descriptor)
        close(descriptor)

    monkeypatch.setattr(os, "close", note)

    def refuse(*_: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(shared_memory.mmap, "mmap", refuse)
    with pytest.raises(OSError, match="no room"):
        shared_memory.make_arena(4096)
    gc.collect()
    assert len(closed) == 1
