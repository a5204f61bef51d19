"""Bridge: runs the collectives of device tensors on copies in pinned host memory, segment by segment.

The caller's thread records an event on its current stream and returns. The channel's thread copies the segments to the
host on one stream, runs the program there, and copies each segment back on another stream once it holds the result.
Nothing waits for the device except the program, before the first instruction that touches a segment.

The caller's `wait` waits for nothing either: its stream waits for a word in pinned memory, which the channel's thread
writes when the result is on the device, or when there will be none. Collectives of a channel finish in their order, so
its word counts them. Where streams cannot wait so, the caller's thread waits for the host's part.

Source of the waits: cuStreamWaitValue32 of CUDA's driver.
"""

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from ringweave.comm.device_regions import DeviceRegion, FlatRegion, overlaps
from ringweave.comm.engine.executor import allocate_pages
from ringweave.comm.engine.reductions import ReduceOperation
from ringweave.comm.transport.connect import NUM_CHANNELS
from ringweave.errors import CommunicationError
from ringweave.schedules.program import Instruction, RankProgram, SegmentMarks

_NUM_STAGING_BUFFERS = 2
"""Buffers of a channel: one is copied back to the device while the next collective runs in the other."""
_STAGING_GRAIN_BYTES = 2**20
_WORD_PAGES_BYTES = 4096
_WORD_BITS = 32
_MAX_TRIED_STREAMS = 64
_NUM_STREAM_TRIALS = 3
"""Trials of a stream that fail, until its waits block the thread for good: one may fail because all is busy."""
_DEVICE_POLL_S = 5e-5
_STREAM_TRIAL_S = 0.1
"""Limit on a trial; a copy of a few bytes takes some microseconds."""


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

    def touch(self, stream: Any, *, is_to_device: bool) -> None:
        """Enqueue a copy of a byte on a stream, to the device or to the host."""
        ...

    def make_word(self) -> Tensor | None:
        """Make a word, (1,) of int32 and 0, in host memory, for which streams can wait; None where they cannot."""
        ...

    def wait_word(self, stream: Any, word: Tensor, number: int) -> None:
        """Let a stream wait until the word, which counts up modulo 2^32, has come to this number.

        Raises:
            RuntimeError: The device cannot.
        """
        ...


