"""What ranks with a device of threads run: importable, because real processes import it."""

import contextlib
import os
import queue
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ringweave.comm.bridge import DeviceBridge
from ringweave.comm.engine.executor import allocate_pages
from ringweave.comm.native_backend import OrderedNccl
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

    def touch(self, stream: ThreadStream, *, is_to_device: bool) -> None:
        stream.ops.put(lambda: None)

    def make_word(self) -> torch.Tensor | None:
        return torch.zeros(1, dtype=torch.int32)

    def wait_word(self, stream: ThreadStream, word: torch.Tensor, number: int) -> None:
        def wait() -> None:
            while word.item() < number:
                time.sleep(MAX_DELAY_S)

        stream.ops.put(wait)


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


class Script:
    """A script with tensors on the device of threads of its rank."""

    def __init__(self, *, orders_streams: bool = True) -> None:
        self.device = ThreadDevice(100 * dist.get_rank())
        runtime: Any = self.device
        self.group: Any = dist.group.WORLD
        self.group._bridge = DeviceBridge(lambda _: runtime, orders_streams=orders_streams)

    def place(self, content: torch.Tensor) -> OnDevice:
        """A tensor on the device, which its stream fills with the content."""
        memory = torch.zeros_like(content)
        self.device.copy(memory, content)
        made: Any = memory.as_subclass(OnDevice)
        return made

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the device's stream sees; waits for it."""
        out = torch.zeros(tensor.shape, dtype=tensor.dtype)
        self.device.copy(out, tensor.as_subclass(torch.Tensor))
        self.synchronize()
        return out

    def synchronize(self) -> None:
        event = self.device.make_event()
        event.record(self.device.script)
        event.synchronize()

    def close(self) -> None:
        self.group._bridge.close()


