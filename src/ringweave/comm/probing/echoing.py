"""Latency between two ranks: small messages there and back."""

import socket
import statistics
import time
from collections.abc import Callable, Sequence

from ringweave.comm.members import Members
from ringweave.comm.probing import calls
from ringweave.comm.probing.calls import Caller, Kind

_NUM_ROUNDS = 31
_NUM_WARM_UP = 5
_MESSAGE_BYTES = 8
_LIMIT_S = 10.0


def ask(probers: Members, peer: int, number: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of a small message to `peer`: half of the median there and back.

    Raises:
        OSError: It cannot be reached, or is silent.
    """
    seconds = []
    with calls.call(probers, peer, Kind.ECHO, number, _LIMIT_S) as sock:
        for _ in range(_NUM_WARM_UP + _NUM_ROUNDS):
            started = clock()
            sock.sendall(bytes(_MESSAGE_BYTES))
            if len(sock.recv(_MESSAGE_BYTES, socket.MSG_WAITALL)) < _MESSAGE_BYTES:
                raise ConnectionResetError("connection closed by peer")
            seconds.append(clock() - started)
    return statistics.median(seconds[_NUM_WARM_UP:]) / 2


def echo(probers: Members, door: Sequence[socket.socket], peer: int, number: int) -> None:
    """Send back what `peer` sends, until it hangs up.

    Raises:
        OSError: It does not come, or is silent.
    """
    with _call_of(Caller(peer, Kind.ECHO, number), probers, door) as sock:
        sock.settimeout(_LIMIT_S)
        while message := sock.recv(_MESSAGE_BYTES, socket.MSG_WAITALL):
            sock.sendall(message)


def _call_of(wanted: Caller, probers: Members, door: Sequence[socket.socket]) -> socket.socket:
    """The connection of this caller; all others are hung up on."""
    calling, until_s = calls.callers(door), time.monotonic() + _LIMIT_S
    try:
        while (left_s := until_s - time.monotonic()) > 0:
            answered = calls.answer(calling, probers, left_s)
            if answered is None:
                continue
            caller, sock = answered
            if caller == wanted:
                return sock
            sock.close()
    finally:
        calling.close()
    raise TimeoutError(f"no call of {probers.name(wanted.index)} within {_LIMIT_S:g} s")
