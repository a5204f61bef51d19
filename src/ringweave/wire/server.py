"""The side that is called: a listener, a thread for each peer, handlers for the kinds of messages.

A peer that is stopped, slow or hostile has a thread, bounded memory and deadlines to itself; the others do not notice.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from ringweave.errors import ConnectionLostError, UsageError, WireError, explain
from ringweave.wire.calls import Budget, Handler
from ringweave.wire.framing.limits import Limits
from ringweave.wire.metrics import Traffic
from ringweave.wire.security import admission
from ringweave.wire.security.admission import TurnedAwayError
from ringweave.wire.security.identities import Identity
from ringweave.wire.security.refusals import Record, Refusals
from ringweave.wire.security.trust import Trust
from ringweave.wire.sessions import Session
from ringweave.wire.sockets import keep_alive

_BACKLOG = 128


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """A peer that is connected now."""

    identity: Identity
    address: str
    traffic: dict[str, float]
    """The counters of `metrics.Traffic`."""


class Server:
    """Listens once `start` is called, lets in who belongs to the job, and has their calls handled.

    Args:
        trust: How it makes sure of its peers.
        handlers: What it does with which message.
        limits: What a peer may ask for; None means `Limits()`.
        roles: Which roles are let in; empty means every process of the job.
        record: Writes events down, `EventLog.write`; None writes nothing.
        complain: Is told of exceptions in handlers that are no errors of ours; None drops them.
        hung_up: Is told of a peer whose last connection ended as it does when its process ends: without a goodbye, and
            not because nothing was heard of it. None drops it.
        lost: Is told of one whose last connection ended in any other way without a goodbye: it may live, cut off.
    """

    # Longer than a constructor should be: it only keeps what it is given, and what it knows of its peers so far.
    def __init__(  # noqa: PLR0913 - what it listens with, and whom it tells of what
        self,
        trust: Trust,
        handlers: Iterable[Handler],
        *,
        limits: Limits | None = None,
        roles: Collection[str] = (),
        record: Record | None = None,
        complain: Callable[[Identity, str, Exception], None] | None = None,
        hung_up: Callable[[Identity], object] | None = None,
        lost: Callable[[Identity], object] | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.refusals = Refusals(str(trust.identity), record)
        self._trust = trust
        self._handlers = _by_kind(handlers)
        self._roles = frozenset(roles)
        self._complain = complain or (lambda peer, kind, error: None)
        self._hung_up = hung_up or (lambda peer: None)
        self._lost = lost or (lambda peer: None)
        self._budget = Budget(self.limits.max_bytes_in_flight)
        self._lock = threading.Lock()
        self._sessions: dict[Session, str] = {}
        self._most: dict[str, int] = {}
        self._past: dict[Identity, Traffic] = {}
        """Of connections that have ended."""
        self._threads: set[threading.Thread] = set()
        self._strangers: set[socket.socket] = set()
        self._listener: socket.socket | None = None
        self._closing = threading.Event()
        self.port = 0
        """Where it listens, once it is started."""

    @property
    def held_bytes(self) -> int:
        """Bytes of buffers that are being received or handled now."""
        return self.limits.max_bytes_in_flight - self._budget.left_bytes

    def start(self, host: str, port: int = 0) -> "Server":
        """Listen; port 0 takes a free one.

        Raises:
            UsageError: This kind of trust is not for that address.
            OSError: The address or port cannot be had.
        """
        self._trust.check_place(host)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        self.port = self._listener.getsockname()[1]
        self._spawn(self._accept, self._listener)
        return self

    def peers(self) -> list[PeerStatus]:
        """Who is connected, with the counters of each connection."""
        with self._lock:
            return [
                PeerStatus(session.peer, address, session.channel.traffic.as_dict())
                for session, address in self._sessions.items()
            ]

    def names(self) -> set[str]:
        """Of those who are connected."""
        with self._lock:
            return {session.peer.name for session in self._sessions}

    def most_peers(self, role: str) -> int:
        """Most processes of that role that were connected at once; several connections of one count once."""
        with self._lock:
            return self._most.get(role, 0)

    def count_peers_anew(self, role: str) -> None:
        """From now on `most_peers` knows of those alone that are connected now, or later."""
        with self._lock:
            self._most[role] = self._num_here(role)

    def traffic(self) -> dict[Identity, Traffic]:
        """What went over all connections of each peer so far, those that have ended as well."""
        with self._lock:
            found = dict(self._past)
            for session in self._sessions:
                found[session.peer] = found.get(session.peer, Traffic()) + session.channel.traffic
            return found

    def close(self, timeout_s: float = 5.0) -> None:
        """Let no one in, finish what is being handled, say goodbye, and end all threads; all of it in time.

        What is still being handled when time is up goes on, without a connection to answer on.
        """
        deadline = time.monotonic() + timeout_s
        self._closing.set()
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
        with self._lock:
            for stranger in self._strangers:
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(stranger, socket.SHUT_RDWR)
            sessions, threads = list(self._sessions), list(self._threads)
        for session in sessions:
            leaving = threading.Thread(target=session.leave, args=(deadline - time.monotonic(),), daemon=True)
            leaving.start()
            threads.append(leaving)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if self._listener is not None:
            self._listener.close()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self, listener: socket.socket) -> None:
        while not self._closing.is_set():
            try:
                raw, address = listener.accept()
            except OSError:
                # Out of descriptors, or a caller that hung up: both pass.
                self._closing.wait(0.05)
                continue
            if self._has_room(raw, address):
                self._spawn(self._serve, raw, address)
            else:
                raw.close()

    def _has_room(self, raw: socket.socket, address: tuple[str, int]) -> bool:
        """Count a stranger in, or refuse it before anything is done for it."""
        with self._lock:
            limit = "max_connections" if len(self._sessions) >= self.limits.max_connections else "max_strangers"
            has_room = limit == "max_strangers" and len(self._strangers) < self.limits.max_strangers
            if has_room:
                self._strangers.add(raw)
        if not has_room:
            self.refusals.add("full", address[0], address[1], self._full(limit))
        return has_room

    def _full(self, limit: str) -> str:
        got = f"{getattr(self.limits, limit)} already"
        return explain("connections", got=got, expected=f"at most {limit}", do=f"Raise {limit}, or look who calls")

    def _serve(self, raw: socket.socket, address: tuple[str, int]) -> None:
        """All of one connection, in its thread."""
        try:
            session = self._admit(raw, address)
        except (WireError, OSError) as error:
            raw.close()
            self._refuse(error, address)
            return
        finally:
            with self._lock:
                self._strangers.discard(raw)
        try:
            session.run(lambda: self._note_end(session))
        except ConnectionLostError:
            pass  # its calls were cancelled; whether that is a fault is for the room above to say
        except WireError as error:
            self._refuse(error, address)
        finally:
            with self._lock:
                self._sessions.pop(session, None)
                self._past[session.peer] = self._past.get(session.peer, Traffic()) + session.channel.traffic

    def _note_end(self, session: Session) -> None:
        """Say so if that was all that there was of the peer."""
        with self._lock:
            session.has_ended = True
            has_others = any(other.peer == session.peer and not other.has_ended for other in self._sessions)
        if not (session.said_goodbye or has_others or self._closing.is_set()):
            (self._hung_up if session.channel.is_hung_up else self._lost)(session.peer)

    def _num_here(self, role: str) -> int:
        """Processes of that role that are connected. With the lock held."""
        return len({each.peer for each in self._sessions if each.peer.role == role and not each.has_ended})

    def _admit(self, raw: socket.socket, address: tuple[str, int]) -> Session:
        where = f"{address[0]}:{address[1]}"
        keep_alive(raw, self.limits.patience_s)
        channel, peer = admission.admit(raw, where, self._trust, self.limits, self._roles)
        session = Session(
            channel, peer, self._handlers, self._budget, self._complain, lambda error: self._refuse(error, address)
        )
        with self._lock:
            has_room = len(self._sessions) < self.limits.max_connections
            if has_room:
                self._sessions[session] = where
                self._most[peer.role] = max(self._num_here(peer.role), self._most.get(peer.role, 0))
        if not has_room:  # others were let in while this one shook hands
            error = TurnedAwayError("full", self._full("max_connections"))
            admission.refuse(channel, error)
            channel.close()
            raise error
        if self._closing.is_set():
            channel.cut()
        return session

    def _refuse(self, error: WireError | OSError, address: tuple[str, int]) -> None:
        if self._closing.is_set():
            return
        reason = (
            error.reason if isinstance(error, TurnedAwayError) else _REASONS.get(type(error).__name__, "connection")
        )
        self.refusals.add(reason, address[0], address[1], str(error))

    def _spawn(self, target: Callable[..., None], *args: object) -> None:
        def run() -> None:
            try:
                target(*args)
            finally:
                with self._lock:
                    self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=run, name="wire peer", daemon=True)
        with self._lock:
            self._threads.add(thread)
        thread.start()


_REASONS = {"MessageError": "message", "DeadlineError": "deadline", "ConnectionLostError": "connection"}


def _by_kind(handlers: Iterable[Handler]) -> dict[str, Handler]:
    known: dict[str, Handler] = {}
    for handler in handlers:
        kind = handler.message.kind
        if kind in known:
            raise UsageError(explain("handlers", got=kind, expected="one for each kind of message", do="Rename one"))
        known[kind] = handler
    return known
