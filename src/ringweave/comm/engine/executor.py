"""Executor: checks that neighbours agree on a program, runs it on a message, and keeps programs and scratch memory."""

import itertools
import json
import mmap
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ringweave.comm.engine.reductions import Combine
from ringweave.comm.group_info import GroupInfo
from ringweave.comm.transport.interface import ReceivedContent, Transport
from ringweave.errors import DisagreementError
from ringweave.schedules import wire_formats
from ringweave.schedules.program import (
    IN_PLACE,
    NO_SLOT,
    Instruction,
    Opcode,
    PieceCoding,
    RankProgram,
    StagingLayout,
    StagingSlot,
)

_INTENT_BYTES = 512
_INTENT_LAYOUT = StagingLayout((StagingSlot(0, 1, NO_SLOT, is_reused=False),), _INTENT_BYTES)


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveIntent:
    """Description of the next collective; equal intents mean the same program on both sides."""

    operation: str
    dtype: str
    num_elements: int
    schedule: str
    digest: str
    pipelining: str

    def __str__(self) -> str:
        return (
            f"{self.operation} of {self.num_elements} x {self.dtype} by {self.schedule} "
            f"{self.digest[:12]}, {self.pipelining}"
        )


def check_agreement(
    intent: CollectiveIntent, group: GroupInfo, transport: Transport, *, tag: int, timeout_s: float
) -> None:
    """Return once both neighbours on the ring of group ranks are known to have the same intent.

    Every rank compares with its left neighbour only: if no pair differs, no rank does.

    Raises:
        DisagreementError: The left neighbour has another intent; the text names both ranks and intents.
        TransferFailedError: A neighbour is dead or silent.

    Cost:
        One small message to the right, one from the left.
    """
    size, own = group.group_size, group.group_rank
    right, left = (own + 1) % size, (own - 1) % size
    received = torch.zeros(_INTENT_BYTES, dtype=torch.uint8)
    transport.connect({left, right}, timeout_s)
    transport.begin_collective(_INTENT_LAYOUT, 1)
    receive = transport.receive(transport.expose(received)[:], left, tag)
    send = transport.send(transport.expose(_pack_intent(intent))[:], right, tag, 0)
    content = transport.wait(receive, timeout_s)
    if content is not None:
        content.copy_to(received)
        transport.release(receive)
    transport.wait(send, timeout_s)
    other = _unpack_intent(received)
    if other != intent:
        found = str(other) if other else "something unreadable"
        raise DisagreementError(
            f"collective: {group.rank_text(own)} is about to run {intent}, but {group.rank_text(left)} {found}, "
            "expected every rank of the group to call the same collectives in the same order with the same sizes and "
            "the same ringweave version. Compare what the two ranks do here."
        )


def _pack_intent(intent: CollectiveIntent) -> torch.Tensor:
    text = json.dumps(asdict(intent)).encode().ljust(_INTENT_BYTES)
    if len(text) > _INTENT_BYTES:
        raise ValueError(f"intent of {len(text)} bytes, expected at most {_INTENT_BYTES}: {intent}")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _unpack_intent(message: torch.Tensor) -> CollectiveIntent | None:
    try:
        return CollectiveIntent(**json.loads(bytes(message.tolist())))
    except (ValueError, TypeError, RecursionError):
        return None


_ALIGNMENT_BYTES = 64


def allocate_pages(num_elements: int, dtype: torch.dtype) -> Tensor:
    """Allocate a 1-D CPU tensor of fresh pages, zeroed when first touched; the kernel gets them back at the end."""
    num_bytes = num_elements * dtype.itemsize
    if not num_bytes:
        return torch.empty(0, dtype=dtype)
    pages = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype)


