import threading

from ringweave.params.serving.rooms import Rooms


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
    waiting.join(5)
    assert len(got) == 1
    assert len(second) == 2
