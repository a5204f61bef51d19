"""Limits of a listener on connections that have not said yet what they are; one for each listener of ringweave.

A connection is *pending* from its acceptance until `finish`. Pending connections are few, in all and per source, so
that strangers cannot use up descriptors, threads or time. Where a limit is reached, the oldest pending connection of
the busiest source ends: a newcomer always gets its turn, and one that is quick is through before others push it out.
"""

import contextlib
import errno
import os
import socket
import stat
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ringweave.errors import explain

if TYPE_CHECKING:
    import asyncio

_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_MAX_SOURCES = 1024
"""Sources whose rates are remembered; the one that has been silent for longest is forgotten."""
LOCAL_SOURCE = "this machine"
"""Source of connections to Unix sockets."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AcceptLimits:
    """Limits of one listener. A job's own processes connect at once when it starts, then rarely."""

    max_pending: int = 128
    max_pending_per_source: int = 64
    """Pending connections of one address."""
    deadline_s: float = 10.0
    """Longest time for which a connection is pending; a process on a busy machine may pause in between."""
    burst: int = 512
    """Connections that one address may open at once."""
    connects_per_s: float = 64.0
    """Connections that it may open per second after that; more are closed as soon as they are accepted."""


@dataclass(frozen=True, slots=True)
class _Pending:
    """A pending connection, by its id."""

    deadline_s: float
    source: str
    descriptor: int
    """Another connection's, or a file's, once the owner has closed it."""
    on_cut: Callable[[], object] = lambda: None


@dataclass(slots=True)
class _Source:
    """Connections of one address."""

    pending: dict[int, None] = field(default_factory=dict)
    """Ids of its pending connections, oldest first."""
    free: float = 0.0
    """Connections that it may open now."""
    then_s: float = 0.0


def connection_id(sock: socket.socket) -> int:
    """Return the number of an open socket that no later one gets, as it may get the descriptor: its inode.

    Take it before the connection can end, such as before a TLS handshake.
    """
    return os.fstat(sock.fileno()).st_ino


def is_connection(descriptor: int, connection: int) -> bool:
    """Return whether a descriptor is, still, that of the connection with this id.

    Raises:
        OSError: It is closed.
    """
    status = os.fstat(descriptor)
    return stat.S_ISSOCK(status.st_mode) and status.st_ino == connection


