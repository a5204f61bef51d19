"""How the ranks of a group find each other: one calls, the other answers at its door."""

import contextlib
import hmac
import math
import os
import select
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ringweave.comm.members import TOKEN_BYTES, Entrance, Members
from ringweave.comm.transport.seam import TransferFailedError

_HELLO = struct.Struct(f"<{TOKEN_BYTES}sII")
"""Token, group rank of the caller, and which of the connections between the two this is: its rail."""
_BACKLOG = 1024
_NAME_BYTES = 16

LOOK_UP_S = 0.2
"""How often a waiting thread looks for what no event tells it: that it was aborted, that a caller is gone."""

_HELLO_S = 1.0
"""How long a caller may take to say who it is."""


@dataclass(frozen=True, slots=True)
class Door:
    """Where the other ranks of a group call a lane of this one."""

    outer: tuple[socket.socket, ...]
    """For ranks of other nodes: TCP, at each address of this one."""
    inner: socket.socket
    """For ranks of this node: a Unix socket without a file, in the namespace of the network."""

    @property
    def entrance(self) -> Entrance:
        """What the others have to know."""
        ports = tuple(listener.getsockname()[1] for listener in self.outer)
        return Entrance(ports, self.inner.getsockname()[1:].decode())

    @property
    def listeners(self) -> tuple[socket.socket, ...]:
        """Wherever somebody may call."""
        return (*self.outer, self.inner)

    def wait_called(self, timeout_s: float) -> socket.socket | None:
        """Where somebody calls; None if nobody does in time."""
        poller = select.poll()  # select.select fails in a process with more than 1023 descriptors
        for listener in self.listeners:
            poller.register(listener, select.POLLIN)
        called = {descriptor for descriptor, _ in poller.poll(math.ceil(1000 * timeout_s))}
        return next((listener for listener in self.listeners if listener.fileno() in called), None)

    def close(self) -> None:
        """Answer no more."""
        for listener in self.listeners:
            listener.close()


def open_doors(addresses: Sequence[str], count: int) -> list[Door]:
    """So many doors, each on a free port of every address."""
    return [Door(tuple(map(_outer, addresses)), _inner()) for _ in range(count)]


def _outer(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=_BACKLOG)


def _inner() -> socket.socket:
    inner = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    inner.bind(b"\0ringweave-" + os.urandom(_NAME_BYTES).hex().encode())
    inner.listen(_BACKLOG)
    return inner


class Switchboard:
    """Makes the connections of one lane."""

    def __init__(self, door: Door, lane: int, members: Members, timeout_s: float, clock: Callable[[], float]) -> None:
        """`timeout_s` bounds how long a peer may take to come."""
        self._door = door
        self._lane = lane
        self._members = members
        self._timeout_s = timeout_s
        self._clock = clock
        self._closed = False

    def deadline(self) -> float:
        """When a peer that is called now has to be there."""
        return self._clock() + self._timeout_s

    def rail_rates(self, peer: int) -> tuple[float, ...]:
        """Relative rates of the connections to a rank: one for each NIC that both nodes have, that of the slower."""
        return tuple(map(min, self._members.own.place.rates, self._members.ranks[peer].place.rates))

    def call(self, peer: int) -> list[socket.socket]:
        """Connections to a higher rank, rail by rail; one to shared memory's door if it is on this node.

        Raises:
            TransferFailedError: It cannot be reached.
        """
        callee = self._members.ranks[peer]
        if callee.place.node == self._members.own.place.node:
            inner = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                inner.settimeout(self._timeout_s)
                inner.connect(b"\0" + callee.entrances[self._lane].name.encode())
                inner.sendall(self._hello(0))
            except OSError:
                inner.close()  # a node of the same name somewhere else, or a container of its own
            else:
                return [inner]
        return [self._call_by_rail(peer, rail) for rail in range(len(self.rail_rates(peer)))]

    def _call_by_rail(self, peer: int, rail: int) -> socket.socket:
        callee, own = self._members.ranks[peer], self._members.own.place
        where = (callee.place.addresses[rail], callee.entrances[self._lane].ports[rail])
        leaving_by = (own.addresses[rail], 0) if own.more_addresses else None
        try:
            sock = socket.create_connection(where, timeout=self._timeout_s, source_address=leaving_by)
            sock.sendall(self._hello(rail))
        except OSError as cause:
            text = f"no connection to {where[0]} port {where[1]}: {cause}"
            raise TransferFailedError(peer, text, hung=isinstance(cause, TimeoutError)) from cause
        return sock

    def _hello(self, rail: int) -> bytes:
        return _HELLO.pack(self._members.token, self._members.group_rank, rail)

    def answer(self, peer: int, deadline: float) -> tuple[int, int, socket.socket] | None:
        """Take one call, while `peer` is waited for; whoever does not know the token is hung up on.

        Returns:
            Who called, by which rail, and the connection; None if nobody has, for now.

        Raises:
            TransferFailedError: `peer` is gone, or time is up.
        """
        left_s = deadline - self._clock()
        if left_s <= 0 or self._closed:
            raise TransferFailedError(peer, "it did not connect", hung=not self._closed)
        try:
            ready = self._door.wait_called(min(left_s, LOOK_UP_S))
            if ready is None:
                self._probe(peer)
                return None
            sock, _ = ready.accept()
        except (OSError, ValueError):
            return None  # we were cut off, which the next round says
        caller = self._caller(sock, min(left_s, _HELLO_S))
        if caller is None:
            sock.close()
            return None
        return *caller, sock

    def close(self) -> None:
        """Answer no more."""
        self._closed = True
        self._door.close()

    def abort(self) -> None:
        """End every wait for a caller, from any thread."""
        self._closed = True
        for listener in self._door.listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)

    def _probe(self, peer: int) -> None:
        """Raise if the peer that should call us is gone: then nobody listens at its port any more."""
        waited_for = self._members.ranks[peer]
        where = (waited_for.place.address, waited_for.entrances[self._lane].ports[0])
        try:
            socket.create_connection(where, timeout=LOOK_UP_S).close()
        except TimeoutError:
            return  # silent, but not known to be gone
        except OSError as cause:
            raise TransferFailedError(peer, f"it does not listen any more: {cause}", hung=False) from cause

    def _caller(self, sock: socket.socket, timeout_s: float) -> tuple[int, int] | None:
        """Group rank and rail of the caller, None if it is not one that may call."""
        sock.settimeout(timeout_s)
        try:
            hello = sock.recv(_HELLO.size, socket.MSG_WAITALL)
        except OSError:
            return None
        if len(hello) < _HELLO.size:
            return None
        token, caller, rail = _HELLO.unpack(hello)
        may_call = hmac.compare_digest(token, self._members.token) and caller < self._members.group_rank
        return (caller, rail) if may_call and rail < len(self.rail_rates(caller)) else None
