"""Who decides and who leads, by hand-made events."""

from typing import Any

import pytest

from ringweave_bench.chaos import job_history

STARTED = {"kind": "run_started", "attempt": 1}


def epoch(term: int, number: int, part: str = "") -> dict[str, Any]:
    return {
        "kind": "generation_begun",
        "term": term,
        "number": number,
        "part": part,
        "members": ["0.0"],
        "newcomers": [],
    }


@pytest.mark.parametrize(
    ("said", "decides"),
    [
        ([], None),
        ([(1, 1)], 0),
        ([(1, 1), (1, 2)], 0),
        ([(1, 1), (1, 1)], 1),
        ([(1, 1), (1, 1), (1, 1)], 0),
        ([(1, 1), (1, 1), (2, 1)], 1),
        ([(1, 1), (1, 1), (2, 1), (2, 1), (3, 4)], 0),
        ([(1, 1), (3, 2)], 0),
        ([(1, 1), (1, 2), (1, 1)], 1),
    ],
    ids=[
        *("nobody yet", "the first", "a new epoch", "taken over", "taken over twice", "taken over and formed"),
        *("back again", "a later term of the same one", "what was new was heard by nobody"),
    ],
)
def test_an_epoch_that_is_said_again_is_said_by_the_one_that_has_taken_over(
    said: list[tuple[int, int]], decides: int | None
) -> None:
    assert job_history.track_leaders([STARTED, *(epoch(*each) for each in said)]).coordinator == decides


def test_epochs_of_rings_are_of_each_ring_alone() -> None:
    events = [epoch(1, 2, "ring 0"), epoch(1, 1, "ring 1")]
    assert job_history.track_leaders(events).coordinator == 0, "the first word of a ring is no second one of another"
    events += [epoch(1, 2, "ring 0"), epoch(1, 1, "ring 1")]
    assert job_history.track_leaders(events).coordinator == 1, "both rings have gone to the other one"


def test_it_is_told_whether_an_epoch_is_new() -> None:
    known = job_history.LeaderTracker()
    assert [known.observe(epoch(1, number)) for number in (1, 1, 2)] == [True, False, True]
    assert not known.observe(STARTED)
    assert known.coordinator is None
    assert known.observe(epoch(1, 1)), "another attempt begins with nothing"


def test_coordinators_that_came_to_decide_are_counted() -> None:
    assert job_history.count_takeovers([STARTED, epoch(1, 1), epoch(1, 2), epoch(3, 1)]) == 0
    assert job_history.count_takeovers([STARTED, epoch(1, 1), epoch(1, 1), epoch(2, 1), epoch(2, 1)]) == 2
    assert job_history.count_takeovers([STARTED, epoch(2, 1), STARTED, epoch(1, 1)]) == 0, "of two attempts"


def test_the_server_that_leads_is_the_first_one_until_another_says_that_it_does() -> None:
    started, led = {"kind": "server_started"}, {"kind": "params_leader_changed", "server": 1}
    assert [job_history.track_leaders([started, led, started][:number]).server for number in range(4)] == [
        None,
        0,
        1,
        1,
    ]
