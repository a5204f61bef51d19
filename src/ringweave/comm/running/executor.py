"""Runs a rank's program on a message."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ringweave.comm.running.memory import Scratch
from ringweave.comm.running.reductions import Combine
from ringweave.comm.transport.seam import Content, Transport
from ringweave.schedules.programs import IN_PLACE, Do, Program


def run_program(  # noqa: PLR0913 - everything that a run depends on is passed in
    program: Program,
    message: Tensor,
    combine: Combine,
    transport: Transport,
    scratch: Scratch,
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
        scratch: Where pieces land that are to be combined.
        tag: Keeps the messages of collectives that are in flight together apart.
        timeout_s: Bound on the whole run.
        clock: Seconds that only grow.

    Raises:
        TransferFailedError: A peer is gone, or time is up while a message to or from it is missing.
        MismatchError: A peer runs something else.
    """
    buffers = scratch.take(program.num_buffers, program.buffer_elements, message.dtype)
    exposed, landings = transport.expose(message), [transport.expose(buffer) for buffer in buffers]
    transport.begin(program.layout, message.element_size())
    handles: dict[int, Any] = {}
    deadline = clock() + timeout_s
    for step in program.instructions:
        do, piece, peer = step.do, step.piece, step.peer
        if do == Do.SEND:
            handles[piece] = transport.send(exposed[step.start : step.stop], peer, tag, step.buffer)
        elif do == Do.POST:
            if step.buffer == IN_PLACE:
                landing = exposed[step.start : step.stop]
            else:
                landing = landings[step.buffer][: step.stop - step.start]
            handles[piece] = transport.receive(landing, peer, tag)
        else:
            handle = handles.pop(piece)
            content = transport.wait(handle, deadline - clock())
            if do == Do.ARRIVE:
                _take(message[step.start : step.stop], step.buffer, buffers, content, combine)
            if content is not None:
                transport.release(handle)
    transport.end(deadline - clock())


def _take(region: Tensor, buffer: int, buffers: Sequence[Tensor], content: Content | None, combine: Combine) -> None:
    """Bring a piece that has arrived, in place, in a scratch buffer or with another rank, into the message."""
    if buffer == IN_PLACE:
        if content is not None:
            content.copy_to(region)
    elif content is not None:
        content.combine_into(region, buffers[buffer], combine)
    else:
        combine(region, buffers[buffer][: region.numel()])
