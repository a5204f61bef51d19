"""Relay of a host: leads connections to hosts that others cannot connect to. One process per host, for a run.

    python -m ringweave.platforms.hosts.relay RUN_FOLDER

A host that only calls out (`ringweave.relayed_address`) keeps a control connection to the relay of each host that can
be called, a *gateway*, and says there which of its ports listen. The gateway listens at the same address and ports, on
its own loopback network. For each connection there, it asks the host over the control connection for another one, which
carries the bytes. Two hosts that both only call out meet at a gateway.

All connections between relays use mutual TLS under the authority of the run. A control connection has a JSON object per
line; a carrying one has frames of four bytes with the length, then the content. A frame of length 0 ends one direction.
"""

import asyncio
import contextlib
import functools
import hmac
import itertools
import json
import os
import signal
import socket
import ssl
import struct
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ringweave import relayed_address
from ringweave.accept_limits import AcceptLimits, ConnectionLimiter, LimitedListener, connection_id
from ringweave.errors import RingweaveError, UsageError
from ringweave.files import file_io, rotation
from ringweave.platforms.hosts.join_protocol import print_refusal
from ringweave.platforms.hosts.messages import HOST_ROLE
from ringweave.platforms.hosts.run_entry import HostEndpoint, HostFolder, HostsReader
from ringweave.platforms.local import job_folder
from ringweave.relayed_address import is_relayed
from ringweave.rpc import Credentials, tls
from ringweave.rpc.handshake import RefusalLog

PING_S = 1.0
SILENCE_S = 10.0
"""Silence after which a control connection counts as broken."""
OFFER_TIMEOUT_S = 10.0
"""Time in which the other end opens listeners; after that its connection is closed."""
CONNECT_TIMEOUT_S = 20.0
HANDSHAKE_TIMEOUT_S = 15.0
RECONNECT_S = 0.3
FIRST_CONTACT_S = 10.0
"""Time after the start in which an announcement waits for gateways that have not answered yet."""
SCAN_S = 0.2
"""Interval between two looks for listeners that nobody has announced."""
DRAIN_S = 2.0
"""Time that connections get to end after the end of the service."""
ORPHAN_TIMEOUT_S = 900.0
"""Time without a host service after which the relay ends."""
_LOCAL_LIMITS = AcceptLimits(deadline_s=CONNECT_TIMEOUT_S, max_pending=256, max_pending_per_source=256)
"""Limits of a listener for another host: all ranks of this one may call at once, and wait for an answer from there."""
_BACKLOG = 1024
BUFFER_BYTES = 2**20
_PIECE_BYTES = 2**18
_LENGTH = struct.Struct(">I")
_RESET = struct.pack("ii", 1, 0)
Table = Mapping[str, frozenset[int]]
"""Relayed address -> ports that listen there."""


class ByteStream(Protocol):
    """One end of a connection that is led on."""

    async def read(self) -> bytes:
        """Return the next bytes; none at the end of this direction."""

    async def write(self, content: bytes) -> None: ...

    async def write_end(self) -> None:
        """End this direction; the other one goes on."""

    def close(self) -> None: ...

    def abort(self) -> None:
        """Reset the connection: the other end sees that it is broken."""


