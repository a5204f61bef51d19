"""Losses that all ranks work out together."""

import torch
import torch.distributed as dist

from support import gpt

ROWS_AT_ONCE = 16


def mean_over_ranks(loss: torch.Tensor) -> float:
    """Returns the mean of every rank's `loss`, which is the mean over the samples if all ranks have equally many."""
    total = loss.detach().double()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


@torch.no_grad()
def nats_per_byte(model: gpt.GPT, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    """Returns the mean loss over all of `targets`; each rank judges every world-size-th row, all get the same sum."""
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    total = torch.zeros((), dtype=torch.float64, device=inputs.device)
    for rows, following in zip(inputs[mine].split(ROWS_AT_ONCE), targets[mine].split(ROWS_AT_ONCE), strict=True):
        total += model(rows, following) * following.numel()
    dist.all_reduce(total)
    return total.item() / targets.numel()
