"""Recovery of a joining member: it contributes zeros to reductions and replays them until it has caught up.

A joining member takes part in every reduction from its first generation on, with zeros, so no member waits for it. It
logs the sums, and the generations that start, in one replay log. Meanwhile it reads the state that the others had when
it joined. Then its script repeats the steps of the others: it computes a placeholder sample, and receives the logged
sums in place of its own gradients. So the script itself does whatever it does with gradients (clipping, scaling,
accumulation, schedules, averages of parameters), and the result is the same bit for bit. When the log is empty and the
script waits for the same reduction as all others, the member reports in its row that it has caught up.
"""

import base64
import binascii
import json
import math
import threading
import zlib
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import psutil
import pydantic
import torch
from pydantic import Field
from torch import Tensor

from ringweave.errors import TrainingError
from ringweave.files import file_io
from ringweave.membership.membership_records import Membership, furthest_status
from ringweave.membership.messages import MAX_LAYOUT_CHARS
from ringweave.planning.balancing import Speed
from ringweave.rpc.state_transfer import BackgroundThrottle, ReadThrottle
from ringweave.training.elastic.member_details import describe_validation_error
from ringweave.training.elastic.retained_reductions import Commit, PartialSums, RetainedReduction
from ringweave.training.elastic.script_collectives import CollectiveCall, CollectiveResult
from ringweave.training.elastic.share_table import shares_of_text
from ringweave.training.elastic.trainer import TrainerState
from ringweave.training.elastic.wire_choice import WireChoice

