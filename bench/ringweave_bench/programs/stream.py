"""One TCP stream between two nodes, and its rate in bytes per second.

    stream.py receive ADDRESS WARM_UP_S WINDOW_S     prints its port, then {"bytes": ..., "seconds": ...}
    stream.py send ADDRESS PORT                      sends until the receiver closes the connection

Run by a bare interpreter; imports nothing but the standard library.
"""

import fcntl
import json
import socket
import sys
import termios
import time

BLOCK_BYTES = 256 * 1024
STREAM_TIMEOUT_S = 20.0
"""Longest wait for the other end."""


def receive(address: str, warm_up_s: float, window_s: float) -> None:
    """Count bytes that arrive in a window, which begins after the first byte and the link's burst."""
    with socket.create_server((address, 0)) as listener:
        listener.settimeout(STREAM_TIMEOUT_S)
        print(listener.getsockname()[1], flush=True)
        stream, _ = listener.accept()
    stream.settimeout(STREAM_TIMEOUT_S)
    buffer = bytearray(BLOCK_BYTES)
    stream.recv_into(buffer)
    _count(stream, buffer, warm_up_s)
    print(json.dumps(_count(stream, buffer, window_s)), flush=True)


def send(address: str, port: int) -> None:
    """Send until the other end closes the connection."""
    block = bytes(BLOCK_BYTES)
    try:
        with socket.create_connection((address, port), timeout=STREAM_TIMEOUT_S) as stream:
            while True:
                stream.sendall(block)
    except (BrokenPipeError, ConnectionResetError):
        return


def _count(stream: socket.socket, buffer: bytearray, window_s: float) -> dict[str, float]:
    """Return the bytes that arrive in a window, and its length.

    At both ends the kernel's buffer is read first. Else a receiver that was not scheduled for a while would count bytes
    from before the window, or miss bytes of its end.
    """
    _drain(stream, buffer)
    started_s, num_bytes = time.monotonic(), 0
    while time.monotonic() - started_s < window_s:
        num_bytes += _receive(stream, buffer)
    num_bytes += _drain(stream, buffer)
    return {"bytes": num_bytes, "seconds": time.monotonic() - started_s}


def _drain(stream: socket.socket, buffer: bytearray) -> int:
    """Read the bytes that are there now, and no more: a fast sender always has more."""
    waiting = int.from_bytes(fcntl.ioctl(stream, termios.FIONREAD, bytes(4)), sys.byteorder)
    num_bytes = 0
    while num_bytes < waiting:
        num_bytes += _receive(stream, buffer)
    return num_bytes


def _receive(stream: socket.socket, buffer: bytearray) -> int:
    count = stream.recv_into(buffer)
    if count == 0:
        raise SystemExit("the sender hung up")
    return count


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["receive", address, warm_up_s, window_s]:
            receive(address, float(warm_up_s), float(window_s))
        case ["send", address, port]:
            send(address, int(port))
        case _:
            raise SystemExit(__doc__)
