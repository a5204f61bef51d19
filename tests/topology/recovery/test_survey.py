"""Clusters recovered from a simulated network: what is there is found, and nothing else."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringweave.topology import Cluster, Device, Nic, Node, Switch, loads
from ringweave.topology.inference.infer import SurveyLimits
from ringweave.topology.inference.observations import (
    all_nodes_batch,
    opposite_cut,
    pair_batches,
    rates_across_cut,
)
from ringweave.topology.inference.tree import NodeSpec, cluster_from_fit
from ringweave_bench.visible_edges import VisibleEdges, visible_edges
from tests import effort
from tests.topology.recovery.simulated import Network, measure

MBIT = 125e3
TWO_RACKS = """
name: two
nodes:
  - {name: a, switch: r0, nic: 400Mbit/s, devices: 1, count: 4}
  - {name: b, switch: r1, nic: 400Mbit/s, devices: 1, count: 4}
switches: [{name: r0, uplink: 200Mbit/s}, {name: r1, uplink: 200Mbit/s}]
"""
THREE_RACKS = """
name: three
nodes:
  - {name: a0, switch: r0, nic: 400Mbit/s, devices: 1}
  - {name: a1, switch: r0, nic: 200Mbit/s, devices: 1}
  - {name: a2, switch: r0, nic: 100Mbit/s, devices: 1}
  - {name: b0, switch: r1, nic: 200Mbit/s, devices: 1}
  - {name: b1, switch: r1, nic: 200Mbit/s, devices: 1}
  - {name: c0, switch: r2, nic: 400Mbit/s, devices: 1}
switches: [{name: r0, uplink: 400Mbit/s}, {name: r1, uplink: 100Mbit/s}, {name: r2, uplink: 400Mbit/s}]
"""
PODS = """
name: pods
nodes:
  - {name: a, switch: r0, nic: 400Mbit/s, devices: 1, count: 2}
  - {name: b, switch: r1, nic: 400Mbit/s, devices: 1, count: 2}
  - {name: c, switch: r2, nic: 400Mbit/s, devices: 1, count: 2}
  - {name: d, switch: r3, nic: 400Mbit/s, devices: 1, count: 2}
switches:
  - {name: p0, uplink: 100Mbit/s}
  - {name: p1, uplink: 100Mbit/s}
  - {name: r0, uplink: 200Mbit/s, parent: p0}
  - {name: r1, uplink: 200Mbit/s, parent: p0}
  - {name: r2, uplink: 200Mbit/s, parent: p1}
  - {name: r3, uplink: 200Mbit/s, parent: p1}
"""
FOUR_RACKS = """
name: four
nodes:
  - {name: a, switch: r0, nic: 200Mbit/s, devices: 1, count: 4}
  - {name: b, switch: r1, nic: 200Mbit/s, devices: 1, count: 4}
  - {name: c, switch: r2, nic: 100Mbit/s, devices: 1, count: 4}
  - {name: d, switch: r3, nic: 100Mbit/s, devices: 1, count: 4}
switches:
  - {name: r0, uplink: 400Mbit/s}
  - {name: r1, uplink: 300Mbit/s}
  - {name: r2, uplink: 200Mbit/s}
  - {name: r3, uplink: 150Mbit/s}
