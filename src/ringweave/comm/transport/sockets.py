"""The connections of a rank to the others of its group: TCP between nodes, shared memory inside one.

One thread drives one transport: it queues messages and, while it waits for one of them, moves the bytes of all. No
other thread, no copy that is not needed, no rendezvous: between nodes a message goes from the sender's tensor into the
kernel and from there into the receiver's tensor. What is not received yet waits in the kernel, and TCP slows the sender
down.

Messages between two ranks arrive in the order in which they were sent and carry a header, so that a peer that runs
something else is found out at once. A closed connection is an error at once; a silent one when time is up; and `abort`
from any thread ends every wait. (Gloo's own peer-to-peer messages lose the failure of a send now and then, and cannot
be interrupted: docs/decisions/0002-sockets.md.)
"""

import contextlib
import select
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from ringweave.comm.members import Members
from ringweave.comm.transport.arenas import Showing, ShowRoom
from ringweave.comm.transport.connecting import LOOK_UP_S, Door, Switchboard
from ringweave.comm.transport.rails import Bundle, RailedConnection
from ringweave.comm.transport.seam import Content, TransferFailedError
from ringweave.comm.transport.shared import Seen, SharedConnection, Shown, Telling
from ringweave.comm.transport.streams import Message, StreamConnection
from ringweave.schedules.programs.staging import NO_STAGE, Layout

LOOK_S = 100e-6
"""About what falling asleep and waking up take on a virtual processor: who looks so long loses no more than that."""
Handle = Message | Bundle | Shown | Seen | Telling
Connection = StreamConnection | RailedConnection | SharedConnection
End = StreamConnection | SharedConnection
"""What has a socket: a connection, or one of its rails."""


