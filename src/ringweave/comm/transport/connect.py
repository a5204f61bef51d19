"""Connections between the ranks of a group: one of two connects, the other one accepts (`GroupInfo.calls`)."""

import contextlib
import hmac
import math
import os
import select
import socket
import ssl
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ringweave import ports, relayed_address
from ringweave.accept_limits import ConnectionLimiter, connection_id
from ringweave.comm.group_info import MAX_STREAMS, TOKEN_BYTES, GroupInfo, RankEndpoint
from ringweave.comm.transport.interface import TransferFailedError
from ringweave.ports import PortRange
from ringweave.relayed_address import is_relayed

if TYPE_CHECKING:
    from ringweave.comm.transport.encryption import LinkEncryption

NUM_CHANNELS = 2
"""Collectives of one group that may be in flight at once."""


@dataclass(slots=True)
class _PendingConnection:
    """A connection whose other end is not known yet."""

    sock: socket.socket
    id: int
    hello: bytes = b""
    """Hello of the other end as far as it has come; of a connection that this end has opened, what stands for it."""
    is_secured: bool = True
    """Its TLS handshake is done, or it has none."""
    call: "_Call | None" = None
    """Set if this end has opened it."""


@dataclass(frozen=True, slots=True)
class _Call:
    """Connection that this end has opened and that is being encrypted."""

    peer: int
    own_hello: bytes
    """Sent once the other end is known."""
    fingerprint: str
    """Expected of the other end's certificate."""


