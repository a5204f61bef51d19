"""What ranks with an accelerator run: importable, because real processes import it."""

from typing import Any

import torch
import torch.distributed as dist

from ringweave.errors import CommunicationError


def reduce_on_device(sizes: list[int]) -> dict[str, dict[str, int]]:
    """Checked allreduces of every kind that the device's path has; how many went by which schedule."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    for num_elements in sizes:
        _check(torch.arange(num_elements, dtype=torch.float32), dist.ReduceOp.SUM, size * (size + 1) // 2)
    _check(torch.arange(24, dtype=torch.int64).view(6, 4).t(), dist.ReduceOp.SUM, size * (size + 1) // 2)
    _check(2 * torch.arange(10, dtype=torch.float32), dist.ReduceOp.AVG, (size + 1) / 2)
    _check(torch.arange(10, dtype=torch.bfloat16), dist.ReduceOp.MAX, size)
    return dist.group.WORLD.collectives_by_schedule()


def refuse_on_device() -> str:
    """What is said of a dtype that NCCL does not send; the group goes on."""
    torch.cuda.set_device(dist.get_rank())
    try:
        dist.all_reduce(torch.ones(3, dtype=torch.uint16, device="cuda"))
    except CommunicationError as error:
        _check(torch.ones(3), dist.ReduceOp.SUM, sum(range(dist.get_world_size() + 1)))
        return str(error)
    raise AssertionError("it was not refused")


def _check(values: torch.Tensor, op: Any, factor: float) -> None:
    """Rank r brings r + 1 times the values."""
    mine = values.cuda() * (dist.get_rank() + 1)
    work: Any = dist.all_reduce(mine, op, async_op=True)
    work.wait()
    assert torch.equal(mine.cpu(), (values * factor).to(values.dtype)), (op, values.dtype, values.shape)
