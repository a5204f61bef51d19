"""Which address each NIC of a lab gets, and by which NIC it is reached. Pure.

All nodes share one Ethernet, so every address is reached directly. The first NICs of all nodes are in one network, the
second ones in another, and so on: whoever connects to a peer's second address leaves by the second NIC without asking
for it, as on clusters with several NICs. Labs may use the same addresses: each has namespaces of its own, and nothing
leads out of them.
"""

from collections.abc import Collection, Iterator, Mapping
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, ip_address

from ringweave.errors import ClusterError, explain
from ringweave.topology import Cluster, Node

RANGE = IPv4Network("10.99.0.0/16")
"""Where addresses of first NICs are taken from, if the cluster file leaves them open."""
PREFIX_BITS = RANGE.prefixlen
GIVEN_PREFIX_BITS = 24
"""Size of the network that an address of the cluster file is taken to be in, outside of `RANGE`."""

Addresses = Mapping[str, tuple[str, ...]]
"""Node -> address of each NIC, in the order of its NICs."""


def assign(cluster: Cluster) -> Addresses:
    """An address for every NIC: the node's own for its first NIC, free ones for the rest.

    Assigning again to the cluster with its addresses filled in gives the same.

    Raises:
        ClusterError: A node has an address that the lab cannot give it.
    """
    given = {node.name: _given(node) for node in cluster.nodes if node.address is not None}
    taken = set(given.values())
    free = [_free(network, taken) for network in _networks(max(len(node.nics) for node in cluster.nodes), taken)]
    return {
        node.name: tuple(
            str(given[node.name] if index == 0 and node.name in given else next(free[index]))
            for index in range(len(node.nics))
        )
        for node in cluster.nodes
    }


def interface(address: str, nic_index: int) -> str:
    """The address as an interface gets it, with the size of its network: `10.99.0.1/16`."""
    return str(IPv4Interface((address, _network(address, nic_index).prefixlen)))


def networks(addresses: Addresses) -> list[tuple[str, int]]:
    """Every network that has an address, and the index of the NIC that leads to it."""
    found = {(_network(address, index), index) for own in addresses.values() for index, address in enumerate(own)}
    return [(str(network), index) for network, index in sorted(found)]


def _network(address: str, nic_index: int) -> IPv4Network:
    is_assigned = nic_index > 0 or IPv4Address(address) in RANGE
    return IPv4Network((address, PREFIX_BITS if is_assigned else GIVEN_PREFIX_BITS), strict=False)


def _networks(count: int, taken: Collection[IPv4Address]) -> list[IPv4Network]:
    """`RANGE` for the first NICs, and networks without a given address for the others."""
    others = (IPv4Network((f"10.{number}.0.0", PREFIX_BITS)) for number in range(100, 255))
    free = (network for network in others if not any(address in network for address in taken))
    return [RANGE, *(next(free) for _ in range(count - 1))]


def _free(network: IPv4Network, taken: Collection[IPv4Address]) -> Iterator[IPv4Address]:
    return (address for address in network.hosts() if address not in taken)


def _given(node: Node) -> IPv4Address:
    address = ip_address(node.address or "")
    if isinstance(address, IPv4Address) and not address.is_loopback:
        network = _network(str(address), nic_index=0)
        if address not in (network.network_address, network.broadcast_address):
            return address
    raise ClusterError(
        explain(
            f"address of node {node.name}",
            got=node.address,
            expected="an IPv4 address of one host, not loopback, when the cluster is brought up as a lab",
            do="Leave the key out, and the lab assigns an address",
        )
    )
