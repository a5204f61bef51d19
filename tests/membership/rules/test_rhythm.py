import pytest

from ringweave.membership.failure_detector import (
    HEARTBEAT_INTERVAL_S,
    HEARTBEAT_TIMEOUT,
    ArrivalHistory,
    Heartbeat,
    MemberHealth,
    SchedulingDelay,
)


def beats(gap_s: float, number: int) -> ArrivalHistory:
    rhythm = ArrivalHistory(HEARTBEAT_TIMEOUT, 0.0)
    for index in range(1, number + 1):
        rhythm.observe(index * gap_s)
    return rhythm


def test_a_deadline_is_generous_before_anything_is_known() -> None:
    assert beats(0.15, 3).timeout_s == HEARTBEAT_TIMEOUT.max_s


def test_a_deadline_follows_from_the_longest_gap_of_late() -> None:
    assert beats(0.15, 20).timeout_s == HEARTBEAT_TIMEOUT.min_s
    assert abs(beats(0.5, 20).timeout_s - 1.5) < 1e-9
    assert beats(60.0, 20).timeout_s == HEARTBEAT_TIMEOUT.max_s


def test_who_is_late_is_late_only_after_the_deadline() -> None:
    rhythm = beats(0.15, 20)
    assert not rhythm.is_overdue(20 * 0.15 + 0.79)
    assert rhythm.is_overdue(20 * 0.15 + HEARTBEAT_TIMEOUT.min_s + 0.01)
    rhythm.excuse(20 * 0.15 + 0.79)
    assert not rhythm.is_overdue(20 * 0.15 + HEARTBEAT_TIMEOUT.min_s + 0.01)


def test_what_a_late_or_doubled_heartbeat_says_is_of_the_past() -> None:
    signs = MemberHealth(0.0)
    signs.observe(Heartbeat(number=2), 1.0)
    signs.observe(Heartbeat(number=1, overdue_s=3.0), 2.0)
    assert not signs.is_stuck()
    assert not signs.is_silent(11.9), "but it is a sign of life"
    signs.observe(Heartbeat(number=3, overdue_s=3.0), 3.0)
    assert signs.is_stuck(2.9)
    assert not signs.is_stuck(3.1), "whoever listens may have a reason to give it more time"


def test_what_is_learnt_from_a_member_that_starts_is_forgotten_when_its_training_gets_on() -> None:
    for is_starting in (True, False):
        signs, now_s = MemberHealth(0.0), 0.0
        for _ in range(20):
            now_s += 2.0
            signs.observe(Heartbeat(is_starting=is_starting), now_s)
        signs.observe(Heartbeat(), now_s)
        assert not signs.is_silent(now_s + 5.9), "of what is usual now nothing is known yet"
        for _ in range(8):
            now_s += HEARTBEAT_INTERVAL_S
            signs.observe(Heartbeat(), now_s)
        assert not signs.is_silent(now_s + HEARTBEAT_TIMEOUT.min_s - 0.1)
        assert signs.is_silent(now_s + HEARTBEAT_TIMEOUT.min_s + 0.1) == is_starting
        assert signs.is_silent(now_s + 6.1), "three times the longest gap"


def test_one_s_own_delays_are_remembered_for_a_dozen_seconds_however_often_it_looks() -> None:
    for usual_s in (0.05, HEARTBEAT_INTERVAL_S):
        delays, now_s = SchedulingDelay(0.0, usual_s), usual_s + 0.5
        delays.observe(now_s)
        assert delays.grace_s == pytest.approx(4 * 0.5)
        for after_s, grace_s in ((11.5, 2.0), (12.5, 0.0)):
            while now_s < usual_s + 0.5 + after_s:
                now_s += usual_s
                delays.observe(now_s)
            assert delays.grace_s == pytest.approx(grace_s, abs=1e-9)
