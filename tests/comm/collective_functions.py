"""Checks of allgather, reduce-scatter and broadcast that real ranks run: each form beside the result of one process."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed._functional_collectives import all_gather_tensor, reduce_scatter_tensor

from tests.comm import rank_functions
from tests.comm.rank_functions import expected, inputs

BLOCK = 12_000
"""Elements of a block: with three ranks and two bytes each above the least size of a schedule."""
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.complex64)


def _gathered(dtype: torch.dtype) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield the result of each form of an allgather: the blocks of all ranks."""
    size, own = dist.get_world_size(), inputs(BLOCK, dtype, 1)[dist.get_rank()]
    blocks = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(blocks, own)
    yield "list", blocks
    blocks = [torch.empty(2, BLOCK // 2, dtype=dtype).t() for _ in range(size)]
    dist.all_gather(blocks, own.view(2, -1).t())
    yield "strided list", [block.t().reshape(-1) for block in blocks]
    whole = own.new_empty(size * BLOCK)
    work = dist.all_gather_into_tensor(whole, own, async_op=True)
    assert work is not None
    assert work.get_future().wait()[0].data_ptr() == whole.data_ptr()
    yield "tensor", list(whole.chunk(size))
    whole = own.new_empty(size, BLOCK)
    whole[dist.get_rank()] = own
    dist.all_gather_into_tensor(whole, whole[dist.get_rank()])
    yield "own block in place", list(whole)
    yield "functional", list(all_gather_tensor(own, 0, dist.group.WORLD).chunk(size))
    halves = [own[: BLOCK // 2].clone(), own[BLOCK // 2 :].clone()]
    wholes = [own.new_empty(size * (BLOCK // 2)) for _ in halves]
    with dist._coalescing_manager(async_ops=True) as manager:
        for half, each in zip(halves, wholes, strict=True):
            dist.all_gather_into_tensor(each, half)
    manager.wait()
    yield "coalesced", [torch.cat(pair) for pair in zip(*(each.chunk(size) for each in wholes), strict=True)]


def _scattered(dtype: torch.dtype, op: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the result of each form of a reduce-scatter: this rank's block."""
    size, rank = dist.get_world_size(), dist.get_rank()
    whole = inputs(size * BLOCK, dtype, 2)[rank]
    kept, own = whole.clone(), whole.new_empty(BLOCK)
    dist.reduce_scatter(own, list(whole.chunk(size)), op)
    yield "list", own
    own = whole.new_empty(BLOCK)
    work = dist.reduce_scatter_tensor(own, whole, op, async_op=True)
    assert work is not None
    work.wait()
    yield "tensor", own
    own = torch.empty(2, BLOCK // 2, dtype=dtype).t()
    dist.reduce_scatter(own, [each.view(2, -1).t() for each in whole.chunk(size)], op)
    yield "strided list", own.t().reshape(-1)
    if op == ReduceOp.SUM:
        yield "functional", reduce_scatter_tensor(whole, "sum", 0, dist.group.WORLD).clone()
    assert torch.equal(whole, kept), "the input was changed"


def check_blocks() -> dict[str, dict[str, int]]:
    """Check every form of both collectives on blocks; returns the counters."""
    for dtype in DTYPES:
        for form, blocks in _gathered(dtype):
            for rank, block in enumerate(blocks):
                assert torch.equal(block, inputs(BLOCK, dtype, 1)[rank]), (dtype, form, rank)
        size = dist.get_world_size()
        result = expected(inputs(size * BLOCK, dtype, 2), ReduceOp.SUM).chunk(size)[dist.get_rank()]
        for form, own in _scattered(dtype, ReduceOp.SUM):
            assert torch.equal(own, result), (dtype, form)
    for op in (ReduceOp.AVG, ReduceOp.MAX, ReduceOp.PRODUCT):
        size = dist.get_world_size()
        result = expected(inputs(size * BLOCK, torch.float64, 2), op).chunk(size)[dist.get_rank()]
        for form, own in _scattered(torch.float64, op):
            assert torch.allclose(own, result, rtol=1e-15), (op, form)
    return _counters()


def check_reductions_in_pieces() -> None:
    """Check large reduce-scatters whose input is copied piece by piece, of operations that prepare and finish it."""
    size, rank = dist.get_world_size(), dist.get_rank()
    for op in (ReduceOp.SUM, ReduceOp.AVG, dist._make_nccl_premul_sum(3.0)):
        for _ in range(2):
            whole = inputs(size * 150_000, torch.float64, 5)[rank]
            kept, own = whole.clone(), whole.new_empty(150_000)
            dist.reduce_scatter_tensor(own, whole, op)
            total = torch.stack(inputs(size * 150_000, torch.float64, 5)).sum(0).chunk(size)[rank]
            factor = 1.0 if op == ReduceOp.SUM else 1 / size if op == ReduceOp.AVG else 3.0
            assert torch.allclose(own, total * factor, rtol=1e-15), op
            assert torch.equal(whole, kept), "the input was changed"


def check_unequal_blocks() -> dict[str, dict[str, int]]:
    """Check lists of blocks of different sizes, small, empty and strided ones; returns the counters."""
    size, rank = dist.get_world_size(), dist.get_rank()
    for turn, counts in enumerate(
        ([40_000 * r + 7 for r in range(size)], [3, *[0] * (size - 1)], [5, *[9] * (size - 1)])
    ):
        for dtype in DTYPES:
            contents = [inputs(count, dtype, turn)[owner] for owner, count in enumerate(counts)]
            for _ in range(2):  # the second one has its program
                blocks = [torch.empty_like(content) for content in contents]
                dist.all_gather(blocks, contents[rank])
                assert all(map(torch.equal, blocks, contents)), (counts, dtype)
            whole = inputs(sum(counts), dtype, turn)
            result = expected(whole, ReduceOp.SUM).split(counts)[rank]
            kept, own = whole[rank].clone(), torch.empty_like(result)
            work = dist.reduce_scatter(own, list(whole[rank].split(counts)), async_op=True)
            assert work is not None
            work.wait()
            assert torch.equal(own, result), (counts, dtype)
            assert torch.equal(whole[rank], kept), "the input was changed"
    columns = [torch.empty(2, 300 * (owner + 1)).t() for owner in range(size)]
    own = torch.full((2, 300 * (rank + 1)), float(rank)).t()
    dist.all_gather(columns, own)
    assert all(bool((column == owner).all()) for owner, column in enumerate(columns))
    return _counters()


def disagree_in_block_sizes() -> None:
    """Rank 1 expects other blocks than the others, of the same size together."""
    rank = dist.get_rank()
    counts = [15, 20, 55] if rank == 1 else [10, 20, 60]
    dist.all_gather([torch.empty(count) for count in counts], torch.ones(counts[rank]))


def check_broadcasts() -> dict[str, dict[str, int]]:
    """Check broadcasts from every rank; returns the counters."""
    for root in range(dist.get_world_size()):
        for dtype in (*DTYPES, torch.bool):
            content = inputs(30_001, dtype, root)[root]
            own = content.clone() if dist.get_rank() == root else torch.zeros_like(content)
            dist.broadcast(own, root)
            assert torch.equal(own, content), (root, dtype)
        content = inputs(40_000, torch.float32, root)[root]
        own = content.view(200, 200).t() if dist.get_rank() == root else torch.zeros(200, 200).t()
        work = dist.broadcast(own, root, async_op=True)
        assert work is not None
        work.wait()
        assert torch.equal(own.t().reshape(-1), content), root
    return _counters()


def check_many_at_once() -> None:
    """Collectives of all kinds in flight together, in a group of some ranks and in one of all."""
    size, rank = dist.get_world_size(), dist.get_rank()
    some = dist.new_group([0, size - 1])
    own = torch.full((60_000,), float(rank))
    works: list[Any] = []
    checks: list[Callable[[], bool]] = []
    for turn in range(6):
        whole, part = own.new_empty(size * 60_000), own.new_empty(60_000)
        works.append(dist.all_gather_into_tensor(whole, own, async_op=True))
        checks.append(lambda whole=whole: [float(each[0]) for each in whole.chunk(size)] == list(range(size)))
        works.append(dist.reduce_scatter_tensor(part, own.repeat(size) + turn, async_op=True))
        checks.append(lambda part=part, turn=turn: bool((part == sum(range(size)) + turn * size).all()))
        summed, sent = own.clone(), own + 10 * turn
        works.append(dist.all_reduce(summed, async_op=True))
        checks.append(lambda summed=summed: bool((summed == sum(range(size))).all()))
        works.append(dist.broadcast(sent, turn % size, async_op=True))
        checks.append(lambda sent=sent, turn=turn: bool((sent == turn % size + 10 * turn).all()))
        if rank in (0, size - 1):
            pair = own.new_empty(2 * 60_000)
            works.append(dist.all_gather_into_tensor(pair, own, group=some, async_op=True))
            checks.append(lambda pair=pair: (float(pair[0]), float(pair[-1])) == (0.0, float(size - 1)))
    for work, check in zip(reversed(works), reversed(checks), strict=True):
        work.wait()
        assert check()


def disagree_in_kind() -> None:
    """Rank 1 broadcasts where the others gather."""
    own = torch.ones(60_000)
    if dist.get_rank() == 1:
        dist.broadcast(own, 1)
    else:
        dist.all_gather_into_tensor(own.new_empty(dist.get_world_size() * 60_000), own)


def _counters() -> dict[str, dict[str, int]]:
    group: Any = dist.group.WORLD
    counters = group.collectives_by_schedule()
    rank_functions.everywhere(None)
    return counters
