"""Gradients of one reduction: kept as this rank computed them until their sum over all ranks counts."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringweave.training.elastic.rows import Commit, Row


class Room:
    """Memory for the sums of one reduction after another: DDP has copied them by the next one."""

    def __init__(self) -> None:
        self._tensors: dict[int, Tensor] = {}

    def like(self, kept: Tensor, index: int) -> Tensor:
        """Memory for the sum of the bucket of that index."""
        known = self._tensors.get(index)
        if known is None or known.shape != kept.shape or known.dtype != kept.dtype or known.device != kept.device:
            self._tensors[index] = known = torch.empty_like(kept)
        return known


@dataclass(kw_only=True, slots=True)
class _Bucket:
    kept: Tensor
    """DDP's own memory: nobody writes to it before the future is resolved."""
    summed: Tensor
    future: torch.futures.Future[Tensor]
    work: dist.Work | None = None


@dataclass(kw_only=True, slots=True)
class Reduction:
    """All buckets of one synchronized backward pass."""

    number: int
    is_whole: bool = False
    """All buckets are there."""
    row: Row = field(default_factory=Row)
    """What this member says of it; known once it is whole."""
    buckets: list[_Bucket] = field(default_factory=list)
    _num_started: int = 0

    def add(self, kept: Tensor, room: Room) -> torch.futures.Future[Tensor]:
        """A bucket whose gradients are computed; the future has the sum over all ranks, once it counts."""
        # A future of tensors on a device has to know of it; torch takes none for the processor's.
        future: torch.futures.Future[Tensor] = torch.futures.Future(
            devices=[] if kept.device.type == "cpu" else [kept.device]
        )
        self.buckets.append(_Bucket(kept=kept, summed=room.like(kept, len(self.buckets)), future=future))
        return future

    def start(self) -> None:
        """Begin to sum the buckets that are there, in their order.

        Raises:
            RuntimeError: The group is broken.
        """
        while self._num_started < len(self.buckets):
            bucket = self.buckets[self._num_started]
            bucket.summed.copy_(bucket.kept)
            bucket.work = dist.all_reduce(bucket.summed, async_op=True)
            self._num_started += 1

    def wait(self) -> None:
        """Until every bucket that was begun is summed.

        Raises:
            RuntimeError: The group is broken.
        """
        for bucket in self.buckets:
            assert bucket.work is not None
            bucket.work.wait()
        # A device's collective is only queued when it was waited for, and who says that it has all sums must have them.
        for device in {bucket.summed.device for bucket in self.buckets} - {torch.device("cpu")}:
            torch.accelerator.synchronize(device)

    def let_go(self) -> None:
        """The group is gone: what is begun ends without a result, and nobody writes to it any more."""
        for bucket in self.buckets:
            work, bucket.work = bucket.work, None
            if work is not None:
                _wait_quietly(work)
        self._num_started = 0

    def resolve(self, commit: Commit, *, is_mean: bool) -> None:
        """It counts: hand the sums to DDP."""
        scale = commit.scale if is_mean else 1.0
        for bucket in self.buckets:
            if scale != 1.0:
                bucket.summed.mul_(scale)
            bucket.future.set_result(bucket.summed)

    def fail(self, error: Exception) -> None:
        """There will be no result: let the backward pass raise."""
        for bucket in self.buckets:
            if not bucket.future.done():
                bucket.future.set_exception(error)  # pyrefly: ignore - torch's stub wants a value


def _wait_quietly(work: Any) -> None:
    try:
        work.wait()
    except RuntimeError:
        return
