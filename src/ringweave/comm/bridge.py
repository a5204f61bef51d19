"""Bridge: runs the collectives of device tensors on copies in pinned host memory, segment by segment.

The caller's thread records an event on its current stream and returns. The channel's thread copies the segments to the
host on one stream, runs the program there, and copies each segment back on another stream once it holds the result.
Nothing waits for the device except the program, before the first instruction that touches a segment.
"""

import bisect
import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ringweave.comm.engine.executor import allocate_pages
from ringweave.comm.engine.reductions import ReduceOperation
from ringweave.errors import CommunicationError
from ringweave.schedules.program import IN_PLACE, Instruction, Opcode, RankProgram

_NUM_STAGING_BUFFERS = 2
"""Buffers of a channel: one is copied back to the device while the next collective runs in the other."""
_STAGING_GRAIN_BYTES = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentMarks:
    """Places in a program at which segments of its message may be copied; indices of segments by instruction."""

    bounds: tuple[int, ...]
    """Segment s is elements `bounds[s] .. bounds[s + 1]`."""
    first_touch: Mapping[int, tuple[int, ...]]
    """Segments that must be on the host before the instruction."""
    last_arrival: Mapping[int, tuple[int, ...]]
    """Segments that hold the sum after the instruction, which may still be sent from the host."""
    last_use: Mapping[int, tuple[int, ...]]
    """Segments that no later instruction reads or writes."""

    @property
    def num_segments(self) -> int:
        return len(self.bounds) - 1

    def missing_from(self, marks: Mapping[int, tuple[int, ...]]) -> list[int]:
        """Return the segments that no instruction has in these marks."""
        found = {segment for segments in marks.values() for segment in segments}
        return [segment for segment in range(self.num_segments) if segment not in found]


