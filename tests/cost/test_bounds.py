import itertools
import math
from random import Random

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from ringweave import cost, topology
from ringweave.errors import ClusterError
from ringweave.schedules import CollectiveKind
from ringweave.topology import Cluster
from tests import effort
from tests.cost.trees import flat, node, random_trees

OTHERS: tuple[CollectiveKind, ...] = ("reduce-scatter", "allgather", "broadcast")


def rates_of(cluster: Cluster, rates: dict[str, float]) -> dict[tuple[str, str], float]:
    return {(link.src, link.dst): rates.get(link.name, link.bandwidth_bytes_per_s) for link in cluster.links()}


def smallest_cut(rates: dict[tuple[str, str], float], inside: set[str], outside: set[str]) -> float:
    """Rate out of `inside`, by a maximum flow."""
    graph = networkx.DiGraph()
    for (src, dst), rate in rates.items():
        graph.add_edge(src, dst, capacity=rate)
    for name in inside:
        graph.add_edge("<source>", name)
    for name in outside:
        graph.add_edge(name, "<sink>")
    return networkx.maximum_flow_value(graph, "<source>", "<sink>")


def set_partitions(names: list[str]):
    if not names:
        yield []
        return
    for rest in set_partitions(names[1:]):
        yield [[names[0]], *rest]
        for index, part in enumerate(rest):
            yield [*rest[:index], [names[0], *part], *rest[index + 1 :]]


def by_brute_force(rates: dict[tuple[str, str], float], nodes: list[str]) -> float:
    """Seconds per byte: all cuts and all partitions, out of them and into them."""
    best = 0.0
    for turned in (rates, {link[::-1]: rate for link, rate in rates.items()}):
        out = {}
        for size in range(1, len(nodes)):
            for part in itertools.combinations(nodes, size):
                out[frozenset(part)] = smallest_cut(turned, set(part), set(nodes) - set(part))
        best = max([best, *(1 / rate for rate in out.values())])
        for parts in set_partitions(nodes):
            if len(parts) > 1:
                best = max(best, 2 * (len(parts) - 1) / sum(out[frozenset(part)] for part in parts))
    return best


@pytest.mark.slow
@given(random_trees(max_nodes=5))
def test_the_bound_is_the_largest_over_all_cuts_and_partitions(case) -> None:
    cluster, nodes, rates = case
    expected = by_brute_force(rates_of(cluster, rates), nodes) if len(nodes) > 1 else 0.0
    assert math.isclose(cost.bound(cluster, 1000, nodes=nodes, rates=rates).seconds, 1000 * expected, rel_tol=1e-9)


@pytest.mark.slow
@settings(max_examples=effort.share_of(30))
@given(random_trees(min_nodes=6, max_nodes=7))
def test_the_bound_is_the_largest_over_all_partitions_of_more_nodes(case) -> None:
    cluster, nodes, rates = case
    expected = by_brute_force(rates_of(cluster, rates), nodes)
    assert math.isclose(cost.bound(cluster, 1, nodes=nodes, rates=rates).seconds, expected, rel_tol=1e-9)


def other_by_brute_force(rates: dict[tuple[str, str], float], ranks: list[str], kind: str, root: str) -> float:
    """Seconds per byte of an allgather, reduce-scatter or broadcast: all cuts and all partitions."""
    turned = {link[::-1]: rate for link, rate in rates.items()} if kind == "reduce-scatter" else rates
    nodes = list(dict.fromkeys(ranks))
    out = {
        frozenset(part): smallest_cut(turned, set(part), set(nodes) - set(part))
        for size in range(1, len(nodes))
        for part in itertools.combinations(nodes, size)
    }
    best = 0.0
    for part, rate in out.items():
        known = float(root in part) if kind == "broadcast" else sum(name in part for name in ranks) / len(ranks)
        best = max(best, known / rate)
    for parts in set_partitions(nodes):
        if len(parts) > 1:
            best = max(best, (len(parts) - 1) / sum(out[frozenset(part)] for part in parts))
    return best


