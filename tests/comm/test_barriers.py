"""Barriers of groups that run collectives by schedules, calls that differ or run out of time, and their errors."""

import re
import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore
from torch.distributed.distributed_c10d import BarrierOptions

from ringweave.comm import backend, failure_registry
from ringweave.comm.failure_registry import CollectiveFailureReport, FailureRegistry
from ringweave.comm.group_info import GroupInfo, RankInfo, RankLocation
from ringweave.comm.native_backend import transfer_failure
from ringweave.comm.transport.interface import TransferFailedError
from ringweave.comm.work import JoinedWork, PendingWork
from ringweave.errors import CommunicationError, DisagreementError
from ringweave.testing.ranks import Ranks
from ringweave.training.elastic import member_details
from tests.comm import barrier_functions

NUM_RANKS = 3


@pytest.mark.distributed
@pytest.mark.slow
def test_barriers_wait_for_scheduled_collectives_and_name_those_that_stay_away() -> None:
    settings = {"timeout_s": 200.0, "nodes": ["a"] * NUM_RANKS, "environ": {"RINGWEAVE_SCHEDULE": "ring"}}
    with Ranks(barrier_functions.pass_barriers, NUM_RANKS, **settings) as ranks:
        found = ranks.values(timeout_s=250)
    assert [each["sums done"] for each in found] == [[True] * 4] * NUM_RANKS
    assert [each["crossed"] for each in found] == [3.0] * NUM_RANKS
    assert re.search(r"time ran out \(timeout of 0\.001 s\): rank [12] \(node a\) does not answer", found[0]["overrun"])
    assert "if it is only late, give the collective or its group a longer timeout" in found[0]["overrun"]
    for each in found[1:]:
        assert "time ran out" in each["overrun"]
        assert "(timeout of 0.001 s)" in each["overrun"]
        assert "gone" not in each["overrun"]
    for each in found:
        *errors, total = each["mismatches"]
        assert total == "6.0"
        assert len(errors) == 3
        for error in errors:
            assert re.match(r"DisagreementError: \w+: rank \d \(node a\) is about to run ", error)
            assert "expected the same collective on equal tensors on every rank" in error
        call = '{"operation": "ALLREDUCE", "SequenceNumber": 1, "shapes": [[2]], "types": ["torch.FloatTensor"], '
        assert call + '"devices": ["cpu"]}' in errors[0]
        assert "Collectives differ in the following aspects: shapes." in errors[0]
        assert '{"operation": "BARRIER", "SequenceNumber": 2, "shapes": [], "types": [], "devices": []}' in errors[1]
        assert "in the following aspects: operation, shapes, types, devices." in errors[1]
        assert '"SequenceNumber": 3, "shapes": [[2]], "types": ["torch.LongTensor"], "devices": ["cpu"]}' in errors[2]
        assert "in the following aspects: types." in errors[2]
    for kind, text in (("first", "Rank 1 failed to pass monitoredBarrier"), ("all", "Ranks 1 failed to pass")):
        assert "monitored_barrier: time ran out" in found[0]["absent"][kind]
        assert "rank 1 (node a) does not answer" in found[0]["absent"][kind]
        assert text in found[0]["absent"][kind]
        assert "rank 1 (node a) does not answer" in found[2]["absent"][kind]
        assert "Rank 2 successfully reached monitoredBarrier" in found[2]["absent"][kind]
        assert kind not in found[1]["absent"]
    assert len(found[0]["aborted"]) == 2
    assert all("process group: aborted" in error for error in found[0]["aborted"])


def make_works() -> tuple[PendingWork, PendingWork, JoinedWork]:
    """Return an earlier collective, a native barrier, and the barrier of both."""
    earlier, native = PendingWork([torch.ones(1)]), PendingWork([])
    return earlier, native, JoinedWork([earlier, native], [])


def finish(work: PendingWork, error: Exception | None = None) -> None:
    work.set_finished(error)
    work.resolve_future()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["earlier first", "native first"])
def test_an_asynchronous_barrier_is_done_when_both_are(order: tuple[int, int]) -> None:
    *works, joined = make_works()
    future = joined.get_future()
    for index in order:
        assert not joined.is_completed()
        assert not future.done()
        finish(works[index])
    assert joined.is_completed()
    assert joined.is_success()
    assert joined.exception() is None
    assert joined.wait()
    assert joined.result() == []
    assert future.wait() == []
    assert joined.get_future().wait() == []


def test_an_asynchronous_barrier_fails_with_the_earlier_collective() -> None:
    earlier, native, joined = make_works()
    future, failure = joined.get_future(), RuntimeError("allreduce #1: rank 1 is gone")
    finish(native)
    finish(earlier, failure)
    assert joined.exception() is failure
    assert not joined.is_success()
    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        joined.wait()
    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        future.wait()


def test_an_asynchronous_barrier_waits_in_another_thread_until_both_are_done() -> None:
    earlier, native, joined = make_works()
    done: list[bool] = []
    waiting = threading.Thread(target=lambda: done.append(joined.wait(timedelta())))
    waiting.start()
    finish(native)
    assert done == []
    finish(earlier)
    waiting.join(100)
    assert done == [True]


