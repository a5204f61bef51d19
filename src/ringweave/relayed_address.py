"""Addresses of hosts that others cannot connect to: they call out, and relays lead connections to them.

Such a host has one address for the length of a run, of the loopback network. Its processes listen there. On every other
host of the run, a relay process listens at the same address and ports, and hands each connection on to the host, over
connections that the host has opened. So a port has one name everywhere, and nobody has to know of the relay.
"""

import contextlib
import ipaddress
import os
import random
import socket
import stat
import struct
import sys
import time
from pathlib import Path

from ringweave.errors import LaunchError, shorten

NETWORK = ipaddress.IPv4Network("127.64.0.0/10")
"""Part of the loopback network from which these addresses are drawn; every user may listen there."""
RELAY_NIC = "relay"
"""Name of the link of a host that others cannot call: it opens all connections, and relays lead others to it."""
ANNOUNCE_TIMEOUT_S = 30.0
START_TIMEOUT_S = 10.0
"""Time that a relay may take to start."""
_RETRY_S = 0.05
KEEPALIVE_S = 20
"""Silence after which the kernel sends a probe; address translation bears more."""
MAX_ATTEMPTS = 8
"""Listeners to try until one has a port that is free on all hosts."""
_CREDENTIALS = struct.Struct("3i")
_LISTEN_STATE = "0A"
_MAX_ANSWER_BYTES = 2**20


def draw_address(rng: random.Random) -> str:
    """Return an address that no other run has, by chance: one of four million."""
    return str(NETWORK[rng.randrange(1, NETWORK.num_addresses - 1)])


def is_relayed(address: str) -> bool:
    """Return whether an IP address is one of a host that others reach by relays alone."""
    try:
        return ipaddress.ip_address(address) in NETWORK
    except ValueError:
        return False


def find_listeners(address: str, table: str | None = None) -> frozenset[int]:
    """Return the ports at which processes of this user listen at exactly this address.

    Args:
        address: IPv4 address.
        table: Text of `/proc/net/tcp`; None: of this process's network namespace.
    """
    text = table if table is not None else Path("/proc/self/net/tcp").read_text(encoding="ascii")
    wanted, uid, found = f"{int.from_bytes(socket.inet_aton(address), sys.byteorder):08X}", str(os.geteuid()), set()
    for line in text.splitlines()[1:]:
        words = line.split()
        host, _, port = words[1].partition(":")
        if words[3] == _LISTEN_STATE and host == wanted and words[7] == uid:
            found.add(int(port, 16))
    return frozenset(found)


def keep_alive(sock: socket.socket) -> None:
    """Let the kernel send something after some silence: address translation forgets silent connections."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)


def keep_all_alive() -> None:
    """Do so with all TCP connections of this process, such as those that C++ code has opened."""
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # no socket, or closed meanwhile
            if stat.S_ISSOCK(entry.stat().st_mode):
                with socket.socket(fileno=os.dup(int(entry.name))) as sock:
                    keep_alive(sock)


def socket_name(address: str) -> bytes:
    """Return the name of the Unix socket of the relay on the host with this address; it has no file."""
    return b"\0ringweave-relay-" + address.encode()


def announce_listeners(address: str) -> frozenset[int]:
    """Let the relay of this host lead connections to everything that listens at its relayed address now.

    Call it when a process has begun to listen, before others learn the port. The relay finds listeners by itself too,
    but later. Does nothing for other addresses.

    Returns:
        Ports of this address that another process has on another host, so that they cannot be used.

    Raises:
        LaunchError: The relay of this host does not answer.
    """
    if not is_relayed(address):
        return frozenset()
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            return _ask_relay(address)
        except (OSError, ValueError) as error:
            if isinstance(error, ConnectionRefusedError) and time.monotonic() < deadline_s:
                time.sleep(_RETRY_S)  # it is being started
                continue
            do = "See the service.log of the run on this host; its host service starts the relay"
            what, got = f"relay of this host, {address}", str(error) or type(error).__name__
            raise LaunchError(what, got=got, expected="an answer", do=do) from error


def _ask_relay(address: str) -> frozenset[int]:
    """Return the ports that are taken on other hosts, once the relays lead to all others."""
    content = b""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(ANNOUNCE_TIMEOUT_S)
        sock.connect(socket_name(address))
        peer = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(peer)[1] != os.geteuid():
            raise PermissionError("another user's process answers")
        while len(content) <= _MAX_ANSWER_BYTES and (piece := sock.recv(_MAX_ANSWER_BYTES)):
            content += piece
    from ringweave.files import file_io  # late: every process of torch loads this module

    ports = file_io.parse_json(content, _MAX_ANSWER_BYTES)
    if not isinstance(ports, list) or not all(type(port) is int for port in ports):
        raise ValueError(f"{shorten(content)} instead of ports")
    return frozenset(ports)


def create_server(address: str, *, backlog: int) -> socket.socket:
    """Listen at a relayed address on a port that is free on all hosts of the run, and that they can call.

    Raises:
        LaunchError: The relay of this host does not answer, or each of several ports is taken on another host.
        OSError: The address is not available.
    """
    for _ in range(MAX_ATTEMPTS):
        listener = socket.create_server((address, 0), backlog=backlog)
        with contextlib.ExitStack() as stack:
            stack.callback(listener.close)
            if listener.getsockname()[1] not in announce_listeners(address):
                stack.pop_all()
                return listener
    raise taken_error(address)


def taken_error(address: str, *ports: int) -> LaunchError:
    """Return the error of a host whose ports are taken on another one."""
    named = "ports" if not ports else f"port {', '.join(map(str, sorted(ports)))}"
    do = "End programs that listen at all addresses of the other hosts: ss -ltn"
    return LaunchError(f"{named} of {address}", got="taken on another host", expected="free ones", do=do)
