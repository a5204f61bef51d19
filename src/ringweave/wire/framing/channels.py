"""Frames over one socket, encrypted or not: any number of threads send, one receives, each wait ends in time.

The socket does not block; who would have to wait sleeps in `poll`. A connection of TLS is one state machine that two
threads may not enter at once, so each read and write of a record holds a lock, for microseconds; nobody sleeps with it.
Buffers go from the caller's memory into the record and from the record into the receiver's memory: no other copy.
"""

import contextlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from typing_extensions import Buffer

from ringweave.errors import ConnectionLostError, DeadlineError, WireError, explain
from ringweave.wire.framing import frames
from ringweave.wire.framing.frames import FrameKind, Head, Prefix
from ringweave.wire.framing.limits import Limits
from ringweave.wire.metrics import Traffic

_PIECE_BYTES = 1 << 20
_STANDING_S = 0.5
"""Who takes nothing for so long has no room for it, or a slow link, or is no more."""
_AGAIN = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


@dataclass(slots=True)
class _Moving:
    """Until when a frame that is being sent has time."""

    deadline: float
    """While it moves."""
    last: float
    """While the other end takes nothing."""

    def stood(self, seconds: float) -> None:
        """For so long nothing was taken."""
        if seconds >= _STANDING_S:
            self.deadline = min(self.last, self.deadline + seconds)


