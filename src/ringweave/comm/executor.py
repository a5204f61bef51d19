"""Runs a rank's program on a message."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from ringweave.comm.programs import IN_PLACE, Do, Program
from ringweave.comm.reductions import Combine
from ringweave.comm.transport import Handle, Transport


def run_program(
    program: Program,
    message: Tensor,
    combine: Combine,
    transport: Transport,
    *,
    tag: int,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Run `program` on `message` in place.

    Args:
        program: What this rank does.
        message: One-dimensional, contiguous, of the length the program was compiled for.
        combine: How an arriving piece is combined into the message.
        transport: Where pieces go.
        tag: Keeps the messages of collectives that are in flight together apart.
        timeout_s: Bound on the whole run.
        clock: Seconds that only grow.

    Raises:
        TransferFailedError: A peer is gone, or time is up while a message to or from it is missing.
    """
    scratch = torch.empty(program.num_buffers * program.buffer_elements, dtype=message.dtype)
    buffers = scratch.view(program.num_buffers, program.buffer_elements).unbind(0) if program.num_buffers else ()
    handles: dict[int, Handle] = {}
    deadline = clock() + timeout_s
    for step in program.instructions:
        do, piece, peer = step.do, step.piece, step.peer
        if do == Do.SEND:
            handles[piece] = transport.send(message[step.start : step.stop], peer, tag)
        elif do == Do.POST:
            if step.buffer == IN_PLACE:
                landing = message[step.start : step.stop]
            else:
                landing = buffers[step.buffer][: step.stop - step.start]
            handles[piece] = transport.receive(landing, peer, tag)
        else:
            transport.wait(handles.pop(piece), peer, deadline - clock())
            if do == Do.ARRIVE and step.buffer != IN_PLACE:
                combine(message[step.start : step.stop], buffers[step.buffer][: step.stop - step.start])
