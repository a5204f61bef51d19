"""How far ahead rings are given the parameters."""

import pytest

from ringweave.param_server.versions import WeightPrediction


def test_a_ring_is_given_what_will_be_when_its_push_comes():
    leads = WeightPrediction()
    assert leads.steps_ahead(0, 0.0) == 0.0
    leads.note_push(0, 0.75, share=0.25)
    assert leads.steps_ahead(0, 1.0) == 0.75
    leads.note_push(0, 1.75, share=0.25)
    assert leads.steps_ahead(0, 2.0) == 0.75


def test_a_ring_alone_is_never_ahead():
    leads = WeightPrediction()
    for train_step in range(5):
        assert leads.steps_ahead(0, train_step) == 0.0
        leads.note_push(0, train_step, share=1.0)


def test_a_ring_that_was_alone_for_a_while_is_not_ahead_by_what_a_whole_train_step_brings():
    leads = WeightPrediction()
    leads.steps_ahead(0, 0.0)
    leads.note_push(0, 0.5, share=1.25)
    assert leads.steps_ahead(0, 1.75) == 0.0


@pytest.mark.parametrize(("slower", "lead"), [(1, 0.5), (2, 0.25), (4, 0.125), (8, 0.0625)])
def test_the_lead_of_a_ring_that_becomes_slow_is_the_shorter_the_later_it_is(slower, lead):
    leads, now = WeightPrediction(), 0.0
    for late in [0.5] * 5 + [0.5 * slower] * 30:
        leads.steps_ahead(0, now)
        now += late
        leads.note_push(0, now, share=0.5)
        now += 0.5
    assert leads.steps_ahead(0, now) == pytest.approx(lead, rel=1e-3)


def test_a_large_ring_that_becomes_slow_is_as_far_ahead_as_the_turn_of_a_small_one():
    leads = WeightPrediction()
    for ring, share in ((0, 0.8), (1, 0.2)):
        leads.steps_ahead(ring, 0.0)
        leads.note_push(ring, 0.6, share=share)
    assert [leads.steps_ahead(ring, 1.0) for ring in (0, 1)] == [0.6, 0.6]


def test_a_stall_is_forgotten():
    leads = WeightPrediction()
    leads.steps_ahead(0, 0.0)
    leads.note_push(0, 40.0, share=0.5)
    assert leads.steps_ahead(0, 40.0) < 0.01, "nobody can tell where the parameters are by then"
    for train_step in range(41, 61):
        leads.note_push(0, train_step - 0.5, share=0.5)
        leads.steps_ahead(0, train_step)
    assert leads.steps_ahead(0, 61.0) == pytest.approx(0.5, rel=0.01)


def test_rings_that_meet_after_a_rest_get_the_same():
    leads = WeightPrediction()
    for ring, share in ((0, 0.8), (1, 0.2)):
        leads.steps_ahead(ring, 0.0)
        leads.note_push(ring, 1 - share, share)
        leads.note_idle(ring)
    assert [leads.steps_ahead(ring, 1.0) for ring in (0, 1)] == [0.0, 0.0]
    leads.note_push(0, 1.2, share=0.8)
    assert leads.steps_ahead(0, 2.0) > 0, "what was known before the rest is not forgotten"