class Channel:
    """One connection, from the handshake on."""

    def __init__(
        self, sock: socket.socket, limits: Limits, where: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`where` names the other end in errors; `limits` are what is taken from it."""
        sock.setblocking(False)
        self.where = where
        self.limits = limits
        self.traffic = Traffic()
        self._sock = sock
        self._clock = clock
        self._state = threading.Lock()
        self._sending = threading.Lock()
        self._cut = ""
        self.is_hung_up = False
        """The other end's kernel has ended it: its process closed the connection, or is no more."""

    def send(
        self,
        kind: FrameKind,
        *,
        call: int = 0,
        name: str = "",
        body: bytes = b"",
        buffers: Sequence[Buffer] = (),
        timeout_s: float = 0.0,
    ) -> None:
        """Send a frame; when this returns, its buffers may change.

        `timeout_s` is for all of it. While it moves it has the time of its bytes (`Limits.frame_s`). While the
        other end has no room and takes nothing, `timeout_s` alone counts; without one that is the time of its bytes.

        Raises:
            DeadlineError: The other end does not take it. If part of it is under way, the connection is cut.
            ConnectionLostError: The connection broke.
            MessageError: A buffer is not contiguous.
        """
        views = [frames.flat(buffer) for buffer in buffers]
        sizes = [view.nbytes for view in views]
        head = frames.pack(kind, call=call, name=name, body=body, timeout_s=timeout_s, sizes=sizes)
        tail = [frames.pack_check(frames.check(*views))] if views else []
        total = len(head) + sum(sizes) + 8 * len(tail)
        last = self._clock() + (timeout_s or self.limits.frame_s(total))
        if not self._sending.acquire(timeout=max(0.0, last - self._clock())):
            raise self._late("by messages before it")
        try:
            self._wait_writable(last)
            moving = _Moving(min(last, self._clock() + self.limits.frame_s(total)), last)
            for piece in (head, *views, *tail):
                self._send_all(memoryview(piece), moving)
        finally:
            self._sending.release()
        self.traffic.bytes_sent += total
        self.traffic.messages_sent += 1

    def receive_head(self, wait_s: float | None = None) -> Head:
        """The next frame without its buffers, which have to be received or discarded next.

        Args:
            wait_s: Seconds for the first byte to come; None waits as long as the connection lasts.

        Raises:
            MessageError: What came is no frame, or more than the limits allow. Nothing was allocated for it.
            DeadlineError: Nothing came, or the frame stopped halfway.
            ConnectionLostError: The connection ended.
        """
        prefix_room = memoryview(bytearray(frames.PREFIX_BYTES))
        done = self._receive_some(prefix_room, None if wait_s is None else self._clock() + wait_s)
        self._receive_all(prefix_room[done:], self._clock() + self.limits.patience_s)
        prefix = frames.read_prefix(prefix_room, self.limits)
        room = memoryview(bytearray(prefix.head_bytes))
        self._receive_all(room, self._clock() + self.limits.frame_s(prefix.head_bytes))
        self.traffic.bytes_received += prefix.total_bytes
        self.traffic.messages_received += 1
        return frames.read_head(prefix, room)

    def receive_content(self, prefix: Prefix, into: Sequence[memoryview]) -> None:
        """The buffers of the frame whose head came last, into memory of exactly their sizes.

        Raises:
            MessageError: They were damaged; what is in the memory is worth nothing.
        """
        deadline = self._clock() + self.limits.frame_s(prefix.content_bytes)
        for view in into:
            self._receive_all(view, deadline)
        stated = memoryview(bytearray(frames.CHECK_BYTES))
        if prefix.num_buffers:
            self._receive_all(stated, deadline)
            frames.check_content(into, stated)

    def discard_content(self, prefix: Prefix) -> None:
        """Skip the buffers of the frame whose head came last."""
        left = prefix.content_bytes + frames.CHECK_BYTES if prefix.num_buffers else 0
        room = memoryview(bytearray(min(left, _PIECE_BYTES)))
        deadline = self._clock() + self.limits.frame_s(left)
        while left:
            left -= self._receive_some(room[:left], deadline)

    def cut(self, why: str = "") -> None:
        """End the connection now, from any thread: every wait of it ends, and says why."""
        self._cut = self._cut or f"cut by this end{why}"
        with contextlib.suppress(OSError):
            # Not SSLSocket.shutdown: it forgets the encryption, and a reader would take what comes for plain text.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of the socket; only once no thread uses it any more."""
        self.cut()
        self._sock.close()

    def _send_all(self, left: memoryview, moving: "_Moving") -> None:
        while left:
            try:
                with self._state:
                    sent = self._sock.send(left[:_PIECE_BYTES])
            except _AGAIN as want:
                if self._clock() >= moving.deadline:
                    self._sleep(want, select.POLLOUT, moving.deadline)
                began_s = self._clock()
                self._sleep(want, select.POLLOUT, moving.last)
                moving.stood(self._clock() - began_s)
            except OSError as cause:
                raise self._lost(cause) from cause
            else:
                left = left[sent:]

    def _receive_all(self, left: memoryview, deadline: float) -> None:
        while left:
            left = left[self._receive_some(left, deadline) :]

    def _receive_some(self, room: memoryview, deadline: float | None) -> int:
        while True:
            try:
                with self._state:
                    received = self._sock.recv_into(room)
            except _AGAIN as want:
                self._sleep(want, select.POLLIN, deadline)
            except OSError as cause:
                self.is_hung_up = isinstance(cause, ConnectionResetError) and not self._cut
                raise self._lost(cause) from cause
            else:
                if not received:
                    self.is_hung_up = not self._cut
                    raise self._lost("closed by the other end")
                return received

    def _sleep(self, want: Exception, events: int, deadline: float | None) -> None:
        if isinstance(want, ssl.SSLWantReadError):
            events = select.POLLIN
        elif isinstance(want, ssl.SSLWantWriteError):
            events = select.POLLOUT
        if self._cut:
            raise self._lost(want)
        left_s = None if deadline is None else deadline - self._clock()
        if left_s is not None and left_s <= 0:
            self.cut(": a message was late halfway")
            raise self._late("in the middle of a frame; the connection is cut")
        self._poll(events, left_s)

    def _wait_writable(self, deadline: float) -> None:
        """Until the kernel takes something: a frame that is late before its first byte costs nobody the connection."""
        if not self._poll(select.POLLOUT, max(0.0, deadline - self._clock())):
            raise self._late("waiting for the other end to take what was sent before")

    def _poll(self, events: int, timeout_s: float | None) -> bool:
        poller = select.poll()
        try:
            poller.register(self._sock, events)
        except ValueError as cause:  # closed meanwhile
            raise self._lost(cause) from cause
        return bool(poller.poll(None if timeout_s is None else timeout_s * 1000))

    def _late(self, what: str) -> DeadlineError:
        return DeadlineError(
            explain(
                "time for a message",
                got=f"used up {what}",
                expected="a peer that takes and gives at least slowest_bytes_per_s",
                do="Look whether that process is stopped or its link is down",
                where=self.where,
            )
        )

    def _lost(self, cause: object) -> WireError:
        return ConnectionLostError(
            explain(
                "connection",
                got=self._cut or str(cause),
                expected="one that lasts",
                do="Look for the end of that process, and connect again",
                where=self.where,
            )
        )
