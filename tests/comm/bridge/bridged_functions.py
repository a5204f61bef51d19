"""What ranks with a device of threads run: importable, because real processes import it."""

import contextlib
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from ringweave.comm.bridge import DeviceBridge
from ringweave.comm.engine.executor import allocate_pages
from tests.comm import rank_functions

MAX_DELAY_S = 0.002


class OnDevice(torch.Tensor):
    """A tensor in host memory that says it is on an accelerator; what is computed with it is not."""

    device = torch.device("cuda")  # type: ignore[assignment]
    is_cpu = False  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class ThreadStream:
    """A thread that does one thing after the other, each a little later."""

    def __init__(self, seed: int) -> None:
        self.ops: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self.random = random.Random(seed)
        threading.Thread(target=self._run, daemon=True).start()

    def wait_event(self, event: "ThreadEvent") -> None:
        passed = event.passed
        self.ops.put(passed.wait)

    def _run(self) -> None:
        while True:
            op = self.ops.get()
            time.sleep(self.random.uniform(0, MAX_DELAY_S))
            op()
            del op


class ThreadEvent:
    """Passes when its stream comes to it."""

    def __init__(self) -> None:
        self.passed = threading.Event()
        self.passed.set()

    def record(self, stream: ThreadStream) -> None:
        self.passed = threading.Event()
        stream.ops.put(self.passed.set)

    def synchronize(self) -> None:
        self.passed.wait()

    def query(self) -> bool:
        return self.passed.is_set()


class ThreadDevice:
    """Streams of threads, with random delays; each thread of the host has a current stream."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.script = ThreadStream(seed)
        self.local = threading.local()

    def enter_thread(self) -> None:
        pass

    def current_stream(self) -> ThreadStream:
        return getattr(self.local, "stream", self.script)

    def make_stream(self) -> ThreadStream:
        self.seed += 1
        return ThreadStream(self.seed)

    def make_event(self) -> ThreadEvent:
        return ThreadEvent()

    @contextlib.contextmanager
    def use(self, stream: ThreadStream) -> Iterator[None]:
        before, self.local.stream = self.current_stream(), stream
        yield
        self.local.stream = before

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        def run() -> None:
            with torch.inference_mode():
                target.copy_(source)

        self.current_stream().ops.put(run)

    def keep(self, tensor: torch.Tensor, stream: ThreadStream) -> None:
        self.copy_of = tensor  # the threads' closures keep it

    def pin(self, num_bytes: int) -> torch.Tensor:
        return allocate_pages(num_bytes, torch.uint8)


def reduce_on_a_device_of_threads(num_collectives: int, largest: int) -> dict[str, dict[str, int]]:
    """Checked allreduces, several under way at once; how many went by which schedule."""
    rank, size, device = dist.get_rank(), dist.get_world_size(), ThreadDevice(100 * dist.get_rank())
    group: Any = dist.group.WORLD
    runtime: Any = device
    group._bridge = DeviceBridge(lambda _: runtime)
    rng = random.Random(7)
    pending = []
    for number in range(num_collectives):
        num_elements = rng.choice([1, 3, 1000, largest // 3, largest])
        dtype, op = (
            rng.choice([torch.float32, torch.bfloat16, torch.int64]),
            rng.choice([dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX]),
        )
        mine = rank_functions.inputs(num_elements, dtype, seed=number)
        memory = torch.zeros(num_elements, dtype=dtype)
        with device.use(device.script):
            device.copy(memory, mine[rank])
        work = group.allreduce([memory.as_subclass(OnDevice)], op)
        pending.append((work, memory, rank_functions.expected(mine, op)))
        if len(pending) == 4 or number == num_collectives - 1:
            for each, result, wanted in pending:
                each.wait()
                out = torch.zeros_like(result)
                with device.use(device.script):
                    device.copy(out, result)
                event = device.make_event()
                event.record(device.script)
                event.synchronize()
                assert torch.equal(out, wanted), (number, op, result.dtype, result.shape)
                assert each.is_completed()
            pending.clear()
    assert size == dist.get_world_size()
    return group.collectives_by_schedule()


def fail_on_a_device_of_threads() -> str:
    """What the others are told when rank 1 dies in the middle of a message of a device."""
    import os

    group: Any = dist.group.WORLD
    runtime: Any = ThreadDevice(dist.get_rank())
    group._bridge = DeviceBridge(lambda _: runtime)
    group.allreduce([torch.ones(1_000_000).as_subclass(OnDevice)], dist.ReduceOp.SUM).wait()
    if dist.get_rank() == 1:
        os._exit(3)
    work = group.allreduce([torch.ones(1_000_000).as_subclass(OnDevice)], dist.ReduceOp.SUM)
    try:
        work.wait()
    except RuntimeError as error:
        group._bridge.close()
        return str(error)
    raise AssertionError("it was not told")
