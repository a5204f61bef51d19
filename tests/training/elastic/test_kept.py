"""Which buckets of a backward pass are summed together, and what each gets of the sum."""

import json
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ringweave.comm.plan_choice import MIN_SCHEDULED_BYTES
from ringweave.training.elastic import retained_reductions
from ringweave.training.elastic.commit import CommitProtocol, _PreparedCommit
from ringweave.training.elastic.retained_reductions import (
    Commit,
    ReductionRow,
    RetainedReduction,
    SumBuffers,
)
from ringweave.training.elastic.wire_choice import WireChoice

SMALL, LARGE = 10, MIN_SCHEDULED_BYTES // 4
COUNTS = Commit(
    number=1, members=("0.0", "1.0"), rows=(ReductionRow(), ReductionRow(is_recovering=True)), used_bits=0b110
)


class Group:
    """Of another member, whose gradients are all ones."""

    def __init__(self) -> None:
        self.summed: list[int] = []

    def all_reduce(self, tensor: Tensor, **_: Any) -> "Group":
        self.summed.append(tensor.numel())
        tensor.add_(1)
        return self

    def wait(self) -> None: ...


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    made = Group()
    monkeypatch.setattr(retained_reductions, "dist", made)
    return made


def buckets(sizes: Sequence[int]) -> list[Tensor]:
    return [torch.full((size,), float(number)) for number, size in enumerate(sizes, start=2)]


@pytest.mark.parametrize("is_begun_early", [True, False])
@pytest.mark.parametrize(
    ("sizes", "summed"),
    [
        ([SMALL, LARGE], [SMALL + LARGE]),
        ([SMALL, SMALL, LARGE, LARGE], [2 * SMALL + LARGE, LARGE]),
        ([LARGE, SMALL], [LARGE, SMALL]),
        ([LARGE - 1, SMALL], [LARGE - 1 + SMALL]),
        ([SMALL], [SMALL]),
    ],
)
def test_a_small_bucket_is_summed_with_the_next_one(
    group: Group, sizes: list[int], summed: list[int], is_begun_early: bool
) -> None:
    room = SumBuffers()
    for _ in range(2):
        reduction, group.summed = RetainedReduction(number=1), []
        futures = []
        for bucket in buckets(sizes):
            futures.append(reduction.add_bucket(bucket, room))
            if is_begun_early:
                reduction.start()
        used = reduction.complete(ReductionRow(), 0b10, room)
        reduction.start()
        reduction.wait_done()
        assert group.summed == summed
        assert reduction.layout == [[size, "float32", "cpu"] for size in summed]
        assert (reduction.is_complete, reduction.used_bits) == (True, 0b10)
        reduction.deliver(COUNTS, is_mean=False)
        assert used.value() == 0b110
        for number, (future, size) in enumerate(zip(futures, sizes, strict=True), start=2):
            assert future.value().tolist() == [number + 1.0] * size
            assert future.value().storage_offset() == 0, "DDP takes what it gets for the begin of its memory"


def test_buckets_of_other_kinds_are_summed_apart(group: Group) -> None:
    reduction, room = RetainedReduction(number=1), SumBuffers()
    futures = [reduction.add_bucket(torch.ones(2, 3, dtype=dtype), room) for dtype in (torch.float32, torch.float64)]
    reduction.complete(ReductionRow(), 0, room)
    reduction.start()
    assert group.summed == [6, 6]
    reduction.deliver(COUNTS, is_mean=True)
    assert [(future.value().dtype, future.value().shape) for future in futures] == [
        (torch.float32, (2, 3)),
        (torch.float64, (2, 3)),
    ]


def test_what_was_begun_in_a_group_that_is_gone_is_begun_anew_from_what_was_kept(group: Group) -> None:
    reduction, room = RetainedReduction(number=1), SumBuffers()
    futures = [reduction.add_bucket(bucket, room) for bucket in buckets([SMALL, LARGE])]
    reduction.complete(ReductionRow(), 0, room)
    for _ in range(2):
        reduction.start()
        reduction.detach_from_group()
    reduction.start()
    reduction.deliver(COUNTS, is_mean=False)
    assert group.summed == [SMALL + LARGE] * 3
    assert [future.value()[0].item() for future in futures] == [3.0, 4.0], "the other's gradients once"


def test_who_waits_for_any_bucket_hears_that_there_is_no_result(group: Group) -> None:
    reduction, room = RetainedReduction(number=1), SumBuffers()
    futures: list[Any] = [reduction.add_bucket(bucket, room) for bucket in buckets([LARGE, SMALL])]
    reduction.start()
    assert group.summed == [LARGE], "the small one waits for another"
    reduction.fail(RuntimeError("the job is over"))
    for future in (*futures, reduction.complete(ReductionRow(), 0, room)):
        with pytest.raises(RuntimeError, match="the job is over"):
            future.wait()


