"""Running a survey: one rank of each node streams to ranks of other nodes, and the receivers tell how fast it came."""

import math
import time
from collections.abc import Callable, Sequence

import torch

from ringweave.comm.adapting.consulting import Council
from ringweave.comm.members import Members
from ringweave.comm.transport.seam import Transport
from ringweave.planning.adapting import Stream
from ringweave.schedules.programs.staging import Layout

_MIN_PIECE_BYTES, _MAX_PIECES = 2**14, 64
_COLD_FRACTION = 0.25
"""Of a stream, what is not timed: queues fill, and TCP finds its rate."""


def survey(
    phases: Sequence[Sequence[Stream]],
    members: Members,
    council: Council,
    transport: Transport,
    *,
    tag: int,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> list[float]:
    """Bytes per second of each stream, phase after phase; not a number for those that this rank does not receive.

    Args:
        phases: Streams between nodes, in the order in which the group's ranks name them first.
        members: The group; the first rank on each node streams, the others wait.
        council: Of the collective that the survey is part of; phases begin when all are there.
        transport: Of its lane.
        tag: Of the messages.
        timeout_s: Bound on each wait.
        clock: Seconds that only grow.

    Raises:
        TransferFailedError: A rank is gone or silent.
    """
    first_on: dict[str, int] = {}
    for group_rank, member in enumerate(members.ranks):
        first_on.setdefault(member.place.node, group_rank)
    speakers = list(first_on.values())
    rates: list[float] = []
    for phase in phases:
        ranked = [(speakers[src], speakers[dst], num_bytes) for src, dst, num_bytes in phase]
        sent = [(dst, num_bytes) for src, dst, num_bytes in ranked if src == members.group_rank]
        received = [(src, num_bytes) for src, dst, num_bytes in ranked if dst == members.group_rank]
        transport.connect({peer for peer, _ in (*sent, *received)}, timeout_s)
        transport.begin(Layout(), 1)
        council.wait_all()
        timed = iter(_stream(transport, sent, received, tag=tag, timeout_s=timeout_s, clock=clock))
        rates += [next(timed) if dst == members.group_rank else math.nan for _, dst, _ in ranked]
    return rates


def _stream(
    transport: Transport,
    sent: Sequence[tuple[int, int]],
    received: Sequence[tuple[int, int]],
    *,
    tag: int,
    timeout_s: float,
    clock: Callable[[], float],
) -> list[float]:
    """Send and receive at the same time; bytes per second of each received stream."""
    sizes = [_cut(num_bytes) for _, num_bytes in received]
    landing = torch.empty(max((max(each) for each in sizes), default=1), dtype=torch.uint8)
    content = torch.zeros(max((max(_cut(num_bytes)) for _, num_bytes in sent), default=1), dtype=torch.uint8)
    where, what = transport.expose(landing), transport.expose(content)
    # What arrives is never read, so all of it may land in one place.
    arriving = [
        [transport.receive(where[:size], peer, tag) for size in each]
        for (peer, _), each in zip(received, sizes, strict=True)
    ]
    leaving = [transport.send(what[:size], peer, tag) for peer, num_bytes in sent for size in _cut(num_bytes)]
    times: list[list[float]] = [[] for _ in received]
    for turn in range(max(map(len, sizes), default=0)):
        for handles, seconds in zip(arriving, times, strict=True):
            if turn < len(handles):
                transport.wait(handles[turn], timeout_s)
                seconds.append(clock())
    for handle in leaving:
        transport.wait(handle, timeout_s)
    return [_rate(each, seconds) for each, seconds in zip(sizes, times, strict=True)]


def _cut(num_bytes: int) -> list[int]:
    """Sizes of a stream's pieces."""
    count = max(2, min(_MAX_PIECES, num_bytes // _MIN_PIECE_BYTES))
    return [num_bytes // count + (index < num_bytes % count) for index in range(count)]


def _rate(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Bytes per second of what came after the cold part."""
    cold = math.floor(len(sizes) * _COLD_FRACTION)
    return sum(sizes[cold + 1 :]) / max(1e-9, seconds[-1] - seconds[cold])
