"""One stream that is measured: at the ends of the window, what the kernel has belongs to what came before."""

import itertools
import socket
from collections.abc import Iterator

import pytest

from ringweave_bench.programs import stream


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """What is sent by the first is there at once, for the second."""
    pair = socket.socketpair()
    yield pair
    for end in pair:
        end.close()


def test_who_was_not_scheduled_still_gets_bytes_and_seconds_that_belong_together(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = ends
    sender.sendall(bytes(50_000))  # came while the receiver stood still
    arriving = iter([0, 10_000, 20_000])  # before it looks at the clock

    def clock() -> float:
        sender.sendall(bytes(next(arriving, 0)))
        return next(times_s)

    times_s = itertools.chain([0.0, 0.5], itertools.repeat(1.0))
    monkeypatch.setattr(stream.time, "monotonic", clock)
    assert stream._count(receiver, bytearray(stream.BLOCK_BYTES), 1.0) == {"bytes": 30_000, "seconds": 1.0}


def test_a_drain_ends_though_more_comes(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = ends
    sender.sendall(bytes(30_000))

    def receive(end: socket.socket, buffer: bytearray) -> int:
        sender.sendall(bytes(10_000))  # as much as is taken
        return end.recv_into(buffer)

    monkeypatch.setattr(stream, "_receive", receive)
    assert stream._drain(receiver, bytearray(10_000)) == 30_000


def test_a_sender_that_hangs_up_is_told(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[0].close()
    with pytest.raises(SystemExit, match="the sender hung up"):
        stream._receive(ends[1], bytearray(10))
