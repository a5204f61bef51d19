import pytest

from ringweave import topology
from ringweave.errors import ClusterError
from ringweave.lab import lab_layout


def assigned(*nodes: str) -> dict[str, tuple[str, ...]]:
    return dict(
        lab_layout.assign_addresses(
            topology.loads("name: c\nnodes:\n" + "\n".join(f"  - {{{node}}}" for node in nodes))
        )
    )


NICS = "nics: [{name: eth0, rate: 1Gbit/s}, {name: eth1, rate: 1Gbit/s}]"


def test_each_nic_of_a_node_is_in_a_network_of_its_own() -> None:
    assert assigned(f"name: a, devices: 1, {NICS}", f"name: b, devices: 1, {NICS}, count: 2") == {
        "a": ("10.99.0.1", "10.100.0.1"),
        "b-0": ("10.99.0.2", "10.100.0.2"),
        "b-1": ("10.99.0.3", "10.100.0.3"),
    }


def test_a_given_address_is_the_first_nics_and_nobody_elses() -> None:
    got = assigned("name: a, devices: 1, nic: 1Gbit/s", f"name: b, devices: 1, address: 10.99.0.1, {NICS}")
    assert got == {"a": ("10.99.0.2",), "b": ("10.99.0.1", "10.100.0.1")}


def test_the_network_of_a_given_address_is_left_to_first_nics() -> None:
    assert assigned(f"name: b, devices: 1, address: 10.100.0.1, {NICS}") == {"b": ("10.100.0.1", "10.101.0.1")}


def test_assigning_again_changes_nothing() -> None:
    """A lab that is up is found by its file, addresses filled in."""
    nics = "nics: [{name: x, rate: 1Gbit/s}, {name: y, rate: 1Gbit/s}]"
    first = assigned(f"name: a, devices: 1, {nics}", f"name: b, devices: 1, {nics}")
    again = assigned(
        *(f"name: {node}, devices: 1, address: {own[0]}, {nics}" for node, own in first.items()),
    )
    assert again == first


@pytest.mark.parametrize("address", ["fd00::1", "127.0.0.1", "10.99.0.0", "10.99.255.255", "192.168.1.255"])
def test_an_address_that_no_node_can_have_is_refused(address: str) -> None:
    expected = "address of node a: .*, expected an IPv4 address of one host, not loopback, when .* Leave the key out"
    with pytest.raises(ClusterError, match=expected):
        assigned(f'name: a, devices: 1, nic: 1Gbit/s, address: "{address}"')


def test_networks() -> None:
    found = {"a": ("10.99.0.1", "10.100.0.1"), "b": ("192.168.1.5",), "c": ("10.99.3.1",)}
    assert lab_layout.address_networks(found) == [("10.99.0.0/16", 0), ("10.100.0.0/16", 1), ("192.168.1.0/24", 0)]
    assert lab_layout.interface_address("10.99.0.1", 0) == "10.99.0.1/16"
    assert lab_layout.interface_address("10.100.0.1", 1) == "10.100.0.1/16"
    assert lab_layout.interface_address("192.168.1.5", 0) == "192.168.1.5/24"
