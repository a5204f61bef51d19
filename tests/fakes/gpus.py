"""A world of fake GPUs in the place of torch.cuda: simulated devices, a current one for each thread, and their tensors.

What torch.cuda would do to a GPU happens to a `SimulatedDevice`: streams run late, so what waits for nothing reads old
values. Tensors lie in host memory and know their GPU; in-place operations are enqueued, and all others wait.
"""

import contextlib
import ctypes
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.comm.bridge.simulated_device import LATE, Event, SimulatedDevice, Stream, WordWait

GIB = 2**30
PATIENCE_S = 20.0
NOT_SUPPORTED = 801
"""Error of CUDA's driver."""
_POLLS_UNTIL_IT_MOVES = 20
_IN_PLACE = {"add_", "sub_", "mul_", "div_", "fill_", "zero_"}
_TO_HOST = {"cpu", "tolist", "item", "numpy"}
_WITHOUT_VALUES = {
    *("__get__", "numel", "size", "dim", "stride", "data_ptr", "storage_offset", "is_contiguous", "element_size"),
    *("as_strided", "view", "reshape", "flatten", "detach", "split", "__getitem__", "requires_grad_", "empty_like"),
}


class WrongGpuError(RuntimeError):
    """Something was done on a GPU that is not the one meant."""


class GpuStream(Stream):
    """As torch.cuda.Stream; threads share the world's lock."""

    device: "Gpu"

    def enqueue(self, op: Any) -> None:
        with self.device.world.lock:
            super().enqueue(op)

    def run_until(self, place: int) -> None:
        with self.device.world.lock:
            super().run_until(place)

    def record_event(self) -> "GpuEvent":
        event = GpuEvent(self.device.world)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.run_until(self.num_enqueued)

    @property
    def cuda_stream(self) -> int:
        """The handle that the driver knows."""
        self.device.world.streams_by_handle[id(self)] = self
        return id(self)


class GpuWordWait(WordWait):
    """A stream waits for a word at an address, and those who wait for the stream let other threads go on."""

    def __init__(self, world: "FakeGpus", address: int, number: int) -> None:
        super().__init__(torch.zeros(1), number)
        self.world, self.at = world, ctypes.c_int32.from_address(address)

    def query(self) -> bool:
        return (self.at.value - self.number) % 2**32 < 2**31

    def synchronize(self) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not self.query():
            assert time.monotonic() < deadline_s, "a stream waits for a word that nobody writes"
            self.world.changed.wait(0.001)


class GpuEvent(Event):
    """As torch.cuda.Event; without a stream it is recorded on that of the current GPU."""

    def __init__(self, world: "FakeGpus", *, enable_timing: bool = False, blocking: bool = False) -> None:
        super().__init__()
        del blocking
        self.world, self.enable_timing, self.num_polls = world, enable_timing, 0

    def record(self, stream: Any = None) -> None:
        stream = stream or self.world.current_stream()
        if self.stream is not None and self.stream.device is not stream.device:
            raise WrongGpuError("the event belongs to another GPU")
        super().record(stream)

    def synchronize(self) -> None:
        with self.world.lock:
            super().synchronize()

    def query(self) -> bool:
        """A GPU is late, but who polls for long sees it move."""
        with self.world.lock:
            self.num_polls += 1
            while self.num_polls > _POLLS_UNTIL_IT_MOVES and self.stream and not super().query() and self.stream.step():
                pass
            return super().query()

    def elapsed_time(self, end: "GpuEvent") -> float:
        """Milliseconds of virtual time, between two events of one GPU."""
        assert self.enable_timing
        assert end.enable_timing
        assert self.stream is not None
        assert end.stream is not None
        if self.stream.device is not end.stream.device:
            raise WrongGpuError("no time passes between events of two GPUs")
        assert self.query(), "passed"
        assert end.query(), "passed"
        return 1000 * (end.time_s - self.time_s)


class Gpu(SimulatedDevice):
    """One of the world's."""

    stream_class = GpuStream

    def __init__(self, world: "FakeGpus", index: int, kind: str) -> None:
        self.world, self.index, self.name = world, index, torch.device("cuda", index)
        super().__init__(kind, seed=index)
        self.generator = torch.Generator().manual_seed(index)
        self.total_bytes, self.used_by_others, self.reserved_bytes = 80 * GIB, 0, 0
        self.allocated_bytes = self.peak_bytes = 0

    def place(self, tensor: torch.Tensor) -> "OnGpu":
        """The same memory, on this GPU."""
        self.world.contexts.add(self.index)
        with torch._C.DisableTorchFunctionSubclass():
            made: Any = tensor.as_subclass(OnGpu)
        made.gpu = self
        return made


