"""Tunnel: encrypted connections between nodes for code that only knows plain ones, torch's store and Gloo.

Such code listens and connects on loopback alone. A *door* is a TLS listener at this node's address that leads to a
listener on loopback here; a *gate* is a listener on loopback that leads to a door elsewhere. Both ends of the
connection in between show certificates of the job's authority. One thread of the process carries all bytes.
"""

import asyncio
import contextlib
import errno
import functools
import os
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

from ringweave import ports
from ringweave.accept_limits import LimitedListener, connection_id, is_connection
from ringweave.comm.transport.encryption import LinkEncryption, encryption_for
from ringweave.environment import WorkerEnvironment
from ringweave.errors import RingweaveError, explain
from ringweave.ports import PortRange
from ringweave.rpc import handshake, tls

LOOPBACK = "127.0.0.1"
_PIECE_BYTES = 2**18
_BACKLOG = 256
_HANDSHAKE_TIMEOUT_S = 10.0
_RETRY_S, _MAX_RETRY_S = 0.05, 1.0
"""Pause before another attempt to reach a door that does not listen yet; it doubles."""
_CONNECT_TIMEOUT_S = 1800.0
"""Time for which a gate tries to reach a door, while its caller waits; the caller has limits of its own."""
_DRAIN_S = 2.0
"""Time that the last bytes get to leave when the other end of a connection is gone."""
_STRANGER = explain(
    "certificate", got="that of another process of the job", expected="one of the group's ranks", do="Look who calls"
)
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Admission = Callable[[str], bool]
"""Tells by the fingerprint of a certificate of the job whether its owner may use a door, or answer at one."""


def any_member(fingerprint: str) -> bool:
    """Admit every process of the job."""
    return bool(fingerprint)


Forwarder = LimitedListener
"""A door or a gate."""


