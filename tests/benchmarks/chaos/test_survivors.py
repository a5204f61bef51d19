"""Stalls of survivors and of peers, by hand-made events."""

from typing import Any

import pytest

from ringweave_bench.chaos import member_impacts

ALL = ["0.0", "1.0", "2.0"]


def watched(rank: int, time: float) -> dict[str, Any]:
    return {"time": time, "kind": "worker_watched", "rank": rank, "node": f"a-{rank}", "pid": 1}


def steps(rank: int, *times: float) -> list[dict[str, Any]]:
    return [{"time": time, "kind": "train_step_done", "rank": rank, "steps_since_start": 0} for time in times]


def epoch(time: float, members: list[str], newcomers: list[str], term: int = 1) -> dict[str, Any]:
    who = {"term": term, "number": round(time * 10), "members": members, "newcomers": newcomers}
    return {"time": time, "kind": "generation_begun", **who}


def fault(line: str, time: float) -> dict[str, Any]:
    return {"time": time, "kind": "fault_begun", "fault": line, "target": "x"}


def job(*more: dict[str, Any]) -> list[dict[str, Any]]:
    """Three workers that make a step a second up to 5 s; what comes then is the test's."""
    begin = [*(watched(rank, 0) for rank in range(3)), epoch(0, ALL, ALL)]
    return sorted([*begin, *(each for rank in range(3) for each in steps(rank, 1, 2, 3, 4, 5)), *more], key=_time)


def _time(event: dict[str, Any]) -> float:
    return event["time"]


def killed() -> list[dict[str, Any]]:
    """Worker 1 is killed at 5.5; the others go on at 7 and 7.2, without it; it is back at 12."""
    others = [*steps(0, 7.0, 8, 9, 10, 11, 12.6, 13.6), *steps(2, 7.2, 8, 9, 10, 11, 12.5, 13.5)]
    back = [watched(1, 9), epoch(11.1, ["0.0", "1.1", "2.0"], ["1.1"]), *steps(1, 12.5, 13.5)]
    return job(fault("at 5.5s kill worker 1", 5.5), epoch(6.0, ["0.0", "2.0"], []), *others, *back)


def test_a_survivors_stall_is_its_longest_step_less_the_usual_one() -> None:
    (toll,) = member_impacts.measure_fault_impacts(killed())
    assert (toll.victims, toll.survivors, toll.steps_as_zombie) == ((1,), 2, 0)
    assert toll.stall_s == pytest.approx(1.2), "5 to 7.2, of which 1 is usual"
    assert toll.stall_median_s == pytest.approx(1.1)
    assert toll.generation_s == pytest.approx(0.5)
    assert toll.back_s == pytest.approx(7.0)


def test_steps_that_a_newcomer_does_again_at_once_are_not_its_usual_ones() -> None:
    """Worker 1 is level after twenty steps of a hundredth; worker 0 is killed when it has done two of a second."""
    again = steps(1, *(11.3 + number / 100 for number in range(20)))
    level = {"time": 11.5, "kind": "members_caught_up", "members": ["1.1"]}
    later = [fault("at 13.7s kill worker 0", 13.7), epoch(14.0, ["1.1", "2.0"], []), *steps(1, 15.5), *steps(2, 15.5)]
    toll = member_impacts.measure_fault_impacts(sorted([*killed(), *again, level, *later], key=_time))[-1]
    assert (toll.survivors, toll.stall_s, toll.stall_median_s) == (2, pytest.approx(1.0), pytest.approx(1.0))


def test_the_usual_step_of_one_that_has_only_replayed_steps_is_that_of_its_peers() -> None:
    """Worker 1 catches up before 12.5, and worker 0 is killed before its next step."""
    again = steps(1, *(12.3 + number / 100 for number in range(20)))
    level = {"time": 12.495, "kind": "members_caught_up", "members": ["1.1"]}
    later = [fault("at 12.9s kill worker 0", 12.9), epoch(13.0, ["1.1", "2.0"], [])]
    toll = member_impacts.measure_fault_impacts(sorted([*killed(), *again, level, *later], key=_time))[-1]
    assert (toll.survivors, toll.stall_s) == (2, pytest.approx(0.0, abs=0.02))


