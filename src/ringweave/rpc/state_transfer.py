"""Transfer of large state from a peer's memory to ours: in chunks, in place, verified, without a disk.

The receiver pulls: it requests the next chunks while others are in flight, so that the link stays full, the server
buffers nothing for it, and the receiver alone sets the rate. A chunk is a slice of one buffer and has a checksum of
its own, as every message has. At the end each buffer is compared with the checksum that the server gave before the
first chunk, which detects state that changed during the transfer.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import pydantic
from typing_extensions import Buffer

from ringweave.errors import DeadlineError, MessageError, RpcError
from ringweave.rpc import framing
from ringweave.rpc.client import PendingCall, RpcClient
from ringweave.rpc.framing import RpcMessage, RpcReply
from ringweave.rpc.server import RpcCall, RpcHandler

STATE_CHUNK_BYTES = 4 << 20
"""Large enough that requests cost nothing, small enough that a lost connection loses little."""
FULL_SPEED_WINDOW = 3
"""Chunks in flight at once: one arrives, one leaves, one is requested."""


class ReadThrottle(Protocol):
    """Sets the size and time of the next chunk, from the time that chunks took."""

    @property
    def window(self) -> int:
        """Chunks in flight at once."""
        ...

    @property
    def chunk_bytes(self) -> int:
        """Maximum size of the next chunk."""
        ...

    def wait_after_chunk(self, num_bytes: int, seconds: float) -> None:
        """Wait after a chunk of so many bytes that took so many seconds, until the next one may be requested."""
        ...


class NoThrottle:
    """No throttle, for a link that nothing else uses."""

    window, chunk_bytes = FULL_SPEED_WINDOW, STATE_CHUNK_BYTES

    def wait_after_chunk(self, num_bytes: int, seconds: float) -> None:
        """Return at once."""


_MIN_CHUNK_BYTES = 64 << 10
_CHUNK_TARGET_S = 0.05
"""Target time of a chunk: short beside a train step, long beside the burst that a limited link lets through."""
_BUSY_FRACTION = 0.7
"""Fraction of the best rate below which the link is shared. Half of it, beside one other stream, stays below for a
while after the best rate was seen; slightly late chunks do not."""
_BEST_RATE_DECAY = 0.98
"""Decay of the best rate with each chunk: a link may have become slower."""
_BURST_OVER_S = 0.02
"""After a pause, the burst that the link has saved up is over once chunks have taken so long; it passes in no time."""
_MAX_PAUSE_S = 2.0
"""Maximum pause: a chunk that took seconds was delayed by something else, such as a link that was cut."""
_PAUSE_CHECK_S = 0.1
"""Interval in which a pause checks the urgency."""
_PAUSE_FACTOR = 3.0
"""After a slow chunk the pause is that many times its time: with half of the link while a chunk is in flight, the
average is an eighth of it."""


class BackgroundThrottle:
    """Throttle for one chunk at a time; pauses when chunks are slow because others use the link.

    So the transfer uses a link that is idle between two bursts of collectives, and the collectives keep most of it.

    The first chunks, and those after a pause, do not measure the link: a token bucket lets a burst through, beside
    which later chunks would seem slow on an idle link. Such chunks only show whether others use the link.
    """

    window = 1

    def __init__(self, urgency: Callable[[], float], stopped: threading.Event) -> None:
        """`urgency` ranges from 0 (yield to others) to 1 (no pauses); once `stopped` is set nothing more is read."""
        self._urgency, self._stopped = urgency, stopped
        self._best_rate = self._last_rate = 0.0
        self._busy_s = 0.0
        """Time of the chunks since the last pause."""
        self._num_bytes, self._seconds = 0, 0.0

    @property
    def chunk_bytes(self) -> int:
        """Bytes that arrive in 0.05 s."""
        return max(_MIN_CHUNK_BYTES, min(STATE_CHUNK_BYTES, round(self._last_rate * _CHUNK_TARGET_S)))

    def wait_after_chunk(self, num_bytes: int, seconds: float) -> None:
        """Pause, if others seem to use the link.

        Raises:
            DeadlineError: The transfer was stopped.
        """
        waited_s, full_pause_s = 0.0, self._full_pause_s(num_bytes, seconds)
        while not self._stopped.wait(look_s := min(_PAUSE_CHECK_S, self._remaining_pause_s(full_pause_s, waited_s))):
            if look_s == 0:
                break
            waited_s, self._busy_s = waited_s + look_s, 0.0
        else:
            raise DeadlineError("state", got="unfinished", expected="all of it", do="It was given up")

    def _remaining_pause_s(self, full_pause_s: float, waited_s: float) -> float:
        """Return the rest of a pause, at the present urgency."""
        return (
            max(0.0, full_pause_s * (1.0 - min(1.0, max(0.0, self._urgency()))) - waited_s) if full_pause_s > 0 else 0.0
        )

    def pause_s(self, num_bytes: int, seconds: float) -> float:
        """Return the seconds until the next chunk may be requested, at constant urgency."""
        pause_s = self._remaining_pause_s(self._full_pause_s(num_bytes, seconds), 0.0)
        if pause_s > 0:
            self._busy_s = 0.0
        return pause_s

    def _full_pause_s(self, num_bytes: int, seconds: float) -> float:
        """Return the length of the pause at no urgency."""
        self._num_bytes, self._seconds = self._num_bytes + num_bytes, self._seconds + seconds
        if self._num_bytes < _MIN_CHUNK_BYTES or self._seconds <= 0:  # a few bytes do not measure the link
            return 0.0
        took_s, rate = self._seconds, self._num_bytes / self._seconds
        self._num_bytes, self._seconds = 0, 0.0
        self._best_rate *= _BEST_RATE_DECAY
        if self._busy_s >= _BURST_OVER_S:
            self._last_rate, self._best_rate = rate, max(rate, self._best_rate)
        self._busy_s += took_s
        if rate >= _BUSY_FRACTION * self._best_rate:
            return 0.0
        return min(_MAX_PAUSE_S, _PAUSE_FACTOR * took_s)


MAX_STATE_WAIT_S = 60.0
"""Longest time that a peer may wait for a state to be published; it holds a thread of the server."""


class StateBuffer(RpcMessage):
    """Buffer of a state."""

    kind: ClassVar[str] = "state.piece"

    name: str
    num_bytes: pydantic.NonNegativeInt
    check: int
    """xxh3 of its bytes."""


class StateDescription(RpcMessage):
    """Content of a state."""

    kind: ClassVar[str] = "state.description"

    offer: int
    """Version of the published state: each publication under the same name is another one."""
    pieces: list[StateBuffer]


class DescribeState(RpcMessage):
    """Asks for the content of a named state."""

    kind: ClassVar[str] = "state.describe"
    reply: ClassVar[type[RpcMessage]] = StateDescription

    name: str
    wait_s: float = pydantic.Field(default=0.0, ge=0.0, le=MAX_STATE_WAIT_S)
    """Longest wait for a state that is not published yet."""


class StateChunk(RpcMessage):
    """Carries one slice of a buffer."""

    kind: ClassVar[str] = "state.chunk"


class ReadState(RpcMessage):
    """Asks for a slice of a buffer."""

    kind: ClassVar[str] = "state.read"
    reply: ClassVar[type[RpcMessage]] = StateChunk

    name: str
    offer: int
    piece: int
    first_byte: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _PublishedState:
    description: StateDescription
    views: tuple[memoryview, ...]


class StateServer:
    """Server's side: states that peers may read, in place in memory."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._published: dict[str, _PublishedState] = {}
        self._last_version = 0

    def handlers(self) -> list[RpcHandler]:
        return [
            RpcHandler(message=DescribeState, handle=self._describe),
            RpcHandler(message=ReadState, handle=self._read),
        ]

    def publish(self, name: str, buffers: Mapping[str, Buffer]) -> None:
        """Let peers read these buffers under that name, in place of any earlier state of it.

        They must not change until they are unpublished or replaced: a peer that reads meanwhile detects it and fails.
        """
        views = tuple(framing.as_bytes_view(buffer) for buffer in buffers.values())
        pieces = [
            StateBuffer(name=each, num_bytes=view.nbytes, check=framing.checksum(view))
            for each, view in zip(buffers, views, strict=True)
        ]
        with self._changed:
            self._last_version += 1
            self._published[name] = _PublishedState(StateDescription(offer=self._last_version, pieces=pieces), views)
            self._changed.notify_all()

    def unpublish(self, name: str) -> None:
        """Stop publishing it; chunks in flight are still sent."""
        with self._changed:
            self._published.pop(name, None)

    def _describe(self, call: RpcCall) -> StateDescription:
        return self._find(call.message.name, call.message.wait_s).description

    def _read(self, call: RpcCall) -> RpcReply:
        wanted: ReadState = call.message
        published = self._find(wanted.name)
        if published.description.offer != wanted.offer:
            raise MessageError(
                f"published state {wanted.name}",
                got=wanted.offer,
                expected=f"the newest, {published.description.offer}",
                do="Begin again: it was replaced meanwhile",
            )
        view = published.views[wanted.piece] if 0 <= wanted.piece < len(published.views) else memoryview(b"")
        if not 0 <= wanted.first_byte <= wanted.first_byte + wanted.num_bytes <= view.nbytes:
            raise MessageError(
                f"slice of state {wanted.name}",
                got=(wanted.piece, wanted.first_byte, wanted.num_bytes),
                expected="one that lies within a buffer of the description",
                do="Ask for what the description names",
            )
        return RpcReply(StateChunk(), [view[wanted.first_byte :][: wanted.num_bytes]])

    def _find(self, name: str, wait_s: float = 0.0) -> _PublishedState:
        with self._changed:
            self._changed.wait_for(lambda: name in self._published, wait_s)
            published, names = self._published.get(name), sorted(self._published)
        if published is None:
            raise RpcError(
                "state", got=name, expected=f"one of {', '.join(names) or 'none'}", do="Ask a peer that has it"
            )
        return published