class Tunnel:
    """Doors and gates of one process, in one thread."""

    def __init__(self, encryption: LinkEncryption) -> None:
        self._encryption = encryption
        self._loop = asyncio.new_event_loop()
        self._forwarders: list[Forwarder] = []
        self._connections: dict[int, int] = {}
        """Ids of connections -> their descriptors."""
        self._store_gates: dict[tuple[str, int], Forwarder] = {}
        self._store_doors: dict[tuple[str, int], int] = {}
        threading.Thread(target=self._loop.run_forever, name="ringweave tunnel", daemon=True).start()
        os.register_at_fork(after_in_child=self._close_inherited)

    def open_door(
        self,
        listener: socket.socket,
        target: tuple[str, int],
        admits: Admission = any_member,
        revokes: Callable[[str], bool] = lambda name: False,
    ) -> Forwarder:
        """Lead connections of the job's processes at a listener to a target on loopback.

        Args:
            listener: Listens at this node's address.
            target: Address and port that each connection is led to.
            admits: Whether the owner of a certificate is admitted.
            revokes: Whether the certificate of the process of that name counts no more.
        """

        async def serve(sock: socket.socket, finish: Callable[[], None]) -> None:
            with self._encryption.refusals.noted(sock):
                stream = await self._secure(sock, is_server=True, admits=admits)
                with _aborted_by_errors(stream):
                    identity = tls.certificate_identity(stream[1].get_extra_info("ssl_object"))
                    if revokes(identity.name):
                        raise handshake.TurnedAwayError("revoked", handshake.revoked_text(identity))
            finish()
            with _aborted_by_errors(stream):
                local = await asyncio.open_connection(*target, limit=_PIECE_BYTES)
            await self._lead(stream, local)

        return self._start(listener, serve)

    def open_gate(self, listener: socket.socket, door: tuple[str, int], admits: Admission = any_member) -> Forwarder:
        """Lead connections of this user's processes at a listener on loopback to a door of another process.

        Args:
            listener: Listens on loopback.
            door: Address and port of the door; it may begin to listen later.
            admits: Whether the owner of a certificate may answer there.
        """

        async def serve(sock: socket.socket, finish: Callable[[], None]) -> None:
            finish()
            if not is_own_user(sock):
                return
            remote = await self._call(door, sock)
            stream = await self._secure(remote, is_server=False, admits=admits)
            with _aborted_by_errors(stream):
                local = await _open_stream(sock)
            await self._lead(stream, local)

        return self._start(listener, serve)

    def open_store_gate(self, host: str, port: int) -> int:
        """Return the port on loopback of a gate to the store behind a door; one for the life of the process."""
        if (host, port) not in self._store_gates:
            self._store_gates[host, port] = self.open_gate(listen_on_loopback(), (host, port))
        return self._store_gates[host, port].port

    def listen_for_store(self, host: str, port: int) -> tuple[int, socket.socket | None]:
        """Return the port on loopback for the store behind the door at an address, and its listener.

        The listener is None if a store of this process is still there.

        Raises:
            OSError: The address or the port of the door is not available.
        """
        known = self._store_doors.get((host, port))
        if known is not None:
            try:
                return known, listen_on_loopback(port=known)
            except OSError:
                return known, None
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            door = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as error:  # others reach a name, or an address of a gateway, by another address of this machine
            if error.errno == errno.EADDRINUSE:
                raise
            door = ports.listen_on_all(port, backlog=_BACKLOG)
        listener = ports.defer_accept(listen_on_loopback())
        self._store_doors[host, port] = store_port = listener.getsockname()[1]
        self.open_door(door, (LOOPBACK, store_port))
        return store_port, listener

    def _start(
        self,
        listener: socket.socket,
        serve: Callable[[socket.socket, Callable[[], None]], Coroutine[Any, Any, None]],
    ) -> Forwarder:
        """Serve connections; `serve` gets each, and a function to call once it is known who is at its other end."""

        async def serve_one(sock: socket.socket) -> None:
            self._connections[connection := connection_id(sock)] = sock.fileno()
            finish = functools.partial(forwarder.limiter.finish, connection)
            try:
                await serve(sock, finish)
            except (OSError, TimeoutError, asyncio.IncompleteReadError, RingweaveError):
                pass  # a stranger, or an end that is gone: the other end sees its connection end
            finally:
                self._connections.pop(connection, None)
                finish()
                sock.close()

        forwarder = Forwarder(listener, self._loop, serve_one)
        self._forwarders = [each for each in self._forwarders if each.is_in_use]
        self._forwarders.append(forwarder)
        self._loop.call_soon_threadsafe(forwarder.start)
        return forwarder

    async def _call(self, door: tuple[str, int], caller: socket.socket) -> socket.socket:
        """Connect to a door; repeat it while nobody listens there and the caller waits."""
        pause_s, until_s = _RETRY_S, time.monotonic() + _CONNECT_TIMEOUT_S
        while True:
            family = socket.AF_INET6 if ":" in door[0] else socket.AF_INET
            found = await self._loop.getaddrinfo(*door, type=socket.SOCK_STREAM)
            sock = socket.socket(found[0][0] if found else family, socket.SOCK_STREAM)
            sock.setblocking(False)
            try:
                await self._loop.sock_connect(sock, found[0][4])
            except OSError:
                sock.close()
                if time.monotonic() > until_s or _has_ended(caller):
                    raise
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _MAX_RETRY_S)
            except BaseException:
                sock.close()
                raise
            else:
                return sock

    async def _secure(self, sock: socket.socket, *, is_server: bool, admits: Admission) -> Stream:
        """Return the encrypted connection."""
        context = self._encryption.server_context if is_server else self._encryption.client_context
        stream = await _open_stream(sock, context, is_server=is_server)
        with _aborted_by_errors(stream):
            if not admits(tls.peer_fingerprint(stream[1].get_extra_info("ssl_object"))):
                raise handshake.TurnedAwayError("identity", _STRANGER)
        return stream

    async def _lead(self, one: Stream, other: Stream) -> None:
        """Copy both directions until one of them ends; then both connections end."""
        socks = [writer.get_extra_info("socket") for _, writer in (one, other)]
        open_socks = [sock for sock in socks if sock is not None and sock.fileno() >= 0]  # others are lost already
        connections = {connection_id(sock): sock.fileno() for sock in open_socks}
        self._connections |= connections
        tasks = [asyncio.ensure_future(_copy(one[0], other[1])), asyncio.ensure_future(_copy(other[0], one[1]))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*(_close_stream(writer) for _, writer in (one, other)))
            for connection in connections:
                self._connections.pop(connection, None)

    def _close_inherited(self) -> None:
        """Release all connections in a forked child, which would keep them alive after its parent's death."""
        with Path(os.devnull).open("rb") as nothing:
            for connection, descriptor in self._connections.items():
                with contextlib.suppress(OSError):
                    if is_connection(descriptor, connection):  # else it has ended, and the number is another's
                        os.dup2(nothing.fileno(), descriptor)  # whoever closes it later closes nothing else
        for forwarder in self._forwarders:
            forwarder.close_inherited()


