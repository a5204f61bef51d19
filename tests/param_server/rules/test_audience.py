"""What a server hears of rings."""

from ringweave.param_server.leadership import Reachability, RingReachability

FRESH_S = 1.0
RINGS = {0, 1, 2}


def test_nobody_some_and_most():
    audience = RingReachability(FRESH_S)
    assert audience.reachability(RINGS, 0.0) is Reachability.NONE
    audience.note_heard(0, 0.0, is_remote=True)
    assert audience.reachability(RINGS, 0.5) is Reachability.SOME
    assert audience.reachability({0}, 0.5) is Reachability.MOST
    assert audience.reachability({0, 1}, 0.5) is Reachability.SOME, "half of them is not more than half"
    audience.note_heard(2, 0.9, is_remote=True)
    assert audience.reachability(RINGS, 0.9) is Reachability.MOST
    assert audience.reachability(RINGS, 1.0) is Reachability.SOME, "the first one is silent"
    assert audience.reachability(RINGS, 2.0) is Reachability.NONE


def test_rings_of_its_own_node_are_heard_without_a_network():
    audience = RingReachability(FRESH_S)
    audience.note_heard(0, 0.0, is_remote=False)
    audience.note_heard(1, 0.0, is_remote=False)
    assert audience.reachability(RINGS, 0.5) is Reachability.SOME
    audience.note_heard(2, 0.5, is_remote=True)
    assert audience.reachability(RINGS, 0.5) is Reachability.MOST


def test_before_the_job_has_begun_anybody_from_elsewhere_will_do():
    audience = RingReachability(FRESH_S)
    audience.note_heard(-1, 0.0, is_remote=False)
    assert audience.reachability((), 0.5) is Reachability.SOME
    audience.note_heard(-1, 0.5, is_remote=True)
    assert audience.reachability((), 0.5) is Reachability.MOST


def test_rings_that_are_gone_do_not_count():
    audience = RingReachability(FRESH_S)
    audience.note_heard(0, 0.0, is_remote=True)
    audience.note_heard(1, 0.0, is_remote=True)
    assert audience.reachability({2, 3}, 0.5) is Reachability.SOME
