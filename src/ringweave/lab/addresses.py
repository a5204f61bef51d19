"""Which address each NIC of a lab gets, and what is reached without a router. Pure.

All nodes share one Ethernet, so every address is reached directly. Labs may use the same addresses: each has namespaces
of its own, and nothing leads out of them.
"""

from collections.abc import Iterable, Iterator, Mapping
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, ip_address

from ringweave.errors import ClusterError, explain
from ringweave.topology import Cluster, Node

RANGE = IPv4Network("10.99.0.0/16")
"""Where addresses that the cluster file leaves open are taken from."""
OTHER_PREFIX_BITS = 24
"""Size of the network that an address outside of the range is taken to be in."""

Addresses = Mapping[str, tuple[str, ...]]
"""Node -> address of each NIC, in the order of its NICs."""


def assign(cluster: Cluster) -> Addresses:
    """An address for every NIC: the node's own for its first NIC, free ones of `RANGE` for the rest.

    Raises:
        ClusterError: A node has an address that the lab cannot give it.
    """
    given = {node.name: _given(node) for node in cluster.nodes if node.address is not None}
    free = _free(set(given.values()))
    return {
        node.name: tuple(
            str(given[node.name] if index == 0 and node.name in given else next(free))
            for index in range(len(node.nics))
        )
        for node in cluster.nodes
    }


def interface(address: str) -> str:
    """The address as an interface gets it, with the size of its network: `10.99.0.1/16`."""
    return str(IPv4Interface((address, _network(IPv4Address(address)).prefixlen)))


def networks(addresses: Iterable[str]) -> list[str]:
    """The networks that hold all these addresses, each of which every node reaches directly."""
    return [str(network) for network in sorted({_network(IPv4Address(address)) for address in addresses})]


def _network(address: IPv4Address) -> IPv4Network:
    return RANGE if address in RANGE else IPv4Network((address, OTHER_PREFIX_BITS), strict=False)


def _free(taken: set[IPv4Address]) -> Iterator[IPv4Address]:
    return (address for address in RANGE.hosts() if address not in taken)


def _given(node: Node) -> IPv4Address:
    address = ip_address(node.address or "")
    if isinstance(address, IPv4Address) and not address.is_loopback:
        network = _network(address)
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
