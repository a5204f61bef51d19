"""A device in this process: streams that run as late, as early or as randomly as they may, and memory that is reused.

One thread at a time drives a device. What is enqueued runs when an event that comes later is waited for, or, on eager
streams, as soon as everything before it has run. Time is virtual: an operation takes the seconds that it is given.
"""

import contextlib
import random
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

BLOCK_BYTES, NUM_BLOCKS = 1 << 14, 64
LATE, EARLY, RANDOM = "late", "early", "random"


class Stream:
    """A queue of what is enqueued, run in order."""

    def __init__(self, device: "SimulatedDevice", *, eager: bool) -> None:
        self.device, self.eager = device, eager
        self.ops: deque[Callable[[], object] | Event] = deque()
        self.num_done, self.now_s = 0, 0.0
        self.times_s = [0.0]
        """When each place was reached."""

    @property
    def num_enqueued(self) -> int:
        return self.num_done + len(self.ops)

    def wait_event(self, event: "Event") -> None:
        self.enqueue(event.snapshot())

    def enqueue(self, op: "Callable[[], object] | Event") -> None:
        """What is enqueued may return the seconds that it takes, as a float."""
        self.ops.append(op)
        self.device.advance()

    def run_until(self, place: int) -> None:
        """Runs everything up to a place, and what that waits for."""
        while self.num_done < place:
            self.device.wait_queue(self)
            op = self.ops[0]
            if isinstance(op, Event):
                op.synchronize()
            if self.num_done < place and self.ops[0] is op:
                self._run()

    def step(self) -> bool:
        """Runs the next one, if nothing holds it up."""
        if not self.ops or (isinstance(self.ops[0], Event) and not self.ops[0].query()):
            return False
        if self.device.holder_of_queue(self) is not None:
            return False
        self._run()
        return True

    def _run(self) -> None:
        op = self.ops.popleft()
        self.num_done += 1
        if isinstance(op, Event):
            self.now_s = max(self.now_s, op.time_s)
        else:
            took_s = op()
            self.now_s += took_s if isinstance(took_s, float) else 0.0
        self.times_s.append(self.now_s)


class Event:
    """A place in a stream; without one it has passed."""

    def __init__(self) -> None:
        self.stream: Stream | None = None
        self.place = 0

    def record(self, stream: Stream) -> None:
        self.stream, self.place = stream, stream.num_enqueued

    def snapshot(self) -> "Event":
        """What a later record does not change."""
        taken = Event()
        taken.stream, taken.place = self.stream, self.place
        return taken

    def query(self) -> bool:
        return self.stream is None or self.stream.num_done >= self.place

    @property
    def time_s(self) -> float:
        """When it passed."""
        return 0.0 if self.stream is None else self.stream.times_s[self.place]

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.run_until(self.place)
            self.stream.device.advance()


class WordWait(Event):
    """A stream waits until a word in host memory, which counts up modulo 2^32, has come to a number."""

    def __init__(self, word: torch.Tensor, number: int) -> None:
        super().__init__()
        self.word, self.number = word, number

    def query(self) -> bool:
        return (self.word.item() - self.number) % 2**32 < 2**31

    def synchronize(self) -> None:
        assert self.query(), "a stream waits for a word that nobody writes"


class SimulatedDevice:
    """Late: the bridge's streams only when forced, the script's at once. Early: the other way round."""

    stream_class = Stream
    has_one_queue = False
    """A stream that waits for a word holds up all others, as with CUDA_DEVICE_MAX_CONNECTIONS=1."""

    def __init__(self, kind: str, seed: int = 0) -> None:
        self.kind = kind
        self.random = random.Random(seed)
        self.streams: list[Stream] = []
        self.script = self.stream_class(self, eager=kind == LATE)
        self.callbacks = self.stream_class(self, eager=kind == LATE)
        self.streams += [self.script, self.callbacks]
        self.current = self.script
        self._arena = np.full(NUM_BLOCKS * BLOCK_BYTES, 255, dtype=np.uint8)
        self._free: list[tuple[int, list[Event]]] = [(block, []) for block in range(NUM_BLOCKS)]
        self._kept: dict[int, list[Stream]] = {}

    def enter_thread(self) -> None:
        pass

    def current_stream(self) -> Stream:
        return self.current

    def make_stream(self) -> Stream:
        self.streams.append(self.stream_class(self, eager=self.kind == EARLY))
        return self.streams[-1]

    def make_event(self) -> Event:
        return Event()

    @contextlib.contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        to, come_from = self._address(target), self._address(source)
        self.current.enqueue(lambda: to.copy_(come_from))

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        block = self._block(tensor)
        if block is not None:
            self._kept.setdefault(block, []).append(stream)

    def pin(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    def touch(self, stream: Stream, *, is_to_device: bool) -> None:
        """What is polled for comes to pass, unless something holds it up."""
        stream.enqueue(lambda: None)
        while stream.step():
            pass

    def make_word(self) -> torch.Tensor | None:
        return torch.zeros(1, dtype=torch.int32)

    def wait_word(self, stream: Stream, word: torch.Tensor, number: int) -> None:
        stream.enqueue(WordWait(word, number))

    def holder_of_queue(self, stream: Stream) -> WordWait | None:
        """What another stream in the only queue waits for."""
        others = [each for each in self.streams if self.has_one_queue and each is not stream and each.ops]
        heads = [each.ops[0] for each in others]
        return next((head for head in heads if isinstance(head, WordWait) and not head.query()), None)

    def wait_queue(self, stream: Stream) -> None:
        """Waits until no other stream holds this one up."""
        while (holder := self.holder_of_queue(stream)) is not None:
            holder.synchronize()

    def allocate(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory freed last first, if nothing that it is kept for is under way; it holds what it held."""
        for place in reversed(range(len(self._free))):
            block, kept_for = self._free[place]
            if all(event.query() for event in kept_for):
                del self._free[place]
                break
        else:
            raise AssertionError("out of memory")
        start = block * BLOCK_BYTES
        array: Any = self._arena[start : start + max(1, num_elements) * dtype.itemsize]
        weakref.finalize(array, self._freed, block)
        return torch.from_numpy(array).view(dtype)[:num_elements]

    def advance(self) -> None:
        """Runs what eager streams may; of random ones, some."""
        if self.kind == RANDOM:
            for _ in range(self.random.randrange(4)):
                self.random.choice(self.streams).step()
            return
        eager = [stream for stream in self.streams if stream.eager]
        while sum(stream.step() for stream in eager):
            pass

    def synchronize(self) -> None:
        """Runs everything."""
        for stream in self.streams:
            stream.run_until(stream.num_enqueued)

    def _freed(self, block: int) -> None:
        events = []
        for stream in self._kept.pop(block, []):
            events.append(Event())
            events[-1].record(stream)
        self._free.append((block, events))

    def _address(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same elements without a share in the memory's life, as a copy under way knows them."""
        block, start = self._block(tensor), tensor.data_ptr() - self._arena.ctypes.data
        if block is None:
            return tensor
        memory = torch.from_numpy(self._arena[start : (block + 1) * BLOCK_BYTES])
        return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())

    def _block(self, tensor: torch.Tensor) -> int | None:
        place = tensor.data_ptr() - self._arena.ctypes.data
        return place // BLOCK_BYTES if 0 <= place < self._arena.nbytes else None
