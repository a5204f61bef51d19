"""What becomes of a group's collectives when one fails, on one rank whose director does what the test wants."""

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.distributed import ReduceOp

from ringweave.comm.counters import CollectiveCounters
from ringweave.comm.engine import engine
from ringweave.comm.engine.engine import NUM_CHANNELS, CollectiveEngine
from ringweave.comm.engine.messages import ReducedTensor
from ringweave.comm.engine.reductions import reduction_for
from ringweave.comm.failure_registry import CollectiveFailureReport, GroupEnd
from ringweave.comm.group_info import GroupInfo, RankInfo, RankLocation
from ringweave.comm.transport.interface import TransferFailedError
from ringweave.comm.tuning.selector import CollectiveRequest, PendingCollective, ScheduleDecision
from ringweave.errors import CommunicationError, PeerError
from ringweave.planning import ScheduleChoice
from ringweave.schedules import NATIVE
from ringweave.telemetry.events import EventLog, read_events
from ringweave.training.elastic import member_details

MEMBERS = GroupInfo((RankInfo(0, RankLocation("a", "127.0.0.1"), ()),), 0, b"")
SOON = timedelta(seconds=100)


class Transport:
    """Of a lane without peers."""

    def __init__(self) -> None:
        self.aborted = threading.Event()

    def abort(self) -> None:
        self.aborted.set()

    def close(self) -> None:
        pass


class Director:
    """Decides all at once; `at_turn` is called with the number of each collective when its turn comes."""

    plan: Any = None

    def __init__(self, schedule: str, at_turn: Callable[[int, Transport], object]) -> None:
        self.schedule, self.at_turn = schedule, at_turn
        self.num_admitted = 0
        self.met: list[int] = []

    def admit(
        self, asked: CollectiveRequest, bind: Callable[[ScheduleDecision], None], timeout_s: float
    ) -> PendingCollective:
        self.num_admitted += 1
        choice = ScheduleChoice(schedule=self.schedule, num_segments=1, lag=0, window=1, predicted_s=1.0)
        decision = ScheduleDecision(choice, self.plan, 1)
        bind(decision)
        return PendingCollective(self.num_admitted, asked, bind, decision=decision)

    def wait_for_decision(
        self, ticket: PendingCollective, transport: Transport, *, tag: int, timeout_s: float
    ) -> ScheduleDecision:
        self.at_turn(ticket.number, transport)
        assert ticket.decision is not None
        return ticket.decision

    def barrier(self, transport: Transport, *, tag: int, timeout_s: float) -> None:
        self.met.append(tag >> 32)

    def record_finished(self, ticket: PendingCollective, seconds: float) -> None:
        pass

    def abort(self) -> None:
        pass

    def flush_timings(self) -> None:
        pass


class Hosts:
    """A native backend for a group of one."""

    def prepare(self, lane: int, meet: Callable[[], object]) -> None:
        meet()

    def allreduce(self, lane: int, message: torch.Tensor, op: Any, timeout_s: float) -> None:
        pass

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass


class Board:
    """Notes what is reported; `while_explaining` is called by whoever looks for who is to blame."""

    def __init__(self) -> None:
        self.reports: list[CollectiveFailureReport] = []
        self.while_explaining: Callable[[], object] = lambda: None

    def publish(self, report: CollectiveFailureReport) -> None:
        self.reports.append(report)

    def diagnose(self, failure: TransferFailedError, doing: str) -> CommunicationError:
        self.while_explaining()
        return PeerError(f"{doing}: {failure}")

    def stop_waiting(self) -> None:
        pass


class Group:
    """An engine and what it works with."""

    def __init__(
        self,
        at_turn: Callable[[int, Transport], object] = lambda number, transport: None,
        *,
        schedule: str = "ring",
        log: EventLog | None = None,
    ) -> None:
        self.transports = [Transport() for _ in range(NUM_CHANNELS)]
        self.director: Any = Director(schedule, at_turn)
        self.board: Any = Board()
        hosts: Any = Hosts()
        counters = CollectiveCounters(None, 0, "g")
        self.end = GroupEnd(MEMBERS, self.board, hosts, counters, log)
        self.engine = CollectiveEngine(MEMBERS, self.director, self.transports, hosts, self.end, counters, log)

    def allreduce(self) -> Any:
        op, tensor = ReduceOp.SUM, torch.ones(100)
        message = ReducedTensor.of(tensor, op, reduction_for(op, tensor.dtype))
        asked = CollectiveRequest(num_bytes=tensor.nbytes, forced=None, native_can=True)
        return self.engine.run(message, [tensor], asked, 100.0)


@pytest.fixture
def groups() -> Iterator[list[Group]]:
    """Are closed at the end."""
    made: list[Group] = []
    yield made
    for group in made:
        group.engine.close(100.0)


@pytest.mark.parametrize("failure", [TransferFailedError(None, "cut", hung=False), MemoryError("no room")], ids=str)
def test_who_waits_for_a_program_that_is_never_made_fails_with_the_one_that_was_to_make_it(
    groups: list[Group], failure: Exception
) -> None:
    has_begun = threading.Event()

    def at_turn(number: int, transport: Transport) -> None:
        if number == 2:
            has_begun.set()
        else:
            assert has_begun.wait(100)
            raise failure

    groups.append(group := Group(at_turn))
    first, second = group.allreduce(), group.allreduce()
    with pytest.raises(CommunicationError, match=r"^allreduce #1 \(.*(cut|no room)"):
        first.wait(SOON)
    with pytest.raises(CommunicationError, match=r"allreduce #2 .* this process group has failed before: allreduce #1"):
        second.wait(SOON)
    assert len(group.board.reports) == 1


