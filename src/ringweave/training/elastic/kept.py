"""What is kept until it counts on all members: gradients as this rank computed them, or what one member has fetched."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringweave.comm import hearing
from ringweave.comm.choosing import MIN_SCHEDULED_BYTES
from ringweave.training.elastic.rows import Commit, Row

_LOOK_S = 0.05
_FETCHED = "what the first member has fetched"
Said = dict[str, Any]
"""What fits into JSON."""


class Room:
    """Memory for the sums of one reduction after another: DDP has copied them by the next one."""

    def __init__(self) -> None:
        self._tensors: dict[int, Tensor] = {}

    def like(self, kept: Tensor, numel: int, index: int) -> Tensor:
        """Memory for the sum of the message of that index, of so many elements such as these."""
        known = self._tensors.get(index)
        if known is None or known.numel() != numel or known.dtype != kept.dtype or known.device != kept.device:
            self._tensors[index] = known = torch.empty(numel, dtype=kept.dtype, device=kept.device)
        return known


@dataclass(kw_only=True, slots=True)
class _Bucket:
    kept: Tensor
    """DDP's own memory: nobody writes to it before the future is resolved."""
    future: torch.futures.Future[Tensor]


@dataclass(kw_only=True, slots=True)
class _Message:
    """Buckets that are summed together, one after the other in memory."""

    buckets: list[_Bucket]
    summed: Tensor
    work: dist.Work | None = None

    def sums(self) -> Iterator[tuple[_Bucket, Tensor]]:
        """Each bucket, and its part of the sum."""
        first = 0
        for bucket in self.buckets:
            until = first + bucket.kept.numel()
            yield bucket, self.summed[first:until].view(bucket.kept.shape)
            first = until


