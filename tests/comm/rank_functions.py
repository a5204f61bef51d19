"""What the ranks of the tests run: importable, because real processes import it.

Every function runs inside an initialised process group; what it returns travels back to the test.
"""

import gc
import hashlib
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from ringweave.comm.engine import executor, reductions

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64)
COMPLEX = (torch.complex64, torch.complex128)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
ARITHMETIC = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT)
ORDER = (ReduceOp.MIN, ReduceOp.MAX)
BITS = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)


def digest(tensor: torch.Tensor) -> str:
    """Of the exact bits."""
    plain = tensor.detach().contiguous().view(-1)
    return hashlib.sha256(plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b"").hexdigest()


def everywhere(value: Any) -> list[Any]:
    """`value` of every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def inputs(num_elements: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """The tensors of all ranks: small whole numbers, so that every dtype holds every result exactly."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype in FLOAT8 or dtype == torch.bool else 3
    shape = (dist.get_world_size(), num_elements)
    return list(torch.randint(0, high, shape, generator=generator).to(dtype))


def expected(tensors: list[torch.Tensor], op: object) -> torch.Tensor:
    """What torch computes from all tensors in one process, in a wide dtype."""
    dtype = tensors[0].dtype
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    stacked = torch.stack([tensor.to(wide) for tensor in tensors])
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        return (stacked.amin(0) if op == ReduceOp.MIN else stacked.amax(0)).to(dtype)
    if op in BITS:
        functions = {ReduceOp.BAND: torch.bitwise_and, ReduceOp.BOR: torch.bitwise_or, ReduceOp.BXOR: torch.bitwise_xor}
        total = stacked[0]
        for other in stacked[1:]:
            total = functions[op](total, other)
        return total.to(dtype)
    if op == ReduceOp.PRODUCT:
        return stacked.prod(0).to(dtype)
    total = stacked.sum(0)
    if op == ReduceOp.AVG:
        size = dist.get_world_size()
        total = total / size if wide != torch.int64 else torch.div(total, size, rounding_mode="trunc")
    return total.to(dtype)


def check_every_op_and_dtype(num_elements: int) -> list[str]:
    """Every legal pair on a message of this length; returns what was checked."""
    checked = []
    for dtype in (*FLOATS, *INTEGERS, *COMPLEX, *FLOAT8, torch.bool):
        ops: list[object] = [*ARITHMETIC]
        ops += [] if dtype in COMPLEX else [*ORDER]
        ops += [*BITS] if dtype in INTEGERS or dtype == torch.bool else []
        for op in ops:
            if dtype == torch.bool and op in ARITHMETIC:
                continue
            tensors = inputs(num_elements, dtype, seed=len(checked))
            mine = tensors[dist.get_rank()].clone()
            dist.group.WORLD.allreduce([mine], op).wait()
            want = expected(tensors, op)
            if dtype in FLOAT8:  # rounded after every addition
                assert torch.allclose(mine.float(), want.float(), rtol=0.25, atol=0.25), (dtype, op)
            elif op == ReduceOp.AVG and dtype not in INTEGERS:  # a quotient is rounded in the dtype, not in float64
                assert torch.allclose(mine, want), (dtype, op)
            else:
                assert torch.equal(mine.view(torch.uint8), want.view(torch.uint8)), (dtype, op, mine[:8], want[:8])
            checked.append(f"{dtype} {op}")
    factor = dist._make_nccl_premul_sum(2.0)
    mine = torch.full((num_elements,), float(dist.get_rank()))
    dist.group.WORLD.allreduce([mine], factor).wait()
    assert (mine == 2 * sum(range(dist.get_world_size()))).all()
    return checked


def check_bits_equal_and_repeatable(num_elements: int) -> None:
    """Real numbers: the same bits on all ranks, and when run again."""
    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    mine = torch.randn(num_elements, generator=generator)
    digests = []
    for _ in range(3):
        result = mine.clone()
        dist.all_reduce(result)
        digests.append(digest(result))
    assert len(set(digests)) == 1, "differs from run to run"
    assert len(set(everywhere(digests[0]))) == 1, "differs between ranks"
    total = torch.stack(everywhere(mine)).double().sum(0)
    assert torch.allclose(result.double(), total, rtol=1e-5, atol=1e-5)


