import dataclasses
import itertools
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringweave import topology
from ringweave.errors import ClusterError
from ringweave.testing.clusters import clusters
from ringweave.topology import Cluster, Device, Link, Nic, Node, Switch
from tests import effort

NIC = Nic(name="eth0", rate_bytes_per_s=50e6)


def node(name="a0", **changes) -> Node:
    return Node(**({"name": name, "devices": (Device(),), "nics": (NIC,)} | changes))


def switch(name="r0", **changes) -> Switch:
    return Switch(**({"name": name, "uplink_bytes_per_s": 25e6} | changes))


def cluster(*nodes, switches=(), **changes) -> Cluster:
    return Cluster(**({"name": "lab", "nodes": nodes or (node(),), "switches": tuple(switches)} | changes))


TREE = cluster(
    node("a0", switch="r0", nics=(NIC, Nic(name="eth1", rate_bytes_per_s=25e6))),
    node("a1", switch="r0", devices=(Device(), Device(kind="cuda"))),
    node("b0", switch="r1"),
    node("c0"),
    switches=[switch("r0", parent="spine"), switch("r1", parent="spine"), switch("spine", uplink_bytes_per_s=1e9)],
    latency_s=30e-6,
)


@pytest.mark.parametrize(
    ("src", "dst", "names"),
    [
        ("a0", "a1", ("a0->r0", "r0->a1")),
        ("a0", "b0", ("a0->r0", "r0->spine", "spine->r1", "r1->b0")),
        ("a0", "c0", ("a0->r0", "r0->spine", "spine->core", "core->c0")),
        ("c0", "b0", ("c0->core", "core->spine", "spine->r1", "r1->b0")),
        ("a0", "a0", ()),
    ],
)
def test_a_route_goes_up_to_the_first_common_switch_and_down(src, dst, names):
    assert TREE.route(src, dst) == names


def test_links_are_full_duplex_and_a_node_has_one_for_all_its_nics():
    links = {link.name: link for link in TREE.links()}
    assert len(links) == 14
    assert links["a0->r0"] == Link(src="a0", dst="r0", latency_s=15e-6, bandwidth_bytes_per_s=75e6)
    assert links["r0->a0"].bandwidth_bytes_per_s == 75e6
    assert links["spine->core"] == Link(src="spine", dst="core", latency_s=0.0, bandwidth_bytes_per_s=1e9)


@settings(max_examples=effort.share_of(100))
@given(clusters(), st.randoms(use_true_random=False))
def test_any_route_is_connected_and_its_latencies_add_up_to_alpha(any_cluster, choose):
    links = {link.name: link for link in any_cluster.links()}
    src, dst = choose.choice(any_cluster.nodes).name, choose.choice(any_cluster.nodes).name
    passed = [links[name] for name in any_cluster.route(src, dst)]
    if src == dst:
        assert passed == []
        return
    assert (passed[0].src, passed[-1].dst) == (src, dst)
    assert all(before.dst == after.src for before, after in itertools.pairwise(passed))
    assert len({link.src for link in passed}) == len(passed)
    assert sum(link.latency_s for link in passed) == pytest.approx(any_cluster.latency_s, abs=1e-300)


def test_ancestors_go_up_to_the_root():
    assert TREE.ancestors("a0") == ("r0", "spine", "core")
    assert TREE.ancestors("core") == ()


def test_totals_count_nodes_and_devices():
    assert (TREE.num_nodes, TREE.num_devices, TREE.node("a1").num_devices) == (4, 5, 2)


def test_an_unknown_node_is_named_with_the_one_that_was_meant():
    with pytest.raises(
        ClusterError, match=r"node of cluster lab: 'A00', expected one of a0, a1, b0, c0\. Did you mean \"a0\"\?"
    ):
        TREE.node("A00")


def test_an_unknown_name_has_no_ancestors():
    with pytest.raises(
        ClusterError, match=r"'zzz', expected one of a0, .* and 1 more\. Use a name of the cluster file\."
    ):
        TREE.ancestors("zzz")


