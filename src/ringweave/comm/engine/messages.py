"""Messages of collectives: the elements on which a program works in place, and the tensors that they come from.

A message is one-dimensional and the same size on all ranks. For an allgather and a reduce-scatter it consists of a
block for each rank, of equal or of different sizes. Collectives that only copy work on bytes.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ringweave.comm import bridge
from ringweave.comm.device_regions import DeviceRegion
from ringweave.comm.engine.executor import ScratchMemory, flatten_tensor, write_back
from ringweave.comm.engine.reductions import ReduceOperation
from ringweave.comm.native_backend import NativeBackends, OrderedNccl
from ringweave.comm.wire_scope import WireScope
from ringweave.environment import EXACT
from ringweave.schedules import CollectiveKind
from ringweave.schedules.program import Instruction, Opcode, RankProgram, SegmentMarks, segment_bounds, segment_marks

_ENCODED_OPERATIONS = frozenset({"sum", "avg"})
"""Reduce operations whose float32 messages may be encoded."""
_NOT_IN_NCCL = frozenset({"band", "bor", "bxor"})
"""Reduce operations that Gloo has and NCCL has not."""


@dataclass(slots=True)
class CompiledProgram:
    """Program for one kind of message."""

    program: RankProgram
    signature: int
    """Part of the tag, so that ranks with different programs find out at the first message."""
    bounds: tuple[int, ...]
    _segment_marks: SegmentMarks | None = None

    @property
    def segment_marks(self) -> SegmentMarks:
        """Marks for messages of devices, made when first needed."""
        if self._segment_marks is None:
            self._segment_marks = segment_marks(self.program, self.bounds)
        return self._segment_marks


@dataclass(slots=True, kw_only=True)
class CollectiveMessage:
    """Message of one collective on one rank, and its program. Abstract."""

    kind: CollectiveKind
    num_elements: int
    dtype: torch.dtype
    """Of the message's elements."""
    reduction: ReduceOperation | None = None
    """Combines contributions; None where the collective only copies."""
    root: int | None = None
    """Group rank that has the message of a broadcast."""
    block_sizes: tuple[int, ...] | None = None
    """Elements of the block of each rank, the same on all ranks; None where these are equal, or there are none."""
    staged: bridge.StagedMessage | None = None
    """The tensors on their way through the bridge; None on the CPU."""
    num_blocks: int = 1
    """Equal blocks of the message, of which each is cut into segments."""
    wire: str = EXACT
    """Format that it is asked to take on slow links, or `auto`."""
    residual: torch.Tensor | None = None
    """Errors of earlier encoded messages, on the host, in float32; None where nothing is encoded, or they are lost."""
    program: Future[CompiledProgram] | None = None
    """None for the native backend."""
    makes_program: bool = field(default=False, init=False)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    @property
    def detail(self) -> str:
        """Reduce operation or root in words; empty for an allgather."""
        if self.reduction is not None:
            return self.reduction.name
        return "" if self.root is None else f"from rank {self.root}"

    @property
    def nccl_can(self) -> bool:
        """NCCL in another order of ranks can run it: its result does not depend on their numbers."""
        return self.kind == "broadcast" or (self.kind == "allreduce" and self.detail not in _NOT_IN_NCCL)

    @property
    def operation(self) -> str:
        """Operation in words; equal on all ranks."""
        text = f"{self.kind}({self.detail})" if self.detail else self.kind
        return text if self.block_sizes is None else f"{text} in {_blocks_text(self.block_sizes)}"

    @property
    def largest_block_bytes(self) -> int | None:
        """Size of the largest block; None where blocks are equal, or there are none."""
        return None if self.block_sizes is None else max(self.block_sizes) * self.dtype.itemsize

    def segment_bounds(self, num_segments: int) -> tuple[int, ...]:
        return segment_bounds(self.num_elements, num_segments, self.num_blocks)

    def begin(self, channel: int, num_segments: int, memory: ScratchMemory) -> Tensor:
        """Return the elements on the host, with this rank's contribution in them; of a device, as segments come.

        `memory`: of the channel, for messages that have no memory of their own.
        """
        if self.staged is None:
            return self.begin_on_host(num_segments, memory)
        message = self.staged.stage(channel, self.dtype, self.num_elements, self.regions())
        if self.program is None:
            bridge.fetch_segments(self.staged, (0, self.num_elements))
        else:
            bridge.fetch_segments(self.staged, self.segment_bounds(num_segments), self.num_blocks)
        return message

    def begin_on_host(self, num_segments: int, memory: ScratchMemory) -> Tensor:
        """Return the elements of tensors on the CPU, with this rank's contribution in them."""
        raise NotImplementedError

    def regions(self) -> list[DeviceRegion]:
        """Return the tensors on a device, by their places in the message."""
        raise NotImplementedError

    def instructions(self, program: RankProgram, message: Tensor) -> Iterable[Instruction]:
        """Return the program's instructions, each of which must be executed before the next one is asked for.

        `message`: what `begin` returned; readied for the reduce operation by the time that an instruction needs it.
        """
        if self.reduction is not None:
            self.reduction.prepare(message)
        return program.instructions

    def run_natively(self, native: NativeBackends, channel: int, message: Tensor, timeout_s: float) -> None:
        """Run the collective by the native backend of a channel; blocks.

        Raises:
            TransferFailedError: The backend failed.
        """
        raise NotImplementedError

    def run_in_order(self, nccl: OrderedNccl, order: tuple[int, ...], elements: Tensor) -> None:
        """Start the collective by NCCL with its ranks in an order, on the elements of the message's only tensor."""
        raise NotImplementedError

    def finish(self, message: Tensor, num_ranks: int) -> None:
        """Give the tensors the result that `message` holds; the bridge has done so with what a program made."""
        if self.staged is None:
            self.finish_on_host(message, num_ranks)
            return
        if self.program is None:
            self.staged.put(0, message.numel())
        self.staged.finish()

    def finish_on_host(self, message: Tensor, num_ranks: int) -> None:
        """Give the tensors on the CPU the result that `message` holds."""
        raise NotImplementedError

    def release(self) -> None:
        """Cancel the program if this collective was to make it and did not, so that no other collective waits for it.

        Collectives that only use the program leave it alone: it may be in the making.
        """
        if self.makes_program and self.program is not None:
            self.program.cancel()  # no effect on a finished one
        if self.staged is not None:
            self.staged.discard()


