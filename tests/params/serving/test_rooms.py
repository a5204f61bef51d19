"""Memory for pushes: bounded, given back when nobody refers to it, and a lane for slow rings."""

import threading

from ringweave.params.serving.rooms import Lanes, Rooms


def test_a_room_is_free_when_nobody_refers_to_it():
    rooms = Rooms(2, [8, 3])
    first, second = rooms.take(), rooms.take()
    assert [len(buffer) for buffer in first] == [8, 3]
    got: list[object] = []
    waiting = threading.Thread(target=lambda: got.append(rooms.take()))
    waiting.start()
    part = first[1][1:]
    del first
    assert not got  # a part of it is still referred to
    del part
    waiting.join(60)
    assert len(got) == 1
    assert len(second) == 2


def test_rooms_are_made_when_they_are_needed():
    rooms = Rooms(2, [8, 3])
    assert rooms.memory_bytes == 0
    first = rooms.take_nowait()
    assert rooms.memory_bytes == 11
    second = rooms.take_nowait()
    assert rooms.take_nowait() is None
    assert rooms.memory_bytes == 22
    del first, second
    assert rooms.take_nowait() is not None
    assert rooms.memory_bytes == 22


def test_a_room_that_is_held_for_too_long_is_made_good():
    now_s = 0.0
    rooms = Rooms(1, [8], patience_s=lambda: 2.0, most=3, clock=lambda: now_s)
    stopped = rooms.take_nowait()
    now_s = 1.9
    assert rooms.take_nowait() is None
    now_s = 2.1
    second = rooms.take_nowait()
    assert second is not None
    assert rooms.take_nowait() is None
    now_s = 5.0
    third = rooms.take_nowait()
    assert third is not None
    now_s = 9.0
    assert rooms.take_nowait() is None  # as many as there may be
    assert rooms.memory_bytes == 24
    del stopped, second
    assert rooms.memory_bytes == 8  # those in place of others are not kept
    del third
    assert rooms.memory_bytes == 8


def test_whoever_waits_gets_a_room_when_its_holder_has_stopped():
    rooms = Rooms(1, [8], patience_s=lambda: 0.3, most=2)
    stopped, got = rooms.take(), []
    waiting = threading.Thread(target=lambda: got.append(rooms.take()))
    waiting.start()
    waiting.join(60)
    assert len(got) == 1
    assert stopped


def test_slow_rings_hold_nobody_up():
    lanes = Lanes([8], num_rings=2)
    slow = lanes.of(is_slow=True).take_nowait()
    assert lanes.of(is_slow=True).take_nowait() is None
    assert lanes.of(is_slow=False).take_nowait() is not None
    assert slow is not None
    assert lanes.memory_bytes == 16
