import random

import pytest
from hypothesis import given, settings

from ringweave import cost, topology
from ringweave.planning.autotune.link_survey import LinkSurvey
from ringweave.testing.clusters import clusters
from tests import effort

RACKS = """
name: racks
nodes:
  - {name: a, switch: r0, nic: 400Mbit/s, devices: 1, count: 4}
  - {name: b, switch: r1, nic: 400Mbit/s, devices: 1, count: 4}
switches:
  - {name: r0, uplink: 200Mbit/s}
  - {name: r1, uplink: 200Mbit/s}
"""
MIXED = """
name: mixed
nodes:
  - {name: big, nic: 400Mbit/s, devices: 1}
  - {name: s, nic: 100Mbit/s, devices: 1, count: 3}
"""


def ask(text: str, changed: dict[str, float], noise: float = 0.0, goodput: float = 0.95) -> dict[str, float]:
    """What a survey finds on a cluster some of whose links have another rate than its file says."""
    cluster = topology.loads(text)
    names = tuple(node.name for node in cluster.nodes)
    believed = LinkSurvey(cost.group_network(cluster), names)
    true = LinkSurvey(cost.group_network(cluster, None, changed), names)
    phases = believed.phases()
    rng = random.Random(3)
    rates = [rate for phase in phases for rate in true._expected(phase)]
    return believed.revised_rates(phases, [rate * goodput * rng.uniform(1 - noise, 1 + noise) for rate in rates])


@pytest.mark.parametrize("text", [RACKS, MIXED])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_where_nothing_has_changed_nothing_is_found(text: str, noise: float) -> None:
    assert ask(text, {}, noise) == {}


@pytest.mark.parametrize("link", ["a-1->r0", "r0->a-1", "b-3->r1"])
def test_a_quarter_of_any_link_is_found_and_no_other(link: str) -> None:
    assert ask(RACKS, {link: 12.5e6}, noise=0.03) == {link: pytest.approx(12.5e6, rel=0.08)}


@pytest.mark.parametrize("link", ["r0->core", "core->r1"])
def test_of_links_that_all_traffic_takes_in_a_row_each_may_be_the_slow_one(link: str) -> None:
    found = ask(RACKS, {link: 6.25e6}, noise=0.03)
    assert found == {"r0->core": pytest.approx(6.25e6, rel=0.08), "core->r1": pytest.approx(6.25e6, rel=0.08)}


def test_both_directions_of_a_nic_are_found() -> None:
    found = ask(RACKS, {"a-1->r0": 12.5e6, "r0->a-1": 12.5e6})
    assert found == {"a-1->r0": pytest.approx(12.5e6, rel=0.05), "r0->a-1": pytest.approx(12.5e6, rel=0.05)}


@pytest.mark.parametrize("link", ["big->core", "core->big"])
def test_a_fast_link_among_slow_ones_is_filled_by_several_streams(link: str) -> None:
    found = ask(MIXED, {link: 12.5e6})
    assert found == {link: pytest.approx(12.5e6, rel=0.1)}


@pytest.mark.parametrize("only", [(), ("a-1->r0", "r0->a-1")])
def test_a_link_that_has_become_faster_is_found(only: tuple[str, ...]) -> None:
    cluster = topology.loads(RACKS)
    names = tuple(node.name for node in cluster.nodes)
    slow = {"a-1->r0": 12.5e6, "r0->a-1": 12.5e6}
    believed, true = (
        LinkSurvey(cost.group_network(cluster, None, slow), names),
        LinkSurvey(cost.group_network(cluster), names),
    )
    phases = believed.phases(only)
    assert not only or len(phases) == len(only)
    found = believed.revised_rates(phases, [rate for phase in phases for rate in true._expected(phase)])
    assert found["a-1->r0"] == pytest.approx(50e6, rel=0.1)
    assert found["r0->a-1"] == pytest.approx(50e6, rel=0.1)


@settings(max_examples=effort.share_of(120))
@given(clusters())
def test_streams_are_bounded_and_between_different_nodes(cluster: topology.Cluster) -> None:
    names = tuple(node.name for node in cluster.nodes)
    survey = LinkSurvey(cost.group_network(cluster), names)
    phases = survey.phases()
    assert all(src != dst and 2**17 <= num_bytes <= 2**22 for phase in phases for src, dst, num_bytes in phase)
    assert len(phases) <= 12
    rates = [rate for phase in phases for rate in survey._expected(phase)]
    assert survey.revised_rates(phases, rates) == {}
