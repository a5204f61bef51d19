"""RPC client for threads; async callers use `await asyncio.to_thread(client.call, ...)`."""

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Sequence

from typing_extensions import Buffer

from ringweave import errors
from ringweave.errors import ConnectionLostError, DeadlineError, MessageError, RemoteError, RpcError, explain
from ringweave.rpc import framing, handshake
from ringweave.rpc.channel import LatencyRecorder, RpcChannel, configure_keepalive
from ringweave.rpc.framing import FrameHead, FrameKind, HandshakeWelcome, RpcFailure, RpcLimits, RpcMessage, RpcReply
from ringweave.rpc.server import uninitialized_buffers
from ringweave.rpc.tls import Identity, PeerAuthentication


class PendingCall:
    """Call in flight, returned by `RpcClient.start`: wait for its answer, or cancel it."""

    def __init__(
        self,
        message: RpcMessage,
        into: Sequence[Buffer] | None,
        deadline_s: float,
        give_up: Callable[["PendingCall"], None],
    ) -> None:
        """Called by the client, whose lock guards all mutable fields."""
        self.message = message
        self.deadline_s = deadline_s
        self.started_s = time.monotonic()
        self.number = 0
        self.is_receiving = False
        self.is_abandoned = False
        self.ended = threading.Event()
        self.outcome: RpcReply | RpcError | None = None
        self._into = None if into is None else [framing.as_bytes_view(each) for each in into]
        self._give_up = give_up

    @property
    def is_done(self) -> bool:
        """True if `wait` would return or raise at once."""
        return self.ended.is_set()

    def wait(self) -> RpcReply:
        """Wait for the answer, until the call's own deadline at most.

        Raises:
            WireError: As in `RpcClient.call`.
        """
        if not self.ended.wait(max(0.0, self.deadline_s - time.monotonic())):
            self._give_up(self)
            if not isinstance(self.outcome, RpcReply):
                raise DeadlineError(late_call_text(self.message, "no answer"))
        if isinstance(self.outcome, RpcReply):
            return self.outcome
        assert self.outcome is not None, "ended"
        # Not the error itself: with its traceback it would keep the call's buffers until a garbage collection.
        raise _copy_error(self.outcome)

    def cancel(self) -> None:
        """Abandon the answer: the handler is notified, and memory that was to be filled is the caller's again."""
        self._give_up(self)

    def prepare_reply(self, head: FrameHead) -> RpcReply:
        """Return the answer in a frame, with memory for the buffers that are still to be received.

        Raises:
            RemoteError: The frame says that the handler failed.
            MessageError: The frame is no answer to this call.
        """
        if head.prefix.kind == FrameKind.FAILURE:
            failure = framing.decode_message(RpcFailure, head.body)
            raise RemoteError(failure.text, failure.error)
        if self.is_abandoned:
            raise DeadlineError(late_call_text(self.message, "an answer that was given up"))
        wanted = self.message.reply
        if head.name != wanted.kind:
            raise framing.frame_error(f"answer to {self.message.kind}", head.name, wanted.kind, _SAME_VERSION_HINT)
        message = framing.decode_message(wanted, head.body)
        if self._into is None:
            return RpcReply(message, uninitialized_buffers(head.sizes))
        sizes = tuple(view.nbytes for view in self._into)
        if sizes != head.sizes:
            raise MessageError(
                f"buffers in the answer to {self.message.kind}",
                got=head.sizes,
                expected=f"bytes {sizes}, the memory that they were to fill",
                do=_SAME_VERSION_HINT,
            )
        return RpcReply(message, self._into)


_SAME_VERSION_HINT = "Run the same ringweave, and the same model, on both ends"


def late_call_text(message: RpcMessage, got: str) -> str:
    """Return the text of an error about time."""
    return explain(
        f"call {message.kind}",
        got=got,
        expected="an answer in the time that the call was given",
        do="Give it more time, or look what the server is waiting for",
    )


_CLOSE_TIMEOUT_S = 0.5


