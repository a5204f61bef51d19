"""Gradients of all stages and replicas: averaged, and measured by one norm that does not depend on the partition."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from ringweave.pipeline.models.holding import HeldBlocks
from ringweave.pipeline.running.groups import Groups


def reduce_replicas(blocks: HeldBlocks, groups: Groups, *, is_mean: bool) -> None:
    """Add up the gradients of this rank's blocks over the replicas, and divide by their number for a mean.

    A message for each block and type: which blocks lie together does not change what is added to what.
    """
    if groups.peers is None:
        return
    under_way = []
    for index in blocks.held:
        for gradients in _by_type(blocks[index]):
            flat = _flatten_dense_tensors(gradients)
            under_way.append((dist.all_reduce(flat, group=groups.peers, async_op=True), flat, gradients))
    for work, flat, gradients in under_way:
        work.wait()
        if is_mean:
            flat.div_(dist.get_world_size(groups.peers))
        for gradient, reduced in zip(gradients, _unflatten_dense_tensors(flat, gradients), strict=True):
            gradient.copy_(reduced)


def set_aside(blocks: HeldBlocks, groups: Groups) -> list[tuple[nn.Parameter, Tensor]]:
    """Take away the gradients that the replicas have in common already, before a pass that adds to them.

    Returns:
        Each parameter and its gradient, for `put_back`; nothing where there is one replica.
    """
    if groups.peers is None:
        return []
    earlier = []
    for index in blocks.held:
        for parameter in blocks[index].parameters():
            if parameter.grad is not None:
                earlier.append((parameter, parameter.grad))
                parameter.grad = None
    return earlier


def put_back(earlier: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
    """Add what the pass gave to what `set_aside` took away."""
    for parameter, gradient in earlier:
        if parameter.grad is not None:
            gradient.add_(parameter.grad)
        parameter.grad = gradient


def spread_first(blocks: HeldBlocks, groups: Groups) -> None:
    """All replicas begin with the values of the first one."""
    if groups.peers is None:
        return
    for index in blocks.held:
        for tensor in (*blocks[index].parameters(), *blocks[index].buffers()):
            dist.broadcast(tensor.detach(), group=groups.peers, group_src=0)


def global_norm(blocks: HeldBlocks, groups: Groups, *, num_replicas: int) -> Tensor:
    """The 2-norm of the gradients of all blocks, the same bits on all ranks and for all partitions.

    Each block's sum of squares is computed where it lies; sums are added in the order of the blocks.

    Returns:
        A float64 number in host memory.
    """
    squares = torch.zeros(len(blocks), dtype=torch.float64)
    for index in blocks.held:
        squares[index] = squared_norm(blocks[index])
    total = groups.total(squares) / num_replicas
    return torch.stack(list(total)).cumsum(0)[-1].sqrt()


def squared_norm(block: nn.Module) -> float:
    """The sum of squares of a block's gradients, in float64."""
    sums = [gradient.detach().double().square().sum() for gradient in _gradients(block)]
    return float(torch.stack(sums).cumsum(0)[-1]) if sums else 0.0


def scale(blocks: HeldBlocks, factor: float) -> None:
    """Multiply all gradients of this rank."""
    for index in blocks.held:
        for gradient in _gradients(blocks[index]):
            gradient.mul_(factor)


def _gradients(block: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in block.parameters() if parameter.grad is not None]


def _by_type(block: nn.Module) -> list[list[Tensor]]:
    found: dict[torch.dtype, list[Tensor]] = {}
    for gradient in _gradients(block):
        found.setdefault(gradient.dtype, []).append(gradient)
    return list(found.values())