class PlainStream:
    """Connection of this host."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        writer.transport.set_write_buffer_limits(high=BUFFER_BYTES)

    async def read(self) -> bytes:
        return await self._reader.read(_PIECE_BYTES)

    async def write(self, content: bytes) -> None:
        self._writer.write(content)
        await self._writer.drain()

    async def write_end(self) -> None:
        if self._writer.can_write_eof():
            self._writer.write_eof()

    def close(self) -> None:
        self._writer.close()

    def abort(self) -> None:
        with contextlib.suppress(OSError):
            self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._writer.transport.abort()


class FramedStream:
    """Carrying connection between relays. TLS has no half-close that all libraries offer, so frames say the end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        writer.transport.set_write_buffer_limits(high=BUFFER_BYTES)
        relayed_address.keep_alive(writer.get_extra_info("socket"))

    async def read(self) -> bytes:
        """Return the next frame.

        Raises:
            asyncio.IncompleteReadError: The connection ended before the end of the direction.
            ConnectionError: A frame is longer than any relay sends.
        """
        (size,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
        if size > _PIECE_BYTES:
            raise ConnectionError(f"frame of {size} bytes, expected at most {_PIECE_BYTES}")
        return await self._reader.readexactly(size)

    async def write(self, content: bytes) -> None:
        self._writer.writelines((_LENGTH.pack(len(content)), content))
        await self._writer.drain()

    async def write_end(self) -> None:
        await self.write(b"")

    def close(self) -> None:
        self._writer.close()

    def abort(self) -> None:
        self._writer.transport.abort()


@contextlib.asynccontextmanager
async def while_connected(caller: asyncio.StreamWriter, limit_s: float) -> AsyncIterator[None]:
    """Bound a block by a time, and by the caller's life as far as that is known: a half-closed connection lives.

    Raises:
        TimeoutError: The time is over, or the caller gone.
    """
    lost = asyncio.shield(caller.wait_closed())
    async with asyncio.timeout(limit_s) as limit:
        end: Callable[[object], None] = lambda _: limit.reschedule(0.0)  # noqa: E731 - removed by its name
        lost.add_done_callback(end)
        try:
            yield
        finally:
            lost.remove_done_callback(end)
            if not lost.cancel():
                lost.exception()


async def lead(one: ByteStream, other: ByteStream) -> None:
    """Copy both directions between two streams until both have ended; a broken one breaks the other."""

    async def copy(source: ByteStream, target: ByteStream) -> None:
        while content := await source.read():
            await target.write(content)
        await target.write_end()

    tasks = [asyncio.ensure_future(copy(one, other)), asyncio.ensure_future(copy(other, one))]
    try:
        await asyncio.gather(*tasks)
    except (OSError, asyncio.IncompleteReadError):
        one.abort()
        other.abort()
    except asyncio.CancelledError:
        one.abort()
        other.abort()
        raise
    finally:
        for task in tasks:
            task.cancel()
        one.close()
        other.close()


class ControlLink:
    """Control connection to the relay of another host."""

    def __init__(self, host: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.host = host
        self._reader, self._writer = reader, writer
        self._serials = itertools.count(1)
        self._answers: dict[int, asyncio.Future[frozenset[int]]] = {}
        self._offered: Table | None = None
        self._taken: frozenset[int] = frozenset()
        self._offer_lock = asyncio.Lock()
        relayed_address.keep_alive(writer.get_extra_info("socket"))

    def send(self, **fields: object) -> None:
        self._writer.write(json.dumps(fields).encode() + b"\n")

    async def offer(self, find_table: Callable[[], Table]) -> frozenset[int]:
        """Let the other end listen at addresses and ports; return the ports that are taken there.

        The table is found when its turn has come, so that an older one never follows a newer one. An end that does not
        answer in time is cut off; it takes nothing.
        """
        async with self._offer_lock:
            table = find_table()
            if table == self._offered or self._writer.transport.is_closing():
                return self._taken
            serial = next(self._serials)
            answer = self._answers[serial] = asyncio.get_running_loop().create_future()
            self.send(listen={address: sorted(ports) for address, ports in table.items()}, serial=serial)
            try:
                async with asyncio.timeout(OFFER_TIMEOUT_S):
                    self._taken = await answer
                self._offered = table
            except (TimeoutError, ConnectionError):
                self.close()
                return frozenset()
            finally:
                self._answers.pop(serial, None)
            return self._taken

    async def serve(self, handle: Callable[["ControlLink", dict[str, Any]], None]) -> None:
        """Hand each message over until the connection ends or is silent."""
        ping = asyncio.ensure_future(self._ping())
        try:
            while line := await self._read_line():
                message = file_io.parse_json(line)
                if (serial := message.get("done")) is not None:
                    answer = self._answers.get(serial)
                    if answer is not None and not answer.done():
                        answer.set_result(frozenset(map(int, message["taken"])))
                elif "ping" not in message:
                    handle(self, message)
        except (OSError, TimeoutError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
            return  # it ended, is silent, or speaks another language
        finally:
            ping.cancel()
            self.close()

    async def _read_line(self) -> bytes:
        async with asyncio.timeout(SILENCE_S):
            return await self._reader.readline()

    def close(self) -> None:
        self._writer.transport.abort()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(ConnectionResetError("control connection ended"))

    async def _ping(self) -> None:
        while True:
            self.send(ping=1)
            await asyncio.sleep(PING_S)


class Relay:
    """Relay of one host; everything runs in one event loop."""

    # A long constructor: it begins with empty tables.
    def __init__(
        self,
        index: int,
        credentials: Credentials,
        load_hosts: Callable[[], Sequence[HostEndpoint]],
        *,
        listen_at: Callable[[str], str] = lambda address: address,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a relay that does nothing yet.

        `listen_at`: returns the address at which this relay listens for a relayed one: the same, unless several hosts
        are on one machine.
        """
        self._index, self._credentials, self._load_hosts, self._clock = index, credentials, load_hosts, clock
        self._own, self._listen_at = load_hosts()[index], listen_at
        self._client_context = credentials.tls_context(is_server=False)
        self._links: dict[int, ControlLink] = {}
        self._tables: dict[int, Table] = {}
        """Host -> the ports that its relay leads to."""
        self._listeners: dict[tuple[str, int], LimitedListener] = {}
        self._listeners_lock, self._publish_lock = asyncio.Lock(), asyncio.Lock()
        self._is_known = asyncio.Condition()
        self._seen_s: dict[int, float] = {}
        """Gateway -> time at which it appeared."""
        self._reached: set[int] = set()
        """Gateways that have answered once."""
        self._carried: dict[int, tuple[ControlLink, asyncio.Future[FramedStream]]] = {}
        self._ids = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._leading: set[asyncio.Task[None]] = set()
        self._entrances = list[LimitedListener]()
        self._refusals, self._is_closing = RefusalLog(str(credentials.identity), print_refusal), False

    @property
    def num_links(self) -> int:
        """Number of relays that this one has a control connection with."""
        return len(self._links)

    @property
    def num_led(self) -> int:
        return len(self._leading)

    async def start(self) -> None:
        """Listen for other relays, or call the gateways and find what listens here.

        Raises:
            OSError: The port of this relay is not available.
        """
        if is_relayed(self._own.address):
            name = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            name.bind(relayed_address.socket_name(self._own.address))
            name.listen(_BACKLOG)
            self._entrances.append(LimitedListener(name, asyncio.get_running_loop(), self._answer_announcement))
            self._call_new_gateways()
            self._spawn(self._scan())
        else:
            where = (self._own.address, self._own.relay_port)
            listener = socket.create_server(where, family=_family_of(self._own.address), backlog=_BACKLOG)
            serve = functools.partial(self._secure, self._credentials.tls_context(is_server=True))
            limiter = ConnectionLimiter(AcceptLimits(deadline_s=HANDSHAKE_TIMEOUT_S))
            self._entrances.append(LimitedListener(listener, asyncio.get_running_loop(), serve, limiter))
        self._entrances[0].start()

    async def close(self) -> None:
        """Take no more connections, give those that are led some time to end, and end them."""
        self._is_closing = True
        for each in (*self._entrances, *self._listeners.values()):
            each.close()
        if self._leading:
            await asyncio.wait(self._leading, timeout=DRAIN_S)
        tasks = [*self._tasks, *self._leading]
        for task in tasks:
            task.cancel()
        for link in list(self._links.values()):
            link.close()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None], among: set[asyncio.Task[None]] | None = None) -> None:
        tasks = self._tasks if among is None else among
        task = asyncio.get_running_loop().create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    # Of a host that only calls out.

    async def _keep_link(self, host: int) -> None:
        while True:
            try:
                reader, writer = await self._call_gateway(host, kind="control")
            except (OSError, TimeoutError, UsageError):
                await asyncio.sleep(RECONNECT_S)
                continue
            link = self._links[host] = ControlLink(host, reader, writer)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(link.serve(self._handle))
                await link.offer(self._own_table)
                async with self._is_known:
                    self._reached.add(host)
                    self._is_known.notify_all()
            await self._drop_link(link)
            await asyncio.sleep(RECONNECT_S)

    async def _call_gateway(self, host: int, **hello: object) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        endpoint = self._load_hosts()[host]
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(
                endpoint.address,
                endpoint.relay_port,
                ssl=self._client_context,
                limit=BUFFER_BYTES,
                ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S,
            )
        if peer_name(writer) != (self._credentials.identity.job, endpoint.node):
            writer.transport.abort()
            raise ConnectionError(f"another process answers at {endpoint.address} port {endpoint.relay_port}")
        writer.write(json.dumps({"token": self._credentials.token, **hello}).encode() + b"\n")
        return reader, writer

    def _own_table(self) -> Table:
        return {self._own.address: relayed_address.find_listeners(self._own.address)}

    async def _scan(self) -> None:
        """Find gateways that have appeared, and publish listeners that nobody has announced."""
        while True:
            self._call_new_gateways()
            await self._publish()
            await asyncio.sleep(SCAN_S)

    def _call_new_gateways(self) -> None:
        for host, endpoint in enumerate(self._load_hosts()):
            if endpoint.relay_port and host not in self._seen_s:
                self._seen_s[host] = self._clock()
                self._spawn(self._keep_link(host))

    async def _publish(self) -> frozenset[int]:
        """Offer the ports of this host to all connected gateways; return those that are taken somewhere."""
        taken = await asyncio.gather(*(link.offer(self._own_table) for link in list(self._links.values())))
        return frozenset().union(*taken)

    async def _answer_announcement(self, sock: socket.socket) -> None:
        """Publish what listens now, and answer a process of this user once the others lead to it."""
        self._entrances[0].limiter.finish(connection_id(sock))
        _, writer = await tls.accept_stream(sock, None, 0.0, BUFFER_BYTES)
        try:
            await self._wait_first_contact()
            taken = await self._publish()
            writer.write(json.dumps(sorted(taken)).encode())
            await writer.drain()
        except OSError:
            return
        finally:
            writer.close()

    async def _wait_first_contact(self) -> None:
        """Wait for gateways that are new, and have not answered yet."""
        new = {host: each for host, each in self._seen_s.items() if host not in self._reached}
        left_s = max(new.values(), default=0.0) + FIRST_CONTACT_S - self._clock()
        if new and left_s > 0.0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s), self._is_known:
                    await self._is_known.wait_for(lambda: new.keys() <= self._reached)

    async def _carry(self, link: ControlLink, number: int, address: str, port: int) -> None:
        """Connect what a gateway asks for: a listener of this host with a fresh connection to the gateway."""
        try:
            if address != self._own.address:
                raise ConnectionRefusedError(f"{address} is no address of this host")
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                local = PlainStream(*await asyncio.open_connection(address, port, limit=BUFFER_BYTES))
        except (OSError, TimeoutError):
            link.send(failed=number)
            return
        try:
            carried = FramedStream(*await self._call_gateway(link.host, kind="carry", number=number))
        except (OSError, TimeoutError, UsageError):
            local.abort()
            link.send(failed=number)
            return
        except asyncio.CancelledError:
            local.abort()
            raise
        await lead(local, carried)

    # Of a gateway.

    async def _secure(self, context: ssl.SSLContext, sock: socket.socket) -> None:
        connection, stream = connection_id(sock), None
        with contextlib.suppress(OSError), self._refusals.noted(sock):
            stream = await tls.accept_stream(sock, context, HANDSHAKE_TIMEOUT_S, BUFFER_BYTES)
        self._entrances[0].limiter.finish(connection)
        await self._accept(*stream) if stream is not None else sock.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection of another relay."""
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                hello = file_io.parse_json(await reader.readline())
            hosts, (job, name) = self._load_hosts(), peer_name(writer)
            known = [each.node for each in hosts]
            is_known = job == self._credentials.identity.job and name in known
            if not is_known or not hmac.compare_digest(str(hello["token"]), self._credentials.token):
                raise ConnectionRefusedError("no host of this run")
            host = known.index(name)
            await self._serve_relay(host, hosts[host], hello, reader, writer)
        except (OSError, TimeoutError, ValueError, KeyError, TypeError, OverflowError, UsageError) as error:
            print(f"relay: connection refused: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            writer.transport.abort()

    async def _serve_relay(
        self,
        host: int,
        endpoint: HostEndpoint,
        hello: Mapping[str, Any],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        match hello["kind"]:
            case "control" if is_relayed(endpoint.address):
                if host in self._links:
                    self._links[host].close()
                link = self._links[host] = ControlLink(host, reader, writer)
                self._spawn(self._serve_control(link))
            case "carry":
                link, waiting = self._carried.pop(int(hello["number"]))
                if link.host != host or waiting.done():
                    raise ConnectionRefusedError("nobody waits for this connection")
                waiting.set_result(FramedStream(reader, writer))
            case "call":
                caller = FramedStream(reader, writer)
                await self._lead_to(caller, writer, (str(hello["address"]), int(hello["port"])), lambda: None)
            case _:
                raise ConnectionRefusedError(f"kind {hello['kind']!r} of {endpoint.node}")

    async def _serve_control(self, link: ControlLink) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(link.serve(self._handle))
            await link.offer(lambda: self._table_for(link.host))
        await self._drop_link(link)

    def _table_for(self, host: int) -> Table:
        """Return what this gateway leads to, but for the host itself."""
        merged: dict[str, frozenset[int]] = {}
        for each, table in self._tables.items():
            if each != host:
                merged.update(table)
        return merged

    # Of both.

    def _handle(self, link: ControlLink, message: dict[str, Any]) -> None:
        if "listen" in message:
            table = {str(address): frozenset(map(int, ports)) for address, ports in message["listen"].items()}
            self._spawn(self._take_table(link, int(message["serial"]), table))
        elif "open" in message:
            work = self._carry(link, int(message["open"]), str(message["address"]), int(message["port"]))
            self._spawn(work, self._leading)
        elif "failed" in message:
            asked, waiting = self._carried.pop(int(message["failed"]), (None, None))
            if waiting is not None and asked is link and not waiting.done():
                waiting.set_exception(ConnectionRefusedError("refused there"))

    async def _take_table(self, link: ControlLink, serial: int, table: Table) -> None:
        """Listen for what another relay leads to; answer when it is done here and at the hosts behind this one."""
        async with self._publish_lock:
            if self._links.get(link.host) is not link:
                return
            is_gateway = not is_relayed(self._own.address)
            theirs = self._load_hosts()[link.host].address
            self._tables[link.host] = {
                address: ports
                for address, ports in table.items()
                if (address == theirs if is_gateway else is_relayed(address) and address != self._own.address)
            }
            taken = await self._open_listeners()
            if is_gateway:
                taken = taken.union(*await self._offer_others(link.host))
        link.send(done=serial, taken=sorted(port for port in taken if any(port in ports for ports in table.values())))

    async def _drop_link(self, link: ControlLink) -> None:
        """Refuse connections to a host whose control connection has ended, also those that wait for its answer."""
        for asked, waiting in self._carried.values():
            if asked is link and not waiting.done():
                waiting.set_exception(ConnectionResetError("its control connection has ended"))
        if self._links.get(link.host) is not link:
            return
        del self._links[link.host]
        async with self._publish_lock:
            if link.host not in self._links and self._tables.pop(link.host, None):
                await self._open_listeners()
                if not is_relayed(self._own.address):
                    await self._offer_others(link.host)

    async def _offer_others(self, host: int) -> Sequence[frozenset[int]]:
        """Tell all other hosts behind this gateway what it leads to; return the ports that are taken there."""

        def offer(link: ControlLink) -> Awaitable[frozenset[int]]:
            return link.offer(lambda: self._table_for(link.host))

        return await asyncio.gather(*(offer(link) for link in list(self._links.values()) if link.host != host))

    async def _open_listeners(self) -> frozenset[int]:
        """Listen at exactly the addresses and ports of all tables; return the ports that are taken here."""
        wanted = {(a, p) for table in self._tables.values() for a, ports in table.items() for p in ports}
        taken: set[int] = set()
        async with self._listeners_lock:
            for each in self._listeners.keys() - wanted:
                self._listeners.pop(each).close()
            for address, port in sorted(wanted - self._listeners.keys()):
                try:
                    self._listeners[address, port] = self._listen_for(address, port)
                except OSError:
                    taken.add(port)
        return frozenset(taken)

    def _listen_for(self, address: str, port: int) -> LimitedListener:
        """Listen for a relayed address.

        Raises:
            OSError: The port is taken here.
        """
        own = self._listen_at(address)
        sock = socket.create_server((own, port), family=_family_of(own), backlog=_BACKLOG)
        limiter = ConnectionLimiter(_LOCAL_LIMITS)

        async def serve(caller: socket.socket) -> None:
            finish = functools.partial(limiter.finish, connection_id(caller))
            try:
                reader, writer = await tls.accept_stream(caller, None, 0.0, BUFFER_BYTES)
                await self._lead_to(PlainStream(reader, writer), writer, (address, port), finish)
            finally:
                finish()

        listener = LimitedListener(sock, asyncio.get_running_loop(), serve, limiter)
        listener.start()
        return listener

    async def _lead_to(
        self, caller: ByteStream, writer: asyncio.StreamWriter, where: tuple[str, int], on_reached: Callable[[], object]
    ) -> None:
        """Lead a connection, whose writer this is, to a relayed address, in the task that has accepted it."""
        task = asyncio.current_task()
        assert task is not None
        self._leading.add(task)
        task.add_done_callback(self._leading.discard)
        try:
            if self._is_closing:
                raise ConnectionAbortedError("this relay ends")
            async with while_connected(writer, CONNECT_TIMEOUT_S):
                reached = await self._reach(*where)
        except (OSError, TimeoutError, UsageError):
            caller.abort()
            return
        except asyncio.CancelledError:
            caller.abort()
            raise
        on_reached()
        await lead(caller, reached)

    async def _reach(self, address: str, port: int) -> FramedStream:
        """Return a fresh connection to a relayed address."""
        found = (host for host, table in sorted(self._tables.items()) if port in table.get(address, ()))
        host = next(found, None)
        link = self._links.get(host) if host is not None else None
        if link is None:
            raise ConnectionRefusedError(f"nobody leads to {address} port {port}")
        if is_relayed(self._own.address):
            return FramedStream(*await self._call_gateway(link.host, kind="call", address=address, port=port))
        number = next(self._ids)
        waiting: asyncio.Future[FramedStream] = asyncio.get_running_loop().create_future()
        self._carried[number] = (link, waiting)
        try:
            link.send(open=number, address=address, port=port)
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                waiting.result().abort()
            raise
        finally:
            self._carried.pop(number, None)


def _family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def peer_name(writer: asyncio.StreamWriter) -> tuple[str, str]:
    """Return job and name of the host service whose certificate the other end has shown.

    Raises:
        UsageError: The certificate names something else.
    """
    identity = tls.certificate_identity(writer.get_extra_info("ssl_object"))
    return (identity.job, identity.name) if identity.role == HOST_ROLE else ("", "")


async def run_relay(folder: HostFolder) -> None:
    """Run the relay of this host until the run is removed, or its service ends it by SIGTERM."""
    config = folder.load_config()
    hosts = HostsReader(folder)
    relay = Relay(config.index, Credentials.load(folder.credentials), hosts.read)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    await relay.start()
    served_s = time.monotonic()
    while not ended.is_set() and folder.host_config.exists():
        if job_folder.is_lock_held(folder.service_lock):
            served_s = time.monotonic()
        if time.monotonic() - served_s > ORPHAN_TIMEOUT_S:
            break
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await ended.wait()
    await relay.close()


def main(root: Path) -> None:
    """Run the relay of a run's folder with the inherited lock."""
    rotation.rotate_own_output()
    for signum in (signal.SIGHUP, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)
    os.chdir("/")
    try:
        asyncio.run(run_relay(HostFolder(root=root)))
    except (RingweaveError, OSError) as error:
        sys.exit(f"relay: {error}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
