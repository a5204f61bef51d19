"""Collectives of the script on the default group: their input is kept until all members have committed the result.

A script's allreduce, allgather, broadcast or barrier of at most 1 MiB is an operation of the session, numbered like a
reduction. Each member sends its input to all; each computes the result from the same rows in the same order, so it is
the same bit for bit. If a member is lost, the others send their inputs again in the next generation. A recovering
member sends zeros that count nowhere, logs the rows, and its script gets the result at the same place later.
"""

import base64
import functools
import hashlib
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringweave.comm import generation_group
from ringweave.comm.backend import RingweaveProcessGroup
from ringweave.comm.engine import reductions
from ringweave.errors import CommunicationError, TrainingError, explain
from ringweave.membership.membership_records import MemberStatus
from ringweave.training.elastic.retained_reductions import NUM_ROW_WORDS

MAX_INPUT_BYTES = 1 << 20
"""Limit of the input of a collective that is repeated. Larger ones go to the group, and raise if a member is lost."""
MAX_STARTUP_BYTES = 1 << 20
"""Limit of all results that joining members get for the collectives before their first step boundary."""
STARTUP_STATE = "ringweave.startup_collectives"
"""Name of the startup log in the state that joining members read."""
_KINDS = ("gradients", "allreduce", "allgather", "broadcast", "barrier")
_KIND_WORD, _FLAGS_WORD = 4, 3
_IS_COLLECTIVE, _IS_ANNOUNCED, _IS_NEUTRAL = 4, 8, 16
"""Flags beside those of a row of a reduction (`ReductionRow.to_list`): a collective of the script's; gradients whose
row follows; a recovering member, which takes part in whatever the others do."""
_DO = "Call the same collectives, in the same order and with the same sizes, on all workers"


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveResult:
    """Inputs of all members of a committed collective; results are computed from them."""

    digest: int
    """Digest of the call's signature."""
    kind: str
    members: tuple[str, ...]
    """Members of the generation that committed it, by rank."""
    has_part: tuple[bool, ...]
    """Whether each member's script called it; a recovering member's had not come to it."""
    rows: Tensor
    """Input of each member, (num_members, num_bytes) uint8; of the source alone for a broadcast, (1, num_bytes)."""
    error: str = ""
    """Reason why there is no result, on all members alike."""

    @property
    def text(self) -> str:
        """Text of the operation, for errors."""
        return f"{self.kind} of {self.rows.shape[1]} bytes"

    def rows_in_order(self, members_at_call: Sequence[str], num_rows: int) -> list[Tensor]:
        """Return one row, (num_bytes,) uint8, for each output that the script has made for an allgather.

        Outputs are by rank of the generation that committed it, if there are as many, else of the one in which the
        script called it. In place of a row that is missing comes another member's: values of the right type for any
        output, however old the world size is by which the script made them.
        """
        present = [row for row, has_part in zip(self.rows, self.has_part, strict=True) if has_part]
        names = self.members if len(self.members) == num_rows else members_at_call
        if len(names) != num_rows:
            return [present[index % len(present)] for index in range(num_rows)]
        by_name = {
            name: row for name, row, has_part in zip(self.members, self.rows, self.has_part, strict=True) if has_part
        }
        return [by_name.get(name, present[index % len(present)]) for index, name in enumerate(names)]

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {
            "digest": self.digest,
            "kind": self.kind,
            "members": list(self.members),
            "has_part": list(self.has_part),
            "shape": list(self.rows.shape),
            "rows": base64.b64encode(self.rows.numpy().tobytes()).decode(),
            "error": self.error,
        }

    @classmethod
    def of_json(cls, document: Mapping[str, Any]) -> "CollectiveResult":
        """Parse what `to_json` returned.

        Raises:
            ValueError, KeyError, TypeError, OverflowError, RuntimeError: It is something else.
        """
        content = bytearray(base64.b64decode(document["rows"], validate=True))
        rows = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
        num_rows, num_bytes = map(int, document["shape"])
        return cls(
            digest=int(document["digest"]),
            kind=str(document["kind"]),
            members=tuple(map(str, document["members"])),
            has_part=tuple(map(bool, document["has_part"])),
            rows=rows.reshape(num_rows, num_bytes),
            error=str(document["error"]),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveCall:
    """Collective that the script has called, with a copy of its input."""

    kind: str
    signature: str
    """Kind, operation, size and dtype; the same on all members."""
    payload: Tensor
    """Input, (num_bytes,) uint8 on the CPU."""
    write: Callable[[CollectiveResult], None]
    """Writes the result into the script's tensors."""
    source: str = ""
    """Member whose input a broadcast passes on."""

    @property
    def digest(self) -> int:
        """Digest of the signature."""
        return int.from_bytes(hashlib.blake2b(self.signature.encode(), digest_size=8).digest(), "little", signed=True)

    def is_same(self, result: CollectiveResult, member: str) -> bool:
        """Return whether a logged result is of this call, on the member that replays it.

        A member that joined may be the source of a broadcast by its rank. Its object may be longer or shorter than the
        one that the others received then, from the source before it.
        """
        is_source = self.kind == result.kind == "broadcast" and self.source == member
        return self.digest == result.digest or is_source

    def finish(self, result: CollectiveResult) -> None:
        """Write the committed result into the script's tensors, unless they are the source's and of another size.

        Raises:
            CommunicationError: There is none: the source of a broadcast is lost.
        """
        if result.error:
            raise CommunicationError(result.error)
        if result.digest == self.digest:
            with torch.inference_mode():  # tensors of either kind may be written in it
                self.write(result)


class ScriptCollective:
    """Collective under way in the session, until all members have committed it."""

    def __init__(self, call: CollectiveCall | None) -> None:
        """Create it; without a call this member is recovering, and takes part with zeros."""
        self.call = call
        self.result: CollectiveResult | None = None
        """The result, once committed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OperationHeader:
    """First words that a member sends of an operation: by them all members know that they are in the same one."""

    flags: int
    kind: str = _KINDS[0]
    num_bytes: int = 0
    digest: int = 0
    """Digest of the signature."""
    source: int = -1
    """Rank of a broadcast's source in this generation; -1 if it is not in it."""

    @classmethod
    def of_gradients(cls, *, is_neutral: bool) -> "OperationHeader":
        """Return the header of gradients, or of a recovering member that has nothing of its own."""
        return cls(flags=_IS_ANNOUNCED | (_IS_NEUTRAL if is_neutral else 0))

    @classmethod
    def of_call(cls, call: CollectiveCall, members: Sequence[str]) -> "OperationHeader":
        """Return the header of a collective in a generation of these members."""
        return cls(
            flags=_IS_COLLECTIVE,
            kind=call.kind,
            num_bytes=call.payload.nbytes,
            digest=call.digest,
            source=members.index(call.source) if call.source in members else -1,
        )

    @property
    def is_neutral(self) -> bool:
        """The member is recovering, and takes part in whatever the others do."""
        return bool(self.flags & _IS_NEUTRAL)

    @property
    def is_collective(self) -> bool:
        return bool(self.flags & _IS_COLLECTIVE)

    @property
    def text(self) -> str:
        """Text of the operation, for errors."""
        return f"{self.kind} of {self.num_bytes} bytes" if self.is_collective else self.kind

    def to_tensor(self, width: int) -> Tensor:
        """Return it as a tensor as wide as a row of a reduction, (width,) int64."""
        words = torch.zeros(width, dtype=torch.int64)
        own = [self.num_bytes, self.digest, self.source, self.flags, _KINDS.index(self.kind)]
        words[: len(own)] = torch.tensor(own)
        return words

    @classmethod
    def of_words(cls, words: Sequence[int]) -> "OperationHeader":
        """Parse the words of a member; a row of a reduction is the header of gradients."""
        flags = words[_FLAGS_WORD] & (_IS_COLLECTIVE | _IS_ANNOUNCED | _IS_NEUTRAL)
        if not flags & _IS_COLLECTIVE:
            return cls(flags=flags)
        kind = _KINDS[words[_KIND_WORD] % len(_KINDS)]
        return cls(flags=flags, kind=kind, num_bytes=words[0], digest=words[1], source=words[2])


def check_same_operation(received: Tensor, members: Sequence[str]) -> list[OperationHeader]:
    """Return the header of each member from the received words, (num_members, width).

    Raises:
        TrainingError: Members are in different operations.
    """
    headers = [OperationHeader.of_words(words) for words in received[:, :NUM_ROW_WORDS].tolist()]
    own = [(header, member) for header, member in zip(headers, members, strict=True) if not header.is_neutral]
    for header, member in own[1:]:
        first, first_member = own[0]
        if replace(header, source=first.source) != first:
            got = header.text if header.text != first.text else f"{header.text}, with another operation or dtype"
            raise _mismatch_error(member, got, f"{first.text}, as on worker {first_member}")
    return headers


def check_reported_operations(statuses: Sequence[MemberStatus], texts: Sequence[str]) -> None:
    """Check the texts of the operations that members waited for when they reported for a generation.

    Members in different operations may wait for each other without ever comparing headers: the messages of a backward
    pass may come first. All wait then, and a new generation repeats what they wait for.

    Raises:
        TrainingError: Two members are in different operations with the same number.
    """
    seen: dict[int, tuple[str, str]] = {}
    for status, text in zip(statuses, texts, strict=True):
        own = (status.member, text)
        first_member, first = seen.setdefault(status.committed, own) if text else own
        if text != first:
            raise _mismatch_error(status.member, text, f"{first}, as on worker {first_member}")


def _mismatch_error(member: str, got: str, expected: str) -> TrainingError:
    return TrainingError(f"operation of worker {member}", got=got, expected=expected, do=_DO)


def result_of_rows(headers: Sequence[OperationHeader], members: Sequence[str], rows: Tensor) -> CollectiveResult:
    """Return the result of a collective from the headers and rows of all members, (num_members, num_bytes)."""
    own = [header for header in headers if not header.is_neutral]
    header, error = own[0], ""
    if header.kind == "broadcast":
        sources = {each.source for each in own}
        source = sources.pop() if len(sources) == 1 else -1
        if source < 0:
            error = explain(
                "broadcast",
                got="a source that was lost, or that is not the same on all workers",
                expected="a worker that is still there",
                do="Catch this error, and broadcast again from a rank that dist.get_rank() gives now",
            )
        rows = rows[max(source, 0)][None].clone()
    return CollectiveResult(
        digest=header.digest,
        kind=header.kind,
        members=tuple(members),
        has_part=tuple(not each.is_neutral for each in headers),
        rows=rows,
        error=error,
    )


class StartupLog:
    """Results of the collectives that scripts call between `prepare` and their first step boundary.

    Part of the job's state: the script of a member that joins later calls them too, when no other member does, and
    gets the results that the first members had.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._results: list[CollectiveResult] = []
        self._num_bytes = 0
        self._has_ended = False
        self._next: int | None = None
        """Index of the next result for the script of a member that has joined; None if it has not, or is past that."""

    @property
    def is_replaying(self) -> bool:
        """This member has joined later, and its script has not come to a step boundary yet."""
        return self._next is not None

    def end(self) -> None:
        """End the log: the script is at a step boundary."""
        with self._lock:
            self._has_ended, self._next = True, None

    def record(self, result: CollectiveResult) -> None:
        """Record a committed result, unless the script has passed a step boundary or the log is full."""
        with self._lock:
            if not self._has_ended:
                self._num_bytes += result.rows.nbytes
                self._results += [result] if self._num_bytes <= MAX_STARTUP_BYTES else []

    def take(self, call: CollectiveCall, member: str) -> CollectiveResult:
        """Return the next result of a call like this one. Others before it are passed over, as a script may leave out.

        Raises:
            TrainingError: There is none.
        """
        with self._lock:
            first = self._next or 0
            for index, result in enumerate(self._results[first:], first):
                if call.is_same(result, member):
                    self._next = index + 1
                    return result
            known = ", ".join(each.text for each in self._results[first:]) or "no more"
        raise TrainingError(
            "collective of a worker that joined, before its first train step",
            got=call.signature,
            expected=f"one that the first workers called there, with {MAX_STARTUP_BYTES >> 10} KiB in all: {known}",
            do="Call the same collectives before the first train step on a worker that joins",
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the log as JSON values, for the state that joining members read."""
        with self._lock:
            return {"has_ended": self._has_ended, "results": [each.to_json() for each in self._results]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over another member's log; if it has ended, this member has joined later.

        Raises:
            TrainingError: It is no log.
        """
        try:
            has_ended, results = bool(state["has_ended"]), [CollectiveResult.of_json(each) for each in state["results"]]
        except (ValueError, KeyError, TypeError, OverflowError, RuntimeError, AttributeError) as cause:
            do = "Run the same ringweave on all workers"
            raise TrainingError(
                "collectives before the first train step", got=repr(cause), expected="a log of them", do=do
            ) from cause
        with self._lock:
            self._has_ended, self._results, self._next = has_ended, results, 0 if has_ended else None
            self._num_bytes = sum(each.rows.nbytes for each in results)


class CollectiveInterceptor:
    """Passes small collectives of a default group to the session, as long as ringweave itself does not call them."""

    def __init__(self, run: Callable[[CollectiveCall], None], members: Callable[[], tuple[str, ...]]) -> None:
        """`run` returns when the script's tensors have the result; `members` returns the present members by rank."""
        self._run, self._members = run, members

    def attach(self, group: RingweaveProcessGroup) -> None:
        """Replace the methods of this group that start collectives which are repeated."""
        reference = weakref.ref(group)
        for method, make_call in _CALLS.items():
            if hasattr(group, method):
                setattr(group, method, functools.partial(self._collect, reference, method, make_call))

    def _collect(
        self,
        reference: "weakref.ref[RingweaveProcessGroup]",
        method: str,
        make_call: "_MakeCall",
        *args: Any,
        **kwargs: Any,
    ) -> dist.Work | None:
        made = None if generation_group.is_direct() else make_call(self._members(), *args, **kwargs)
        if made is None:
            group = reference()
            assert group is not None, "its caller holds it"
            return getattr(type(group), method)(group, *args, **kwargs)
        call, outputs = made
        self._run(call)
        for device in {each.device for each in outputs if each.device.type != "cpu"}:
            torch.accelerator.current_stream(device).synchronize()
        return FinishedWork(outputs)


class FinishedWork(dist.Work):
    """Work of a collective that was finished when its call returned, also an asynchronous one."""

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._outputs = list(outputs)

    def wait(self, timeout: timedelta | None = None) -> bool:
        del timeout
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        """Return None: the call itself raises errors."""

    def result(self) -> list[Tensor]:
        """Return the tensors with the result."""
        return self._outputs

    def synchronize(self) -> None:
        """Do nothing: the tensors have the result."""

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return a finished future of the tensors."""
        devices: list[torch.device | int | str] = []
        devices += {each.device for each in self._outputs if each.device.type != "cpu"}
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=devices)
        future.set_result(self._outputs)
        return future


_MakeCall = Callable[..., tuple[CollectiveCall, list[Tensor]] | None]
"""Makes the call, with the tensors that get the result, from the arguments of a method of ProcessGroup and the present
members; None if the group itself runs it."""


def _is_repeatable(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.nbytes <= MAX_INPUT_BYTES


def _payload(tensor: Tensor) -> Tensor:
    """Return a copy of the elements, (num_bytes,) uint8 on the CPU."""
    with torch.no_grad():
        elements = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        elements.copy_(tensor.detach())
        return elements.reshape(-1).view(torch.uint8)


def _write(tensor: Tensor, row: Tensor) -> None:
    """Write the elements of a row, (num_bytes,) uint8, into a tensor."""
    tensor.detach().copy_(row.view(tensor.dtype).reshape(tensor.shape))


def _allreduce_call(
    members: Sequence[str], tensors: list[Tensor] | Tensor, opts: Any = None, timeout: timedelta | None = None
) -> tuple[CollectiveCall, list[Tensor]] | None:
    del members, timeout
    tensors = [tensors] if isinstance(tensors, Tensor) else tensors
    tensor = tensors[0]
    if len(tensors) != 1 or not _is_repeatable(tensor):
        return None
    operation = getattr(opts, "reduceOp", opts)
    reduction = reductions.reduction_for(dist.ReduceOp.SUM if operation is None else operation, tensor.dtype)
    payload = _payload(tensor)
    reduction.prepare(payload.view(tensor.dtype))

    def write(result: CollectiveResult) -> None:
        parts = [row.view(tensor.dtype) for row, has_part in zip(result.rows, result.has_part, strict=True) if has_part]
        total = parts[0].clone()
        for part in parts[1:]:
            reduction.combine(total, part.clone())  # a combination may use the memory of its second operand
        reduction.finish(total, len(parts))
        tensor.detach().copy_(total.reshape(tensor.shape))

    signature = f"allreduce ({reduction.name}, {tensor.numel()} x {tensor.dtype})"
    return CollectiveCall(kind="allreduce", signature=signature, payload=payload, write=write), [tensor]


def _allgather_call(
    members: Sequence[str], output_lists: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
) -> tuple[CollectiveCall, list[Tensor]] | None:
    del opts
    outputs = output_lists[0]
    if len(inputs) != 1 or not all(each.dtype == inputs[0].dtype for each in outputs):
        return None
    return _gather_call(members, inputs[0], outputs)


def _allgather_base_call(
    members: Sequence[str], output: Tensor, tensor: Tensor, opts: Any = None
) -> tuple[CollectiveCall, list[Tensor]] | None:
    del opts
    num_rows = output.numel() // max(1, tensor.numel())
    is_whole = num_rows * tensor.numel() == output.numel() and output.dtype == tensor.dtype
    if not num_rows or not is_whole or not output.is_contiguous():
        return None
    found = _gather_call(members, tensor, list(output.view(num_rows, -1)))
    return found and (found[0], [output])


def _gather_call(
    members: Sequence[str], tensor: Tensor, outputs: list[Tensor]
) -> tuple[CollectiveCall, list[Tensor]] | None:
    if not _is_repeatable(tensor) or not outputs or any(each.numel() != tensor.numel() for each in outputs):
        return None

    def write(result: CollectiveResult) -> None:
        for output, row in zip(outputs, result.rows_in_order(members, len(outputs)), strict=True):
            _write(output, row)

    signature = f"allgather ({tensor.numel()} x {tensor.dtype})"
    return CollectiveCall(kind="allgather", signature=signature, payload=_payload(tensor), write=write), outputs


def _broadcast_call(
    members: Sequence[str], tensors: list[Tensor] | Tensor, opts: Any = None
) -> tuple[CollectiveCall, list[Tensor]] | None:
    tensors = [tensors] if isinstance(tensors, Tensor) else tensors
    tensor, root = tensors[0], 0 if opts is None else int(opts.rootRank)
    if len(tensors) != 1 or not _is_repeatable(tensor):
        return None
    return CollectiveCall(
        kind="broadcast",
        signature=f"broadcast ({tensor.numel()} x {tensor.dtype})",
        payload=_payload(tensor),
        write=lambda result: _write(tensor, result.rows[0]),
        source=members[root] if root < len(members) else "",
    ), [tensor]


def _barrier_call(members: Sequence[str], opts: Any = None) -> tuple[CollectiveCall, list[Tensor]]:
    del members, opts
    payload = torch.empty(0, dtype=torch.uint8)
    return CollectiveCall(kind="barrier", signature="barrier", payload=payload, write=lambda _: None), []


_CALLS: Mapping[str, _MakeCall] = {
    "allreduce": _allreduce_call,
    "allgather": _allgather_call,
    "_allgather_base": _allgather_base_call,
    "all_gather_single": _allgather_base_call,
    "broadcast": _broadcast_call,
    "barrier": _barrier_call,
}
"""By the method of torch's ProcessGroup, in torch 2.11 to 2.14."""
