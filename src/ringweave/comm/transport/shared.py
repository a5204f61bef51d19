"""A connection to another rank of this node: short frames over a Unix socket say what lies where in shared memory.

The sender copies a piece into its arena once, however many ranks of the node read it; the receiver combines or copies
straight out of it, and says when it is through, so that the place can be used again. A large piece is not copied at all
where the receiver can read the sender's memory: it is lent, and has left when the receiver says that it is through.
"""

import collections
import select
import socket
import struct
from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import Any

from ringweave.comm.transport import lending
from ringweave.comm.transport.arenas import Arena, ArenaContent, Showing
from ringweave.comm.transport.lending import Lending
from ringweave.comm.transport.seam import Content, MismatchError

_FRAME = struct.Struct("<QQQQ")
"""Kind, then: tag, bytes and offset (or address) of a piece; how many pieces have been read; nothing, for an arena
that comes along or memory that can be read; the address of a token and what it is."""

_PIECE, _AWAITED_PIECE, _READ, _ARENA, _LENT_PIECE, _TOKEN, _CAN_READ = 1, 2, 3, 4, 5, 6, 7
_CONTENT = frozenset({_PIECE, _AWAITED_PIECE, _ARENA, _LENT_PIECE})
"""What a peer that has left would have needed."""
_MAX_UNTOLD = 64
"""Pieces read whose places nobody waits for, before the peer is told: a frame wakes it up."""
LEND_BYTES = 64 * 2**10
"""Smaller pieces are copied: to wait until a peer has read them takes longer."""


class Shown:
    """A piece on its way to another rank of this node."""

    __slots__ = ("done", "is_lent", "payload", "peer", "showing", "stage", "tag")

    def __init__(self, peer: int, tag: int, payload: Any, showing: Showing, stage: int, *, is_lent: bool) -> None:
        self.peer = peer
        self.tag = tag
        self.payload = payload
        self.showing = showing
        self.stage = stage
        self.is_lent = is_lent
        self.done = False

    @property
    def content(self) -> None:
        """Only what is received has any."""
        return None

    def leave(self) -> None:
        """Its memory may be used again."""
        self.done = True
        self.payload = None


class Seen:
    """A piece that is expected from another rank of this node."""

    __slots__ = ("content", "is_awaited", "is_lent", "num_bytes", "peer", "tag")

    def __init__(self, peer: int, tag: int, num_bytes: int) -> None:
        self.peer = peer
        self.tag = tag
        self.num_bytes = num_bytes
        self.content: Content | None = None
        self.is_awaited = False
        self.is_lent = False

    @property
    def done(self) -> bool:
        """Whether it can be read."""
        return self.content is not None