def test_a_collective_whose_memory_cannot_be_given_back_fails_and_the_next_ones_too(groups: list[Group]) -> None:
    """A device that fails must not end the thread of the channel, for which all later works would wait."""

    class UnreturnableTensor(ReducedTensor):
        def release(self) -> None:
            raise RuntimeError("the device is lost")

    groups.append(group := Group(schedule="native"))
    op, tensor = ReduceOp.SUM, torch.ones(100)
    message = UnreturnableTensor.of(tensor, op, reduction_for(op, tensor.dtype))
    asked = CollectiveRequest(num_bytes=tensor.nbytes, forced=None, native_can=True)
    first = group.engine.run(message, [tensor], asked, 100.0)
    with pytest.raises(CommunicationError, match=r"allreduce #1 .*the device is lost"):
        first.wait(SOON)
    for _ in range(2):
        with pytest.raises(CommunicationError, match="has failed before"):
            group.allreduce().wait(SOON)


def test_the_first_failure_of_a_rank_is_the_one_that_counts(groups: list[Group], tmp_path: Path) -> None:
    """The second one follows from it, while the group looks for who is to blame."""
    log = EventLog(tmp_path / "events.jsonl")
    groups.append(group := Group(log=log))
    consequence, later = TransferFailedError(1, "connection closed by peer", hung=False), []

    def fail_again() -> None:
        thread = threading.Thread(target=lambda: later.append(group.end.fail(consequence, "allreduce #2")))
        thread.start()
        thread.join(0.2)
        threads.append(thread)

    threads: list[threading.Thread] = []
    group.board.while_explaining = fail_again
    cause = TransferFailedError(3, "nothing for 9 s", hung=True)
    first = group.end.fail(cause, "allreduce #1")
    threads[0].join(100)
    report = CollectiveFailureReport(operation="allreduce #1", suspect=3, is_hung=True, overrun="nothing for 9 s")
    assert group.board.reports == [report]
    (second,) = later
    assert str(first) == "allreduce #1: nothing for 9 s"
    assert str(second) == "allreduce #2: this process group has failed before: allreduce #1: nothing for 9 s"
    membership: Any = SimpleNamespace(members=("m0", "m1", "m2", "m3"))
    assert [member_details.suspected_members(error, membership) for error in (first, second)] == [["m3"], ["m3"]]
    failed = [event for event in read_events(tmp_path / "events.jsonl") if event["kind"] == "communication_failed"]
    assert [event["text"] for event in failed] == [str(first)]


def test_a_group_that_is_closed_cuts_all_lanes_before_it_waits_for_one() -> None:
    """The first lane waits for what the second one is to make."""
    are_at_it = threading.Barrier(3)

    def at_turn(number: int, transport: Transport) -> None:
        are_at_it.wait(100)
        if number == 1:
            assert transport.aborted.wait(100)
            raise TransferFailedError(None, "cut", hung=False)

    group = Group(at_turn)
    works = [group.allreduce(), group.allreduce()]
    waiting: Any = group.engine._channels[0]
    close, were_cut = waiting.close, []

    def note_and_close(timeout_s: float) -> None:
        were_cut.extend(transport.aborted.is_set() for transport in group.transports)
        group.transports[1].abort()
        close(timeout_s)

    waiting.close = note_and_close
    are_at_it.wait(100)
    group.engine.close(0.5)
    assert were_cut == [True, True]
    for work in works:
        with pytest.raises(CommunicationError, match="it was destroyed"):
            work.wait(SOON)


def test_an_aborted_group_is_closed_though_a_lane_is_in_what_nobody_can_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the constructor of the native backend, while a peer has stopped."""
    monkeypatch.setattr(engine, "_ABORT_TIMEOUT_S", 0.1)
    has_begun, may_end = threading.Event(), threading.Event()

    def stand_still(number: int, transport: Transport) -> None:
        has_begun.set()
        assert may_end.wait(100)

    group = Group(stand_still)
    work = group.allreduce()
    assert has_begun.wait(100)
    group.end.abort()
    closing = threading.Thread(target=lambda: group.engine.close(1800.0))
    closing.start()
    closing.join(60)
    was_closed = not closing.is_alive()
    may_end.set()
    closing.join(100)
    assert was_closed
    with pytest.raises(CommunicationError, match="aborted"):
        work.wait(SOON)


def test_all_ranks_meet_before_a_lane_gets_its_host_library(groups: list[Group]) -> None:
    groups.append(group := Group(schedule=NATIVE))
    group.allreduce().wait(SOON)
    assert group.director.met == [1]


def test_an_madethat_a_group_gets_after_its_end_is_aborted_at_once() -> None:
    group = Group()
    group.end.abort()
    late: Any = [Transport() for _ in range(NUM_CHANNELS)]
    counters, hosts = CollectiveCounters(None, 0, "g"), cast(Any, Hosts())
    made = CollectiveEngine(MEMBERS, group.director, late, hosts, group.end, counters)
    assert all(transport.aborted.is_set() for transport in (*group.transports, *late))
    made.close(1.0)
