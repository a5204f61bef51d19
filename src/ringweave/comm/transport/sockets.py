"""Socket transport: a rank's connections to the others of its group, TCP between nodes and shared memory inside one.

One thread drives one transport: it queues messages and, while it waits for one of them, moves the bytes of all. Between
nodes a message goes from the sender's tensor into the kernel and from there into the receiver's tensor. Data that is
not received yet waits in the kernel, and TCP slows the sender down. Where a link is faster than one processor copies, a
large message is split over several connections, and each further one has a thread of its own.

Messages between two ranks arrive in the order of sending and carry a header, so a peer that runs something else is
found out at once. A closed connection is an error at once; a silent one when time is up. `abort` interrupts every wait
(docs/decisions/0002-own-tcp-transport.md).
"""

import collections
import contextlib
import itertools
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from ringweave.comm.group_info import GroupInfo
from ringweave.comm.transport.connect import POLL_S, ChannelListener, ConnectionManager, ConnectionPlace
from ringweave.comm.transport.interface import LinkTraffic, MismatchError, ReceivedContent, TransferFailedError
from ringweave.comm.transport.shared_memory import ArenaPool, ArenaSlot, ShmAck, ShmConnection, ShmRecv, ShmSend
from ringweave.schedules.program import NO_SLOT, StagingLayout

_HEADER = struct.Struct("<QQ")
_TCP_INFO_BYTES, _ACKED_OFFSET, _BUSY_OFFSET = 256, 120, 168
"""Source: kernel, include/uapi/linux/tcp.h, struct tcp_info: bytes_acked, busy_time, rwnd_limited (microseconds)."""
_US = 1e-6


class TcpMessage:
    """A message in transfer: the rest of it, header first."""

    __slots__ = ("done", "header", "left", "num_bytes", "num_left", "peer", "tag")

    @classmethod
    def to_send(cls, peer: int, tag: int, piece: Any) -> "TcpMessage":
        """Return the message that brings a piece to a peer."""
        payload = memoryview(piece)
        return cls(peer, tag, payload, bytearray(_HEADER.pack(tag, payload.nbytes)))

    @classmethod
    def to_receive(cls, peer: int, tag: int, piece: Any) -> "TcpMessage":
        """Return the message that a peer's piece is expected to come in."""
        return cls(peer, tag, memoryview(piece), bytearray(_HEADER.size))

    def __init__(self, peer: int, tag: int, payload: memoryview, header: bytearray) -> None:
        self.peer = peer
        self.tag = tag
        self.num_bytes = payload.nbytes
        self.num_left = self.num_bytes + len(header)
        self.header = header
        self.left: list[memoryview] = [memoryview(header), *([payload.cast("B")] if self.num_bytes else [])]
        self.done = False

    @property
    def content(self) -> None:
        """None: the content is in its piece."""
        return None

    @property
    def header_missing(self) -> bool:
        """True while part of the header is missing."""
        return self.num_left > self.num_bytes

    def advance(self, num_bytes: int) -> None:
        """Note that so many more bytes are through, at most those that are left."""
        self.num_left -= num_bytes
        if not self.num_left:
            self.left.clear()
            self.done = True
            return
        if num_bytes >= self.left[0].nbytes:
            num_bytes -= self.left.pop(0).nbytes
        if num_bytes:
            self.left[0] = self.left[0][num_bytes:]


MIN_WAKEUP_BYTES, MAX_WAKEUP_BYTES = 16 << 10, 512 << 10
"""Rest of a message that is worth a system call of its own; part of one that is copied while more of it arrives."""
_MAX_MESSAGES_PER_CALL = 8
"""Messages that one system call moves: small pieces cost less, and a call has a limited number of buffers."""


def _take_messages(queue: collections.deque[TcpMessage]) -> tuple[list[memoryview], int]:
    """Return what is left of the first messages, and its size in bytes."""
    if len(queue) == 1:
        return queue[0].left, queue[0].num_left
    first = list(itertools.islice(queue, _MAX_MESSAGES_PER_CALL))
    return [part for message in first for part in message.left], sum(message.num_left for message in first)


