"""Process groups of a pipeline (stages, stage replicas, control), and numbers that ride on the loss allreduce."""

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ringweave.comm import autoload
from ringweave.pipeline.stage_layout import Layout


class PipelineGroups:
    """Process groups of one pipeline; activations, gradients and small messages never queue up together."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.rank = dist.get_rank()
        backend = "nccl" if device.type == "cuda" else "gloo"
        replicas = [_new_group(layout.ranks_of_replica(replica), backend) for replica in range(layout.num_replicas)]
        self.pipeline = replicas[layout.replica_of_rank(self.rank)]
        """Ranks of this replica; device i is rank i of it."""
        self.device_ranks = layout.ranks_of_replica(layout.replica_of_rank(self.rank))
        """Ranks of this replica's devices in `control`."""
        self.alone: dist.ProcessGroup | None = None
        """This rank alone, where stages have other devices than torch's stages know: one each, in order."""
        if not layout.placed.is_plain:
            self.alone = [_new_group((rank,), "gloo") for rank in range(layout.world_size)][self.rank]
        self.stage_replicas: dist.ProcessGroup | None = None
        """Ranks that hold the same blocks: the devices of the stage in all replicas. None if this is the only one."""
        for stage in range(layout.num_stages):
            ranks = layout.ranks_of_stage(stage)
            group = _new_group(ranks, "ringweave") if len(ranks) > 1 else None
            if self.rank in ranks:
                self.stage_replicas = group
        self.control = _new_group(tuple(range(layout.world_size)), "gloo")
        """All ranks, for messages of some bytes."""

    def sum_over_ranks(self, own: Tensor) -> Tensor:
        """Return a small vector's sum over all ranks, in host memory; exact if only one rank's value is nonzero."""
        dist.all_reduce(own, group=self.control)
        return own

    def barrier(self) -> None:
        """Wait until every rank has called it."""
        dist.barrier(group=self.control)

    def max_over_ranks(self, own: Tensor) -> Tensor:
        """Return the elementwise maximum over all ranks of a small vector in host memory."""
        dist.all_reduce(own, op=dist.ReduceOp.MAX, group=self.control)
        return own


def _new_group(ranks: tuple[int, ...], backend: str) -> dist.ProcessGroup:
    group = autoload.new_native_group(list(ranks), backend)  # also where `--replace-backend` replaces the script's
    assert isinstance(group, dist.ProcessGroup) or dist.get_rank() not in ranks
    return group  # pyrefly: ignore - ranks outside of a group get a mark instead, and never use it


class Piggyback(Protocol):
    """Numbers that travel to all ranks with the losses of each train step, and arrive at its end."""

    def outgoing(self) -> Tensor:
        """Return this rank's numbers, float64 [n] in host memory; n is the same on all ranks."""
        ...

    def receive(self, totals: Tensor) -> None:
        """Receive the sums over all ranks, float64 [n]; exact where only one rank sent a nonzero value."""
        ...


def sum_with_piggyback(piggyback: Piggyback | None, table: Tensor, groups: PipelineGroups) -> Tensor:
    """Sum a float64 table over all ranks; the piggyback's numbers travel in the same message."""
    if piggyback is None:
        return groups.sum_over_ranks(table)
    totals = groups.sum_over_ranks(torch.cat((table.flatten(), piggyback.outgoing())))
    piggyback.receive(totals[table.numel() :])
    return totals[: table.numel()].reshape(table.shape)