class ConnectionLimiter:
    """Accepts connections within the limits, from any thread; it never raises for what a stranger does."""

    def __init__(
        self,
        limits: AcceptLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_refusal: Callable[[str, str], object] = lambda address, text: None,
    ) -> None:
        """`on_refusal` gets the address and the reason of each connection that is cut for another, or refused."""
        self.limits = limits or AcceptLimits()
        self.num_refused = 0
        """Connections refused or cut so far."""
        self._clock, self._on_refusal = clock, on_refusal
        self._lock = threading.Lock()
        self._sources: OrderedDict[str, _Source] = OrderedDict()
        self._pending: OrderedDict[int, _Pending] = OrderedDict()
        self._reserve: int | None = None
        """Descriptor kept back for the time when all others are used up; opened with the first connection."""

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    @property
    def has_overdue(self) -> bool:
        """True if a connection is pending for too long."""
        first = next(iter(list(self._pending.values())), None)
        return first is not None and first.deadline_s <= self._clock()

    def accept(self, listener: socket.socket) -> tuple[socket.socket, Any] | None:
        """Accept one connection and its address; None if there is none, or if it had to be refused.

        Raises:
            OSError: The listener is closed or was shut down.
        """
        try:
            sock, address = listener.accept()
        except OSError as error:
            if error.errno in _EXHAUSTED:
                self._refuse_by_reserve(listener)
            if error.errno in (errno.EBADF, errno.EINVAL, errno.ENOTSOCK):
                raise
            return None  # it was aborted, another thread has accepted it, or there was none in the listener's own time
        if sock.family == socket.AF_UNIX and not _is_own_user(sock):
            self.num_refused += 1
            sock.close()
            return None
        source = address[0] if isinstance(address, tuple) else LOCAL_SOURCE
        with self._lock:
            if self._reserve is None:
                self._hold_reserve()
            refused = self._admit(sock, source)
        if refused is None:
            return sock, address
        self.num_refused += 1
        self._on_refusal(refused, self._limits_text())
        if connection_id(sock) in self._pending:
            return sock, address
        sock.close()
        return None

    def is_pending(self, connection: int) -> bool:
        """Return whether the connection of that id is pending."""
        return connection in self._pending

    def call_on_cut(self, connection: int, on_cut: Callable[[], object]) -> None:
        """Have a function called when the connection of that id is cut: by the thread that cuts it, under the lock."""
        with self._lock:
            if connection in self._pending:
                self._pending[connection] = replace(self._pending[connection], on_cut=on_cut)

    def finish(self, connection: int) -> None:
        """Note that the connection of that id is no longer pending: it has said what it is, or has ended."""
        with self._lock:
            self._forget(connection)

    def cut_overdue(self) -> list[int]:
        """Shut down connections that are pending for too long; return their ids, for their owners to close them."""
        now_s, cut = self._clock(), list[int]()
        with self._lock:
            for connection, pending in list(self._pending.items()):
                if pending.deadline_s > now_s:
                    break
                self.num_refused += self._cut(connection)
                cut.append(connection)
        return cut

    def cut_all(self) -> None:
        """Shut down all pending connections, as the listener ends."""
        with self._lock:
            for connection in list(self._pending):
                self._cut(connection)

    def close(self) -> None:
        """Give the reserved descriptor back."""
        with self._lock:
            self._release_reserve()

    def _admit(self, sock: socket.socket, name: str) -> str | None:
        """Take a connection into the pending ones, unless it has to go; return the source that loses one, if any."""
        now_s, limits = self._clock(), self.limits
        source = self._sources.pop(name, None) or _Source(free=limits.burst, then_s=now_s)
        self._sources[name] = source
        self._drop_silent_source()
        source.free = min(limits.burst, source.free + limits.connects_per_s * (now_s - source.then_s))
        source.then_s = now_s
        if source.free < 1.0:
            return name
        source.free -= 1.0
        if len(source.pending) >= limits.max_pending_per_source or len(self._pending) >= limits.max_pending:
            self._forget_ended()
        loser = None
        if len(source.pending) >= limits.max_pending_per_source:
            loser = name
        elif len(self._pending) >= limits.max_pending:
            loser = max(self._sources, key=lambda each: len(self._sources[each].pending))
        if loser is not None:
            self._cut(next(iter(self._sources[loser].pending)))
        connection = connection_id(sock)
        source.pending[connection] = None
        self._pending[connection] = _Pending(now_s + limits.deadline_s, name, sock.fileno())
        return loser

    def _forget_ended(self) -> None:
        """Forget connections that their owners have closed without a word."""
        for connection, pending in list(self._pending.items()):
            try:
                has_ended = not is_connection(pending.descriptor, connection)
            except OSError:
                has_ended = True
            if has_ended:
                self._forget(connection)

    def _cut(self, connection: int) -> bool:
        """Shut a pending connection down; return False if its owner has closed it meanwhile.

        It is looked at by a copy of its descriptor, which stays the same connection's whatever other threads close.
        """
        cut = self._pending[connection]
        self._forget(connection)
        self._release_reserve()  # for the copy
        is_open = False
        with contextlib.suppress(OSError):
            copy = os.dup(cut.descriptor)
            try:
                is_open = is_connection(copy, connection)
                if is_open:
                    _shut_down(copy)
            finally:
                os.close(copy)
        self._hold_reserve()
        cut.on_cut()
        return is_open

    def _drop_silent_source(self) -> None:
        if len(self._sources) > _MAX_SOURCES:
            silent = next((name for name, each in self._sources.items() if not each.pending), None)
            if silent is not None:
                del self._sources[silent]

    def _forget(self, connection: int) -> None:
        known = self._pending.pop(connection, None)
        if known is not None and known.source in self._sources:
            self._sources[known.source].pending.pop(connection, None)

    def _limits_text(self) -> str:
        limits = self.limits
        return explain(
            "connections that say nothing",
            got="more",
            expected=f"at most {limits.max_pending_per_source} of an address, {limits.max_pending} in all, "
            f"{limits.burst} at once and {limits.connects_per_s:g} per second",
            do="Check which processes call",
        )

    def _hold_reserve(self) -> None:
        with contextlib.suppress(OSError):
            self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _release_reserve(self) -> None:
        if self._reserve is not None:
            os.close(self._reserve)
        self._reserve = None

    def _refuse_by_reserve(self, listener: socket.socket) -> None:
        """Refuse a connection although no descriptor is free: it would wait for ever, and this end would spin."""
        with self._lock:
            if self._reserve is not None:
                self._release_reserve()
                with contextlib.suppress(OSError):
                    listener.accept()[0].close()
                self._hold_reserve()
        self.num_refused += 1
        time.sleep(_PAUSE_S)