def test_a_cluster_survives_pickling_and_replacement():
    assert pickle.loads(pickle.dumps(TREE)) == TREE
    assert dataclasses.replace(TREE, name="other").node("a0") == TREE.node("a0")
    assert len({TREE, dataclasses.replace(TREE)}) == 1


def test_one_machine_has_a_node_for_each_count_of_workers():
    machine = topology.one_machine([3, 2])
    assert [(each.name, each.num_devices) for each in machine.nodes] == [("node0", 3), ("node1", 2)]
    assert machine.route("node0", "node1") == ("node0->core", "core->node1")
    assert topology.loads(topology.dumps(machine)) == machine


@pytest.mark.parametrize(
    ("counts", "text"), [([3, 0], r"workers of node1: 0, expected 1 to 1024"), ([], r"nodes of the cluster: \(\)")]
)
def test_one_machine_needs_workers(counts, text):
    with pytest.raises(ClusterError, match=text):
        topology.one_machine(counts)


def test_a_description_fits_on_a_screen():
    assert TREE.describe() == (
        "lab: 4 nodes, 5 devices, latency 30us\n"
        "core\n"
        "  c0: nic 400Mbit/s, 1 x cpu\n"
        "  spine, uplink 8Gbit/s\n"
        "    r0, uplink 200Mbit/s\n"
        "      a0: nic 400Mbit/s + 200Mbit/s, 1 x cpu\n"
        "      a1: nic 400Mbit/s, 1 x cpu, 1 x cuda\n"
        "    r1, uplink 200Mbit/s\n"
        "      b0: nic 400Mbit/s, 1 x cpu"
    )
    racks = [switch(f"r{index}") for index in range(100)]
    large = cluster(
        *(node(f"{rack.name}-{index}", switch=rack.name) for rack in racks for index in range(100)), switches=racks
    )
    lines = large.describe().splitlines()
    assert len(lines) == 20
    assert lines[3] == "    r0-0 .. r0-99 (100 nodes): nic 400Mbit/s, 1 x cpu"
    assert lines[-1] == "... and 183 more lines"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: cluster(name="two racks"), r"name of the cluster: 'two racks', expected at most 63 letters"),
        (lambda: cluster(latency_s=-1.0), r"latency: -1\.0, expected a time with a unit.*\[latency_s\]"),
        (
            lambda: cluster(nodes=()),
            r"nodes of the cluster: \(\), expected 1 to 100000 nodes\. Add what is missing\. \[nodes\]",
        ),
        (lambda: cluster(nodes=[node()]), r"expected a tuple of 1 to 100000 nodes\. Make it a tuple\."),
        (
            lambda: cluster(node("a0"), node("A0")),
            r"name of a node: 'A0', expected a name that no other.*\[nodes\.1\.name\]",
        ),
        (
            lambda: cluster(node("r0", switch="r0"), switches=[switch("r0")]),
            r"name of a switch: 'r0', expected a name that no other node or switch has.*\[switches\.0\.name\]",
        ),
        (
            lambda: cluster(node("a", address="::1"), node("b", address="0:0::1")),
            r"address of node b: '0:0::1', expected an address that no other node has.*\[nodes\.1\.address\]",
        ),
        (
            lambda: cluster(node(switch="rack0"), switches=[switch("rack1")]),
            r"switch of node a0: 'rack0', expected one of the switches \(rack1\), or core\. Did you mean \"rack1\"\?",
        ),
        (
            lambda: cluster(node(switch="x")),
            r"expected none, as no switches are declared, or core\. Declare it under switches",
        ),
        (
            lambda: cluster(node(switch="r0"), switches=[switch("r0", parent="r0")]),
            r"parent of switch r0: 'r0', expected a way up to core, not the loop r0 -> r0\. Leave parent out",
        ),
        (
            lambda: cluster(
                node(switch="a"), switches=[switch("a", parent="b"), switch("b", parent="c"), switch("c", parent="b")]
            ),
            r"parent of switch b: 'c', expected a way up to core, not the loop b -> c -> b.*\[switches\.1\.parent\]",
        ),
        (
            lambda: cluster(node(), switches=[switch()]),
            r"switch with no node below it: 'r0', expected at least one node below every switch\. Write \"switch: r0\"",
        ),
        (lambda: switch("Core"), r"name of a switch: 'Core', expected a name other than core\. Remove this switch"),
        (lambda: switch("r 0"), r"name of a switch: 'r 0', expected at most 63 letters"),
        (lambda: switch(uplink_bytes_per_s=0.0), r"uplink of switch 'r0': 0\.0, expected a positive rate with a unit"),
        (lambda: switch(uplink_bytes_per_s=float("nan")), r"uplink of switch 'r0': nan, expected a positive rate"),
        (lambda: node("core"), r"name of a node: 'core', expected a name other than core\. Rename the node"),
        (lambda: node("a->b"), r"name of a node: 'a->b', expected a host name .*Rename it"),
        (lambda: node(7), r"name of a node: 7, expected a host name .*Put the name in quotes"),
        (lambda: node(address="10.0.0"), r"address of node 'a0': '10\.0\.0', expected the IP address of one host"),
        (lambda: node(address="224.0.0.1"), r"address of node 'a0': .*leave the key out"),
        (lambda: node(devices=()), r"devices of node 'a0': \(\), expected 1 to 1024 devices\. Add what is missing"),
        (
            lambda: node(devices=(Device(),) * 1025),
            r"'1025 of them', expected 1 to 1024 devices\. Remove what is too much",
        ),
        (lambda: node(nics=()), r"NICs of node 'a0': \(\), expected 1 to 64 NICs"),
        (
            lambda: node(nics=(NIC, NIC)),
            r"NIC of node 'a0': 'eth0', expected a name used once on the node.*\[nics\.1\.name\]",
        ),
        (
            lambda: Nic(name="eth 0", rate_bytes_per_s=1e6),
            r"name of a NIC: 'eth 0', expected the name of a network interface",
        ),
        (
            lambda: Nic(name="e", rate_bytes_per_s=10**400),
            r"rate of NIC 'e': <an integer of 1329 bits>, expected a positive",
        ),
        (lambda: Nic(name="e", rate_bytes_per_s=True), r"rate of NIC 'e': True, expected a positive rate"),
        (
            lambda: Nic(name="e", rate_bytes_per_s=1e6, numa=-1),
            r"numa: -1, expected the index of a NUMA node.*Leave the key out",
        ),
        (lambda: Nic(name="e", rate_bytes_per_s=1e6, rdma=1), r"rdma of a NIC: 1, expected true or false"),
        (lambda: Device(kind="cudo"), r"kind of a device: 'cudo', expected one of cpu, cuda\. Did you mean \"cuda\"\?"),
        (lambda: Device(kind="tpu9"), r"Write cpu for a worker without an accelerator"),
        (lambda: Device(speed=float("inf")), r"speed of a device: inf, expected a positive number.*Leave the key out"),
        (
            lambda: Link(src="a", dst="b", latency_s=0, bandwidth_bytes_per_s=0),
            r"link a->b: 0, expected .*Remove the link",
        ),
    ],
)
def test_what_is_wrong_in_code_is_told_as_from_a_file(make, text):
    with pytest.raises(ClusterError, match=text):
        make()


def test_the_loop_check_and_the_route_take_a_deep_tree():
    deep = [switch("s0"), *(switch(f"s{index}", parent=f"s{index - 1}") for index in range(1, 3000))]
    chain = cluster(node(switch="s2999"), node("b0"), switches=deep)
    assert len(chain.route("a0", "b0")) == 3002
    assert len(chain.describe().splitlines()) == 20


def test_an_error_about_many_nodes_shows_the_first_few():
    with pytest.raises(ClusterError, match=r"and at least 47 more") as caught:
        cluster(*(node(f"a{index}", switch="gone") for index in range(10_000)))
    assert len(str(caught.value).splitlines()) == 4
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