def test_nobody_joins_by_an_epoch_that_a_coordinator_which_takes_over_says_again() -> None:
    again = next(each for each in killed() if each.get("newcomers") == ["1.1"])
    events = sorted([*killed(), {**again, "time": 13.0}, *steps(0, 16.0), *steps(2, 16.0)], key=_time)
    assert [joining.newcomers for joining in member_impacts.measure_join_impacts(events)] == [1]


def test_peers_of_a_newcomer_wait_from_the_border_to_their_second_step_with_it() -> None:
    (joining,) = member_impacts.measure_join_impacts(killed())
    assert (joining.newcomers, joining.peers) == (1, 2)
    assert joining.usual_s == pytest.approx(1.0)
    assert joining.stall_s == pytest.approx(0.6)
    assert joining.lost_s == pytest.approx(0.6)
    assert joining.caught_up_s is None


def test_peers_are_watched_until_the_newcomer_is_level() -> None:
    level = {"time": 16.0, "kind": "members_caught_up", "rank": 0, "reduction": 14, "members": ["1.1"], "batch": 16}
    later = [*steps(0, 15.3, 16.5, 99.0), *steps(2, 14.6, 15.7, 99.0)]
    (joining,) = member_impacts.measure_join_impacts(sorted([*killed(), level, *later], key=_time))
    assert joining.caught_up_s == pytest.approx(4.9)
    assert joining.stall_s == pytest.approx(82.3), "the step after it is still looked at"
    (joining,) = member_impacts.measure_join_impacts(sorted([*killed(), level, *later[:2]], key=_time))
    assert joining.stall_s == pytest.approx(0.7)
    assert joining.lost_s == pytest.approx(1.5), "0.6, 0, 0.7 and 0.2"


def test_a_survivor_that_makes_no_step_any_more_is_told() -> None:
    found = member_impacts.measure_fault_impacts(
        job(fault("at 5.5s kill worker 1", 5.5), epoch(6.0, ["0.0", "2.0"], []), *steps(0, 7.0, 8.0))
    )
    assert found[0].stall_s is None
    assert found[0].survivors == 2


def test_one_that_was_killed_next_is_no_survivor() -> None:
    both = [fault("at 5.5s kill worker 1", 5.5), fault("at 5.5s kill worker 2", 5.51)]
    found = member_impacts.measure_fault_impacts(job(*both, epoch(6.0, ["0.0"], []), *steps(0, 7.0, 8.0)))
    assert [toll.survivors for toll in found] == [1, 1]
    assert [toll.stall_s for toll in found] == [pytest.approx(1.0)] * 2


def test_steps_of_a_zombie_are_counted_and_its_way_back_is_timed() -> None:
    """Worker 1 is stopped from 5.5 on; it wakes at 20, ends its step, and comes back as another one."""
    others = [*steps(0, 7.5, 8.5, *range(10, 30)), *steps(2, 7.5, 8.5, *range(10, 30))]
    zombie = [*steps(1, 20.1), watched(1, 23), epoch(25.2, ["0.0", "1.1", "2.0"], ["1.1"]), *steps(1, 26, 27)]
    events = job(fault("at 5.5s pause worker 1 for 14s", 5.5), epoch(7.1, ["0.0", "2.0"], []), *others, *zombie)
    (toll,) = member_impacts.measure_fault_impacts(events)
    assert toll.stall_s == pytest.approx(1.5)
    assert toll.steps_as_zombie == 1
    assert toll.back_s == pytest.approx(20.5)


def test_a_node_that_is_cut_off_takes_its_workers_along_and_coordinators_are_no_workers() -> None:
    happens = [fault("at 5.5s cut a-2 in for 9s", 5.5), fault("at 5.6s kill coordinator", 5.6)]
    found = member_impacts.measure_fault_impacts(
        job(*happens, epoch(6.5, ["0.0", "1.0"], [], term=2), *steps(0, 7.0), *steps(1, 7.0))
    )
    assert [toll.victims for toll in found] == [(2,)]
    assert found[0].back_s is None


