"""Connections between probing ranks: every flow is a TCP connection of its own, and nobody without the token gets in.

A connection for each flow starts as the streams of a job do, and what the last flow left in queues is gone with it.
"""

import hmac
import socket
import struct
import time
from dataclasses import dataclass
from enum import IntEnum

from ringweave.comm.members import TOKEN_BYTES, Members
from ringweave.comm.transport.callers import Callers

_HELLO = struct.Struct(f"<{TOKEN_BYTES}sBII")


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


def callers(door: socket.socket) -> Callers:
    """Those who call at a door from now on: nobody has to wait for one that is silent."""
    return Callers([door], _HELLO.size, time.monotonic)


def answer(calling: Callers, probers: Members, timeout_s: float) -> tuple[Caller, socket.socket] | None:
    """Take the call of one who has said who it is: a connection that does not block.

    None if there is none within `timeout_s`, or sooner where somebody has called who says nothing or has no business
    here.

    Raises:
        OSError: The door is closed.
    """
    try:
        heard = calling.wait_hello(timeout_s)
    except BlockingIOError:  # who called has hung up before it was answered
        return None
    except ValueError as cause:
        raise OSError(str(cause)) from cause
    if heard is None:
        return None
    hello, sock = heard
    caller = _caller(hello, probers)
    if caller is None:
        sock.close()
        return None
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return caller, sock


def _caller(hello: bytes, probers: Members) -> Caller | None:
    token, kind, number, index = _HELLO.unpack(hello)
    may_call = hmac.compare_digest(token, probers.token) and index < probers.group_size and kind in set(Kind)
    return Caller(index, Kind(kind), number) if may_call else None
