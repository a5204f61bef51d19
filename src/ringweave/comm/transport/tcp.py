"""TCP connections: messages from the sender's tensor into the receiver's, over one NIC or split over several."""

import collections
import select
import socket
import struct
from collections.abc import Sequence
from typing import Any

from ringweave.comm.transport.interface import MismatchError

_HEADER = struct.Struct("<QQ")


class TcpMessage:
    """A message in transfer: the rest of it, header first."""

    __slots__ = ("done", "header", "left", "num_bytes", "peer", "tag")

    def __init__(self, peer: int, tag: int, payload: memoryview, header: bytearray) -> None:
        self.peer = peer
        self.tag = tag
        self.num_bytes = payload.nbytes
        self.header = header
        self.left: list[memoryview] = [memoryview(header), *([payload.cast("B")] if payload.nbytes else [])]
        self.done = False

    @property
    def content(self) -> None:
        """None: the content is in its piece."""
        return None

    @property
    def header_missing(self) -> bool:
        """True while part of the header is missing."""
        return len(self.left) > (1 if self.num_bytes else 0)

    def advance(self, num_bytes: int) -> None:
        """Note that so many more bytes are through."""
        while self.left and num_bytes >= self.left[0].nbytes:
            num_bytes -= self.left.pop(0).nbytes
        if num_bytes:
            self.left[0] = self.left[0][num_bytes:]
        self.done = not self.left


class TcpConnection:
    """Connection to one peer: its socket and queued messages."""

    def __init__(self, peer: int, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        self.peer = peer
        self.sock = sock
        self.watched = 0
        self._outgoing: collections.deque[TcpMessage] = collections.deque()
        self._incoming: collections.deque[TcpMessage] = collections.deque()

    @property
    def wanted(self) -> int:
        """Poll events that let something of this connection move.

        A closed peer is not polled, or it would wake us for ever.
        """
        return (select.EPOLLIN if self._incoming else 0) | (select.EPOLLOUT if self._outgoing else 0)

    def send(self, piece: Any, tag: int) -> TcpMessage:
        """Queue a piece, and start sending it."""
        payload = memoryview(piece)
        message = TcpMessage(self.peer, tag, payload, bytearray(_HEADER.pack(tag, payload.nbytes)))
        self._outgoing.append(message)
        if len(self._outgoing) == 1:
            self.write()
        return message

    def receive(self, piece: Any, tag: int) -> TcpMessage:
        """Expect the next message in this piece."""
        message = TcpMessage(self.peer, tag, memoryview(piece), bytearray(_HEADER.size))
        self._incoming.append(message)
        return message

    def write(self) -> None:
        """Send as much as the kernel takes."""
        while self._outgoing:
            message = self._outgoing[0]
            try:
                message.advance(self.sock.sendmsg(message.left))
            except BlockingIOError:
                return
            if message.done:
                self._outgoing.popleft()

    def read(self) -> None:
        """Receive as much as the kernel has of the messages that are expected."""
        while self._incoming:
            message = self._incoming[0]
            header_was_missing = message.header_missing
            try:
                received = self.sock.recvmsg_into(message.left)[0]
            except BlockingIOError:
                return
            if received == 0:
                raise ConnectionResetError("connection closed by peer")
            message.advance(received)
            if header_was_missing and not message.header_missing:
                _check_header(message)
            if message.done:
                self._incoming.popleft()


def _check_header(message: TcpMessage) -> None:
    tag, num_bytes = _HEADER.unpack(message.header)
    if (tag, num_bytes) != (message.tag, message.num_bytes):
        raise MismatchError(message.peer, got=(tag, num_bytes), expected=(message.tag, message.num_bytes))


SPLIT_COST_S = 30e-6
"""Cost of splitting a message, a system call at each end. The fastest rail alone carries a message that would be later
by at most this much."""


class RailedMessage:
    """A message split over several rails."""

    __slots__ = ("parts", "peer")

    def __init__(self, peer: int, parts: Sequence[TcpMessage]) -> None:
        self.peer = peer
        self.parts = parts

    @property
    def done(self) -> bool:
        """True once all parts are through."""
        return all(part.done for part in self.parts)

    @property
    def content(self) -> None:
        """None: the content is in its piece."""
        return None


class RailedConnection:
    """Connections to one peer by several NICs. Both ends split alike, because they know the same rates.

    A node's NICs thus act as one link of their summed rate, as plans assume.
    """

    def __init__(self, peer: int, rails: Sequence[TcpConnection], rates: Sequence[float]) -> None:
        """`rates` are bytes per second, one per rail."""
        self.peer = peer
        self.rails = tuple(rails)
        total, sums = sum(rates), [sum(rates[: index + 1]) for index in range(len(rates))]
        self._split_points = [0.0, *(each / total for each in sums[:-1]), 1.0]
        self._fastest = self.rails[rates.index(max(rates))]
        self._max_whole_bytes = SPLIT_COST_S / (1 / max(rates) - 1 / total)

    def send(self, piece: Any, tag: int) -> RailedMessage:
        """Queue a piece, and start sending it."""
        return RailedMessage(self.peer, [rail.send(part, tag) for rail, part in self._split(piece)])

    def receive(self, piece: Any, tag: int) -> RailedMessage:
        """Expect the next message in this piece."""
        return RailedMessage(self.peer, [rail.receive(part, tag) for rail, part in self._split(piece)])

    def _split(self, piece: Any) -> list[tuple[TcpConnection, Any]]:
        """Split the piece's elements in order, one part per rail."""
        if piece.nbytes <= self._max_whole_bytes:
            return [(self._fastest, piece)]
        borders = [round(len(piece) * cut) for cut in self._split_points]
        return [(rail, piece[borders[index] : borders[index + 1]]) for index, rail in enumerate(self.rails)]
