"""Frames over one socket, with or without TLS: any thread may send, one thread receives, every wait has a deadline.

The socket is non-blocking, and a thread that has to wait sleeps in `poll`. A TLS connection is one state machine
that two threads may not enter at once, so each read and write of a record holds a lock for microseconds; no thread
sleeps with it. Buffers are copied once: from the sender's memory into the record, and from the record into the
receiver's memory.
"""

import contextlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from typing_extensions import Buffer

from ringweave.errors import ConnectionLostError, DeadlineError, RpcError
from ringweave.rpc import framing
from ringweave.rpc.framing import FrameHead, FrameKind, FramePrefix, RpcLimits


@dataclass(slots=True)
class ConnectionTraffic:
    """Counters of one connection; one thread sends and one receives, so each counter has one writer."""

    bytes_sent: int = 0
    """Bytes of frames, before encryption."""
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    failures: int = 0
    """Calls that ended without an answer: failed, refused, cancelled."""
    calls: int = 0
    """Calls that were answered."""
    latency_sum_s: float = 0.0
    """Sum of the latencies of all answered calls."""
    latency_max_s: float = 0.0

    def __add__(self, other: "ConnectionTraffic") -> "ConnectionTraffic":
        return ConnectionTraffic(
            bytes_sent=self.bytes_sent + other.bytes_sent,
            bytes_received=self.bytes_received + other.bytes_received,
            messages_sent=self.messages_sent + other.messages_sent,
            messages_received=self.messages_received + other.messages_received,
            failures=self.failures + other.failures,
            calls=self.calls + other.calls,
            latency_sum_s=self.latency_sum_s + other.latency_sum_s,
            latency_max_s=max(self.latency_max_s, other.latency_max_s),
        )

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


class LatencyRecorder:
    """Adds the ends of calls to a connection's counters; thread-safe."""

    def __init__(self, traffic: ConnectionTraffic) -> None:
        self._traffic = traffic
        self._lock = threading.Lock()

    def record_answer(self, seconds: float) -> None:
        with self._lock:
            self._traffic.calls += 1
            self._traffic.latency_sum_s += seconds
            self._traffic.latency_max_s = max(self._traffic.latency_max_s, seconds)

    def record_failure(self) -> None:
        with self._lock:
            self._traffic.failures += 1


_MAX_RECORD_BYTES = 1 << 20
_STALL_S = 0.5
"""An end that takes nothing for so long has no room for it, or a slow link, or is gone."""
_WOULD_BLOCK = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


@dataclass(slots=True)
class _SendDeadline:
    """Deadlines of a frame that is being sent."""

    deadline: float
    """Deadline while the frame moves."""
    stall_deadline: float
    """Deadline while the other end takes nothing."""

    def note_stall(self, seconds: float) -> None:
        """Note that the other end took nothing for so many seconds."""
        if seconds >= _STALL_S:
            self.deadline = min(self.stall_deadline, self.deadline + seconds)


