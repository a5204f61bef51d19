"""When a coordinator or a server is started again, and when it is given up."""

from ringweave.launcher.restarts import RestartPolicy


def test_one_that_dies_soon_again_and_again_comes_back_later_each_time_and_is_given_up_at_last() -> None:
    respawns, now_s, delays_s = RestartPolicy(), 0.0, []
    while not respawns.has_given_up:
        died_s = now_s
        respawns.record_death(0.1, now_s)
        while not respawns.take_due(now_s) and not respawns.has_given_up:
            now_s += 0.5
        delays_s.append(now_s - died_s)
    assert delays_s == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 0.0]
    assert respawns.num_early_deaths == 10
    assert not respawns.take_due(now_s + 1e9)


def test_one_that_has_lived_for_long_begins_anew() -> None:
    respawns = RestartPolicy()
    for _ in range(100):
        respawns.record_death(3600.0, 5.0)
        assert respawns.take_due(5.0), "at once"
        assert not respawns.take_due(5.0), "once"
    assert not respawns.has_given_up


def test_one_that_was_killed_after_some_seconds_of_use_is_started_again_at_once_however_often() -> None:
    respawns = RestartPolicy()
    for number in range(100):
        began_s = 28.0 * number
        respawns.record_start(began_s)
        assert respawns.record_exit(began_s + 28.0, -9)
        assert not respawns.record_exit(began_s + 28.0, -9), "one death"
        assert respawns.take_due(began_s + 28.0)
    assert not respawns.has_given_up


def test_one_that_fails_by_itself_after_the_same_time_comes_back_later_each_time() -> None:
    respawns, delays_s = RestartPolicy(), []
    for _ in range(4):
        respawns.record_start(0.0)
        assert respawns.record_exit(28.0, 1)
        delays_s.append(next(seconds for seconds in range(60) if respawns.take_due(28.0 + seconds)))
    assert delays_s == [0, 1, 2, 4]