def flatten_tensor(tensor: Tensor) -> Tensor:
    """Return the elements in one dimension: the tensor's own memory, or a copy if it is not contiguous."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor.as_strided((tensor.numel(),), (1,))
    if tensor.device.type != "cpu":
        return tensor.flatten()
    copy = allocate_pages(tensor.numel(), tensor.dtype)
    copy.view(tensor.shape).copy_(tensor)
    return copy


def write_back(elements: Tensor, tensor: Tensor) -> None:
    """Copy the elements back if `flatten_tensor` has copied them."""
    if elements.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(elements.view(tensor.shape))


class ScratchMemory:
    """Scratch memory reused from run to run: fresh pages cost as much as the additions."""

    def __init__(self) -> None:
        self._memory = allocate_pages(0, torch.uint8)
        self.encoded = EncodedBuffers()

    def take_buffers(self, num_buffers: int, num_elements: int, dtype: torch.dtype) -> list[Tensor]:
        """Return so many buffers of so many elements; they are valid until the next call."""
        stride_bytes = -(-num_elements * dtype.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if self._memory.numel() < num_buffers * stride_bytes:
            self._memory = allocate_pages(0, torch.uint8)  # goes back before there is more
            self._memory = allocate_pages(num_buffers * stride_bytes, torch.uint8)
        num_bytes = num_elements * dtype.itemsize
        starts = range(0, num_buffers * stride_bytes, max(1, stride_bytes))
        return [self._memory[start : start + num_bytes].view(dtype) for start in starts]


def run_program(  # noqa: PLR0913 - everything that a run depends on is passed in
    program: RankProgram,
    message: Tensor,
    combine: Combine,
    transport: Transport,
    scratch: ScratchMemory,
    *,
    residual: Tensor | None = None,
    tag: int,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
    instructions: Iterable[Instruction] | None = None,
) -> None:
    """Run `program` on `message` in place.

    Args:
        program: This rank's program.
        message: One-dimensional, contiguous, of the length the program was compiled for.
        combine: Combines an arriving piece into the message.
        transport: Sends and receives pieces.
        scratch: Memory for pieces that are to be combined.
        residual: Errors of earlier encoded messages, of the message's length and float32, which this run adds to what
            it encodes, and replaces by its own; None loses them.
        tag: Keeps the messages of collectives that are in flight together apart.
        timeout_s: Limit on the whole run.
        clock: Monotonic seconds.
        instructions: The program's own, each yielded when it may be executed; None: all may be at once.

    Raises:
        TransferFailedError: A peer is dead, or time is up while a message to or from it is missing.
        MismatchError: A peer runs something else.
    """
    pieces = _MessagePieces(program, message, residual, scratch, transport)
    transport.begin_collective(program.layout, message.element_size())
    handles: dict[int, Any] = {}
    deadline = clock() + timeout_s
    for instruction in instructions or program.instructions:
        do, piece, peer = instruction.opcode, instruction.piece, instruction.peer
        if do == Opcode.SEND:
            handles[piece] = transport.send(pieces.source(instruction), peer, tag, instruction.buffer)
        elif do == Opcode.POST_RECV:
            handles[piece] = transport.receive(pieces.destination(instruction), peer, tag)
        else:
            handle = handles.pop(piece)
            content = transport.wait(handle, deadline - clock())
            if do == Opcode.WAIT_RECV:
                pieces.consume(instruction, content, combine)
            elif instruction.coding is not None:
                pieces.release(instruction)
            if content is not None:
                transport.release(handle)
    transport.end_collective(deadline - clock())


class _MessagePieces:
    """Memory of the pieces of one run: the message itself, scratch buffers, or encoded bytes."""

    def __init__(
        self,
        program: RankProgram,
        message: Tensor,
        residual: Tensor | None,
        scratch: "ScratchMemory",
        transport: Transport,
    ) -> None:
        num_buffers = program.num_buffers + program.is_encoded  # one more for decoded pieces
        self._message = message
        self._buffers = scratch.take_buffers(num_buffers, program.buffer_elements, message.dtype)
        self._exposed = transport.expose(message)
        self._exposed_buffers = [transport.expose(buffer) for buffer in self._buffers]
        self._coder = PieceCoder(message, residual, self._buffers, scratch.encoded) if program.is_encoded else None
        self._expose = transport.expose

    def source(self, instruction: Instruction) -> Any:
        """Return the memory of a piece that is sent, rounded and encoded as the program says."""
        if instruction.coding is not None and self._coder is not None:
            encoded = self._coder.encode(instruction, instruction.coding)
            if encoded is not None:
                return self._expose(encoded)[:]
        return self._exposed[instruction.start : instruction.stop]

    def destination(self, instruction: Instruction) -> Any:
        """Return the memory that receives a piece."""
        if instruction.coding is not None and self._coder is not None:
            return self._expose(self._coder.arrived(instruction, instruction.coding))[:]
        if instruction.buffer == IN_PLACE:
            return self._exposed[instruction.start : instruction.stop]
        return self._exposed_buffers[instruction.buffer][: instruction.stop - instruction.start]

    def consume(self, instruction: Instruction, content: ReceivedContent | None, combine: Combine) -> None:
        """Combine an arrived piece with the message, or overwrite it."""
        if instruction.coding is not None and self._coder is not None:
            self._coder.decode(instruction, instruction.coding, combine)
        else:
            region = self._message[instruction.start : instruction.stop]
            _consume_piece(region, instruction.buffer, self._buffers, content, combine)

    def release(self, instruction: Instruction) -> None:
        """Reuse the memory of an encoded piece that has left."""
        if self._coder is not None:
            self._coder.release(instruction)


class EncodedBuffers:
    """Memory of encoded pieces, reused from run to run; it keeps the sizes of the latest run only."""

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}
        self._taken: list[Tensor] = []

    def begin_run(self) -> None:
        """Take back all buffers of the run before, and forget those that it did not need."""
        self._free = {}
        for buffer in self._taken:
            self._free.setdefault(buffer.numel(), []).append(buffer)
        self._taken = []

    def take(self, num_bytes: int) -> Tensor:
        free = self._free.get(num_bytes)
        buffer = free.pop() if free else torch.empty(num_bytes, dtype=torch.uint8)
        self._taken.append(buffer)
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        """Let another piece of this run have the buffer."""
        self._free.setdefault(buffer.numel(), []).append(buffer)
        self._taken = [taken for taken in self._taken if taken is not buffer]


class PieceCoder:
    """Rounds, encodes and decodes the pieces of one run of an encoded program, on float32 messages."""

    def __init__(
        self,
        message: Tensor,
        residual: Tensor | None,
        buffers: Sequence[Tensor],
        encoded: EncodedBuffers,
    ) -> None:
        """The last of `buffers` is for decoded pieces."""
        self._message, self._values = message, message.numpy()
        self._residual = None if residual is None else residual.numpy()
        self._buffers = [buffer.view(torch.uint8) for buffer in buffers[:-1]]
        self._decoded = buffers[-1] if buffers else message[:0]
        self._encoded = encoded
        self._of_copy: dict[tuple[int, int], Tensor] = {}
        """Encoded parts of the complete sum, which do not change any more: several ranks may get them."""
        self._in_flight: dict[int, Tensor] = {}
        encoded.begin_run()

    def encode(self, instruction: Instruction, coding: PieceCoding) -> Tensor | None:
        """Round what is to be rounded, and return the encoded piece; None if it travels exactly."""
        region = instruction.start, instruction.stop
        known = self._of_copy.get(region) if coding.is_copy and coding.travels else None
        if known is not None:
            return known
        buffer = self._encoded.take(coding.encoded_bytes) if coding.travels else None
        encoded, at = None if buffer is None else buffer.numpy(), 0
        for index, (start, stop) in enumerate(itertools.pairwise(coding.borders)):
            size, is_fresh = coding.format.encoded_bytes(stop - start), coding.is_copy and coding.fresh[index]
            if encoded is not None or is_fresh:
                wire_formats.encode(
                    coding.format,
                    self._values[start:stop],
                    None if encoded is None else encoded[at : at + size],
                    residual=self._residual_of(start, stop) if is_fresh or not coding.is_copy else None,
                    rounds=is_fresh,
                )
            at += size
        if buffer is not None and coding.is_copy:
            self._of_copy[region] = buffer
        elif buffer is not None:
            self._in_flight[instruction.piece] = buffer
        return buffer

    def arrived(self, instruction: Instruction, coding: PieceCoding) -> Tensor:
        """Return the memory that receives an encoded piece."""
        return self._buffers[instruction.buffer][: coding.encoded_bytes]

    def decode(self, instruction: Instruction, coding: PieceCoding, combine: Combine) -> None:
        """Combine an arrived piece with the message, or overwrite it."""
        arrived, at = self.arrived(instruction, coding).numpy(), 0
        region = self._message[instruction.start : instruction.stop]
        decoded = region if coding.is_copy else self._decoded[: region.numel()]
        values = decoded.numpy()
        for start, stop in itertools.pairwise(coding.borders):
            size = coding.format.encoded_bytes(stop - start)
            part = values[start - instruction.start : stop - instruction.start]
            wire_formats.decode(coding.format, arrived[at : at + size], part)
            at += size
        if not coding.is_copy:
            combine(region, decoded)

    def release(self, instruction: Instruction) -> None:
        """Reuse the memory of a piece that has left."""
        buffer = self._in_flight.pop(instruction.piece, None)
        if buffer is not None:
            self._encoded.give_back(buffer)

    def _residual_of(self, start: int, stop: int) -> Any:
        return None if self._residual is None else self._residual[start:stop]


def _consume_piece(
    region: Tensor, buffer: int, buffers: Sequence[Tensor], content: ReceivedContent | None, combine: Combine
) -> None:
    """Combine an arrived piece, which is in place, in a scratch buffer or at another rank, into the message."""
    if buffer == IN_PLACE:
        if content is not None:
            content.copy_to(region)
    elif content is not None:
        content.combine_into(region, buffers[buffer], combine)
    else:
        combine(region, buffers[buffer][: region.numel()])


_MAX_KINDS = 512

_MIN_KINDS = 64
"""Minimum number of programs kept: a model's buckets come in turn, and each would find its program evicted."""