class TcpConnection:
    """Connection to one peer: its socket and queued messages."""

    def __init__(self, peer: int, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        self.peer = peer
        self.sock = sock
        self.watched = 0
        self._num_decrypted: Callable[[], int] | None = getattr(sock, "pending", None)
        """Bytes that TLS has decrypted and nobody has taken; None for a plain connection."""
        self._low_water = 1
        """Bytes that the kernel has to have before it wakes this end."""
        self._outgoing: collections.deque[TcpMessage] = collections.deque()
        self._incoming: collections.deque[TcpMessage] = collections.deque()

    @property
    def wanted(self) -> int:
        """Poll events that let something of this connection move.

        A closed peer is not polled, or it would wake us for ever.
        """
        return (select.EPOLLIN if self._incoming else 0) | (select.EPOLLOUT if self._outgoing else 0)

    def traffic(self) -> LinkTraffic:
        """Return the traffic so far; none where the connection is closed, or the kernel does not count it."""
        try:
            info = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            (acked,) = struct.unpack_from("=Q", info, _ACKED_OFFSET)
            busy_us, limited_us = struct.unpack_from("=QQ", info, _BUSY_OFFSET)
        except (OSError, struct.error):
            return LinkTraffic()
        return LinkTraffic(sent_bytes=acked, busy_s=busy_us * _US, limited_s=limited_us * _US)

    def send(self, piece: Any, tag: int) -> TcpMessage:
        """Queue a piece, and start sending it."""
        message = TcpMessage.to_send(self.peer, tag, piece)
        self._outgoing.append(message)
        if len(self._outgoing) == 1:
            self.write()
        return message

    def receive(self, piece: Any, tag: int) -> TcpMessage:
        """Expect the next message in this piece."""
        message = TcpMessage.to_receive(self.peer, tag, piece)
        self._incoming.append(message)
        if len(self._incoming) == 1:
            self._set_low_water()
            if self._num_decrypted is not None and self._num_decrypted():
                self.read()  # the kernel has nothing that would wake this thread
        return message

    def write(self) -> None:
        """Send as much as the kernel takes; when it takes less than it was given, its buffer is full."""
        while self._outgoing:
            parts, num_asked = _take_messages(self._outgoing)
            try:
                num_left = num_sent = self.sock.sendmsg(parts)
            except BlockingIOError:
                return
            while num_left:
                message = self._outgoing[0]
                passed = min(num_left, message.num_left)
                message.advance(passed)
                num_left -= passed
                if message.done:
                    self._outgoing.popleft()
            if num_sent < num_asked:
                return

    def read(self) -> None:
        """Receive as much as the kernel has of the messages that are expected; less than was asked for is all it has.

        Messages that turn out to be others than expected may have overwritten several pieces then.
        """
        while self._incoming:
            parts, num_asked = _take_messages(self._incoming)
            try:
                num_left = num_received = self.sock.recvmsg_into(parts)[0]
            except BlockingIOError:
                break
            if num_received == 0:
                raise ConnectionResetError("connection closed by peer")
            while num_left:
                message = self._incoming[0]
                header_was_missing = message.header_missing
                passed = min(num_left, message.num_left)
                message.advance(passed)
                num_left -= passed
                if header_was_missing and not message.header_missing:
                    _check_header(message)
                if message.done:
                    self._incoming.popleft()
            if num_received < num_asked:
                break
        self._set_low_water()

    def _set_low_water(self) -> None:
        """Have the kernel wake this end for the next header, but not for each packet of what follows it."""
        if self._num_decrypted is not None or not self._incoming:
            return
        message = self._incoming[0]
        is_short = message.header_missing or message.num_left < MIN_WAKEUP_BYTES
        low_water = 1 if is_short else min(MAX_WAKEUP_BYTES, message.num_left)
        if low_water != self._low_water:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)
            self._low_water = low_water

    def move(self) -> bool:
        """Send and receive as much as the kernel allows; return True if a message got through."""
        num_queued = len(self._outgoing) + len(self._incoming)
        self.write()
        self.read()
        return len(self._outgoing) + len(self._incoming) < num_queued

    def queue(self, message: TcpMessage, *, is_sent: bool) -> None:
        """Queue a message; `move` starts it."""
        (self._outgoing if is_sent else self._incoming).append(message)