"""
"""The nodes of a have to send all they can, to all racks at once, to fill their uplink; no chance traffic does that."""


def hosts(truth: Cluster) -> list[NodeSpec]:
    return [NodeSpec(name=node.name, address=None, num_devices=node.num_devices) for node in truth.nodes]


def one_and(rate: str, others_rate: str, num_others: int) -> Cluster:
    others = f"{{name: b, nic: {others_rate}, devices: 1, count: {num_others}}}"
    return loads(f"name: x\nnodes: [{{name: a, nic: {rate}, devices: 1}}, {others}]")


def groups(found: Cluster) -> dict[str | None, list[str]]:
    named: dict[str | None, list[str]] = {}
    for node in found.nodes:
        named.setdefault(node.switch, []).append(node.name)
    return named


@pytest.mark.parametrize("noise", [0.0, 0.06])
@pytest.mark.parametrize("seed", range(3))
def test_two_racks(noise: float, seed: int) -> None:
    truth = loads(TWO_RACKS)
    evidence, fit = measure(Network(truth, seed, noise), 8, seed=seed)
    found, links = cluster_from_fit("found", hosts(truth), fit, 1e-5)
    assert groups(found) == {"s0": ["a-0", "a-1", "a-2", "a-3"], "s1": ["b-0", "b-1", "b-2", "b-3"]}
    assert [switch.uplink_bytes_per_s for switch in found.switches] == pytest.approx([200 * MBIT] * 2, rel=0.05)
    assert [node.rate_bytes_per_s for node in found.nodes] == pytest.approx([400 * MBIT] * 8, rel=0.06)
    assert all(link.is_proved for link in links)
    assert evidence.num_batches <= 40, "eight nodes within 30 s: 0.45 s a batch, and latencies"


@pytest.mark.parametrize("seed", range(6))
def test_an_uplink_that_only_several_nodes_fill(seed: int) -> None:
    truth = loads(THREE_RACKS)
    _, fit = measure(Network(truth, seed, 0.05), 6, seed=seed)
    found, _ = cluster_from_fit("found", hosts(truth), fit, 1e-5)
    assert groups(found) == {"s0": ["a0", "a1", "a2"], "s1": ["b0", "b1"], None: ["c0"]}
    uplinks = [switch.uplink_bytes_per_s / MBIT for switch in found.switches]
    assert uplinks == pytest.approx([400, 100], rel=0.06)


def test_equal_hardware_looks_equal_in_spite_of_noise() -> None:
    truth = loads(TWO_RACKS)
    _, fit = measure(Network(truth, 5, 0.05), 8)
    _, links = cluster_from_fit("found", hosts(truth), fit, 1e-5)
    assert len({link.rate_bytes_per_s for link in links}) == 2, "NICs and uplinks"


def test_switches_below_switches() -> None:
    truth = loads(PODS)
    _, fit = measure(Network(truth, 1, 0.04), 8, seed=1)
    found, _ = cluster_from_fit("found", hosts(truth), fit, 1e-5)
    assert [(s.name, s.parent) for s in found.switches] == [
        ("s0", None),
        ("s1", "s0"),
        ("s2", "s0"),
        ("s3", None),
        ("s4", "s3"),
        ("s5", "s3"),
    ]
    assert groups(found) == {"s1": ["a-0", "a-1"], "s2": ["b-0", "b-1"], "s4": ["c-0", "c-1"], "s5": ["d-0", "d-1"]}


def test_directions_that_differ_are_both_stated_and_the_cluster_has_the_lower() -> None:
    truth = loads(TWO_RACKS)
    rates = {"a-0->r0": 100 * MBIT, "core->r1": 120 * MBIT}
    _, fit = measure(Network(truth, rates=rates), 8)
    found, links = cluster_from_fit("found", hosts(truth), fit, 1e-5)
    stated = {link.name: link.rate_bytes_per_s / MBIT for link in links}
    assert (stated["a-0->s0"], stated["s0->a-0"]) == pytest.approx((100, 400))
    assert found.node("a-0").rate_bytes_per_s == pytest.approx(100 * MBIT)
    assert (stated["s0->core"], stated["core->s0"]) == pytest.approx((120, 200)), "r0->core->r1 is one link"


def test_a_fast_node_among_slow_ones_is_filled_by_several() -> None:
    truth = loads(
        "name: x\nnodes:\n- {name: a, nic: 300Mbit/s, devices: 1}\n- {name: b, nic: 100Mbit/s, devices: 1, count: 4}"
    )
    _, fit = measure(Network(truth), 5)
    assert fit.rate(1) == pytest.approx(300 * MBIT)
    assert fit.is_proved(1)


def test_what_nobody_can_fill_is_said_to_be_at_least_what_was_seen() -> None:
    truth = loads(
        "name: x\nnodes:\n- {name: a, nic: 1Gbit/s, devices: 1}\n- {name: b, nic: 100Mbit/s, devices: 1, count: 2}"
    )
    _, fit = measure(Network(truth), 3)
    assert (fit.rate(1), fit.is_proved(1)) == (pytest.approx(200 * MBIT), False)


def test_two_nodes_are_one_link() -> None:
    truth = one_and("300Mbit/s", "100Mbit/s", 1)
    network = Network(truth)
    evidence, fit = measure(network, 2)
    found, _ = cluster_from_fit("found", hosts(truth), fit, 1e-5)
    assert evidence.num_batches == 2
    assert [node.rate_bytes_per_s for node in found.nodes] == pytest.approx([100 * MBIT] * 2)


def test_little_effort_is_little() -> None:
    truth = loads(TWO_RACKS)
    network = Network(truth)
    measure(network, 8, SurveyLimits(num_rounds=2, num_trials=3))
    assert len(network.batches) <= 2 * 2 + 2 + 3


@st.composite
def trees(draw: Callable[[Any], Any]) -> Cluster:
    names = [f"r{index}" for index in range(draw(st.integers(0, 3)))]
    rates = st.sampled_from([50, 100, 200, 400, 1000])
    switches = tuple(
        Switch(
            name=name,
            uplink_bytes_per_s=draw(rates) * MBIT,
            parent=draw(st.sampled_from([None, *names[:index]])),
        )
        for index, name in enumerate(names)
    )
    more = draw(st.lists(st.sampled_from([None, *names]), min_size=4, max_size=8 - len(names)))
    usual = draw(rates)
    are_equal = draw(st.booleans())
    nodes = tuple(
        Node(
            name=f"n{index}",
            switch=place,
            devices=(Device(),),
            nics=(Nic(name="eth0", rate_bytes_per_s=(usual if are_equal else draw(rates)) * MBIT),),
        )
        for index, place in enumerate(draw(st.permutations([*names, *more])))
    )
    return Cluster(name="random", nodes=nodes, switches=switches)


def is_forked(visible: VisibleEdges, edge: int, count: int) -> bool:
    """Whether the edge is not as good as in a row with one node's link: without that node others fill it too."""
    sides = rates_across_cut(visible.rates, edge, count) + rates_across_cut(
        visible.rates, opposite_cut(edge, count), count
    )
    return all(sum(side.values()) - max(side.values()) > 0.5 * visible.rates[edge] for side in sides)


