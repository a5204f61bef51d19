import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringweave import cost, topology
from ringweave.planning import chunk_shares
from ringweave.planning.chunk_shares import LeaderFractions, ShareTree, linear_program
from ringweave.planning.chunk_shares.share_tree import MessagePart, busiest_link_s_per_byte, find_symmetry_classes
from ringweave.planning.chunk_shares.stripes import fill_shares
from ringweave.topology import Cluster
from tests import effort
from tests.cost.trees import flat, node, random_trees

MEMORY = 1e12


def tree_of(cluster: Cluster, nodes: list[str] | None = None, rates: dict[str, float] | None = None) -> ShareTree:
    net = cost.group_network(cluster, nodes, rates)
    names = nodes or [one.name for one in cluster.nodes for _ in one.devices]
    return chunk_shares.build_share_tree(net, cost.vertices_of_ranks(net, names).tolist(), MEMORY)


def star(rates: list[float]) -> ShareTree:
    return ShareTree([-1] + [0] * len(rates), [1.0, *rates], [-1, *range(len(rates))])


RATES = st.sampled_from([1.0, 2.0, 4.0]) | st.floats(0.5, 20)


@given(st.lists(RATES, min_size=3, max_size=9))
def test_on_one_switch_the_bound_is_reached(rates: list[float]) -> None:
    """max(1/B_min, 2(N-1)/sum B), for any NICs."""
    best = max(1 / min(rates), 2 * (len(rates) - 1) / sum(rates))
    found = chunk_shares.solve_fractions(star(rates))
    assert math.isclose(found.busiest_s_per_byte, best, rel_tol=1e-9)
    (part,) = found.parts
    assert math.isclose(sum(led[0] for led in part.led[1:]), 1)
    assert min(led[0] for led in part.led[1:]) >= 0


@settings(max_examples=effort.share_of(50))
@given(st.lists(RATES, min_size=3, max_size=7))
def test_filling_up_is_what_the_linear_program_finds(rates: list[float]) -> None:
    assert math.isclose(
        linear_program.min_busiest([find_symmetry_classes(star(rates))])[0],
        chunk_shares.solve_fractions(star(rates)).busiest_s_per_byte,
    )


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ([4.0, 4.0, 4.0, 1.0], [1 / 3, 1 / 3, 1 / 3, 0]),
        ([2.0] * 4, [1 / 4] * 4),
        ([1.0, 1.0], [1 / 2] * 2),
        ([7.0, 1.0, 1.0], [1, 0, 0]),
        ([3.0, 2.0, 2.0, 1.0], [4 / 7, 1.5 / 7, 1.5 / 7, 0]),
    ],
)
def test_shares_on_one_switch(rates: list[float], expected: list[float]) -> None:
    assert fill_shares(rates, [1] * len(rates)) == pytest.approx(expected)


CLUSTERS = {
    "two racks": ("two-racks", 1.0),
    "unequal NICs": ("unequal-nics", 1.0),
    "lab of three": ("lab-of-three", 1.0),
    "unequal nodes": ("two-unequal-nodes", 1.0),
}


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_bound_is_reached_on_the_example_clusters(name: str) -> None:
    file, ratio = CLUSTERS[name]
    cluster = topology.load(f"examples/clusters/{file}.yaml")
    found = chunk_shares.solve_fractions(tree_of(cluster))
    assert found.busiest_s_per_byte == pytest.approx(cost.bound(cluster, 1).seconds * ratio, rel=2e-6)


def racks(uplinks: list[float], rates: list[list[float]]) -> Cluster:
    switches = tuple(topology.Switch(name=f"r{i}", uplink_bytes_per_s=up) for i, up in enumerate(uplinks))
    nodes = [node(f"n{i}-{j}", rate, f"r{i}") for i, rack in enumerate(rates) for j, rate in enumerate(rack)]
    return Cluster(name="racks", nodes=tuple(nodes), switches=switches)


