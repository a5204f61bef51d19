import pytest

from ringweave.membership.failure_detector import HEARTBEAT_INTERVAL_S, CoordinatorMonitor, Heartbeat


def answered(every_s: float, seconds: float, *, late_s: float = 0.0) -> tuple[CoordinatorMonitor, float]:
    """A contact whose coordinator has answered so often, with looks of its own so late, and when it did last."""
    contact, now_s = CoordinatorMonitor(0.0), 0.0
    while now_s < seconds:
        for _ in range(max(1, round(every_s / 0.1))):
            now_s += 0.1 + late_s
            contact.observe_self(Heartbeat(), now_s)
        contact.note_answer(now_s, is_active=True)
    return contact, now_s


def test_a_coordinator_that_always_answered_at_once_is_lost_within_a_second() -> None:
    contact, now_s = answered(0.2, 10.0)
    assert [round(contact.until_lost_s(now_s + after_s), 6) for after_s in (0.0, 0.4, 0.9, 1.0)] == [0.8, 0.4, 0.0, 0.0]


def test_one_that_takes_its_time_has_more() -> None:
    contact, now_s = answered(0.6, 10.0)
    assert contact.until_lost_s(now_s + 1.75) > 0
    assert contact.until_lost_s(now_s + 1.85) == 0


def test_one_that_nothing_is_known_of_has_three_seconds() -> None:
    contact = CoordinatorMonitor(0.0)
    assert contact.until_lost_s(2.9) > 0
    assert contact.until_lost_s(3.1) == 0


def test_who_gets_the_processor_late_itself_blames_nobody() -> None:
    quick, now_s = answered(0.2, 10.0)
    quick.observe_self(Heartbeat(), now_s + 1.1)
    assert quick.until_lost_s(now_s + 1.1) > 0, "the answer may have been there for long"
    busy, now_s = answered(0.2, 10.0, late_s=0.3)
    assert busy.answer_timeout_s == pytest.approx(3 * 0.8 + 4 * (0.4 - HEARTBEAT_INTERVAL_S))


def test_a_start_makes_nobody_patient_for_later() -> None:
    contact, now_s = CoordinatorMonitor(0.0), 0.0
    for is_starting, every_s in [*[(True, 0.5)] * 10, *[(False, HEARTBEAT_INTERVAL_S)] * 8]:
        now_s += every_s
        contact.observe_self(Heartbeat(is_starting=is_starting), now_s)
        contact.note_answer(now_s, is_active=True)
    assert contact.answer_timeout_s == pytest.approx(0.8)
    assert contact.until_lost_s(now_s + 0.9) == 0


def test_in_the_moment_in_which_a_member_s_start_is_over_it_leaves_nobody_sooner_than_before() -> None:
    """Of what is usual from then on nothing is known yet: a machine that was busy a moment ago may still be."""
    contact, now_s = answered(0.5, 10.0)
    contact.observe_self(Heartbeat(is_starting=True), now_s)
    contact.observe_self(Heartbeat(), now_s + HEARTBEAT_INTERVAL_S)
    contact.note_answer(now_s + HEARTBEAT_INTERVAL_S, is_active=True)
    assert contact.until_lost_s(now_s + HEARTBEAT_INTERVAL_S + 1.4) > 0


def test_who_looks_late_itself_when_its_start_is_over_blames_nobody_for_that() -> None:
    contact, now_s = answered(0.2, 10.0)
    contact.observe_self(Heartbeat(is_starting=True), now_s)
    contact.observe_self(Heartbeat(), now_s + 1.1)
    assert contact.until_lost_s(now_s + 1.1) > 0


def test_another_coordinator_is_not_blamed_for_the_silence_of_the_one_before() -> None:
    contact, now_s = answered(0.2, 10.0)
    contact.await_coordinator(now_s + 5.0)
    assert contact.until_lost_s(now_s + 5.8) > 0
    contact.note_answer(now_s + 5.8, is_active=False)
    assert contact.since_active_s(now_s + 6.0) == pytest.approx(6.0), "since one that decides was heard of"