def check_shapes() -> None:
    """Empty, scalar, tiny, odd, transposed, strided and expanded-from views; the memory outside stays untouched."""
    rank, size = dist.get_rank(), dist.get_world_size()
    total = sum(range(1, size + 1))
    for shape in ((), (0,), (0, 5), (1,), (3,), (size - 1,), (7, 11, 13), (100_003,)):
        tensor = torch.full(shape, float(rank + 1))
        dist.all_reduce(tensor)
        assert torch.equal(tensor, torch.full(shape, float(total))), shape
    for num in (30, 300):
        whole = torch.full((num, num), float(rank + 1))
        dist.all_reduce(whole[:, ::2])
        assert (whole[:, ::2] == total).all()
        assert (whole[:, 1::2] == rank + 1).all()
        matrix = torch.arange(num * num, dtype=torch.float64).view(num, num)
        transposed = matrix.clone().t()
        dist.all_reduce(transposed)
        assert torch.equal(transposed, matrix.t() * size)
    lone = torch.full((1, 2), float(rank + 1))[:, 0]  # one element: contiguous, whatever its stride says
    dist.group.WORLD.allreduce([lone], ReduceOp.AVG).wait()
    assert lone.item() == total / size
    for num in (20, 300):  # the layout is each rank's own business
        mixed = torch.ones(num, num)
        mixed = mixed.t() if rank == 0 else mixed
        assert (dist.all_reduce(mixed, async_op=True).get_future().wait()[0] == size).all()
        assert (mixed == size).all()
    parameter = torch.nn.Parameter(torch.ones(200_000))
    dist.all_reduce(parameter.data)
    assert (parameter == size).all()
    with torch.inference_mode():
        frozen = torch.ones(200_000)
        dist.all_reduce(frozen)
        assert (frozen == size).all()