def on_device(parts: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Parts of a tensor on the device, which are on it too."""
    return [part.as_subclass(OnDevice) for part in parts]


def exchange_on_a_device_of_threads(num_collectives: int, largest: int) -> dict[str, dict[str, int]]:
    """Checked collectives on blocks and broadcasts, as scripts call them; how many went by which schedule."""
    rank, size, script, rng = dist.get_rank(), dist.get_world_size(), Script(), random.Random(11)
    for number in range(num_collectives):
        count, dtype = rng.choice([1, 1000, largest]), rng.choice([torch.float32, torch.bfloat16, torch.int64])
        is_async, as_list, root = rng.random() < 0.5, rng.random() < 0.5, rng.randrange(size)
        blocks = rank_functions.inputs(count, dtype, seed=number)
        wholes = rank_functions.inputs(size * count, dtype, seed=number)
        kind, work = rng.choice(["allgather", "reduce-scatter", "broadcast"]), None
        if kind == "allgather":
            out, wanted = script.place(torch.zeros(size * count, dtype=dtype)), torch.cat(blocks)
            own = script.place(blocks[rank])
            if as_list:
                work = dist.all_gather(on_device(out.chunk(size)), own, async_op=is_async)
            else:
                work = dist.all_gather_into_tensor(out, own, async_op=is_async)
        elif kind == "reduce-scatter":
            out = script.place(torch.zeros(count, dtype=dtype))
            wanted = rank_functions.expected(wholes, dist.ReduceOp.SUM).chunk(size)[rank]
            whole = script.place(wholes[rank])
            if as_list:
                work = dist.reduce_scatter(out, on_device(whole.chunk(size)), async_op=is_async)
            else:
                work = dist.reduce_scatter_tensor(out, whole, async_op=is_async)
        else:
            out, wanted = script.place(blocks[rank]), blocks[root]
            work = dist.broadcast(out, root, async_op=is_async)
        if work is not None:
            work.wait()
        assert torch.equal(script.read(out), wanted), (number, kind, count, dtype, is_async, as_list)
    script.close()
    return script.group.collectives_by_schedule()


class GlooOnStreams:
    """In the place of NCCL's backend: Gloo, run by the current stream."""

    def __init__(self, gloo: Any, device: ThreadDevice) -> None:
        self.gloo, self.device = gloo, device

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> None:
        self.device.current_stream().ops.put(lambda: self.gloo.allreduce(tensors, opts).wait())

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> None:
        self.device.current_stream().ops.put(lambda: self.gloo.broadcast(tensors, opts).wait())

    def abort(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


class OrderedGloo(OrderedNccl):
    """Makes Gloo's backends in NCCL's place."""

    device: ThreadDevice
    orders: list[tuple[int, ...]]

    def make(self, order: tuple[int, ...], prefix: str) -> Any:
        self.orders.append(order)
        store, place = dist.PrefixStore(prefix, self._store), order.index(self._group.group_rank)
        return GlooOnStreams(dist.ProcessGroupGloo(store, place, len(order), self._timeout), self.device)


def try_nccl_beside_schedules(num_collectives: int) -> tuple[list[tuple[int, ...]], tuple[int, ...], dict[str, Any]]:
    """(orders of NCCL's communicators, order of the plan's ring, counters) after checked allreduces and broadcasts."""
    rank, size, script = dist.get_rank(), dist.get_world_size(), Script()
    group, count = script.group, 60_000
    nccl = OrderedGloo(group._store, group.members, timedelta(seconds=60))
    nccl.device, nccl.orders = script.device, []
    group._native.ordered_nccl = nccl
    for number in range(num_collectives):
        inputs, root = rank_functions.inputs(count, torch.float32, seed=number), number % size
        summed, shared = script.place(inputs[rank]), script.place(inputs[rank])
        dist.all_reduce(summed)
        dist.broadcast(shared, root)
        assert torch.equal(script.read(summed), rank_functions.expected(inputs, dist.ReduceOp.SUM)), number
        assert torch.equal(script.read(shared), inputs[root]), number
    order = group._engine._selector.wait_for_plan().ring_order
    script.close()
    return nccl.orders, order, group.collectives_by_schedule()


def scatter_before_the_others_come(num_collectives: int, *, orders_streams: bool) -> list[bool]:
    """For each synchronous reduce-scatter, whether Python went on before rank 1 had called its own.

    That is what FSDP2 needs in its backward pass: the next layer's kernels are enqueued meanwhile.
    """
    rank, size, script = dist.get_rank(), dist.get_world_size(), Script(orders_streams=orders_streams)
    store: Any = dist.distributed_c10d._get_default_store()
    went_on = []
    for number in range(num_collectives):
        if rank == 1:
            with contextlib.suppress(RuntimeError):  # until rank 0 has gone on, or is taken to wait
                store.wait([f"went on {number}"], timedelta(seconds=60 if orders_streams else 1))
            store.set(f"called {number}", "1")
        whole, out = script.place(torch.arange(size * 50_000.0)), script.place(torch.zeros(50_000))
        dist.reduce_scatter_tensor(out, whole)
        went_on.append(not store.check([f"called {number}"]))
        if rank == 0:
            store.set(f"went on {number}", "1")
        assert torch.equal(script.read(out), size * torch.arange(size * 50_000.0).chunk(size)[rank])
    script.close()
    return went_on


def fail_on_a_device_of_threads(*, orders_streams: bool) -> tuple[bool, str]:
    """Whether `wait` returned, and what the others are told, when rank 1 dies in the middle of a message of a device.

    A stream that waits for the result goes on at once.
    """
    script = Script(orders_streams=orders_streams)
    dist.all_reduce(script.place(torch.ones(1_000_000)))
    script.synchronize()
    if dist.get_rank() == 1:
        os._exit(3)
    has_returned = False
    for _ in range(2):
        try:
            dist.all_reduce(script.place(torch.ones(1_000_000)))
        except RuntimeError as error:
            script.synchronize()
            script.close()
            return has_returned, str(error)
        script.synchronize()
        has_returned = True
    raise AssertionError("it was not told")
