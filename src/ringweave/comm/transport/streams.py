"""A connection to a rank of another node: messages over TCP, from the sender's tensor into the receiver's."""

import collections
import select
import socket
import struct
from typing import Any

from ringweave.comm.transport.seam import MismatchError

_HEADER = struct.Struct("<QQ")


class Message:
    """A message under way: what is left of it, header first."""

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
        """Nowhere but in its piece."""
        return None

    @property
    def header_missing(self) -> bool:
        """Whether part of the header is still to come."""
        return len(self.left) > (1 if self.num_bytes else 0)

    def advance(self, num_bytes: int) -> None:
        """Note that so many more bytes are through."""
        while self.left and num_bytes >= self.left[0].nbytes:
            num_bytes -= self.left.pop(0).nbytes
        if num_bytes:
            self.left[0] = self.left[0][num_bytes:]
        self.done = not self.left


class StreamConnection:
    """One peer: its socket and the messages that wait for it."""

    def __init__(self, peer: int, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        self.peer = peer
        self.sock = sock
        self.watched = 0
        self._outgoing: collections.deque[Message] = collections.deque()
        self._incoming: collections.deque[Message] = collections.deque()

    @property
    def wanted(self) -> int:
        """The events that let something of this connection move.

        A peer that has left is not looked for, or it would wake us for ever.
        """
        return (select.EPOLLIN if self._incoming else 0) | (select.EPOLLOUT if self._outgoing else 0)

    def send(self, piece: Any, tag: int) -> Message:
        """Queue a piece, and start sending it."""
        payload = memoryview(piece)
        message = Message(self.peer, tag, payload, bytearray(_HEADER.pack(tag, payload.nbytes)))
        self._outgoing.append(message)
        if len(self._outgoing) == 1:
            self.write()
        return message

    def receive(self, piece: Any, tag: int) -> Message:
        """Expect the next message in this piece."""
        message = Message(self.peer, tag, memoryview(piece), bytearray(_HEADER.size))
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
                _check(message)
            if message.done:
                self._incoming.popleft()


def _check(message: Message) -> None:
    tag, num_bytes = _HEADER.unpack(message.header)
    if (tag, num_bytes) != (message.tag, message.num_bytes):
        raise MismatchError(message.peer, got=(tag, num_bytes), expected=(message.tag, message.num_bytes))