class Numbers(Group):
    """Of another member, whose gradients are all this."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self._number = number

    def all_reduce(self, tensor: Tensor, **_: Any) -> Group:
        tensor.add_(self._number)
        return self


def committed(protocol: CommitProtocol, own: Sequence[Tensor]) -> list[Tensor]:
    """What the script of a member gets with these gradients."""
    reduction, room = RetainedReduction(number=1), SumBuffers()
    futures = [reduction.add_bucket(bucket, room) for bucket in own]
    reduction.complete(ReductionRow(), 0, room)
    reduction.start()
    reduction.wait_done()
    protocol._deliver(_PreparedCommit(COUNTS, []), reduction)
    return [future.value() for future in futures]


@pytest.mark.parametrize(
    ("other", "own", "said"),
    [
        (1.0, float("nan"), ["1 numbers are not finite, and so 1 of the sum"]),
        (1.0, float("inf"), ["1 numbers are not finite, and so 1 of the sum"]),
        (float("nan"), 1.0, []),  # it is the other's fault
        (float("nan"), float("nan"), [f"1 numbers are not finite, and so {SMALL + LARGE} of the sum"]),
        (3e38, 3e38, []),  # a sum that overflows is nobody's
        (1.0, 1.0, []),
    ],
)
def test_the_member_whose_gradients_are_not_finite_is_named(
    other: float, own: float, said: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(retained_reductions, "dist", Numbers(other))
    state: Any = SimpleNamespace(lock=threading.Condition(), trainer=SimpleNamespace(wires=WireChoice()), member="1.0")
    protocol = CommitProtocol(state, list, is_mean=False, num_parameters=0)
    gradients = buckets([SMALL, LARGE])
    gradients[1][5] = own
    assert committed(protocol, gradients)[0].shape == (SMALL,)
    expected = [
        f"ringweave: gradients of member 1.0: '{got}', expected finite numbers. Look at the samples and the loss of "
        "this worker, or clip gradients. [reduction 1]"
        for got in said
    ]
    assert [record.getMessage() for record in caplog.records] == expected


def test_a_member_is_named_once_until_its_gradients_are_finite_again(
    group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    state: Any = SimpleNamespace(lock=threading.Condition(), trainer=SimpleNamespace(wires=WireChoice()), member="1.0")
    protocol = CommitProtocol(state, list, is_mean=False, num_parameters=0)
    for value, count in ((float("nan"), 1), (float("nan"), 1), (1.0, 1), (float("inf"), 2)):
        committed(protocol, [torch.full((SMALL,), value)])
        assert len(caplog.records) == count


def test_a_choice_holds_from_a_reduction_on_that_nobody_has_begun() -> None:
    wires = WireChoice()
    assert not wires.may_encode
    assert wires.change_from(9, "int8")
    assert [wires.of_reduction(number) for number in (1, 8, 9, 99)] == ["exact", "exact", "int8", "int8"]
    assert wires.change_from(9, "bf16"), "a generation that was given up has no say"
    assert not wires.change_from(12, "bf16")
    for number in range(20, 30):
        wires.change_from(number, ("int4", "exact")[number % 2])
    assert wires.of_reduction(28) == "int4"


def test_a_member_that_joins_follows_the_formats_of_the_others() -> None:
    def choose(*_: Any) -> tuple[str, str]:
        return "int8", "; the links are thin"

    old, new = (WireChoice("exact", choose, 0.5) for _ in range(2))
    old.change_from(9, old.propose(None, []))  # pyrefly: ignore - no plan is needed here
    assert old.reason == "; the links are thin"
    details = json.loads(json.dumps(old.status_details()))
    assert details == {"wires": [[0, "exact"], [9, "int8"]], "trial_s": 0.5}
    new.adopt(details)
    assert [new.of_reduction(number) for number in (8, 9)] == ["exact", "int8"]


def test_what_a_format_has_left_goes_with_the_first_exact_sum(group: Group) -> None:
    """Once, also if the sum is begun anew, and again if its step restarts."""
    wires = WireChoice("int8", lambda *_: ("exact", ""))
    room, weight = SumBuffers(wires), torch.zeros(LARGE)
    parameters = [weight]

    def reduce(number: int, *, restarts: bool = False, num_starts: int = 1) -> float:
        reduction = RetainedReduction(number=number)
        future = reduction.add_bucket(torch.ones(LARGE), room, parameters)
        reduction.complete(ReductionRow(), 0, room)
        for _ in range(num_starts):
            reduction.detach_from_group()
            reduction.start()
        reduction.wait_done()
        rows = (ReductionRow(restarts_step=restarts),)
        reduction.deliver(Commit(number=number, members=("0.0",), rows=rows), is_mean=False)
        return future.value()[0].item()

    exact_sum = 1.0 + reduce(1) - 1.0
    assert room.residuals is not None
    room.residuals.of_message(0, parameters, LARGE).fill_(0.25)
    wires.change_from(2, "exact")
    assert reduce(2, restarts=True) == exact_sum + 0.25
    assert reduce(3, num_starts=2) == exact_sum + 0.25
    assert reduce(4) == exact_sum
