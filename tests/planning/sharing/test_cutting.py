import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringweave import cost, schedules, topology
from ringweave.planning import chunk_shares
from ringweave.planning.chunk_shares import ShareTree
from ringweave.planning.chunk_shares.stripes import build_stripe
from ringweave.topology import Cluster
from tests import effort
from tests.cost.trees import flat, random_trees
from tests.planning.sharing.test_fractions import tree_of


def planned(cluster: Cluster, nodes: list[str], rates: dict[str, float]):
    """The cut and the schedule for one rank per entry of `nodes`, with the rates of both directions made equal."""
    both = {f"{link.dst}->{link.src}": rates[link.name] for link in cluster.links() if link.name in rates} | rates
    slower = {name: min(rate, both["->".join(name.split("->")[::-1])]) for name, rate in both.items()}
    bound_s = cost.bound(cluster, 1, nodes=nodes, rates=slower).seconds
    found = chunk_shares.solve_fractions(tree_of(cluster, nodes, slower), bound_s)
    laid_out = chunk_shares.lay_out_message(found)
    return found, laid_out, schedules.multi_level_striped([build_stripe(each) for each in laid_out.stripes]), slower


@pytest.mark.slow
@settings(max_examples=effort.share_of(100))
@given(random_trees(min_nodes=2, max_nodes=6), st.integers(1, 3), st.randoms(use_true_random=False))
def test_the_schedule_computes_the_sum_and_loads_the_links_as_the_program_says(case, most: int, random: Random) -> None:
    cluster, taking_part, rates = case
    nodes = [name for name in taking_part for _ in range(random.randint(1, most))]
    random.shuffle(nodes)
    found, laid_out, schedule, slower = planned(cluster, nodes, rates)
    schedules.verify(schedule)
    assert laid_out.busiest_s_per_byte <= found.busiest_s_per_byte * 1.005
    rate_of = {link.name: link.bandwidth_bytes_per_s for link in cluster.links()} | slower
    on_links = cost.bytes_on_links(schedule, cluster, nodes, 1)
    for link, moved in on_links.items():
        assert moved == pytest.approx(on_links["->".join(link.split("->")[::-1])])
    busiest = max(moved / rate_of[link] for link, moved in on_links.items())
    assert math.isclose(busiest, laid_out.busiest_s_per_byte, rel_tol=1e-9)


def test_equal_racks_have_one_chunk_per_rank_and_stripes_in_the_racks() -> None:
    tree = tree_of(topology.load("examples/clusters/two-racks.yaml"))
    found = chunk_shares.solve_fractions(tree)
    ((top, shares),) = chunk_shares.make_stripes(tree)
    assert shares == (1,) * 8
    assert top.leaders == (0, 4, 1, 5, 2, 6, 3, 7)
    assert [member.leaders for member in top.members] == [(0, 0, 1, 1, 2, 2, 3, 3), (4, 4, 5, 5, 6, 6, 7, 7)]
    assert chunk_shares.lay_out_message(found).busiest_s_per_byte == found.busiest_s_per_byte


def test_a_slow_node_leads_nothing() -> None:
    ((top, shares),) = chunk_shares.make_stripes(tree_of(topology.load("examples/clusters/unequal-nics.yaml")))
    assert (top.members, top.leaders, shares) == ((0, 1, 2, 3), (0, 1, 2), (20, 20, 20))


def test_small_shares_need_a_finer_grid() -> None:
    rates = [100.0] * 5 + [63.7]
    found = chunk_shares.solve_fractions(ShareTree([-1] + [0] * 6, [1.0, *rates], [-1, *range(6)]))
    laid_out = chunk_shares.lay_out_message(found)
    assert laid_out.num_units > 60
    assert found.busiest_s_per_byte <= laid_out.busiest_s_per_byte <= 1.005 * found.busiest_s_per_byte


def test_the_ranks_of_a_node_share_its_part_evenly() -> None:
    nodes = ["n0"] * 3 + ["n1"] * 3 + ["n2"]
    ((top, shares),) = chunk_shares.make_stripes(tree_of(flat([4.0, 4.0, 1.0]), nodes))
    led = {rank: sum(s for s, leader in zip(shares, top.leaders, strict=True) if leader == rank) for rank in range(7)}
    assert led == {rank: sum(shares) / 6 if rank < 6 else 0 for rank in range(7)}


@pytest.mark.slow
def test_ten_thousand_nodes() -> None:
    lines = ["name: big", "nodes:"]
    lines += [f"  - {{name: n{r}, switch: r{r}, nic: 100Gbit/s, devices: 1, count: 100}}" for r in range(100)]
    lines += ["switches:", *(f"  - {{name: r{rack}, uplink: 400Gbit/s}}" for rack in range(100))]
    cluster = topology.loads("\n".join(lines))
    ((top, shares),) = chunk_shares.make_stripes(tree_of(cluster))
    assert shares == (1,) * 10_000
    nodes = [one.name for one in cluster.nodes]
    schedule = schedules.multi_level(top, shares)
    on_links = cost.bytes_on_links(schedule, cluster, nodes, 10_000)
    assert on_links["n7-3->r7"] == 2 * 9999
    assert on_links["r7->core"] == on_links["core->r7"] == pytest.approx(2 * 99 / 100 * 10_000)