def check_many_in_flight() -> None:
    """Buckets of many sizes at once, waited for in another order, chained by futures."""
    size = dist.get_world_size()
    tensors = [torch.full((20_000 + 9_973 * i,), float(i)) for i in range(24)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    doubled = [work.get_future().then(lambda f: f.value()[0] * 2) for work in works[:12]]
    for work in reversed(works):
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
    for i, tensor in enumerate(tensors):
        assert (tensor == i * size).all()
    for i, future in enumerate(doubled):
        assert (future.wait() == 2 * i * size).all()
    assert works[3].result()[0] is tensors[3]
    chained = dist.all_reduce(torch.ones(50_000), async_op=True).get_future().then(lambda f: f.value()[0] * 2).wait()
    weight = torch.ones(50_000, requires_grad=True)
    (weight * chained).sum().backward()  # not an inference tensor
    assert weight.grad is not None


def check_collectives_in_callbacks() -> None:
    """What is chained on one collective waits for another, while more are in flight."""
    size = dist.get_world_size()

    def again(future: torch.futures.Future) -> torch.Tensor:
        return dist.all_reduce(future.value()[0], async_op=True).get_future().wait()[0]

    for _ in range(5):
        first = dist.all_reduce(torch.ones(50_000), async_op=True)
        second = dist.all_reduce(torch.ones(50_000), async_op=True)
        assert (first.get_future().then(again).wait() == size * size).all()
        second.wait()


def check_groups() -> None:
    """Overlapping groups, each with its own ranks, at the same time."""
    rank, size = dist.get_rank(), dist.get_world_size()
    evens, tail = list(range(0, size, 2)), list(range(1, size))
    groups = [(evens, dist.new_group(evens)), (tail, dist.new_group(tail)), ([0], dist.new_group([0]))]
    works = []
    for members, group in groups:
        if rank in members:
            tensor = torch.full((50_000,), float(rank))
            works.append((members, tensor, dist.all_reduce(tensor, group=group, async_op=True)))
    for members, tensor, work in works:
        work.wait()
        assert (tensor == sum(members)).all()


def check_other_collectives() -> None:
    """What the native backend does inside our group."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((4,), float(rank))
    dist.broadcast(tensor, src=1)
    assert (tensor == 1).all()
    gathered = torch.empty(size)
    dist.all_gather_into_tensor(gathered, torch.tensor([float(rank)]))
    assert gathered.tolist() == list(range(size))
    parts = [torch.empty(2) for _ in range(size)]
    dist.all_gather(parts, torch.full((2,), float(rank)))
    assert [part[0].item() for part in parts] == list(range(size))
    shard = torch.empty(3)
    dist.reduce_scatter_tensor(shard, torch.ones(3 * size))
    assert (shard == size).all()
    dist.reduce(tensor.fill_(1.0), dst=0)
    assert rank != 0 or (tensor == size).all()
    received = torch.empty(size)
    dist.all_to_all_single(received, torch.full((size,), float(rank)))
    assert received.tolist() == list(range(size))
    scattered = torch.empty(1)
    dist.scatter(scattered, [torch.tensor([float(i)]) for i in range(size)] if rank == 0 else None, src=0)
    assert scattered.item() == rank
    if rank == 0:
        dist.send(torch.ones(3), dst=1)
    elif rank == 1:
        arrived = torch.zeros(3)
        dist.recv(arrived, src=0)
        assert (arrived == 1).all()
    objects = everywhere({"rank": rank})
    assert [o["rank"] for o in objects] == list(range(size))
    dist.barrier()


def check_functional() -> None:
    """Functional collectives, which DeviceMesh, FSDP2 and torch.compile use."""
    import torch.distributed._functional_collectives as functional

    size = dist.get_world_size()
    for num in (10, 100_000):
        assert (functional.all_reduce(torch.ones(num), "sum", dist.group.WORLD) == size).all()
        shard = functional.reduce_scatter_tensor(torch.ones(num * size), "sum", 0, dist.group.WORLD)
        assert (shard == size).all()
        whole = functional.all_gather_tensor(torch.ones(num), 0, dist.group.WORLD)
        assert whole.numel() == num * size
    coalesced = functional.all_reduce_coalesced([torch.ones(5), torch.ones(70_000)], "sum", dist.group.WORLD)
    assert all((tensor == size).all() for tensor in coalesced)


def destroy_and_look() -> tuple[bool, int]:
    """(whether the group and its engine are gone, how many threads are left) after destroying it; then another one."""
    for num in (100, 100_000):
        dist.all_reduce(torch.ones(num))
    group, engine = weakref.ref(dist.group.WORLD), weakref.ref(dist.group.WORLD._engine)  # made, unused
    dist.barrier()
    gc.disable()  # reference counts alone must do it: at exit it would be too late for Gloo's threads
    dist.destroy_process_group()
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("ringweave")]
    gone = group() is None and engine() is None
    store = dist.TCPStore("127.0.0.1", int(os.environ["RINGWEAVE_TESTING_STORE_PORT"]), is_master=False)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("ringweave", store=store, rank=rank, world_size=size)
    dist.all_reduce(torch.ones(100_000))
    return gone, len(left)


def refuse_and_go_on() -> str:
    """An operation that no dtype of this kind has: refused before anything is sent, and the group still works."""
    try:
        dist.all_reduce(torch.ones(100_000), op=ReduceOp.BAND)
    except RuntimeError as error:
        text = str(error)
    tensor = torch.ones(100_000)
    dist.all_reduce(tensor)
    assert (tensor == dist.get_world_size()).all()
    return text


def gather_and_broadcast_objects(num_times: int) -> None:
    """What torch.distributed.checkpoint does: tensors that a host thread lets go of while this one sends the next."""
    size, rank = dist.get_world_size(), dist.get_rank()
    for number in range(num_times):
        gathered: list[Any] = [None] * size
        dist.gather_object({"rank": rank, "number": number}, gathered if rank == 0 else None, dst=0)
        received: list[Any] = [None]
        dist.scatter_object_list(received, list(range(size)) if rank == 0 else None, src=0)
        assert received == [rank]
        small = torch.ones(3)
        dist.all_reduce(small)
        assert small.tolist() == [size] * 3


def check_schedules(names: list[str], num_elements: int) -> dict[str, list[int]]:
    """{schedule: collectives, one per group} after an allreduce by each in a group of its own, checked exactly."""
    collectives = {}
    for name in names:
        os.environ["RINGWEAVE_SCHEDULE"] = name
        group = dist.new_group(backend="ringweave")
        tensors = inputs(num_elements, torch.float32, seed=3)
        mine = tensors[dist.get_rank()].clone()
        dist.all_reduce(mine, group=group)
        wanted = torch.stack([tensor.double() for tensor in tensors]).sum(0)
        assert torch.allclose(mine.double(), wanted, rtol=1e-5, atol=1e-5), name
        assert len(set(everywhere(digest(mine)))) == 1, name
        collectives[name] = sorted(group.collectives_by_schedule())
        dist.destroy_process_group(group)
    return collectives


def memory_left_by_ended_threads() -> dict[str, int]:
    """Bytes of this process's own memory that are left by four threads together, for each use that they make of it."""
    num_bytes, num_threads = 20_000_000, 4
    torch.ones(32_000_000, dtype=torch.uint8)  # freed: from now on glibc takes less than that out of its pools
    turned = torch.ones(1000, num_bytes // 1000, dtype=torch.uint8).t()
    short_floats = torch.ones(num_bytes // 4).to(torch.float8_e4m3fn)
    unsigned = torch.ones(num_bytes // 4, dtype=torch.int32).view(torch.uint32)
    mean = reductions.reduction_for(ReduceOp.AVG, short_floats.dtype)
    least = reductions.reduction_for(ReduceOp.MIN, unsigned.dtype)

    def use_short_floats() -> None:
        mean.combine(short_floats, short_floats)
        mean.finish(short_floats, 2)

    uses: dict[str, Callable[[], object]] = {
        "scratch": lambda: executor.ScratchMemory().take_buffers(1, num_bytes, torch.uint8)[0].fill_(1),
        "a tensor that is not contiguous": lambda: executor.flatten_tensor(turned).add_(1),
        "float8": use_short_floats,
        "unsigned numbers": lambda: least.combine(unsigned, unsigned),
    }

    def count_private() -> int:
        memory = psutil.Process().memory_info()
        return memory.rss - memory.shared

    def run(use: Callable[[], object], started: threading.Barrier) -> None:
        started.wait()  # together, so that each has a pool of its own
        use()

    left = {}
    for name, use in uses.items():
        before, started = count_private(), threading.Barrier(num_threads)
        threads = [threading.Thread(target=run, args=(use, started)) for _ in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        left[name] = count_private() - before
    return left
