"""One connection of a server, from welcome to the end: takes calls, has them handled, answers."""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from ringweave.errors import ConnectionLostError, MessageError, RingweaveError, WireError, explain
from ringweave.wire.calls import Budget, Call, Handler, Incoming
from ringweave.wire.framing import messages
from ringweave.wire.framing.channels import Channel
from ringweave.wire.framing.frames import FrameKind, Head
from ringweave.wire.framing.messages import Answer, Failure
from ringweave.wire.metrics import Latencies
from ringweave.wire.security import admission
from ringweave.wire.security.identities import Identity

Complain = Callable[[Identity, str, Exception], None]
"""Is told of a handler's failure that is no error of ours: peer, kind of message, exception."""
Refused = Callable[[WireError], object]
"""Is told why a message was refused whose sender stays connected."""

_GOODBYE_S = 0.5


class Session:
    """The calls of one peer.

    One thread reads; each call that may take time is handled in a thread of its own, at most `max_calls` at once. The
    client knows that number and waits, so the reader never does, and a cancellation always gets through; who disregards
    it is cut off.
    """

    def __init__(
        self,
        channel: Channel,
        peer: Identity,
        handlers: Mapping[str, Handler],
        budget: Budget,
        complain: Complain,
        refused: Refused = lambda error: None,
    ) -> None:
        self.channel = channel
        self.peer = peer
        self.has_ended = False
        """The server knows of its end; calls may still be in the making."""
        self.said_goodbye = False
        """The peer has taken its leave."""
        self._handlers = handlers
        self._budget = budget
        self._complain = complain
        self._refused = refused
        self._lock = threading.Lock()
        self._running: dict[int, Call] = {}
        self._last_call = 0
        self._latencies = Latencies(channel.traffic)
        self._idle = threading.Condition(self._lock)
        self._open = 0
        self._leaving = False

    def run(self, ended: Callable[[], object] = lambda: None) -> None:
        """Take calls until the connection ends; the calling thread is the reader.

        Args:
            ended: Called as soon as it has ended, while calls may still be in the making.

        Raises:
            WireError: The peer broke the rules, or the connection; it was told, where that was possible.
        """
        try:
            while self._take(self.channel.receive_head()):
                pass
        except ConnectionLostError:
            if not self._leaving:
                raise
        except WireError as error:
            admission.refuse(self.channel, error)
            raise
        finally:
            self._cancel_all()
            ended()
            self.channel.cut()
            self.wait_idle(self.channel.limits.patience_s)
            self.channel.close()

    def leave(self, timeout_s: float) -> None:
        """Take no more calls, let those that are being handled finish, say goodbye and end; from any thread."""
        self._leaving = True
        self.wait_idle(timeout_s)
        with contextlib.suppress(WireError):
            self.channel.send(FrameKind.BYE, timeout_s=_GOODBYE_S)
        self.channel.cut()

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no call is being handled or answered; False if time is up first."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._open, max(0.0, timeout_s))

    def _take(self, head: Head) -> bool:
        match head.prefix.kind:
            case FrameKind.CALL:
                self._begin(head)
            case FrameKind.CANCEL if not head.prefix.num_buffers:
                self._cancel(head.prefix.call)
            case FrameKind.BYE:
                self.said_goodbye = True
                return False
            case other:
                raise MessageError(
                    explain("frame", got=other.name, expected="CALL, CANCEL or BYE", do="Look who called")
                )
        return True

    def _begin(self, head: Head) -> None:
        self._check_order(head)
        num_bytes = head.prefix.content_bytes
        # The peer's time runs while it waits for room: who asks for more than is there waits unread.
        self._budget.take(num_bytes, self.channel.limits.frame_s(num_bytes))
        try:
            started = self._receive(head)
        except BaseException:
            self._budget.give_back(num_bytes)
            raise
        if not started:
            self._budget.give_back(num_bytes)

    def _check_order(self, head: Head) -> None:
        if head.prefix.call <= self._last_call:
            raise MessageError(
                explain(
                    "number of a call",
                    got=head.prefix.call,
                    expected=f"more than {self._last_call}",
                    do="A message was repeated on the way: connect again",
                )
            )
        self._last_call = head.prefix.call
        if len(self._running) >= self.channel.limits.max_calls:
            raise MessageError(
                explain(
                    "calls at once",
                    got=len(self._running) + 1,
                    expected=f"at most {self.channel.limits.max_calls}, as the welcome said",
                    do="Wait for answers before calling again",
                )
            )

    def _receive(self, head: Head) -> bool:
        """Take the buffers and start the handler; False if the call was answered by a failure instead."""
        try:
            handler, incoming = self._understand(head)
            room = _checked_room(handler.allocate(incoming), head.sizes)
        except RingweaveError as error:
            if isinstance(error, MessageError):  # what else the handler refuses is its own business
                self._refused(error)
            self.channel.discard_content(head.prefix)
            self._fail(head.prefix.call, error)
            return False
        self.channel.receive_content(head.prefix, room)
        timeout_s = head.prefix.timeout_ms / 1000
        call = Call(
            peer=self.peer,
            message=incoming.message,
            buffers=room,
            deadline_s=time.monotonic() + timeout_s if timeout_s else math.inf,
        )
        with self._lock:
            self._running[head.prefix.call] = call
            self._open += 1
        what = (handler, head.prefix.call, call, head.prefix.content_bytes)
        if handler.is_quick:
            self._run(*what)
        else:
            threading.Thread(target=self._run, args=what, name=f"wire {head.name}", daemon=True).start()
        return True

    def _understand(self, head: Head) -> tuple[Handler, Incoming]:
        if self._leaving:
            raise WireError(
                explain("server", got="closing", expected="one that stays", do="Call the one that takes its place")
            )
        handler = self._handlers.get(head.name)
        if handler is None:
            raise MessageError(
                explain(
                    "kind of message",
                    got=head.name,
                    expected=f"one of {', '.join(sorted(self._handlers)) or 'none'}",
                    do="Look whether this is the server that you meant",
                )
            )
        return handler, Incoming(self.peer, messages.decode(handler.message, head.body), head.sizes)

    def _run(self, handler: Handler, number: int, call: Call, num_bytes: int) -> None:
        started_s = time.monotonic()
        try:
            self._answer(handler, number, call)
            self._latencies.answered(time.monotonic() - started_s)
        except RingweaveError as error:
            self._fail(number, error)
        except Exception as error:  # a handler's bug ends its call, not the server
            self._complain(self.peer, handler.message.kind, error)
            self._fail(
                number, WireError(f"{handler.message.kind}: {type(error).__name__} in the handler; see its log.")
            )
        finally:
            self._budget.give_back(num_bytes)
            with self._idle:
                self._open -= 1
                self._idle.notify_all()

    def _answer(self, handler: Handler, number: int, call: Call) -> None:
        returned = handler.handle(call)
        answer = returned if isinstance(returned, Answer) else Answer(returned)
        assert type(answer.message) is handler.message.reply, (
            f"{handler.message.kind} is answered by {answer.message!r}"
        )
        if call.cancelled.is_set():
            answer_error = explain(
                handler.message.kind, got="cancelled", expected="a caller that waits", do="Call again"
            )
            raise WireError(answer_error)
        self._done(number)
        self.channel.send(
            FrameKind.REPLY,
            call=number,
            name=answer.message.kind,
            body=messages.encode(answer.message),
            buffers=answer.buffers,
        )

    def _fail(self, number: int, error: Exception) -> None:
        self._latencies.failed()
        self._done(number)
        body = messages.encode(Failure(error=type(error).__name__, text=str(error)[:4000]))
        try:
            self.channel.send(FrameKind.FAILURE, call=number, body=body)
        except WireError:
            self.channel.cut()

    def _done(self, number: int) -> None:
        """The client may call again as soon as it has the answer, so the place is free before that is sent."""
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


def _checked_room(room: Sequence[memoryview], sizes: tuple[int, ...]) -> Sequence[memoryview]:
    assert tuple(view.nbytes for view in room) == sizes, "allocate gives memory of the sizes that it is asked for"
    return room
