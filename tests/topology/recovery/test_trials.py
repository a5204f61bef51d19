"""Batches that put one link to the test."""

from collections import Counter

from ringweave.topology.inference.infer import proportional_flows
from ringweave.topology.inference.observations import Flow


def test_what_noise_leaves_over_gets_no_flow() -> None:
    """It would take half of two NICs, and the link would be offered less than it is to be tried with."""
    flows = proportional_flows({0: 191.3, 1: 191.5, 2: 95.6, 3: 95.4}, {4: 191.45, 5: 191.4, 6: 95.5, 7: 95.6})
    assert len(flows) == 4
    assert {(flow.src < 2, flow.dst < 6) for flow in flows} == {(True, True), (False, False)}


def test_who_can_send_more_sends_to_several() -> None:
    assert set(proportional_flows({0: 100.0}, {1: 50.0, 2: 50.0})) == {Flow(0, 1), Flow(0, 2)}
    flows = proportional_flows({0: 300.0, 1: 100.0}, {2: 100.0, 3: 100.0, 4: 100.0, 5: 100.0})
    assert Counter(flow.src for flow in flows) == {0: 3, 1: 1}