@pytest.mark.parametrize(
    "cluster",
    [
        racks([2.0] * 4, [[4.0] * 4] * 4),
        racks([16.0] * 3, [[4.0] * 4] * 3),
        racks([2.0, 1.0], [[4.0] * 4, [4.0] * 4]),
        racks([4.0, 4.0], [[4.0] * 6, [4.0] * 2]),
        racks([2.0, 3.0, 4.0], [[4.0, 2.0], [4.0, 4.0, 1.0], [8.0, 2.0, 2.0]]),
    ],
    ids=["thin uplinks", "fat uplinks", "unequal uplinks", "racks of unequal size", "all unequal"],
)
def test_the_bound_is_reached_on_racks(cluster: Cluster) -> None:
    bound_s = cost.bound(cluster, 1).seconds
    assert chunk_shares.solve_fractions(tree_of(cluster), bound_s).busiest_s_per_byte == pytest.approx(
        bound_s, rel=2e-6
    )


def test_a_rack_of_slow_nodes_on_a_fast_uplink_is_no_domain() -> None:
    """As a domain its nodes would carry all that crosses the uplink, on top of what they exchange themselves."""
    cluster = racks([8.0, 8.0], [[1.0] * 4, [8.0] * 4])
    bound_s = cost.bound(cluster, 1).seconds
    with_domains, without = (
        chunk_shares.solve_fractions(tree_of(cluster)),
        chunk_shares.solve_fractions(tree_of(cluster), bound_s),
    )
    assert with_domains.busiest_s_per_byte > 1.05 * bound_s
    assert without.busiest_s_per_byte == pytest.approx(bound_s, rel=2e-6)
    slow = {vertex for vertex in range(1, len(without.parts[0].tree)) if without.parts[0].tree.rates[vertex] == 1.0}
    assert slow in [set(span.members) for span in without.parts[0].tree.spans]
    assert len(without.parts[0].tree) < len(with_domains.parts[0].tree)


def checked(found: LeaderFractions) -> None:
    """All that `cutting` relies on."""
    assert math.isclose(sum(part.weight for part in found.parts), 1)
    for part in found.parts:
        assert part.weight > 0
        checked_part(part)
    assert math.isclose(found.busiest_s_per_byte, busiest_link_s_per_byte(found.parts))


def checked_part(part: MessagePart) -> None:
    tree = part.tree
    for domain, members in enumerate(tree.children):
        for place in range(tree.depths[domain] + 1 if members else 0):
            led_by_domain = part.led[domain][place] if place < tree.depths[domain] else 1
            assert math.isclose(sum(part.led[m][place] for m in members), led_by_domain, abs_tol=1e-6)
        for member in members:
            led = part.led[member]
            assert len(led) == tree.depths[member]
            assert min(led) >= 0
            assert all(below >= above - 1e-6 for above, below in itertools.pairwise(led))


@settings(max_examples=effort.share_of(100))
@given(random_trees(min_nodes=2, max_nodes=9), st.booleans())
def test_choices_nest_and_no_link_beats_the_bound(case, removes: bool) -> None:
    cluster, nodes, rates = case
    slower = rates | {f"{link.dst}->{link.src}": rates[link.name] for link in cluster.links() if link.name in rates}
    bound_s = cost.bound(cluster, 1, nodes=nodes, rates=slower).seconds
    found = chunk_shares.solve_fractions(tree_of(cluster, nodes, slower), bound_s if removes else None)
    checked(found)
    assert found.busiest_s_per_byte >= bound_s * (1 - 1e-7)