class Telling:
    """What a rank of this node still has to be told: frames that the kernel did not take yet."""

    __slots__ = ("_frames", "peer")

    def __init__(self, peer: int, frames: Sized) -> None:
        self.peer = peer
        self._frames = frames

    @property
    def done(self) -> bool:
        """Whether there are none."""
        return not len(self._frames)

    @property
    def content(self) -> None:
        """None."""
        return None


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A piece that the peer has shown or lent."""

    tag: int
    num_bytes: int
    content: Content
    is_awaited: bool
    is_lent: bool


class SharedConnection:
    """One peer on this node: its socket, what it may read and what it shows us."""

    def __init__(self, peer: int, sock: socket.socket, on_read: Callable[[], None], *, lends: bool = False) -> None:
        """`on_read` is called when a place has become free, where anybody's piece may wait for it.

        `lends` lets the peer read this process's memory, where it can.
        """
        sock.setblocking(False)
        self.peer = peer
        self.sock = sock
        self.watched = 0
        self._on_read = on_read
        self._outgoing: collections.deque[Shown] = collections.deque()
        self._unread: collections.deque[Shown] = collections.deque()
        self._incoming: collections.deque[Seen] = collections.deque()
        self._arrived: collections.deque[_Arrival] = collections.deque()
        self._frames: collections.deque[tuple[bytes, int | None]] = collections.deque()
        self._num_read = 0
        self._is_awaited = False
        self._arena_shown: Arena | None = None
        self._arena: Arena | None = None
        self._has_left = False
        self._lending = Lending(sock) if lends else None
        if self._lending is not None:
            self._frames.append((_FRAME.pack(_TOKEN, *self._lending.token), None))

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
        is_lent = self._lending is not None and payload.nbytes >= LEND_BYTES and self._lending.can_lend(payload)
        shown = Shown(self.peer, tag, payload, showing, stage, is_lent=is_lent)
        if is_lent and showing.note_read(stage):
            self._on_read()
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
        """A piece has been read; a peer that needs its place is told now, or before we wait for its next piece.

        Raises:
            ConnectionResetError: It was lent, and the peer has hung up: who knows what has become of it since.
        """
        if seen.is_lent and (self._lending is None or self._lending.has_ended()):
            raise ConnectionResetError("connection closed by peer")
        self._num_read += 1
        self._is_awaited |= seen.is_awaited
        if self._is_awaited and not self._incoming:
            self.write()  # we may never wait for this peer again

    @property
    def telling(self) -> Telling:
        """What the peer still has to be told."""
        return Telling(self.peer, self._frames)

    def tell(self) -> None:
        """Let the peer know all that has been read, before we wait the next time: another collective begins."""
        self._is_awaited = self._num_read > 0

    def show(self) -> None:
        """Show what has a free place, in the order of sending."""
        while self._outgoing:
            shown = self._outgoing[0]
            if shown.is_lent:
                address = lending.address_of(shown.payload)
                self._frames.append((_FRAME.pack(_LENT_PIECE, shown.tag, shown.payload.nbytes, address), None))
            elif not self._place(shown):
                break
            self._unread.append(self._outgoing.popleft())
        self.write()

    def _place(self, shown: Shown) -> bool:
        """Copy a piece into the arena, if its place is free."""
        offset = shown.showing.place(shown.stage, shown.payload)
        if offset is None:
            return False
        if shown.showing.arena is not self._arena_shown:
            self._arena_shown = shown.showing.arena
            self._frames.append((_FRAME.pack(_ARENA, 0, 0, 0), self._arena_shown.descriptor))
        kind = _AWAITED_PIECE if shown.showing.is_awaited(shown.stage) else _PIECE
        self._frames.append((_FRAME.pack(kind, shown.tag, shown.payload.nbytes, offset), None))
        shown.leave()
        return True

    def write(self) -> None:
        """Send the frames that wait, as many as the kernel takes, and after them what has been read.

        A peer that has left is told nothing: the frame would wait for ever, and `telling` with it.
        """
        self._write_frames()
        if not self._frames and not self._has_left and (self._is_awaited or self._num_read > _MAX_UNTOLD):
            self._is_awaited = False
            self._frames.append((_FRAME.pack(_READ, self._num_read, 0, 0), None))
            self._num_read = 0
            self._write_frames()

    def _write_frames(self) -> None:
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
                if any(kind in _CONTENT for kind, *_ in map(_FRAME.unpack, (frame for frame, _ in self._frames))):
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
        is_lent = any(shown.is_lent for shown in self._unread)
        if self._outgoing or is_lent or any(not seen.done for seen in self._incoming):
            raise ConnectionResetError("connection closed by peer")
        self._note_read(len(self._unread))
        self._frames.clear()

    def _take(self, frame: tuple[int, int, int, int], descriptors: list[int]) -> None:
        kind, first, second, third = frame
        if kind in (_PIECE, _AWAITED_PIECE):
            content = self._find(second, third)
            self._arrived.append(_Arrival(first, second, content, kind == _AWAITED_PIECE, is_lent=False))
        elif kind == _LENT_PIECE and self._lending is not None:
            lent = lending.LentContent(self.peer, self._lending.pid, third)
            self._arrived.append(_Arrival(first, second, lent, is_awaited=True, is_lent=True))
        elif kind == _TOKEN and self._lending is not None:
            if self._lending.can_borrow(first, second, third):
                self._frames.append((_FRAME.pack(_CAN_READ, 0, 0, 0), None))
                self.write()
        elif kind == _CAN_READ and self._lending is not None:
            self._lending.is_reached = True
        elif kind == _READ:
            self._note_read(first)
        elif kind == _ARENA and descriptors:
            self._arena = Arena(descriptors.pop(0))
        else:
            raise ConnectionError(f"a frame of kind {kind} came that cannot be")

    def _note_read(self, count: int) -> None:
        if count > len(self._unread):
            raise ConnectionError(f"{count} pieces read of {len(self._unread)} that were shown")
        has_freed = False
        for shown in (self._unread.popleft() for _ in range(count)):
            if shown.is_lent:
                shown.leave()
            else:
                has_freed |= shown.showing.note_read(shown.stage)
        if has_freed:
            self._on_read()

    def _match(self) -> None:
        """Give the pieces that arrived to the receives that expect them."""
        while self._arrived and self._incoming:
            arrival, seen = self._arrived.popleft(), self._incoming.popleft()
            if (arrival.tag, arrival.num_bytes) != (seen.tag, seen.num_bytes):
                got, expected = (arrival.tag, arrival.num_bytes), (seen.tag, seen.num_bytes)
                raise MismatchError(self.peer, got=got, expected=expected)
            seen.is_awaited, seen.is_lent = arrival.is_awaited, arrival.is_lent
            seen.content = arrival.content

    def _find(self, num_bytes: int, offset: int) -> ArenaContent:
        """A piece in the peer's arena."""
        if self._arena is None or offset + num_bytes > self._arena.num_bytes:
            raise ConnectionError(f"{num_bytes} bytes at {offset} are outside of the peer's shared memory")
        return ArenaContent(self._arena, offset, num_bytes)
