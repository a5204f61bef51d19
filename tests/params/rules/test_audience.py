"""What a server hears of rings."""

from ringweave.params.rules.audience import Audience, Reach

FRESH_S = 1.0
RINGS = {0, 1, 2}


def test_nobody_some_and_most():
    audience = Audience(FRESH_S)
    assert audience.reach(RINGS, 0.0) is Reach.NOBODY
    audience.heard(0, 0.0, is_elsewhere=True)
    assert audience.reach(RINGS, 0.5) is Reach.SOME
    assert audience.reach({0}, 0.5) is Reach.MOST
    assert audience.reach({0, 1}, 0.5) is Reach.SOME, "half of them is not more than half"
    audience.heard(2, 0.9, is_elsewhere=True)
    assert audience.reach(RINGS, 0.9) is Reach.MOST
    assert audience.reach(RINGS, 1.0) is Reach.SOME, "the first one is silent"
    assert audience.reach(RINGS, 2.0) is Reach.NOBODY


def test_rings_of_its_own_node_are_heard_without_a_network():
    audience = Audience(FRESH_S)
    audience.heard(0, 0.0, is_elsewhere=False)
    audience.heard(1, 0.0, is_elsewhere=False)
    assert audience.reach(RINGS, 0.5) is Reach.SOME
    audience.heard(2, 0.5, is_elsewhere=True)
    assert audience.reach(RINGS, 0.5) is Reach.MOST


def test_before_the_job_has_begun_anybody_from_elsewhere_will_do():
    audience = Audience(FRESH_S)
    audience.heard(-1, 0.0, is_elsewhere=False)
    assert audience.reach((), 0.5) is Reach.SOME
    audience.heard(-1, 0.5, is_elsewhere=True)
    assert audience.reach((), 0.5) is Reach.MOST


def test_rings_that_are_gone_do_not_count():
    audience = Audience(FRESH_S)
    audience.heard(0, 0.0, is_elsewhere=True)
    audience.heard(1, 0.0, is_elsewhere=True)
    assert audience.reach({2, 3}, 0.5) is Reach.SOME