def segment_bounds(num_elements: int, num_segments: int) -> tuple[int, ...]:
    """Return the bounds of the segments, as `compile_program` cuts them."""
    return tuple(num_elements * segment // num_segments for segment in range(num_segments + 1))


def marks(program: RankProgram, bounds: Sequence[int]) -> SegmentMarks:
    """Return the marks of a program for segments with these bounds; a piece may lie in several segments.

    Cost:
        Linear in the instructions, times the segments of a piece.
    """
    first: dict[int, int] = {}
    arrival: dict[int, int] = {}
    use: dict[int, int] = {}
    for index, instruction in enumerate(program.instructions):
        posts = instruction.opcode == Opcode.POST_RECV and instruction.buffer != IN_PLACE
        start = bisect.bisect_right(bounds, instruction.start) - 1
        stop = bisect.bisect_left(bounds, instruction.stop)
        for segment in range(start, stop):
            if not posts:
                first.setdefault(segment, index)
            if instruction.opcode == Opcode.WAIT_RECV:
                arrival[segment] = index
            use[segment] = index
    return SegmentMarks(
        bounds=tuple(bounds), first_touch=_by_index(first), last_arrival=_by_index(arrival), last_use=_by_index(use)
    )


def _by_index(indices: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {}
    for segment, index in indices.items():
        found[index] = (*found.get(index, ()), segment)
    return found


class StreamRuntime(Protocol):
    """Streams, events and copies of one device, as torch.cuda has them; tests have others."""

    def enter_thread(self) -> None:
        """Prepare a thread that is to use the device."""
        ...

    def current_stream(self) -> Any:
        """Return the caller's current stream.

        Raises:
            CommunicationError: The stream is being captured in a graph, which cannot contain the host's part.
        """
        ...

    def make_stream(self) -> Any:
        """Make a stream whose `wait_event(event)` orders it after an event."""
        ...

    def make_event(self) -> Any:
        """Make an event with `record(stream)`, `synchronize()` and `query()`."""
        ...

    def use(self, stream: Any) -> AbstractContextManager[object]:
        """Make a stream the current one inside of `with`."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueue a copy on the current stream."""
        ...

    def keep(self, tensor: Tensor, stream: Any) -> None:
        """Keep a tensor's memory, once it is freed, until everything now enqueued on the stream is done."""
        ...

    def pin(self, num_bytes: int) -> Tensor:
        """Allocate host memory, (num_bytes,) of uint8, that the device copies from and to by itself."""
        ...


class CudaRuntime:
    """CUDA's streams and events on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def enter_thread(self) -> None:
        torch.cuda.set_device(self._device)

    def current_stream(self) -> Any:
        with torch.cuda.device(self._device):
            is_capturing = torch.cuda.is_current_stream_capturing()
        if is_capturing:
            raise CommunicationError(
                "collective by the bridge: the current stream is captured in a CUDA graph, expected none. "
                "Keep collectives out of the graph, or set RINGWEAVE_DEVICE_PATH=native."
            )
        return torch.cuda.current_stream(self._device)

    def make_stream(self) -> Any:
        """Make a stream of high priority: its copies go before the script's."""
        return torch.cuda.Stream(self._device, priority=-1)

    def make_event(self) -> Any:
        """Make an event whose `synchronize` sleeps: many ranks may wait on few processors."""
        return torch.cuda.Event(blocking=True)

    def use(self, stream: Any) -> AbstractContextManager[object]:
        return torch.cuda.stream(stream)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def keep(self, tensor: Tensor, stream: Any) -> None:
        tensor.record_stream(stream)

    def pin(self, num_bytes: int) -> Tensor:
        """Register ordinary pages where CUDA can, since other ranks may read them (`is_readable_by_peers`)."""
        memory = allocate_pages(num_bytes, torch.uint8)
        if not num_bytes:
            return memory
        cudart: Any = torch.cuda.cudart()
        with torch.cuda.device(self._device):
            if int(cudart.cudaHostRegister(memory.data_ptr(), num_bytes, 0)) == 0:
                finalizer: Any = weakref.finalize(memory, cudart.cudaHostUnregister, memory.data_ptr())
                finalizer.atexit = False  # CUDA may be gone by then
                return memory
            with contextlib.suppress(RuntimeError):  # the next kernel would raise the error, which CUDA keeps
                torch.zeros(1, device=self._device)
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


class StagingBuffer:
    """Pinned memory of one collective at a time."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._busy_until: Any = None

    def set_busy(self, event: Any) -> None:
        """Let nobody reuse the memory before this event has passed."""
        self._busy_until = event

    def wait_idle(self) -> None:
        """Block until all copies from and to the memory are done."""
        if self._busy_until is not None:
            self._busy_until.synchronize()
            self._busy_until = None


class StagingPool:
    """Staging buffers of one channel, used in turn; each grows to the largest message that it has held."""

    def __init__(self, pin: Callable[[int], Tensor]) -> None:
        """`pin` allocates pinned memory of so many bytes."""
        self._pin = pin
        self._buffers = [StagingBuffer() for _ in range(_NUM_STAGING_BUFFERS)]
        self._num_taken = 0

    def take(self, num_bytes: int) -> StagingBuffer:
        """Return the buffer whose turn it is, with at least so many bytes; waits until its last copies are done."""
        buffer = self._buffers[self._num_taken % _NUM_STAGING_BUFFERS]
        self._num_taken += 1
        buffer.wait_idle()
        if buffer.memory.numel() < num_bytes:
            buffer.memory = torch.empty(0, dtype=torch.uint8)  # goes back before there is more
            buffer.memory = self._pin(-(-num_bytes // _STAGING_GRAIN_BYTES) * _STAGING_GRAIN_BYTES)
        return buffer

    def close(self) -> None:
        """Wait for the last copies, and free the memory."""
        for buffer in self._buffers:
            buffer.wait_idle()
        self._buffers.clear()


class DeviceChannel:
    """Streams and staging memory of one channel on one device."""

    def __init__(self, runtime: StreamRuntime) -> None:
        self.fetch_stream, self.put_stream = runtime.make_stream(), runtime.make_stream()
        self.pool = StagingPool(runtime.pin)


class StagedMessage:
    """Message of one collective on a device, and its copy in host memory.

    The caller's thread makes it. The channel's thread calls `stage`, then `fetch` for each segment, `wait_fetched`
    before it touches one, `put` when one holds the result, and at last `finish`; or `discard` if the collective failed.
    """

    def __init__(self, tensor: Tensor, runtime: StreamRuntime, channel_of: Callable[[int], DeviceChannel]) -> None:
        """Order the read of the message after all that is on the current stream now.

        Args:
            tensor: On the device; any shape and strides.
            runtime: Of the device.
            channel_of: Device channel by the index of the engine's channel; called in that channel's thread.
        """
        self.device = tensor.device
        self._tensor = tensor
        self._runtime = runtime
        self._channel_of = channel_of
        self._ready, self._done = runtime.make_event(), runtime.make_event()
        self._ready.record(runtime.current_stream())
        self._elements, self._host = tensor, torch.empty(0)
        self._fetched: dict[int, Any] = {}
        self._channel: DeviceChannel | None = None
        self._buffer: StagingBuffer | None = None
        self._is_finished = False

    def stage(self, channel: int) -> Tensor:
        """Return host memory for the elements, one-dimensional; its content is undefined until it is fetched."""
        runtime, tensor = self._runtime, self._tensor.detach()
        self._channel = self._channel_of(channel)
        self._buffer = self._channel.pool.take(tensor.nbytes)
        self._channel.fetch_stream.wait_event(self._ready)
        if not tensor.is_contiguous():
            with runtime.use(self._channel.fetch_stream):
                contiguous = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
                runtime.copy(contiguous, tensor)
            tensor = contiguous
        self._elements = tensor.view(-1)
        self._host = self._buffer.memory[: tensor.nbytes].view(tensor.dtype)
        return self._host

    def fetch(self, segment: int, start: int, stop: int) -> None:
        """Start copying elements `start .. stop` to the host."""
        assert self._channel is not None, "staged"
        event = self._runtime.make_event()
        with self._runtime.use(self._channel.fetch_stream):
            self._runtime.copy(self._host[start:stop], self._elements[start:stop])
            event.record(self._channel.fetch_stream)
        self._fetched[segment] = event

    def wait_fetched(self, segment: int) -> None:
        """Block until the segment is on the host."""
        self._fetched[segment].synchronize()

    def put(self, start: int, stop: int) -> None:
        """Start copying elements `start .. stop`, which were fetched, back to the device."""
        assert self._channel is not None, "staged"
        with self._runtime.use(self._channel.put_stream):
            self._runtime.copy(self._elements[start:stop], self._host[start:stop])

    def finish(self) -> None:
        """Mark the end of the copies; call it after the last `put`."""
        assert self._channel is not None, "staged"
        if self._elements.data_ptr() != self._tensor.data_ptr():
            with self._runtime.use(self._channel.put_stream):
                self._runtime.copy(self._tensor.detach(), self._elements.view(self._tensor.shape))
        self._release(self._channel)
        self._is_finished = True

    def discard(self) -> None:
        """Give up after a failure: nothing is reused before the copies under way are done. No effect when finished."""
        if self._buffer is None or self._channel is None:
            return
        last_fetch = self._runtime.make_event()
        last_fetch.record(self._channel.fetch_stream)
        self._channel.put_stream.wait_event(last_fetch)
        self._release(self._channel)

    def order_stream(self) -> None:
        """Let the current stream wait for the result; no effect unless finished."""
        if self._is_finished:
            self._runtime.current_stream().wait_event(self._done)

    def is_complete(self) -> bool:
        """Return True if the tensor holds the result now."""
        return self._is_finished and self._done.query()

    def result_stream(self) -> AbstractContextManager[object]:
        """Return a context in which the current stream holds the result."""
        if not self._is_finished or self._channel is None:
            return contextlib.nullcontext()
        return self._runtime.use(self._channel.put_stream)

    def _release(self, channel: DeviceChannel) -> None:
        assert self._buffer is not None, "staged"
        self._done.record(channel.put_stream)
        for stream in (channel.fetch_stream, channel.put_stream):
            self._runtime.keep(self._tensor, stream)
            self._runtime.keep(self._elements, stream)
        self._buffer.set_busy(self._done)
        self._elements, self._host, self._buffer = self._tensor, torch.empty(0), None
        self._fetched.clear()


class DeviceBridge:
    """Bridge of one group: its streams and staging memory by device and channel, made when they are first needed."""

    def __init__(self, make_runtime: Callable[[torch.device], StreamRuntime] = CudaRuntime) -> None:
        """`make_runtime` gives a device's streams."""
        self._make_runtime = make_runtime
        self._runtimes: dict[torch.device, StreamRuntime] = {}
        self._channels: dict[tuple[torch.device, int], DeviceChannel] = {}

    def open(self, tensor: Tensor) -> StagedMessage:
        """Start a collective on a device tensor; its message is what the current stream leaves in it.

        Raises:
            CommunicationError: The stream is being captured in a graph, which cannot contain the host's part.
        """
        device = tensor.device
        if device not in self._runtimes:
            self._runtimes[device] = self._make_runtime(device)
        return StagedMessage(tensor, self._runtimes[device], lambda channel: self._channel(device, channel))

    def close(self) -> None:
        """Free the staging memory; no collective may be under way."""
        for channel in self._channels.values():
            channel.pool.close()
        self._channels.clear()

    def _channel(self, device: torch.device, index: int) -> DeviceChannel:
        """Return the channel's part on a device; called in the thread of the channel alone."""
        if (device, index) not in self._channels:
            self._runtimes[device].enter_thread()
            self._channels[device, index] = DeviceChannel(self._runtimes[device])
        return self._channels[device, index]


def fetch_segments(staged: StagedMessage, channel: int, bounds: Sequence[int]) -> Tensor:
    """Start copying all segments to the host, and return the host's message when the first of them is there.

    The host calls collectives long before the device reaches them; the time of a collective starts here.
    """
    message = staged.stage(channel)
    for segment in range(len(bounds) - 1):
        staged.fetch(segment, bounds[segment], bounds[segment + 1])
    staged.wait_fetched(0)
    return message


def paced_instructions(
    program: RankProgram,
    segments: SegmentMarks,
    staged: StagedMessage,
    message: Tensor,
    reduction: ReduceOperation,
    num_ranks: int,
) -> Iterator[Instruction]:
    """Yield a program's instructions, each when its segments are on the host; finished segments go to the device.

    Args:
        program: The program; an instruction must be executed before the next one is asked for.
        segments: Marks of the program.
        staged: The message, whose segments were fetched.
        message: Its host memory.
        reduction: Prepares and finishes segments; a segment of an average is divided when nobody reads it any more.
        num_ranks: Ranks of the group.
    """
    bounds = segments.bounds
    ready = segments.last_use if reduction.averages else segments.last_arrival

    def get(segment: int) -> None:
        staged.wait_fetched(segment)
        reduction.prepare(message[bounds[segment] : bounds[segment + 1]])

    def put(segment: int) -> None:
        reduction.finish(message[bounds[segment] : bounds[segment + 1]], num_ranks)
        staged.put(bounds[segment], bounds[segment + 1])

    for index, instruction in enumerate(program.instructions):
        for segment in segments.first_touch.get(index, ()):
            get(segment)
        yield instruction
        for segment in ready.get(index, ()):
            put(segment)
    for segment in segments.missing_from(segments.first_touch):
        get(segment)
    for segment in segments.missing_from(ready):
        put(segment)
