"""What `auto` becomes, from what ranks say."""

import pytest

from ringweave.jobs import modes
from ringweave.training.mode_choice import forecast

OPEN = (modes.BALANCED, "as ever")


def said(trials_s, rates=None, **others):
    rates = rates or [None] * len(trials_s)
    common = {"batch_samples": 800, "num_bytes": 22_000_000, "server_rate": 50e6, "is_served": True, "optimizer": "SGD"}
    common |= {"uplinks": {}, "server_uplinks": {}}
    return [
        {"trial_s": trial_s, "speed": 1.0, "rate": rate, **common, **others}
        for trial_s, rate in zip(trials_s, rates, strict=True)
    ]


def test_fixed_speeds_are_for_exact_balance():
    mode, reason, rings = forecast.choose_mode(OPEN, said([[0.001]] * 7 + [[0.004]]), None, is_open=True)
    assert (mode, rings) == ("balanced", None)
    assert reason.startswith(
        "predicted for the samples of a train step: sync 0.4 s, 0.4 s of it computing; balanced 0.1"
    )


def test_a_slow_link_is_for_rings():
    rates = [50e6] * 7 + [5e6]
    mode, _, rings = forecast.choose_mode(OPEN, said([[0.001]] * 8, rates), None, is_open=True)
    assert mode == "ps-hra"
    assert rings == ((0, 1, 2, 3, 4, 5, 6), (7,))


def test_a_server_that_is_slow_is_pushed_to_by_few():
    trials_s = [[0.01] * 7 + [0.04]] * 8  # what the server is for, were it fast
    heard = said(trials_s, num_bytes=1000, reducing_s=None, serving_s=0.3)
    mode, reason, _ = forecast.choose_mode(OPEN, heard, None, is_open=True)
    assert mode == "ps-hra"
    assert reason.endswith("; the parameter server needs 0.3 s for an exchange (measured)")
    assert forecast.choose_mode(OPEN, said(trials_s, num_bytes=1000, serving_s=0.0), None, is_open=True)[0] == "ps"


def test_steps_that_differ_make_those_wait_who_wait_for_all():
    heard = said([[0.01]] * 8, num_bytes=1000, reducing_s=None, serving_s=0.0)
    assert forecast.choose_mode(OPEN, heard, None, is_open=True)[0] == "balanced"
    for each in heard:
        each["benchmarked_s"] = [0.008, 0.009, 0.01, 0.01, 0.011, 0.012]
    assert forecast.choose_mode(OPEN, heard, None, is_open=True)[0] == "ps"


def test_rounds_that_were_rehearsed_are_what_each_rank_alone_takes():
    """Predicted by parts 0.0816 s, where balanced took 0.1; then rounds of three lengths."""
    heard = said([[0.0008]] * 8, num_bytes=1000, reducing_s=0.0, serving_s=0.0, balanced_s=0.1)
    mode, reason, _ = forecast.choose_mode(OPEN, heard, None, is_open=True)
    assert mode in modes.SERVER_MODES
    assert "; rings are taken for a gain of 10% or more" in reason
    for round_s, is_faster in ((0.0009, True), (0.00094, False), (0.0012, False)):
        rehearsed = [{**each, "rounds_s": [round_s] * 11} for each in heard]
        mode, reason, _ = forecast.choose_mode(OPEN, rehearsed, None, is_open=True)
        assert (mode in modes.SERVER_MODES) is is_faster
        assert f"; ps {round_s * 100 / 0.98:.3g} s," in reason
        assert ", of which balanced and ps by benchmarked steps (measured); rings are taken for a gain of 5%" in reason


def in_two_racks(heard):
    """Four ranks in each, behind uplinks of a tenth of a NIC; the server is in the first."""
    for rank, each in enumerate(heard):
        each["uplinks"] = {f"r{rank // 4}": 5e6}
        each["server_uplinks"] = {"r0": 5e6}
    return heard


