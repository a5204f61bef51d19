"""Connections between probing ranks: every flow is a TCP connection of its own, and nobody without the token gets in.

A connection for each flow starts as the streams of a job do, and what the last flow left in queues is gone with it.
"""

import hmac
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from ringweave.comm.members import TOKEN_BYTES, Members
from ringweave.comm.transport.callers import Callers

_HELLO = struct.Struct(f"<{TOKEN_BYTES}sBIIB")


class Kind(IntEnum):
    """What a connection is for."""

    ORDERS = 0
    FLOW = 1
    ECHO = 2
    REACH = 3
    """Nothing: only to see whether one gets through."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who is calling, and what about."""

    index: int
    """Place among the probing ranks."""
    kind: Kind
    number: int
    """Of the batch."""
    rail: int = 0
    """Which of their addresses the connection is between."""


def call(probers: Members, index: int, kind: Kind, number: int, timeout_s: float, rail: int = 0) -> socket.socket:
    """A blocking connection to a probing rank, from one of our addresses to its own of the same place.

    Raises:
        OSError: It cannot be reached.
    """
    callee, own = probers.ranks[index], probers.own.place
    where = (callee.place.addresses[rail], callee.entrances[0].ports[rail])
    leaving_by = (own.addresses[rail], 0) if own.more_addresses else None
    hello = _HELLO.pack(probers.token, kind, number, probers.group_rank, rail)
    sock = socket.create_connection(where, timeout=timeout_s, source_address=leaving_by)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(hello)
    except OSError:
        sock.close()
        raise
    return sock


def callers(door: Sequence[socket.socket]) -> Callers:
    """Those who call at a door from now on, by any of its listeners: nobody has to wait for one that is silent."""
    return Callers(door, _HELLO.size, time.monotonic)


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
    token, kind, number, index, rail = _HELLO.unpack(hello)
    may_call = hmac.compare_digest(token, probers.token) and index < probers.group_size and kind in set(Kind)
    return Caller(index, Kind(kind), number, rail) if may_call else None
