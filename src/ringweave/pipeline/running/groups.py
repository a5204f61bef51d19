"""The process groups of a pipeline: a replica's stages among each other, a stage's replicas, and small messages."""

import torch
import torch.distributed as dist
from torch import Tensor

from ringweave.pipeline.layouts import Layout


class Groups:
    """Made once, by all ranks at the same time; activations, gradients and small messages never queue up together."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.rank = dist.get_rank()
        host = "nccl" if device.type == "cuda" else "gloo"
        replicas = [_new(layout.ranks_of_replica(replica), host) for replica in range(layout.num_replicas)]
        self.pipeline = replicas[layout.replica_of(self.rank)]
        """The replica's ranks; stage i is rank i of it."""
        self.peers: dist.ProcessGroup | None = None
        """The ranks of all replicas that compute the same stage; None where there is one replica."""
        if layout.num_replicas > 1:
            stages = [_new(layout.ranks_of_stage(stage), "ringweave") for stage in range(layout.num_stages)]
            self.peers = stages[layout.stage_of(self.rank)]
        self.control = _new(tuple(range(layout.world_size)), "gloo")
        """All ranks, for messages of some bytes."""

    def total(self, own: Tensor) -> Tensor:
        """The sum over all ranks of a small vector in host memory; where one rank alone has a value, exactly that."""
        dist.all_reduce(own, group=self.control)
        return own

    def wait_for_all(self) -> None:
        """Until every rank has come here."""
        dist.barrier(group=self.control)

    def greatest(self, own: Tensor) -> Tensor:
        """The greatest over all ranks, value by value, of a small vector in host memory."""
        dist.all_reduce(own, op=dist.ReduceOp.MAX, group=self.control)
        return own


def _new(ranks: tuple[int, ...], backend: str) -> dist.ProcessGroup:
    group = dist.new_group(list(ranks), backend=backend)
    assert isinstance(group, dist.ProcessGroup) or dist.get_rank() not in ranks
    return group  # pyrefly: ignore - ranks outside of a group get a mark instead, and never use it
