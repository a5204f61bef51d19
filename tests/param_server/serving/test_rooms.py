"""Memory for pushes: bounded, given back when nobody refers to it, and a lane for slow rings."""

import threading

from ringweave.param_server.job import BufferPool, LinkBufferPools


def test_a_room_is_free_when_nobody_refers_to_it():
    rooms = BufferPool(2, [8, 3])
    first, second = rooms.acquire(), rooms.acquire()
    assert [len(buffer) for buffer in first] == [8, 3]
    got: list[object] = []
    waiting = threading.Thread(target=lambda: got.append(rooms.acquire()))
    waiting.start()
    part = first[1][1:]
    del first
    assert not got  # a part of it is still referred to
    del part
    waiting.join(60)
    assert len(got) == 1
    assert len(second) == 2


def test_rooms_are_made_when_they_are_needed():
    rooms = BufferPool(2, [8, 3])
    assert rooms.memory_bytes == 0
    first = rooms.acquire_nowait()
    assert rooms.memory_bytes == 11
    second = rooms.acquire_nowait()
    assert rooms.acquire_nowait() is None
    assert rooms.memory_bytes == 22
    del first, second
    assert rooms.acquire_nowait() is not None
    assert rooms.memory_bytes == 22


def test_a_room_that_is_held_for_too_long_is_made_good():
    now_s = 0.0
    rooms = BufferPool(1, [8], max_held_s=lambda: 2.0, max_count=3, clock=lambda: now_s)
    stopped = rooms.acquire_nowait()
    now_s = 1.9
    assert rooms.acquire_nowait() is None
    now_s = 2.1
    second = rooms.acquire_nowait()
    assert second is not None
    assert rooms.acquire_nowait() is None
    now_s = 5.0
    third = rooms.acquire_nowait()
    assert third is not None
    now_s = 9.0
    assert rooms.acquire_nowait() is None  # as many as there may be
    assert rooms.memory_bytes == 24
    del stopped, second
    assert rooms.memory_bytes == 8  # those in place of others are not kept
    del third
    assert rooms.memory_bytes == 8


def test_whoever_waits_gets_a_room_when_its_holder_has_stopped():
    rooms = BufferPool(1, [8], max_held_s=lambda: 0.3, max_count=2)
    stopped, got = rooms.acquire(), []
    waiting = threading.Thread(target=lambda: got.append(rooms.acquire()))
    waiting.start()
    waiting.join(60)
    assert len(got) == 1
    assert stopped


def test_slow_rings_hold_nobody_up():
    lanes = LinkBufferPools([8], num_rings=2)
    slow = lanes.pool_for(is_slow=True).acquire_nowait()
    assert lanes.pool_for(is_slow=True).acquire_nowait() is None
    assert lanes.pool_for(is_slow=False).acquire_nowait() is not None
    assert slow is not None
    assert lanes.memory_bytes == 16