class OnGpu(torch.Tensor):
    """A tensor in host memory that says it is on a GPU of the world."""

    gpu: Gpu
    is_cpu = False  # type: ignore[assignment]
    is_cuda = True  # type: ignore[assignment]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.gpu.name

    def record_stream(self, stream: Any) -> None:  # type: ignore[override]
        """Nothing: this memory is not reused."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        gpus = list({id(each.gpu): each.gpu for each in _flatten(args) if isinstance(each, OnGpu)}.values())
        with torch._C.DisableTorchFunctionSubclass():
            if name == "copy_":
                return _copy(args[0], args[1], **(kwargs or {}))
            if not gpus or getattr(func, "__module__", "") == "torch.distributed.distributed_c10d":
                return func(*args, **(kwargs or {}))
            if len(gpus) > 1 or any(type(each) is torch.Tensor and each.ndim for each in _flatten(args)):
                raise WrongGpuError(f"{name}: tensors of GPUs {sorted(gpu.index for gpu in gpus)}, or of the host")
            stream = gpus[0].world.current_stream(gpus[0].name)
            if name in _IN_PLACE:
                plain = [_plain(each) for each in args]
                stream.enqueue(lambda: func(*plain, **(kwargs or {})))
                return args[0]
            if name not in _WITHOUT_VALUES:
                stream.synchronize()
            found = func(*args, **(kwargs or {}))
        if name in _TO_HOST or not isinstance(found, torch.Tensor) or isinstance(found, OnGpu):
            return _plain(found).clone() if name == "cpu" else found
        return gpus[0].place(found)


class GpuFuture(torch.futures.Future[Any]):
    """As torch's: refuses tensors of GPUs that it was not made for."""

    def __init__(self, *, devices: Any = None) -> None:
        super().__init__()
        self.gpus = {torch.device(each) for each in devices or ()}

    def __class_getitem__(cls, of: Any) -> Any:
        """For annotations of modules that are imported meanwhile."""
        return cls

    def set_result(self, result: Any) -> None:
        for each in _flatten(result):
            if isinstance(each, OnGpu) and each.device not in self.gpus:
                raise WrongGpuError(f"a future of {self.gpus or 'the host'} gets a tensor on {each.device}")
        super().set_result(result)