@pytest.mark.slow
@settings(max_examples=effort.share_of(60))
@given(random_trees(max_nodes=5), st.sampled_from(OTHERS), st.integers(0, 2), st.randoms(use_true_random=False))
def test_the_bounds_of_the_other_collectives_are_the_largest_over_all_cuts_and_partitions(
    case, kind: CollectiveKind, more: int, random: Random
) -> None:
    cluster, nodes, rates = case
    ranks = nodes + random.choices(nodes, k=more)
    root = random.randrange(len(ranks))
    expected = other_by_brute_force(rates_of(cluster, rates), ranks, kind, ranks[root]) if len(nodes) > 1 else 0.0
    found = cost.bound(cluster, 1000, nodes=ranks, rates=rates, kind=kind, root=root)
    assert math.isclose(found.seconds, 1000 * expected, rel_tol=1e-9)


def arborescences(root: int, count: int):
    """All trees of ranks out of a root, as edges."""
    others = [rank for rank in range(count) if rank != root]
    for parents in itertools.product(range(count), repeat=count - 1):
        above = dict(zip(others, parents, strict=True))
        graph = networkx.DiGraph([(parent, child) for child, parent in above.items()])
        if all(child != parent for child, parent in above.items()) and networkx.is_arborescence(graph):
            yield tuple(graph.edges)


def least_seconds(cluster: Cluster, nodes: list[str], rates: dict[str, float], shares: list[float]) -> float:
    """Seconds per byte in which every rank gets all blocks of these sizes, by a linear program over all trees."""
    net = cost.group_network(cluster, nodes, rates)
    at = cost.vertices_of_ranks(net, nodes).tolist()
    trees = [(owner, tree) for owner in range(len(nodes)) for tree in arborescences(owner, len(nodes))]
    slow = np.concatenate([1 / net.up_bytes_per_s, 1 / net.down_bytes_per_s])
    loads = np.zeros((len(slow), len(trees) + 1))
    owned = np.zeros((len(nodes), len(trees) + 1))
    for column, (owner, tree) in enumerate(trees):
        owned[owner, column] = 1
        for src, dst in tree:
            src_path, dst_path = ([v for v in range(1, len(net)) if v <= a < net.ends[v]] for a in (at[src], at[dst]))
            for vertex in set(src_path) - set(dst_path):
                loads[vertex, column] += slow[vertex]
            for vertex in set(dst_path) - set(src_path):
                loads[len(net) + vertex, column] += slow[len(net) + vertex]
    loads[:, -1] = -1
    objective = np.eye(len(trees) + 1)[-1]
    return float(linprog(objective, A_ub=loads, b_ub=np.zeros(len(slow)), A_eq=owned, b_eq=shares).fun)


@pytest.mark.slow
@settings(max_examples=effort.share_of(30), deadline=None)
@given(random_trees(min_nodes=2, max_nodes=4))
def test_the_bounds_of_allgather_and_broadcast_can_be_reached_and_not_be_beaten(case) -> None:
    cluster, nodes, rates = case
    for kind, shares in (("allgather", [1 / len(nodes)] * len(nodes)), ("broadcast", [1.0] + [0.0] * (len(nodes) - 1))):
        least_s = least_seconds(cluster, nodes, rates, shares)
        bound_s = cost.bound(cluster, 1, nodes=nodes, rates=rates, kind=kind).seconds
        assert bound_s <= least_s * (1 + 1e-6)
        if not rates:  # where the two directions of a link differ, the bound may be out of reach
            assert math.isclose(bound_s, least_s, rel_tol=1e-6)


@given(random_trees(max_nodes=6))
def test_the_links_named_are_those_that_bind(case) -> None:
    cluster, nodes, rates = case
    found = cost.bound(cluster, 1, nodes=nodes, rates=rates)
    if len(nodes) == 1:
        assert found.links == ()
        return
    rate_of = {f"{src}->{dst}": rate for (src, dst), rate in rates_of(cluster, rates).items()}
    together = sum(rate_of[link] for link in found.links)
    if found.binding.startswith("cut"):
        assert math.isclose(found.seconds, 1 / together, rel_tol=1e-9)
    else:
        count = int(found.binding.removeprefix("partition into ").split()[0])
        assert math.isclose(found.seconds, 2 * (count - 1) / together, rel_tol=1e-9)


MB = 10**6