@pytest.mark.slow
@settings(max_examples=effort.share_of(120))
@given(truth=trees(), seed=st.integers(0, 1000))
def test_any_tree_what_holds_much_back_is_found_and_any_traffic_is_foretold(truth: Cluster, seed: int) -> None:
    count = truth.num_nodes
    _, fit = measure(Network(truth, seed, 0.04), count, seed=seed)
    visible = visible_edges(truth)
    assert {edge for edge in visible.edges(count, 2.0) if is_forked(visible, edge, count)} <= set(fit.edges[::2])
    if not visible.edges(count, 1.1) <= set(fit.edges[::2]):
        return  # an uplink that is exceeded by little was missed, see docs/explanation/network-inference.md
    found, links = cluster_from_fit("found", hosts(truth), fit, 1e-5)
    real, ours = Network(truth), Network(found, rates={link.name: link.rate_bytes_per_s for link in links})
    everybody = list(range(count))
    for batch in [*pair_batches(count), *(all_nodes_batch(everybody, shift) for shift in range(1, count))]:
        assert sum(ours.run(batch)) == pytest.approx(sum(real.run(batch)), rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_more_nodes_than_can_be_tried_in_all_ways(seed: int) -> None:
    racks = "".join(
        f"- {{name: {x}, switch: r{i}, nic: 200Mbit/s, devices: 1, count: 5}}\n" for i, x in enumerate("abc")
    )
    truth = loads(
        f"name: x\nnodes:\n{racks}switches:\n" + "".join(f"- {{name: r{i}, uplink: 250Mbit/s}}\n" for i in range(3))
    )
    _, fit = measure(Network(truth, seed, 0.05), 15, seed=seed)
    assert set(fit.edges[::2]) == visible_edges(truth).edges(15)


@pytest.mark.slow
def test_an_uplink_that_only_all_of_its_nodes_fill_together() -> None:
    truth = loads(FOUR_RACKS)
    _, fit = measure(Network(truth, 0, 0.05), 16, seed=1)
    found, _ = cluster_from_fit("found", hosts(truth), fit, 1e-5)
    assert sorted(groups(found).values()) == [[f"{rack}-{number}" for number in range(4)] for rack in "abcd"]
    uplinks = sorted(switch.uplink_bytes_per_s / MBIT for switch in found.switches)
    assert uplinks == pytest.approx([150, 200, 300, 400], rel=0.06)


def many_nodes(seed: int) -> Cluster:
    """13 to 20 nodes in two to five racks, NICs alike in each."""
    draws = random.Random(seed)
    count, num_racks = draws.randint(13, 20), draws.randint(2, 5)
    rates = [draws.choice([100, 200, 400]) * MBIT for _ in range(num_racks)]
    homes = [rack for rack in range(num_racks) for _ in range(2)]
    homes += [draws.choice(range(num_racks)) for _ in range(count - len(homes))]
    nodes = tuple(
        Node(
            name=f"n{index}",
            switch=f"r{rack}",
            devices=(Device(),),
            nics=(Nic(name="eth0", rate_bytes_per_s=rates[rack]),),
        )
        for index, rack in enumerate(homes)
    )
    switches = tuple(
        Switch(
            name=f"r{rack}",
            uplink_bytes_per_s=draws.choice([100, 200, 300, 400, 600, 800]) * MBIT,
            parent=draws.choice([None, None, *(f"r{above}" for above in range(rack))]),
        )
        for rack in range(num_racks)
    )
    return Cluster(name="many", nodes=nodes, switches=switches)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 3])
