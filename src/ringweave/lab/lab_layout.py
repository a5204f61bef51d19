"""Layout of a lab as data: addresses, network namespaces, bridges and cables. Pure.

Each node is a network namespace; all switches are bridges in one more. A namespace name contains a colon, which lab and
node names may not, so two labs never clash. Interfaces live in their own namespaces and need no lab in their names,
which the kernel limits to 15 characters.

All nodes share one Ethernet, so every address is reached directly. The first NICs of all nodes are in one network, the
second NICs in another, and so on: a connection to a peer's second address leaves by the second NIC, as on clusters with
several NICs. Labs may use the same addresses: each has its own namespaces, and no route leads out of them.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, ip_address

from ringweave.errors import ClusterError
from ringweave.topology import CORE, Cluster, Node, link_name
from ringweave.units import format_rate

FIRST_NIC_NETWORK = IPv4Network("10.99.0.0/16")
"""Network from which first NICs get addresses that the cluster file does not give."""
PREFIX_BITS = FIRST_NIC_NETWORK.prefixlen
FILE_PREFIX_BITS = 24
"""Size of the network that an address of the cluster file belongs to, outside of `FIRST_NIC_NETWORK`."""

NodeAddresses = Mapping[str, tuple[str, ...]]
"""Node -> address of each NIC, in the order of its NICs."""


def assign_addresses(cluster: Cluster) -> NodeAddresses:
    """Assign an address to every NIC: the node's own to its first NIC, free ones to the rest.

    Assigning again to the cluster with its addresses filled in gives the same addresses.

    Raises:
        ClusterError: A node has an address that the lab cannot give it.
    """
    from_file = {node.name: _file_address(node) for node in cluster.nodes if node.address is not None}
    taken = set(from_file.values())
    free = [
        _free_addresses(network, taken)
        for network in _nic_networks(max(len(node.nics) for node in cluster.nodes), taken)
    ]
    return {
        node.name: tuple(
            str(from_file[node.name] if index == 0 and node.name in from_file else next(free[index]))
            for index in range(len(node.nics))
        )
        for node in cluster.nodes
    }


def interface_address(address: str, nic_index: int) -> str:
    """Return an address with the size of its network, as an interface gets it: `10.99.0.1/16`."""
    return str(IPv4Interface((address, _network_of(address, nic_index).prefixlen)))


def address_networks(addresses: NodeAddresses) -> list[tuple[str, int]]:
    """Return every network that has an address, and the index of the NIC that leads to it."""
    found = {(_network_of(address, index), index) for own in addresses.values() for index, address in enumerate(own)}
    return [(str(network), index) for network, index in sorted(found)]


def _network_of(address: str, nic_index: int) -> IPv4Network:
    is_assigned = nic_index > 0 or IPv4Address(address) in FIRST_NIC_NETWORK
    return IPv4Network((address, PREFIX_BITS if is_assigned else FILE_PREFIX_BITS), strict=False)


def _nic_networks(count: int, taken: Collection[IPv4Address]) -> list[IPv4Network]:
    """Return `FIRST_NIC_NETWORK` for the first NICs, and networks without a given address for the others."""
    others = (IPv4Network((f"10.{number}.0.0", PREFIX_BITS)) for number in range(100, 255))
    free = (network for network in others if not any(address in network for address in taken))
    return [FIRST_NIC_NETWORK, *(next(free) for _ in range(count - 1))]


def _free_addresses(network: IPv4Network, taken: Collection[IPv4Address]) -> Iterator[IPv4Address]:
    return (address for address in network.hosts() if address not in taken)


def _file_address(node: Node) -> IPv4Address:
    address = ip_address(node.address or "")
    if isinstance(address, IPv4Address) and not address.is_loopback:
        network = _network_of(str(address), nic_index=0)
        if address not in (network.network_address, network.broadcast_address):
            return address
    raise ClusterError(
        f"address of node {node.name}",
        got=node.address,
        expected="an IPv4 address of one host, not loopback, when the cluster is brought up as a lab",
        do="Leave the key out, and the lab assigns an address",
    )


NAME_PREFIX = "rw-"
"""Prefix of every name of a lab that is visible outside of it."""
MAX_NODES = 256
MAX_CABLES = 1000
"""Largest number of cables; a bridge of Linux takes 1024 (BR_MAX_PORTS)."""
MAX_HOST_NAME = 64
"""Longest host name in Linux (uname(2))."""
MIN_RATE_BYTES_PER_S, MAX_RATE_BYTES_PER_S = 1e3, 125e9
"""Limits of rates. Below, tc's tbf cannot express the time its bucket takes to fill; above, nothing was tested."""
_INTERFACE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,14}")
_RESERVED_INTERFACES = ("lo", "all", "default")


@dataclass(frozen=True, kw_only=True, slots=True)
class CablePort:
    """One end of a cable: it sends on one link, and its queue limits that link."""

    namespace: str
    interface: str
    link: str
    rate_bytes_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Cable:
    """A pair of interfaces, one of a node or switch and one of the switch above."""

    lower: CablePort
    upper: CablePort
    upper_switch: str
    lower_switch: str | None
    """Lower switch; None if the lower end is a NIC of a node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LabLayout:
    """All parts of a lab."""

    name: str
    cluster: Cluster
    """The cluster; every node has its address."""
    addresses: NodeAddresses
    cables: tuple[Cable, ...]
    """One for each NIC and each uplink."""

    @property
    def switch_namespace(self) -> str:
        return namespace_name(self.name, CORE)

    @property
    def namespaces(self) -> Mapping[str, str]:
        """Node -> name of its network namespace."""
        return {node.name: namespace_name(self.name, node.name) for node in self.cluster.nodes}

    @property
    def bridges(self) -> Mapping[str, str]:
        """Switch -> name of its bridge."""
        names = [CORE, *(switch.name for switch in self.cluster.switches)]
        return {name: f"{NAME_PREFIX}s{index}" for index, name in enumerate(names)}

    def ports(self, link: str | None = None) -> list[CablePort]:
        """Return the ends that send on a link; all ends without a link."""
        ends = [port for cable in self.cables for port in (cable.lower, cable.upper)]
        return [port for port in ends if link in (None, port.link)]

    def interfaces(self, node: str) -> list[str]:
        """Return the node's interfaces, in the order of its NICs."""
        return [c.lower.interface for c in self.cables if c.lower.namespace == self.namespaces[node]]


