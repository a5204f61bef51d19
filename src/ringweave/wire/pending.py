"""A call whose answer is still to come."""

import threading
import time
from collections.abc import Callable, Sequence

from typing_extensions import Buffer

from ringweave.errors import DeadlineError, MessageError, RemoteError, WireError, explain
from ringweave.wire.calls import fresh
from ringweave.wire.framing import frames, messages
from ringweave.wire.framing.frames import FrameKind, Head
from ringweave.wire.framing.messages import Answer, Failure, Message


class Pending:
    """What `Client.start` returns: wait for the answer, or give it up."""

    def __init__(
        self,
        message: Message,
        into: Sequence[Buffer] | None,
        deadline_s: float,
        give_up: Callable[["Pending"], None],
    ) -> None:
        """Made by the client, whose lock guards all that changes."""
        self.message = message
        self.deadline_s = deadline_s
        self.started_s = time.monotonic()
        self.number = 0
        self.receiving = False
        self.given_up = False
        self.ended = threading.Event()
        self.outcome: Answer | WireError | None = None
        self._into = None if into is None else [frames.flat(each) for each in into]
        self._give_up = give_up

    @property
    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self.ended.is_set()

    def wait(self) -> Answer:
        """The answer, once it is there; waits until the call's own deadline at most.

        Raises:
            WireError: As `Client.call` says.
        """
        if not self.ended.wait(max(0.0, self.deadline_s - time.monotonic())):
            self._give_up(self)
            if not isinstance(self.outcome, Answer):
                raise DeadlineError(late(self.message, "no answer"))
        if isinstance(self.outcome, Answer):
            return self.outcome
        assert self.outcome is not None, "ended"
        raise self.outcome

    def cancel(self) -> None:
        """Give the answer up: the handler is told, and memory that was to be filled is the caller's again."""
        self._give_up(self)

    def expected(self, head: Head) -> Answer:
        """The answer in a frame, with memory for the buffers that are still to be received.

        Raises:
            RemoteError: It says that the handler failed.
            MessageError: It is no answer to this call.
        """
        if head.prefix.kind == FrameKind.FAILURE:
            failure = messages.decode(Failure, head.body)
            raise RemoteError(failure.text, failure.error)
        if self.given_up:
            raise DeadlineError(late(self.message, "an answer that was given up"))
        wanted = self.message.reply
        if head.name != wanted.kind:
            raise frames.refusal(f"answer to {self.message.kind}", head.name, wanted.kind, _SAME)
        message = messages.decode(wanted, head.body)
        if self._into is None:
            return Answer(message, fresh(head.sizes))
        sizes = tuple(view.nbytes for view in self._into)
        if sizes != head.sizes:
            raise MessageError(
                explain(
                    f"buffers in the answer to {self.message.kind}",
                    got=head.sizes,
                    expected=f"bytes {sizes}, the memory that they were to fill",
                    do=_SAME,
                )
            )
        return Answer(message, self._into)


_SAME = "Run the same ringweave, and the same model, on both ends"


def late(message: Message, got: str) -> str:
    """The text of an error about time."""
    return explain(
        f"call {message.kind}",
        got=got,
        expected="an answer in the time that the call was given",
        do="Give it more time, or look what the server is waiting for",
    )