class CudaRuntime:
    """CUDA's streams and events on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._driver: Any = _cuda_driver()
        self._byte: tuple[Tensor, Tensor] | None = None
        """Memory of `touch`: on the host and on the device."""

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

    def touch(self, stream: Any, *, is_to_device: bool) -> None:
        if self._byte is None:
            self._byte = self.pin(1), torch.empty(1, dtype=torch.uint8, device=self._device)
        on_host, on_device = self._byte
        with self.use(stream):
            self.copy(*((on_device, on_host) if is_to_device else (on_host, on_device)))

    def make_word(self) -> Tensor | None:
        """Make a word in pages of its own; streams wait for it by the driver's memory operations."""
        if self._driver is None:
            return None
        word = self.pin(_WORD_PAGES_BYTES)[: _WORD_BITS // 8].view(torch.int32)
        word.zero_()
        return word

    def wait_word(self, stream: Any, word: Tensor, number: int) -> None:
        error, address = self._driver.cuMemHostGetDevicePointer(word.data_ptr(), 0)
        if int(error) == 0:
            value, is_at_least = number % (1 << _WORD_BITS), 0  # CU_STREAM_WAIT_VALUE_GEQ
            (error,) = self._driver.cuStreamWaitValue32(stream.cuda_stream, int(address), value, is_at_least)
        if int(error) != 0:
            raise RuntimeError(f"a stream cannot wait for a word in host memory: CUDA error {int(error)}")


def _cuda_driver() -> Any:
    """Return the bindings of CUDA's driver, which torch's builds for CUDA bring along; None without."""
    try:
        from cuda.bindings import driver  # pyrefly: ignore - not there without CUDA
    except ImportError:
        return None
    return driver


class StreamGate:
    """Word in pinned memory for which streams wait: one for each channel, whose collectives finish in their order."""

    def __init__(self, word: Tensor) -> None:
        """`word` is one element of int32, on the host."""
        self.word = word
        self._value = word.numpy()  # an assignment stores the four bytes at once
        self._lock = threading.Lock()
        self._num_reserved = self._num_passed = 0

    def reserve(self) -> int:
        """Return the number of the channel's next collective, from 1 on; called in the order of the collectives."""
        self._num_reserved += 1
        return self._num_reserved

    def let_pass(self, number: int) -> None:
        """Let streams pass that wait for this collective or an earlier one, from any thread."""
        with self._lock:
            if number > self._num_passed:
                self._num_passed = number
                half = 1 << (_WORD_BITS - 1)
                self._value[0] = (number + half) % (2 * half) - half


class StreamGates:
    """Gates of one device by channel, and the streams of scripts that have been tried; none where streams cannot wait.

    A stream that waits holds up all others in the same hardware queue. With CUDA_DEVICE_MAX_CONNECTIONS=1 those are all
    of the device, copies too, on which the word depends. So each stream of a script is tried once, on a word that this
    object writes: while the stream waits, the channels' streams have to go on.
    """

    def __init__(
        self,
        runtime: StreamRuntime,
        channel_streams: Callable[[], Sequence[tuple[Any, Any]]],
        *,
        is_enabled: bool = True,
    ) -> None:
        """Create it without a gate.

        Args:
            runtime: Of the device.
            channel_streams: Returns each channel's streams to the host and to the device.
            is_enabled: False lets no stream wait.
        """
        self._runtime, self._channel_streams, self._is_enabled = runtime, channel_streams, is_enabled
        self._lock = threading.Lock()
        self._gates: dict[int, StreamGate] = {}
        self._trial_gate: StreamGate | None = None
        self._num_failed: dict[Any, int] = {}
        """Trials that failed, by stream; 0 for a stream that may wait."""

    def of_channel(self, channel: int) -> StreamGate | None:
        """Return the gate of a channel, made at the first call; None where streams cannot wait."""
        if self._is_enabled and channel not in self._gates:
            gate = self._make_gate()
            if gate is None:
                self._is_enabled = False
                return None
            self._gates[channel] = gate
        return self._gates.get(channel) if self._is_enabled else None

    def can_wait(self, stream: Any) -> bool:
        """Return True if this stream may wait for words; tries it, while it fails, a few times."""
        with self._lock:
            num_failed = self._num_failed.get(stream)
            if num_failed is None or 0 < num_failed < _NUM_STREAM_TRIALS:
                if len(self._num_failed) >= _MAX_TRIED_STREAMS:
                    self._num_failed.clear()
                num_failed = self._num_failed[stream] = 0 if self._try_stream(stream) else (num_failed or 0) + 1
            return num_failed == 0

    def _make_gate(self) -> StreamGate | None:
        word = self._runtime.make_word()
        return None if word is None else StreamGate(word)

    def _try_stream(self, stream: Any) -> bool:
        """Return True if the channels' copies go on while this stream waits; blocks until it has done its work."""
        gate = self._trial_gate = self._trial_gate or self._make_gate()
        if gate is None:
            return False
        runtime, number = self._runtime, gate.reserve()
        self._start_copies()  # takes memory, which a waiting stream may hold up
        reached = runtime.make_event()
        reached.record(stream)
        reached.synchronize()
        try:
            runtime.wait_word(stream, gate.word, number)
            return self._copies_go_on()
        except RuntimeError:
            return False
        finally:
            gate.let_pass(number)

    def _copies_go_on(self) -> bool:
        """Return True if small copies on all streams of the channels are done within the limit of a trial."""
        events, deadline_s = self._start_copies(), time.monotonic() + _STREAM_TRIAL_S
        while not all(event.query() for event in events):
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0)
        return True

    def _start_copies(self) -> list[Any]:
        """Start a small copy on each stream of the channels; return the events of their ends."""
        events = []
        for to_host, to_device in self._channel_streams():
            for stream, is_to_device in ((to_host, False), (to_device, True)):
                self._runtime.touch(stream, is_to_device=is_to_device)
                events.append(self._runtime.make_event())
                events[-1].record(stream)
        return events


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
    """Message of one collective, and its copy in host memory.

    The caller's thread makes it, and calls `reserve` once its channel is known. The channel's thread calls `stage`,
    then `fetch` for each segment, `wait_fetched` before it touches one, `put` when one holds the result, and at last
    `finish`; or `discard` if the collective failed.
    """

    def __init__(
        self,
        device: torch.device,
        runtime: StreamRuntime,
        enter_channel: Callable[[int], DeviceChannel],
        gates: StreamGates,
    ) -> None:
        """Order the read of the message after all that is on the current stream now.

        `enter_channel`: device channel by the index of the engine's channel; called in that channel's thread.
        """
        self.device = device
        self._runtime = runtime
        self._enter_channel, self._gates = enter_channel, gates
        self._ready, self._done = runtime.make_event(), runtime.make_event()
        self._ready.record(runtime.current_stream())
        self._regions: list[FlatRegion] = []
        self._inputs: list[FlatRegion] = []
        self._outputs: list[FlatRegion] = []
        self._host = torch.empty(0)
        self._fetched: dict[int, Any] = {}
        self._channel: DeviceChannel | None = None
        self._buffer: StagingBuffer | None = None
        self._gate: StreamGate | None = None
        self._number = 0
        self._lock = threading.Lock()
        self._is_finished = self._is_over = self._is_awaited = False

    def reserve(self, channel: int) -> None:
        """Take the next number of the channel's gate; called in the order of the channel's collectives."""
        self._gate = self._gates.of_channel(channel)
        if self._gate is not None:
            self._number = self._gate.reserve()

    def stage(self, channel: int, dtype: torch.dtype, num_elements: int, regions: Sequence[DeviceRegion]) -> Tensor:
        """Return host memory for the message, one-dimensional; its content is undefined until it is fetched.

        `regions`: tensors of the message. Inputs are sorted and do not overlap in it, and so are outputs.
        """
        taken = self._channel = self._enter_channel(channel)
        num_bytes = num_elements * dtype.itemsize
        self._buffer = taken.pool.take(num_bytes)
        taken.fetch_stream.wait_event(self._ready)
        self._regions = [self._flatten(region, dtype, taken) for region in regions]
        self._inputs = [flat for flat in self._regions if flat.region.is_input]
        self._outputs = [flat for flat in self._regions if flat.region.is_output]
        self._host = self._buffer.memory[:num_bytes].view(dtype)
        return self._host

    def fetch(self, segment: int, start: int, stop: int) -> None:
        """Start copying elements `start .. stop` to the host, as far as they are inputs."""
        assert self._channel is not None, "staged"
        parts = list(overlaps(self._inputs, start, stop))
        if not parts:
            return
        event = self._runtime.make_event()
        with self._runtime.use(self._channel.fetch_stream):
            for flat, first, until in parts:
                self._runtime.copy(self._host[first:until], flat.part(first, until))
            event.record(self._channel.fetch_stream)
        self._fetched[segment] = event

    def wait_fetched(self, segment: int) -> None:
        """Block until the segment's inputs are on the host; no effect if it has none."""
        event = self._fetched.get(segment)
        if event is not None:
            event.synchronize()

    def wait_ready(self) -> None:
        """Block until the device has come to the collective: the first segment is on the host, if one is fetched."""
        if self._fetched:
            self.wait_fetched(next(iter(self._fetched)))
        else:
            self._ready.synchronize()

    def has_output(self, start: int, stop: int) -> bool:
        """Return True if some of these elements are copied back."""
        return any(True for _ in overlaps(self._outputs, start, stop))

    def put(self, start: int, stop: int) -> None:
        """Start copying elements `start .. stop`, which are on the host, to the device, as far as they are outputs."""
        assert self._channel is not None, "staged"
        with self._runtime.use(self._channel.put_stream):
            for flat, first, until in overlaps(self._outputs, start, stop):
                self._runtime.copy(flat.part(first, until), self._host[first:until])

    def run_on_device(
        self,
        channel: int,
        dtype: torch.dtype,
        region: DeviceRegion,
        start: Callable[[Tensor], None],
        check: Callable[[], None],
    ) -> None:
        """Run a collective that needs no host memory, in place of `stage` to `put`; blocks until it is done.

        Args:
            channel: Index of the engine's channel.
            dtype: Of the message's elements.
            region: The message's only tensor.
            start: Enqueues the collective on the current stream; gets the elements, one-dimensional.
            check: Called while the device works; an error ends the wait.
        """
        taken, runtime = self._enter_channel(channel), self._runtime
        self._channel = taken
        taken.fetch_stream.wait_event(self._ready)
        self._regions = [self._flatten(region, dtype, taken)]
        has_come, done = runtime.make_event(), runtime.make_event()
        has_come.record(taken.fetch_stream)
        taken.put_stream.wait_event(has_come)
        with runtime.use(taken.put_stream):
            start(self._regions[0].elements)
        done.record(taken.put_stream)
        while not done.query():
            check()
            time.sleep(_DEVICE_POLL_S)

    def finish(self) -> None:
        """Mark the end of the copies; call it after the last `put`."""
        assert self._channel is not None, "staged"
        with self._runtime.use(self._channel.put_stream):
            for flat in self._regions:
                flat.copy_back(self._runtime.copy)
        self._release(self._channel)
        with self._lock:
            self._is_finished = self._is_over = True
        self._pass_gate()

    def discard(self) -> None:
        """Give up after a failure: nothing is reused before the copies under way are done. No effect when finished."""
        if self._regions and self._channel is not None:
            last_fetch = self._runtime.make_event()
            last_fetch.record(self._channel.fetch_stream)
            self._channel.put_stream.wait_event(last_fetch)
            self._release(self._channel)
        with self._lock:
            was_over, self._is_over = self._is_over, True
        if self._gate is not None and not was_over:
            self._gate.let_pass(self._number)  # without a result

    def order_ahead(self) -> bool:
        """Let the current stream wait for the result, which may still be to come; return False if streams cannot."""
        if self._gate is None:
            return False
        stream = self._runtime.current_stream()
        if not self._gates.can_wait(stream):
            return False
        with self._lock:
            if not self._is_over:
                self._is_awaited = True
                self._runtime.wait_word(stream, self._gate.word, self._number)
                return True
        self.order_stream()
        return True

    def order_stream(self) -> None:
        """Let the current stream wait for the result; no effect unless finished."""
        if self._is_finished:
            self._runtime.current_stream().wait_event(self._done)

    def is_complete(self) -> bool:
        """Return True if the tensors hold the result now."""
        return self._is_finished and self._done.query()

    def result_stream(self) -> AbstractContextManager[object]:
        """Return a context in which the current stream holds the result."""
        if not self._is_finished or self._channel is None:
            return contextlib.nullcontext()
        return self._runtime.use(self._channel.put_stream)

    def _flatten(self, region: DeviceRegion, dtype: torch.dtype, channel: DeviceChannel) -> FlatRegion:
        """Return the region's elements; a copy of strided ones is made before what comes next on the stream."""
        stream = channel.fetch_stream if region.is_input else channel.put_stream
        with self._runtime.use(stream):
            return FlatRegion(region, dtype, self._runtime.copy)

    def _pass_gate(self) -> None:
        """Let streams pass that wait for this collective, once its last copy is done."""
        if not self._is_awaited or self._gate is None:
            return
        try:
            self._done.synchronize()
        finally:
            self._gate.let_pass(self._number)

    def _release(self, channel: DeviceChannel) -> None:
        self._done.record(channel.put_stream)
        for stream in (channel.fetch_stream, channel.put_stream):
            for flat in self._regions:
                flat.keep(functools.partial(self._runtime.keep, stream=stream))
        if self._buffer is not None:
            self._buffer.set_busy(self._done)
        self._regions, self._inputs, self._outputs = [], [], []
        self._host, self._buffer = torch.empty(0), None
        self._fetched.clear()