def namespace_name(lab: str, part: str) -> str:
    """Return `rw-two-racks:a0`, the name of a node's network namespace; with the part `core`, that of the switches."""
    return f"{NAME_PREFIX}{lab}:{part}"


def plan_layout(cluster: Cluster, name: str) -> LabLayout:
    """Plan the lab of that name for a cluster.

    Raises:
        ClusterError: The cluster cannot be brought up as a lab.
    """
    _check_cluster(cluster)
    assigned = assign_addresses(cluster)
    nodes = tuple(replace(node, address=assigned[node.name][0]) for node in cluster.nodes)
    cluster = replace(cluster, nodes=nodes)
    cables = (*_node_cables(cluster, name), *_uplink_cables(cluster, name))
    return LabLayout(name=name, cluster=cluster, addresses=assigned, cables=cables)


def check_link_rate(what: str, rate_bytes_per_s: float) -> None:
    """Refuse a rate that the lab cannot limit a link to.

    Raises:
        ClusterError: The rate is too low or too high.
    """
    if not MIN_RATE_BYTES_PER_S <= rate_bytes_per_s <= MAX_RATE_BYTES_PER_S:
        raise ClusterError(
            what,
            got=format_rate(rate_bytes_per_s),
            expected=f"{format_rate(MIN_RATE_BYTES_PER_S)} to {format_rate(MAX_RATE_BYTES_PER_S)} in a lab",
            do="Give it a rate that one machine can play",
        )


def interface_names(node: Node) -> list[str]:
    """Return names for the node's NICs: those of the cluster file if Linux allows them, else eth0, eth1, ..."""
    allowed = [nic.name if _is_interface_name(nic.name) else None for nic in node.nics]
    others = (f"eth{index}" for index in range(2 * len(allowed)) if f"eth{index}" not in allowed)
    return [name or next(others) for name in allowed]


def _is_interface_name(name: str) -> bool:
    return bool(_INTERFACE_NAME.fullmatch(name)) and name not in _RESERVED_INTERFACES


def _node_cables(cluster: Cluster, lab: str) -> Iterator[Cable]:
    switches = namespace_name(lab, CORE)
    for node_index, node in enumerate(cluster.nodes):
        above = node.switch or CORE
        for nic_index, (nic, interface) in enumerate(zip(node.nics, interface_names(node), strict=True)):
            rate = nic.rate_bytes_per_s
            up, down = link_name(node.name, above), link_name(above, node.name)
            own, port = namespace_name(lab, node.name), f"{NAME_PREFIX}n{node_index}-{nic_index}"
            yield Cable(
                lower=CablePort(namespace=own, interface=interface, link=up, rate_bytes_per_s=rate),
                upper=CablePort(namespace=switches, interface=port, link=down, rate_bytes_per_s=rate),
                upper_switch=above,
                lower_switch=None,
            )


def _uplink_cables(cluster: Cluster, lab: str) -> Iterator[Cable]:
    switches = namespace_name(lab, CORE)
    for index, switch in enumerate(cluster.switches):
        above, rate = switch.parent or CORE, switch.uplink_bytes_per_s
        up, down = link_name(switch.name, above), link_name(above, switch.name)
        yield Cable(
            lower=CablePort(namespace=switches, interface=f"{NAME_PREFIX}u{index}", link=up, rate_bytes_per_s=rate),
            upper=CablePort(namespace=switches, interface=f"{NAME_PREFIX}d{index}", link=down, rate_bytes_per_s=rate),
            upper_switch=above,
            lower_switch=switch.name,
        )


def _check_cluster(cluster: Cluster) -> None:
    if cluster.num_nodes > MAX_NODES:
        raise ClusterError(
            f"nodes of cluster {cluster.name}",
            got=cluster.num_nodes,
            expected=f"at most {MAX_NODES} in a lab",
            do="Bring up a smaller cluster; a large one can be simulated",
        )
    num_cables = sum(len(node.nics) for node in cluster.nodes) + len(cluster.switches)
    if num_cables > MAX_CABLES:
        raise ClusterError(
            f"NICs and uplinks of cluster {cluster.name}",
            got=num_cables,
            expected=f"at most {MAX_CABLES} in a lab",
            do="Bring up a smaller cluster; a large one can be simulated",
        )
    for node in cluster.nodes:
        if len(node.name) > MAX_HOST_NAME:
            raise ClusterError(
                "name of a node",
                got=node.name,
                expected=f"at most {MAX_HOST_NAME} characters, as it becomes a host name in the lab",
                do="Shorten it",
            )
        for nic in node.nics:
            check_link_rate(f"rate of NIC {nic.name} of node {node.name}", nic.rate_bytes_per_s)
    for switch in cluster.switches:
        check_link_rate(f"uplink of switch {switch.name}", switch.uplink_bytes_per_s)
