"""What is kept until it counts on all members: gradients as this rank computed them, or what one member has fetched."""

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringweave.training.elastic.rows import Commit, Row

_LOOK_S = 0.05
Said = dict[str, Any]
"""What fits into JSON."""


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
    is_nothing: bool = False
    """This rank has no gradients in it, and takes part so that nobody has to wait for it."""
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

    def add_nothing(self, kept: Tensor, summed: Tensor) -> None:
        """A bucket without gradients of this rank, and the memory for its sum."""
        self.buckets.append(_Bucket(kept=kept, summed=summed, future=torch.futures.Future()))

    def start(self, group: dist.ProcessGroup | None = None) -> None:
        """Begin to sum the buckets that are there, in their order, in that group; None is the default one.

        Raises:
            RuntimeError: The group is broken.
        """
        while self._num_started < len(self.buckets):
            bucket = self.buckets[self._num_started]
            bucket.summed.copy_(bucket.kept)
            bucket.work = dist.all_reduce(bucket.summed, group=group, async_op=True)
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
            if scale != 1.0 and not _is_count(bucket.summed):
                bucket.summed.mul_(scale)
            bucket.future.set_result(bucket.summed)

    @property
    def sums(self) -> list[Tensor]:
        """Of each bucket, over all ranks; right once it counts."""
        return [bucket.summed for bucket in self.buckets]

    @property
    def layout(self) -> list[list[object]]:
        """What the buckets are, in words: a member that joins takes part before it has any of its own."""
        return [
            [bucket.kept.numel(), str(bucket.kept.dtype).removeprefix("torch."), bucket.kept.device.type]
            for bucket in self.buckets
        ]

    def fail(self, error: Exception) -> None:
        """There will be no result: let the backward pass raise."""
        for bucket in self.buckets:
            if not bucket.future.done():
                bucket.future.set_exception(error)  # pyrefly: ignore - torch's stub wants a value


class Spread:
    """The epoch's first member fetches something from outside of it, and broadcasts it.

    It passes through the session like a reduction: whoever has taken it over proves that all members have it. If the
    first member dies before, the next one fetches it again, so fetching twice must give what is right twice; and what
    was fetched first is in nobody's hands then.
    """

    def __init__(
        self, number: int, fetch: Callable[[], Said], tensors: Sequence[Tensor], generation: Callable[[], int]
    ) -> None:
        """Fetches nothing yet.

        Args:
            number: Among all that counts.
            fetch: Gives what fits into JSON, and fills the tensors. Called on one member, in a thread of its own.
            tensors: Memory that is the same on all members afterwards.
            generation: Is another one once what was begun is of no use any more.
        """
        self.number, self.is_whole, self.row = number, True, Row()
        self.said: Said = {}
        """What was fetched, once it counts."""
        self._fetch, self._tensors, self._generation = fetch, list(tensors), generation
        self._began = -1
        self._group: dist.ProcessGroup | None = None
        self._heard: Said = {}
        self._fetched = threading.Event()
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def start(self, group: dist.ProcessGroup | None = None) -> None:
        """The members of an epoch are together, in that group: the first one fetches, unless it has before."""
        self._began, self._group = self._generation(), group
        if self._thread is None and dist.get_rank() == 0:
            self._thread = threading.Thread(target=self._run, name="ringweave representative", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Until this member has it.

        Raises:
            RuntimeError: The group is broken, or the epoch is over.
            RingweaveError: It cannot be fetched.
        """
        text = json.dumps(self._await()).encode() if dist.get_rank() == 0 else b""
        length = torch.tensor([len(text)])
        dist.broadcast(length, 0, group=self._group)
        words = (
            torch.frombuffer(bytearray(text), dtype=torch.uint8)
            if text
            else torch.empty(int(length), dtype=torch.uint8)
        )
        dist.broadcast(words, 0, group=self._group)
        for tensor in self._tensors:
            dist.broadcast(tensor, 0, group=self._group)
        self._heard = json.loads(bytes(words.tolist()))

    def let_go(self) -> None:
        """The group is gone: nothing that was begun is left in it."""

    def resolve(self, commit: Commit, *, is_mean: bool) -> None:
        """It counts."""
        del commit, is_mean
        self.said = self._heard

    def fail(self, error: Exception) -> None:
        """There will be no result; whoever waits hears so from the session."""

    def _await(self) -> Said:
        while not self._fetched.wait(_LOOK_S):
            if self._generation() != self._began:
                raise RuntimeError("the epoch is over")
        if self._error is not None:
            raise self._error
        return self._heard

    def _run(self) -> None:
        try:
            with torch.no_grad():
                self._heard = self._fetch()
        except Exception as error:  # told where it is waited for
            self._error = error
        self._fetched.set()


def _is_count(summed: Tensor) -> bool:
    """Whole numbers count something; gradients never are."""
    return not (summed.is_floating_point() or summed.is_complex())


def _wait_quietly(work: Any) -> None:
    try:
        work.wait()
    except RuntimeError:
        return