def test_many_nodes_whatever_holds_clearly_back_is_found_and_nothing_else(seed: int) -> None:
    """Racks of both were missed when only unintended traffic filled uplinks."""
    truth = many_nodes(seed)
    _, fit = measure(Network(truth, seed, 0.05), truth.num_nodes, seed=1)
    assert (
        visible_edges(truth).edges(truth.num_nodes, 1.15)
        <= set(fit.edges[::2])
        <= visible_edges(truth).edges(truth.num_nodes)
    )


def test_what_can_be_seen_of_a_cluster() -> None:
    view = visible_edges(loads(THREE_RACKS))
    rack_a, rack_b = 0b000111, 0b011000
    assert view.edges(6) == {opposite_cut(rack_a, 6), rack_b}
    assert view.pressures[rack_b] == pytest.approx(4.0)
    assert view.pressures[rack_a] == pytest.approx(1.25), "500 of 700 find room outside"
    assert view.rates[1 << 5] == 400 * MBIT, "c0 and the uplink of its rack are one link"
    everything_fits = loads(THREE_RACKS.replace("uplink: 400", "uplink: 800").replace("uplink: 100", "uplink: 400"))
    assert visible_edges(everything_fits).edges(6) == set()


def test_the_survey_is_the_same_for_the_same_rates() -> None:
    truth = loads(TWO_RACKS)
    one, other = Network(truth, 1, 0.05), Network(truth, 1, 0.05)
    measure(one, 8, seed=3)
    measure(other, 8, seed=3)
    assert one.batches == other.batches
