"""All ranks say whether they can go on; one that cannot stops the move on all of them, and tells why."""

import torch
import torch.distributed as dist

from ringweave.pipeline.telling import tell


def vote(cause: str, group: dist.ProcessGroup) -> str:
    """Why the first rank that cannot go on cannot; empty if all can.

    Args:
        cause: Why this rank cannot; empty if it can.
        group: All ranks, in host memory.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    first = torch.tensor([rank if cause else size])
    dist.all_reduce(first, op=dist.ReduceOp.MIN, group=group)
    if int(first) == size:
        return ""
    return f"rank {int(first)}: {tell(cause, group, int(first))}"


def compare(sent: dict[int, int], arrived: dict[int, int], num_items: int, group: dist.ProcessGroup) -> list[int]:
    """The items whose two holders do not have the same number.

    Args:
        sent: Item -> number, 0 to 2**63 - 1, of those that this rank sent.
        arrived: The same of those that it received.
        num_items: In all.
        group: All ranks.
    """
    table = torch.zeros(2, num_items, dtype=torch.int64)
    for row, numbers in enumerate((sent, arrived)):
        for item, number in numbers.items():
            table[row, item] = number
    dist.all_reduce(table, group=group)
    return (table[0] != table[1]).nonzero().flatten().tolist()