class RpcChannel:
    """Connection after the TLS handshake."""

    def __init__(
        self, sock: socket.socket, limits: RpcLimits, where: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`where` names the other end in errors; `limits` bound what is accepted from it."""
        sock.setblocking(False)
        self.where = where
        self.limits = limits
        self.traffic = ConnectionTraffic()
        self._sock = sock
        self._clock = clock
        self._tls_lock = threading.Lock()
        self._send_lock = threading.Lock()
        self._cut_reason = ""
        self.is_closed_by_peer = False
        """The other end's kernel has closed it: its process closed the connection, or has ended."""

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

        `timeout_s` bounds the whole. While the frame moves it has the time of its bytes (`RpcLimits.frame_timeout_s`).
        While the other end has no room and takes nothing, only `timeout_s` counts; without one that is the time of its
        bytes.

        Raises:
            DeadlineError: The other end does not take it. If part of it is sent, the connection is cut.
            ConnectionLostError: The connection broke.
            MessageError: A buffer is not contiguous.
        """
        views = [framing.as_bytes_view(buffer) for buffer in buffers]
        sizes = [view.nbytes for view in views]
        head = framing.pack_frame(kind, call=call, name=name, body=body, timeout_s=timeout_s, sizes=sizes)
        trailer = [framing.pack_checksum(framing.checksum(*views))] if views else []
        total = len(head) + sum(sizes) + 8 * len(trailer)
        stall_deadline = self._clock() + (timeout_s or self.limits.frame_timeout_s(total))
        if not self._send_lock.acquire(timeout=max(0.0, stall_deadline - self._clock())):
            raise self._deadline_error("by messages before it")
        try:
            self._wait_writable(stall_deadline)
            send_deadline = _SendDeadline(
                min(stall_deadline, self._clock() + self.limits.frame_timeout_s(total)), stall_deadline
            )
            for piece in (head, *views, *trailer):
                self._send_all(memoryview(piece), send_deadline)
        finally:
            self._send_lock.release()
        self.traffic.bytes_sent += total
        self.traffic.messages_sent += 1

    def receive_head(self, wait_s: float | None = None) -> FrameHead:
        """Receive the next frame without its buffers, which have to be received or discarded next.

        Args:
            wait_s: Seconds for the first byte to come; None waits as long as the connection lasts.

        Raises:
            MessageError: The bytes are no frame, or exceed the limits. Nothing was allocated for it.
            DeadlineError: Nothing came, or the frame stopped halfway.
            ConnectionLostError: The connection ended.
        """
        prefix_buffer = memoryview(bytearray(framing.PREFIX_BYTES))
        num_received = self._receive_some(prefix_buffer, None if wait_s is None else self._clock() + wait_s)
        self._receive_all(prefix_buffer[num_received:], self._clock() + self.limits.patience_s)
        prefix = framing.parse_prefix(prefix_buffer, self.limits)
        buffer = memoryview(bytearray(prefix.head_bytes))
        self._receive_all(buffer, self._clock() + self.limits.frame_timeout_s(prefix.head_bytes))
        self.traffic.bytes_received += prefix.total_bytes
        self.traffic.messages_received += 1
        return framing.parse_head(prefix, buffer)

    def receive_content(self, prefix: FramePrefix, into: Sequence[memoryview]) -> None:
        """Receive the buffers of the frame whose head came last, into memory of exactly their sizes.

        Raises:
            MessageError: They were damaged; the content of the memory is worthless.
        """
        deadline = self._clock() + self.limits.frame_timeout_s(prefix.content_bytes)
        for view in into:
            self._receive_all(view, deadline)
        checksum_buffer = memoryview(bytearray(framing.CHECKSUM_BYTES))
        if prefix.num_buffers:
            self._receive_all(checksum_buffer, deadline)
            framing.verify_content(into, checksum_buffer)

    def discard_content(self, prefix: FramePrefix) -> None:
        """Skip the buffers of the frame whose head came last."""
        num_left = prefix.content_bytes + framing.CHECKSUM_BYTES if prefix.num_buffers else 0
        buffer = memoryview(bytearray(min(num_left, _MAX_RECORD_BYTES)))
        deadline = self._clock() + self.limits.frame_timeout_s(num_left)
        while num_left:
            num_left -= self._receive_some(buffer[:num_left], deadline)

    def abort(self, reason: str = "") -> None:
        """Cut the connection now, from any thread: every wait on it ends with this reason."""
        self._cut_reason = self._cut_reason or f"cut by this end{reason}"
        with contextlib.suppress(OSError):
            # Not SSLSocket.shutdown: it forgets the encryption, and a reader would take later bytes for plain text.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket; only once no thread waits for it any more."""
        self.abort()
        with self._tls_lock:  # a record that is being written would go to the next connection with this descriptor
            self._sock.close()

    def _send_all(self, left: memoryview, send_deadline: "_SendDeadline") -> None:
        while left:
            try:
                with self._tls_lock:
                    sent = self._sock.send(left[:_MAX_RECORD_BYTES])
            except _WOULD_BLOCK as blocked:
                if self._clock() >= send_deadline.deadline:
                    self._wait_ready(blocked, select.POLLOUT, send_deadline.deadline)
                began_s = self._clock()
                self._wait_ready(blocked, select.POLLOUT, send_deadline.stall_deadline)
                send_deadline.note_stall(self._clock() - began_s)
            except OSError as cause:
                raise self._connection_error(cause) from cause
            else:
                left = left[sent:]

    def _receive_all(self, left: memoryview, deadline: float) -> None:
        while left:
            left = left[self._receive_some(left, deadline) :]

    def _receive_some(self, buffer: memoryview, deadline: float | None) -> int:
        while True:
            try:
                with self._tls_lock:
                    received = self._sock.recv_into(buffer)
            except _WOULD_BLOCK as blocked:
                self._wait_ready(blocked, select.POLLIN, deadline)
            except OSError as cause:
                self.is_closed_by_peer = isinstance(cause, ConnectionResetError) and not self._cut_reason
                raise self._connection_error(cause) from cause
            else:
                if not received:
                    self.is_closed_by_peer = not self._cut_reason
                    raise self._connection_error("closed by the other end")
                return received

    def _wait_ready(self, blocked: Exception, events: int, deadline: float | None) -> None:
        if isinstance(blocked, ssl.SSLWantReadError):
            events = select.POLLIN
        elif isinstance(blocked, ssl.SSLWantWriteError):
            events = select.POLLOUT
        if self._cut_reason:
            raise self._connection_error(blocked)
        left_s = None if deadline is None else deadline - self._clock()
        if left_s is not None and left_s <= 0:
            self.abort(": a message was late halfway")
            raise self._deadline_error("in the middle of a frame; the connection is cut")
        self._poll(events, left_s)

    def _wait_writable(self, deadline: float) -> None:
        """Wait until the kernel takes something: a frame that is late before its first byte breaks no connection."""
        if not self._poll(select.POLLOUT, max(0.0, deadline - self._clock())):
            raise self._deadline_error("waiting for the other end to take what was sent before")

    def _poll(self, events: int, timeout_s: float | None) -> bool:
        poller = select.poll()
        try:
            poller.register(self._sock, events)
        except ValueError as cause:  # closed meanwhile
            raise self._connection_error(cause) from cause
        return bool(poller.poll(None if timeout_s is None else timeout_s * 1000))

    def _deadline_error(self, what: str) -> DeadlineError:
        return DeadlineError(
            "time for a message",
            got=f"used up {what}",
            expected="a peer that takes and gives at least slowest_bytes_per_s",
            do="Look whether that process is stopped or its link is down",
            where=self.where,
        )

    def _connection_error(self, cause: object) -> RpcError:
        return ConnectionLostError(
            "connection",
            got=self._cut_reason or str(cause),
            expected="one that lasts",
            do="Look for the end of that process, and connect again",
            where=self.where,
        )


def configure_keepalive(sock: socket.socket, patience_s: float) -> None:
    """Send small messages at once, and detect a dead or stalled peer within twice `patience_s`."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    every_s = max(1, round(patience_s / 4))
    for option, value in (
        (socket.TCP_KEEPIDLE, every_s),
        (socket.TCP_KEEPINTVL, every_s),
        (socket.TCP_KEEPCNT, 4),
        (socket.TCP_USER_TIMEOUT, round(2 * patience_s * 1000)),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
