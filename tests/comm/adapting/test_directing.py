"""The order of decisions, on one rank with an adviser that says what the test wants."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from ringweave.comm.group_info import GroupInfo, RankInfo, RankLocation
from ringweave.comm.transport.interface import TransferFailedError
from ringweave.comm.tuning.selector import (
    CollectiveRequest,
    PendingCollective,
    ScheduleDecision,
    ScheduleSelector,
    ScheduleTimings,
)
from ringweave.planning import ScheduleChoice
from ringweave.planning.autotune.tuning_messages import TuningDecision, TuningReport
from ringweave.telemetry.events import EventLog, read_events

SIZE = 10**6
MEMBERS = GroupInfo((RankInfo(0, RankLocation("a", "127.0.0.1"), ()),), 0, b"")


class Transport:
    """Of a group without peers."""

    def connect(self, peers: set[int], timeout_s: float | None = None) -> None:
        assert not peers


class Guide:
    is_tunable = True

    def __init__(self) -> None:
        self.limits_s: list[float | None] = []
        self.is_cut = False

    def wait_for_plan(self, timeout_s: float | None = None, *, is_whole: bool = False) -> Any:
        self.limits_s.append(timeout_s)
        return "plan"

    def abort(self) -> None:
        self.is_cut = True

    def choose(
        self, num_bytes: int, name: str | None, kind: str, largest_block_bytes: int | None, wire: str
    ) -> ScheduleChoice:
        assert (largest_block_bytes, wire) == (None, "exact")
        return ScheduleChoice(schedule=name or "planned", num_segments=1, lag=0, window=2, predicted_s=1.0)


class Adviser:
    def __init__(self, rulings: Iterator[TuningDecision]) -> None:
        self.rulings = rulings
        self.reports: list[TuningReport] = []

    def complete_plan(self, whole: Any) -> None:
        assert whole == "plan"

    def decide(self, report: TuningReport, now_s: float) -> TuningDecision:
        self.reports.append(report)
        return next(self.rulings)


class Group:
    """A director, and what was decided in which order."""

    def __init__(self, *rulings: TuningDecision) -> None:
        self.adviser = Adviser(iter(rulings))
        make: Any = lambda plan: self.adviser  # noqa: E731
        self.timings = ScheduleTimings(None, 0, "g")
        self.guide: Any = Guide()
        self.director = ScheduleSelector(self.guide, MEMBERS, make, lambda adviser: None, self.timings)
        self.decided: list[tuple[int, str]] = []
        self.num_admitted = 0

    def admit(self, num_bytes: int = SIZE, forced: str | None = None, host_can: bool = True) -> PendingCollective:
        self.num_admitted += 1
        number = self.num_admitted
        note = lambda decision: self.decided.append((number, decision.choice.schedule))  # noqa: E731
        return self.director.admit(CollectiveRequest(num_bytes=num_bytes, forced=forced, native_can=host_can), note)

    def decide(self, ticket: PendingCollective) -> ScheduleDecision:
        transport: Any = Transport()
        return self.director.wait_for_decision(ticket, transport, tag=0, timeout_s=1.0)


def trial(name: str) -> TuningDecision:
    return TuningDecision(num_bytes=SIZE, schedule=name, is_trial=True)


def settled(name: str, next_in: int) -> TuningDecision:
    return TuningDecision(num_bytes=SIZE, schedule=name, next_in=next_in)


def test_those_behind_one_that_is_due_wait_for_the_ruling() -> None:
    group = Group(settled("ring", 100))
    first, second, third = group.admit(), group.admit(), group.admit()
    assert (group.decided, second.decision) == ([], None)
    assert group.decide(first).choice.schedule == "ring"
    assert group.decided == [(1, "ring"), (2, "ring"), (3, "ring")]
    assert group.decide(third).choice.schedule == "ring"


def test_a_trial_keeps_those_behind_waiting_until_it_is_through() -> None:
    group = Group(trial("ring"), settled("direct", 100))
    first, second = group.admit(), group.admit()
    assert group.decide(first).is_trial
    assert group.decided == [(1, "ring")]
    group.director.record_finished(first, 2.5)
    group.decide(second)
    assert group.decided == [(1, "ring"), (2, "direct")]
    assert group.adviser.reports[1].trial_s == 2.5


def test_a_trial_waits_for_those_before_it() -> None:
    group = Group(settled("ring", 1), trial("native"))
    first, second = group.admit(), group.admit()
    group.decide(first)
    reached = threading.Event()
    thread = threading.Thread(target=lambda: (group.decide(second), reached.set()))
    thread.start()
    assert not reached.wait(0.05)
    group.director.record_finished(first, 1.0)
    assert reached.wait(60)
    thread.join()


def test_forced_ones_and_those_the_host_library_cannot_do_keep_their_place_in_the_order() -> None:
    group = Group(settled("ring", 100))
    first = group.admit()
    group.admit(forced="ps")
    group.admit(host_can=False)
    group.decide(first)
    assert group.decided == [(1, "ring"), (2, "ps"), (3, "planned")]


def test_times_are_reported_once_without_the_newest() -> None:
    group = Group(settled("ring", 10), settled("ring", 10), settled("ring", 10))
    for number in range(21):
        ticket = group.admit()
        group.decide(ticket)
        group.director.record_finished(ticket, float(number))
    assert group.adviser.reports[1].window == tuple(number / SIZE for number in range(6))
    assert group.adviser.reports[2].window == tuple(number / SIZE for number in range(6, 16))


def test_classes_are_due_by_themselves() -> None:
    other = TuningDecision(num_bytes=8 * SIZE, schedule="direct", next_in=100)
    group = Group(settled("ring", 100), other)
    first, second = group.admit(), group.admit(8 * SIZE)
    group.decide(first)
    assert group.decided == [(1, "ring")]
    group.decide(second)
    assert group.decided == [(1, "ring"), (2, "direct")]


def test_whoever_waits_when_the_group_is_cut_goes() -> None:
    group = Group()
    group.admit()
    second = group.admit()
    failures: list[Exception] = []

    def wait() -> None:
        try:
            group.decide(second)
        except TransferFailedError as failure:
            failures.append(failure)

    thread = threading.Thread(target=wait)
    thread.start()
    group.director.abort()
    assert group.guide.is_cut
    thread.join(60)
    assert [str(failure) for failure in failures] == ["the connections of this group were cut"]
    with pytest.raises(TransferFailedError, match="were cut"):
        group.decide(second)


def test_the_plan_may_take_as_long_as_the_collective() -> None:
    group = Group()
    group.director.admit(
        CollectiveRequest(num_bytes=SIZE, forced="ring", native_can=True), lambda decision: None, 86_400.0
    )
    assert group.guide.limits_s[0] == 86_400.0


def test_timings_write_medians_of_each_kind(tmp_path) -> None:
    now = [0.0]
    timings = ScheduleTimings(EventLog(tmp_path / "events.jsonl"), 3, "g", clock=lambda: now[0])
    by_host = ScheduleChoice(schedule="native", num_segments=1, lag=0, window=1, predicted_s=float("inf"))
    ring = ScheduleChoice(schedule="ring", num_segments=4, lag=1, window=8, predicted_s=0.5)
    for seconds in (1.0, 3.0, 2.0):
        timings.record(1, "allreduce", ring, 100, seconds)
    assert list(read_events(tmp_path / "events.jsonl")) == []
    now[0] = 31.0
    timings.record(1, "allreduce", by_host, 100, 7.0)
    timings.flush()
    events = {event["schedule"]: event for event in read_events(tmp_path / "events.jsonl")}
    del events["ring"]["time"]
    expected = {"kind": "schedule_measured", "rank": 3, "group": "g", "version": 1, "collective": "allreduce"}
    kind = {"schedule": "ring", "bytes": 100, "num_segments": 4, "lag": 1, "window": 8, "ahead": None, "rounds": 3}
    kind["wire"] = "exact"
    assert events["ring"] == expected | kind | {"predicted_s": 0.5, "measured_s": 2.0}
    assert events["native"]["predicted_s"] is None


def test_timings_keep_plans_apart_and_write_in_the_order_of_what_came_first(tmp_path) -> None:
    timings = ScheduleTimings(EventLog(tmp_path / "events.jsonl"), 0, "g")
    ring = ScheduleChoice(schedule="ring", num_segments=4, lag=1, window=8, predicted_s=0.5)
    timings.record(2, "allreduce", ring, 200, 9.0)
    for num_bytes in range(300, 700, 10):
        timings.record(1, "allreduce", ring, num_bytes, 1.0)
    timings.record(1, "allreduce", ring, 200, 3.0)
    timings.record(2, "allreduce", ring, 200, 11.0)
    timings.flush()
    rows = [(e["version"], e["bytes"], e["measured_s"]) for e in read_events(tmp_path / "events.jsonl")]
    assert rows == [(2, 200, 10.0), *((1, num_bytes, 1.0) for num_bytes in range(300, 700, 10)), (1, 200, 3.0)]
