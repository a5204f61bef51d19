"""Control tree: small messages among the ranks of a group within a collective, and the streams of a link survey.

The messages are part of a collective: they use its channel's connections, at its turn, under its timeout. A dead rank
is therefore detected and named as in any collective, and no circular wait is possible.
"""

import functools
import math
import struct
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from ringweave.comm import peer_data
from ringweave.comm.group_info import GroupInfo
from ringweave.comm.transport.interface import Transport
from ringweave.planning.autotune import tuning_messages
from ringweave.planning.autotune.tuning_messages import SurveyStream
from ringweave.schedules.program import NO_SLOT, StagingLayout, StagingSlot

FAN_OUT = 8
MAX_DECISION_BYTES = tuning_messages.MAX_DECISION_BYTES
_LENGTH = struct.Struct("<q")


class ControlTree:
    """Tree of a group's ranks during one collective on one channel."""

    def __init__(self, group: GroupInfo, transport: Transport, *, tag: int, timeout_s: float) -> None:
        """`tag` distinguishes these messages from those of other collectives."""
        self._group_rank, self._group_size = group.group_rank, group.group_size
        self._parent = (self._group_rank - 1) // FAN_OUT if self._group_rank else None
        self._children = _children(self._group_rank, self._group_size)
        self._transport, self._tag, self._timeout_s = transport, tag, timeout_s
        transport.connect({*self._children, *(() if self._parent is None else (self._parent,))}, timeout_s)

    def reduce_and_decide(self, values: Sequence[float], decide: Callable[[list[float]], str]) -> str:
        """Combine all ranks' numbers at the root and return the root's decision; a barrier for all ranks.

        Args:
            values: This rank's numbers, equally many on every rank; combined by minimum, ignoring NaN.
            decide: Called on the first rank only.

        Raises:
            TransferFailedError: A rank is dead or silent.
            MismatchError: A rank runs something else.
            DisagreementError: The root's text is longer than any decision.

        Cost:
            One message up and two down for each rank, in a tree with eight children per rank.
        """
        combined = self._reduce_min(values)
        decision = decide(combined) if self._parent is None else ""
        return self._broadcast(decision)

    def barrier(self) -> None:
        """Block until all ranks have called it."""
        self.reduce_and_decide([0.0], lambda _: "")

    def allgather(self, row: torch.Tensor) -> torch.Tensor:
        """Return the row of each rank, (group_size, width), on all ranks; a barrier for all ranks.

        Args:
            row: (width,) on the CPU, with the same width and dtype on every rank.

        Raises:
            TransferFailedError: A rank is dead or silent.
            MismatchError: A rank runs something else.

        Cost:
            One message up and one down for each rank, in a tree with eight children per rank.
        """
        table = row.new_empty((self._group_size, *row.shape))
        subtrees = [_subtree(child, self._group_size) for child in self._children]
        parts = [row.new_empty((len(branch), *row.shape)) for branch in subtrees]
        self._receive([(_byte_view(part), child) for part, child in zip(parts, self._children, strict=True)])
        for part, branch in zip(parts, subtrees, strict=True):
            table[branch] = part
        table[self._group_rank] = row
        if self._parent is not None:
            self._send(
                _byte_view(table[_subtree(self._group_rank, self._group_size)] if subtrees else row), [self._parent]
            )
            self._receive([(_byte_view(table), self._parent)])
        if self._children:
            self._send(_byte_view(table), self._children)
        return table

    def _reduce_min(self, values: Sequence[float]) -> list[float]:
        numbers = np.array(values, np.float64)
        buffers = [np.empty_like(numbers) for _ in self._children]
        pieces = [torch.from_numpy(buffer.view(np.uint8)) for buffer in buffers]
        self._receive(list(zip(pieces, self._children, strict=True)))
        for buffer in buffers:
            numbers = np.fmin(numbers, buffer)
        if self._parent is not None:
            self._send(torch.from_numpy(numbers.view(np.uint8)), [self._parent])
        return numbers.tolist()

    def _broadcast(self, text: str) -> str:
        body = text.encode()
        if self._parent is not None:
            head = torch.empty(_LENGTH.size, dtype=torch.uint8)
            self._receive([(head, self._parent)])
            length = _LENGTH.unpack(bytes(head.tolist()))[0]
            peer_data.check_length(length, "text of the first rank", max_bytes=MAX_DECISION_BYTES)
            buffer = torch.empty(length, dtype=torch.uint8)
            if length:
                self._receive([(buffer, self._parent)])
            body = bytes(buffer.numpy())
        if self._children:
            self._send(_byte_tensor(_LENGTH.pack(len(body))), self._children)
            if body:
                self._send(_byte_tensor(body), self._children)
        return body.decode(errors="replace")

    def _send(self, content: torch.Tensor, peers: Sequence[int]) -> None:
        stage = StagingSlot(0, len(peers), NO_SLOT, is_reused=False)
        self._transport.begin_collective(StagingLayout((stage,), content.numel()), 1)
        exposed = self._transport.expose(content)
        for handle in [self._transport.send(exposed[:], peer, self._tag, 0) for peer in peers]:
            self._transport.wait(handle, self._timeout_s)

    def _receive(self, parts: Sequence[tuple[torch.Tensor, int]]) -> None:
        handles = [self._transport.receive(self._transport.expose(piece)[:], peer, self._tag) for piece, peer in parts]
        for handle, (piece, _) in zip(handles, parts, strict=True):
            shown = self._transport.wait(handle, self._timeout_s)
            if shown is not None:
                shown.copy_to(piece)
                self._transport.release(handle)