def crossing(rings):
    """Rings with ranks of both."""
    assert rings
    return [ring for ring in rings if len({rank // 4 for rank in ring}) > 1]


def test_rings_do_not_cross_a_thin_uplink():
    asked, racks = (modes.PS_HRA, "the script asks for it"), ((0, 1, 2, 3), (4, 5, 6, 7))
    trials_s = [[0.001], *[[0.004]] * 3, *[[0.001]] * 3, [0.004]]
    heard = said(trials_s, [50e6] * 8, num_bytes=5_000_000)
    assert crossing(forecast.choose_mode(asked, heard, None, is_open=False)[2])
    assert not crossing(forecast.choose_mode(asked, in_two_racks(heard), None, is_open=False)[2])
    assert racks in forecast.rings_by_links(heard)


def test_two_racks_are_left_to_rings_that_push_rarely():
    heard = in_two_racks(said([[0.001]] * 8, [50e6] * 8, num_bytes=5_000_000))
    mode, reason, rings = forecast.choose_mode(OPEN, heard, None, is_open=True, local_steps=8)
    assert mode == "ps-hra"
    assert not crossing(rings)
    assert "sync 1.1 s, 0.1 s of it computing" in reason


def test_stalls_are_for_the_server():
    trials_s = [[0.01] * 7 + [0.04]] * 8
    mode, _, rings = forecast.choose_mode(OPEN, said(trials_s, num_bytes=1000), None, is_open=True)
    assert (mode, len(rings or ())) == ("ps", 8)


def test_rings_that_are_asked_for_are_more_where_ranks_stall():
    asked = (modes.PS_HRA, "the script asks for it")
    found = forecast.choose_mode(asked, said([[0.01] * 7 + [0.04]] * 8, num_bytes=1000), None, is_open=False)[2]
    assert found is not None
    assert sorted(map(len, found)) == [2, 2, 2, 2]
    found = forecast.choose_mode(asked, said([[0.01] * 8] * 8, num_bytes=1000), None, is_open=False)[2]
    assert sorted(map(len, found or ())) == [4, 4]


def test_a_number_of_rings_that_is_asked_for_is_one_of_the_ways():
    asked = said([[0.01] * 7 + [0.04]] * 8, num_bytes=1000)
    mode, reason, rings = forecast.choose_mode(OPEN, asked, 2, is_open=True)
    assert (mode, sorted(map(len, rings or ()))) == ("ps-hra", [4, 4])
    assert "ps " not in reason, "no other number is looked at"
    assert forecast.choose_mode(OPEN, said([[0.01] * 8] * 8, num_bytes=1000), 2, is_open=True)[0] == "balanced"
    assert forecast.choose_mode((modes.PS_HRA, "asked"), asked, 2, is_open=False)[2] is None


def test_ranks_that_load_ahead_unequally_are_balanced():
    heard = said([[0.01] * 7 + [0.04]] * 8, num_bytes=1000)
    heard[3]["num_prefetched"] = 4
    assert forecast.choose_mode(OPEN, heard, None, is_open=True) == (*OPEN, None)


@pytest.mark.parametrize("others", [{"is_served": False}, {"optimizer": "LBFGS"}, {"loses_state": True}])
def test_without_a_server_nothing_is_open(others):
    found = forecast.choose_mode(OPEN, said([[0.001]] * 2, **others), None, is_open=True)
    assert found == (*OPEN, None)


def test_rings_that_are_asked_for_are_of_equal_links_where_links_matter():
    asked = (modes.PS_HRA, "the script asks for it")
    rates = [50e6, 50e6, 50e6, 5e6]
    assert forecast.choose_mode(asked, said([[0.001]] * 4, rates), None, is_open=False)[2] == ((0, 1, 2), (3,))
    assert forecast.choose_mode(asked, said([[0.001]] * 4, rates), 2, is_open=False)[2] is None  # so many are wanted


def test_slow_ranks_that_keep_a_sum_waiting_are_for_rings():
    """Half of the ranks have a quarter of the others' processors: links say that a sum takes 0.007 s, it takes 0.13."""
    trials_s = [[0.0004]] * 4 + [[0.0016]] * 4
    heard = said(trials_s, [50e6] * 8, num_bytes=190_000)
    assert forecast.choose_mode(OPEN, heard, None, is_open=True)[0] == "balanced"
    rehearsed = [{**each, "reducing_s": 0.13} for each in heard]
    mode, reason, _ = forecast.choose_mode(OPEN, rehearsed, None, is_open=True)
    assert mode in modes.SERVER_MODES
    assert reason.endswith("; a sum over all ranks took 0.13 s in a benchmark (measured)")


def test_what_was_not_tried_is_known_in_relation_only():
    mode, _, _ = forecast.choose_mode(OPEN, said([None, [0.001]], [50e6, 5e6]), None, is_open=True)
    assert mode == "balanced"


def test_why_it_was_not_tried_is_in_the_reason():
    heard = said([[0.001], None, [0.001], [0.001]], [50e6, 50e6, 50e6, 5e6])
    heard[1]["trial_problem"] = "RuntimeError: no such file"
    note = "; rank 1 could not try out the model (RuntimeError: no such file), so speeds are those of the cluster file"
    assert forecast.choose_mode(OPEN, heard, None, is_open=True)[1].endswith(note)
    asked = (modes.PS_HRA, "the script asks for it")
    assert forecast.choose_mode(asked, heard, None, is_open=False)[1] == asked[1] + note


EIGHT = ((0, 1, 2, 3), (4, 5, 6, 7))
EVERYONE = (tuple(range(8)),)
STALLING = [[0.01] * 7 + [0.04]] * 8


def again(recent_s, rings, **others):
    return forecast.reconsider_rings(said([[0.01]] * 8, num_bytes=1000, **others), recent_s, rings)


def test_rings_that_no_longer_stall_become_one_and_stalls_part_it_again():
    outlook = again([[0.01] * 8] * 8, tuple((rank,) for rank in range(8)))
    assert outlook is None  # 2 % of what samples are worth is no reason to form other rings
    outlook = again(STALLING, EVERYONE)
    assert outlook is not None
    assert len(outlook.chosen.rings) > 1
    assert "ps-hra" in outlook.reason


def test_ranks_that_slowed_down_leave_rings_whose_links_are_crowded():
    """Each rank alone pushes to a server whose link has become the limit, since computing has become fast."""
    alone = tuple((rank,) for rank in range(8))
    heard = said([[0.01]] * 8, num_bytes=50_000_000)
    outlook = forecast.reconsider_rings(heard, [[0.001] * 8] * 8, alone)
    assert outlook is not None
    assert outlook.chosen.step_s < outlook.forecasts[0].step_s
    assert outlook.forecasts[0].rings == alone


def test_what_fits_is_kept():
    fitting = ((0, 1, 2, 3), (7, 6, 5, 4))
    slow = [[0.01] * 8] * 4 + [[0.04] * 8] * 4
    assert again(slow, fitting) is None
    assert again(slow, again(STALLING, EVERYONE).chosen.rings) is None


def test_a_model_that_is_larger_than_a_message_is_balanced():
    heard = said([[0.01] * 7 + [0.04]] * 8, num_bytes=forecast.MAX_RING_MODEL_BYTES + 1)
    assert forecast.choose_mode(OPEN, heard, None, is_open=True) == (*OPEN, None)


def test_first_shares_are_by_the_best_that_is_known():
    by_file = [{**each, "speed": speed} for each, speed in zip(said([None] * 2), (1.0, 0.25), strict=True)]
    assert forecast.sample_times_s(by_file) == [1.0, 4.0]
    rehearsed = [{**each, "benchmarked_s": [own_s] * 3} for each, own_s in zip(by_file, (0.1, 0.5), strict=True)]
    assert forecast.sample_times_s(rehearsed) == [0.1, 0.5]
