"""Settings of the sockets of both ends."""

import socket


def keep_alive(sock: socket.socket, patience_s: float) -> None:
    """Send small messages at once, and notice a host that is gone or takes nothing within twice the patience."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    every_s = max(1, round(patience_s / 4))
    for option, value in (
        (socket.TCP_KEEPIDLE, every_s),
        (socket.TCP_KEEPINTVL, every_s),
        (socket.TCP_KEEPCNT, 4),
        (socket.TCP_USER_TIMEOUT, round(2 * patience_s * 1000)),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