@pytest.mark.parametrize(
    ("rates", "expected_s"),
    [
        ([25.0] * 8, 2 * 7 / 8 * 25 / 25),
        ([25.0, 25.0, 25.0, 6.25], 25 / 6.25),
        ([50.0] * 7 + [25.0], max(25 / 25, 2 * 7 / 375 * 25)),
        ([50.0] * 4 + [25.0] * 4, 2 * 7 / 300 * 25),
        ([25.0, 25.0], 1.0),
    ],
    ids=["uniform", "one slow", "one of 8 at half", "half of 8 at half", "two"],
)
def test_one_switch(rates: list[float], expected_s: float) -> None:
    found = cost.bound(flat([rate * MB for rate in rates]), 25 * MB)
    assert math.isclose(found.seconds, expected_s, rel_tol=1e-9)


def racks(num_racks: int, nodes_per_rack: int, nic: str, uplink: str, devices: int = 1) -> Cluster:
    lines = ["name: racks", "nodes:"]
    for rack in range(num_racks):
        lines.append(f"  - {{name: n{rack}, switch: r{rack}, nic: {nic}, devices: {devices}, count: {nodes_per_rack}}}")
    lines.append("switches:")
    lines += [f"  - {{name: r{rack}, uplink: {uplink}}}" for rack in range(num_racks)]
    return topology.loads("\n".join(lines))


def test_two_racks() -> None:
    found = cost.bound(racks(2, 4, "400Mbit/s", "200Mbit/s"), 25 * MB)
    assert found.seconds == 1.0
    assert found.binding == "cut: all that leaves n0-0, n0-1, n0-2, n0-3 passes r0->core (200Mbit/s)"
    assert found.links == ("r0->core",)


def test_four_racks() -> None:
    found = cost.bound(racks(4, 4, "400Mbit/s", "200Mbit/s"), 25 * MB)
    assert math.isclose(found.seconds, 2 * 3 / 4)
    assert found.links == ("r0->core", "r1->core", "r2->core", "r3->core")
    assert found.binding == (
        "partition into 4 parts (n0-0, n0-1, n0-2, n0-3; n1-0, n1-1, n1-2, n1-3; n2-0, n2-1, n2-2, n2-3; n3-0, n3-1, "
        "n3-2, n3-3): the message 6 times has to leave them, at 800Mbit/s together"
    )


@pytest.mark.parametrize(
    ("kind", "seconds", "text"),
    [
        (
            "allgather",
            0.5,
            "cut: what they own, 0.5 of the message, has to leave n0-0, n0-1, n0-2, n0-3 by r0->core (200Mbit/s)",
        ),
        (
            "reduce-scatter",
            0.5,
            "cut: their sum of what others own, 0.5 of the message, has to leave n0-0, n0-1, n0-2, n0-3 by r0->core "
            "(200Mbit/s)",
        ),
        ("broadcast", 1.0, "cut: the message has to enter n0-0, n0-1, n0-2, n0-3 by core->r0 (200Mbit/s)"),
    ],
)
def test_two_racks_of_the_other_collectives(kind: CollectiveKind, seconds: float, text: str) -> None:
    found = cost.bound(racks(2, 4, "400Mbit/s", "200Mbit/s"), 25 * MB, kind=kind, root=5)
    assert found.seconds == seconds
    assert found.binding == text


def test_ranks_that_all_send_slowly() -> None:
    rates = {f"n{index}->core": 5.0 * MB for index in range(4)}
    found = cost.bound(flat([25.0 * MB] * 4), 25 * MB, rates=rates, kind="allgather")
    assert math.isclose(found.seconds, 3.75)
    assert found.binding == (
        "partition into 4 parts (n0; n1; n2; n3): the message 3 times has to leave them, at 160Mbit/s together"
    )


def test_a_node_with_more_ranks_owns_more() -> None:
    cluster = flat([25.0 * MB] * 2)
    found = cost.bound(cluster, 25 * MB, nodes=["n0", "n0", "n0", "n1"], kind="allgather")
    assert math.isclose(found.seconds, 0.75)
    assert found.binding == "cut: what they own, 0.75 of the message, has to leave n0 by n0->core (200Mbit/s)"


