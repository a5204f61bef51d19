"""Several connections to one rank, a NIC each: every message is cut in proportion to their rates.

So a node's NICs are one link of their summed rate, which is what plans take them for.
"""

from collections.abc import Sequence
from typing import Any

from ringweave.comm.transport.streams import Message, StreamConnection

CUT_S = 30e-6
"""What another part of a message costs, a system call at each end: what the fastest rail alone carries so much later at
the most takes that one whole."""


class Bundle:
    """A message whose parts go by several rails."""

    __slots__ = ("parts", "peer")

    def __init__(self, peer: int, parts: Sequence[Message]) -> None:
        self.peer = peer
        self.parts = parts

    @property
    def done(self) -> bool:
        """Whether all parts are through."""
        return all(part.done for part in self.parts)

    @property
    def content(self) -> None:
        """Nowhere but in its piece."""
        return None


class RailedConnection:
    """One peer, reached by several NICs. Both ends cut alike, because they know the same rates."""

    def __init__(self, peer: int, rails: Sequence[StreamConnection], rates: Sequence[float]) -> None:
        """`rates` are bytes per second; so many as there are rails."""
        self.peer = peer
        self.rails = tuple(rails)
        total, sums = sum(rates), [sum(rates[: index + 1]) for index in range(len(rates))]
        self._cuts = [0.0, *(each / total for each in sums[:-1]), 1.0]
        self._fastest = self.rails[rates.index(max(rates))]
        self._most_whole_bytes = CUT_S / (1 / max(rates) - 1 / total)

    def send(self, piece: Any, tag: int) -> Bundle:
        """Queue a piece, and start sending it."""
        return Bundle(self.peer, [rail.send(part, tag) for rail, part in self._cut(piece)])

    def receive(self, piece: Any, tag: int) -> Bundle:
        """Expect the next message in this piece."""
        return Bundle(self.peer, [rail.receive(part, tag) for rail, part in self._cut(piece)])

    def _cut(self, piece: Any) -> list[tuple[StreamConnection, Any]]:
        """The piece's elements in order, part by part."""
        if piece.nbytes <= self._most_whole_bytes:
            return [(self._fastest, piece)]
        borders = [round(len(piece) * cut) for cut in self._cuts]
        return [(rail, piece[borders[index] : borders[index + 1]]) for index, rail in enumerate(self.rails)]