@dataclass(slots=True, kw_only=True)
class ReducedTensor(CollectiveMessage):
    """A tensor that is reduced over all ranks, in place."""

    tensor: Tensor
    """Any shape and strides."""
    op: Any
    """Reduce operation of torch."""

    @classmethod
    def of(cls, tensor: Tensor, op: Any, reduction: ReduceOperation) -> "ReducedTensor":
        return cls(
            kind="allreduce",
            num_elements=tensor.numel(),
            dtype=tensor.dtype,
            reduction=reduction,
            tensor=tensor,
            op=op,
        )

    def take_scope(self, scope: WireScope) -> None:
        """Take the scope's format and residual, if later messages can make up for errors of this one."""
        if scope.wire != EXACT and self.dtype == torch.float32 and self.detail in _ENCODED_OPERATIONS:
            self.wire, self.residual = scope.wire, scope.residual_of(self.tensor)

    def begin_on_host(self, num_segments: int, memory: ScratchMemory) -> Tensor:
        """Return the tensor's own elements, or a copy."""
        return flatten_tensor(self.tensor)

    def regions(self) -> list[DeviceRegion]:
        return [DeviceRegion(tensor=self.tensor, start=0, is_input=True, is_output=True)]

    def run_natively(self, native: NativeBackends, channel: int, message: Tensor, timeout_s: float) -> None:
        native.allreduce(channel, message, self.op, timeout_s)

    def run_in_order(self, nccl: OrderedNccl, order: tuple[int, ...], elements: Tensor) -> None:
        nccl.allreduce(order, elements, self.op)

    def finish_on_host(self, message: Tensor, num_ranks: int) -> None:
        """Finish the reduction, and write a copy back."""
        if self.program is not None and self.reduction is not None:
            self.reduction.finish(message, num_ranks)
        write_back(message, self.tensor)


