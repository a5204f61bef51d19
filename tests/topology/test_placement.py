import pytest

from ringweave import topology
from ringweave.errors import PlacementError

CLUSTER = topology.loads(
    """\
name: lab
nodes:
  - {name: a0, nic: 1Gbit/s, devices: 2, address: 10.0.0.1}
  - {name: a1, nic: 1Gbit/s, devices: [{speed: 2.0}], address: "fe80::1"}
  - {name: B0.example.org, nic: 1Gbit/s, devices: 1}
"""
)


@pytest.mark.parametrize(
    ("node_name", "host_name", "addresses", "placed"),
    [
        ("a1", "a0", ["10.0.0.1"], "a1"),
        (None, "a0", ["10.0.0.9"], "a0"),
        ("", "A0", [], "a0"),
        (None, "a0.example.org", [], "a0"),
        (None, "b0.example.org", [], "B0.example.org"),
        (None, "elsewhere", ["127.0.0.1", "10.0.0.1"], "a0"),
        (None, "elsewhere", ["fe80:0::1%eth0"], "a1"),
        (None, "a1", ["10.0.0.1"], "a1"),
    ],
    ids=[
        "told",
        "host name",
        "letter case",
        "short host name",
        "full name",
        "address",
        "address with zone",
        "name first",
    ],
)
def test_a_worker_is_on_the_node_it_was_told_else_of_its_name_else_of_its_address(
    node_name, host_name, addresses, placed
):
    node = topology.place_rank(CLUSTER, node_name=node_name, host_name=host_name, addresses=addresses)
    assert node.name == placed


def test_a_node_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(PlacementError) as caught:
        topology.place_rank(CLUSTER, node_name="a00", host_name="a0", addresses=[])
    assert str(caught.value) == (
        "node of this worker, from RINGWEAVE_NODE: 'a00', expected a node of cluster lab (a0, a1, B0.example.org). "
        'Did you mean "a0"?'
    )


def test_a_name_like_no_other_says_what_to_do():
    with pytest.raises(PlacementError, match=r"Correct RINGWEAVE_NODE, or unset it to go by host name and address\."):
        topology.place_rank(CLUSTER, node_name="zzzz", host_name="a0", addresses=[])


def test_a_worker_that_fits_nowhere_is_told_both_sides():
    with pytest.raises(PlacementError) as caught:
        topology.place_rank(CLUSTER, node_name=None, host_name="host9", addresses=["10.1.0.1", "127.0.0.1"])
    assert str(caught.value) == (
        "node of this worker: host name host9, addresses 10.1.0.1, 127.0.0.1, expected the host name or address of one "
        "node of cluster lab (names a0, a1, B0.example.org; addresses 10.0.0.1, fe80::1). Set RINGWEAVE_NODE to the "
        "name of the node, or add this host's name or address to the cluster file."
    )


def test_a_worker_without_addresses_in_a_cluster_without_addresses_is_told_so():
    bare = topology.one_machine([1])
    with pytest.raises(PlacementError, match=r"addresses none, expected .*names node0; addresses not given"):
        topology.place_rank(bare, node_name=None, host_name="host9", addresses=[])


def test_a_worker_with_the_addresses_of_two_nodes_is_not_guessed_at():
    with pytest.raises(PlacementError, match=r"not those of a0, a1 at once\. Set RINGWEAVE_NODE"):
        topology.place_rank(CLUSTER, node_name=None, host_name="host9", addresses=["10.0.0.1", "fe80::1"])


def test_the_local_rank_indexes_the_devices_of_the_node():
    assert topology.device_of_local_rank(CLUSTER.node("a1"), 0).speed == 2.0


@pytest.mark.parametrize("local_rank", [-1, 2])
def test_a_local_rank_without_a_device_is_an_error_that_names_node_and_count(local_rank):
    with pytest.raises(
        PlacementError, match=rf"local rank on node a0: {local_rank}, expected 0 to 1, the 2 device.*Start fewer"
    ):
        topology.device_of_local_rank(CLUSTER.node("a0"), local_rank)
