"""Large state from a peer's memory to ours: in chunks, straight into place, checked as a whole; nothing touches a disk.

The one who needs it pulls: it asks for the next chunks while others are under way, so the link stays full, the server
holds nothing for it, and it alone decides the pace. A chunk is a slice of one buffer and carries a check of its own,
as every message does; at the end each buffer is compared with what the server said before the first chunk, so that
state that was changed while it was read is found out.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import pydantic
from typing_extensions import Buffer

from ringweave.errors import DeadlineError, MessageError, WireError, explain
from ringweave.wire.calls import Call, Handler
from ringweave.wire.client import Client
from ringweave.wire.framing import frames
from ringweave.wire.framing.messages import Answer, Message
from ringweave.wire.pacing import FullSpeed, Pace
from ringweave.wire.pending import Pending

MOST_WAIT_S = 60.0
"""A peer may ask to wait that long for a state to be offered; it holds a thread of the server's."""


class Piece(Message):
    """One buffer of a state."""

    kind: ClassVar[str] = "state.piece"

    name: str
    num_bytes: pydantic.NonNegativeInt
    check: int
    """xxh3 of its bytes."""


class Description(Message):
    """What a state is made of."""

    kind: ClassVar[str] = "state.description"

    offer: int
    """Number of the offer: a state that is offered again under the same name is another one."""
    pieces: list[Piece]


class Describe(Message):
    """Asks what the state of a name is made of."""

    kind: ClassVar[str] = "state.describe"
    reply: ClassVar[type[Message]] = Description

    name: str
    wait_s: float = pydantic.Field(default=0.0, ge=0.0, le=MOST_WAIT_S)
    """How long to wait for a state that is not offered yet."""


class Chunk(Message):
    """Comes with one slice of a buffer."""

    kind: ClassVar[str] = "state.chunk"


class Read(Message):
    """Asks for a slice of a buffer."""

    kind: ClassVar[str] = "state.read"
    reply: ClassVar[type[Message]] = Chunk

    name: str
    offer: int
    piece: int
    first_byte: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Offer:
    description: Description
    views: tuple[memoryview, ...]


