"""Limits of a listener on connections that have not said yet what they are; one for each listener of ringweave.

A connection is *pending* from its acceptance until `finish`. Pending connections are few, in all and per source, so
that strangers cannot use up descriptors, threads or time. Where a limit is reached, the oldest pending connection of
the busiest source ends: a newcomer always gets its turn, and one that is quick is through before others push it out.
"""

import contextlib
import errno
import os
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ringweave.errors import explain

_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_MAX_SOURCES = 1024
"""Sources whose rates are remembered; the one that has been silent for longest is forgotten."""
LOCAL_SOURCE = "this machine"
"""Source of connections to Unix sockets."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AcceptLimits:
    """Limits of one listener. A job's own processes connect at once when it starts, then rarely."""

    max_pending: int = 128
    """Pending connections in all."""
    max_pending_per_source: int = 64
    """Pending connections of one address."""
    deadline_s: float = 10.0
    """Longest time for which a connection is pending; a process on a busy machine may pause in between."""
    burst: int = 512
    """Connections that one address may open at once."""
    connects_per_s: float = 64.0
    """Connections that it may open per second after that; more are closed as soon as they are accepted."""


@dataclass(slots=True)
class _Source:
    """Connections of one address."""

    pending: dict[int, None] = field(default_factory=dict)
    """Descriptors of its pending connections, oldest first."""
    free: float = 0.0
    """Connections that it may open now."""
    then_s: float = 0.0


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
        self._pending: OrderedDict[int, tuple[float, str]] = OrderedDict()
        self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    @property
    def num_pending(self) -> int:
        """Number of pending connections."""
        return len(self._pending)

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
            elif error.errno in (errno.EBADF, errno.EINVAL, errno.ENOTSOCK):
                raise
            return None  # it was aborted, or another thread has accepted it
        source = address[0] if isinstance(address, tuple) else LOCAL_SOURCE
        with self._lock:
            refused = self._admit(sock.fileno(), source)
        if refused is None:
            return sock, address
        self.num_refused += 1
        self._on_refusal(refused, self._limits_text())
        if self._pending.get(sock.fileno()) is not None:
            return sock, address
        sock.close()
        return None

    def finish(self, sock: socket.socket) -> None:
        """Note that a connection is no longer pending: it has said what it is, or its owner is about to close it."""
        with self._lock:
            self._forget(sock.fileno())

    def cut_overdue(self) -> None:
        """Shut down connections that are pending for too long: their owners see the end, and close them."""
        now_s = self._clock()
        with self._lock:
            for descriptor, (deadline_s, _) in list(self._pending.items()):
                if deadline_s > now_s:
                    break
                self.num_refused += 1
                self._cut(descriptor)

    def close(self) -> None:
        """Give the reserved descriptor back."""
        with self._lock:
            if self._reserve >= 0:
                os.close(self._reserve)
            self._reserve = -1

    def _admit(self, descriptor: int, name: str) -> str | None:
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
        loser = None
        if len(source.pending) >= limits.max_pending_per_source:
            loser = name
        elif len(self._pending) >= limits.max_pending:
            loser = max(self._sources, key=lambda each: len(self._sources[each].pending))
        if loser is not None:
            self._cut(next(iter(self._sources[loser].pending)))
        self._forget(descriptor)  # of a connection that its owner has closed without a word
        source.pending[descriptor] = None
        self._pending[descriptor] = (now_s + limits.deadline_s, name)
        return loser

    def _cut(self, descriptor: int) -> None:
        """Shut a pending connection down; with the lock held, so that its owner cannot close it meanwhile."""
        self._forget(descriptor)
        with contextlib.suppress(OSError):
            sock = socket.socket(fileno=descriptor)
            try:
                sock.shutdown(socket.SHUT_RDWR)
            finally:
                sock.detach()

    def _drop_silent_source(self) -> None:
        if len(self._sources) > _MAX_SOURCES:
            silent = next((name for name, each in self._sources.items() if not each.pending), None)
            if silent is not None:
                del self._sources[silent]

    def _forget(self, descriptor: int) -> None:
        known = self._pending.pop(descriptor, None)
        if known is not None and known[1] in self._sources:
            self._sources[known[1]].pending.pop(descriptor, None)

    def _limits_text(self) -> str:
        limits = self.limits
        return explain(
            "connections that say nothing",
            got="more",
            expected=f"at most {limits.max_pending_per_source} of an address, {limits.max_pending} in all, "
            f"{limits.burst} at once and {limits.connects_per_s:g} per second",
            do="Check which processes call",
        )

    def _refuse_by_reserve(self, listener: socket.socket) -> None:
        """Refuse a connection although no descriptor is free: it would wait for ever, and this end would spin."""
        with self._lock:
            if self._reserve >= 0:
                os.close(self._reserve)
                self._reserve = -1
                with contextlib.suppress(OSError):
                    listener.accept()[0].close()
                with contextlib.suppress(OSError):
                    self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self.num_refused += 1
        time.sleep(_PAUSE_S)


_PAUSE_S = 0.01
"""Pause while descriptors are used up: who holds them needs the processor."""
