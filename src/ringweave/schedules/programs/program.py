"""What one rank does for one message: a straight list of instructions, for an executor or a simulator to follow."""

import enum
from dataclasses import dataclass

from ringweave.schedules.programs.staging import Layout

IN_PLACE = -1
"""Buffer of a receive that lands in the message itself."""


class Do(enum.IntEnum):
    """What an instruction does."""

    POST = 0
    """Post the receive of a piece, into a scratch buffer or in place."""
    SEND = 1
    """Start sending a piece."""
    ARRIVE = 2
    """Wait until a posted piece is here; out of a scratch buffer combine it with the message."""
    LEAVE = 3
    """Wait until a piece that was sent has left: its region may be overwritten."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One thing to do with one piece: elements `start .. stop` of the message."""

    do: Do
    piece: int
    peer: int
    start: int
    stop: int
    buffer: int
    """Scratch buffer of a receive, or IN_PLACE; stage of a send to a rank of this node, or NO_STAGE."""


@dataclass(frozen=True, slots=True)
class Program:
    """What one rank does for one message size."""

    instructions: tuple[Instruction, ...]
    num_pieces: int
    num_buffers: int
    buffer_elements: int
    num_sends: int
    """Messages that this rank puts on the wire."""
    peers: frozenset[int]
    """Group ranks that it exchanges messages with."""
    layout: Layout
    """What it shows to the ranks of its node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipelining:
    """How a message is cut in time."""

    num_segments: int = 1
    """Segments that run the schedule independently."""
    lag: int = 0
    """Rounds by which a segment trails the one before it in the order of waiting."""
    window: int = 2
    """Receives that are posted and not yet waited for."""

    def __post_init__(self) -> None:
        if self.num_segments < 1 or self.lag < 0 or self.window < 1:
            raise ValueError(f"pipelining: {self}, expected num_segments >= 1, lag >= 0, window >= 1")