def fetch_state(
    client: RpcClient,
    name: str,
    *,
    timeout_s: float,
    wait_s: float = 0.0,
    check: Callable[[StateDescription], object] = lambda _: None,
    throttle: ReadThrottle | None = None,
) -> dict[str, memoryview]:
    """Return the buffers of a peer's state by name, each in memory of its own.

    Args:
        client: Connection to the peer.
        name: Name of the state.
        timeout_s: Seconds for the whole.
        wait_s: Longest wait for the peer to publish it.
        check: Called before memory is allocated; it may refuse the description by an error of its own.
        throttle: Rate; None means as fast as the link permits.

    Raises:
        WireError: It could not be read whole.
    """
    deadline_s, throttle = time.monotonic() + timeout_s, throttle or NoThrottle()
    description = client.call(DescribeState(name=name, wait_s=wait_s), timeout_s=timeout_s).message
    assert isinstance(description, StateDescription), "the class of the reply"
    check(description)
    views = [memoryview(bytearray(piece.num_bytes)) for piece in description.pieces]
    under_way: deque[tuple[PendingCall, int, float]] = deque()

    def wait_oldest() -> None:
        pending, num_bytes, started_s = under_way.popleft()
        pending.wait()
        throttle.wait_after_chunk(num_bytes, time.monotonic() - started_s)

    try:
        for read, room in _chunk_reads(name, description, views, throttle):
            while len(under_way) >= throttle.window:
                wait_oldest()
            pending = client.start(read, timeout_s=_remaining_s(name, deadline_s), into=[room])
            under_way.append((pending, room.nbytes, time.monotonic()))
        while under_way:
            wait_oldest()
    finally:
        for pending, _, _ in under_way:
            pending.cancel()
    _verify_state(name, description, views)
    return {piece.name: view for piece, view in zip(description.pieces, views, strict=True)}


def _chunk_reads(
    name: str, description: StateDescription, views: list[memoryview], throttle: ReadThrottle
) -> Iterator[tuple[ReadState, memoryview]]:
    for index, view in enumerate(views):
        first = 0
        while first < view.nbytes:
            target = view[first : first + throttle.chunk_bytes]
            read = ReadState(name=name, offer=description.offer, piece=index, first_byte=first, num_bytes=target.nbytes)
            yield read, target
            first += target.nbytes


def _remaining_s(name: str, deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise DeadlineError(f"state {name}", got="unfinished", expected="all of it in time", do="Give it more time")
    return left_s


def _verify_state(name: str, description: StateDescription, views: list[memoryview]) -> None:
    for piece, view in zip(description.pieces, views, strict=True):
        if framing.checksum(view) != piece.check:
            raise MessageError(
                f"state {name}, {piece.name}",
                got="another check",
                expected="the one of the description",
                do="It changed while it was read: pull it again, from a peer that keeps it still",
            )
