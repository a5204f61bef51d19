"""How long a frame may stand still on its way, on a clock of its own."""

import socket
import threading
from collections.abc import Iterator

import pytest

from ringweave.errors import DeadlineError
from ringweave.rpc.channel import RpcChannel
from ringweave.rpc.framing import FrameKind, RpcLimits

CONTENT = bytes(32 << 20)
"""More than the kernel holds."""


class Sending:
    """A channel, and what becomes of it where it has to wait: the clock goes on so far, then the other end reads."""

    def __init__(self, stands_s: float) -> None:
        here, self.there = socket.socketpair()
        self.now_s = 0.0
        self.channel = RpcChannel(here, RpcLimits(), "there", lambda: self.now_s)
        self._poll, self._stands_s = self.channel._poll, stands_s
        self.channel._poll = self.wait
        self.num_waits = 0
        self.reader = threading.Thread(target=self.read)

    def wait(self, events: int, timeout_s: float | None) -> bool:
        self.num_waits += 1
        if self.num_waits == 2:  # the first one is for a socket that takes something
            self.now_s += self._stands_s
            self.reader.start()
        return self._poll(events, timeout_s)

    def read(self) -> None:
        while self.there.recv(1 << 20):
            pass

    def send(self, timeout_s: float) -> None:
        self.channel.send(FrameKind.CALL, call=1, name="push", buffers=[CONTENT], timeout_s=timeout_s)

    def close(self) -> None:
        self.channel.close()
        if self.num_waits > 1:
            self.reader.join()
        self.there.close()


@pytest.fixture
def long_wait() -> Iterator[Sending]:
    sending = Sending(10 * RpcLimits().frame_timeout_s(len(CONTENT)))
    yield sending
    sending.close()


def test_a_frame_that_waits_for_room_has_the_time_of_its_call(long_wait: Sending) -> None:
    long_wait.send(timeout_s=20 * RpcLimits().frame_timeout_s(len(CONTENT)))
    assert long_wait.num_waits >= 2


@pytest.mark.parametrize("timeout_s", [0.0, 30.0])
def test_no_frame_waits_longer_than_its_call(long_wait: Sending, timeout_s: float) -> None:
    with pytest.raises(DeadlineError, match="used up in the middle of a frame; the connection is cut"):
        long_wait.send(timeout_s)


def test_a_channel_is_not_closed_in_the_middle_of_a_record_that_another_thread_writes() -> None:
    """The rest of the record would go to the next connection with the descriptor."""
    here, there = socket.socketpair()
    channel = RpcChannel(here, RpcLimits(), "there")
    closing = threading.Thread(target=channel.close)
    with channel._tls_lock:
        closing.start()
        assert there.recv(1) == b"", "it is shut down at once"
        assert here.fileno() >= 0
    closing.join()
    assert here.fileno() == -1
    there.close()