MAX_RETAINED_REDUCTIONS = 16
"""Limit of logged reductions; with more, the others wait. During so many steps, the state of an optimizer with two
moments can be read at a pace that leaves the others most of the link."""
_MIN_RETAINED_REDUCTIONS = 2
_MAX_COLLECTIVE_BYTES = 64 << 20
"""Limit of logged collectives of the script; with more, the others wait."""
_MEMORY_FRACTION = 0.5
"""Fraction of the free memory that the log may use."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LoggedReduction:
    """Committed reduction that this member's script has not replayed yet."""

    commit: Commit
    sums: list[Tensor]
    """Sum of each bucket over all members."""
    buffers: Sequence[tuple[Tensor, Tensor]]
    """(buffer of the model, its new value)."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GenerationStart:
    """Start of a generation, between two reductions or during one."""

    membership: Membership
    details: Sequence[dict[str, Any]]
    is_joining: bool


class ReplayLog:
    """Log of reductions and generation starts for the script to replay; guarded by the session's lock."""

    def __init__(
        self,
        layout: Sequence[Sequence[Any]],
        committed: int,
        max_bytes: float | None = None,
        wires: WireChoice | None = None,
    ) -> None:
        """Create an empty log; the state includes reductions up to `committed`, and `max_bytes` limits the log.

        `wires` has the formats of the other members' messages; None means exact.
        """
        self._wires = wires or WireChoice()
        self._zeros = [
            torch.zeros(numel, dtype=getattr(torch, dtype), device=device) for numel, dtype, device in layout
        ]
        self._is_on_cpu = all(zeros.device.type == "cpu" for zeros in self._zeros)
        each_bytes = max(1, sum(zeros.nbytes for zeros in self._zeros))
        free = _MEMORY_FRACTION * psutil.virtual_memory().available if max_bytes is None else max_bytes
        self.max_retained = max(_MIN_RETAINED_REDUCTIONS, min(MAX_RETAINED_REDUCTIONS, int(free // each_bytes)))
        """Limit of logged reductions; with more, the others wait."""
        self._log: deque[LoggedReduction | CollectiveResult | GenerationStart] = deque()
        self.num_collective_bytes = 0
        """Bytes of the logged collectives."""
        self._free_sums: list[list[Tensor]] = []
        self.last_replayed = committed
        """Number of the last reduction that the script has replayed."""

    @property
    def num_retained(self) -> int:
        """Reductions by which this member is behind."""
        return sum(isinstance(each, LoggedReduction) for each in self._log)

    def __bool__(self) -> bool:
        return bool(self._log)

    def zero_reduction(self, number: int) -> RetainedReduction:
        """Return this member's part in the next reduction: zeros."""
        reduction = RetainedReduction(number=number, is_complete=True, contributes_zeros=True)
        sums = self._free_sums.pop() if self._free_sums else [torch.empty_like(zeros) for zeros in self._zeros]
        for zeros, summed in zip(self._zeros, sums, strict=True):
            reduction.add_zeros(zeros, summed, self._wires.of_reduction(number))
        return reduction

    def append_reduction(
        self, commit: Commit, reduction: RetainedReduction, buffers: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        # In host memory in any case: a device has no room for it. Copied before, since copies take long.
        self._log.append(LoggedReduction(commit=commit, sums=reduction.host_sums, buffers=buffers))
        if not self._is_on_cpu:
            self._free_sums.append(reduction.sums)

    def append_collective(self, result: CollectiveResult) -> None:
        self._log.append(result)
        self.num_collective_bytes += result.rows.nbytes

    def append_generation_start(self, start: GenerationStart) -> None:
        """Append a generation start, to be applied after the entries before it."""
        self._log.append(start)

    def pop_generation_start(self) -> GenerationStart | None:
        """Remove and return the generation start at the head of the log, if there is one."""
        head = self._log[0] if self._log else None
        if not isinstance(head, GenerationStart):
            return None
        self._log.popleft()
        return head

    def pop_reduction(self) -> LoggedReduction:
        """Remove and return the next reduction.

        Raises:
            TrainingError: The others' scripts called a collective there.
        """
        logged = self._log.popleft()
        if isinstance(logged, CollectiveResult):
            raise replay_error("gradients", logged.text)
        assert isinstance(logged, LoggedReduction), "epochs are taken first"
        self.last_replayed = logged.commit.number
        return logged

    def pop_collective(self, call: CollectiveCall, member: str) -> CollectiveResult:
        """Remove and return the result of the collective that this member's script calls.

        Raises:
            TrainingError: The others' scripts did something else there.
        """
        logged = self._log.popleft()
        if not isinstance(logged, CollectiveResult):
            raise replay_error(call.signature, "gradients")
        if not call.is_same(logged, member):
            raise replay_error(call.signature, logged.text)
        self.num_collective_bytes -= logged.rows.nbytes
        return logged

    @property
    def num_operations(self) -> int:
        """Reductions and collectives in the log."""
        return sum(not isinstance(each, GenerationStart) for each in self._log)

    def recycle_sums(self, logged: LoggedReduction) -> None:
        """Reuse the memory of sums that the script has taken over."""
        if self._is_on_cpu:
            self._free_sums.append(logged.sums)


def replay_error(own: str, others: str) -> TrainingError:
    """Return the error for a script that replays another operation than the others did."""
    do = "Let what a script calls depend on nothing that a worker that joins does not have: give it as extra_state"
    return TrainingError("operation of a worker that catches up", got=own, expected=others, do=do)


BucketLayout = Sequence[Sequence[Any]]
"""(number of elements, dtype without `torch.`, type of device) of each bucket."""

MAX_LAYOUT_BYTES = 4 << 20
"""Limit of an uncompressed layout: a hundred thousand buckets. The text may be a thousandth of that."""


def _check_dtype(dtype: str) -> str:
    if isinstance(getattr(torch, dtype, None), torch.dtype):
        return dtype
    raise ValueError("no dtype of torch")


_LayoutEntry = tuple[
    Annotated[int, Field(gt=0, lt=2**48)],
    Annotated[str, Field(pattern=r"^[a-z0-9_]{1,32}$"), pydantic.AfterValidator(_check_dtype)],
    Annotated[str, Field(pattern=r"^[a-z]{1,16}$")],
]
_LAYOUT_ADAPTER = pydantic.TypeAdapter(list[_LayoutEntry], config=pydantic.ConfigDict(strict=True))


def layout_to_text(layout: BucketLayout) -> str:
    """Return a layout as compressed text; empty if there are no buckets."""
    if not layout:
        return ""
    return base64.b64encode(zlib.compress(json.dumps(layout).encode())).decode()


def layout_of_text(text: str) -> list[list[Any]]:
    """Parse the text that `layout_to_text` returned.

    Raises:
        TrainingError: The text is no layout, or a larger one than any model has.
    """
    if not text:
        return []
    if len(text) > MAX_LAYOUT_CHARS:
        raise _layout_error(f"{len(text)} characters", f"at most {MAX_LAYOUT_CHARS}")
    try:
        unpacking = zlib.decompressobj()
        words = unpacking.decompress(base64.b64decode(text, validate=True), MAX_LAYOUT_BYTES)
    except (binascii.Error, ValueError, zlib.error) as error:
        raise _layout_error(str(error), "compressed text") from None
    if not unpacking.eof:
        raise _layout_error(f"{len(words)} bytes and more, or the begin of some", f"all of at most {MAX_LAYOUT_BYTES}")
    try:
        return [list(bucket) for bucket in _LAYOUT_ADAPTER.validate_json(file_io.bounded(words, MAX_LAYOUT_BYTES))]
    except pydantic.ValidationError as error:
        raise _layout_error(describe_validation_error(error), "elements, dtype and device of each bucket") from None


def _layout_error(got: str, expected: str) -> TrainingError:
    do = "Run the same ringweave on all workers"
    return TrainingError("layout of the buckets", got=got, expected=expected, do=do)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryPlan:
    """Recovery plan of a generation; the same on all members, since it follows from the membership."""

    owner_ranks: tuple[int, ...]
    """Ranks that have the state; the first rank if none has it."""
    joining_ranks: tuple[int, ...]
    """Ranks that have to read the state."""
    recovering: frozenset[str]
    """Members that contribute zeros: joining members for which no member waits, of this and earlier generations."""
    layout: list[list[Any]] | None
    """Layout of the buckets; None before the first reduction: then the others wait until joining members have the
    state."""
    urgent_member: str | None
    """First recovering member if only one member has the state; it reads the state as fast as it can."""

    @classmethod
    def of_membership(cls, membership: Membership) -> "RecoveryPlan":
        statuses = list(enumerate(membership.statuses))
        owner_ranks = tuple(rank for rank, each in statuses if each.has_state)
        joining_ranks = tuple(
            rank for rank, each in statuses if not (each.has_state or each.is_recovering) and (owner_ranks or rank > 0)
        )
        layout = layout_of_text(membership.statuses[owner_ranks[0]].layout) if owner_ranks else []
        recovering = {each.member for each in membership.statuses if each.is_recovering}
        if layout:
            recovering |= {membership.members[rank] for rank in joining_ranks}
        return cls(
            owner_ranks=owner_ranks or (0,),
            joining_ranks=joining_ranks,
            recovering=frozenset(recovering),
            layout=layout or None,
            urgent_member=next((each for each in membership.members if each in recovering), None)
            if len(owner_ranks) == 1
            else None,
        )

    @property
    def reads_later(self) -> bool:
        """No member waits while joining ones read the state."""
        return bool(self.layout) or not self.joining_ranks

    def recovery_source(self, joining_rank: int) -> int:
        """Return the rank whose state this joining rank reads."""
        return self.owner_ranks[self.joining_ranks.index(joining_rank) % len(self.owner_ranks)]

    def is_recovery_source(self, rank: int) -> bool:
        """Return whether a joining rank reads the state of this rank."""
        return any(self.recovery_source(each) == rank for each in self.joining_ranks)


def restarts_step(start: GenerationStart, recovering: Collection[str]) -> bool:
    """Return whether members compute a step anew that misses samples of lost members; the same on all members.

    Otherwise they sum the gradients that are left, and then those of the missing samples: one sum more. It restarts
    where the whole batch is computed in less time than the sums of a step have lately taken on any member.
    """
    membership, furthest = start.membership, furthest_status(start.membership.statuses)
    rows = shares_of_text(furthest.batch_shares)
    drawn_by = {each for row in rows for each, share in zip(row.members, row.shares, strict=True) if share}
    is_committed = furthest.committed < membership.last_committed  # when this generation begins
    if is_committed or drawn_by <= set(membership.members):
        return False
    pairs = zip(membership.members, start.details, strict=True)
    computing = [details for member, details in pairs if member not in recovering]
    exchanges_s = [each["exchange_s"] for each in computing if each["exchange_s"] > 0]
    return compute_s(computing, sum(rows[-1].shares)) < min(exchanges_s, default=0.0)


def compute_s(members: Sequence[dict[str, Any]], batch_samples: int) -> float:
    """Return the predicted seconds in which these members compute a batch in equal parts; infinite if unknown."""
    speeds = [Speed.of_numbers(each["speed"]) for each in members if each["speed"] is not None]
    return max((speed.seconds(batch_samples / len(members)) for speed in speeds), default=math.inf)


_HEAD_START_S = 2.0
"""Time that the first step of the others with this member may take before the state is read all the same. The group has
just been formed, which makes that step slow enough, and the idle link between two steps shows its rate."""
_MAX_EXCHANGES_PER_STATE = 3.0
"""Bytes of a state with an optimizer of two moments, in bytes that each member sends at least in a step's exchange."""


def reads_while_computing(start: GenerationStart) -> bool:
    """Predict whether a state is read while the others compute their next gradients, between two exchanges."""
    pairs = zip(start.membership.statuses, start.details, strict=True)
    owners = [details for status, details in pairs if status.has_state]
    exchanges_s = [each["exchange_s"] for each in owners if each["exchange_s"] > 0]
    if not exchanges_s or any(each["speed"] is None for each in owners):
        return False
    computing_s = compute_s(owners, owners[0]["must_match"]["batch_samples"])
    return _MAX_EXCHANGES_PER_STATE * max(exchanges_s) <= computing_s


class CatchUp:
    """Catch-up of one member, from its first generation on. Needs the session's lock, unless noted."""

    def __init__(self, member: str, trainer: TrainerState, log: ReplayLog) -> None:
        self._member, self._trainer, self.log = member, trainer, log
        self._backward: RetainedReduction | None = None
        self._stopped, self._others_stepped = threading.Event(), threading.Event()
        self._is_urgent = self._reads_at_once = False
        self._throttle = BackgroundThrottle(
            lambda: 1.0 if self._is_urgent else log.num_retained / log.max_retained,
            self._stopped,
        )
        self._reader: threading.Thread | None = None
        self.is_blocking_others = False
        """The log was full once: the others wait for this member in every step, until it has caught up."""
        self.waiting_call: CollectiveCall | None = None
        """Collective that the script waits for."""
        self.is_loaded = False
        """The state is loaded, and the script may continue."""
        self.has_announced = False
        """The member has announced in this generation that it has caught up; after the commit it has samples in the
        next step."""

    def has_room(self) -> bool:
        """Return whether the log has room for a reduction; after it was full once, only when this member has caught up.

        Until then the others wait. Otherwise a script slower than theirs would delay each of their steps and never
        catch up.
        """
        self.is_blocking_others = self.is_blocking_others or self.log.num_retained >= self.log.max_retained
        return self.has_replayed_all or not self.is_blocking_others

    def has_room_for_collectives(self) -> bool:
        """Return whether the log has room for another collective, if that is the next operation."""
        return not self.log.num_operations or self.log.num_collective_bytes < _MAX_COLLECTIVE_BYTES

    @property
    def has_replayed_all(self) -> bool:
        """The script has replayed all committed operations, and waits for the next one.

        A generation that has begun meanwhile does not matter, applied or not: it is applied when the script wakes up,
        and that wakes no thread that waits for this property.
        """
        is_waiting = self.waiting_call is not None or (self._backward is not None and self._backward.is_complete)
        return self.is_loaded and not self.log.num_operations and is_waiting

    @property
    def is_caught_up(self) -> bool:
        """The script has replayed all committed operations, and waits for the same reduction as all others."""
        return self.has_replayed_all and self.waiting_call is None

    def announce_if_caught_up(self) -> bool:
        """Return whether this member has caught up; if so, the others may rely on it from now on."""
        self.has_announced = self.is_caught_up
        return self.has_announced

    @property
    def is_at_step_boundary(self) -> bool:
        """The script has drawn no batch whose reduction is not committed yet."""
        return self.log.num_retained > 0 or self._trainer.is_between_steps

    def current_backward(self) -> RetainedReduction:
        """Return the reduction of the script's own backward pass; only its shapes matter."""
        self._backward = self._backward or RetainedReduction(number=self.log.last_replayed + 1)
        return self._backward

    def log_reduction(
        self, commit: Commit, reduction: RetainedReduction, buffers: Sequence[tuple[Tensor, Tensor]]
    ) -> bool:
        """Log a committed reduction for the script; return whether it is the last one to log."""
        self.log.append_reduction(commit, reduction, buffers)
        self._others_stepped.set()
        return self._member in commit.caught_up

    def begin_generation(self, start: GenerationStart) -> None:
        self._is_urgent = RecoveryPlan.of_membership(start.membership).urgent_member == self._member
        self._reads_at_once = self._is_urgent or reads_while_computing(start)
        self.has_announced = False
        self.log.append_generation_start(start)

    def is_behind(self) -> bool:
        """Return whether an operation has to be replayed; first apply the generation starts before it."""
        while (start := self.log.pop_generation_start()) is not None:
            enter_generation(self._trainer, start)
        return bool(self.log)

    def take_reduction(self) -> tuple[RetainedReduction, LoggedReduction, bool]:
        """Return the script's own reduction, the logged one, and whether this member has then caught up.

        Raises:
            TrainingError: The buckets of this member differ from the others', or they called a collective instead.
        """
        logged, backward, self._backward = self.log.pop_reduction(), self._backward, None
        assert backward is not None, "the script has handed it in"
        own, others = ([(each.numel(), each.dtype) for each in sums] for sums in (backward.sums, logged.sums))
        if own != others:
            do = "Build the model and give prepare the same on all workers"
            raise TrainingError("buckets of this worker's gradients", got=own, expected=f"{others}", do=do)
        self._trainer.apply_commit(logged.commit)
        is_last = self._member in logged.commit.caught_up
        if is_last:
            self.is_behind()
        return backward, logged, is_last

    def take_collective(self, call: CollectiveCall) -> CollectiveResult:
        """Return the logged result of the collective that the script calls.

        Raises:
            TrainingError: The others' scripts did something else there.
        """
        self.waiting_call = None
        return self.log.pop_collective(call, self._member)

    def start_read(self, pull: Callable[[ReadThrottle], None], on_end: Callable[[Exception | None], None]) -> None:
        """Read the state in a thread of its own: after the others' first step, or at once if it is urgent or short.

        The thread calls `on_end` with the error or None, without the lock.
        """

        def run() -> None:
            if not self._reads_at_once:
                self._others_stepped.wait(_HEAD_START_S)
            try:
                pull(self._throttle)
            except Exception as error:
                on_end(error)
            else:
                on_end(None)

        self._reader = threading.Thread(target=run, name="ringweave reading", daemon=True)
        self._reader.start()

    def stop_read(self) -> None:
        self._stopped.set()
        self._others_stepped.set()

    def wait_stopped(self, timeout_s: float) -> None:
        """Wait until the reading thread has ended; without the lock."""
        if self._reader is not None:
            self._reader.join(timeout_s)


def enter_generation(trainer: TrainerState, start: GenerationStart) -> None:
    """Apply the start of a generation to the script's trainer."""
    recovering = RecoveryPlan.of_membership(start.membership).recovering
    trainer.begin_generation(start.membership, start.details, is_joining=start.is_joining, recovering=recovering)


def replay_reduction(
    backward: RetainedReduction, logged: LoggedReduction, *, is_mean: bool, partial_sums: PartialSums | None = None
) -> None:
    """Give the script's backward pass the logged sums; without the lock."""
    for own, first in logged.buffers:
        own.copy_(first)
    for summed, total in zip(backward.sums, logged.sums, strict=True):
        summed.copy_(total)
    backward.deliver(logged.commit, is_mean=is_mean, partial_sums=partial_sums)