def test_a_region_of_some_of_the_switches() -> None:
    """Without core and s there are five parts with slow links; t would add fast ones, as the link from s to core is."""
    nodes = [node("a", 1.0), node("b", 1.0), node("c", 1.0, "s"), node("d", 1.0, "s")]
    nodes += [node("e", 100.0, "t"), node("f", 100.0, "t")]
    switches = (
        topology.Switch(name="s", uplink_bytes_per_s=100.0),
        topology.Switch(name="t", uplink_bytes_per_s=1.0),
    )
    found = cost.bound(Cluster(name="mixed", nodes=tuple(nodes), switches=switches), 1)
    assert found.seconds == 2 * 4 / 5
    assert set(found.links) == {"a->core", "b->core", "c->s", "d->s", "t->core"}


def test_a_node_that_receives_slowly() -> None:
    cluster = flat([25.0 * MB] * 4)
    found = cost.bound(cluster, 25 * MB, rates={"core->n2": 5.0 * MB})
    assert found.seconds == 5.0
    assert found.binding == "cut: all that enters n2 passes core->n2 (40Mbit/s)"
    assert found.links == ("core->n2",)


def test_nodes_that_all_receive_slowly() -> None:
    rates = {f"core->n{index}": 5.0 * MB for index in range(4)}
    found = cost.bound(flat([25.0 * MB] * 4), 25 * MB, rates=rates)
    assert math.isclose(found.seconds, 7.5)
    assert found.binding == (
        "partition into 4 parts (n0; n1; n2; n3): the message 6 times has to enter them, at 160Mbit/s together"
    )
    assert found.links == ("core->n0", "core->n1", "core->n2", "core->n3")


def test_a_group_inside_one_node() -> None:
    found = cost.bound(flat([25.0] * 3), 25 * MB, nodes=["n1", "n1"])
    assert (found.seconds, found.links) == (0.0, ())
    assert found.binding == "none: all ranks are on node n1, so that no link is passed"


def test_links_that_no_byte_of_the_group_passes_do_not_bind() -> None:
    cluster = racks(2, 4, "400Mbit/s", "1Mbit/s")
    assert math.isclose(cost.bound(cluster, 50 * MB, nodes=["n0-0", "n0-1"]).seconds, 1.0)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"nodes": []}, "nodes that take part: [], expected at least one. Name nodes of the cluster."),
        ({"nodes": ["n9"]}, "node of cluster flat: 'n9', expected one of n0, n1. Use a name of the cluster file."),
        (
            {"rates": {"n0->cor": 1.0}},
            "measured link: 'n0->cor', expected a link of the cluster. Did you mean \"n0->core\"?",
        ),
        (
            {"rates": {"???": 1.0}},
            "measured link: '???', expected a link of the cluster. Name it by what it connects, sender first.",
        ),
        (
            {"rates": {"n0->core": 0.0}},
            "measured rate of n0->core: 0.0, expected a positive number of bytes per second. Measure it again, or "
            "leave it out.",
        ),
    ],
)
def test_what_is_refused(arguments, text: str) -> None:
    with pytest.raises(ClusterError) as caught:
        cost.bound(flat([1.0, 1.0]), 1, **arguments)
    assert str(caught.value) == text


@pytest.mark.slow
def test_ten_thousand_unequal_nodes() -> None:
    lines = ["name: big", "nodes:"]
    for rack in range(100):
        lines.append(f"  - {{name: n{rack}, switch: r{rack}, nic: {100 + rack}Gbit/s, devices: 1, count: 100}}")
    lines.append("switches:")
    lines += [f"  - {{name: r{rack}, uplink: {3000 + 10 * rack}Gbit/s}}" for rack in range(100)]
    found = cost.bound(topology.loads("\n".join(lines)), 10**9)
    slowest_rack_node_by_node = 2 * 100 / (100 * 100 + 3000)
    assert found.seconds == pytest.approx(8 * slowest_rack_node_by_node)
    assert found.binding.startswith("partition into 101 parts (n0-0; n0-1; ")


@pytest.mark.slow
def test_a_chain_of_switches_deeper_than_the_stack() -> None:
    depth = 3000
    switches = [f"  - {{name: s{i}, uplink: 1Gbit/s{f', parent: s{i - 1}' if i else ''}}}" for i in range(depth)]
    lines = ["name: deep", "nodes:", "  - {name: a, nic: 1Gbit/s, devices: 1}"]
    lines += [f"  - {{name: b, switch: s{depth - 1}, nic: 500Mbit/s, devices: 1}}", "switches:", *switches]
    found = cost.bound(topology.loads("\n".join(lines)), 10**6)
    assert found.seconds == 10**6 / 62.5e6
