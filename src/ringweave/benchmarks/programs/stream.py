"""One TCP stream between two nodes: how many bytes a second arrive.

    stream.py receive ADDRESS WARM_UP_S WINDOW_S     prints its port, then {"bytes": ..., "seconds": ...}
    stream.py send ADDRESS PORT                      sends until the receiver hangs up

Run by a bare interpreter; imports nothing but the standard library.
"""

import json
import socket
import sys
import time

BLOCK_BYTES = 256 * 1024
PATIENCE_S = 20.0
"""How long to wait for the other end."""


def receive(address: str, warm_up_s: float, window_s: float) -> None:
    """Count what arrives in a window that begins some time after the first byte, when the link's burst is used up."""
    with socket.create_server((address, 0)) as listener:
        listener.settimeout(PATIENCE_S)
        print(listener.getsockname()[1], flush=True)
        stream, _ = listener.accept()
    stream.settimeout(PATIENCE_S)
    buffer = bytearray(BLOCK_BYTES)
    stream.recv_into(buffer)
    _count(stream, buffer, warm_up_s)
    print(json.dumps(_count(stream, buffer, window_s)), flush=True)


def send(address: str, port: int) -> None:
    """Send until the other end hangs up."""
    block = bytes(BLOCK_BYTES)
    try:
        with socket.create_connection((address, port), timeout=PATIENCE_S) as stream:
            while True:
                stream.sendall(block)
    except (BrokenPipeError, ConnectionResetError):
        return


def _count(stream: socket.socket, buffer: bytearray, window_s: float) -> dict[str, float]:
    started_s, num_bytes = time.monotonic(), 0
    while (now_s := time.monotonic()) - started_s < window_s:
        count = stream.recv_into(buffer)
        if count == 0:
            raise SystemExit("the sender hung up")
        num_bytes += count
    return {"bytes": num_bytes, "seconds": now_s - started_s}


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["receive", address, warm_up_s, window_s]:
            receive(address, float(warm_up_s), float(window_s))
        case ["send", address, port]:
            send(address, int(port))
        case _:
            raise SystemExit(__doc__)
