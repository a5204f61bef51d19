"""Moving pieces between ranks over TCP connections of our own.

One thread drives one transport: it queues messages and, while it waits for one of them, moves the bytes of all. No
other thread, no copy, no rendezvous: a message goes from the sender's tensor into the kernel and from there into the
receiver's tensor. What is not received yet waits in the kernel, and TCP slows the sender down.

Messages between two ranks arrive in the order in which they were sent and carry a header, so that a peer that runs
something else is found out at once. A closed connection is an error at once; a silent one when time is up; and `abort`
from any thread ends every wait. (Gloo's own peer-to-peer messages lose the failure of a send now and then, and cannot
be interrupted: docs/decisions/0002-sockets.md.)
"""

import collections
import contextlib
import hmac
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from ringweave.comm.members import TOKEN_BYTES, Members
from ringweave.comm.transport.seam import MismatchError, TransferFailedError

_HEADER = struct.Struct("<QQ")
_HELLO = struct.Struct(f"<{TOKEN_BYTES}sI")

_BACKLOG = 1024

_LOOK_UP_S = 0.2
"""How often a waiting thread looks for what no event tells it: that it was aborted, that a caller is gone."""

_HELLO_S = 1.0
"""How long a caller may take to say who it is."""


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


class _Connection:
    """One peer: its socket and the messages that wait for it."""

    def __init__(self, peer: int, sock: socket.socket) -> None:
        self.peer = peer
        self.sock = sock
        self.outgoing: collections.deque[Message] = collections.deque()
        self.incoming: collections.deque[Message] = collections.deque()
        self.watched = 0

    def write(self) -> None:
        """Send as much as the kernel takes."""
        while self.outgoing:
            message = self.outgoing[0]
            try:
                message.advance(self.sock.sendmsg(message.left))
            except BlockingIOError:
                return
            if message.done:
                self.outgoing.popleft()

    def read(self) -> None:
        """Receive as much as the kernel has of the messages that are expected."""
        while self.incoming:
            message = self.incoming[0]
            header_was_missing = message.header_missing
            try:
                received = self.sock.recvmsg_into(message.left)[0]
            except BlockingIOError:
                return
            if received == 0:
                raise ConnectionResetError("connection closed by peer")
            message.advance(received)
            if header_was_missing and not message.header_missing:
                self._check(message)
            if message.done:
                self.incoming.popleft()

    @staticmethod
    def _check(message: Message) -> None:
        tag, num_bytes = _HEADER.unpack(message.header)
        if (tag, num_bytes) != (message.tag, message.num_bytes):
            raise MismatchError(message.peer, got=(tag, num_bytes), expected=(message.tag, message.num_bytes))