class ThreadedConnection(TcpConnection):
    """Further connection to a peer, whose bytes another thread moves."""

    def __init__(self, peer: int, sock: socket.socket, mover: "ConnectionThread") -> None:
        super().__init__(peer, sock)
        self._mover = mover

    def send(self, piece: Any, tag: int) -> TcpMessage:
        message = TcpMessage.to_send(self.peer, tag, piece)
        self._mover.submit(self, message, is_sent=True)
        return message

    def receive(self, piece: Any, tag: int) -> TcpMessage:
        message = TcpMessage.to_receive(self.peer, tag, piece)
        self._mover.submit(self, message, is_sent=False)
        return message


class ConnectionThread:
    """Thread that moves the bytes of further connections of a transport, on a processor of its own."""

    def __init__(self) -> None:
        self.progress = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable once a message is through, or a connection failed."""
        self.failure: tuple[int, Exception] | None = None
        """Peer and error of the connection that failed first."""
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = select.epoll()
        self._poller.register(self._wakeup, select.EPOLLIN)
        self._submitted: collections.deque[tuple[ThreadedConnection, TcpMessage, bool]] = collections.deque()
        self._by_descriptor: dict[int, ThreadedConnection] = {}
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="ringweave-connections", daemon=True)
        self._thread.start()

    def submit(self, connection: ThreadedConnection, message: TcpMessage, *, is_sent: bool) -> None:
        """Start a message, from the transport's thread."""
        self._submitted.append((connection, message, is_sent))
        os.eventfd_write(self._wakeup, 1)

    def close(self) -> None:
        """End the thread; the connections are closed afterwards."""
        self._is_stopped = True
        os.eventfd_write(self._wakeup, 1)
        self._thread.join()
        self._poller.close()
        os.close(self._wakeup)
        os.close(self.progress)
        self._by_descriptor.clear()

    def _run(self) -> None:
        while not self._is_stopped and self.failure is None:  # what is ready then would wake it for ever
            ready = {descriptor for descriptor, _ in self._poller.poll()}
            if self._wakeup in ready:
                os.eventfd_read(self._wakeup)
                ready.remove(self._wakeup)
            while self._submitted:
                connection, message, is_sent = self._submitted.popleft()
                connection.queue(message, is_sent=is_sent)
                self._by_descriptor[descriptor := connection.sock.fileno()] = connection
                ready.add(descriptor)
            moved = [self._move(self._by_descriptor[descriptor]) for descriptor in ready if not self.failure]
            if any(moved):
                os.eventfd_write(self.progress, 1)

    def _move(self, connection: ThreadedConnection) -> bool:
        """Move a connection's bytes; return True if the transport's thread has to know of it."""
        try:
            has_progress = connection.move()
        except (OSError, MismatchError) as cause:
            self.failure, has_progress = (connection.peer, cause), True
            watch(self._poller, connection, 0)
        else:
            watch(self._poller, connection, connection.wanted)
        return has_progress


def watch(poller: select.epoll, connection: "SocketEnd", wanted: int) -> None:
    """Register exactly these events of a connection."""
    if wanted == connection.watched:
        return
    descriptor = connection.sock.fileno()
    if not connection.watched:
        poller.register(descriptor, wanted)
    elif wanted:
        poller.modify(descriptor, wanted)
    else:
        poller.unregister(descriptor)
    connection.watched = wanted


def _check_header(message: TcpMessage) -> None:
    tag, num_bytes = _HEADER.unpack(message.header)
    if (tag, num_bytes) != (message.tag, message.num_bytes):
        raise MismatchError(message.peer, got=(tag, num_bytes), expected=(message.tag, message.num_bytes))


