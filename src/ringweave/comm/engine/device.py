"""Schedules on accelerator tensors: round by round, by messages of the native backend (NCCL).

Accelerator messages are enqueued on streams, and messages that depend on each other must be grouped. A schedule
therefore runs as it is written: one group of messages per round, no segments.
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

from ringweave.comm.engine.reductions import Combine, ReduceOperation
from ringweave.errors import CommunicationError, explain
from ringweave.schedules.program import Transfer
from ringweave.schedules.schedule import ReceiveOp, Schedule

_UNSENDABLE_DTYPES = frozenset({torch.int16, torch.uint16, torch.uint32, torch.uint64})
"""Dtypes that NCCL does not send."""


def check_sendable(reduction: ReduceOperation, dtype: torch.dtype) -> None:
    """Check that messages of this dtype can be sent between accelerators.

    Raises:
        CommunicationError: They cannot; raised before anything is sent.
    """
    if dtype in _UNSENDABLE_DTYPES:
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
    """Run one rank's part of a schedule on `message` in place; on an accelerator it is enqueued on the stream.

    Args:
        schedule: Defines the chunks.
        transfers: This rank's sends and receives, in the order of the rounds.
        message: One-dimensional and contiguous, on the device of `process_group`.
        combine: Combines an arriving piece into the message.
        process_group: Native process group.
    """
    offsets = schedule.offsets(message.numel())
    for round_index, group in itertools.groupby(transfers, key=operator.attrgetter("round_index")):
        regions = [(t, message[offsets[t.first_chunk] : offsets[t.first_chunk + t.num_chunks]]) for t in group]
        regions = [(transfer, region) for transfer, region in regions if region.numel()]
        buffers = [torch.empty_like(r) if not t.sends and t.how == ReceiveOp.REDUCE else r for t, r in regions]
        parts = [(transfer, landing) for (transfer, _), landing in zip(regions, buffers, strict=True)]
        for work in _start_round(process_group, parts, message.device, tag=round_index):
            work.wait()
        for (transfer, region), landing in zip(regions, buffers, strict=True):
            if not transfer.sends and transfer.how == ReceiveOp.REDUCE:
                combine(region, landing)


def stream_work(tensor: Tensor) -> Work:
    """Make the work of a collective on the current stream: waiting for it waits for the stream."""
    devices: list[torch.device | int | str] = [tensor.device] if tensor.device.type != "cpu" else []
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=devices)
    future.set_result([tensor])
    return distributed_c10d._create_work_from_future(future)  # pyrefly: ignore - torch's stubs lack it


def _start_round(
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
