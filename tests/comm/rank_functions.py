"""What the ranks of the tests run: importable, because real processes import it."""

import torch
import torch.distributed as dist

from ringweave.testing.ranks import announce


def reduce_until_failure(num_elements: int) -> None:
    """Reduce again and again; ends only by an exception."""
    tensor = torch.ones(num_elements)
    dist.all_reduce(tensor)
    announce("reducing")
    while True:
        dist.all_reduce(tensor.fill_(1.0))