SPLIT_COST_S = 30e-6
"""Cost of splitting a message, a system call at each end. The fastest rail alone carries a message that would be later
by at most this much."""
MIN_STREAM_BYTES = 128 << 10
"""Part of a message that is worth waking the thread of another connection of the same rail."""


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

    def __init__(self, peer: int, rails: Sequence[TcpConnection], rates: Sequence[float], num_streams: int = 1) -> None:
        """`rates` are bytes per second, one per rail; each has `num_streams` connections, which follow each other."""
        self.peer = peer
        self.rails = tuple(rails)
        total = sum(rates)
        sums = [
            sum(rates[:rail]) + rates[rail] * n / num_streams for rail in range(len(rates)) for n in range(num_streams)
        ]
        self._split_points = [*(each / total for each in sums), 1.0]
        self._fastest = self.rails[rates.index(max(rates)) * num_streams]
        by_rails = SPLIT_COST_S / (1 / max(rates) - 1 / total) if len(rates) > 1 else 0.0
        self._max_whole_bytes = max(by_rails, MIN_STREAM_BYTES * num_streams if num_streams > 1 else 0.0)

    def send(self, piece: Any, tag: int) -> RailedMessage:
        """Queue a piece, and start sending it."""
        # The first connection's part is copied here and now, so those with threads of their own begin before it.
        last_to_first = [rail.send(part, tag) for rail, part in reversed(self._split(piece))]
        return RailedMessage(self.peer, last_to_first[::-1])

    def receive(self, piece: Any, tag: int) -> RailedMessage:
        """Expect the next message in this piece."""
        return RailedMessage(self.peer, [rail.receive(part, tag) for rail, part in self._split(piece)])

    def _split(self, piece: Any) -> list[tuple[TcpConnection, Any]]:
        """Split the piece's elements in order, one part per rail."""
        if piece.nbytes <= self._max_whole_bytes:
            return [(self._fastest, piece)]
        borders = [round(len(piece) * cut) for cut in self._split_points]
        return [(rail, piece[borders[index] : borders[index + 1]]) for index, rail in enumerate(self.rails)]


SPIN_S = 100e-6
"""About the time to sleep and wake up on a virtual processor: spinning so long loses no more than that."""
Handle = TcpMessage | RailedMessage | ShmSend | ShmRecv | ShmAck
Connection = TcpConnection | RailedConnection | ShmConnection
SocketEnd = TcpConnection | ShmConnection
"""An object with a socket: a connection, or one of its rails."""