@dataclass(kw_only=True, slots=True)
class Reduction:
    """All buckets of one synchronized backward pass.

    A bucket that is too small for a schedule goes with the next one: alone it would make its way through the host
    library beside the large ones, hop by hop behind them on each link. Which go together follows from their sizes
    alone, so it is the same on all members, whenever they come.
    """

    number: int
    is_whole: bool = False
    """All buckets are there."""
    is_nothing: bool = False
    """This rank has no gradients in it, and takes part so that nobody has to wait for it."""
    row: Row = field(default_factory=Row)
    """What this member says of it; known once it is whole."""
    used: int = 0
    """Bit i: this member has used parameter i."""
    messages: list[_Message] = field(default_factory=list)
    _small: list[_Bucket] = field(default_factory=list)
    """Those that wait for the next one."""
    _used_by_all: torch.futures.Future[int] = field(default_factory=torch.futures.Future)
    _num_started: int = 0

    def add(self, kept: Tensor, room: Room) -> torch.futures.Future[Tensor]:
        """A bucket whose gradients are computed; the future has the sum over all ranks, once it counts."""
        # A future of tensors on a device has to know of it; torch takes none for the processor's.
        future: torch.futures.Future[Tensor] = torch.futures.Future(
            devices=[] if kept.device.type == "cpu" else [kept.device]
        )
        if self._small and (self._small[0].kept.dtype, self._small[0].kept.device) != (kept.dtype, kept.device):
            self._close_message(room)
        self._small.append(_Bucket(kept=kept, future=future))
        if sum(bucket.kept.nbytes for bucket in self._small) >= MIN_SCHEDULED_BYTES:
            self._close_message(room)
        return future

    def add_nothing(self, kept: Tensor, summed: Tensor) -> None:
        """A message without gradients of this rank, and the memory for its sum."""
        bucket = _Bucket(kept=kept, future=torch.futures.Future())
        self.messages.append(_Message(buckets=[bucket], summed=summed))

    def end(self, row: Row, used: int, room: Room) -> torch.futures.Future[int]:
        """All buckets were added; the future has which parameters any member has used, once it counts."""
        if self._small:
            self._close_message(room)
        self.row, self.used, self.is_whole = row, used, True
        return self._used_by_all

    def _close_message(self, room: Room) -> None:
        buckets, self._small = [self._small[-1], *self._small[:-1]], []  # what is large need not be copied again
        numel = sum(bucket.kept.numel() for bucket in buckets)
        self.messages.append(_Message(buckets=buckets, summed=room.like(buckets[0].kept, numel, len(self.messages))))

    def start(self, group: dist.ProcessGroup | None = None) -> None:
        """Begin to sum the messages that are there, in their order, in that group; None is the default one.

        Raises:
            RuntimeError: The group is broken.
        """
        while self._num_started < len(self.messages):
            message = self.messages[self._num_started]
            for bucket, summed in message.sums():
                summed.copy_(bucket.kept)
            message.work = dist.all_reduce(message.summed, group=group, async_op=True)
            self._num_started += 1

    def wait(self) -> None:
        """Until every message that was begun is summed.

        Raises:
            RuntimeError: The group is broken.
        """
        for message in reversed(self.messages):  # the last one is there last: this thread is woken once
            assert message.work is not None
            message.work.wait()
        # A device's collective is only queued when it was waited for, and who says that it has all sums must have them.
        for device in {summed.device for summed in self.sums} - {torch.device("cpu")}:
            torch.accelerator.synchronize(device)

    def let_go(self) -> None:
        """The group is gone: what is begun ends without a result, and nobody writes to it any more."""
        for message in self.messages:
            work, message.work = message.work, None
            if work is not None:
                _wait_quietly(work)
        self._num_started = 0

    def resolve(self, commit: Commit, *, is_mean: bool) -> None:
        """It counts: hand the sums to DDP."""
        scale = commit.scale if is_mean else 1.0
        for message in self.messages:
            if scale != 1.0:
                message.summed.mul_(scale)
            for bucket, summed in message.sums():
                # DDP takes what it gets for the begin of its memory.
                bucket.future.set_result(bucket.kept.copy_(summed) if summed.storage_offset() else summed)
        self._used_by_all.set_result(commit.used)

    @property
    def sums(self) -> list[Tensor]:
        """Of each message, over all ranks; right once it counts."""
        return [message.summed for message in self.messages]

    @property
    def layout(self) -> list[list[object]]:
        """What the messages are, in words: a member that joins takes part before it has any gradients of its own."""
        return [[summed.numel(), str(summed.dtype).removeprefix("torch."), summed.device.type] for summed in self.sums]

    def fail(self, error: Exception) -> None:
        """There will be no result: let the backward pass raise."""
        buckets = [*(bucket for message in self.messages for bucket in message.buckets), *self._small]
        for future in (*(bucket.future for bucket in buckets), self._used_by_all):
            if not future.done():
                future.set_exception(error)  # pyrefly: ignore - torch's stub wants a value


class Spread:
    """The epoch's first member fetches something from outside of it, and broadcasts it.

    It passes through the session like a reduction: whoever has taken it over proves that all members have it. If the
    first member dies before, the next one fetches it again, so fetching twice must give what is right twice; and what
    was fetched first is in nobody's hands then.
    """

    used = 0
    """No parameters."""

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
        if self._fetched.is_set() and self._error is not None:  # in an epoch that is over, where nobody waited for it
            self._fetched, self._error, self._thread = threading.Event(), None, None
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
        hearing.check_length(int(length), _FETCHED, least=1)
        words = (
            torch.frombuffer(bytearray(text), dtype=torch.uint8)
            if text
            else torch.empty(int(length), dtype=torch.uint8)
        )
        dist.broadcast(words, 0, group=self._group)
        for tensor in self._tensors:
            dist.broadcast(tensor, 0, group=self._group)
        self._heard = hearing.read(bytes(words.tolist()), _FETCHED, hearing.an_object, expected="a JSON object")

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


def _wait_quietly(work: Any) -> None:
    try:
        work.wait()
    except RuntimeError:
        return