def test_taking_domains_out_never_makes_the_busiest_link_busier() -> None:
    cluster = racks([3.0, 9.0, 2.0], [[1.0, 2.0, 1.5], [3.0, 1.0], [4.0, 4.0, 0.5]])
    bound_s = cost.bound(cluster, 1).seconds
    with_domains, without = (
        chunk_shares.solve_fractions(tree_of(cluster)),
        chunk_shares.solve_fractions(tree_of(cluster), bound_s),
    )
    assert bound_s <= without.busiest_s_per_byte * (1 + 1e-9)
    assert without.busiest_s_per_byte <= with_domains.busiest_s_per_byte * (1 + 2e-6)


def test_ranks_of_a_node_lead_the_same() -> None:
    tree = tree_of(flat([4.0, 4.0, 1.0], num_devices=2))
    found = chunk_shares.solve_fractions(tree)
    led = {rank: found.parts[0].led[vertex] for vertex, rank in enumerate(tree.ranks) if rank >= 0}
    assert led[0] == led[1] == led[2] == led[3] == pytest.approx([1 / 4, 1 / 2])
    assert led[4] == led[5] == pytest.approx([0, 1 / 2])


def test_a_switch_with_one_vertex_below_is_left_out() -> None:
    switches = (
        topology.Switch(name="r0", uplink_bytes_per_s=3.0),
        topology.Switch(name="r1", uplink_bytes_per_s=2.0, parent="r0"),
    )
    cluster = Cluster(name="chain", nodes=(node("a", 4.0, "r1"), node("b", 5.0)), switches=switches)
    assert tree_of(cluster) == ShareTree([-1, 0, 0], [1.0, 2.0, 5.0], [-1, 0, 1])


def test_a_rack_that_needs_several_partial_sums_of_a_part_of_the_message_reaches_the_bound() -> None:
    """Slow nodes on an uplink that can carry more than one partial sum of a byte, but not eight."""
    cluster = racks([4.0] * 4, [[1.0] * 8] * 2 + [[4.0] * 8] * 2)
    bound_s = cost.bound(cluster, 1).seconds
    one_tree, found = (
        chunk_shares.solve_fractions(tree_of(cluster)),
        chunk_shares.solve_fractions(tree_of(cluster), bound_s),
    )
    checked(found)
    assert one_tree.busiest_s_per_byte / bound_s > 45 / 34 * (1 - 1e-5)
    assert found.busiest_s_per_byte == pytest.approx(bound_s, rel=1e-5)
    assert len(found.parts) == 2


@settings(max_examples=effort.share_of(80))
@given(st.randoms(use_true_random=False))
def test_the_bound_is_reached_on_any_racks_of_unequal_nodes(random) -> None:
    rates = [[random.choice([1.0, 2.0, 4.0, 10.0])] * random.randint(2, 6) for _ in range(random.randint(2, 4))]
    cluster = racks([sum(rack) * random.choice([1 / 8, 1 / 4, 1 / 2, 1]) for rack in rates], rates)
    bound_s = cost.bound(cluster, 1).seconds
    found = chunk_shares.solve_fractions(tree_of(cluster), bound_s)
    checked(found)
    assert bound_s * (1 - 1e-7) <= found.busiest_s_per_byte <= bound_s * 1.0011


@pytest.mark.slow
def test_ten_thousand_nodes_in_unequal_racks_are_few_kinds() -> None:
    lines = ["name: big", "nodes:"]
    for rack in range(100):
        rate = 100 if rack % 3 else 25
        lines.append(f"  - {{name: n{rack}, switch: r{rack}, nic: {rate}Gbit/s, devices: 1, count: 100}}")
    lines.append("switches:")
    lines += [f"  - {{name: r{rack}, uplink: {20 if rack % 2 else 16}Gbit/s}}" for rack in range(100)]
    cluster = topology.loads("\n".join(lines))
    tree = tree_of(cluster)
    assert len(find_symmetry_classes(tree).parents) == 1 + 4 + 4
    bound_s = cost.bound(cluster, 1).seconds
    assert chunk_shares.solve_fractions(tree, bound_s).busiest_s_per_byte == pytest.approx(bound_s, rel=2e-6)