def test_barrier_options_are_those_that_the_arguments_mean() -> None:
    given, limit = BarrierOptions(), timedelta(seconds=3)
    assert backend._barrier_options(given, None) is given
    assert backend._barrier_options(limit, None).timeout == limit
    assert backend._barrier_options(None, limit).timeout == limit
    assert backend._barrier_options(None, None).asyncOp


def registry_with(reports: dict[int, CollectiveFailureReport], own: int) -> FailureRegistry:
    """Return the registry of one of three ranks, in which these have reported; the grace time is over at once."""
    store, times = HashStore(), iter([0.0, failure_registry.REPORT_GRACE_S])
    ranks = tuple(RankInfo(rank, RankLocation(f"n{rank}", "127.0.0.1"), ()) for rank in range(3))
    for rank, report in reports.items():
        FailureRegistry(store, GroupInfo(ranks, rank, b"")).publish(report)
    return FailureRegistry(store, GroupInfo(ranks, own, b""), clock=lambda: next(times), sleep=lambda _: None)


OVERRUN = CollectiveFailureReport(operation="allreduce #1", suspect=1, is_hung=True, overrun="timeout of 0.001 s")
CLOSED = TransferFailedError(0, "connection closed by peer", hung=False)


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        (
            {0: OVERRUN, 1: CollectiveFailureReport(operation="allreduce #1", suspect=0)},
            "allreduce #1: time ran out (timeout of 0.001 s): rank 2 (node n2) does not answer, expected every rank",
        ),
        (
            {rank: CollectiveFailureReport(operation="allreduce #1", suspect=0) for rank in (1, 2)} | {0: OVERRUN},
            "allreduce #1: time ran out on rank 0 (node n0) (timeout of 0.001 s), expected every rank of the group to "
            "take part in time. All ranks are alive: look into the log of the one that comes late, and if it is only "
            "late, give the collective or its group a longer timeout. [rank 1 (node n1): connection closed by peer]",
        ),
        (
            {rank: CollectiveFailureReport(operation="allreduce #1", suspect=0) for rank in (1, 2)},
            "allreduce #1: rank 0 (node n0) is gone, expected every rank of the group to take part. Look into the log "
            "of that rank first. [rank 1 (node n1): connection closed by peer]",
        ),
    ],
    ids=["one is silent", "all are alive", "one is gone"],
)
def test_time_that_ran_out_is_no_rank_that_is_gone(reports: dict[int, CollectiveFailureReport], expected: str) -> None:
    error: Any = registry_with(reports, 1).diagnose(CLOSED, "allreduce #1")
    assert str(error).startswith(expected)


@pytest.mark.parametrize(
    ("text", "is_hung"),
    [
        (
            "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 5 ms\n Original exception: \nTimed out waiting 5ms",
            True,
        ),
        ("Rank 2 failed\n Original exception: \nConnection closed by peer", False),
        ("Connection closed by peer\nException raised from waitTimeout at unbound_buffer.cc", False),
    ],
)
def test_a_native_failure_is_one_of_time_if_torch_says_so_before_its_stack(text: str, *, is_hung: bool) -> None:
    failure = transfer_failure(RuntimeError(text))
    assert failure.hung == is_hung
    assert str(failure) == text.partition("\n")[0]


WIDE, NARROW = "exchange #7 (3 x torch.int64)", "exchange #7 (2 x torch.int64)"


@pytest.mark.parametrize(
    ("operations", "culprits"),
    [
        ({0: WIDE, 1: NARROW, 2: NARROW}, (0,)),
        ({0: NARROW, 1: NARROW, 2: WIDE}, (2,)),
        ({0: WIDE, 1: NARROW}, None),
        ({0: WIDE, 1: NARROW, 2: "exchange #6 (2 x torch.int64)"}, None),
        ({0: WIDE, 1: WIDE, 2: NARROW}, (2,)),
        ({0: "allreduce #7 (2 x torch.int64)", 1: NARROW, 2: NARROW}, None),
    ],
)
def test_of_an_exchange_the_rows_of_most_are_right(
    operations: dict[int, str], culprits: tuple[int, ...] | None
) -> None:
    reports = {
        rank: CollectiveFailureReport(operation=operation, suspect=None, disagreement="rank 1 runs something else")
        for rank, operation in operations.items()
    }
    error = registry_with(reports, own=1).find_odd_rows(operations[1])
    assert (error.culprits if error else None) == culprits
    diagnosed = registry_with(reports, own=1).diagnose(CLOSED, operations[1])
    assert isinstance(diagnosed, DisagreementError)
    assert diagnosed.culprits == (culprits or ())
    text = "sent a row of" if culprits else "rank 1 runs something else [found by rank 0 (node n0)]"
    assert text in str(diagnosed)
    membership: Any = SimpleNamespace(members=("0.0", "1.0", "2.0"))
    repeated = CommunicationError("failed before")
    repeated.__cause__ = diagnosed
    diagnosed.__cause__ = CLOSED
    expected = [f"{rank}.0" for rank in culprits or (0,)]
    assert member_details.suspected_members(repeated, membership) == expected