def listen(address: str, count: int) -> list[socket.socket]:
    """So many sockets that listen on `address`, each on a free port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return [socket.create_server((address, 0), family=family, backlog=_BACKLOG) for _ in range(count)]


class SocketTransport:
    """Peer-to-peer messages within a group, driven by the one thread that calls it."""

    def __init__(
        self,
        listener: socket.socket,
        lane: int,
        members: Members,
        timeout: timedelta,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`listener` is where the members expect this rank's lane; connections are made when first needed."""
        self._listener = listener
        self._lane = lane
        self._members = members
        self._timeout = timeout
        self._clock = clock
        self._connections: dict[int, _Connection] = {}
        self._by_descriptor: dict[int, _Connection] = {}
        self._poller = select.epoll()
        self._closed = False

    @staticmethod
    def expose(tensor: Tensor) -> Any:
        """The memory of a contiguous one-dimensional CPU tensor, to be sliced by elements."""
        return tensor.view(torch.uint8).numpy().reshape(tensor.numel(), tensor.element_size())

    def connect(self, peers: Iterable[int]) -> None:
        """Make sure that there is a connection to each of `peers`; both sides have to want it.

        The lower rank calls, the higher one answers: a call succeeds as soon as the other listens, so nobody waits in
        a circle.

        Raises:
            TransferFailedError: A peer did not come within the time-out.
        """
        deadline = self._clock() + self._timeout.total_seconds()
        missing = [peer for peer in peers if peer not in self._connections]
        if not missing:
            return
        for peer in missing:
            if peer > self._members.group_rank:
                self._call(peer)
        while absent := [peer for peer in missing if peer not in self._connections]:
            self._answer(absent[0], deadline)

    def send(self, piece: Any, peer: int, tag: int) -> Message:
        """Queue a piece, and start sending it; it must not change until it has left."""
        connection = self._connection(peer)
        payload = memoryview(piece)
        message = Message(peer, tag, payload, bytearray(_HEADER.pack(tag, payload.nbytes)))
        connection.outgoing.append(message)
        if len(connection.outgoing) == 1:
            self._attempt(connection, connection.write)
        self._watch(connection)
        return message

    def receive(self, piece: Any, peer: int, tag: int) -> Message:
        """Expect the next message from `peer` in this piece."""
        connection = self._connection(peer)
        message = Message(peer, tag, memoryview(piece), bytearray(_HEADER.size))
        connection.incoming.append(message)
        self._watch(connection)
        return message

    def wait(self, handle: Message, timeout_s: float) -> None:
        """Move bytes, of this and of all other messages, until this one is through.

        Raises:
            TransferFailedError: Some connection that is waited for broke, or `timeout_s` passed.
            MismatchError: A peer sent something else than was expected.
        """
        deadline = self._clock() + timeout_s
        while not handle.done:
            left_s = deadline - self._clock()
            if self._closed:
                raise TransferFailedError(handle.peer, "the connections of this group were cut", hung=False)
            if left_s <= 0:
                raise TransferFailedError(handle.peer, f"nothing for {timeout_s:.3g} s", hung=True)
            for descriptor, events in self._poller.poll(min(left_s, _LOOK_UP_S)):
                connection = self._by_descriptor[descriptor]
                if events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
                    self._attempt(connection, connection.read)
                if events & (select.EPOLLOUT | select.EPOLLHUP | select.EPOLLERR):
                    self._attempt(connection, connection.write)
                self._watch(connection)

    def close(self) -> None:
        """Let go of all connections; what was sent still arrives."""
        self._closed = True
        for connection in self._connections.values():
            connection.sock.close()
        self._listener.close()

    def abort(self) -> None:
        """Cut all connections, from any thread: every wait ends at once, here and at the peers."""
        self._closed = True
        for connection in list(self._connections.values()):
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)

    def _connection(self, peer: int) -> _Connection:
        if self._closed:
            raise TransferFailedError(peer, "the connections of this group are closed", hung=False)
        return self._connections[peer]

    def _attempt(self, connection: _Connection, move: Callable[[], None]) -> None:
        try:
            move()
        except OSError as cause:
            raise TransferFailedError(connection.peer, str(cause), hung=False) from cause

    def _watch(self, connection: _Connection) -> None:
        """Ask the poller for exactly what this connection can do next."""
        wanted = (select.EPOLLIN if connection.incoming else 0) | (select.EPOLLOUT if connection.outgoing else 0)
        if wanted == connection.watched:
            return
        descriptor = connection.sock.fileno()
        if not connection.watched:
            self._poller.register(descriptor, wanted)
        elif wanted:
            self._poller.modify(descriptor, wanted)
        else:
            self._poller.unregister(descriptor)  # or a peer that has left would wake us for ever
        connection.watched = wanted

    def _call(self, peer: int) -> None:
        callee = self._members.ranks[peer]
        where = (callee.place.address, callee.ports[self._lane])
        try:
            sock = socket.create_connection(where, timeout=self._timeout.total_seconds())
            sock.sendall(_HELLO.pack(self._members.token, self._members.group_rank))
        except OSError as cause:
            text = f"no connection to {where[0]} port {where[1]}: {cause}"
            raise TransferFailedError(peer, text, hung=isinstance(cause, TimeoutError)) from cause
        self._adopt(peer, sock)

    def _answer(self, peer: int, deadline: float) -> None:
        """Take one call; whoever does not know the token is hung up on."""
        left_s = deadline - self._clock()
        if left_s <= 0 or self._closed:
            raise TransferFailedError(peer, "it did not connect", hung=not self._closed)
        self._listener.settimeout(min(left_s, _LOOK_UP_S))
        try:
            sock, _ = self._listener.accept()
        except TimeoutError:
            self._probe(peer)
            return
        except OSError:
            return  # we were cut off, which the next round says
        caller = self._caller(sock, min(left_s, _HELLO_S))
        if caller is None:
            sock.close()
        else:
            self._adopt(caller, sock)

    def _probe(self, peer: int) -> None:
        """Raise if the peer that should call us is gone: then nobody listens at its port any more."""
        waited_for = self._members.ranks[peer]
        where = (waited_for.place.address, waited_for.ports[self._lane])
        try:
            socket.create_connection(where, timeout=_LOOK_UP_S).close()
        except TimeoutError:
            return  # silent, but not known to be gone
        except OSError as cause:
            raise TransferFailedError(peer, f"it does not listen any more: {cause}", hung=False) from cause

    def _caller(self, sock: socket.socket, timeout_s: float) -> int | None:
        """Group rank of the caller, None if it is not one that may call."""
        sock.settimeout(timeout_s)
        try:
            hello = sock.recv(_HELLO.size, socket.MSG_WAITALL)
        except OSError:
            return None
        if len(hello) < _HELLO.size:
            return None
        token, caller = _HELLO.unpack(hello)
        may_call = hmac.compare_digest(token, self._members.token) and caller < self._members.group_rank
        return caller if may_call and caller not in self._connections else None

    def _adopt(self, peer: int, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        connection = _Connection(peer, sock)
        self._connections[peer] = self._by_descriptor[sock.fileno()] = connection