@dataclass(slots=True, kw_only=True)
class BroadcastTensor(CollectiveMessage):
    """A tensor that gets the root's content."""

    tensor: Tensor
    """Any shape and strides."""
    group_rank: int

    @classmethod
    def of(cls, tensor: Tensor, root: int, group_rank: int) -> "BroadcastTensor":
        return cls(
            kind="broadcast",
            num_elements=tensor.nbytes,
            dtype=torch.uint8,
            root=root,
            tensor=tensor,
            group_rank=group_rank,
        )

    def begin_on_host(self, num_segments: int, memory: ScratchMemory) -> Tensor:
        return _as_bytes(flatten_tensor(self.tensor))

    def regions(self) -> list[DeviceRegion]:
        is_root = self.group_rank == self.root
        return [DeviceRegion(tensor=self.tensor, start=0, is_input=is_root, is_output=not is_root)]

    def run_natively(self, native: NativeBackends, channel: int, message: Tensor, timeout_s: float) -> None:
        assert self.root is not None
        native.broadcast(channel, message, self.root, timeout_s)

    def run_in_order(self, nccl: OrderedNccl, order: tuple[int, ...], elements: Tensor) -> None:
        assert self.root is not None
        nccl.broadcast(order, elements, self.root)

    def finish_on_host(self, message: Tensor, num_ranks: int) -> None:
        write_back(message.view(self.tensor.dtype), self.tensor)


@dataclass(slots=True, kw_only=True)
class GatheredBlocks(CollectiveMessage):
    """Blocks of all ranks that come together on each rank."""

    block: Tensor
    """This rank's."""
    outputs: list[Tensor]
    """One tensor for all blocks, which are equal then, contiguous; or one for each block."""
    group_rank: int

    @classmethod
    def of(cls, block: Tensor, outputs: list[Tensor], group_rank: int) -> "GatheredBlocks":
        num_bytes, sizes = sum(output.nbytes for output in outputs), _unequal_sizes([each.nbytes for each in outputs])
        return cls(
            kind="allgather",
            num_elements=num_bytes,
            dtype=torch.uint8,
            num_blocks=1 if sizes else num_bytes // block.nbytes,
            block_sizes=sizes,
            block=block,
            outputs=outputs,
            group_rank=group_rank,
        )

    def regions(self) -> list[DeviceRegion]:
        own, size = self.group_rank * self.block.nbytes, self.outputs[0].nbytes
        found = [DeviceRegion(tensor=self.block, start=own, is_input=True, is_output=False)]
        for index, output in enumerate(self.outputs):
            found.append(DeviceRegion(tensor=output, start=index * size, is_input=False, is_output=True))
        return found

    def begin_on_host(self, num_segments: int, memory: ScratchMemory) -> Tensor:
        """Return the output's own memory if it is one tensor, else memory of the channel."""
        if len(self.outputs) == 1:
            message = _as_bytes(flatten_tensor(self.outputs[0]))
        else:
            message = memory.take_buffers(1, self.num_elements, torch.uint8)[0]
        own = _block_of(message, self.group_rank, self.block.nbytes, self.block_sizes).view(self.block.dtype)
        if self.block.nbytes and own.data_ptr() != self.block.data_ptr():
            own.view(self.block.shape).copy_(self.block.detach())
        return message

    def run_natively(self, native: NativeBackends, channel: int, message: Tensor, timeout_s: float) -> None:
        own = _block_of(message, self.group_rank, self.block.nbytes)
        native.allgather_blocks(channel, message, own.clone(), timeout_s)

    def finish_on_host(self, message: Tensor, num_ranks: int) -> None:
        if len(self.outputs) == 1:
            return
        for rank, output in enumerate(self.outputs):
            block = _block_of(message, rank, output.nbytes, self.block_sizes).view(output.dtype)
            output.detach().copy_(block.view(output.shape))


