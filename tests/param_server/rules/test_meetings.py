"""Rings meet through the server: all that are there, each once, and whoever asks again hears the same."""

import json
from dataclasses import asdict

import pytest
from pydantic import TypeAdapter

from ringweave.errors import TrainingError
from ringweave.param_server.barrier import BarrierResult, RingBarrier


def test_nobody_hears_anything_before_all_have_come() -> None:
    meetings = RingBarrier.of_rings(3)
    meetings.arrive(0, 1, "a")
    meetings.arrive(2, 1, "c")
    assert meetings.result_of(1, gone=()) is None
    meetings.arrive(1, 1, "b")
    assert meetings.result_of(1, gone=()).texts == {0: "a", 1: "b", 2: "c"}


def test_a_ring_that_is_gone_is_not_waited_for_and_all_hear_the_same_afterwards() -> None:
    meetings = RingBarrier.of_rings(3)
    meetings.arrive(0, 1, "a")
    meetings.arrive(1, 1, "b")
    assert meetings.result_of(1, gone={2}, ring_progress={1: "x", 2: ""}).texts == {0: "a", 1: "b"}
    meetings.arrive(2, 1, "late")
    assert meetings.result_of(1, gone=()).texts == {0: "a", 1: "b"}, "who comes late hears what the others heard"


def test_a_new_representative_says_it_again_and_changes_nothing() -> None:
    meetings = RingBarrier.of_rings(2)
    meetings.arrive(0, 1, "first")
    meetings.arrive(0, 1, "again")
    meetings.arrive(1, 1, "b")
    assert meetings.result_of(1, gone=()).texts == {0: "first", 1: "b"}
    meetings.arrive(0, 2, "")
    meetings.arrive(0, 1, "the meeting before")
    assert meetings.result_of(1, gone=()).texts == {0: "first", 1: "b"}, "kept for a representative that begins anew"
    assert meetings.result_of(2, gone=()) is None


def test_answers_of_the_past_are_not_kept() -> None:
    meetings = RingBarrier.of_rings(2)
    for number in range(1, 50):
        for ring in range(2):
            meetings.arrive(ring, number, "x" * 1000)
        assert meetings.result_of(number, gone=()) is not None
    assert len(meetings.results) + len(meetings.texts) <= 3


def test_a_meeting_that_is_left_out_is_an_error() -> None:
    with pytest.raises(TrainingError, match="barrier of ring 1: 2, expected 1, the next one, or one before it again"):
        RingBarrier.of_rings(2).arrive(1, 2, "")


def test_a_ring_that_is_begun_again_goes_on_after_the_last_pass_that_it_has_completed() -> None:
    meetings = RingBarrier.of_rings(2)
    assert meetings.restart_point(0) == (0, 0)
    meetings.arrive(0, 1, "", epoch=4)
    assert meetings.restart_point(0) == (0, 4), (
        "the pass has ended, and it has not the same parameters as the others yet"
    )
    meetings.arrive(0, 2, "", epoch=4)
    assert meetings.restart_point(0) == (2, 5)
    assert meetings.restart_point(1) == (0, 0)


def test_of_a_meeting_that_is_long_over_nothing_is_known() -> None:
    meetings = RingBarrier.of_rings(2)
    for number in (1, 2, 3):
        meetings.arrive(0, number, "a")
        assert meetings.result_of(number, gone={1}).texts == {0: "a"}
    meetings.arrive(1, 1, "late")
    assert meetings.result_of(1, gone=()).texts == {}
    meetings.arrive(1, 2, "late")
    assert meetings.result_of(2, gone=()).texts == {0: "a"}


def test_for_a_ring_that_is_gone_its_ring_progress_is_its_text() -> None:
    meetings = RingBarrier.of_rings(2)
    meetings.arrive(0, 1, "a")
    assert meetings.result_of(1, gone={1}, ring_progress={0: "before", 1: "left"}).texts == {0: "a", 1: "left"}


def test_what_another_server_has_answered_is_what_all_hear() -> None:
    meetings = RingBarrier.of_rings(3)
    meetings.arrive(0, 1, "a")
    meetings.record_result(BarrierResult(number=1, texts={0: "a", 1: "b"}))
    meetings.arrive(1, 1, "b")
    meetings.arrive(2, 1, "too late")
    assert meetings.result_of(1, gone=()).texts == {0: "a", 1: "b"}
    meetings.record_result(BarrierResult(number=1, texts={}))
    assert meetings.result_of(1, gone=()).texts == {0: "a", 1: "b"}, "the first that was said holds"


def test_answers_may_be_told_in_any_order() -> None:
    meetings = RingBarrier.of_rings(2)
    for number in (2, 1):
        meetings.record_result(BarrierResult(number=number, texts={0: str(number)}))
    for number in (1, 2):
        meetings.arrive(0, number, "")
        assert meetings.result_of(number, gone=()).texts == {0: str(number)}


def test_books_are_handed_on_whole() -> None:
    meetings = RingBarrier.of_rings(2)
    for number in (1, 2):
        for ring in range(2):
            meetings.arrive(ring, number, f"{number} {ring}", epoch=7)
        meetings.result_of(number, gone=())
    meetings.arrive(1, 3, "waits", epoch=8)
    other = TypeAdapter(RingBarrier).validate_python(json.loads(json.dumps(asdict(meetings))))
    assert other == meetings
    assert (other.restart_point(0), other.restart_point(1)) == ((2, 8), (2, 8))
    assert other.result_of(2, gone=()).texts == {0: "2 0", 1: "2 1"}
    assert other.result_of(3, gone={0}).texts == {1: "waits"}
