"""What faults cost, by hand-made events whose answer can be counted on fingers."""

import itertools
from typing import Any

import pytest

from ringweave_bench.chaos import chaos_report, fault_script
from ringweave_bench.chaos.chaos_report import ChaosReport


def watched(rank: int, time: float) -> dict[str, Any]:
    return {"time": time, "kind": "worker_watched", "rank": rank, "node": "a", "pid": 1}


def loaded(rank: int, time: float, train_step: int) -> dict[str, Any]:
    return {"time": time, "kind": "checkpoint_loaded", "rank": rank, "train_step": train_step}


def steps(first: int, last: int, begin_s: float, ranks: int = 2) -> list[dict[str, Any]]:
    """One a second."""
    return [
        {
            "time": begin_s + number - first + rank / 100,
            "kind": "train_step_done",
            "rank": rank,
            "steps_since_start": number,
        }
        for number, rank in itertools.product(range(first, last + 1), range(ranks))
    ]


def fault(line: str, time: float) -> dict[str, Any]:
    return {"time": time, "kind": "fault_begun", "fault": line, "target": "x"}


def judge(events: list[dict[str, Any]], restart_s: float = 0.0) -> ChaosReport:
    return chaos_report.build_report(
        events, num_workers=2, workers_on={"a": 1, "b": 1}, restart_s=restart_s, samples_per_step=8
    )


def begin() -> list[dict[str, Any]]:
    return [watched(0, 0), watched(1, 0)]


def test_without_faults_nothing_is_lost() -> None:
    found = judge([*begin(), *steps(1, 11, 100.0)])
    assert (found.steps, found.steps_lost, found.samples, found.faults) == (11, 0, 88, 0)
    assert found.fault_free_steps_per_s == pytest.approx(1.0)
    assert found.alive_fraction == 1.0
    assert found.goodput == pytest.approx(1.1, abs=0.01), "eleven ends of steps in ten seconds"


def test_a_restart_from_a_checkpoint_loses_what_was_done_since() -> None:
    """Steps 1 to 14, a kill at 114; the checkpoint is of step 10; from 124 on steps 11 to 30."""
    again = [watched(0, 120), watched(1, 120), loaded(0, 121, 10), loaded(1, 121, 10)]
    found = judge(
        [*begin(), *steps(1, 14, 100.0), fault("at 13.5s kill worker 1", 113.5), *again, *steps(1, 20, 124.0)]
    )
    assert (found.steps, found.steps_lost) == (30, 4)
    assert found.samples_lost == 32
    (recovery,) = found.recoveries
    assert recovery.stall_s == pytest.approx(11.0)
    assert recovery.recover_s == pytest.approx(10.5)
    assert found.recover_p50_s == found.recover_p95_s == pytest.approx(10.5)


def test_a_restart_at_the_very_step_of_the_checkpoint_loses_nothing() -> None:
    again = [watched(0, 120), watched(1, 120), loaded(0, 121, 10), loaded(1, 121, 10)]
    found = judge([*begin(), *steps(1, 10, 100.0), *again, *steps(1, 5, 124.0)])
    assert (found.steps, found.steps_lost) == (15, 0)


def test_a_restart_without_a_checkpoint_loses_everything() -> None:
    found = judge([*begin(), *steps(1, 10, 100.0), watched(0, 120), watched(1, 120), *steps(1, 12, 124.0)])
    assert (found.steps, found.steps_lost) == (12, 10)


def test_one_step_that_is_done_again_is_one_that_is_lost() -> None:
    again = [watched(0, 120), watched(1, 120), loaded(0, 121, 9), loaded(1, 121, 9)]
    found = judge([*begin(), *steps(1, 10, 100.0), *again, *steps(1, 1, 124.0)])
    assert (found.steps, found.steps_lost) == (10, 1)


def test_while_one_worker_goes_on_those_that_join_it_lose_nothing() -> None:
    events = [*begin(), *steps(1, 10, 100.0), fault("at 10s kill worker 1", 109.5), watched(1, 112)]
    found = judge([*events, *steps(11, 20, 110.0, ranks=1)])
    assert (found.steps, found.steps_lost) == (20, 0)
    assert found.recoveries[0].recover_s == pytest.approx(0.5)


def test_a_step_in_which_the_next_worker_is_killed_is_no_recovery_of_the_first_one() -> None:
    """Steps at 100 to 110, 111.5 to 120.5 and 123 on; kills at 110.5 and 121."""
    events = [*begin(), *steps(1, 11, 100.0, ranks=1), fault("at 10s kill worker 1", 110.5), watched(1, 111)]
    events += [*steps(12, 21, 111.5, ranks=1), fault("at 21s kill worker 1", 121.0), watched(1, 121.5)]
    first, second = judge([*events, *steps(22, 40, 123.0, ranks=1)]).recoveries
    assert (first.stall_s, first.recover_s) == (pytest.approx(1.5), pytest.approx(1.0))
    assert (second.stall_s, second.recover_s) == (pytest.approx(2.5), pytest.approx(2.0))