class SocketTransport:
    """Peer-to-peer messages within a group, driven by the one thread that calls it."""

    _closed = False

    def __init__(
        self,
        listener: ChannelListener,
        channel: int,
        group: GroupInfo,
        timeout: timedelta,
        *,
        spin_s: float = 0.0,
        allows_cross_memory: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connections are made when first needed.

        Args:
            listener: Accepts this rank's connections of the channel.
            channel: Index of the channel.
            group: The ranks of the group.
            timeout: Limit on waiting for a peer to answer, and to connect where no other limit is given.
            spin_s: Seconds of spinning for a rank of this node before this thread sleeps; see SPIN_S.
            allows_cross_memory: Whether ranks of this node read large pieces in our memory, where the kernel permits.
            clock: Monotonic seconds.
        """
        self._spin_s = spin_s
        self._allows_cross_memory = allows_cross_memory
        self._group = group
        self._clock = clock
        self._connection_manager = ConnectionManager(listener, channel, group, timeout.total_seconds(), clock)
        self._connections: dict[int, Connection] = {}
        self._incomplete_rails: dict[int, dict[ConnectionPlace, socket.socket]] = {}
        self._mover: ConnectionThread | None = None
        self._shm_connections: list[ShmConnection] = []
        self._by_descriptor: dict[int, SocketEnd] = {}
        self._poller = select.epoll()
        self._arena_pool = ArenaPool()
        self._slot: ArenaSlot | None = None
        self._last_traffic: dict[int, LinkTraffic] = {}

    @staticmethod
    def expose(tensor: Tensor) -> Any:
        """Return the memory of a contiguous 1-D CPU tensor, to be sliced by elements."""
        return tensor.view(torch.uint8).numpy().reshape(tensor.numel(), tensor.element_size())

    def connect(self, peers: Iterable[int], timeout_s: float | None = None) -> None:
        """Make sure that there is a connection to each of `peers`; both sides have to want it.

        One of two ranks connects, the other one accepts (`GroupInfo.calls`). Connecting succeeds as soon as the other
        side listens, so there is no circular wait.

        `timeout_s`: limit on waiting for peers that connect to us: that of their collective. None is the limit of the
        transport.

        Raises:
            TransferFailedError: A peer is dead, or did not connect in time.
        """
        if (early := self._connection_manager.accept_early()) is not None:
            self._add_rail(*early)
        missing = [peer for peer in peers if peer not in self._connections]
        if not missing:
            return
        deadline = self._connection_manager.deadline(timeout_s)
        for peer in missing:
            if self._group.calls(self._group.group_rank, peer) and (
                socks := self._connection_manager.connect_peer(peer)
            ):
                self._add_peer(peer, socks)
        while absent := [peer for peer in missing if peer not in self._connections]:
            accepted = self._connection_manager.accept_peer(absent[0], deadline)
            if accepted is not None and accepted[0] not in self._connections:
                self._add_rail(*accepted)

    def begin_collective(self, layout: StagingLayout, element_bytes: int) -> None:
        """Reserve shared memory for the next collective's content."""
        self._slot = self._arena_pool.begin_collective(layout, element_bytes)
        for connection in self._shm_connections:
            connection.request_ack()

    def send(self, piece: Any, peer: int, tag: int, stage: int = NO_SLOT) -> Handle:
        """Queue a piece, and start sending it; it must not change until it is sent."""
        connection = self._connection(peer)
        if not isinstance(connection, ShmConnection):
            if stage != NO_SLOT and self._slot is not None and self._slot.record_read(stage):
                self._flush_sends()
            handle = self._convert_errors(connection, lambda: connection.send(piece, tag))
        else:
            slot, payload = self._slot, piece.reshape(-1)
            assert slot is not None, "a program has a stage for what goes to a rank of its node"
            handle = self._convert_errors(connection, lambda: connection.send(payload, tag, slot, stage))
        self._watch(connection)
        return handle

    def receive(self, piece: Any, peer: int, tag: int) -> Handle:
        """Expect the next message from `peer` in this piece, or of its size in shared memory."""
        connection = self._connection(peer)
        if not isinstance(connection, ShmConnection):
            handle: Handle = self._convert_errors(connection, lambda: connection.receive(piece, tag))
        else:
            handle = self._convert_errors(connection, lambda: connection.receive(piece.nbytes, tag))
        self._watch(connection)
        return handle

    def wait(self, handle: Handle, timeout_s: float) -> ReceivedContent | None:
        """Move bytes, of this and of all other messages, until this one is through.

        Raises:
            TransferFailedError: A connection broke, or `timeout_s` passed.
            MismatchError: A peer sent something else than was expected.
        """
        if handle.done:
            return handle.content
        deadline = self._clock() + timeout_s
        while not handle.done:
            left_s = deadline - self._clock()
            if self._closed:
                raise TransferFailedError(handle.peer, "the connections of this group were cut", hung=False)
            if left_s <= 0:
                raise TransferFailedError(handle.peer, f"nothing for {max(0.0, timeout_s):.3g} s", hung=True)
            for connection in self._shm_connections:
                self._convert_errors(connection, connection.write)
                self._watch(connection)
            for descriptor, events in self._wait_events(handle, min(left_s, POLL_S)):
                if self._mover is not None and descriptor == self._mover.progress:
                    self._note_progress(self._mover)
                    continue
                connection = self._by_descriptor[descriptor]
                if events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
                    self._convert_errors(connection, connection.read)
                if events & (select.EPOLLOUT | select.EPOLLHUP | select.EPOLLERR):
                    self._convert_errors(connection, connection.write)
                self._watch(connection)
        return handle.content

    def release(self, handle: Handle) -> None:
        """Release the content that `wait` returned."""
        connection = self._connection(handle.peer)
        assert isinstance(connection, ShmConnection), "nothing else is shared"
        assert isinstance(handle, ShmRecv), "only what is received is released"
        self._convert_errors(connection, lambda: connection.release(handle))
        self._watch(connection)

    def end_collective(self, timeout_s: float) -> None:
        """Block until the ranks of this node have received all acknowledgements; otherwise they would wait for us.

        Raises:
            TransferFailedError: A rank does not take them, or is dead.
        """
        for connection in self._shm_connections:
            self._convert_errors(connection, connection.write)
            self._watch(connection)
            self.wait(connection.pending_ack, timeout_s)

    def traffic(self) -> dict[int, LinkTraffic]:
        """Return the traffic so far to ranks of other nodes; after `close`, that until then."""
        if self._last_traffic:
            return self._last_traffic
        found: dict[int, LinkTraffic] = {}
        for end in list(self._by_descriptor.values()):
            if isinstance(end, TcpConnection):
                found[end.peer] = found.get(end.peer, LinkTraffic()).plus(end.traffic())
        return found

    def close(self) -> None:
        """Close all connections and the shared memory; sent data still arrives."""
        self._closed = True
        self._last_traffic = self.traffic()
        if self._mover is not None:
            self._mover.close()
            self._mover = None
        arriving = (sock for rails in self._incomplete_rails.values() for sock in rails.values())
        for sock in (*(end.sock for end in self._by_descriptor.values()), *arriving):
            sock.close()
        self._connection_manager.close()
        for known in (self._connections, self._incomplete_rails, self._by_descriptor, self._shm_connections):
            known.clear()  # they refer to this object: the memory would stay until garbage collection
        self._arena_pool, self._slot = ArenaPool(), None

    def abort(self) -> None:
        """Abort all connections, from any thread: every wait ends at once, here and at the peers."""
        self._closed = True
        for end in list(self._by_descriptor.values()):
            with contextlib.suppress(OSError):
                end.sock.shutdown(socket.SHUT_RDWR)
        self._connection_manager.abort()

    def _wait_events(self, handle: Handle, timeout_s: float) -> list[tuple[int, int]]:
        """Return ready descriptors; sleep until there is one, after spinning for a rank of this node."""
        if self._spin_s and isinstance(handle, ShmRecv | ShmSend):
            until_s = self._clock() + self._spin_s
            while self._clock() < until_s:
                if found := self._poller.poll(0):
                    return found
        return self._poller.poll(timeout_s)

    def _connection(self, peer: int) -> Connection:
        if self._closed:
            raise TransferFailedError(peer, "the connections of this group are closed", hung=False)
        return self._connections[peer]

    def _convert_errors(self, connection: Connection, move: Callable[[], Any]) -> Any:
        try:
            return move()
        except OSError as cause:
            raise TransferFailedError(connection.peer, str(cause), hung=False) from cause

    def _watch(self, connection: Connection) -> None:
        """Register exactly the events that this connection can handle next."""
        if isinstance(connection, RailedConnection):
            for rail in connection.rails:
                self._watch(rail)
        elif not isinstance(connection, ThreadedConnection):
            watch(self._poller, connection, connection.wanted)

    def _note_progress(self, mover: ConnectionThread) -> None:
        if mover.failure is not None:  # it stays readable, so that every later wait fails as well
            peer, cause = mover.failure
            if isinstance(cause, MismatchError):
                raise cause
            raise TransferFailedError(peer, str(cause), hung=False) from cause
        os.eventfd_read(mover.progress)

    def _add_rail(self, peer: int, place: ConnectionPlace, sock: socket.socket) -> None:
        """Keep a peer's connections until all of them are there."""
        arrived = self._incomplete_rails.setdefault(peer, {})
        arrived[place] = sock
        num_rails = len(self._connection_manager.rail_rates(peer))
        if sock.family == socket.AF_UNIX or len(arrived) == num_rails * place.num_streams:
            found = self._incomplete_rails.pop(peer)
            self._add_peer(peer, [found[place] for place in sorted(found, key=lambda at: (at.rail, at.stream))])

    def _add_peer(self, peer: int, socks: Sequence[socket.socket]) -> None:
        if socks[0].family == socket.AF_UNIX:
            shared = ShmConnection(
                peer, socks[0], on_space_freed=self._flush_sends, allows_cross_memory=self._allows_cross_memory
            )
            self._shm_connections.append(shared)
            self._add_connection(shared, [shared])
            return
        rates = self._connection_manager.rail_rates(peer)
        num_streams = len(socks) // len(rates)
        rails = [self._make_end(peer, sock, index % num_streams > 0) for index, sock in enumerate(socks)]
        several = len(rails) > 1
        self._add_connection(RailedConnection(peer, rails, rates, num_streams) if several else rails[0], rails)

    def _make_end(self, peer: int, sock: socket.socket, has_thread: bool) -> TcpConnection:
        if not has_thread:
            return TcpConnection(peer, sock)
        if self._mover is None:
            self._mover = ConnectionThread()
            self._poller.register(self._mover.progress, select.EPOLLIN)
        return ThreadedConnection(peer, sock, self._mover)

    def _add_connection(self, connection: Connection, ends: Sequence[SocketEnd]) -> None:
        self._connections[connection.peer] = connection
        self._by_descriptor.update({end.sock.fileno(): end for end in ends})
        self._watch(connection)

    def _flush_sends(self) -> None:
        """Continue all sends that wait for a place, as places are free again."""
        for connection in self._shm_connections:
            self._convert_errors(connection, connection.flush_sends)
            self._watch(connection)