class RpcClient:
    """Connection to one server, shared by any number of threads; a broken one stays broken.

    The caller decides about connecting again and about repeating a call: only it knows the effect of a message.
    """

    def __init__(self, channel: RpcChannel, server: Identity, welcome: HandshakeWelcome) -> None:
        """Called by `connect`."""
        self.server = server
        self._channel = channel
        self._welcome = welcome
        self._latencies = LatencyRecorder(channel.traffic)
        self._call_numbers = itertools.count(1)
        self._send_order = threading.Lock()
        self._call_slots = threading.BoundedSemaphore(welcome.max_calls)
        self._lock = threading.Lock()
        self._pending: dict[int, PendingCall] = {}
        self._failure: RpcError | None = None
        self._reader = threading.Thread(target=self._read_replies, name=f"rpc from {channel.where}", daemon=True)
        self._reader.start()

    @classmethod
    def connect(
        cls,
        host: str,
        port: int,
        authentication: PeerAuthentication,
        *,
        role: str,
        limits: RpcLimits | None = None,
        timeout_s: float = 5.0,
    ) -> "RpcClient":
        """Connect to the server at that address.

        Args:
            host: Address of the server.
            port: Port of the server.
            authentication: Authenticates the server.
            role: Required role of the server, such as `server`; a worker that listens there instead is refused.
            limits: Limits on what the server may send; None means `RpcLimits()`.
            timeout_s: Timeout of connecting; each step of the handshake has `limits.handshake_s` on top.

        Raises:
            RefusedError: The server refused this client, or has another identity.
            ConnectionLostError: Nothing listens there, or the listener closed the connection.
            DeadlineError: The server did not answer in time.
        """
        limits, where = limits or RpcLimits(), f"{host}:{port}"
        try:
            raw = socket.create_connection((host, port), timeout=timeout_s)
            configure_keepalive(raw, limits.patience_s)
            return cls(*handshake.connect_handshake(raw, where, authentication, limits, role))
        except TimeoutError as cause:
            raise DeadlineError(_unreachable_text(where, f"no answer in {timeout_s:.3g} s")) from cause
        except OSError as cause:
            raise ConnectionLostError(_unreachable_text(where, str(cause))) from cause

    @property
    def traffic(self) -> dict[str, float]:
        """Counters of `ConnectionTraffic`; latencies are those of answered calls."""
        return self._channel.traffic.as_dict()

    @property
    def failure(self) -> RpcError | None:
        """Error that broke the connection; None while it works."""
        return self._failure

    def call(
        self,
        message: RpcMessage,
        buffers: Sequence[Buffer] = (),
        *,
        timeout_s: float,
        into: Sequence[Buffer] | None = None,
    ) -> RpcReply:
        """Send a message and wait for the answer.

        Args:
            message: Message to send.
            buffers: Contiguous memory, sent without a copy; free again when this returns.
            timeout_s: Seconds for the whole call. The server receives it, and its handler can see the rest.
            into: Memory for the buffers of the answer, of exactly their sizes; None allocates.

        Returns:
            The answer, of class `message.reply`.

        Raises:
            RemoteError: The handler failed; the text is its error's.
            DeadlineError: Time is up. The server may or may not have handled it.
            ConnectionLostError: The connection broke. The server may or may not have handled it.
            MessageError: The message exceeds the server's limits, or the answer is of another kind.
        """
        return self.start(message, buffers, timeout_s=timeout_s, into=into).wait()

    def start(
        self,
        message: RpcMessage,
        buffers: Sequence[Buffer] = (),
        *,
        timeout_s: float,
        into: Sequence[Buffer] | None = None,
    ) -> PendingCall:
        """Send a message and return a pending call, to wait for or to cancel.

        This returns once the message is handed to the kernel, after which its buffers may change. It waits while
        `max_calls` of the server are in flight.
        """
        deadline_s = time.monotonic() + timeout_s
        body = framing.encode_message(message)
        views = [framing.as_bytes_view(buffer) for buffer in buffers]
        self._check_limits(message, body, views)
        if not self._call_slots.acquire(timeout=timeout_s):
            raise DeadlineError(late_call_text(message, "waiting for earlier calls"))
        pending = PendingCall(message, into, deadline_s, self.abandon)
        try:
            self._send(pending, body, views)
        except RpcError as error:
            raise self._fail_start(pending, error) from error
        return pending

    def close(self, *, is_awaited: bool = False) -> None:
        """Close gracefully, within about a second; calls in flight fail.

        With `is_awaited` this returns once the server has closed too and no longer counts this peer, half a second
        later at most.
        """
        self._mark_closed()
        with contextlib.suppress(RpcError):
            self._channel.send(FrameKind.BYE, timeout_s=_CLOSE_TIMEOUT_S)
            if is_awaited:
                self._reader.join(_CLOSE_TIMEOUT_S)
        self._channel.abort()
        self._reader.join(_CLOSE_TIMEOUT_S)

    def abort(self) -> None:
        """Close abruptly, as the end of this process would: the server need not wait for anything from it."""
        self._mark_closed()
        self._channel.abort()
        self._reader.join(_CLOSE_TIMEOUT_S)

    def _mark_closed(self) -> None:
        lost = ConnectionLostError("connection", got="closed by this end", expected="an open one", do="Connect again")
        with self._lock:
            self._failure = self._failure or lost

    def __enter__(self) -> "RpcClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def abandon(self, pending: PendingCall) -> None:
        """Abandon a pending call: notify the server, and release the memory that the answer was to fill."""
        with self._lock:
            if pending.ended.is_set():
                return
            pending.is_abandoned, receiving = True, pending.is_receiving
        if receiving:  # its memory is being written to: the rest is nearly here, or the connection is of no use
            if not pending.ended.wait(_CLOSE_TIMEOUT_S):
                self._channel.abort(": an answer was given up halfway")
                pending.ended.wait()
            return
        with contextlib.suppress(RpcError):
            self._channel.send(FrameKind.CANCEL, call=pending.number, timeout_s=_CLOSE_TIMEOUT_S)

    def _send(self, pending: PendingCall, body: bytes, views: Sequence[memoryview]) -> None:
        left_s = pending.deadline_s - time.monotonic()
        # Numbers have to leave in their order.
        if not self._send_order.acquire(timeout=max(0.0, left_s)):
            raise DeadlineError(late_call_text(pending.message, "waiting for messages before it"))
        try:
            with self._lock:
                if self._failure is not None:
                    raise _copy_error(self._failure)
                pending.number = next(self._call_numbers)
                self._pending[pending.number] = pending
            self._channel.send(
                FrameKind.CALL,
                call=pending.number,
                name=pending.message.kind,
                body=body,
                buffers=views,
                timeout_s=max(0.001, pending.deadline_s - time.monotonic()),
            )
        finally:
            self._send_order.release()

    def _check_limits(self, message: RpcMessage, body: bytes, views: Sequence[memoryview]) -> None:
        bounds = (
            ("bytes of its body", len(body), self._welcome.max_body_bytes, "max_body_bytes"),
            ("buffers", len(views), self._welcome.max_buffers, "max_buffers"),
            ("bytes", sum(view.nbytes for view in views), self._welcome.max_message_bytes, "max_message_bytes"),
        )
        for what, got, maximum, limit in bounds:
            if got > maximum:
                raise MessageError(
                    f"message {message.kind}, {what}",
                    got=got,
                    expected=f"at most {maximum}",
                    do=f"Send less at once, or raise {limit} on the server",
                    where=self._channel.where,
                )

    def _fail_start(self, pending: PendingCall, error: RpcError) -> RpcError:
        """End a call that could not be sent; return why, as an error that the call does not keep."""
        reason = self._failure_cause(error)
        if pending.number:
            self._complete(pending, reason)
        else:
            self._call_slots.release()
        return _copy_error(reason)

    def _failure_cause(self, error: RpcError) -> RpcError:
        """Return why sending failed: on a broken connection the reader's error says more than a broken pipe."""
        if isinstance(error, ConnectionLostError):
            self._reader.join(_CLOSE_TIMEOUT_S)
            if self._failure is not None:
                return _copy_error(self._failure)
        return error

    def _read_replies(self) -> None:
        """Receive answers until the connection ends; runs in the thread of the connection."""
        try:
            while self._handle_frame(self._channel.receive_head()):
                pass
            error: RpcError = ConnectionLostError(
                "connection", got="closed by the server", expected="an open one", do="Connect again when it is back"
            )
        except RpcError as failure:
            error = failure
        with self._lock:
            self._failure = self._failure or error
            unanswered = list(self._pending.values())
        for pending in unanswered:
            self._complete(pending, _copy_error(self._failure))
        self._channel.close()

    def _handle_frame(self, head: FrameHead) -> bool:
        match head.prefix.kind:
            case FrameKind.REPLY | FrameKind.FAILURE:
                self._receive_reply(head)
            case FrameKind.REFUSED:
                raise handshake.refusal_error(head.body)
            case FrameKind.BYE:
                return False
            case other:
                raise framing.frame_error("frame", other.name, "an answer", "Check which process listens there")
        return True

    def _receive_reply(self, head: FrameHead) -> None:
        with self._lock:
            pending = self._pending.get(head.prefix.call)
            if pending is None:
                raise framing.frame_error("answer to call", head.prefix.call, "a call that was made", "Connect again")
            pending.is_receiving = not pending.is_abandoned
        # If this fails the connection is of no more use, and all that are pending end with it.
        self._complete(pending, self._outcome_of(head, pending))

    def _outcome_of(self, head: FrameHead, pending: PendingCall) -> RpcReply | RpcError:
        """Return the answer, or the error of a call on a working connection."""
        try:
            answer = pending.prepare_reply(head)
        except RpcError as error:
            self._channel.discard_content(head.prefix)
            return error
        self._channel.receive_content(head.prefix, [framing.as_bytes_view(each) for each in answer.buffers])
        return answer

    def _complete(self, pending: PendingCall, outcome: RpcReply | RpcError) -> None:
        with self._lock:
            if self._pending.pop(pending.number, None) is None:
                return
            pending.outcome, pending.is_receiving = outcome, False
            pending.ended.set()
        self._call_slots.release()
        if isinstance(outcome, RpcReply):
            self._latencies.record_answer(time.monotonic() - pending.started_s)
        else:
            self._latencies.record_failure()


def _copy_error(error: RpcError) -> RpcError:
    """Copy an error for another thread to raise: an error that is raised twice mixes up its tracebacks."""
    if isinstance(error, RemoteError):
        return RemoteError(str(error), error.error)
    kind = errors.RefusedError if isinstance(error, errors.RefusedError) else type(error)
    return kind(str(error))


def _unreachable_text(where: str, got: str) -> str:
    return explain("connection", got=got, expected="a server that listens", do="Check whether it runs", where=where)
