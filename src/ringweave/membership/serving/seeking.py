"""Who still listens. A kernel takes connections where a process does, however busy that is, or stopped.

It refuses them once the process has ended; of a node that is cut off nothing comes.
"""

import contextlib
import errno
import select
import socket
import time
from collections.abc import Mapping

NUM_TRIES, APART_S = 2, 0.05
"""One SYN may be lost."""
PATIENCE_S = 0.15
"""After the last one. On a network that a job of several nodes can work on an answer takes a tenth of that."""
_NOBODY = frozenset({errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT})


def unreachable(places: Mapping[str, str]) -> set[str]:
    """Of which of these members nothing listens any more; they are asked for a connection, twice, and told nothing.

    Of whatever cannot be asked, such as a name instead of an address, nothing is known.

    Args:
        places: Member -> `HOST PORT` where it listens as long as it lives.
    """
    asked: list[tuple[str, socket.socket]] = []
    for number in range(NUM_TRIES):
        time.sleep(APART_S if number else 0.0)
        asked += [(member, sock) for member, place in places.items() if (sock := _ask(place)) is not None]
    answered = _answers([sock for _, sock in asked], PATIENCE_S)
    for _, sock in asked:
        sock.close()
    return {member for member, _ in asked} - {member for member, sock in asked if sock in answered}


def _ask(place: str) -> socket.socket | None:
    """Begin to connect; None if that cannot be tried."""
    host, _, port = place.partition(" ")
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        return None
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        family, kind, protocol, _, address = found[0]
        sock = socket.socket(family, kind, protocol)
    except (OSError, ValueError):
        return None
    sock.setblocking(False)
    if sock.connect_ex(address) in {0, errno.EINPROGRESS, *_NOBODY}:
        return sock
    sock.close()
    return None


def _answers(asked: list[socket.socket], timeout_s: float) -> set[socket.socket]:
    """Which of them have been answered in time, and not by a refusal."""
    waiting, answered = {each.fileno(): each for each in asked}, set[socket.socket]()
    poll, deadline_s = select.poll(), time.monotonic() + timeout_s
    for number in waiting:
        poll.register(number, select.POLLOUT)
    is_over = False
    while waiting and not is_over:
        left_s = deadline_s - time.monotonic()
        is_over = left_s <= 0.0  # then once more: this process may not have had the processor while answers came
        for number, _ in poll.poll(max(0.0, left_s) * 1000):
            poll.unregister(number)
            sock = waiting.pop(number)
            if _has_answered(sock):
                answered.add(sock)
    return answered


def _has_answered(sock: socket.socket) -> bool:
    error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error == 0:
        with contextlib.suppress(OSError):  # there was no way at once
            return bool(sock.getpeername())
    return error not in {0, *_NOBODY}