class FakeGpus(TorchFunctionMode):
    """GPUs in the place of torch.cuda's; as a context, they take what a thread creates with device="cuda:1"."""

    def __init__(self, num_gpus: int = 4, kind: str = LATE) -> None:
        super().__init__()
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.contexts: set[int] = set()
        """GPUs on which something was done: each takes some hundred MB in every process that does so."""
        self.fraction = 1.0
        self.streams_by_handle: dict[int, GpuStream] = {}
        self.num_word_waits, self.wait_error = 0, 0
        """Calls of the driver that let a stream wait, and the error that they return."""
        self._local = threading.local()
        self.gpus = [Gpu(self, index, kind) for index in range(num_gpus)]

    def install(self, monkeypatch: pytest.MonkeyPatch) -> "FakeGpus":
        """Replaces what ringweave calls of torch.cuda, torch.accelerator and the driver's bindings."""
        driver = SimpleNamespace(
            cuMemHostGetDevicePointer=lambda address, flags: (0, address), cuStreamWaitValue32=self.wait_value
        )
        for name in ("cuda", "cuda.bindings"):
            monkeypatch.setitem(sys.modules, name, SimpleNamespace(driver=driver))
        of_cuda: dict[str, Any] = {
            "is_available": lambda: True,
            "is_initialized": lambda: bool(self.contexts),
            "device_count": lambda: len(self.gpus),
            "current_device": lambda: self.current,
            "set_device": self.set_device,
            "device": self.device,
            "current_stream": self.current_stream,
            "stream": self.stream,
            "Stream": lambda device=None, priority=0: self.gpu(device).make_stream(),
            "Event": lambda **options: GpuEvent(self, **options),
            "synchronize": lambda device=None: self.gpu(device).synchronize(),
            "is_current_stream_capturing": lambda: bool(self.gpu(None)) and False,
            "default_generators": [gpu.generator for gpu in self.gpus],
            "get_rng_state": lambda device=None: self.gpu(device).generator.get_state(),
            "set_rng_state": lambda state, device=None: self.gpu(device).generator.set_state(state),
            "cudart": lambda: SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0),
            **self._memory_functions(),
        }
        for name, value in of_cuda.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.accelerator, "current_stream", self.current_stream)
        monkeypatch.setattr(torch.accelerator, "synchronize", of_cuda["synchronize"])
        monkeypatch.setattr(torch.futures, "Future", GpuFuture)
        return self

    def wait_value(self, handle: int, address: int, value: int, flags: int) -> tuple[int]:
        """As cuStreamWaitValue32, with the flag of "at least"."""
        assert flags == 0
        assert 0 <= value < 2**32
        if not self.wait_error:
            self.num_word_waits += 1
            self.streams_by_handle[handle].enqueue(GpuWordWait(self, address, value))
        return (self.wait_error,)

    def _memory_functions(self) -> dict[str, Callable[..., Any]]:
        def reset_peak(device: Any = None) -> None:
            gpu = self.gpu(device)
            gpu.peak_bytes = gpu.allocated_bytes

        def info(device: Any = None) -> tuple[int, int]:
            gpu = self.gpu(device)
            return gpu.total_bytes - gpu.used_by_others - gpu.reserved_bytes, gpu.total_bytes

        def empty_cache() -> None:
            for gpu in self.gpus:
                gpu.reserved_bytes = gpu.allocated_bytes

        return {
            "mem_get_info": info,
            "memory_reserved": lambda device=None: self.gpu(device).reserved_bytes,
            "max_memory_allocated": lambda device=None: self.gpu(device).peak_bytes,
            "reset_peak_memory_stats": reset_peak,
            "get_per_process_memory_fraction": lambda device=None: self.gpu(device) and self.fraction,
            "empty_cache": empty_cache,
        }

    @property
    def current(self) -> int:
        """Of this thread; a thread begins with the first."""
        return getattr(self._local, "current", 0)

    def index(self, device: Any) -> int:
        if isinstance(device, int):
            return device
        index = None if device is None else torch.device(device).index
        return self.current if index is None else index

    def gpu(self, device: Any) -> Gpu:
        """The GPU of that name, which is touched; None and "cuda" name the current one."""
        index = self.index(device)
        self.contexts.add(index)
        return self.gpus[index]

    def set_device(self, device: Any) -> None:
        self._local.current = self.gpu(device).index

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before = self.current
        self._local.current = self.index(device)
        try:
            yield
        finally:
            self._local.current = before

    def current_stream(self, device: Any = None) -> GpuStream:
        gpu = self.gpu(device)
        streams: dict[int, GpuStream] = getattr(self._local, "streams", {})
        return streams.get(gpu.index, gpu.script)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def stream(self, stream: GpuStream) -> Iterator[None]:
        before, current = getattr(self._local, "streams", {}), self.current
        self._local.streams = {**before, stream.device.index: stream}
        self._local.current = stream.device.index
        try:
            yield
        finally:
            self._local.streams, self._local.current = before, current

    def zeros(self, index: int, *shape: int) -> OnGpu:
        return self.gpus[index].place(torch.zeros(shape))

    def model(self, *indices: int) -> torch.nn.Module:
        """A model with a parameter on each of these GPUs."""
        return torch.nn.ParameterList([torch.nn.Parameter(self.zeros(index, 3)) for index in indices])

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is None or torch.device(device).type != "cuda":
            return func(*args, **kwargs)
        return self.gpu(device).place(func(*args, **{**kwargs, "device": "cpu"}))


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Enqueued on the current stream of the target, or of the source; waits if one end is in host memory."""
    gpu = next(each.gpu for each in (target, source) if isinstance(each, OnGpu))
    to, come_from, stream = _plain(target), _plain(source), gpu.world.current_stream(gpu.name)

    def run() -> None:
        with torch.inference_mode():  # one end may be made in it
            to.copy_(come_from)

    stream.enqueue(run)
    if not non_blocking and not (isinstance(target, OnGpu) and isinstance(source, OnGpu)):
        stream.synchronize()
    return target


def _plain(value: Any) -> Any:
    return value.detach().as_subclass(torch.Tensor) if isinstance(value, OnGpu) else value


def _flatten(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for each in value:
            yield from _flatten(each)
    else:
        yield value