_MAX_PARTS = 2**16
"""Limit on segments times ranks of all kinds together: a program has up to eight instructions of 110 bytes for each.

(The server of `ps` has more; it is never chosen.)"""


ProgramT = TypeVar("ProgramT")


class ProgramCache(Generic[ProgramT]):
    """Programs by kind of message, in a cache with limited memory.

    Eviction depends on the calls alone, never on results or times: ranks that make the same calls keep the same kinds.
    They must, because they make a new program together.
    """

    def __init__(self) -> None:
        self._by_kind: OrderedDict[Hashable, tuple[Future[ProgramT], int]] = OrderedDict()
        self._total_parts = 0

    def __len__(self) -> int:
        return len(self._by_kind)

    def get_or_reserve(self, kind: Hashable, num_parts: int) -> tuple[Future[ProgramT], bool]:
        """Return the program's future for this kind, and True if the caller must make the program.

        `num_parts`: segments times ranks; the same on all ranks.
        """
        is_new = kind not in self._by_kind
        if is_new:
            self._by_kind[kind] = Future(), num_parts
            self._total_parts += num_parts
        self._by_kind.move_to_end(kind)
        while len(self._by_kind) > self._limit():
            _, (_, freed_parts) = self._by_kind.popitem(last=False)
            self._total_parts -= freed_parts
        return self._by_kind[kind][0], is_new

    def _limit(self) -> int:
        return _MAX_KINDS if self._total_parts <= _MAX_PARTS else _MIN_KINDS


_SIGNATURE_BITS = 32
NO_SIGNATURE, ALLGATHER_SIGNATURE = 0, 2**_SIGNATURE_BITS - 1
"""In place of a program's signature: messages before the agreement on it, and small allgathers."""


def make_tag(number: int, signature: int) -> int:
    """Combine the number of a collective and the signature of its program."""
    return number << _SIGNATURE_BITS | signature


def make_signature(text: str) -> int:
    """Return the signature of a program with this description."""
    return 1 + zlib.crc32(text.encode()) % (ALLGATHER_SIGNATURE - 1)