@dataclass(slots=True, kw_only=True)
class ScatteredBlocks(CollectiveMessage):
    """Blocks that are reduced over all ranks, one of which each rank gets."""

    blocks: list[Tensor]
    """One tensor for all blocks, or one for each rank; left as they are."""
    output: Tensor
    op: Any
    """Reduce operation of torch."""
    group_rank: int
    uncopied: Tensor | None = field(default=None, init=False)
    """The blocks in one dimension, of which each piece is copied when it is needed."""

    @classmethod
    def of(
        cls, blocks: list[Tensor], output: Tensor, op: Any, reduction: ReduceOperation, group_rank: int
    ) -> "ScatteredBlocks":
        num_elements, sizes = sum(block.numel() for block in blocks), _unequal_sizes([each.numel() for each in blocks])
        return cls(
            kind="reduce-scatter",
            num_elements=num_elements,
            dtype=output.dtype,
            reduction=reduction,
            num_blocks=1 if sizes else num_elements // output.numel(),
            block_sizes=sizes,
            blocks=blocks,
            output=output,
            op=op,
            group_rank=group_rank,
        )

    def regions(self) -> list[DeviceRegion]:
        own, size = self.group_rank * self.output.numel(), self.blocks[0].numel()
        found = [DeviceRegion(tensor=self.output, start=own, is_input=False, is_output=True)]
        for index, block in enumerate(self.blocks):
            found.append(DeviceRegion(tensor=block, start=index * size, is_input=True, is_output=False))
        return found

    def begin_on_host(self, num_segments: int, memory: ScratchMemory) -> Tensor:
        """Return memory for a copy of the blocks, in which a program can add; for the native backend, the blocks.

        In a program of several segments all operations have the same pieces. Each rank sends or receives each of them,
        so they are copied one by one, while others are on the wire.
        """
        if self.program is None and len(self.blocks) == 1:
            return flatten_tensor(self.blocks[0])
        message = memory.take_buffers(1, self.num_elements, self.dtype)[0]
        is_alone = self.output.numel() == self.num_elements  # has no operations
        if num_segments > 1 and len(self.blocks) == 1 and self.blocks[0].is_contiguous() and not is_alone:
            self.uncopied = flatten_tensor(self.blocks[0])
            return message
        start = 0
        for block in self.blocks:
            message[start : start + block.numel()].view(block.shape).copy_(block.detach())
            start += block.numel()
        return message

    def instructions(self, program: RankProgram, message: Tensor) -> Iterable[Instruction]:
        if self.uncopied is None:
            return CollectiveMessage.instructions(self, program, message)
        return self._copy_pieces(program, message, self.uncopied)

    def _copy_pieces(self, program: RankProgram, message: Tensor, blocks: Tensor) -> Iterator[Instruction]:
        assert self.reduction is not None
        copied: set[int] = set()
        for instruction in program.instructions:
            start, stop = instruction.start, instruction.stop
            if start not in copied and instruction.opcode in (Opcode.SEND, Opcode.WAIT_RECV):
                copied.add(start)
                message[start:stop].copy_(blocks[start:stop])
                self.reduction.prepare(message[start:stop])
            yield instruction

    def run_natively(self, native: NativeBackends, channel: int, message: Tensor, timeout_s: float) -> None:
        output = message.new_empty(self.output.numel()) if self.staged else flatten_tensor(self.output)
        native.reduce_scatter(channel, output, message, self.op, timeout_s)
        if self.staged is None:
            write_back(output, self.output)
        else:
            _block_of(message, self.group_rank, output.numel()).copy_(output)

    def finish_on_host(self, message: Tensor, num_ranks: int) -> None:
        if self.program is None or self.reduction is None:
            return
        own = _block_of(message, self.group_rank, self.output.numel(), self.block_sizes)
        self.reduction.finish(own, num_ranks)
        self.output.detach().copy_(own.view(self.output.shape))


def _block_of(message: Tensor, rank: int, size: int, block_sizes: Sequence[int] | None = None) -> Tensor:
    start = rank * size if block_sizes is None else sum(block_sizes[:rank])
    return message[start : start + size]


def _unequal_sizes(sizes: Sequence[int]) -> tuple[int, ...] | None:
    return tuple(sizes) if len(set(sizes)) > 1 else None


_MAX_NAMED_BLOCKS = 8


def _blocks_text(sizes: Sequence[int]) -> str:
    """Return sizes in words; of many blocks a digest, which differs where sizes do."""
    if len(sizes) <= _MAX_NAMED_BLOCKS:
        return f"blocks of {', '.join(map(str, sizes))}"
    digest = hashlib.sha256(repr(tuple(sizes)).encode()).hexdigest()[:16]
    return f"{len(sizes)} blocks of {min(sizes)} to {max(sizes)} ({digest})"


def _as_bytes(elements: Tensor) -> Tensor:
    return elements.view(torch.uint8)