class DeviceBridge:
    """Bridge of one group: its streams and staging memory by device and channel, made when they are first needed."""

    def __init__(
        self, make_runtime: Callable[[torch.device], StreamRuntime] = CudaRuntime, *, orders_streams: bool = True
    ) -> None:
        """`make_runtime` gives a device's streams; with `orders_streams` False, waits block the caller's thread."""
        self._make_runtime, self._orders_streams = make_runtime, orders_streams
        self._runtimes: dict[torch.device, StreamRuntime] = {}
        self._gates: dict[torch.device, StreamGates] = {}
        self._channels: dict[tuple[torch.device, int], DeviceChannel] = {}
        self._entered: set[tuple[torch.device, int]] = set()
        self._lock = threading.Lock()

    def open(self, device: torch.device) -> StagedMessage:
        """Start a collective on tensors of a device; its message is what the current stream leaves in them.

        Raises:
            CommunicationError: The stream is being captured in a graph, which cannot contain the host's part.
        """
        if device not in self._runtimes:
            self._runtimes[device] = self._make_runtime(device)
            self._gates[device] = StreamGates(
                self._runtimes[device], lambda: self._streams(device), is_enabled=self._orders_streams
            )
        return StagedMessage(
            device, self._runtimes[device], lambda channel: self._enter_channel(device, channel), self._gates[device]
        )

    def close(self) -> None:
        """Free the staging memory; no collective may be under way."""
        for channel in self._channels.values():
            channel.pool.close()
        self._channels.clear()

    def _streams(self, device: torch.device) -> list[tuple[Any, Any]]:
        parts = [self._channel(device, index) for index in range(NUM_CHANNELS)]
        return [(part.fetch_stream, part.put_stream) for part in parts]

    def _enter_channel(self, device: torch.device, index: int) -> DeviceChannel:
        """Return the channel's part on a device; called in the thread of the channel alone."""
        if (device, index) not in self._entered:
            self._runtimes[device].enter_thread()
            self._entered.add((device, index))
        return self._channel(device, index)

    def _channel(self, device: torch.device, index: int) -> DeviceChannel:
        with self._lock:
            if (device, index) not in self._channels:
                self._channels[device, index] = DeviceChannel(self._runtimes[device])
            return self._channels[device, index]


