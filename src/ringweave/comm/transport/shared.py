"""A connection to another rank of this node: short frames over a Unix socket say what lies where in shared memory.

The sender copies a piece into its arena once, however many ranks of the node read it; the receiver combines or copies
straight out of it, and says when it is through, so that the place can be used again.
"""

import collections
import select
import socket
import struct
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ringweave.comm.transport.arenas import Arena, Showing
from ringweave.comm.transport.seam import MismatchError

_FRAME = struct.Struct("<QQQQ")
"""Kind, then: tag, bytes and offset of a piece; how many pieces have been read; the number of an arena."""

_PIECE, _AWAITED_PIECE, _READ, _ARENA = 1, 2, 3, 4
_MAX_UNTOLD = 64
"""Pieces read whose places nobody waits for, before the peer is told: a frame wakes it up."""


class Shown:
    """A piece on its way to another rank of this node."""

    __slots__ = ("done", "payload", "peer", "showing", "stage", "tag")

    def __init__(self, peer: int, tag: int, payload: Any, showing: Showing, stage: int) -> None:
        self.peer = peer
        self.tag = tag
        self.payload = payload
        self.showing = showing
        self.stage = stage
        self.done = False

    @property
    def content(self) -> Tensor | None:
        """Only what is received has any."""
        return None


class Seen:
    """A piece that is expected from another rank of this node."""

    __slots__ = ("content", "is_awaited", "num_bytes", "peer", "tag")

    def __init__(self, peer: int, tag: int, num_bytes: int) -> None:
        self.peer = peer
        self.tag = tag
        self.num_bytes = num_bytes
        self.content: Tensor | None = None
        self.is_awaited = False

    @property
    def done(self) -> bool:
        """Whether it can be read."""
        return self.content is not None


