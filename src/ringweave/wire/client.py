"""The side that calls: for plain threads; an async caller wraps it, `await asyncio.to_thread(client.call, ...)`."""

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Sequence

from typing_extensions import Buffer

from ringweave import errors
from ringweave.errors import ConnectionLostError, DeadlineError, MessageError, WireError, explain
from ringweave.wire.framing import frames, messages
from ringweave.wire.framing.channels import Channel
from ringweave.wire.framing.frames import FrameKind, Head
from ringweave.wire.framing.limits import Limits
from ringweave.wire.framing.messages import Answer, Message, Welcome
from ringweave.wire.metrics import Latencies
from ringweave.wire.pending import Pending, late
from ringweave.wire.security import admission
from ringweave.wire.security.identities import Identity
from ringweave.wire.security.trust import Trust
from ringweave.wire.sockets import keep_alive

_GOODBYE_S = 0.5


class Client:
    """One connection to one server, shared by any number of threads; when it breaks it stays broken.

    Connecting again, and whether a call may be repeated, is the caller's to decide: only it knows what a message does.
    """

    def __init__(self, channel: Channel, server: Identity, welcome: Welcome) -> None:
        """Made by `connect`."""
        self.server = server
        self._channel = channel
        self._welcome = welcome
        self._latencies = Latencies(channel.traffic)
        self._numbers = itertools.count(1)
        self._order = threading.Lock()
        self._places = threading.BoundedSemaphore(welcome.max_calls)
        self._lock = threading.Lock()
        self._pending: dict[int, Pending] = {}
        self._broken: WireError | None = None
        self._reader = threading.Thread(target=self._read, name=f"wire from {channel.where}", daemon=True)
        self._reader.start()

    @classmethod
    def connect(
        cls,
        host: str,
        port: int,
        trust: Trust,
        *,
        role: str,
        limits: Limits | None = None,
        timeout_s: float = 5.0,
    ) -> "Client":
        """Connect to the server at that address.

        Args:
            host: Its address.
            port: Its port.
            trust: How this end makes sure of it.
            role: What it has to be, such as `server`: a worker that listens there instead is not talked to.
            limits: What is taken from it; None means `Limits()`.
            timeout_s: How long the connection may take to stand; the handshake has `limits.handshake_s` beside it.

        Raises:
            RefusedError: It did not let us in, or is not who it should be.
            ConnectionLostError: Nobody listens there, or whoever does hung up.
            DeadlineError: It did not answer in time.
        """
        limits, where = limits or Limits(), f"{host}:{port}"
        trust.check_place(host)
        try:
            raw = socket.create_connection((host, port), timeout=timeout_s)
            keep_alive(raw, limits.patience_s)
            return cls(*admission.call(raw, where, trust, limits, role))
        except TimeoutError as cause:
            raise DeadlineError(_unreachable(where, f"no answer in {timeout_s:.3g} s")) from cause
        except OSError as cause:
            raise ConnectionLostError(_unreachable(where, str(cause))) from cause

    @property
    def traffic(self) -> dict[str, float]:
        """The counters of `metrics.Traffic`; latencies are those of answered calls."""
        return self._channel.traffic.as_dict()

    @property
    def broken(self) -> WireError | None:
        """Why the connection is of no more use; None while it is."""
        return self._broken

    def call(
        self,
        message: Message,
        buffers: Sequence[Buffer] = (),
        *,
        timeout_s: float,
        into: Sequence[Buffer] | None = None,
    ) -> Answer:
        """Send a message and wait for the answer.

        Args:
            message: What to send.
            buffers: Contiguous memory that goes with it, sent from where it lies; free again when this returns.
            timeout_s: Seconds for all of it. The server is told, and its handler can see what is left.
            into: Memory for the buffers of the answer, of exactly their sizes; None allocates.

        Returns:
            The answer, of class `message.reply`.

        Raises:
            RemoteError: The handler failed; the text is its error's.
            DeadlineError: Time is up. The server may or may not have done it.
            ConnectionLostError: The connection broke. The server may or may not have done it.
            MessageError: The message is more than the server takes, or its answer is not what was asked for.
        """
        return self.start(message, buffers, timeout_s=timeout_s, into=into).wait()

    def start(
        self,
        message: Message,
        buffers: Sequence[Buffer] = (),
        *,
        timeout_s: float,
        into: Sequence[Buffer] | None = None,
    ) -> Pending:
        """Send a message and go on; the answer is fetched by `wait` of what is returned, or cancelled.

        Returns once the message is handed to the kernel, after which its buffers may change. Waits while
        `max_calls` of the server are under way.
        """
        deadline_s = time.monotonic() + timeout_s
        body = messages.encode(message)
        views = [frames.flat(buffer) for buffer in buffers]
        self._check_bounds(message, body, views)
        if not self._places.acquire(timeout=timeout_s):
            raise DeadlineError(late(message, "waiting for earlier calls"))
        pending = Pending(message, into, deadline_s, self.give_up)
        try:
            self._send(pending, body, views)
        except WireError as error:
            reason = self._reason(error)
            if pending.number:
                self._end(pending, reason)
            else:
                self._places.release()
            raise reason from (None if reason is error else error)
        return pending

    def tell(self, message: Message, buffers: Sequence[Buffer] = (), *, timeout_s: float) -> None:
        """Send a message whose answer nobody waits for; returns once it is handed to the kernel.

        It takes a place among the server's calls like any other, so that a slow server slows the teller down;
        failures of the handler are counted in `traffic` and else forgotten.
        """
        self.start(message, buffers, timeout_s=timeout_s)

    def close(self, *, is_awaited: bool = False) -> None:
        """Say goodbye and hang up; calls that are under way fail. Within about a second.

        `is_awaited` returns once the server has ended it too and counts this peer no more, half a second later at most.
        """
        self._end_here()
        with contextlib.suppress(WireError):
            self._channel.send(FrameKind.BYE, timeout_s=_GOODBYE_S)
            if is_awaited:
                self._reader.join(_GOODBYE_S)
        self._channel.cut()
        self._reader.join(_GOODBYE_S)

    def hang_up(self) -> None:
        """End it without a goodbye, as the end of this process would: the server need not wait for anything from it."""
        self._end_here()
        self._channel.cut()
        self._reader.join(_GOODBYE_S)

    def _end_here(self) -> None:
        lost = ConnectionLostError(
            explain("connection", got="closed by this end", expected="an open one", do="Connect again")
        )
        with self._lock:
            self._broken = self._broken or lost

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def give_up(self, pending: Pending) -> None:
        """Nobody waits for that answer any more: tell the server, and let go of the memory that it was to fill."""
        with self._lock:
            if pending.ended.is_set():
                return
            pending.given_up, receiving = True, pending.receiving
        if receiving:  # its memory is being written to: the rest is nearly here, or the connection is of no use
            if not pending.ended.wait(_GOODBYE_S):
                self._channel.cut(": an answer was given up halfway")
                pending.ended.wait()
            return
        with contextlib.suppress(WireError):
            self._channel.send(FrameKind.CANCEL, call=pending.number, timeout_s=_GOODBYE_S)

    def _send(self, pending: Pending, body: bytes, views: Sequence[memoryview]) -> None:
        left_s = pending.deadline_s - time.monotonic()
        # Numbers have to leave in their order.
        if not self._order.acquire(timeout=max(0.0, left_s)):
            raise DeadlineError(late(pending.message, "waiting for messages before it"))
        try:
            with self._lock:
                if self._broken is not None:
                    raise _again(self._broken)
                pending.number = next(self._numbers)
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
            self._order.release()

    def _check_bounds(self, message: Message, body: bytes, views: Sequence[memoryview]) -> None:
        bounds = (
            ("bytes of its body", len(body), self._welcome.max_body_bytes, "max_body_bytes"),
            ("buffers", len(views), self._welcome.max_buffers, "max_buffers"),
            ("bytes", sum(view.nbytes for view in views), self._welcome.max_message_bytes, "max_message_bytes"),
        )
        for what, got, most, limit in bounds:
            if got > most:
                raise MessageError(
                    explain(
                        f"message {message.kind}, {what}",
                        got=got,
                        expected=f"at most {most}",
                        do=f"Send less at once, or raise {limit} on the server",
                        where=self._channel.where,
                    )
                )

    def _reason(self, error: WireError) -> WireError:
        """Why sending failed: where the connection is gone, what the reader found last says more than a broken pipe."""
        if isinstance(error, ConnectionLostError):
            self._reader.join(_GOODBYE_S)
            if self._broken is not None:
                return _again(self._broken)
        return error

    def _read(self) -> None:
        """Take answers until the connection ends; the thread of the connection."""
        try:
            while self._take(self._channel.receive_head()):
                pass
            error: WireError = ConnectionLostError(
                explain(
                    "connection", got="closed by the server", expected="an open one", do="Connect again when it is back"
                )
            )
        except WireError as failure:
            error = failure
        with self._lock:
            self._broken = self._broken or error
            left = list(self._pending.values())
        for pending in left:
            self._end(pending, _again(self._broken))
        self._channel.close()

    def _take(self, head: Head) -> bool:
        match head.prefix.kind:
            case FrameKind.REPLY | FrameKind.FAILURE:
                self._finish(head)
            case FrameKind.REFUSED:
                raise admission.refused(head.body)
            case FrameKind.BYE:
                return False
            case other:
                raise frames.refusal("frame", other.name, "an answer", "Look who listens there")
        return True

    def _finish(self, head: Head) -> None:
        with self._lock:
            pending = self._pending.get(head.prefix.call)
            if pending is None:
                raise frames.refusal("answer to call", head.prefix.call, "a call that was made", "Connect again")
            pending.receiving = not pending.given_up
        # If this fails the connection is of no more use, and all that are pending end with it.
        self._end(pending, self._outcome(head, pending))

    def _outcome(self, head: Head, pending: Pending) -> Answer | WireError:
        """The answer, or why there is none while the connection is sound."""
        try:
            answer = pending.expected(head)
        except WireError as error:
            self._channel.discard_content(head.prefix)
            return error
        self._channel.receive_content(head.prefix, [frames.flat(each) for each in answer.buffers])
        return answer

    def _end(self, pending: Pending, outcome: Answer | WireError) -> None:
        with self._lock:
            if self._pending.pop(pending.number, None) is None:
                return
            pending.outcome, pending.receiving = outcome, False
            pending.ended.set()
        self._places.release()
        if isinstance(outcome, Answer):
            self._latencies.answered(time.monotonic() - pending.started_s)
        else:
            self._latencies.failed()


def _again(error: WireError) -> WireError:
    """The same error for another thread to raise: one that is raised twice mixes up its tracebacks."""
    kind = errors.RefusedError if isinstance(error, errors.RefusedError) else type(error)
    return kind(str(error))


def _unreachable(where: str, got: str) -> str:
    return explain("connection", got=got, expected="a server that listens", do="Look whether it runs", where=where)