class SocketTransport:
    """Peer-to-peer messages within a group, driven by the one thread that calls it."""

    def __init__(
        self,
        door: Door,
        lane: int,
        members: Members,
        timeout: timedelta,
        *,
        look_s: float = 0.0,
        lends: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nobody is connected yet: connections are made when first needed.

        Args:
            door: Where the members expect this rank's lane.
            lane: Its number.
            members: Who is in the group.
            timeout: How long a peer may take to answer a call, and to call us where no other limit is given.
            look_s: Seconds for which a rank of this node is looked for before this thread sleeps; see LOOK_S.
            lends: Whether ranks of this node read large pieces in this one's memory, where the kernel lets them.
            clock: Seconds that only grow.
        """
        self._look_s = look_s
        self._lends = lends
        self._members = members
        self._clock = clock
        self._switchboard = Switchboard(door, lane, members, timeout.total_seconds(), clock)
        self._connections: dict[int, Connection] = {}
        self._arriving: dict[int, dict[int, socket.socket]] = {}
        self._shared: list[SharedConnection] = []
        self._by_descriptor: dict[int, End] = {}
        self._poller = select.epoll()
        self._show_room = ShowRoom()
        self._showing: Showing | None = None
        self._closed = False

    @staticmethod
    def expose(tensor: Tensor) -> Any:
        """The memory of a contiguous one-dimensional CPU tensor, to be sliced by elements."""
        return tensor.view(torch.uint8).numpy().reshape(tensor.numel(), tensor.element_size())

    def connect(self, peers: Iterable[int], timeout_s: float | None = None) -> None:
        """Make sure that there is a connection to each of `peers`; both sides have to want it.

        The lower rank calls, the higher one answers: a call succeeds as soon as the other listens, so nobody waits in
        a circle.

        Args:
            peers: Group ranks.
            timeout_s: How long those that have to call us may take to come to it: as long as the collective may that
                they are connected for. None is the limit of the transport.

        Raises:
            TransferFailedError: A peer is gone, or did not come in time.
        """
        missing = [peer for peer in peers if peer not in self._connections]
        if not missing:
            return
        deadline = self._switchboard.deadline(timeout_s)
        for peer in missing:
            if peer > self._members.group_rank:
                self._adopt(peer, self._switchboard.call(peer))
        while absent := [peer for peer in missing if peer not in self._connections]:
            answered = self._switchboard.answer(absent[0], deadline)
            if answered is not None and answered[0] not in self._connections:
                self._admit(*answered)

    def begin(self, layout: Layout, element_bytes: int) -> None:
        """Find a place in shared memory for what the next collective shows to this node's ranks."""
        self._showing = self._show_room.begin(layout, element_bytes)
        for connection in self._shared:
            connection.tell()

    def send(self, piece: Any, peer: int, tag: int, stage: int = NO_STAGE) -> Handle:
        """Queue a piece, and start sending it; it must not change until it has left."""
        connection = self._connection(peer)
        if not isinstance(connection, SharedConnection):
            if stage != NO_STAGE and self._showing is not None and self._showing.note_read(stage):
                self._show_more()
            handle = self._attempt(connection, lambda: connection.send(piece, tag))
        else:
            showing, payload = self._showing, piece.reshape(-1)
            assert showing is not None, "a program has a stage for what goes to a rank of its node"
            handle = self._attempt(connection, lambda: connection.send(payload, tag, showing, stage))
        self._watch(connection)
        return handle

    def receive(self, piece: Any, peer: int, tag: int) -> Handle:
        """Expect the next message from `peer` in this piece, or of its size in shared memory."""
        connection = self._connection(peer)
        if not isinstance(connection, SharedConnection):
            handle: Handle = connection.receive(piece, tag)
        else:
            handle = self._attempt(connection, lambda: connection.receive(piece.nbytes, tag))
        self._watch(connection)
        return handle

    def wait(self, handle: Handle, timeout_s: float) -> Content | None:
        """Move bytes, of this and of all other messages, until this one is through.

        Raises:
            TransferFailedError: Some connection that is waited for broke, or `timeout_s` passed.
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
                raise TransferFailedError(handle.peer, f"nothing for {timeout_s:.3g} s", hung=True)
            for connection in self._shared:
                self._attempt(connection, connection.write)
                self._watch(connection)
            for descriptor, events in self._events(handle, min(left_s, LOOK_UP_S)):
                connection = self._by_descriptor[descriptor]
                if events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
                    self._attempt(connection, connection.read)
                if events & (select.EPOLLOUT | select.EPOLLHUP | select.EPOLLERR):
                    self._attempt(connection, connection.write)
                self._watch(connection)
        return handle.content

    def release(self, handle: Handle) -> None:
        """What `wait` returned has been read."""
        connection = self._connection(handle.peer)
        assert isinstance(connection, SharedConnection), "nothing else is shared"
        assert isinstance(handle, Seen), "only what is received is released"
        self._attempt(connection, lambda: connection.release(handle))
        self._watch(connection)

    def end(self, timeout_s: float) -> None:
        """Block until the ranks of this node have been told all that was read, or they would wait for us.

        Raises:
            TransferFailedError: One does not take it in, or is gone.
        """
        for connection in self._shared:
            self._attempt(connection, connection.write)
            self._watch(connection)
            self.wait(connection.telling, timeout_s)

    def close(self) -> None:
        """Let go of all connections and of the shared memory; what was sent still arrives."""
        self._closed = True
        arriving = (sock for rails in self._arriving.values() for sock in rails.values())
        for sock in (*(end.sock for end in self._by_descriptor.values()), *arriving):
            sock.close()
        self._switchboard.close()
        for known in (self._connections, self._arriving, self._by_descriptor, self._shared):
            known.clear()  # they refer to this object: the memory would stay until the collector comes by
        self._show_room, self._showing = ShowRoom(), None

    def abort(self) -> None:
        """Cut all connections, from any thread: every wait ends at once, here and at the peers."""
        self._closed = True
        for end in list(self._by_descriptor.values()):
            with contextlib.suppress(OSError):
                end.sock.shutdown(socket.SHUT_RDWR)
        self._switchboard.abort()

    def _events(self, handle: Handle, timeout_s: float) -> list[tuple[int, int]]:
        """What can move; sleeps until something can, after a short look for a rank of this node."""
        if self._look_s and isinstance(handle, Seen | Shown):
            until_s = self._clock() + self._look_s
            while self._clock() < until_s:
                if found := self._poller.poll(0):
                    return found
        return self._poller.poll(timeout_s)

    def _connection(self, peer: int) -> Connection:
        if self._closed:
            raise TransferFailedError(peer, "the connections of this group are closed", hung=False)
        return self._connections[peer]

    def _attempt(self, connection: Connection, move: Callable[[], Any]) -> Any:
        try:
            return move()
        except OSError as cause:
            raise TransferFailedError(connection.peer, str(cause), hung=False) from cause

    def _watch(self, connection: Connection) -> None:
        """Ask the poller for exactly what this connection can do next."""
        if isinstance(connection, RailedConnection):
            for rail in connection.rails:
                self._watch(rail)
            return
        wanted = connection.wanted
        if wanted == connection.watched:
            return
        descriptor = connection.sock.fileno()
        if not connection.watched:
            self._poller.register(descriptor, wanted)
        elif wanted:
            self._poller.modify(descriptor, wanted)
        else:
            self._poller.unregister(descriptor)
        connection.watched = wanted

    def _admit(self, peer: int, rail: int, sock: socket.socket) -> None:
        """Keep a caller's connection until it has called by all its rails."""
        arrived = self._arriving.setdefault(peer, {})
        arrived[rail] = sock
        if sock.family == socket.AF_UNIX or len(arrived) == len(self._switchboard.rail_rates(peer)):
            self._adopt(peer, [sock for _, sock in sorted(self._arriving.pop(peer).items())])

    def _adopt(self, peer: int, socks: Sequence[socket.socket]) -> None:
        if socks[0].family == socket.AF_UNIX:
            shared = SharedConnection(peer, socks[0], on_read=self._show_more, lends=self._lends)
            self._shared.append(shared)
            self._know(shared, [shared])
            return
        rails = [StreamConnection(peer, sock) for sock in socks]
        several = len(rails) > 1
        self._know(RailedConnection(peer, rails, self._switchboard.rail_rates(peer)) if several else rails[0], rails)

    def _know(self, connection: Connection, ends: Sequence[End]) -> None:
        self._connections[connection.peer] = connection
        self._by_descriptor.update({end.sock.fileno(): end for end in ends})
        self._watch(connection)

    def _show_more(self) -> None:
        """Places have become free: whoever waits for one goes on."""
        for connection in self._shared:
            self._attempt(connection, connection.show)
            self._watch(connection)
