"""Connections between probing ranks: every flow is a TCP connection of its own, and nobody without the token gets in.

A connection for each flow starts as the streams of a job do, and what the last flow left in queues is gone with it.
"""

import hmac
import socket
import struct
from dataclasses import dataclass
from enum import IntEnum

from ringweave.comm.members import TOKEN_BYTES, Members

_HELLO = struct.Struct(f"<{TOKEN_BYTES}sBII")
HELLO_S = 5.0
"""How long a caller may take to say who it is."""


class Kind(IntEnum):
    """What a connection is for."""

    ORDERS = 0
    FLOW = 1
    ECHO = 2


@dataclass(frozen=True, slots=True)
class Caller:
    """Who is calling, and what about."""

    index: int
    """Place among the probing ranks."""
    kind: Kind
    number: int
    """Of the batch."""


def call(probers: Members, index: int, kind: Kind, number: int, timeout_s: float) -> socket.socket:
    """A blocking connection to a probing rank.

    Raises:
        OSError: It cannot be reached.
    """
    callee = probers.ranks[index]
    sock = socket.create_connection((callee.place.address, callee.entrances[0].ports[0]), timeout=timeout_s)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(_HELLO.pack(probers.token, kind, number, probers.group_rank))
    except OSError:
        sock.close()
        raise
    return sock


def answer(door: socket.socket, probers: Members) -> tuple[Caller, socket.socket] | None:
    """Take the call that has come in; None if whoever it is has no business here.

    Raises:
        OSError: The door is closed.
    """
    sock, _ = door.accept()
    sock.settimeout(HELLO_S)
    try:
        caller = _caller(sock.recv(_HELLO.size, socket.MSG_WAITALL), probers)
    except OSError:
        caller = None
    if caller is None:
        sock.close()
        return None
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return caller, sock


def _caller(hello: bytes, probers: Members) -> Caller | None:
    if len(hello) < _HELLO.size:
        return None
    token, kind, number, index = _HELLO.unpack(hello)
    may_call = hmac.compare_digest(token, probers.token) and index < probers.group_size and kind in set(Kind)
    return Caller(index, Kind(kind), number) if may_call else None