class Shelf:
    """The server's side: states that peers may read, where they lie in memory."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._offers: dict[str, _Offer] = {}
        self._number = 0

    def handlers(self) -> list[Handler]:
        """What the server has to know."""
        return [Handler(message=Describe, handle=self._describe), Handler(message=Read, handle=self._read)]

    def offer(self, name: str, buffers: Mapping[str, Buffer]) -> None:
        """Let peers read these buffers under that name, in place of any earlier state of it.

        They must not change until they are withdrawn or replaced: a peer that reads them meanwhile finds out and fails.
        """
        views = tuple(frames.flat(buffer) for buffer in buffers.values())
        pieces = [
            Piece(name=each, num_bytes=view.nbytes, check=frames.check(view))
            for each, view in zip(buffers, views, strict=True)
        ]
        with self._changed:
            self._number += 1
            self._offers[name] = _Offer(Description(offer=self._number, pieces=pieces), views)
            self._changed.notify_all()

    def withdraw(self, name: str) -> None:
        """Stop offering it; what is being sent of it is still sent."""
        with self._changed:
            self._offers.pop(name, None)

    def _describe(self, call: Call) -> Description:
        return self._find(call.message.name, call.message.wait_s).description

    def _read(self, call: Call) -> Answer:
        wanted: Read = call.message
        offer = self._find(wanted.name)
        if offer.description.offer != wanted.offer:
            raise MessageError(
                explain(
                    f"offer of state {wanted.name}",
                    got=wanted.offer,
                    expected=f"the newest, {offer.description.offer}",
                    do="Begin again: it was replaced meanwhile",
                )
            )
        view = offer.views[wanted.piece] if 0 <= wanted.piece < len(offer.views) else memoryview(b"")
        if not 0 <= wanted.first_byte <= wanted.first_byte + wanted.num_bytes <= view.nbytes:
            raise MessageError(
                explain(
                    f"slice of state {wanted.name}",
                    got=(wanted.piece, wanted.first_byte, wanted.num_bytes),
                    expected="one that lies within a buffer of the description",
                    do="Ask for what the description names",
                )
            )
        return Answer(Chunk(), [view[wanted.first_byte :][: wanted.num_bytes]])

    def _find(self, name: str, wait_s: float = 0.0) -> _Offer:
        with self._changed:
            self._changed.wait_for(lambda: name in self._offers, wait_s)
            offer, there = self._offers.get(name), sorted(self._offers)
        if offer is None:
            raise WireError(
                explain("state", got=name, expected=f"one of {', '.join(there) or 'none'}", do="Ask a peer that has it")
            )
        return offer


def pull(
    client: Client,
    name: str,
    place: Callable[[Description], Mapping[str, Buffer]],
    *,
    timeout_s: float,
    wait_s: float = 0.0,
    pace: Pace | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Read a state of a peer into memory of ours.

    Args:
        client: A connection to the peer.
        name: Name of the state.
        place: Gives the memory for each piece of the description, by name and of exactly its size; it may refuse by
            an error of its own, before anything is sent.
        timeout_s: Seconds for all of it.
        wait_s: How long the peer may take to offer it.
        pace: How fast; None means as fast as the link lets it.
        clock: Where the time comes from.

    Raises:
        WireError: It could not be read whole; what is in the memory is worth nothing.
    """
    deadline_s, pace = clock() + timeout_s, pace or FullSpeed()
    description = client.call(Describe(name=name, wait_s=wait_s), timeout_s=timeout_s).message
    assert isinstance(description, Description), "the class of the reply"
    views = _checked_place(description, place(description))
    under_way: deque[tuple[Pending, int, float]] = deque()

    def wait_oldest() -> None:
        pending, num_bytes, started_s = under_way.popleft()
        pending.wait()
        pace.wait(num_bytes, clock() - started_s)

    try:
        for read, room in _reads(name, description, views, pace):
            while len(under_way) >= pace.window:
                wait_oldest()
            pending = client.start(read, timeout_s=_left_s(name, deadline_s, clock), into=[room])
            under_way.append((pending, room.nbytes, clock()))
        while under_way:
            wait_oldest()
    finally:
        for pending, _, _ in under_way:  # nothing writes to the caller's memory after this returns
            pending.cancel()
    _check(name, description, views)


def _reads(
    name: str, description: Description, views: list[memoryview], pace: Pace
) -> Iterator[tuple[Read, memoryview]]:
    for index, view in enumerate(views):
        first = 0
        while first < view.nbytes:
            room = view[first : first + pace.chunk_bytes]
            read = Read(name=name, offer=description.offer, piece=index, first_byte=first, num_bytes=room.nbytes)
            yield read, room
            first += room.nbytes


def _left_s(name: str, deadline_s: float, clock: Callable[[], float]) -> float:
    left_s = deadline_s - clock()
    if left_s <= 0:
        raise DeadlineError(
            explain(f"state {name}", got="unfinished", expected="all of it in time", do="Give it more time")
        )
    return left_s


def _checked_place(description: Description, given: Mapping[str, Buffer]) -> list[memoryview]:
    views = {name: frames.flat(buffer) for name, buffer in given.items()}
    wanted = {piece.name: piece.num_bytes for piece in description.pieces}
    sizes = {name: view.nbytes for name, view in views.items()}
    if sizes != wanted:
        differing = sorted(set(sizes.items()) ^ set(wanted.items()))
        raise MessageError(
            explain(
                "memory for a state",
                got=differing[:4],
                expected="the names and bytes of the description",
                do="Load it into the same model",
            )
        )
    return [views[piece.name] for piece in description.pieces]


def _check(name: str, description: Description, views: list[memoryview]) -> None:
    for piece, view in zip(description.pieces, views, strict=True):
        if frames.check(view) != piece.check:
            raise MessageError(
                explain(
                    f"state {name}, {piece.name}",
                    got="another check",
                    expected="the one of the description",
                    do="It changed while it was read: pull it again, from a peer that keeps it still",
                )
            )
