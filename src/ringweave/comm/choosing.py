"""Which schedule a message takes."""

from dataclasses import dataclass

from ringweave import schedules

MIN_SCHEDULED_BYTES = 64 * 2**10
"""Below this a message goes to the host library untouched: latency decides there, and Python costs more of it."""

_PIECE_BYTES = 1536 * 2**10
"""Aim for pieces of this size: measured best on loopback between 0.2 and 6 MB, see docs/log.md."""

_MAX_SEGMENTS = 32


@dataclass(frozen=True, slots=True)
class Choice:
    """What a message of a given size takes."""

    schedule: str
    """A name of `schedules.NAMES`."""
    num_segments: int
    """Segments that run the schedule independently."""
    lag: int = 0
    """Rounds by which a segment trails the one before it."""
    window: int = 2
    """Receives that are posted and not yet waited for."""


def choose(num_bytes: int, num_ranks: int, *, forced: str | None, host_can: bool) -> Choice:
    """The schedule for a message: the forced one, else the ring; small messages go to the host library.

    The same on all ranks, because it depends on nothing that differs between them.

    Args:
        num_bytes: Size of the message.
        num_ranks: Size of the group.
        forced: Name of the schedule that the user asked for, if any.
        host_can: Whether the host library computes this message as it is; what it cannot do takes a schedule, however
            small.
    """
    name = schedules.check_name(forced) if forced else "ring"
    if host_can and (num_bytes < MIN_SCHEDULED_BYTES or num_ranks == 1 or name == schedules.HOST):
        return Choice(schedules.HOST, 1)
    segments = round(num_bytes / num_ranks / _PIECE_BYTES)
    import os

    seg = int(os.environ.get("RW_PIECE", _PIECE_BYTES))
    segments = max(1, min(256, round(num_bytes / num_ranks / seg)))
    return Choice(
        "ring" if name == schedules.HOST else name,
        segments,
        int(os.environ.get("RW_LAG", 1)),
        int(os.environ.get("RW_WINDOW", 2)),
    )