@contextlib.contextmanager
def _aborted_by_errors(stream: Stream) -> Iterator[None]:
    """Abort a connection if the block fails; closing its socket alone leaves the loop with a descriptor of another."""
    try:
        yield
    except BaseException:
        stream[1].transport.abort()
        raise


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while content := await reader.read(_PIECE_BYTES):
        writer.write(content)
        await writer.drain()


async def _close_stream(writer: asyncio.StreamWriter) -> None:
    """Close a connection once what was written has left, or at once if nobody takes it."""
    writer.close()
    try:
        async with asyncio.timeout(_DRAIN_S):
            await writer.wait_closed()
    except (OSError, TimeoutError):
        writer.transport.abort()


async def _open_stream(sock: socket.socket, context: ssl.SSLContext | None = None, *, is_server: bool = True) -> Stream:
    """Return reader and writer of a connected socket, after the TLS handshake if there is a context."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if is_server:
        return await tls.accept_stream(sock, context, _HANDSHAKE_TIMEOUT_S, _PIECE_BYTES)
    return await asyncio.open_connection(
        sock=sock, ssl=context, server_hostname="", ssl_handshake_timeout=_HANDSHAKE_TIMEOUT_S, limit=_PIECE_BYTES
    )


def _has_ended(sock: socket.socket) -> bool:
    """Return whether the other end of a connection on loopback has closed it."""
    try:
        return sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def is_own_user(sock: socket.socket) -> bool:
    """Return whether a process of this user is at the other end of a connection on loopback, by the kernel's tables."""
    far, near = sock.getpeername()[:2], sock.getsockname()[:2]
    for family in ("tcp", "tcp6"):  # torch's sockets are of IPv6, with IPv4's addresses in theirs
        with contextlib.suppress(FileNotFoundError):
            users = connection_users(Path(f"/proc/self/net/{family}").read_text(encoding="ascii"), far, near)
            if users:
                return users <= {os.geteuid(), 0}
    return False


def connection_users(table: str, local: tuple[str, int], remote: tuple[str, int]) -> set[int]:
    """Return the users of the sockets of a connection in a table of the kernel; others share its local port."""
    wanted = [
        f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}:{port:04X}" for host, port in (local, remote)
    ]
    rows = map(str.split, table.splitlines()[1:])
    return {int(words[7]) for words in rows if all(map(str.endswith, words[1:3], wanted))}


def tunnel_for(environment: WorkerEnvironment) -> Tunnel | None:
    """Return this process's tunnel; None if the run is not encrypted.

    Raises:
        UsageError: This process is to encrypt, and has no credentials.
    """
    encryption = encryption_for(environment)
    return None if encryption is None else tunnel_of(encryption)


@functools.cache  # one for the process: torch's store, which it leads to, belongs to no group
def tunnel_of(encryption: LinkEncryption) -> Tunnel:
    """Return this process's tunnel."""
    return Tunnel(encryption)


def listen_on_loopback(address: str = LOOPBACK, port: int = 0) -> socket.socket:
    """Listen on loopback.

    Raises:
        OSError: The port is taken.
    """
    return socket.create_server((address, port), backlog=_BACKLOG)


def listen_at(address: str, within: PortRange | None) -> socket.socket:
    """Listen at this node's address, for a door; see `ports.create_server`."""
    return ports.create_server(address, within, backlog=_BACKLOG)
