"""How the ranks of a group find each other: one calls, the other answers at its door."""

import contextlib
import hmac
import os
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ringweave.comm.members import TOKEN_BYTES, Entrance, Members
from ringweave.comm.transport.callers import Callers
from ringweave.comm.transport.seam import TransferFailedError

_HELLO = struct.Struct(f"<{TOKEN_BYTES}sII")
"""Token, group rank of the caller, and which of the connections between the two this is: its rail."""
_BACKLOG = 1024
_NAME_BYTES = 16

LOOK_UP_S = 0.2
"""How often a waiting thread looks for what no event tells it: that it was aborted, that a caller is gone."""

_MAX_PAUSE_S = 5.0
"""The longest between two looks whether a peer that has not called is gone. Each takes a place among its callers until
it answers, so they get rarer the longer it does not come."""


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
        """`timeout_s` bounds how long a peer may take to answer, and to call where no other limit is given."""
        self._door = door
        self._lane = lane
        self._members = members
        self._timeout_s = timeout_s
        self._clock = clock
        self._closed = False
        self._callers = Callers(door.listeners, _HELLO.size, clock)
        self._pauses: dict[int, tuple[float, float]] = {}

    def deadline(self, timeout_s: float | None) -> float:
        """When a peer that is waited for from now on has to be there; None is what it may take to answer."""
        return self._clock() + (self._timeout_s if timeout_s is None else timeout_s)

    def rail_rates(self, peer: int) -> tuple[float, ...]:
        """Bytes per second of the connections to a rank: one for each NIC that both nodes have, that of the slower."""
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

        A caller that says nothing yet keeps nobody waiting, neither us nor other callers.

        Returns:
            Who called, by which rail, and the connection; None if nobody has, for now.

        Raises:
            TransferFailedError: `peer` is gone, or time is up.
        """
        left_s = deadline - self._clock()
        if left_s <= 0 or self._closed:
            raise TransferFailedError(peer, "it did not connect", hung=not self._closed)
        try:
            said = self._callers.wait_hello(min(left_s, LOOK_UP_S))
        except (OSError, ValueError):
            return None  # we were cut off, which the next round says
        if said is None:
            if self._is_due(peer):
                self._probe(peer)
            return None
        hello, sock = said
        caller = self._identify(hello)
        if caller is None:
            sock.close()
            return None
        return *caller, sock

    def close(self) -> None:
        """Answer no more."""
        self._closed = True
        self._callers.close()
        self._door.close()

    def abort(self) -> None:
        """End every wait for a caller, from any thread."""
        self._closed = True
        for sock in (*self._door.listeners, *self._callers.socks()):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _is_due(self, peer: int) -> bool:
        """Whether to look for a peer that does not come: often at first, then ever more rarely."""
        now_s = self._clock()
        due_s, pause_s = self._pauses.get(peer, (now_s, LOOK_UP_S))
        if now_s < due_s:
            return False
        self._pauses[peer] = now_s + pause_s, min(2 * pause_s, _MAX_PAUSE_S)
        return True

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

    def _identify(self, hello: bytes) -> tuple[int, int] | None:
        """Group rank and rail of the caller that said this, None if it is not one that may call."""
        token, caller, rail = _HELLO.unpack(hello)
        may_call = hmac.compare_digest(token, self._members.token) and caller < self._members.group_rank
        return (caller, rail) if may_call and rail < len(self.rail_rates(caller)) else None
