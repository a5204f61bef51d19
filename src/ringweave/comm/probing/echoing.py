"""Latency between two ranks: small messages there and back."""

import socket
import statistics
import time
from collections.abc import Callable

from ringweave.comm.members import Members
from ringweave.comm.probing import calls
from ringweave.comm.probing.calls import Kind

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


def echo(probers: Members, door: socket.socket, peer: int, number: int) -> None:
    """Send back what `peer` sends, until it hangs up.

    Raises:
        OSError: It does not come, or is silent.
    """
    door.settimeout(_LIMIT_S)
    try:
        while True:
            answered = calls.answer(door, probers)
            if answered is None:
                continue
            caller, sock = answered
            with sock:
                if (caller.index, caller.kind, caller.number) != (peer, Kind.ECHO, number):
                    continue
                sock.settimeout(_LIMIT_S)
                while message := sock.recv(_MESSAGE_BYTES, socket.MSG_WAITALL):
                    sock.sendall(message)
                return
    finally:
        door.settimeout(None)
