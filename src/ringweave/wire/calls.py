"""A call as a handler sees it, and the handlers that a server is made of."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ringweave.errors import DeadlineError, explain
from ringweave.wire.framing.messages import Answer, Message
from ringweave.wire.security.identities import Identity


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One message of a peer, complete and checked."""

    peer: Identity
    """Who sent it, as its certificate says."""
    message: Any
    """The message; of the class that its handler is for."""
    buffers: Sequence[memoryview]
    """Its buffers, flat bytes; the handler may keep them."""
    deadline_s: float
    """When the caller stops waiting, on the server's clock; infinite where it did not say."""
    cancelled: threading.Event = field(default_factory=threading.Event)
    """Set once nobody waits for the answer any more: cancelled, or the connection is gone."""
    clock: Callable[[], float] = time.monotonic

    def left_s(self) -> float:
        """Seconds until the caller stops waiting."""
        return self.deadline_s - self.clock()


@dataclass(frozen=True, slots=True)
class Incoming:
    """A call whose buffers are still to come."""

    peer: Identity
    message: Any
    sizes: tuple[int, ...]
    """Bytes of each buffer; their sum is within the limits."""


def allocate(incoming: Incoming) -> list[memoryview]:
    """Fresh memory for the buffers of a call."""
    return fresh(incoming.sizes)


def fresh(sizes: Sequence[int]) -> list[memoryview]:
    """Memory of these sizes; not cleared, since all of it will be written."""
    return [np.empty(size, np.uint8).data if size else memoryview(b"") for size in sizes]


@dataclass(frozen=True, kw_only=True, slots=True)
class Handler:
    """What a server does with one kind of message."""

    message: type[Message]
    """The class of the message."""
    handle: Callable[[Call], Message | Answer]
    """Does it and returns the answer, of class `message.reply`. Runs in a thread of the call's own, beside those
    of other peers. An error of the tree in `errors.py` reaches the caller with its text, any other without it."""
    is_quick: bool = False
    """It never waits for anything but a lock that is held for moments: it runs in the thread that reads what the peer
    sends, since to start another one costs more than most of what is small. Nothing cancels it."""
    allocate: Callable[[Incoming], Sequence[memoryview]] = allocate
    """Gives the memory for the buffers, of exactly their sizes, before they are received; it may refuse by an error
    of the tree in `errors.py`. If they arrive damaged the handler is not called, and that memory holds anything."""


class Budget:
    """Bytes that may be held at once by all connections of a server; who wants more waits for others to be done."""

    def __init__(self, num_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._left = num_bytes
        self._clock = clock
        self._changed = threading.Condition()

    @property
    def left_bytes(self) -> int:
        """Bytes that are free now."""
        return self._left

    def take(self, num_bytes: int, timeout_s: float) -> None:
        """Wait until so many are free, and take them.

        Raises:
            DeadlineError: They were not, in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._left >= num_bytes, timeout_s):
                raise DeadlineError(
                    explain(
                        "room for a message",
                        got=f"{self._left} bytes free",
                        expected=f"{num_bytes} within {timeout_s:.3g} s",
                        do="Raise max_bytes_in_flight, or let fewer peers push at once",
                    )
                )
            self._left -= num_bytes

    def give_back(self, num_bytes: int) -> None:
        """So many are free again."""
        with self._changed:
            self._left += num_bytes
            self._changed.notify_all()

    @contextmanager
    def held(self, num_bytes: int, timeout_s: float) -> Iterator[None]:
        """Take them for the length of a block."""
        self.take(num_bytes, timeout_s)
        try:
            yield
        finally:
            self.give_back(num_bytes)
