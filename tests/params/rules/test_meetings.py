"""Rings meet through the server: all that are there, each once, and whoever asks again hears the same."""

import json

import pytest

from ringweave.errors import TrainingError
from ringweave.params.rules import Answer, Meetings


def test_nobody_hears_anything_before_all_have_come() -> None:
    meetings = Meetings(3)
    meetings.come(0, 1, "a")
    meetings.come(2, 1, "c")
    assert meetings.answer(1, gone=()) is None
    meetings.come(1, 1, "b")
    assert meetings.answer(1, gone=()) == {0: "a", 1: "b", 2: "c"}


def test_a_ring_that_is_gone_is_not_waited_for_and_all_hear_the_same_afterwards() -> None:
    meetings = Meetings(3)
    meetings.come(0, 1, "a")
    meetings.come(1, 1, "b")
    assert meetings.answer(1, gone={2}, testaments={1: "x", 2: ""}) == {0: "a", 1: "b"}
    meetings.come(2, 1, "late")
    assert meetings.answer(1, gone=()) == {0: "a", 1: "b"}, "who comes late hears what the others heard"


def test_a_new_representative_says_it_again_and_changes_nothing() -> None:
    meetings = Meetings(2)
    meetings.come(0, 1, "first")
    meetings.come(0, 1, "again")
    meetings.come(1, 1, "b")
    assert meetings.answer(1, gone=()) == {0: "first", 1: "b"}
    meetings.come(0, 2, "")
    meetings.come(0, 1, "the meeting before")
    assert meetings.answer(1, gone=()) == {0: "first", 1: "b"}, "kept for a representative that begins anew"
    assert meetings.answer(2, gone=()) is None


def test_answers_of_the_past_are_not_kept() -> None:
    meetings = Meetings(2)
    for number in range(1, 50):
        for ring in range(2):
            meetings.come(ring, number, "x" * 1000)
        assert meetings.answer(number, gone=()) is not None
    assert len(meetings._answers) + len(meetings._said) <= 3


def test_a_meeting_that_is_left_out_is_an_error() -> None:
    with pytest.raises(TrainingError, match="meeting of ring 1: 2, expected 1, the next one, or one before it again"):
        Meetings(2).come(1, 2, "")


def test_a_ring_that_is_begun_again_goes_on_after_the_last_pass_that_it_has_completed() -> None:
    meetings = Meetings(2)
    assert meetings.place(0) == (0, 0)
    meetings.come(0, 1, "", epoch=4)
    assert meetings.place(0) == (0, 4), "the pass has ended, and it has not the same parameters as the others yet"
    meetings.come(0, 2, "", epoch=4)
    assert meetings.place(0) == (2, 5)
    assert meetings.place(1) == (0, 0)


def test_of_a_meeting_that_is_long_over_nothing_is_known() -> None:
    meetings = Meetings(2)
    for number in (1, 2, 3):
        meetings.come(0, number, "a")
        assert meetings.answer(number, gone={1}) == {0: "a"}
    meetings.come(1, 1, "late")
    assert meetings.answer(1, gone=()) == {}
    meetings.come(1, 2, "late")
    assert meetings.answer(2, gone=()) == {0: "a"}


def test_for_a_ring_that_is_gone_its_testament_is_heard() -> None:
    meetings = Meetings(2)
    meetings.come(0, 1, "a")
    assert meetings.answer(1, gone={1}, testaments={0: "before", 1: "left"}) == {0: "a", 1: "left"}


def test_what_another_server_has_answered_is_what_all_hear() -> None:
    meetings = Meetings(3)
    meetings.come(0, 1, "a")
    meetings.settle(Answer(number=1, said={0: "a", 1: "b"}))
    meetings.come(1, 1, "b")
    meetings.come(2, 1, "too late")
    assert meetings.answer(1, gone=()) == {0: "a", 1: "b"}
    meetings.settle(Answer(number=1, said={}))
    assert meetings.answer(1, gone=()) == {0: "a", 1: "b"}, "the first that was said holds"


def test_answers_may_be_told_in_any_order() -> None:
    meetings = Meetings(2)
    for number in (2, 1):
        meetings.settle(Answer(number=number, said={0: str(number)}))
    for number in (1, 2):
        meetings.come(0, number, "")
        assert meetings.answer(number, gone=()) == {0: str(number)}


def test_books_are_handed_on_whole() -> None:
    meetings = Meetings(2)
    for number in (1, 2):
        for ring in range(2):
            meetings.come(ring, number, f"{number} {ring}", epoch=7)
        meetings.answer(number, gone=())
    meetings.come(1, 3, "waits", epoch=8)
    other = Meetings.of_words(json.loads(json.dumps(meetings.to_words())))
    assert other.to_words() == meetings.to_words()
    assert (other.place(0), other.place(1)) == ((2, 8), (2, 8))
    assert other.answer(2, gone=()) == {0: "2 0", 1: "2 1"}
    assert other.answer(3, gone={0}) == {1: "waits"}