def test_a_stall_that_outlasts_the_next_kill_belongs_to_both() -> None:
    events = [*begin(), *steps(1, 11, 100.0, ranks=1), fault("at 10s kill worker 1", 110.5)]
    events += [fault("at 15s kill worker 1", 115.5), *steps(12, 40, 130.0, ranks=1)]
    assert [each.stall_s for each in judge(events).recoveries] == [pytest.approx(20.0)] * 2


def epoch(time: float, members: list[str], newcomers: list[str]) -> dict[str, Any]:
    return {
        "time": time,
        "kind": "generation_begun",
        "term": 1,
        "number": round(time),
        "members": members,
        "newcomers": newcomers,
        "committed": 10,
    }


def test_who_joins_an_elastic_job_counts_on_from_where_the_others_are() -> None:
    """Worker 1 dies at step 10 and joins after it; then worker 0, which had counted from the start, dies."""
    first = [epoch(99, ["0.0", "1.0"], ["0.0", "1.0"]), *steps(1, 10, 100.0)]
    joins = [fault("at 9s kill worker 1", 109.5), watched(1, 111), epoch(112, ["0.0", "1.1"], ["1.1"])]
    alone = [
        {
            "time": 112.0 + number,
            "kind": "train_step_done",
            "rank": rank,
            "steps_since_start": number + 10 * (rank == 0),
        }
        for number in range(1, 21)
        for rank in (0, 1)
        if rank == 1 or number <= 5
    ]
    found = judge([*begin(), *first, *joins, *alone[:10], fault("at 17s kill worker 0", 117.5), *alone[10:]])
    assert (found.steps, found.steps_lost) == (30, 0)


def test_who_has_joined_counts_on_though_a_coordinator_that_takes_over_says_its_epoch_again() -> None:
    """Worker 1 joins after step 10, its epoch is said again after step 15, and it dies after step 20."""
    first = [epoch(99, ["0.0", "1.0"], ["0.0", "1.0"]), *steps(1, 10, 100.0)]
    joins = [fault("at 9s kill worker 1", 109.5), watched(1, 111), epoch(112, ["0.0", "1.1"], ["1.1"])]
    newcomers = [{**each, "rank": 1, "time": 112.5 + number} for number, each in enumerate(steps(1, 10, 0, ranks=1))]
    both = [*steps(11, 30, 113.0, ranks=1), *newcomers, {**joins[-1], "time": 117.4}]
    assert judge([*begin(), *first, *joins, *sorted(both, key=lambda each: each["time"])]).steps == 30


def test_samples_that_a_step_counts_without_are_lost() -> None:
    gone = {
        "time": 104.0,
        "kind": "samples_lost",
        "rank": 0,
        "reduction": 5,
        "members": ["0.0"],
        "samples": 4,
        "lost": 4,
    }
    found = judge([*begin(), *steps(1, 5, 100.0), gone, *steps(6, 11, 105.0)])
    assert (found.steps, found.steps_lost, found.samples, found.samples_lost) == (11, 0, 84, 4)
    assert found.goodput == pytest.approx(10.5 / 10, abs=0.01)


@pytest.mark.parametrize("kind", ["worker_started", "worker_watched"])
def test_a_victim_is_away_until_it_is_started_again_by_whatever_system(kind: str) -> None:
    started = {"time": 107.0, "kind": kind, "rank": 0, "node": "a", "local_rank": 0, "pid": 3}
    found = judge([*begin(), *steps(1, 51, 100.0), fault("at 5s kill worker 0", 105.0), started], restart_s=10)
    assert found.alive_fraction == pytest.approx(1 - 2 / 100, abs=0.001)


def test_time_that_the_faults_take_is_no_blame_and_time_that_the_system_takes_is() -> None:
    """100 s; worker 1 is paused for 20 s and all wait for it: 80 steps of 90 that 1.8 workers could have done."""
    events = [*begin(), *steps(1, 40, 100.0), fault("at 39.5s pause worker 1 for 20s", 139.5), *steps(41, 81, 160.0)]
    found = judge(events)
    assert found.wall_s == pytest.approx(100.0, abs=0.1)
    assert found.alive_fraction == pytest.approx(0.9, abs=0.001)
    assert found.goodput == pytest.approx(81 / 90, abs=0.005)
    assert found.recoveries[0].stall_s == pytest.approx(21.0)


