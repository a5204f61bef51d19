"""Schedules on the tensors of an accelerator: round by round, by messages of the host library (NCCL).

An accelerator's messages are enqueued on streams, and those that depend on each other's progress have to be grouped;
so a schedule runs here as it is written, one group of messages a round, without segments.
"""

import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as distributed_c10d
from torch.distributed import Work

from ringweave.comm.running.reductions import Combine, Reduction
from ringweave.errors import CommunicationError, explain
from ringweave.schedules.projection import Transfer
from ringweave.schedules.schedule import How, Schedule

_UNSENT = frozenset({torch.int16, torch.uint16, torch.uint32, torch.uint64})
"""NCCL sends no messages of these."""


def check_dtype(reduction: Reduction, dtype: torch.dtype) -> None:
    """Make sure that messages of this dtype can be sent between accelerators.

    Raises:
        CommunicationError: They cannot; said before anything is sent.
    """
    if dtype in _UNSENT:
        raise CommunicationError(
            explain(
                f"reduce operation {reduction.name} on an accelerator",
                got=str(dtype),
                expected="a dtype that NCCL sends",
                do="Convert the tensor, such as to torch.int64, or move it to the CPU",
            )
        )


def run_rounds(
    schedule: Schedule,
    transfers: Iterable[Transfer],
    message: Tensor,
    combine: Combine,
    process_group: dist.ProcessGroup,
) -> None:
    """Run one rank's part of a schedule on `message`, in place; on an accelerator it is enqueued on its stream.

    Args:
        schedule: Says where its chunks begin.
        transfers: What this rank sends and receives, in the order of the rounds.
        message: One-dimensional and contiguous, on the device whose library `process_group` has.
        combine: How an arriving piece is combined into the message.
        process_group: The host library's.
    """
    offsets = schedule.offsets(message.numel())
    for round_index, group in itertools.groupby(transfers, key=operator.attrgetter("round_index")):
        pieces = [(t, message[offsets[t.first_chunk] : offsets[t.first_chunk + t.num_chunks]]) for t in group]
        pieces = [(transfer, region) for transfer, region in pieces if region.numel()]
        landings = [torch.empty_like(r) if not t.sends and t.how == How.REDUCE else r for t, r in pieces]
        parts = [(transfer, landing) for (transfer, _), landing in zip(pieces, landings, strict=True)]
        for work in _exchange(process_group, parts, message.device, tag=round_index):
            work.wait()
        for (transfer, region), landing in zip(pieces, landings, strict=True):
            if not transfer.sends and transfer.how == How.REDUCE:
                combine(region, landing)


def finished_work(tensor: Tensor) -> Work:
    """The work of a collective that is enqueued on the current stream: whoever waits for it waits for the stream."""
    devices: list[torch.device | int | str] = [tensor.device] if tensor.device.type != "cpu" else []
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=devices)
    future.set_result([tensor])
    return distributed_c10d._create_work_from_future(future)  # pyrefly: ignore - torch's stubs lack it


def _exchange(
    process_group: Any, parts: Sequence[tuple[Transfer, Tensor]], device: torch.device, tag: int
) -> list[Work]:
    """Start all messages of a round; NCCL's as one group, or they would wait for each other."""
    if not parts:  # as in a message of fewer elements than ranks: a group without messages has no work
        return []
    grouped = device.type == "cuda"
    if grouped:
        process_group._start_coalescing(device)
    works = [
        process_group.send([part], transfer.peer, tag)
        if transfer.sends
        else process_group.recv([part], transfer.peer, tag)
        for transfer, part in parts
    ]
    if grouped:
        works = [process_group._end_coalescing(device)]
    return [work for work in works if work is not None]
