import pytest

from ringweave.membership.failure_detector import HEARTBEAT_INTERVAL_S, PROGRESS_TIMEOUT, Heartbeat, StallDetector


def test_how_long_training_has_stood_still_is_counted_while_it_waits() -> None:
    made = StallDetector(0.0)
    said = [
        made.observe(Heartbeat(progress=num_signs, is_waiting=is_waiting), now_s, 0.0).no_progress_s
        for now_s, num_signs, is_waiting in [
            (1.0, 7, True),
            (2.0, 7, True),
            (3.0, 8, True),
            (4.5, 8, True),
            (5.0, 8, False),
        ]
    ]
    assert said == [0.0, 1.0, 0.0, 1.5, 0.0]


def at_work(seconds: float) -> tuple[StallDetector, float]:
    """A member that makes a step every second, of which it computes half."""
    made, now_s = StallDetector(0.0), 0.0
    while now_s < seconds:
        now_s += 0.1
        made.observe(Heartbeat(progress=int(now_s), cpu_s=now_s / 2), now_s, 0.0)
    return made, now_s


def test_who_computes_for_long_is_not_stuck() -> None:
    made, now_s = at_work(20.0)
    for index in range(600):
        beat = Heartbeat(progress=20, cpu_s=now_s / 2 + index * 0.09)
        assert made.observe(beat, now_s + index * 0.1, 0.0).overdue_s == 0


def test_who_neither_computes_nor_waits_nor_gets_on_is_stuck() -> None:
    made, now_s = at_work(20.0)
    said = {
        index: made.observe(Heartbeat(progress=20, cpu_s=now_s / 2), now_s + index * 0.1, 0.0) for index in range(200)
    }
    first = next(index for index, beat in said.items() if beat.overdue_s > 0)
    assert PROGRESS_TIMEOUT.min_s <= first * 0.1 <= 10.0
    assert said[199].overdue_s == pytest.approx((199 - first) * 0.1, abs=0.11)
    assert [beat.number for beat in said.values()] == list(range(said[0].number, said[0].number + 200))


def test_who_waits_for_others_is_never_stuck() -> None:
    made, now_s = at_work(20.0)
    for index in range(1000):
        beat = Heartbeat(progress=20, is_waiting=True, cpu_s=now_s / 2)
        assert made.observe(beat, now_s + index * 0.1, 0.0).overdue_s == 0


def test_what_a_process_was_stopped_for_it_was_not_stuck_for_nor_did_it_wait() -> None:
    made, now_s = at_work(20.0)
    assert made.observe(Heartbeat(progress=20, cpu_s=now_s / 2), now_s + 500.0, 0.0).overdue_s == 0
    waiting, now_s = waited(1.0)
    assert not waiting.observe(
        Heartbeat(progress=9, is_waiting=True, num_reductions=9), now_s + 500.0, 0.0
    ).waits_in_vain


def test_on_a_busy_machine_all_of_that_takes_longer() -> None:
    made, now_s = at_work(20.0)
    for number in range(1, 60):
        alone = made.observe(
            Heartbeat(progress=20, cpu_s=now_s / 2), now_s + number * HEARTBEAT_INTERVAL_S, 0.0
        ).overdue_s
        busy = made.observe(
            Heartbeat(progress=20, cpu_s=now_s / 2), now_s + number * HEARTBEAT_INTERVAL_S, 2.0
        ).overdue_s
        assert busy == pytest.approx(max(0.0, alone - 2.0))
    waiting, now_s = waited(1.0)
    said = {
        number: waiting.observe(
            Heartbeat(progress=9, is_waiting=True, num_reductions=9), now_s + number * HEARTBEAT_INTERVAL_S, 10.0
        )
        for number in range(140)
    }
    assert not said[28 * 4].waits_in_vain
    assert said[139].waits_in_vain


def waited(usual_s: float, *, num: int = 10) -> tuple[StallDetector, float]:
    """A member that has waited for the others so long, so many times, and got on each time."""
    made, now_s = StallDetector(0.0), 0.0
    for number in range(num):
        for _ in range(round(usual_s / HEARTBEAT_INTERVAL_S)):
            now_s += HEARTBEAT_INTERVAL_S
            made.observe(Heartbeat(progress=number, is_waiting=True, num_reductions=number), now_s, 0.0)
    return made, now_s


def waits_in_vain(made: StallDetector, since_s: float, last: Heartbeat) -> float | None:
    """Seconds after which it says so; None within quarter of an hour."""
    for number in range(1, 3600):
        now_s = since_s + number * HEARTBEAT_INTERVAL_S
        if made.observe(last, now_s, 0.0).waits_in_vain:
            return now_s - since_s
    return None


@pytest.mark.parametrize(("usual_s", "expected_s"), [(0.5, 20.0), (1.0, 20.0), (5.0, 40.0)])
def test_who_waits_for_far_longer_than_it_usually_does_says_so(usual_s: float, expected_s: float) -> None:
    made, now_s = waited(usual_s)
    found_s = waits_in_vain(made, now_s, Heartbeat(progress=9, is_waiting=True, num_reductions=9))
    assert found_s == pytest.approx(expected_s, abs=usual_s + HEARTBEAT_INTERVAL_S)


def test_who_computes_does_not_say_that_it_waits_in_vain_nor_soon_who_does_not_know_what_is_usual() -> None:
    made, now_s = waited(1.0)
    assert waits_in_vain(made, now_s, Heartbeat(progress=9)) is None
    made, now_s = waited(1.0, num=7)
    found_s = waits_in_vain(made, now_s, Heartbeat(progress=6, is_waiting=True, num_reductions=6))
    assert found_s == pytest.approx(600.0, abs=1.5), "ten minutes, whatever it is"


def test_what_a_member_computes_between_its_signs_says_nothing_of_how_long_it_waits() -> None:
    """Ten backward passes, and then the first sum: how long that takes nobody knows."""
    made, now_s = StallDetector(0.0), 0.0
    for number in range(10):
        now_s += 1.0
        made.observe(Heartbeat(progress=number), now_s, 0.0)
    found_s = waits_in_vain(made, now_s, Heartbeat(progress=9, is_waiting=True))
    assert found_s == pytest.approx(600.0, abs=1.5)


def test_sums_that_are_there_at_once_are_learnt_from_though_nobody_is_seen_to_wait_for_them() -> None:
    made, now_s = StallDetector(0.0), 0.0
    for number in range(10):
        now_s += HEARTBEAT_INTERVAL_S
        made.observe(Heartbeat(progress=number, num_reductions=number), now_s, 0.0)
    found_s = waits_in_vain(made, now_s, Heartbeat(progress=9, is_waiting=True, num_reductions=9))
    assert found_s == pytest.approx(20.0, abs=1.5)


def test_in_each_epoch_a_wait_begins_anew() -> None:
    made, now_s = waited(1.0)
    assert waits_in_vain(made, now_s, Heartbeat(progress=9, is_waiting=True, num_reductions=9)) == pytest.approx(
        20.0, abs=1.5
    )
    now_s += 30.0
    found_s = waits_in_vain(made, now_s, Heartbeat(progress=9, is_waiting=True, num_reductions=9, num_generations=1))
    assert found_s == pytest.approx(20.0, abs=1.5)


def test_whose_looks_are_always_late_hangs_all_the_same() -> None:
    made, now_s = at_work(20.0)
    said = [
        made.observe(Heartbeat(progress=20, cpu_s=now_s / 2), now_s + index * 0.6, 0.0).overdue_s for index in range(60)
    ]
    assert said[0] == 0
    assert 0 < said[59] < 30, "though what it was late for does not count"