@pytest.mark.parametrize(
    ("line", "away_s"),
    [
        ("at 5s kill worker 0", 10),
        ("at 5s pause worker 0 for 4s", 4),
        ("at 5s cut a for 6s", 6),
        ("at 5s fill disk for 6s", 0),
        ("at 5s kill coordinator", 0),
        ("at 5s clock a by 60s for 6s", 0),
    ],
)
def test_what_a_fault_takes_away(line: str, away_s: float) -> None:
    found = judge([*begin(), *steps(1, 51, 100.0), fault(line, 105.0)], restart_s=10)
    assert found.alive_fraction == pytest.approx(1 - away_s / 100, abs=0.001)


def test_a_job_that_never_goes_on_has_not_recovered() -> None:
    found = judge([*begin(), *steps(1, 10, 100.0), fault("at 10s kill worker 1", 110.0)])
    assert found.recoveries[0].recover_s is None
    assert found.recover_p50_s is None


def test_a_job_without_a_step_has_nothing_to_report() -> None:
    found = judge(begin())
    assert (found.steps, found.goodput, found.recoveries) == (0, None, ())
    assert found.broken == ("the job made no train step",)


def test_samples_are_those_that_prepare_told() -> None:
    told = {"time": 1, "kind": "training_prepared", "batch_samples": 256}
    found = chaos_report.build_report([told, *begin(), *steps(1, 3, 100.0)], num_workers=2, workers_on={}, restart_s=0)
    assert found.samples == 3 * 256


def test_a_pause_long_after_a_fault_is_not_its_doing() -> None:
    events = [*begin(), *steps(1, 10, 100.0), fault("at 9s kill worker 1", 109.5), *steps(11, 40, 112.0)]
    found = judge([*events, *steps(41, 50, 170.0)])
    assert found.recoveries[0].stall_s == pytest.approx(3.0)


def elastic_job(*more: dict[str, Any]) -> list[dict[str, Any]]:
    """Two workers of an elastic job that make ten steps; worker 1 is killed then, and worker 0 goes on or not."""
    first = [*begin(), epoch(99, ["0.0", "1.0"], ["0.0", "1.0"]), *steps(1, 10, 100.0)]
    return [*first, fault("at 9s kill worker 1", 109.5), epoch(110, ["0.0"], []), *more]


def test_an_elastic_job_that_goes_on_breaks_no_promise_and_its_figures_are_there() -> None:
    found = judge(elastic_job(*steps(11, 30, 111.5, ranks=1)))
    assert found.broken == ()
    assert found.elastic is not None
    assert (found.elastic.stall_p50_s, found.elastic.stall_p95_s, found.elastic.stall_max_s) == (1.5, 1.5, 1.5)
    assert (found.elastic.generation_p50_s, found.elastic.steps_as_zombie, found.elastic.joins) == (0.5, 0, 0)
    assert found.elastic.never_back == ("at 9s kill worker 1",)
    assert found.to_document()["elastic"]["tolls"][0]["victims"] == (1,)


def test_a_job_that_is_not_elastic_has_no_such_figures_and_may_lose_steps() -> None:
    again = [watched(0, 120), watched(1, 120), loaded(0, 121, 10), loaded(1, 121, 10)]
    kill = fault("at 13.5s kill worker 1", 113.5)
    found = judge([*begin(), *steps(1, 14, 100.0), kill, *again, *steps(1, 20, 124.0)])
    assert (found.elastic, found.steps_lost, found.broken) == (None, 4, ())


def test_an_elastic_job_that_loses_steps_breaks_its_promise() -> None:
    again = [watched(0, 120), watched(1, 120), epoch(121, ["0.0", "1.0"], ["0.0", "1.0"]), *steps(1, 12, 124.0)]
    found = judge([*elastic_job(*steps(11, 12, 111.5, ranks=1)), *again])
    assert found.broken == ("12 train steps were lost",)


def test_a_job_that_does_not_go_on_though_there_is_time_breaks_its_promise() -> None:
    over = {"time": 130.0, "kind": "run_ended"}
    expected = ("training did not go on after: at 9s kill worker 1",)
    assert judge(elastic_job(over)).broken == expected
    plain = [*begin(), *steps(1, 10, 100.0), fault("at 9s kill worker 1", 109.5)]
    assert judge([*plain, over]).broken == expected
    assert judge([*plain, {**over, "time": 112.0}]).broken == (), "who knows"


def accounted(time: float, number: int, samples: int, expected: int = 16) -> dict[str, Any]:
    return {"time": time, "kind": "samples_accounted", "epoch": number, "samples": samples, "expected": expected}


def samples_lost(time: float, lost: int, reduction: int) -> dict[str, Any]:
    fields = {"rank": 0, "reduction": reduction, "members": ["0.0"], "samples": 1, "lost": lost}
    return {"time": time, "kind": "samples_lost", **fields}