def _children(rank: int, size: int) -> list[int]:
    return list(range(FAN_OUT * rank + 1, min(size, FAN_OUT * rank + FAN_OUT + 1)))


@functools.lru_cache(maxsize=4096)
def _subtree(rank: int, size: int) -> list[int]:
    """Return a rank and all ranks below it in the tree."""
    return [rank, *(each for child in _children(rank, size) for each in _subtree(child, size))]


def _byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """View the tensor's memory as bytes."""
    return tensor.view(-1).view(torch.uint8)


def _byte_tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


_MIN_STREAM_PIECE_BYTES, _MAX_STREAM_PIECES = 2**14, 64
_WARM_UP_FRACTION = 0.25
"""Fraction of a stream that is not timed: queues fill, and TCP finds its rate."""


def run_survey(
    phases: Sequence[Sequence[SurveyStream]],
    group: GroupInfo,
    tree: ControlTree,
    transport: Transport,
    *,
    tag: int,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> list[float]:
    """Return bytes per second of each stream, phase after phase; NaN for streams that this rank does not receive.

    Args:
        phases: Streams between nodes, in the order in which the group's ranks name them first.
        group: The ranks; the first rank on each node streams, the others wait.
        tree: Tree of the surrounding collective; a phase begins when all ranks are there.
        transport: Transport of its channel.
        tag: Tag of the messages.
        timeout_s: Limit on each wait.
        clock: Monotonic seconds.

    Raises:
        TransferFailedError: A rank is dead or silent.
    """
    first_rank_on: dict[str, int] = {}
    for group_rank, member in enumerate(group.ranks):
        first_rank_on.setdefault(member.location.node, group_rank)
    node_leaders = list(first_rank_on.values())
    rates: list[float] = []
    for phase in phases:
        ranked = [(node_leaders[src], node_leaders[dst], num_bytes) for src, dst, num_bytes in phase]
        sent = [(dst, num_bytes) for src, dst, num_bytes in ranked if src == group.group_rank]
        received = [(src, num_bytes) for src, dst, num_bytes in ranked if dst == group.group_rank]
        transport.connect({peer for peer, _ in (*sent, *received)}, timeout_s)
        transport.begin_collective(StagingLayout(), 1)
        tree.barrier()
        timed = iter(_run_streams(transport, sent, received, tag=tag, timeout_s=timeout_s, clock=clock))
        rates += [next(timed) if dst == group.group_rank else math.nan for _, dst, _ in ranked]
    return rates


def _run_streams(
    transport: Transport,
    sent: Sequence[tuple[int, int]],
    received: Sequence[tuple[int, int]],
    *,
    tag: int,
    timeout_s: float,
    clock: Callable[[], float],
) -> list[float]:
    """Send and receive at the same time; return bytes per second of each received stream."""
    sizes = [_piece_sizes(num_bytes) for _, num_bytes in received]
    receive_buffer = torch.empty(max((max(each) for each in sizes), default=1), dtype=torch.uint8)
    send_buffer = torch.zeros(
        max((max(_piece_sizes(num_bytes)) for _, num_bytes in sent), default=1), dtype=torch.uint8
    )
    receive_memory, send_memory = transport.expose(receive_buffer), transport.expose(send_buffer)
    # Received bytes are never read, so all may land in one place.
    receives = [
        [transport.receive(receive_memory[:size], peer, tag) for size in each]
        for (peer, _), each in zip(received, sizes, strict=True)
    ]
    sends = [
        transport.send(send_memory[:size], peer, tag) for peer, num_bytes in sent for size in _piece_sizes(num_bytes)
    ]
    times: list[list[float]] = [[] for _ in received]
    for turn in range(max(map(len, sizes), default=0)):
        for handles, seconds in zip(receives, times, strict=True):
            if turn < len(handles):
                transport.wait(handles[turn], timeout_s)
                seconds.append(clock())
    for handle in sends:
        transport.wait(handle, timeout_s)
    return [_rate_after_warm_up(each, seconds) for each, seconds in zip(sizes, times, strict=True)]


def _piece_sizes(num_bytes: int) -> list[int]:
    count = max(2, min(_MAX_STREAM_PIECES, num_bytes // _MIN_STREAM_PIECE_BYTES))
    return [num_bytes // count + (index < num_bytes % count) for index in range(count)]


def _rate_after_warm_up(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Return bytes per second after the warm-up."""
    cold = math.floor(len(sizes) * _WARM_UP_FRACTION)
    return sum(sizes[cold + 1 :]) / max(1e-9, seconds[-1] - seconds[cold])