class IncomingConnections:
    """Accepts the connections of one channel; a silent one blocks no other."""

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        hello_bytes: int,
        clock: Callable[[], float],
        encryption: "LinkEncryption | None" = None,
    ) -> None:
        """Every connection starts with `hello_bytes` bytes; those by TCP are encrypted if there is an encryption."""
        self._listeners = tuple(listeners)
        self._hello_bytes = hello_bytes
        self._limiter = ConnectionLimiter(clock=clock)
        self._encryption = encryption
        self._pending: dict[int, _PendingConnection] = {}

    def call(self, sock: socket.socket, call: _Call, hello: bytes) -> None:
        """Encrypt a connection that this end has opened; `wait_hello` returns it with `hello` when that is done.

        The other end may not look for connections yet, so this does not wait for it.
        """
        assert self._encryption is not None, "plain connections are ready at once"
        wrapped = self._encryption.wrap_socket(sock, is_server=False)
        connection = _PendingConnection(wrapped, connection_id(wrapped), hello, is_secured=False, call=call)
        self._pending[wrapped.fileno()] = connection
        self._secure(connection)

    def wait_hello(self, timeout_s: float) -> tuple[bytes, socket.socket] | None:
        """Return a hello and its connection, which does not block; None if none arrived within `timeout_s`.

        It may return earlier where a connection was accepted but is still silent.

        Raises:
            OSError: The listeners were shut down.
            ValueError: They were closed.
            TransferFailedError: The other end of a connection that this end has opened is not the wanted rank.
        """
        for descriptor in self._wait_ready(timeout_s):
            connection = self._pending.get(descriptor) or self._accept(descriptor)
            if connection is not None and self._advance(connection):
                return connection.hello, connection.sock
        cut = self._limiter.cut_overdue()
        for connection in [each for each in self._pending.values() if each.id in cut]:
            self._remove(connection).close()
        return None

    @property
    def has_overdue(self) -> bool:
        """True if a connection is silent for too long, or was cut for a later one, while no rank waits for one."""
        num_accepted = sum(each.call is None for each in self._pending.values())
        return num_accepted > self._limiter.num_pending or self._limiter.has_overdue

    def close(self) -> None:
        for connection in list(self._pending.values()):
            self._remove(connection).close()
        self._limiter.close()

    def pending_sockets(self) -> list[socket.socket]:
        """Return the connections whose hello is incomplete; from any thread."""
        return [connection.sock for connection in list(self._pending.values())]

    def _wait_ready(self, timeout_s: float) -> list[int]:
        """Return descriptors of connections with data, and of listeners with new connections."""
        if answered := [each for each, pending in self._pending.items() if pending.call and pending.is_secured]:
            return answered  # the other end was so quick that nothing more will come
        poller = select.poll()  # select.select fails in a process with more than 1023 descriptors
        for descriptor in (*self._pending, *self._listeners):
            poller.register(descriptor, select.POLLIN)
        return [descriptor for descriptor, _ in poller.poll(math.ceil(1000 * timeout_s))]

    def _accept(self, descriptor: int) -> _PendingConnection | None:
        """Accept a connection at the listener with this descriptor, unless there are too many."""
        listener = next((each for each in self._listeners if each.fileno() == descriptor), None)
        if listener is None:
            raise ValueError("the listener was closed")
        accepted = self._limiter.accept(listener)
        if accepted is None:
            return None
        sock, _ = accepted
        sock.setblocking(False)
        number, is_secured = connection_id(sock), self._encryption is None or sock.family == socket.AF_UNIX
        if self._encryption is not None and not is_secured:
            try:
                sock = self._encryption.wrap_socket(sock, is_server=True)
            except OSError:  # a stranger, who has gone again
                self._limiter.finish(number)
                return None
        connection = self._pending[sock.fileno()] = _PendingConnection(sock, number, is_secured=is_secured)
        return connection

    def _advance(self, connection: _PendingConnection) -> bool:
        """Read, and return True if the other end is known; a closed connection is removed."""
        if not connection.is_secured and not self._secure(connection):
            return False
        if connection.call is not None:
            self._finish_call(connection, connection.call)
            return True
        return self._read_hello(connection)

    def _secure(self, connection: _PendingConnection) -> bool:
        """Continue the TLS handshake; return True once it is done."""
        assert self._encryption is not None, "plain connections are secured as they are"
        try:
            connection.sock.do_handshake()  # type: ignore[attr-defined]  # pyrefly: ignore
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        except OSError as cause:
            if connection.call is not None:
                self._remove(connection).close()
                text = f"the connection to it cannot be encrypted: {cause}"
                raise TransferFailedError(connection.call.peer, text, hung=False) from cause
            with contextlib.suppress(OSError), self._encryption.refusals.noted(connection.sock):
                raise
            self._remove(connection).close()
            return False
        connection.is_secured = True
        return True

    def _finish_call(self, connection: _PendingConnection, call: _Call) -> None:
        self._remove(connection)
        assert self._encryption is not None, "it made the connection"
        found = self._encryption.peer_fingerprint(connection.sock)
        try:
            if not hmac.compare_digest(found, call.fingerprint):
                raise ConnectionRefusedError(f"its certificate is {found[:16]}..., expected {call.fingerprint[:16]}...")
            connection.sock.sendall(call.own_hello)
        except OSError as cause:
            connection.sock.close()
            raise TransferFailedError(call.peer, f"another process answers: {cause}", hung=False) from cause

    def _read_hello(self, connection: _PendingConnection) -> bool:
        try:
            more = connection.sock.recv(self._hello_bytes - len(connection.hello))
        except (BlockingIOError, ssl.SSLWantReadError):
            return False
        except OSError:
            more = b""
        connection.hello += more
        if not more:
            self._remove(connection).close()
            return False
        if len(connection.hello) < self._hello_bytes:
            return False
        self._remove(connection)
        return True

    def _remove(self, connection: _PendingConnection) -> socket.socket:
        self._limiter.finish(connection.id)
        self._pending.pop(connection.sock.fileno(), None)  # another thread may have closed them
        return connection.sock


_HELLO = struct.Struct(f"<{TOKEN_BYTES}sII")
"""Token, group rank of the connecting peer, and the place of the connection among those of the two ranks."""
_BACKLOG = 1024
_SOCKET_NAME_BYTES = 16

POLL_S = 0.2
"""Interval at which a waiting thread checks for conditions without an event: its own abort, or a dead peer."""

_MAX_PROBE_PAUSE_S = 5.0
"""Longest pause between two checks whether an absent peer is dead. Each check occupies one of the peer's pending
connections until it answers, so checks get rarer."""


@dataclass(frozen=True, slots=True)
class ConnectionPlace:
    """Place of a connection among those of two ranks: their rails, one per NIC, have `num_streams` each."""

    rail: int
    stream: int
    num_streams: int

    @classmethod
    def parse(cls, word: int) -> "ConnectionPlace":
        """Read the word of a hello."""
        return cls(word & 0xFFFF, (word >> 16) & 0xFF, (word >> 24) + 1)

    @property
    def word(self) -> int:
        return self.rail | self.stream << 16 | (self.num_streams - 1) << 24

    def is_among(self, num_rails: int) -> bool:
        """Return True if two ranks with so many rails may have such a connection."""
        return self.rail < num_rails and self.stream < self.num_streams <= MAX_STREAMS