class SharedConnection:
    """One peer on this node: its socket, what it may read and what it shows us."""

    def __init__(self, peer: int, sock: socket.socket, on_read: Callable[[], None]) -> None:
        """`on_read` is called when a place has become free, where anybody's piece may wait for it."""
        sock.setblocking(False)
        self.peer = peer
        self.sock = sock
        self.watched = 0
        self._on_read = on_read
        self._outgoing: collections.deque[Shown] = collections.deque()
        self._unread: collections.deque[Shown] = collections.deque()
        self._incoming: collections.deque[Seen] = collections.deque()
        self._arrived: collections.deque[tuple[int, int, int, bool, Arena | None]] = collections.deque()
        self._frames: collections.deque[tuple[bytes, int | None]] = collections.deque()
        self._num_read = 0
        self._is_awaited = False
        self._arena_shown: Arena | None = None
        self._arena: Arena | None = None
        self._has_left = False

    @property
    def wanted(self) -> int:
        """The events that let something of this connection move."""
        if self._has_left:
            return 0
        return select.EPOLLIN | (select.EPOLLOUT if self._frames else 0)

    def send(self, payload: Any, tag: int, showing: Showing, stage: int) -> Shown:
        """Show a piece as soon as its place is free."""
        if self._has_left:
            raise ConnectionResetError("connection closed by peer")
        shown = Shown(self.peer, tag, payload, showing, stage)
        self._outgoing.append(shown)
        self.show()
        return shown

    def receive(self, num_bytes: int, tag: int) -> Seen:
        """Expect the next piece."""
        seen = Seen(self.peer, tag, num_bytes)
        self._incoming.append(seen)
        self._match()
        if not seen.done and self._has_left:
            raise ConnectionResetError("connection closed by peer")
        return seen

    def release(self, seen: Seen) -> None:
        """A piece has been read; a peer that needs its place is told now, or before we wait for its next piece."""
        self._num_read += 1
        self._is_awaited |= seen.is_awaited
        if self._is_awaited and not self._incoming:
            self.write()  # we may never wait for this peer again

    def tell(self) -> None:
        """Let the peer know all that has been read, before we wait the next time: another collective begins."""
        self._is_awaited = self._num_read > 0

    def show(self) -> None:
        """Show what has a free place, in the order of sending."""
        while self._outgoing:
            shown = self._outgoing[0]
            offset = shown.showing.place(shown.stage, shown.payload)
            if offset is None:
                break
            if shown.showing.arena is not self._arena_shown:
                self._arena_shown = shown.showing.arena
                self._frames.append((_FRAME.pack(_ARENA, 0, 0, 0), self._arena_shown.descriptor))
            kind = _AWAITED_PIECE if shown.showing.is_awaited(shown.stage) else _PIECE
            self._frames.append((_FRAME.pack(kind, shown.tag, shown.payload.nbytes, offset), None))
            shown.done = True
            shown.payload = None
            self._unread.append(self._outgoing.popleft())
        self.write()

    def write(self) -> None:
        """Send the frames that wait, as many as the kernel takes."""
        if self._is_awaited or self._num_read > _MAX_UNTOLD:
            self._is_awaited = False
            self._frames.append((_FRAME.pack(_READ, self._num_read, 0, 0), None))
            self._num_read = 0
        while self._frames and not self._has_left:
            frame, descriptor = self._frames[0]
            try:
                if descriptor is None:
                    self.sock.send(frame)
                else:
                    socket.send_fds(self.sock, [frame], [descriptor])
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                if any(kind != _READ for kind, *_ in map(_FRAME.unpack, (frame for frame, _ in self._frames))):
                    raise
                self._frames.clear()  # it has left, and needs no place any more: what it sent is still to be read
                return
            self._frames.popleft()

    def read(self) -> None:
        """Take in the frames that are there."""
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(self.sock, _FRAME.size, 1)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # it left without reading all that we sent: said once, then comes what it has sent before
            if not data:
                self._leave()
                return
            if len(data) != _FRAME.size:
                raise ConnectionError(f"a frame of {len(data)} bytes came, expected {_FRAME.size}")
            self._take(_FRAME.unpack(data), descriptors)
            self._match()

    def _leave(self) -> None:
        """The peer has closed its end: it reads no more, and all that it has sent is here."""
        self._has_left = True
        if self._outgoing or any(not seen.done for seen in self._incoming):
            raise ConnectionResetError("connection closed by peer")
        self._note_read(len(self._unread))

    def _take(self, frame: tuple[int, int, int, int], descriptors: list[int]) -> None:
        kind, first, second, third = frame
        if kind in (_PIECE, _AWAITED_PIECE):
            self._arrived.append((first, second, third, kind == _AWAITED_PIECE, self._arena))
        elif kind == _READ:
            self._note_read(first)
        elif kind == _ARENA and descriptors:
            self._arena = Arena(descriptors.pop(0))
        else:
            raise ConnectionError(f"a frame of kind {kind} came that cannot be")

    def _note_read(self, count: int) -> None:
        if count > len(self._unread):
            raise ConnectionError(f"{count} pieces read of {len(self._unread)} that were shown")
        freed = [shown.showing.note_read(shown.stage) for shown in (self._unread.popleft() for _ in range(count))]
        if any(freed):
            self._on_read()

    def _match(self) -> None:
        """Give the pieces that arrived to the receives that expect them."""
        while self._arrived and self._incoming:
            (tag, num_bytes, offset, is_awaited, arena), seen = self._arrived.popleft(), self._incoming.popleft()
            if (tag, num_bytes) != (seen.tag, seen.num_bytes):
                raise MismatchError(self.peer, got=(tag, num_bytes), expected=(seen.tag, seen.num_bytes))
            if arena is None or offset + num_bytes > arena.num_bytes:
                raise ConnectionError(f"{num_bytes} bytes at {offset} are outside of the peer's shared memory")
            seen.is_awaited = is_awaited
            seen.content = arena.tensor[offset : offset + num_bytes]
