"""RPC server: a listener, a thread for each peer, and handlers for the kinds of messages.

A peer that is stopped, slow or hostile has its own thread, bounded memory and deadlines; other peers are not
affected.
"""

import contextlib
import errno
import math
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ringweave import ports, relayed_address
from ringweave.accept_limits import AcceptLimits, ConnectionLimiter, connection_id
from ringweave.errors import (
    ConnectionLostError,
    DeadlineError,
    MessageError,
    RingweaveError,
    RpcError,
    UsageError,
    explain,
)
from ringweave.ports import PortRange
from ringweave.rpc import framing, handshake
from ringweave.rpc.channel import ConnectionTraffic, LatencyRecorder, RpcChannel, configure_keepalive
from ringweave.rpc.framing import FrameHead, FrameKind, RpcFailure, RpcLimits, RpcMessage, RpcReply
from ringweave.rpc.handshake import EventWriter, RefusalLog, TurnedAwayError
from ringweave.rpc.tls import Identity, PeerAuthentication


@dataclass(frozen=True, kw_only=True, slots=True)
class RpcCall:
    """Call of a peer: one message, complete and checked."""

    peer: Identity
    """Sender, as its certificate says."""
    message: Any
    """Message, of the class that its handler is for."""
    buffers: Sequence[memoryview]
    """Buffers of the message, flat bytes; the handler may keep them."""
    deadline_s: float
    """Time on the server's clock at which the caller stops waiting; infinite if the caller set none."""
    cancelled: threading.Event = field(default_factory=threading.Event)
    """Set once no caller waits for the answer: it was cancelled, or the connection is gone."""
    clock: Callable[[], float] = time.monotonic

    def left_s(self) -> float:
        """Return the seconds until the caller stops waiting."""
        return self.deadline_s - self.clock()


@dataclass(frozen=True, slots=True)
class IncomingCall:
    """Call whose buffers are still to come."""

    peer: Identity
    message: Any
    sizes: tuple[int, ...]
    """Bytes of each buffer; their sum is within the limits."""


def uninitialized_buffers(sizes: Sequence[int]) -> list[memoryview]:
    """Return memory of these sizes, not cleared, since all of it will be written."""
    import numpy as np  # here, since most servers get no buffers and start sooner without it

    return [np.empty(size, np.uint8).data if size else memoryview(b"") for size in sizes]


@dataclass(frozen=True, kw_only=True, slots=True)
class RpcHandler:
    """Handler of one kind of message on a server."""

    message: type[RpcMessage]
    handle: Callable[[RpcCall], RpcMessage | RpcReply]
    """Handles the call and returns the answer, of class `message.reply`. It runs in a thread of its own, beside calls
    of other peers. An error of the tree in `errors.py` reaches the caller with its text, any other without it."""
    is_quick: bool = False
    """It waits for nothing but briefly held locks. So it runs in the thread that reads from the peer, as starting
    another thread costs more than most small calls. It cannot be cancelled."""
    allocate: Callable[[IncomingCall], Sequence[memoryview]] = lambda incoming: uninitialized_buffers(incoming.sizes)
    """Returns memory for the buffers, of exactly their sizes, before they are received; it may refuse by an error of
    the tree in `errors.py`. If the buffers arrive damaged, the handler is not called, and the memory holds anything."""