def test_one_that_is_put_out_though_nothing_hit_it_is_told_and_its_stall_is_nobodys() -> None:
    """Worker 1 is killed at 5.5; worker 2 is no member any more at 6.5, before it has made a step without it."""
    more = [epoch(6.0, ["0.0", "2.0"], []), epoch(6.5, ["0.0"], []), *steps(0, 7.0, 8.0)]
    (toll,) = member_impacts.measure_fault_impacts(job(fault("at 5.5s kill worker 1", 5.5), *more))
    assert (toll.evicted, toll.survivors) == ((2,), 1)
    assert toll.stall_s == pytest.approx(1.0)


def test_one_that_makes_a_step_and_is_killed_before_all_is_settled_is_no_survivor() -> None:
    both = [fault("at 5.5s kill worker 1", 5.5), fault("at 6.1s kill worker 2", 6.1)]
    more = [*steps(2, 6.0), epoch(6.5, ["0.0"], []), *steps(0, 7.0, 8.0)]
    first, second = member_impacts.measure_fault_impacts(job(*both, *more))
    assert (first.survivors, first.evicted, second.survivors) == (1, (), 1)
    assert first.stall_s == pytest.approx(1.0)


def test_a_newcomer_that_has_made_no_step_yet_is_not_the_process_that_it_replaces() -> None:
    """Worker 2 was put out at 5.1 though nothing had hit it, and is a member again at 7 when worker 1 is killed."""
    again = [epoch(5.1, ["0.0", "1.0"], []), watched(2, 6.5), epoch(6.9, ["0.0", "1.0", "2.1"], ["2.1"])]
    more = [fault("at 7s kill worker 1", 7.0), epoch(7.5, ["0.0", "2.1"], []), *steps(2, 10.0, 11.0)]
    others = [*steps(0, 6.0, 7.9, 8.9, *range(10, 30)), *steps(1, 6.0)]
    (toll,) = member_impacts.measure_fault_impacts(job(*again, *more, *others))
    assert (toll.survivors, toll.evicted, toll.stall_s) == (1, (), pytest.approx(0.9))


def test_who_hangs_is_not_excused_by_a_fault_long_after() -> None:
    """Worker 2 hangs from the first fault on; it is killed a minute later."""
    both = [fault("at 5.5s kill worker 1", 5.5), fault("at 66s kill worker 2", 66.0)]
    more = [epoch(6.0, ["0.0", "2.0"], []), *steps(0, *range(7, 80))]
    first, _ = member_impacts.measure_fault_impacts(job(*both, *more))
    assert (first.survivors, first.stall_s, first.watched_s) == (2, None, pytest.approx(73.5))


def test_members_of_other_rings_stay_members_when_one_ring_has_a_new_epoch() -> None:
    """Workers 0 and 1 are ring 0, worker 2 is ring 1, which forms anew for a reason of its own before ring 0 does."""
    rings = [
        {**epoch(0.1, ["0.0", "1.0"], []), "part": "ring 0"},
        {**epoch(0.1, ["2.0"], []), "part": "ring 1"},
        {**epoch(5.6, ["2.0"], []), "part": "ring 1"},
        {**epoch(6.0, ["0.0"], []), "part": "ring 0"},
    ]
    begin = [watched(rank, 0) for rank in range(3)]
    made = [*steps(0, 1, 2, 3, 4, 5, 7, 8), *steps(1, 1, 2, 3, 4, 5), *steps(2, 1, 2, 3, 4, 5, 6, 7)]
    events = sorted([*begin, *rings, *made, fault("at 5.5s kill worker 1", 5.5)], key=_time)
    (toll,) = member_impacts.measure_fault_impacts(events)
    assert toll.generation_s == pytest.approx(0.5), "the epoch of the other ring is none without the victim"
    assert (toll.survivors, toll.evicted, toll.stall_s) == (2, (), pytest.approx(1.0))