@dataclass(frozen=True, slots=True)
class ChannelListener:
    """Sockets on which this rank accepts the connections of one channel."""

    tcp_sockets: tuple[socket.socket, ...]
    """TCP, at each address of this node, for ranks of other nodes."""
    unix_socket: socket.socket
    """Unix socket without a file, in the network namespace, for ranks of this node."""

    @property
    def endpoint(self) -> RankEndpoint:
        ports = tuple(listener.getsockname()[1] for listener in self.tcp_sockets)
        return RankEndpoint(ports, self.unix_socket.getsockname()[1:].decode())

    @property
    def sockets(self) -> tuple[socket.socket, ...]:
        return (*self.tcp_sockets, self.unix_socket)

    def close(self) -> None:
        """Accept no more connections."""
        for listener in self.sockets:
            listener.close()

    def abort(self) -> None:
        """Refuse connections, and end every wait for one, from any thread."""
        for listener in self.sockets:
            _shut_down(listener)


def _shut_down(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def open_listeners(addresses: Sequence[str], count: int, within: PortRange | None = None) -> list[ChannelListener]:
    """Open so many listeners, each on a free port of every address; `within` limits the ports.

    Raises:
        LaunchError: All ports of the range are taken.
    """
    return [
        ChannelListener(
            tuple(ports.create_server(address, within, backlog=_BACKLOG) for address in addresses), _open_unix()
        )
        for _ in range(count)
    ]


def _open_unix() -> socket.socket:
    inner = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    inner.bind(b"\0ringweave-" + os.urandom(_SOCKET_NAME_BYTES).hex().encode())
    inner.listen(_BACKLOG)
    return inner


class ConnectionManager:
    """Makes the connections of one channel."""

    def __init__(
        self, listener: ChannelListener, channel: int, group: GroupInfo, timeout_s: float, clock: Callable[[], float]
    ) -> None:
        """`timeout_s` limits how long a peer may take to answer, and to connect where no other limit is given."""
        self._listener = listener
        self._channel = channel
        self._group = group
        self._timeout_s = timeout_s
        self._clock = clock
        self._closed = False
        self._incoming = IncomingConnections(listener.sockets, _HELLO.size, clock, group.encryption)
        self._next_probes: dict[int, tuple[float, float]] = {}

    def deadline(self, timeout_s: float | None) -> float:
        """Return the time by which a peer has to be there; None gives it the time that it may take to answer."""
        return self._clock() + (self._timeout_s if timeout_s is None else timeout_s)

    def rail_rates(self, peer: int) -> tuple[float, ...]:
        """Return bytes per second of each rail to a peer: one per NIC of both nodes, at the slower one's rate."""
        return tuple(map(min, self._group.own_info.location.rates, self._group.ranks[peer].location.rates))

    def connect_peer(self, peer: int) -> list[socket.socket]:
        """Connect to a rank that accepts, on every rail, or on one Unix socket if it is on this node.

        Returns:
            The connections, those of a rail one after the other. Those that are to be encrypted, `accept_peer` returns
            once the peer has answered.

        Raises:
            TransferFailedError: The peer cannot be reached.
        """
        callee = self._group.ranks[peer]
        if callee.location.node == self._group.own_info.location.node:
            inner = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                inner.settimeout(self._timeout_s)
                inner.connect(b"\0" + callee.endpoints[self._channel].name.encode())
                inner.sendall(self._hello(self._group.group_rank, ConnectionPlace(0, 0, 1)))
            except OSError:
                inner.close()  # another node of the same name, or a separate container
            else:
                return [inner]
        rails, num_streams = range(len(self.rail_rates(peer))), self._group.num_streams_to(peer)
        places = [ConnectionPlace(rail, stream, num_streams) for rail in rails for stream in range(num_streams)]
        socks = [self._connect_rail(peer, place) for place in places]
        if self._group.encryption is None:
            return socks
        for place, sock in zip(places, socks, strict=True):
            call = _Call(peer, self._hello(self._group.group_rank, place), callee.fingerprint)
            self._incoming.call(sock, call, self._hello(peer, place))
        return []

    def _connect_rail(self, peer: int, place: ConnectionPlace) -> socket.socket:
        callee, own = self._group.ranks[peer], self._group.own_info.location
        where = (callee.location.addresses[place.rail], callee.endpoints[self._channel].ports[place.rail])
        leaving_by = (own.addresses[place.rail], 0) if own.more_addresses else None
        try:
            sock = socket.create_connection(where, timeout=self._timeout_s, source_address=leaving_by)
            if is_relayed(own.address):
                relayed_address.keep_alive(sock)
            if self._group.encryption is None:
                sock.sendall(self._hello(self._group.group_rank, place))
        except OSError as cause:
            text = f"no connection to {where[0]} port {where[1]}: {cause}"
            raise TransferFailedError(peer, text, hung=isinstance(cause, TimeoutError)) from cause
        return sock

    def _hello(self, caller: int, place: ConnectionPlace) -> bytes:
        return _HELLO.pack(self._group.token, caller, place.word)

    def accept_peer(self, peer: int, deadline: float) -> tuple[int, ConnectionPlace, socket.socket] | None:
        """Accept one connection while `peer` is waited for, or encrypt one that this rank has opened.

        Connections without the token are closed, and so are those whose certificate is not that of the rank.

        A silent connection blocks neither this rank nor other peers.

        Returns:
            Group rank, place and connection; None if there is none yet.

        Raises:
            TransferFailedError: `peer` is dead, or time is up.
        """
        left_s = deadline - self._clock()
        if left_s <= 0 or self._closed:
            raise TransferFailedError(peer, "it did not connect", hung=not self._closed)
        try:
            incoming = self._incoming.wait_hello(min(left_s, POLL_S))
        except (OSError, ValueError):
            return None  # our connection was cut, which the next round reports
        if incoming is None and self._is_probe_due(peer):
            self._probe_peer(peer)
        return None if incoming is None else self._admit(*incoming)

    def accept_early(self) -> tuple[int, ConnectionPlace, socket.socket] | None:
        """Accept a peer that nobody waits for yet, if others are silent for so long that they have to be cut."""
        with contextlib.suppress(OSError, ValueError):
            if self._incoming.has_overdue and (incoming := self._incoming.wait_hello(0.0)) is not None:
                return self._admit(*incoming)
        return None

    def _admit(self, hello: bytes, sock: socket.socket) -> tuple[int, ConnectionPlace, socket.socket] | None:
        caller = self._identify(hello, sock)
        if caller is None:
            if self._group.encryption is not None:
                self._group.encryption.note_stranger(sock)
            sock.close()
            return None
        return *caller, sock

    def close(self) -> None:
        """Accept no more connections."""
        self._closed = True
        self._incoming.close()
        self._listener.close()

    def abort(self) -> None:
        """End every wait for a connection, from any thread."""
        self._closed = True
        self._listener.abort()
        for sock in self._incoming.pending_sockets():
            _shut_down(sock)

    def _is_probe_due(self, peer: int) -> bool:
        """Return True if a check for an absent peer is due: often at first, then ever more rarely."""
        now_s = self._clock()
        due_s, pause_s = self._next_probes.get(peer, (now_s, POLL_S))
        if now_s < due_s:
            return False
        self._next_probes[peer] = now_s + pause_s, min(2 * pause_s, _MAX_PROBE_PAUSE_S)
        return True

    def _probe_peer(self, peer: int) -> None:
        """Raise if an absent peer is dead: then nothing listens at its port any more."""
        waited_for = self._group.ranks[peer]
        where = (waited_for.location.address, waited_for.endpoints[self._channel].ports[0])
        try:
            socket.create_connection(where, timeout=POLL_S).close()
        except TimeoutError:
            return  # silent, but not known to be dead
        except OSError as cause:
            raise TransferFailedError(peer, f"it does not listen any more: {cause}", hung=False) from cause

    def _identify(self, hello: bytes, sock: socket.socket) -> tuple[int, ConnectionPlace] | None:
        """Return the peer's group rank and the connection's place; None if it is not admitted."""
        token, peer, word = _HELLO.unpack(hello)
        place = ConnectionPlace.parse(word)
        if not hmac.compare_digest(token, self._group.token) or peer >= self._group.group_size:
            return None
        encryption = self._group.encryption
        is_encrypted = encryption is not None and sock.family != socket.AF_UNIX
        found = encryption.peer_fingerprint(sock) if encryption is not None and is_encrypted else ""
        if is_encrypted and not hmac.compare_digest(found, self._group.ranks[peer].fingerprint):
            return None
        was_called = isinstance(sock, ssl.SSLSocket) and not sock.server_side
        may_connect = was_called or self._group.calls(peer, self._group.group_rank)
        return (peer, place) if may_connect and place.is_among(len(self.rail_rates(peer))) else None
