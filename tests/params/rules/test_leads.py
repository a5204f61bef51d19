"""How far ahead rings are given the parameters."""

import pytest

from ringweave.params.rules import Leads
from ringweave.params.rules.leads import MOST_TRAIN_STEPS


def test_a_ring_is_given_what_will_be_when_its_push_comes():
    leads = Leads()
    assert leads.grant(0, 0.0) == 0.0
    leads.push(0, 0.75)
    assert leads.grant(0, 1.0) == 0.75
    leads.push(0, 1.75)
    assert leads.grant(0, 2.0) == 0.75


def test_a_ring_alone_is_never_ahead():
    leads = Leads()
    for train_step in range(5):
        assert leads.grant(0, train_step) == 0.0
        leads.push(0, train_step)


def test_a_stall_is_forgotten_and_the_lead_has_an_end():
    leads = Leads()
    leads.grant(0, 0.0)
    leads.push(0, 40.0)
    assert leads.grant(0, 40.0) == MOST_TRAIN_STEPS
    for train_step in range(41, 51):
        leads.push(0, train_step - 0.5)
        leads.grant(0, train_step - 0.5)
    assert leads.grant(0, 51.0) == pytest.approx(1.0, rel=0.05)


def test_rings_that_meet_after_a_rest_get_the_same():
    leads = Leads()
    for ring, share in ((0, 0.8), (1, 0.2)):
        leads.grant(ring, 0.0)
        leads.push(ring, share)
        leads.rest(ring)
    assert [leads.grant(ring, 1.0) for ring in (0, 1)] == [0.0, 0.0]
    leads.push(0, 1.2)
    assert leads.grant(0, 1.2) > 0, "what was known before the rest is not forgotten"
