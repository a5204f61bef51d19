"""A port for the workers to meet at."""

import errno
import random
import socket
from pathlib import Path

from ringweave.errors import LaunchError

EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST, HIGHEST = 10_000, 65_535


def candidates(ephemeral: tuple[int, int]) -> list[int]:
    """Ports that the kernel gives to no outgoing connection, so none can take one between choice and use."""
    low, high = ephemeral
    return [port for port in range(LOWEST, HIGHEST + 1) if not low <= port <= high]


def free_port(rng: random.Random) -> int:
    """A port that nothing listens on now; outside the ephemeral range if that leaves any.

    Raises:
        LaunchError: All are taken.
    """
    ports = candidates(_ephemeral_range()) or list(range(LOWEST, HIGHEST + 1))
    rng.shuffle(ports)
    for port in ports:
        if _is_free(port):
            return port
    raise LaunchError(f"no free port between {LOWEST} and {HIGHEST}. End programs that listen. [ss -ltn]")


def _ephemeral_range() -> tuple[int, int]:
    try:
        low, high = EPHEMERAL_RANGE.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return 32_768, 60_999
    return int(low), int(high)


def _is_free(port: int) -> bool:
    families = [(socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")]
    return all(_can_bind(family, host, port) for family, host in families)


def _can_bind(family: socket.AddressFamily, host: str, port: int) -> bool:
    try:
        probe = socket.socket(family, socket.SOCK_STREAM)
    except OSError:  # the family is not here, so nobody listens on it
        return True
    with probe:
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return family == socket.AF_INET6 and error.errno not in _TAKEN
    return True


_TAKEN = {errno.EADDRINUSE, errno.EACCES}
