from ringweave import topology
from ringweave.plots.plan_plot import OutlineItem, outline_cluster
from ringweave.topology import Cluster


def labels(item: OutlineItem) -> list[str]:
    return [child.label for child in item.children]


def racks(*sizes: int) -> Cluster:
    lines = ["name: racks", "nodes:"]
    lines += [
        f"  - {{name: n{rack}, switch: r{rack}, nic: 100Mbit/s, devices: 1, count: {size}}}"
        for rack, size in enumerate(sizes)
    ]
    lines += ["switches:", *(f"  - {{name: r{rack}, uplink: {rack + 1}Gbit/s}}" for rack in range(len(sizes)))]
    return topology.loads("\n".join(lines))


def test_every_node_of_a_small_cluster_has_a_row() -> None:
    root = outline_cluster(racks(2, 1), ["r1->core", "n0-1->r0"], {"n0-0": "leads"})
    assert labels(root) == ["r0", "r1"]
    assert labels(root.children[0]) == ["n0-0, 1 device, leads", "n0-1, 1 device"]
    assert [child.rate_text for child in root.children] == ["1Gbit/s", "2Gbit/s"]
    assert [child.is_binding for child in root.children] == [False, True]
    assert [node.is_binding for node in root.children[0].children] == [False, True]
    assert [node.is_leader for node in root.children[0].children] == [True, False]
    assert (root.num_rows, root.num_nodes) == (3, 3)


def test_a_link_downwards_binds_too() -> None:
    assert outline_cluster(racks(1, 1), ["core->r0"], {}).children[0].is_binding


def test_nodes_that_are_alike_share_a_row() -> None:
    root = outline_cluster(racks(30, 20), ["n0-3->r0"], {})
    first, second = root.children
    assert labels(second) == ["n1-0 .. n1-19 (20 nodes), 1 device"]
    assert labels(first) == ["n0-0 .. n0-29 (29 nodes), 1 device", "n0-3, 1 device"]
    assert root.num_nodes == 50


def test_of_too_many_racks_those_that_bind_or_are_slow_are_kept_in_order() -> None:
    root = outline_cluster(racks(*[100] * 100), ["r77->core"], {})
    assert root.num_rows == 40
    assert labels(root)[:2] == ["r0", "r1"]
    assert labels(root)[-2:] == ["r77", "61 more switches with 6100 nodes"]
    assert root.children[-1].rate_text == "39Gbit/s to 100Gbit/s"
    assert root.num_nodes == 10_000


def test_nodes_that_all_differ_are_cut_short() -> None:
    lines = ["name: c", "nodes:", *(f"  - {{name: n{i}, nic: {i + 1}Gbit/s, devices: 2}}" for i in range(60))]
    root = outline_cluster(topology.loads("\n".join(lines)), [], {})
    assert root.num_rows == 40
    assert labels(root)[0] == "n0, 2 devices"
    assert labels(root)[-1] == "21 more nodes"
    assert root.children[-1].rate_bytes_per_s is None
