"""What a lab consists of, as data: namespaces, bridges and the cables between them. Pure.

Every node is a network namespace; all switches are bridges in one more. Names of namespaces hold a colon, which neither
labs nor nodes may have in theirs, so no two labs can clash. Interfaces are in namespaces of their own and need no lab
in their names, which the kernel limits to 15 characters.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ringweave.errors import ClusterError, explain
from ringweave.lab import addresses
from ringweave.lab.addresses import Addresses
from ringweave.topology import CORE, Cluster, Node, link_name
from ringweave.units import format_rate

PREFIX = "rw-"
"""How every name begins that a lab puts where others can see it."""
MAX_NODES = 256
MAX_CABLES = 1000
"""A bridge of Linux takes 1024 (BR_MAX_PORTS)."""
MAX_HOST_NAME = 64
"""Longest name that Linux lets a host have (uname(2))."""
MIN_RATE_BYTES_PER_S, MAX_RATE_BYTES_PER_S = 1e3, 125e9
"""Below, tc's tbf cannot say how long its bucket takes to fill; above, no test of ours has been."""
_INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,14}")
_NO_INTERFACE = ("lo", "all", "default")


@dataclass(frozen=True, kw_only=True, slots=True)
class Port:
    """One end of a cable: it sends on one link, and is where that link is limited."""

    namespace: str
    """Name of the network namespace that it is in."""
    interface: str
    link: str
    """Name of the link that it sends on."""
    rate_bytes_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Cable:
    """A pair of interfaces, one of a node or switch and one of the switch above."""

    lower: Port
    upper: Port
    upper_switch: str
    lower_switch: str | None
    """None where the lower end is a NIC of a node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Everything that a lab consists of."""

    name: str
    """Name of the lab."""
    cluster: Cluster
    """Every node has its address."""
    addresses: Addresses
    cables: tuple[Cable, ...]
    """One for each NIC and each uplink."""

    @property
    def switch_namespace(self) -> str:
        """Name of the namespace with all bridges."""
        return namespace(self.name, CORE)

    @property
    def namespaces(self) -> Mapping[str, str]:
        """Node -> name of its network namespace."""
        return {node.name: namespace(self.name, node.name) for node in self.cluster.nodes}

    @property
    def bridges(self) -> Mapping[str, str]:
        """Switch -> name of its bridge."""
        names = [CORE, *(switch.name for switch in self.cluster.switches)]
        return {name: f"{PREFIX}s{index}" for index, name in enumerate(names)}

    def ports(self, link: str | None = None) -> list[Port]:
        """The ends that send on a link; all ends if none is named."""
        ends = [port for cable in self.cables for port in (cable.lower, cable.upper)]
        return [port for port in ends if link in (None, port.link)]

    def interfaces(self, node: str) -> list[str]:
        """The node's interfaces, in the order of its NICs."""
        return [c.lower.interface for c in self.cables if c.lower.namespace == self.namespaces[node]]


def namespace(lab: str, part: str) -> str:
    """`rw-two-racks:a0`, the name of the network namespace of a node; that of the switches if the part is `core`."""
    return f"{PREFIX}{lab}:{part}"


def lay_out(cluster: Cluster, name: str) -> Layout:
    """The lab of that name for a cluster.

    Raises:
        ClusterError: The cluster cannot be brought up as a lab.
    """
    _check(cluster)
    assigned = addresses.assign(cluster)
    nodes = tuple(replace(node, address=assigned[node.name][0]) for node in cluster.nodes)
    cluster = replace(cluster, nodes=nodes)
    cables = (*_node_cables(cluster, name), *_uplinks(cluster, name))
    return Layout(name=name, cluster=cluster, addresses=assigned, cables=cables)


def check_rate(what: str, rate_bytes_per_s: float) -> None:
    """Refuse a rate that the lab cannot limit a link to.

    Raises:
        ClusterError: It is too low or too high.
    """
    if not MIN_RATE_BYTES_PER_S <= rate_bytes_per_s <= MAX_RATE_BYTES_PER_S:
        raise ClusterError(
            explain(
                what,
                got=format_rate(rate_bytes_per_s),
                expected=f"{format_rate(MIN_RATE_BYTES_PER_S)} to {format_rate(MAX_RATE_BYTES_PER_S)} in a lab",
                do="Give it a rate that one machine can play",
            )
        )


def interface_names(node: Node) -> list[str]:
    """Names for the node's NICs: those of the cluster file where Linux allows them, else eth0, eth1, ..."""
    allowed = [nic.name if _is_interface(nic.name) else None for nic in node.nics]
    others = (f"eth{index}" for index in range(2 * len(allowed)) if f"eth{index}" not in allowed)
    return [name or next(others) for name in allowed]


def _is_interface(name: str) -> bool:
    return bool(_INTERFACE.fullmatch(name)) and name not in _NO_INTERFACE


def _node_cables(cluster: Cluster, lab: str) -> Iterator[Cable]:
    switches = namespace(lab, CORE)
    for node_index, node in enumerate(cluster.nodes):
        above = node.switch or CORE
        for nic_index, (nic, interface) in enumerate(zip(node.nics, interface_names(node), strict=True)):
            rate = nic.rate_bytes_per_s
            up, down = link_name(node.name, above), link_name(above, node.name)
            own, port = namespace(lab, node.name), f"{PREFIX}n{node_index}-{nic_index}"
            yield Cable(
                lower=Port(namespace=own, interface=interface, link=up, rate_bytes_per_s=rate),
                upper=Port(namespace=switches, interface=port, link=down, rate_bytes_per_s=rate),
                upper_switch=above,
                lower_switch=None,
            )


def _uplinks(cluster: Cluster, lab: str) -> Iterator[Cable]:
    switches = namespace(lab, CORE)
    for index, switch in enumerate(cluster.switches):
        above, rate = switch.parent or CORE, switch.uplink_bytes_per_s
        up, down = link_name(switch.name, above), link_name(above, switch.name)
        yield Cable(
            lower=Port(namespace=switches, interface=f"{PREFIX}u{index}", link=up, rate_bytes_per_s=rate),
            upper=Port(namespace=switches, interface=f"{PREFIX}d{index}", link=down, rate_bytes_per_s=rate),
            upper_switch=above,
            lower_switch=switch.name,
        )


def _check(cluster: Cluster) -> None:
    if cluster.num_nodes > MAX_NODES:
        raise ClusterError(
            explain(
                f"nodes of cluster {cluster.name}",
                got=cluster.num_nodes,
                expected=f"at most {MAX_NODES} in a lab",
                do="Bring up a smaller cluster; a large one can be simulated",
            )
        )
    num_cables = sum(len(node.nics) for node in cluster.nodes) + len(cluster.switches)
    if num_cables > MAX_CABLES:
        raise ClusterError(
            explain(
                f"NICs and uplinks of cluster {cluster.name}",
                got=num_cables,
                expected=f"at most {MAX_CABLES} in a lab",
                do="Bring up a smaller cluster; a large one can be simulated",
            )
        )
    for node in cluster.nodes:
        if len(node.name) > MAX_HOST_NAME:
            raise ClusterError(
                explain(
                    "name of a node",
                    got=node.name,
                    expected=f"at most {MAX_HOST_NAME} characters, as it becomes a host name in the lab",
                    do="Shorten it",
                )
            )
        for nic in node.nics:
            check_rate(f"rate of NIC {nic.name} of node {node.name}", nic.rate_bytes_per_s)
    for switch in cluster.switches:
        check_rate(f"uplink of switch {switch.name}", switch.uplink_bytes_per_s)