def _shut_down(descriptor: int) -> None:
    sock = socket.socket(fileno=descriptor)
    try:
        sock.shutdown(socket.SHUT_RDWR)
    finally:
        sock.detach()


def _is_own_user(sock: socket.socket) -> bool:
    """Return whether a process of this user, or of root, is at the other end of a Unix socket."""
    user = _UNIX_CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UNIX_CREDENTIALS.size))[1]
    return user in (os.geteuid(), 0)


_UNIX_CREDENTIALS = struct.Struct("3i")
_PAUSE_S = 0.01
"""Pause while descriptors are used up: who holds them needs the processor."""


class LimitedListener:
    """Listener in an asyncio loop: hands each connection within the limits to a task, which ends when that is cut."""

    def __init__(
        self,
        listener: socket.socket,
        loop: "asyncio.AbstractEventLoop",
        serve: Callable[[socket.socket], Coroutine[Any, Any, None]],
        limiter: ConnectionLimiter | None = None,
    ) -> None:
        """`serve` gets each connection, calls `limiter.finish` once the other end is known, and closes it.

        It is cancelled when the connection is cut before.
        """
        self.port: int = listener.getsockname()[1]
        self.limiter = limiter or ConnectionLimiter()
        self._listener, self._loop, self._serve = listener, loop, serve
        self._tasks: set[asyncio.Task[None]] = set()
        listener.setblocking(False)

    @property
    def is_open(self) -> bool:
        """True until it is closed."""
        return self._listener.fileno() >= 0

    @property
    def is_in_use(self) -> bool:
        """True until it is closed and all it has accepted has ended; keep it so long: a loop keeps no task alive."""
        return self.is_open or bool(self._tasks)

    def start(self) -> None:
        """Accept connections from now on; in the thread of the loop."""
        self._loop.add_reader(self._listener, self._accept)
        self._watch_deadlines()

    def close(self) -> None:
        """Accept no more connections; those that were accepted go on. In the thread of the loop."""
        if self.is_open:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self.limiter.close()

    def close_soon(self) -> None:
        """Close it, from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended with the process
            self._loop.call_soon_threadsafe(self.close)

    def close_inherited(self) -> None:
        """Close the listener in a forked child, whose loop does not run."""
        self._listener.close()

    def _accept(self) -> None:
        try:
            accepted = self.limiter.accept(self._listener)
        except OSError:
            self.close()
            return
        if accepted is not None:
            sock, _ = accepted
            sock.setblocking(False)
            task = self._loop.create_task(self._serve(sock))
            self._tasks.add(task)  # a loop keeps weak references only
            task.add_done_callback(self._tasks.discard)
            self.limiter.call_on_cut(connection_id(sock), task.cancel)

    def _watch_deadlines(self) -> None:
        if self.is_open:
            self.limiter.cut_overdue()
            self._loop.call_later(_WATCH_S, self._watch_deadlines)


_WATCH_S = 1.0
"""Interval at which a listener in a loop looks for connections that are pending for too long."""
