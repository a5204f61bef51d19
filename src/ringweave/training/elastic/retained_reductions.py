"""Retained reductions: gradients, or data that one member fetched, are kept until all members have committed them.

During a reduction every member sends one row of integers. Bits behind the row mark the parameters that the member has
used, so a commit has those of all members without another collective.
"""

import functools
import json
import math
import operator
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringweave.comm import peer_data, wire_scope
from ringweave.comm.peer_data import BackgroundCall
from ringweave.comm.plan_choice import MIN_SCHEDULED_BYTES
from ringweave.environment import EXACT
from ringweave.errors import TrainingError
from ringweave.planning.balancing import SampleAccount, Speed
from ringweave.planning.balancing.speed import NUM_SPEED_NUMBERS
from ringweave.training.elastic.wire_choice import WireChoice
from ringweave.training.gradients import GradientResiduals

NUM_ROW_WORDS = 4 + NUM_SPEED_NUMBERS
_HALF = 2**63


@dataclass(frozen=True, kw_only=True, slots=True)
class ReductionRow:
    """Row of one member in a reduction."""

    account: SampleAccount = field(default_factory=SampleAccount)
    """Samples of its gradients."""
    num_planned: int = 0
    """Samples that all members together were to compute; the same in all rows except those of recovering members."""
    is_recovering: bool = False
    """It has joined and contributes zeros to this reduction."""
    is_caught_up: bool = False
    """It has caught up: it waits for this reduction as all others do, and computes what comes next."""
    restarts_step: bool = False
    """Its gradients are discarded, as those of all members, which compute the whole step anew."""
    speed: Speed | None = None

    @property
    def may_pause(self) -> bool:
        """The member may vote for a pause. A recovering member may not: its script is not at a step boundary."""
        return self.is_caught_up or not self.is_recovering

    def to_list(self) -> list[int]:
        """Return the row as `NUM_ROW_WORDS` integers of 64 bits."""
        numbers = (0.0,) * NUM_SPEED_NUMBERS if self.speed is None else self.speed.to_numbers()
        words = struct.unpack(f"<{NUM_SPEED_NUMBERS}q", struct.pack(f"<{NUM_SPEED_NUMBERS}d", *numbers))
        return [
            self.account.num_samples,
            self.account.fingerprint - _HALF,
            self.num_planned,
            self.is_recovering | self.is_caught_up << 1 | self.restarts_step << 5,  # 2 to 4: `OperationHeader`
            *words,
        ]

    @classmethod
    def of_list(cls, words: Sequence[int]) -> "ReductionRow":
        """Parse a row that `to_list` returned."""
        packed = struct.pack(f"<{NUM_SPEED_NUMBERS}q", *words[4:NUM_ROW_WORDS])
        numbers = struct.unpack(f"<{NUM_SPEED_NUMBERS}d", packed)
        return cls(
            account=SampleAccount(num_samples=words[0], fingerprint=words[1] + _HALF),
            num_planned=words[2],
            is_recovering=bool(words[3] & 1),
            is_caught_up=bool(words[3] & 2),
            restarts_step=bool(words[3] & 32),
            speed=Speed.of_numbers(numbers) if numbers[0] > 0 else None,
        )


def row_to_tensor(row: ReductionRow, used_bits: int, num_parameters: int) -> Tensor:
    """Return the row and the bits of so many parameters as a tensor, (width,) int64."""
    num_words = row_width(num_parameters) - NUM_ROW_WORDS
    words = struct.unpack(f"<{num_words}q", used_bits.to_bytes(8 * num_words, "little"))
    return torch.tensor([*row.to_list(), *words], dtype=torch.int64)