def test_a_coordinator_is_replaced_when_another_one_forms_an_epoch() -> None:
    """It is killed at 5.5, worker 1 right after it; the other coordinator notices at 7.5."""
    both = [fault("at 5.5s kill coordinator", 5.5), fault("at 5.7s kill worker 1", 5.7)]
    more = [epoch(7.5, ["0.0", "2.0"], [], term=2), *steps(0, 8.0, 9), *steps(2, 8.2, 9)]
    (found,) = member_impacts.measure_takeover_impacts(job(*both, *more))
    assert (found.taken_over_s, found.survivors) == (pytest.approx(2.0), 2)
    assert found.stall_s == pytest.approx(2.2), "5 to 8.2, of which 1 is usual"
    assert found.stall_median_s == pytest.approx(2.1)


def test_an_epoch_of_the_same_coordinator_is_no_takeover_whatever_its_term() -> None:
    """A single member that came back has made a later term necessary."""
    more = [epoch(7.5, ["0.0", "2.0"], [], term=3), *(each for rank in (0, 2) for each in steps(rank, 8, 9))]
    (found,) = member_impacts.measure_takeover_impacts(job(fault("at 5.5s kill coordinator", 5.5), *more))
    assert found.taken_over_s is None


def test_the_one_that_was_killed_may_be_one_that_had_taken_over_and_formed_no_epoch() -> None:
    """1 takes over at 3, and says the first epoch again; it is killed at 5.5, and 0 forms the next one."""
    again = {**epoch(0, ALL, ALL), "time": 3.0}
    more = [epoch(7.5, ["0.0", "2.0"], [], term=3), *(each for rank in (0, 2) for each in steps(rank, 8, 9))]
    (found,) = member_impacts.measure_takeover_impacts(job(again, fault("at 5.5s kill coordinator", 5.5), *more))
    assert found.taken_over_s == pytest.approx(2.0)


def test_where_nobody_comes_or_goes_no_other_coordinator_is_seen_and_nobody_waits() -> None:
    others = [each for rank in range(3) for each in steps(rank, *range(6, 30))]
    (found,) = member_impacts.measure_takeover_impacts(job(fault("at 5.5s kill coordinator", 5.5), *others))
    assert (found.taken_over_s, found.survivors, found.stall_s) == (None, 3, 0.0)


def test_a_server_is_replaced_when_another_one_leads() -> None:
    led = [{"time": time, "kind": "params_leader_changed", "server": server} for time, server in ((0.5, 0), (7.0, 1))]
    others = [each for rank in range(3) for each in steps(rank, 7.5, 8.5)]
    (found,) = member_impacts.measure_takeover_impacts(job(fault("at 5.5s pause server for 3s", 5.5), *led, *others))
    assert (found.taken_over_s, found.survivors, found.stall_s) == (pytest.approx(1.5), 3, pytest.approx(1.5))


def test_nobody_takes_over_from_a_standby_and_what_comes_much_later_is_of_another_fault() -> None:
    led = [{"time": time, "kind": "params_leader_changed", "server": server} for time, server in ((0.5, 0), (7.0, 1))]
    happens = [fault("at 5.4s kill standby", 5.4), fault("at 5.5s kill server-standby", 5.5)]
    happens.append(fault("at 5.6s kill coordinator", 5.6))
    others = [each for rank in range(3) for each in steps(rank, *range(6, 40))]
    found = member_impacts.measure_takeover_impacts(job(*happens, *led, *others, epoch(30.0, ALL, [], term=2)))
    assert [(each.taken_over_s, each.stall_s) for each in found] == [(None, 0.0)] * 3


def test_a_worker_that_died_before_the_coordinator_is_not_waited_for() -> None:
    both = [fault("at 5.2s kill worker 1", 5.2), fault("at 5.5s kill coordinator", 5.5)]
    others = [each for rank in (0, 2) for each in steps(rank, *range(6, 30))]
    (found,) = member_impacts.measure_takeover_impacts(job(*both, *others))
    assert (found.survivors, found.stall_s) == (2, 0.0)
