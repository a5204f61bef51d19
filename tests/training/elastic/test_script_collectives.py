"""Collectives of scripts, without processes: headers, results, and what members that join are given."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ringweave.errors import CommunicationError, TrainingError
from ringweave.membership.membership_records import MemberStatus
from ringweave.training.elastic import script_collectives
from ringweave.training.elastic.recovery import CatchUp, ReplayLog
from ringweave.training.elastic.retained_reductions import NUM_ROW_WORDS, ReductionRow, row_to_tensor
from ringweave.training.elastic.script_collectives import (
    MAX_INPUT_BYTES,
    MAX_STARTUP_BYTES,
    CollectiveCall,
    CollectiveInterceptor,
    CollectiveResult,
    OperationHeader,
    StartupLog,
)

MEMBERS = ("0.0", "1.0", "2.1")


class Group:
    """Records what is left to it."""

    def __init__(self) -> None:
        self.own_calls: list[str] = []

    def allreduce(self, *_: Any) -> None:
        self.own_calls.append("allreduce")

    def allgather(self, *_: Any) -> None:
        self.own_calls.append("allgather")

    def _allgather_base(self, *_: Any) -> None:
        self.own_calls.append("_allgather_base")

    def broadcast(self, *_: Any) -> None:
        self.own_calls.append("broadcast")

    def barrier(self, *_: Any) -> None:
        self.own_calls.append("barrier")


class Others:
    """The session of a job whose other members call the same with inputs of their own."""

    def __init__(self, inputs: Sequence[Tensor], *, neutral: Sequence[str] = (), lost: Sequence[str] = ()) -> None:
        """`inputs` are those of all members; some are recovering, and others were lost before all had committed."""
        self._inputs = dict(zip(MEMBERS, inputs, strict=True))
        self._neutral, self._members = neutral, tuple(each for each in MEMBERS if each not in lost)
        self.calls: list[CollectiveCall] = []
        self.results: list[CollectiveResult] = []

    def run(self, call: CollectiveCall) -> None:
        self.calls.append(call)
        own = OperationHeader.of_call(call, self._members)
        neutral = OperationHeader.of_gradients(is_neutral=True)
        table = torch.stack(
            [(neutral if each in self._neutral else own).to_tensor(NUM_ROW_WORDS + 1) for each in self._members]
        )
        headers = script_collectives.check_same_operation(table, self._members)
        rows = [self._inputs[each].reshape(-1).view(torch.uint8) for each in self._members]
        result = script_collectives.result_of_rows(headers, self._members, torch.stack(rows))
        self.results.append(CollectiveResult.of_json(result.to_json()))
        call.finish(self.results[-1])


def attached(run: Callable[[CollectiveCall], None]) -> Any:
    group: Any = Group()
    CollectiveInterceptor(run, lambda: MEMBERS).attach(group)
    return group


def options(operation: Any) -> dist.AllreduceOptions:
    made = dist.AllreduceOptions()
    made.reduceOp = operation
    return made


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8]
)
@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (dist.ReduceOp.SUM, 9),
        (dist.ReduceOp.AVG, 3),
        (dist.ReduceOp.MAX, 4),
        (dist.ReduceOp.MIN, 2),
        (dist.ReduceOp.PRODUCT, 24),
    ],
    ids=str,
)
def test_an_allreduce_has_the_result_of_torch(dtype: torch.dtype, operation: Any, expected: int) -> None:
    inputs = [torch.full((2, 3), value).to(dtype) for value in (2, 3, 4)]
    others = Others(inputs)
    tensor = inputs[0].clone().t()  # not contiguous
    work = attached(others.run).allreduce([tensor], options(operation))
    assert tensor.unique().tolist() == [expected]
    assert work.wait()
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    work.synchronize()
    assert work.result() == [tensor]
    assert work.get_future().value()[0] is tensor


def test_booleans_are_reduced() -> None:
    tensor = torch.tensor([False, True])
    others = Others([tensor, torch.tensor([True, True]), torch.tensor([False, True])])
    attached(others.run).allreduce([tensor], options(dist.ReduceOp.MAX))
    assert tensor.tolist() == [True, True]


def test_gradients_and_tensors_of_inference_mode_are_written_as_torch_writes_them() -> None:
    inputs = [torch.ones(2)] * 3
    leaf = torch.ones(2, requires_grad=True)
    with torch.inference_mode():
        inferred = torch.ones(2)
    for tensor in (leaf, inferred):
        attached(Others(inputs).run).allreduce([tensor], options(dist.ReduceOp.SUM))
        assert tensor.tolist() == [3.0, 3.0]


def test_a_mean_is_over_the_members_that_took_part() -> None:
    inputs = [torch.tensor([2.0]), torch.tensor([4.0]), torch.tensor([99.0])]
    for others in (Others(inputs, neutral=["2.1"]), Others(inputs, lost=["2.1"])):
        tensor = torch.tensor([2.0])
        attached(others.run).allreduce([tensor], options(dist.ReduceOp.AVG))
        assert tensor.item() == 3.0


@pytest.mark.parametrize(
    ("others", "num_rows", "expected"),
    [
        ({}, 3, [1.0, 2.0, 3.0]),
        ({"neutral": ["0.0"]}, 3, [2.0, 2.0, 3.0]),
        ({"neutral": ["1.0"]}, 3, [1.0, 3.0, 3.0]),
        ({"lost": ["0.0"]}, 3, [2.0, 2.0, 3.0]),
        ({"lost": ["0.0"]}, 2, [2.0, 3.0]),
        ({"lost": ["0.0"]}, 5, [2.0, 3.0, 2.0, 3.0, 2.0]),
        ({}, 2, [1.0, 2.0]),
    ],
    ids=["all", "first recovers", "second recovers", "lost", "lost before the call", "older size", "smaller size"],
)
def test_a_row_that_is_missing_is_another_member_s(
    others: dict[str, Any], num_rows: int, expected: list[float]
) -> None:
    inputs = [torch.tensor([value, -value]) for value in (1.0, 2.0, 3.0)]
    rows = [torch.empty(2) for _ in range(num_rows)]
    attached(Others(inputs, **others).run).allgather([rows], [inputs[0]])
    assert [row.tolist() for row in rows] == [[value, -value] for value in expected]
    table = torch.empty(2 * num_rows)
    attached(Others(inputs, **others).run)._allgather_base(table, inputs[0])
    assert table.view(num_rows, 2)[:, 0].tolist() == expected


def broadcast_options(root: int) -> dist.BroadcastOptions:
    made = dist.BroadcastOptions()
    made.rootRank = root
    return made


def test_a_broadcast_passes_on_the_source_s_value() -> None:
    inputs = [torch.tensor([value]) for value in (1, 2, 3)]
    others = Others(inputs, lost=["0.0"])
    tensor = torch.tensor([0])
    attached(others.run).broadcast([tensor], broadcast_options(2))
    assert tensor.item() == 3
    assert others.results[0].rows.shape == (1, 8), "no more is kept"


def test_a_broadcast_without_its_source_raises_on_all() -> None:
    group = attached(Others([torch.tensor([1])] * 3, lost=["1.0"]).run)
    with pytest.raises(
        CommunicationError, match=r"broadcast: 'a source that was lost.*Catch this error, and broadcast"
    ):
        group.broadcast([torch.tensor([0])], broadcast_options(1))


def test_a_barrier_has_no_input() -> None:
    others = Others([torch.empty(0)] * 3)
    assert attached(others.run).barrier().wait()
    assert others.calls[0].payload.nbytes == 0


def test_what_is_large_or_of_another_kind_is_left_to_the_group() -> None:
    others = Others([torch.empty(0)] * 3)
    group = attached(others.run)
    large, small = torch.empty(MAX_INPUT_BYTES + 1, dtype=torch.uint8), torch.ones(2)
    group.allreduce([large], options(dist.ReduceOp.SUM))
    group.allreduce([small, small], options(dist.ReduceOp.SUM))
    group.allreduce([torch.eye(2).to_sparse()], options(dist.ReduceOp.SUM))
    group.allgather([[large]], [large])
    group.allgather([[small.long()]], [small])
    group._allgather_base(torch.empty(3), small)
    group.broadcast([large], broadcast_options(0))
    assert group.own_calls == ["allreduce"] * 3 + ["allgather"] * 2 + ["_allgather_base", "broadcast"]
    assert others.calls == []


def test_an_operation_that_torch_cannot_compute_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(CommunicationError, match="reduce operation band"):
        attached(pytest.fail).allreduce([torch.ones(1)], options(dist.ReduceOp.BAND))


def call_of(tensor: Tensor, operation: Any = dist.ReduceOp.SUM) -> CollectiveCall:
    found: list[CollectiveCall] = []
    attached(found.append).allreduce([tensor], options(operation))
    return found[0]


def result_of(call: CollectiveCall) -> CollectiveResult:
    headers = [OperationHeader.of_call(call, MEMBERS)] * 3
    return script_collectives.result_of_rows(headers, MEMBERS, torch.stack([call.payload] * 3))


def words_of(call: CollectiveCall | None) -> Tensor:
    if call is None:
        return row_to_tensor(ReductionRow(num_planned=4), 0b1, 3)
    return OperationHeader.of_call(call, MEMBERS).to_tensor(NUM_ROW_WORDS + 1)


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (None, call_of(torch.ones(1)), r"operation of worker 1\.0: 'allreduce of 4 bytes', expected gradients, as on"),
        (call_of(torch.ones(1)), None, r"operation of worker 1\.0: 'gradients', expected allreduce of 4 bytes"),
        (call_of(torch.ones(1)), call_of(torch.ones(2)), r"'allreduce of 8 bytes', expected allreduce of 4 bytes"),
        (
            call_of(torch.ones(1)),
            call_of(torch.ones(1), dist.ReduceOp.MAX),
            r"4 bytes, with another operation or dtype', expec",
        ),
    ],
)
def test_members_in_different_operations_are_told(
    first: CollectiveCall | None, second: CollectiveCall | None, text: str
) -> None:
    table = torch.stack([words_of(first), words_of(second), words_of(first)])
    with pytest.raises(TrainingError, match=text):
        script_collectives.check_same_operation(table, MEMBERS)


def test_members_report_what_they_wait_for() -> None:
    def check(*reported: tuple[int, str]) -> None:
        statuses = [
            MemberStatus(member=member, committed=number) for member, (number, _) in zip(MEMBERS, reported, strict=True)
        ]
        script_collectives.check_reported_operations(statuses, [text for _, text in reported])

    check((4, "gradients"), (5, "barrier"), (4, ""))
    check((4, "gradients"), (4, "gradients"), (4, ""))
    with pytest.raises(
        TrainingError, match=r"operation of worker 2\.1: 'barrier', expected gradients, as on worker 0\.0"
    ):
        check((4, "gradients"), (4, ""), (4, "barrier"))


def test_a_worker_that_joins_gets_the_results_of_the_start() -> None:
    first, joined = StartupLog(), StartupLog()
    calls = [call_of(torch.ones(size)) for size in (1, 2, 3)]
    for call in calls:
        first.record(result_of(call))
    joined.load_state_dict(first.state_dict())
    assert not joined.is_replaying, "the job begins: all call them together"
    first.end()
    first.record(result_of(call_of(torch.ones(7))))
    joined.load_state_dict(first.state_dict())
    assert joined.is_replaying
    for call in (calls[0], calls[2]):  # it may leave one out
        assert joined.take(call, "2.1").digest == call.digest
    with pytest.raises(TrainingError, match=r"before its first train step: 'allreduce \(sum, 2 x .*no more"):
        joined.take(calls[1], "2.1")
    joined.end()
    assert not joined.is_replaying
    assert joined.state_dict() == first.state_dict(), "it passes them on"


def test_what_is_kept_of_the_start_is_bounded() -> None:
    log, large = StartupLog(), call_of(torch.ones(MAX_INPUT_BYTES // 4))
    for _ in range(3):
        log.record(result_of(large))
    log.record(result_of(call_of(torch.ones(1))))
    assert 3 * MAX_INPUT_BYTES > MAX_STARTUP_BYTES
    assert log.state_dict()["results"] == []


@pytest.mark.parametrize("state", [{}, {"has_ended": True, "results": [{}]}, {"has_ended": True, "results": 5}])
def test_what_is_no_log_of_the_start_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(TrainingError, match="collectives before the first train step"):
        StartupLog().load_state_dict(state)


class Crew:
    wire = "exact"

    is_between_steps = True


def recovering() -> tuple[CatchUp, ReplayLog]:
    log, crew = ReplayLog([[3, "float32", "cpu"]], 4), Crew()
    double: Any = crew
    return CatchUp("2.1", double, log), log


def test_a_worker_that_catches_up_gets_what_the_others_had() -> None:
    catching, log = recovering()
    call = call_of(torch.ones(2))
    catching.log.append_collective(result_of(call))
    assert catching.is_behind()
    assert log.num_collective_bytes == 24
    assert log.num_retained == 0, "it is no train step"
    catching.is_loaded, catching.waiting_call = True, call
    assert not catching.has_replayed_all
    assert catching.take_collective(call).digest == call.digest
    assert log.num_collective_bytes == 0
    catching.waiting_call = call
    assert catching.has_replayed_all
    assert not catching.is_caught_up, "only a reduction shows that"


def test_a_script_that_catches_up_otherwise_is_told() -> None:
    catching, _ = recovering()
    catching.log.append_collective(result_of(call_of(torch.ones(2))))
    with pytest.raises(TrainingError, match=r"catches up: 'allreduce \(sum, 3 x .*expected allreduce of 8 bytes"):
        catching.take_collective(call_of(torch.ones(3)))
    catching.log.append_collective(result_of(call_of(torch.ones(2))))
    catching.current_backward()
    with pytest.raises(TrainingError, match=r"catches up: 'gradients', expected allreduce of 8 bytes"):
        catching.take_reduction()


def test_a_source_that_joined_keeps_its_object_if_the_former_one_was_of_another_size() -> None:
    found: list[CollectiveCall] = []
    tensor = torch.tensor([5, 6], dtype=torch.uint8)
    attached(found.append).broadcast([tensor], broadcast_options(2))
    attached(found.append).broadcast([torch.zeros(3, dtype=torch.uint8)], broadcast_options(2))
    logged = result_of(found[1])
    assert found[0].is_same(logged, "2.1")
    assert not found[0].is_same(logged, "1.0")
    found[0].finish(logged)
    assert tensor.tolist() == [5, 6]


def test_others_wait_while_too_much_is_logged() -> None:
    catching, log = recovering()
    call = call_of(torch.ones(MAX_INPUT_BYTES // 4))
    while catching.has_room_for_collectives():
        catching.log.append_collective(result_of(call))
    assert log.num_operations == 22, "64 MiB, of three members each"
    catching.take_collective(call)
    assert catching.has_room_for_collectives()