STARTED = {"time": 100.55, "kind": "run_started"}


@pytest.mark.parametrize(
    ("books", "unaccounted"),
    [
        ([], None),
        ([accounted(101, 0, 16), accounted(102, 1, 16)], 0),
        ([accounted(101, 0, 16), samples_lost(101.5, 4, 7), accounted(102, 1, 12)], 0),
        ([samples_lost(100.5, 4, 7), accounted(101, 0, 12), samples_lost(101.5, 4, 8)], 0),
        ([samples_lost(100.5, 2, 7), samples_lost(100.6, 2, 7), accounted(101, 0, 12)], 2),
        ([samples_lost(100.5, 2, 7), STARTED, samples_lost(100.6, 2, 7), accounted(101, 0, 12)], 0),
        ([accounted(101, 0, 12), samples_lost(101.5, 4, 7)], 4),
        ([samples_lost(100.5, 3, 7), accounted(101, 0, 12)], 1),
        ([samples_lost(100.5, 4, 7), accounted(101, 0, 20)], 4),
    ],
    ids=[
        *("no books", "exact", "lost", "lost later too", "said twice", "in two attempts"),
        *("lost too late", "fewer are known", "doubled"),
    ],
)
def test_samples_that_the_books_miss_are_counted(books: list[dict[str, Any]], unaccounted: int | None) -> None:
    found = judge([*begin(), *steps(1, 5, 100.0), *books])
    assert found.samples_unaccounted == unaccounted
    words = (f"{unaccounted} samples neither count nor are known to be lost",) if unaccounted else ()
    assert found.broken == words


def test_faults_that_never_began_are_named() -> None:
    wanted = fault_script.parse_faults(
        "at 5s kill worker 0\nat 6s kill server\nat 5s kill worker 0\nat 900s kill worker 1"
    )
    events = [*begin(), *steps(1, 51, 100.0), fault("at 5s kill worker 0", 105.0)]
    found = chaos_report.build_report(events, num_workers=2, workers_on={}, restart_s=0, wanted=wanted)
    assert found.never_began == ("at 5s kill worker 0", "at 6s kill server", "at 900s kill worker 1")


def test_moments_at_which_victims_really_died_are_counted_and_others_are_named() -> None:
    lines = {
        "at 1s kill worker 0 during bucket 1": "process 7 during bucket 1",
        "at 2s kill worker 0 during bucket 2": "process 8 during commit",
        "at 3s kill worker 0 during forward": "process 9",
        "at 4s kill worker 0 during commit": "process 10 during commit",
        "at 5s kill worker 0": "process 11",
    }
    happened = [{**fault(line, 120.0), "target": target} for line, target in lines.items()]
    found = judge([*begin(), *steps(1, 51, 100.0), *happened])
    assert found.moments == {"bucket 1": 1, "commit": 2}
    assert found.at_other_moments == (
        "at 2s kill worker 0 during bucket 2: it died during commit",
        "at 3s kill worker 0 during forward: it died during a moment that is not known",
    )


def test_attempts_are_counted() -> None:
    attempts = [{"time": time, "kind": "run_started", "attempt": 1} for time in (99.0, 120.0)]
    assert judge([attempts[0], *begin(), *steps(1, 5, 100.0), attempts[1]]).attempts == 2
    assert judge([*begin(), *steps(1, 5, 100.0)]).attempts == 1, "torchrun writes no such event"


def chaos_ended(time: float, outcome: str) -> dict[str, Any]:
    return {"time": time, "kind": "chaos_ended", "outcome": outcome}


def test_time_in_which_a_job_that_hangs_says_nothing_counts_and_that_of_its_end_does_not() -> None:
    """101 s; after 20 of them a kill, and nothing more."""
    events = [*begin(), *steps(1, 21, 100.0), fault("at 20s kill worker 1", 120.2)]
    found = judge([*events, chaos_ended(201.0, "stopped"), {"time": 230.0, "kind": "run_ended"}])
    assert found.wall_s == pytest.approx(101.0, abs=0.1)
    assert found.goodput == pytest.approx(21 / 101, abs=0.01)
    assert found.broken == ("training did not go on after: at 20s kill worker 1",)


def test_a_fault_that_hits_a_job_which_is_through_breaks_no_promise() -> None:
    late = [fault("at 9s kill worker 1", 109.2), chaos_ended(140.0, "done"), {"time": 141.0, "kind": "run_ended"}]
    found = judge([*begin(), epoch(99, ["0.0", "1.0"], ["0.0", "1.0"]), *steps(1, 10, 100.0), *late])
    assert (found.wall_s, found.broken) == (pytest.approx(9.2, abs=0.01), ())