def fetch_segments(staged: StagedMessage, bounds: Sequence[int], num_blocks: int = 1) -> None:
    """Start copying all segments of a staged message to the host, and return when the first of them is there.

    The host calls collectives long before the device reaches them; the time of a collective starts here. The first
    segments of all blocks come first, as programs run them.
    """
    num_segments = (len(bounds) - 1) // num_blocks
    for segment in sorted(range(len(bounds) - 1), key=lambda index: index % num_segments):
        staged.fetch(segment, bounds[segment], bounds[segment + 1])
    staged.wait_ready()


def paced_instructions(
    program: RankProgram,
    segments: SegmentMarks,
    staged: StagedMessage,
    message: Tensor,
    reduction: ReduceOperation | None,
    num_ranks: int,
) -> Iterator[Instruction]:
    """Yield a program's instructions, each when its segments are on the host; finished segments go to the device.

    Args:
        program: The program; an instruction must be executed before the next one is asked for.
        segments: Marks of the program.
        staged: The message, whose segments were fetched.
        message: Its host memory.
        reduction: Prepares and finishes segments; a segment of an average is divided when nobody reads it any more.
            None for a collective that only copies.
        num_ranks: Ranks of the group.
    """
    bounds = segments.bounds
    ready = segments.last_use if reduction is not None and reduction.averages else segments.last_arrival

    def get(segment: int) -> None:
        staged.wait_fetched(segment)
        if reduction is not None:
            reduction.prepare(message[bounds[segment] : bounds[segment + 1]])

    def put(segment: int) -> None:
        if reduction is not None and staged.has_output(bounds[segment], bounds[segment + 1]):
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
