"""Routes of blocks: the schedules load the links as the fractions say, and nearly as little as the bound allows."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringweave import cost, schedules, topology
from ringweave.planning import chunk_shares
from ringweave.planning.chunk_shares import block_routes
from ringweave.schedules import Schedule
from ringweave.topology import Cluster
from tests import effort
from tests.cost.trees import flat, random_trees
from tests.planning.sharing.test_fractions import tree_of


def gathered(cluster: Cluster, nodes: list[str]) -> Schedule:
    stripe = chunk_shares.make_block_stripe(tree_of(cluster, nodes, {}))
    owners = schedules.block_owners(stripe.shares, len(nodes))
    return schedules.multi_level_allgather(*stripe, owners)


def busiest_s(cluster: Cluster, nodes: list[str], schedule: Schedule) -> float:
    rate_of = {link.name: link.bandwidth_bytes_per_s for link in cluster.links()}
    return max((moved / rate_of[link] for link, moved in cost.bytes_on_links(schedule, cluster, nodes, 1).items()))


def of_nodes(cluster: Cluster) -> list[str]:
    return [node.name for node in cluster.nodes for _ in node.devices]


@pytest.mark.slow
@settings(max_examples=effort.share_of(100))
@given(random_trees(min_nodes=2, max_nodes=6), st.integers(1, 3), st.randoms(use_true_random=False))
def test_every_subtree_lets_in_what_it_lacks_and_lets_out_little_more_than_it_must(
    case, most: int, random: Random
) -> None:
    cluster, taking_part, _ = case
    nodes = [name for name in taking_part for _ in range(random.randint(1, most))]
    random.shuffle(nodes)
    schedule = gathered(cluster, nodes)
    schedules.verify(schedule)
    schedules.verify(schedules.mirror(schedule))
    net = cost.group_network(cluster, nodes)
    at = cost.vertices_of_ranks(net, nodes)
    on_links = cost.bytes_on_links(schedule, cluster, nodes, 1)
    for vertex in range(1, len(net)):
        inside = sum(vertex <= where < net.ends[vertex] for where in at)
        assert on_links[net.down_name(vertex)] == pytest.approx(1 - inside / len(nodes))
    ring = schedules.ring_block_allgather(len(nodes), sorted(range(len(nodes)), key=lambda rank: at[rank]))
    bound_s = cost.bound(cluster, 1, nodes=nodes, kind="allgather").seconds
    assert min(busiest_s(cluster, nodes, each) for each in (schedule, ring)) <= bound_s * 1.02


def test_equal_racks_need_no_hop_to_a_leader_and_no_cut_block() -> None:
    cluster = topology.load("examples/clusters/two-racks.yaml")
    schedule = gathered(cluster, of_nodes(cluster))
    assert schedule.shares == (1,) * 8
    assert [phase.name for phase in schedule.phases] == ["allgather at depth 0", "allgather at depth 1"]
    assert busiest_s(cluster, of_nodes(cluster), schedule) == pytest.approx(0.5 / 25e6)


def test_a_slow_node_leads_less_than_the_others_of_its_rack() -> None:
    cluster = topology.load("examples/clusters/three-racks.yaml")
    nodes = of_nodes(cluster)
    schedule = gathered(cluster, nodes)
    sent = cost.bytes_on_links(schedule, cluster, nodes, 6)
    assert sent["a2->r0"] <= 5.05 < sent["a0->r0"]
    assert busiest_s(cluster, nodes, schedule) <= 5 / 6 / 12.5e6 * 1.01


def test_blocks_climb_from_a_node_that_cannot_send_them_to_all() -> None:
    """Node b has three ranks: its link lets out their blocks little more than once."""
    text = ["name: climb", "nodes:", "  - {name: a, switch: r0, nic: 1Gbit/s, devices: 1, count: 2}"]
    text += ["  - {name: b, nic: 1Gbit/s, devices: 3}", "  - {name: c, nic: 1Gbit/s, devices: 1, count: 3}"]
    cluster = topology.loads("\n".join([*text, "switches:", "  - {name: r0, uplink: 1Gbit/s}"]))
    nodes = of_nodes(cluster)
    schedule = gathered(cluster, nodes)
    assert "allgather to leaders at depth 0" in [phase.name for phase in schedule.phases]
    assert busiest_s(cluster, nodes, schedule) <= 7 / 8 / 125e6 * 1.01


def test_a_rack_of_many_relays_nothing_for_single_nodes() -> None:
    """Three single nodes beside nine in a rack with a link of the same rate: the rack's blocks leave it once."""
    text = ["name: uneven", "nodes:", "  - {name: a, switch: r0, nic: 4Gbit/s, devices: 1, count: 9}"]
    text += ["  - {name: b, nic: 1Gbit/s, devices: 1, count: 3}", "switches:", "  - {name: r0, uplink: 1Gbit/s}"]
    cluster = topology.loads("\n".join(text))
    nodes = of_nodes(cluster)
    on_links = cost.bytes_on_links(gathered(cluster, nodes), cluster, nodes, 12)
    assert on_links["r0->core"] == pytest.approx(11, rel=0.02)
    assert busiest_s(cluster, nodes, gathered(cluster, nodes)) <= 11 / 12 / 125e6 * 1.01


def test_the_linear_program_is_left_out_for_too_many_kinds_of_vertices(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = topology.load("examples/clusters/three-racks.yaml")
    best = busiest_s(cluster, of_nodes(cluster), gathered(cluster, of_nodes(cluster)))
    monkeypatch.setattr(block_routes, "_MAX_CLASSES", 3)
    even = gathered(cluster, of_nodes(cluster))
    schedules.verify(even)
    assert busiest_s(cluster, of_nodes(cluster), even) > 1.1 * best


def test_one_switch_is_the_direct_schedule() -> None:
    cluster = flat([25.0, 25.0, 6.0, 1.0])
    assert gathered(cluster, of_nodes(cluster)) == schedules.direct_allgather(4)