def row_width(num_parameters: int) -> int:
    """Return the number of 64-bit words that a member sends."""
    return NUM_ROW_WORDS + -(-num_parameters // 64)


def rows_of_tensor(received: Tensor) -> tuple[tuple[ReductionRow, ...], int]:
    """Return the row of each member and the union of their bits, from the received words, (num_members, width)."""
    lists = received.tolist()
    used_bits = (
        int.from_bytes(struct.pack(f"<{len(words) - NUM_ROW_WORDS}q", *words[NUM_ROW_WORDS:]), "little")
        for words in lists
    )
    return tuple(ReductionRow.of_list(words) for words in lists), functools.reduce(operator.or_, used_bits, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """A committed reduction."""

    number: int
    members: tuple[str, ...]
    """Members whose gradients are in it."""
    rows: tuple[ReductionRow, ...]
    """Rows in the order of the members."""
    used_bits: int = 0
    """Bit i: a member has used parameter i."""

    @property
    def account(self) -> SampleAccount:
        return sum((row.account for row in self.rows), SampleAccount())

    @property
    def num_planned(self) -> int:
        """Samples that it would have if no member had gone."""
        return max((row.num_planned for row in self.rows), default=0)

    @property
    def caught_up(self) -> tuple[str, ...]:
        """Members that have recovered until now, and compute from now on."""
        return tuple(member for member, row in zip(self.members, self.rows, strict=True) if row.is_caught_up)

    @property
    def restarts_step(self) -> bool:
        """It has no gradients: the members compute the whole step anew.

        Raises:
            TrainingError: Some members have reduced their gradients.
        """
        restarting = {row.restarts_step for row in self.rows}
        if len(restarting) > 1:
            bug = "This is a bug of ringweave, please report it."
            raise TrainingError(f"reduction {self.number}: some members restart the step, expected all or none. {bug}")
        return restarting == {True}

    @property
    def is_partial(self) -> bool:
        """Members have gone whose samples are not in it."""
        return self.account.num_samples < self.num_planned

    @property
    def scale(self) -> float:
        """Factor that makes the sum of the weighted gradients a mean over exactly the samples in it."""
        num_samples = self.account.num_samples
        if not self.num_planned:  # gradients of no batch of the loader: all members have the same weight
            return 1 / max(1, sum(not row.is_recovering for row in self.rows))
        return self.num_planned / num_samples if num_samples else 0.0


class StreamMark:
    """Place in the current streams of some devices, behind which another thread orders its own; the CPU has none."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        """Mark what the calling thread has enqueued on these devices."""
        self._events = [
            (device, torch.accelerator.current_stream(device).record_event())
            for device in set(devices)
            if device.type != "cpu"
        ]

    def order_streams(self) -> None:
        """Let the calling thread's current streams wait for the mark."""
        for device, event in self._events:
            torch.accelerator.current_stream(device).wait_event(event)


def synchronize_streams(devices: Iterable[torch.device]) -> None:
    """Wait until the calling thread's current streams of these devices are done, for threads with other streams."""
    for device in set(devices):
        if device.type != "cpu":
            torch.accelerator.current_stream(device).synchronize()


_FETCHED_WHAT = "what the first member has fetched"
FetchedJson = dict[str, Any]
"""JSON object that one member has fetched."""


class PartialSums:
    """Sums of a train step that misses samples of lost members, kept until the reduction that adds the missing ones."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []
        self._used_bits = 0

    def complete(self, commit: Commit, sums: Sequence[Tensor]) -> int:
        """Add the kept sums to those of this commit, in place; keep the result if the step still misses samples.

        A commit that restarts the step has no sums: they are set to zero, and what was kept stays.

        Returns:
            Bits of the parameters that any member has used in the step so far.
        """
        if not commit.num_planned:  # gradients of no batch of the loader
            return commit.used_bits
        if commit.restarts_step:
            for summed in sums:
                summed.zero_()
            return commit.used_bits
        if self._sums:
            for summed, kept in zip(sums, self._sums, strict=True):
                summed.add_(kept)
        used_bits = commit.used_bits | self._used_bits
        self._sums = [summed.clone() for summed in sums] if commit.is_partial else []
        self._used_bits = used_bits if commit.is_partial else 0
        return used_bits


class SumBuffers:
    """Memory for the sums, reused by one reduction after another: DDP has copied the sums by the next reduction."""

    def __init__(self, wires: WireChoice | None = None) -> None:
        """`wires` has the format of each reduction's gradients on slow links; None means exact."""
        self.wires = wires or WireChoice()
        self._tensors: dict[int, Tensor] = {}
        self.residuals = GradientResiduals() if self.wires.may_encode else None
        """What encoding has left of the earlier messages, through all generations."""

    def residual(self, summed: Tensor, wire: str, index: int, parameters: Sequence[Tensor]) -> Tensor | None:
        """Return the residual of the message with this index; None if it travels exactly, and so did all before."""
        if self.residuals is None or summed.dtype != torch.float32 or (wire == EXACT and self.residuals.is_empty):
            return None
        return self.residuals.of_message(index, parameters, summed.numel())

    def get(self, gradients: Tensor, numel: int, index: int) -> Tensor:
        """Return memory for the sum of the message with this index, of so many elements like `gradients`."""
        known = self._tensors.get(index)
        if (
            known is None
            or known.numel() != numel
            or known.dtype != gradients.dtype
            or known.device != gradients.device
        ):
            self._tensors[index] = known = torch.empty(numel, dtype=gradients.dtype, device=gradients.device)
        return known


@dataclass(kw_only=True, slots=True)
class _GradientBucket:
    gradients: Tensor
    """Memory of DDP itself; nothing writes to it before the future is resolved."""
    future: torch.futures.Future[Tensor]
    ready: StreamMark
    """Mark behind the gradients: after a death, the session's thread sums them, which has streams of its own."""
    parameters: Sequence[Tensor] = ()
    """Parameters whose gradients these are, in order."""


@dataclass(kw_only=True, slots=True)
class _FusedMessage:
    """Buckets that are summed together, adjacent in memory."""

    buckets: list[_GradientBucket]
    summed: Tensor
    work: dist.Work | None = None
    wire: str = EXACT
    residual: Tensor | None = None
    """What encoding has left of earlier messages; replaced while this one runs."""
    residual_before: Tensor | None = None
    """A copy from before the first attempt: one that is broken off has used up the residual and delivered nothing."""

    def start(self, group: dist.ProcessGroup | None) -> None:
        """Start the allreduce, from the residual of before."""
        if self.residual is not None and self.residual_before is None:
            self.residual_before = self.residual.clone()
        elif self.residual is not None and self.residual_before is not None:
            self.residual.copy_(self.residual_before)
        if self.residual is not None and self.wire == EXACT:  # what earlier formats have left goes along
            self.summed.add_(self.residual.to(self.summed.device))
            self.residual.zero_()
        with wire_scope.encoded_as(self.wire, self.residual):
            self.work = dist.all_reduce(self.summed, group=group, async_op=True)

    def bucket_sums(self) -> Iterator[tuple[_GradientBucket, Tensor]]:
        """Yield each bucket with its part of the sum."""
        first = 0
        for bucket in self.buckets:
            until = first + bucket.gradients.numel()
            yield bucket, self.summed[first:until].view(bucket.gradients.shape)
            first = until


@dataclass(kw_only=True, slots=True)
class RetainedReduction:
    """All buckets of one synchronized backward pass, retained until they are committed.

    A bucket too small for a schedule is fused with the next one: alone it would pass through the native backend beside
    the large ones, and queue behind them on each link. The fusion depends on the sizes only, so it is the same on all
    members.
    """

    number: int
    is_complete: bool = False
    """All buckets have been added."""
    contributes_zeros: bool = False
    """This rank has no gradients in it, and contributes zeros so that no member waits for it."""
    row: ReductionRow = field(default_factory=ReductionRow)
    """Row of this member; set once the reduction is complete."""
    used_bits: int = 0
    """Bit i: this member has used parameter i."""
    messages: list[_FusedMessage] = field(default_factory=list)
    host_sums: list[Tensor] = field(default_factory=list)
    """The sums in host memory, once copied; on the CPU they are the sums themselves."""
    _small_buckets: list[_GradientBucket] = field(default_factory=list)
    """Small buckets that wait to be fused with the next one."""
    _all_used_bits: torch.futures.Future[int] = field(default_factory=torch.futures.Future)
    _num_started: int = 0

    def add_bucket(
        self, gradients: Tensor, sum_buffers: SumBuffers, parameters: Sequence[Tensor] = ()
    ) -> torch.futures.Future[Tensor]:
        """Add a bucket of gradients of these parameters; once committed, the future has the sum over all ranks."""
        # A future of tensors on a device needs the device; torch accepts none for the CPU.
        future: torch.futures.Future[Tensor] = torch.futures.Future(
            devices=[] if gradients.device.type == "cpu" else [gradients.device]
        )
        if self._small_buckets and (
            self._small_buckets[0].gradients.dtype,
            self._small_buckets[0].gradients.device,
        ) != (gradients.dtype, gradients.device):
            self._close_message(sum_buffers)
        ready = StreamMark([gradients.device])
        self._small_buckets.append(
            _GradientBucket(gradients=gradients, future=future, ready=ready, parameters=parameters)
        )
        if sum(bucket.gradients.nbytes for bucket in self._small_buckets) >= MIN_SCHEDULED_BYTES:
            self._close_message(sum_buffers)
        return future

    def add_zeros(self, zeros: Tensor, summed: Tensor, wire: str = EXACT) -> None:
        """Add a message of zeros, with the memory for its sum."""
        bucket = _GradientBucket(gradients=zeros, future=torch.futures.Future(), ready=StreamMark([zeros.device]))
        self.messages.append(_FusedMessage(buckets=[bucket], summed=summed, wire=wire))

    def complete(self, row: ReductionRow, used_bits: int, sum_buffers: SumBuffers) -> torch.futures.Future[int]:
        """Note that all buckets are added; once committed, the future has the parameters that any member has used."""
        if self._small_buckets:
            self._close_message(sum_buffers)
        self.row, self.used_bits, self.is_complete = row, used_bits, True
        return self._all_used_bits

    def _close_message(self, sum_buffers: SumBuffers) -> None:
        buckets, self._small_buckets = (
            [self._small_buckets[-1], *self._small_buckets[:-1]],
            [],
        )  # the large bucket need not be copied again
        numel = sum(bucket.gradients.numel() for bucket in buckets)
        index = len(self.messages)
        summed = sum_buffers.get(buckets[0].gradients, numel, index)
        members = [parameter for bucket in buckets for parameter in bucket.parameters]
        wire = sum_buffers.wires.of_reduction(self.number)
        residual = sum_buffers.residual(summed, wire, index, members)
        self.messages.append(_FusedMessage(buckets=buckets, summed=summed, wire=wire, residual=residual))

    def start(self, group: dist.ProcessGroup | None = None) -> None:
        """Start to sum the added messages, in their order, in this group; None is the default group.

        Raises:
            RuntimeError: The group is broken.
        """
        while self._num_started < len(self.messages):
            message = self.messages[self._num_started]
            for bucket, summed in message.bucket_sums():
                bucket.ready.order_streams()
                summed.copy_(bucket.gradients)
            message.start(group)
            self._num_started += 1

    def wait_done(self) -> None:
        """Wait until every started message is summed.

        Raises:
            RuntimeError: The group is broken.
        """
        for message in reversed(self.messages):  # the last one completes last: this thread wakes up once
            assert message.work is not None
            message.work.wait()
        # Waiting for a device's collective only queues it, and a member that reports all sums must have them.
        for device in {summed.device for summed in self.sums} - {torch.device("cpu")}:
            torch.accelerator.synchronize(device)

    def copy_to_host(self) -> None:
        """Copy the sums to host memory, for the log of a member that replays them; takes as long as the transfer."""
        self.host_sums = [summed.cpu() for summed in self.sums]

    def detach_from_group(self) -> None:
        """Wait out the started messages after the group is gone; then nothing writes to the memory any more."""
        for message in self.messages:
            work, message.work = message.work, None
            if work is not None:
                _wait_quietly(work)
        self._num_started = 0

    def deliver(self, commit: Commit, *, is_mean: bool, partial_sums: PartialSums | None = None) -> None:
        """Hand the committed sums to DDP; without `partial_sums`, a mean is one over the samples in the commit."""
        used_bits = commit.used_bits if partial_sums is None else partial_sums.complete(commit, self.sums)
        scale = commit.scale if is_mean and (partial_sums is None or not commit.num_planned) else 1.0
        for message in self.messages:
            if commit.restarts_step and message.residual is not None and message.residual_before is not None:
                message.residual.copy_(message.residual_before)  # the attempt that was broken off delivered nothing
            if scale != 1.0:
                message.summed.mul_(scale)
            for bucket, summed in message.bucket_sums():
                # DDP assumes that a result starts at the beginning of its memory.
                bucket.future.set_result(bucket.gradients.copy_(summed) if summed.storage_offset() else summed)
        self._all_used_bits.set_result(used_bits)

    @property
    def sums(self) -> list[Tensor]:
        """Sum of each message over all ranks; valid once committed."""
        return [message.summed for message in self.messages]

    def count_own_faults(self) -> tuple[int, int]:
        """Return how many numbers of the sums are not finite, and how many of this member's own gradients.

        Both are 0 where the sums are finite, and for gradients on a device, for which it would have to be waited.

        Cost:
            One pass over the sums, about 0.1 ms for a MiB; more only if they are not finite.
        """
        on_host = [message for message in self.messages if message.summed.device.type == "cpu"]
        bad = [message for message in on_host if not bool(torch.isfinite(message.summed.sum()))]
        sums = (message.summed for message in bad)
        own = (bucket.gradients for message in bad for bucket in message.buckets)
        num_bad, num_own = (sum(int((~torch.isfinite(each)).sum()) for each in tensors) for tensors in (sums, own))
        return num_bad, num_own

    @property
    def layout(self) -> list[list[object]]:
        """Description of the messages: a joining member takes part before it has gradients of its own."""
        return [[summed.numel(), str(summed.dtype).removeprefix("torch."), summed.device.type] for summed in self.sums]

    def fail(self, error: Exception) -> None:
        """Fail all futures, so that the backward pass raises."""
        buckets = [*(bucket for message in self.messages for bucket in message.buckets), *self._small_buckets]
        for future in (*(bucket.future for bucket in buckets), self._all_used_bits):
            if not future.done():
                future.set_exception(error)  # pyrefly: ignore - torch's stub wants a value


class FetchOnceBroadcast:
    """Fetch by the generation's first member, broadcast to all members.

    The session commits it like a reduction: a member that has committed it proves that all members have it. If the
    first member dies before, the next one fetches again and no member has the first result, so a second fetch must be
    correct too.
    """

    used_bits = 0
    """It uses no parameters."""

    def __init__(
        self,
        number: int,
        fetch: Callable[[], FetchedJson],
        tensors: Sequence[Tensor],
        read_abort_count: Callable[[], int],
    ) -> None:
        """Create it without fetching.

        Args:
            number: Its number among all commits.
            fetch: Returns a JSON object and fills the tensors. Called on one member, in a thread of its own.
            tensors: Memory that is the same on all members afterwards.
            read_abort_count: Returns the abort count; when it changes, the broadcast that was started is void.
        """
        self.number, self.is_complete, self.row = number, True, ReductionRow()
        self.fetched: FetchedJson = {}
        """The fetched object, once committed."""
        self._fetch, self._tensors, self._read_abort_count = fetch, list(tensors), read_abort_count
        self._ready = StreamMark(self._devices())  # the script's, whose gradients another thread reads
        self._started_at_abort_count = -1
        self._group: dist.ProcessGroup | None = None
        self._received: FetchedJson = {}
        self._call: BackgroundCall[FetchedJson] | None = None

    def start(self, group: dist.ProcessGroup | None = None) -> None:
        """Start in the group of a new generation: the first member fetches, unless it has fetched before."""
        self._started_at_abort_count, self._group = self._read_abort_count(), group
        if self._call is not None and self._call.done() and self._call.exception() is not None:
            self._call = None  # it failed in an earlier generation, and no thread waited
        if self._call is None and dist.get_rank() == 0:
            self._call = BackgroundCall(self._run_fetch, "ringweave representative")

    def wait_done(self) -> None:
        """Wait until this member has received it.

        Raises:
            RuntimeError: The group is broken, or the generation is over.
            RingweaveError: The fetch has failed.
        """
        text = json.dumps(self._wait_fetched()).encode() if dist.get_rank() == 0 else b""
        length = torch.tensor([len(text)])
        dist.broadcast(length, 0, group=self._group)
        peer_data.check_length(int(length), _FETCHED_WHAT, min_bytes=1)
        payload = (
            torch.frombuffer(bytearray(text), dtype=torch.uint8)
            if text
            else torch.empty(int(length), dtype=torch.uint8)
        )
        dist.broadcast(payload, 0, group=self._group)
        for tensor in self._tensors:
            dist.broadcast(tensor, 0, group=self._group)
        synchronize_streams(self._devices())
        self._received = peer_data.decode_peer_data(
            bytes(payload.tolist()), _FETCHED_WHAT, peer_data.require_object, expected="a JSON object"
        )

    def detach_from_group(self) -> None:
        """Do nothing: no started work remains in the group."""

    def deliver(self, commit: Commit, *, is_mean: bool, partial_sums: PartialSums | None = None) -> None:
        """Make the committed object available."""
        del commit, is_mean, partial_sums
        self.fetched = self._received

    def fail(self, error: Exception) -> None:
        """Do nothing: the session tells the waiting thread."""

    def _wait_fetched(self) -> FetchedJson:
        assert self._call is not None, "the first member has started it"
        try:
            return self._call.wait_result(math.inf, lambda: self._read_abort_count() != self._started_at_abort_count)
        except TimeoutError:
            if self._call.done():  # its own error
                raise
            raise RuntimeError("the generation is over") from None

    def _devices(self) -> list[torch.device]:
        return [tensor.device for tensor in self._tensors]

    @torch.no_grad()
    def _run_fetch(self) -> FetchedJson:
        self._ready.order_streams()
        fetched = self._fetch()
        synchronize_streams(self._devices())
        return fetched


def _wait_quietly(work: Any) -> None:
    try:
        work.wait()
    except RuntimeError:
        return