class MemoryBudget:
    """Budget of bytes that all connections of a server may hold at once; further requests wait for releases."""

    def __init__(self, num_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._free_bytes = num_bytes
        self._clock = clock
        self._changed = threading.Condition()

    @property
    def free_bytes(self) -> int:
        return self._free_bytes

    def acquire(self, num_bytes: int, timeout_s: float) -> None:
        """Wait until so many bytes are free, and take them.

        Raises:
            DeadlineError: They were not free in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._free_bytes >= num_bytes, timeout_s):
                raise DeadlineError(
                    "room for a message",
                    got=f"{self._free_bytes} bytes free",
                    expected=f"{num_bytes} within {timeout_s:.3g} s",
                    do="Raise max_bytes_in_flight, or let fewer peers push at once",
                )
            self._free_bytes -= num_bytes

    def release(self, num_bytes: int) -> None:
        with self._changed:
            self._free_bytes += num_bytes
            self._changed.notify_all()


HandlerErrorCallback = Callable[[Identity, str, Exception], None]
"""Callback for a handler's unexpected exception: peer, kind of message, exception."""
RefusedMessageCallback = Callable[[RpcError], object]
"""Callback for a refused message whose sender stays connected."""

_BYE_TIMEOUT_S = 0.5


class PeerSession:
    """Session of one peer: its calls.

    One thread reads. Each call that may take time is handled in a thread of its own, at most `max_calls` at once. The
    client knows that number and waits, so the reader never does, and a cancellation always gets through; a client that
    exceeds it is cut off.
    """

    def __init__(
        self,
        channel: RpcChannel,
        peer: Identity,
        handlers: Mapping[str, RpcHandler],
        budget: MemoryBudget,
        on_handler_error: HandlerErrorCallback,
        on_refused_message: RefusedMessageCallback = lambda error: None,
    ) -> None:
        self.channel = channel
        self.peer = peer
        self.has_ended = False
        """The server knows of its end; calls may still be in progress."""
        self.has_closed_gracefully = False
        """The peer has closed gracefully."""
        self.is_cut_off = False
        """Its certificate counts no more."""
        self._handlers = handlers
        self._budget = budget
        self._on_handler_error = on_handler_error
        self._on_refused_message = on_refused_message
        self._lock = threading.Lock()
        self._running: dict[int, RpcCall] = {}
        self._last_call = 0
        self._latencies = LatencyRecorder(channel.traffic)
        self._idle = threading.Condition(self._lock)
        self._num_open_calls = 0
        self._is_closing = False

    def run(self, on_end: Callable[[], object] = lambda: None) -> None:
        """Handle calls until the connection ends; the calling thread is the reader.

        Args:
            on_end: Called as soon as the connection has ended, while calls may still be in progress.

        Raises:
            WireError: The peer broke the protocol, or the connection broke; the peer was notified if possible.
        """
        try:
            while self._handle_frame(self.channel.receive_head()):
                pass
        except ConnectionLostError:
            if not (self._is_closing or self.is_cut_off):
                raise
        except RpcError as error:
            handshake.send_refusal(self.channel, error)
            raise
        finally:
            self._cancel_all()
            on_end()
            self.channel.abort()
            self.wait_idle(self.channel.limits.patience_s)
            self.channel.close()

    def close_gracefully(self, timeout_s: float) -> None:
        """Take no more calls, let those in progress finish, close gracefully; from any thread."""
        self._is_closing = True
        self.wait_idle(timeout_s)
        with contextlib.suppress(RpcError):
            self.channel.send(FrameKind.BYE, timeout_s=_BYE_TIMEOUT_S)
        self.channel.abort()

    def cut_off(self, reason: RpcError) -> None:
        """Take no more calls, tell the peer why if it listens, and cut the connection; from any thread."""
        self._is_closing = True
        handshake.send_refusal(self.channel, reason)
        self.channel.abort()

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no call is in progress; False if time is up first."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._num_open_calls, max(0.0, timeout_s))

    def _handle_frame(self, head: FrameHead) -> bool:
        match head.prefix.kind:
            case FrameKind.CALL:
                self._begin_call(head)
            case FrameKind.CANCEL if not head.prefix.num_buffers:
                self._cancel(head.prefix.call)
            case FrameKind.BYE:
                self.has_closed_gracefully = True
                return False
            case other:
                raise MessageError(
                    "frame", got=other.name, expected="CALL, CANCEL or BYE", do="Check which process called"
                )
        return True

    def _begin_call(self, head: FrameHead) -> None:
        self._check_order(head)
        num_bytes = head.prefix.content_bytes
        # The peer's time runs while it waits for memory: a call for more than is free waits unread.
        self._budget.acquire(num_bytes, self.channel.limits.frame_timeout_s(num_bytes))
        try:
            started = self._receive_call(head)
        except BaseException:
            self._budget.release(num_bytes)
            raise
        if not started:
            self._budget.release(num_bytes)

    def _check_order(self, head: FrameHead) -> None:
        if head.prefix.call <= self._last_call:
            raise MessageError(
                "number of a call",
                got=head.prefix.call,
                expected=f"more than {self._last_call}",
                do="A message was repeated on the way: connect again",
            )
        self._last_call = head.prefix.call
        if len(self._running) >= self.channel.limits.max_calls:
            raise MessageError(
                "calls at once",
                got=len(self._running) + 1,
                expected=f"at most {self.channel.limits.max_calls}, as the welcome said",
                do="Wait for answers before calling again",
            )

    def _receive_call(self, head: FrameHead) -> bool:
        """Receive the buffers and start the handler; False if the call was answered by a failure instead."""
        try:
            handler, incoming = self._parse_call(head)
            buffers = _checked_buffers(handler.allocate(incoming), head.sizes)
        except RingweaveError as error:
            if isinstance(error, MessageError):  # the handler reports other refusals itself
                self._on_refused_message(error)
            self.channel.discard_content(head.prefix)
            self._send_failure(head.prefix.call, error)
            return False
        self.channel.receive_content(head.prefix, buffers)
        timeout_s = head.prefix.timeout_ms / 1000
        call = RpcCall(
            peer=self.peer,
            message=incoming.message,
            buffers=buffers,
            deadline_s=time.monotonic() + timeout_s if timeout_s else math.inf,
        )
        with self._lock:
            self._running[head.prefix.call] = call
            self._num_open_calls += 1
        run_args = (handler, head.prefix.call, call, head.prefix.content_bytes)
        if handler.is_quick:
            self._run_handler(*run_args)
        elif not _start_thread(self._run_handler, *run_args, name=f"rpc {head.name}"):
            self._send_failure(head.prefix.call, RpcError(_NO_THREAD))
            self._end_call()
            return False
        return True

    def _parse_call(self, head: FrameHead) -> tuple[RpcHandler, IncomingCall]:
        if self._is_closing:
            raise RpcError("server", got="closing", expected="one that stays", do="Call the one that takes its place")
        handler = self._handlers.get(head.name)
        if handler is None:
            raise MessageError(
                "kind of message",
                got=head.name,
                expected=f"one of {', '.join(sorted(self._handlers)) or 'none'}",
                do="Look whether this is the server that you meant",
            )
        return handler, IncomingCall(self.peer, framing.decode_message(handler.message, head.body), head.sizes)

    def _run_handler(self, handler: RpcHandler, number: int, call: RpcCall, num_bytes: int) -> None:
        started_s = time.monotonic()
        try:
            self._send_reply(handler, number, call)
            self._latencies.record_answer(time.monotonic() - started_s)
        except RingweaveError as error:
            self._send_failure(number, error)
        except Exception as error:  # a handler's bug ends its call, not the server
            self._on_handler_error(self.peer, handler.message.kind, error)
            self._send_failure(
                number, RpcError(f"{handler.message.kind}: {type(error).__name__} in the handler; see its log.")
            )
        finally:
            self._budget.release(num_bytes)
            self._end_call()

    def _end_call(self) -> None:
        with self._idle:
            self._num_open_calls -= 1
            self._idle.notify_all()

    def _send_reply(self, handler: RpcHandler, number: int, call: RpcCall) -> None:
        returned = handler.handle(call)
        answer = returned if isinstance(returned, RpcReply) else RpcReply(returned)
        assert type(answer.message) is handler.message.reply, (
            f"{handler.message.kind} is answered by {answer.message!r}"
        )
        if call.cancelled.is_set():
            answer_error = explain(
                handler.message.kind, got="cancelled", expected="a caller that waits", do="Call again"
            )
            raise RpcError(answer_error)
        self._free_slot(number)
        self.channel.send(
            FrameKind.REPLY,
            call=number,
            name=answer.message.kind,
            body=framing.encode_message(answer.message),
            buffers=answer.buffers,
        )

    def _send_failure(self, number: int, error: Exception) -> None:
        self._latencies.record_failure()
        self._free_slot(number)
        body = framing.encode_message(RpcFailure(error=type(error).__name__, text=str(error)[:4000]))
        try:
            self.channel.send(FrameKind.FAILURE, call=number, body=body)
        except RpcError:
            self.channel.abort()

    def _free_slot(self, number: int) -> None:
        """Free the call's slot before its answer is sent: the client may call again as soon as it has that."""
        with self._lock:
            self._running.pop(number, None)

    def _cancel(self, number: int) -> None:
        with self._lock:
            call = self._running.get(number)
        if call is not None:
            call.cancelled.set()

    def _cancel_all(self) -> None:
        with self._lock:
            for call in self._running.values():
                call.cancelled.set()


def _checked_buffers(buffers: Sequence[memoryview], sizes: tuple[int, ...]) -> Sequence[memoryview]:
    assert tuple(view.nbytes for view in buffers) == sizes, "allocate gives memory of the sizes that it is asked for"
    return buffers


def _start_thread(target: Callable[..., object], *args: object, name: str) -> threading.Thread | None:
    """Run a function in a thread; return None, and run nothing, if the system gives no more threads."""
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


_NO_THREAD = explain("thread", got="none from the system", expected="one more", do="Raise ulimit -u, or pids.max")
_LISTEN_BACKLOG = 1024
_DEADLINE_CHECK_S = 0.5
"""Interval at which the accepting thread looks for certificates that count no more."""
_HANDSHAKE_STEPS = 3
"""Steps that a peer may take `handshake_s` for: TLS, its hello, and the reading of the welcome."""


def _accept_limits(limits: RpcLimits) -> AcceptLimits:
    return AcceptLimits(
        max_pending=limits.max_unauthenticated,
        max_pending_per_source=limits.max_unauthenticated,
        deadline_s=_HANDSHAKE_STEPS * limits.handshake_s,
    )


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """Connected peer."""

    identity: Identity
    address: str
    traffic: dict[str, float]
    """Counters of `ConnectionTraffic`."""


class RpcServer:
    """RPC server: listens once `start` is called, admits processes of the job, and handles their calls.

    Args:
        authentication: Authenticates the peers.
        handlers: Handlers of the kinds of messages.
        limits: Limits of a peer; None means `RpcLimits()`.
        roles: Admitted roles; empty means every process of the job.
        is_revoked: Whether a process's certificate counts no more, since it was expelled from the job. It is refused
            then, and the connections that it has are cut.
        write_event: Writes events, `EventLog.write`; None writes nothing.
        on_handler_error: Receives unexpected exceptions in handlers; None drops them.
        on_peer_exit: Receives a peer whose last connection its own kernel closed abruptly, as at the end of its
            process. None drops it.
        on_peer_lost: Receives a peer whose last connection ended abruptly in any other way: it may live, cut off.
    """

    # A long constructor: it only stores its arguments and empty tables of its peers.
    def __init__(  # noqa: PLR0913 - its settings and its callbacks
        self,
        authentication: PeerAuthentication,
        handlers: Iterable[RpcHandler],
        *,
        limits: RpcLimits | None = None,
        roles: Collection[str] = (),
        is_revoked: Callable[[Identity], bool] | None = None,
        write_event: EventWriter | None = None,
        on_handler_error: Callable[[Identity, str, Exception], None] | None = None,
        on_peer_exit: Callable[[Identity], object] | None = None,
        on_peer_lost: Callable[[Identity], object] | None = None,
    ) -> None:
        self.limits = limits or RpcLimits()
        self.refusals = RefusalLog(str(authentication.identity), write_event)
        self._authentication = authentication
        self._handlers = _handlers_by_kind(handlers)
        self._roles, self._is_revoked = frozenset(roles), is_revoked
        self._on_handler_error = on_handler_error or (lambda peer, kind, error: None)
        self._on_peer_exit = on_peer_exit or (lambda peer: None)
        self._on_peer_lost = on_peer_lost or (lambda peer: None)
        self._budget = MemoryBudget(self.limits.max_bytes_in_flight)
        self._lock = threading.Lock()
        self._sessions: dict[PeerSession, str] = {}
        self._max_peers: dict[str, int] = {}
        self._past_traffic: dict[Identity, ConnectionTraffic] = {}
        """Traffic of connections that have ended, of all processes of a slot together."""
        self._threads: set[threading.Thread] = set()
        self._limiter = ConnectionLimiter(
            _accept_limits(self.limits), on_refusal=lambda address, text: self.refusals.add("full", address, 0, text)
        )
        self._listener: socket.socket | None = None
        self._closing = threading.Event()
        self.port = 0
        """Port on which it listens, once it is started."""

    @property
    def held_bytes(self) -> int:
        """Bytes of buffers being received or handled now."""
        return self.limits.max_bytes_in_flight - self._budget.free_bytes

    def start(self, host: str, port: int = 0, *, within: PortRange | None = None) -> "RpcServer":
        """Listen; port 0 takes a free one, of a range if there is one.

        Raises:
            LaunchError: All ports of the range are taken, or the relays of this host cannot lead to it.
            OSError: The address or port is not available.
        """
        if port:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, port), family=family, backlog=_LISTEN_BACKLOG)
            with contextlib.ExitStack() as stack:
                stack.callback(self._listener.close)
                if port in relayed_address.announce_listeners(host):
                    raise relayed_address.taken_error(host, port)
                stack.pop_all()
        else:
            self._listener = ports.create_server(host, within, backlog=_LISTEN_BACKLOG)
        self.port = self._listener.getsockname()[1]
        if not self._spawn(self._accept, self._listener):
            raise OSError(errno.EAGAIN, _NO_THREAD)
        return self

    def peers(self) -> list[PeerStatus]:
        """Return the connected peers, with the counters of each connection."""
        with self._lock:
            return [
                PeerStatus(session.peer, address, session.channel.traffic.as_dict())
                for session, address in self._sessions.items()
            ]

    def peer_names(self) -> set[str]:
        with self._lock:
            return {session.peer.name for session in self._sessions}

    def max_peers(self, role: str) -> int:
        """Return the maximum number of processes of that role connected at once; each counts once."""
        with self._lock:
            return self._max_peers.get(role, 0)

    def reset_max_peers(self, role: str) -> None:
        """Let `max_peers` count only peers that are connected now or later."""
        with self._lock:
            self._max_peers[role] = self._num_connected(role)

    def traffic_by_peer(self) -> dict[Identity, ConnectionTraffic]:
        """Return the traffic of each peer so far, over all its connections, including those that have ended.

        Those that have ended count for the slot of the peer: its name up to the first dot.
        """
        with self._lock:
            traffic = dict(self._past_traffic)
            for session in self._sessions:
                traffic[session.peer] = traffic.get(session.peer, ConnectionTraffic()) + session.channel.traffic
            return traffic

    def close(self, timeout_s: float = 5.0) -> None:
        """Admit no peer, finish calls in progress, close gracefully, and end all threads; all of it in time.

        Calls still in progress when time is up go on, without a connection to answer on.
        """
        deadline = time.monotonic() + timeout_s
        self._closing.set()
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
        self._limiter.cut_all()
        with self._lock:
            sessions = list(self._sessions)
        for session in sessions:
            if not self._spawn(session.close_gracefully, deadline - time.monotonic()):
                session.channel.abort()
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if self._listener is not None:
            self._listener.close()
        self._limiter.close()

    def __enter__(self) -> "RpcServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self, listener: socket.socket) -> None:
        listener.settimeout(_DEADLINE_CHECK_S)
        checked_s = time.monotonic()
        while not self._closing.is_set():
            if time.monotonic() - checked_s >= _DEADLINE_CHECK_S:
                checked_s = time.monotonic()
                self._cut_revoked()
            try:
                accepted = self._limiter.accept(listener)
            except OSError:
                return  # it is closed
            self._limiter.cut_overdue()
            if accepted is None:
                continue
            raw, address = accepted
            if len(self._sessions) >= self.limits.max_connections:
                self._refuse(raw, address, self._full_text("max_connections"))
            elif not self._spawn(self._serve_connection, raw, address):
                self._refuse(raw, address, _NO_THREAD)

    def _refuse(self, raw: socket.socket, address: tuple[str, int], text: str) -> None:
        self._limiter.finish(connection_id(raw))
        raw.close()
        self.refusals.add("full", address[0], address[1], text)

    def _full_text(self, limit: str) -> str:
        got = f"{getattr(self.limits, limit)} already"
        return explain(
            "connections", got=got, expected=f"at most {limit}", do=f"Raise {limit}, or check which processes call"
        )

    def _serve_connection(self, raw: socket.socket, address: tuple[str, int]) -> None:
        connection = connection_id(raw)  # TLS takes the descriptor over
        try:
            session = self._admit(raw, address)
        except (RpcError, OSError) as error:
            raw.close()
            self._record_refusal(error, address)
            return
        finally:
            self._limiter.finish(connection)
        try:
            session.run(lambda: self._report_end(session))
        except ConnectionLostError:
            pass  # its calls were cancelled; the caller's layer decides whether that is a fault
        except RpcError as error:
            self._record_refusal(error, address)
        finally:
            with self._lock:
                self._sessions.pop(session, None)
                slot = replace(session.peer, name=session.peer.name.partition(".")[0])
                past = self._past_traffic.get(slot, ConnectionTraffic())
                self._past_traffic[slot] = past + session.channel.traffic

    def _report_end(self, session: PeerSession) -> None:
        """Report the loss of a peer if that was its last connection."""
        with self._lock:
            session.has_ended = True
            has_others = any(other.peer == session.peer and not other.has_ended for other in self._sessions)
        if not (session.has_closed_gracefully or session.is_cut_off or has_others or self._closing.is_set()):
            (self._on_peer_exit if session.channel.is_closed_by_peer else self._on_peer_lost)(session.peer)

    def _num_connected(self, role: str) -> int:
        """Return the number of connected processes of that role; with the lock held."""
        return len({each.peer for each in self._sessions if each.peer.role == role and not each.has_ended})

    def _admit(self, raw: socket.socket, address: tuple[str, int]) -> PeerSession:
        where = f"{address[0]}:{address[1]}"
        configure_keepalive(raw, self.limits.patience_s)
        channel, peer = handshake.accept_handshake(
            raw, where, self._authentication, self.limits, self._roles, self._is_revoked or (lambda peer: False)
        )
        session = PeerSession(
            channel,
            peer,
            self._handlers,
            self._budget,
            self._on_handler_error,
            lambda error: self._record_refusal(error, address),
        )
        with self._lock:
            has_room = len(self._sessions) < self.limits.max_connections
            if has_room:
                self._sessions[session] = where
                self._max_peers[peer.role] = max(self._num_connected(peer.role), self._max_peers.get(peer.role, 0))
        if not has_room:  # others were admitted during this handshake
            error = TurnedAwayError("full", self._full_text("max_connections"))
            handshake.send_refusal(channel, error)
            channel.close()
            raise error
        if self._closing.is_set():
            channel.abort()
        self._cut_revoked()  # this one may have taken the place of another process
        return session

    def _cut_revoked(self) -> None:
        """Cut the connections of peers whose certificates count no more."""
        if self._is_revoked is None:
            return
        with self._lock:
            sessions = [each for each in self._sessions.items() if not (each[0].is_cut_off or each[0].has_ended)]
        for session, where in sessions:
            if self._is_revoked(session.peer):
                session.is_cut_off = True
                error = TurnedAwayError("revoked", handshake.revoked_text(session.peer))
                host, _, port = where.rpartition(":")
                self._record_refusal(error, (host, int(port)))
                if not self._spawn(session.cut_off, error):
                    session.channel.abort()

    def _record_refusal(self, error: RpcError | OSError, address: tuple[str, int]) -> None:
        if self._closing.is_set():
            return
        reason = (
            error.reason
            if isinstance(error, TurnedAwayError)
            else _REFUSAL_REASONS.get(type(error).__name__, "connection")
        )
        self.refusals.add(reason, address[0], address[1], str(error))

    def _spawn(self, target: Callable[..., None], *args: object) -> bool:
        """Run a function in a thread that `close` waits for; False if the system gives no more threads."""

        def run() -> None:
            try:
                target(*args)
            finally:
                with self._lock:
                    self._threads.discard(threading.current_thread())

        with self._lock:
            thread = _start_thread(run, name="rpc peer")
            self._threads |= {thread} if thread else set()
        return thread is not None


_REFUSAL_REASONS = {"MessageError": "message", "DeadlineError": "deadline", "ConnectionLostError": "connection"}


def _handlers_by_kind(handlers: Iterable[RpcHandler]) -> dict[str, RpcHandler]:
    known: dict[str, RpcHandler] = {}
    for handler in handlers:
        kind = handler.message.kind
        if kind in known:
            raise UsageError("handlers", got=kind, expected="one for each kind of message", do="Rename one")
        known[kind] = handler
    return known
