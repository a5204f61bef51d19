import pytest

from ringweave import cost, topology
from ringweave.planning import group_planner
from ringweave.planning.group_planner import RankLayout
from ringweave.topology import Cluster

LINES = """\
name: rooms
nodes:
  - {name: a, switch: r0, nic: 100Mbit/s, devices: 2, count: 2}
  - {name: c, nic: 400Mbit/s, devices: 1}
  - {name: b, switch: r1, nic: 200Mbit/s, devices: 1, count: 2}
switches:
  - {name: r0, uplink: 100Mbit/s}
  - {name: r1, uplink: 100Mbit/s}
"""


def laid_out(cluster: Cluster, nodes: list[str], **options: bool) -> RankLayout:
    return group_planner.lay_out_ranks(cluster, cost.group_network(cluster, nodes), nodes, **options)


def test_ranks_of_a_node_and_nodes_of_a_switch_are_neighbours() -> None:
    found = laid_out(topology.loads(LINES), ["a-0", "b-0", "a-1", "c", "a-0", "b-1", "a-1"])
    assert found.ring_order == (0, 4, 2, 6, 1, 5, 3)
    assert found.groups == ((0, 4), (2, 6), (1,), (5,), (3,))
    assert found.racks == ((0, 1), (2, 3), (4,))


@pytest.mark.parametrize("nodes", [["a-0", "b-0", "a-1", "b-1"], ["a-0", "a-0", "a-1", "a-1", "b-0", "b-1", "c"]])
def test_the_ring_passes_each_link_once_each_way(nodes: list[str]) -> None:
    cluster = topology.loads(LINES)
    order = laid_out(cluster, nodes).ring_order
    passed = [link for at, rank in enumerate(order) for link in cluster.route(nodes[order[at - 1]], nodes[rank])]
    assert len(passed) == len(set(passed))


@pytest.mark.parametrize(
    ("nodes", "root"),
    [(["a-0", "a-0", "c", "b-0"], 2), (["a-0", "b-0", "b-1"], 0), (["a-0", "a-1"], 0), (["b-1", "b-1"], 0)],
    ids=["on the root switch", "same uplinks", "same switch", "one node"],
)
def test_the_root_is_on_the_best_connected_node(nodes: list[str], root: int) -> None:
    assert laid_out(topology.loads(LINES), nodes).root == root


TWO_NICS = """\
name: gpus
nodes:
  - name: g
    count: 2
    nics: [{name: eth0, rate: 25Gbit/s, numa: 0}, {name: ib0, rate: 100Gbit/s, numa: 1, rdma: true}]
    devices: [{numa: 0}, {numa: 0}, {numa: 1}, {numa: 1}]
"""


def test_the_leader_is_the_device_beside_the_nic_that_can_do_rdma() -> None:
    found = laid_out(topology.loads(TWO_NICS), ["g-0"] * 4 + ["g-1"] * 4)
    assert found.groups == ((2, 0, 1, 3), (6, 4, 5, 7))
    assert found.ring_order == tuple(range(8))


def test_each_nic_can_have_a_leader() -> None:
    found = laid_out(topology.loads(TWO_NICS), ["g-0"] * 4 + ["g-1"] * 4, leader_per_nic=True)
    assert found.groups == ((2, 3), (0, 1), (6, 7), (4, 5))
    assert found.racks == ((0, 1, 2, 3),)


def test_where_ranks_are_not_one_per_device_the_first_leads() -> None:
    assert laid_out(topology.loads(TWO_NICS), ["g-0"] * 2 + ["g-1"]).groups == ((0, 1), (2,))
    found = laid_out(topology.loads(TWO_NICS), ["g-0"] * 3 + ["g-1"], leader_per_nic=True)
    assert found.groups == ((0, 2), (1,), (3,))


@pytest.mark.parametrize(
    ("racks", "counts"),
    [
        (((0, 1, 2, 3), (4, 5, 6, 7)), [None, 4, 2]),
        (((0, 1, 2), (3, 4, 5, 6, 7, 8)), [None, 3]),
        (((0, 1), (2, 3, 4)), [None]),
        (((0, 1, 2, 3, 4),), [None, 5]),
    ],
)
def test_rows_that_lie_inside_racks(racks, counts) -> None:
    num_groups = sum(map(len, racks))
    groups = tuple((rank,) for rank in range(num_groups))
    assert (
        group_planner.column_count_candidates(RankLayout(ring_order=(), groups=groups, racks=racks, root=0)) == counts
    )


def test_groups_of_nodes_and_of_racks_are_compared() -> None:
    found = laid_out(topology.loads(LINES), ["a-0", "a-1", "b-0", "a-0"])
    assert group_planner.tier_candidates(found) == [((0, 3), (1,), (2,)), ((0, 3, 1), (2,))]
    alone = laid_out(topology.loads(LINES), ["a-0", "a-1", "b-0"])
    assert group_planner.tier_candidates(alone) == [((0, 1), (2,))]
    on_one_switch = laid_out(topology.loads(TWO_NICS), ["g-0", "g-0"])
    assert group_planner.tier_candidates(on_one_switch) == [((0, 1),)]
