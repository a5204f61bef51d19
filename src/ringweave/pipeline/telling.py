"""A rank tells all others a text."""

import torch
import torch.distributed as dist

from ringweave.comm import hearing


def tell(text: str, group: dist.ProcessGroup, src: int = 0) -> str:
    """The text of one rank, on all ranks.

    Args:
        text: What it says; what the others give is not looked at.
        group: In host memory.
        src: Who tells, as a rank of the group.

    Raises:
        DisagreementError: It says more than any rank does.
    """
    raw = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8)
    length = torch.tensor([len(raw)])
    dist.broadcast(length, group=group, group_src=src)
    hearing.check_length(int(length), "text of another rank", least=1, where=f"rank {src} of the group")
    if dist.get_rank(group) != src:
        raw = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(raw, group=group, group_src=src)
    return raw.numpy().tobytes().rstrip(b"\0").decode(errors="replace")
