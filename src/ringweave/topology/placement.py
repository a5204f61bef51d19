"""Which node of the cluster a worker is on, and which device is its; pure decisions on what the worker observed."""

import ipaddress
from collections.abc import Collection

from ringweave import errors
from ringweave.environment import NODE
from ringweave.errors import PlacementError
from ringweave.files.problems import closest, listed
from ringweave.topology import hosts
from ringweave.topology.cluster import Cluster, Device, Node


def place_rank(cluster: Cluster, *, node_name: str | None, host_name: str, addresses: Collection[str]) -> Node:
    """The node that a worker is on: the one it was told, else the one of its host name, else of one of its addresses.

    Args:
        cluster: The cluster that the worker is part of.
        node_name: What the launcher said (RINGWEAVE_NODE); None or empty where it said nothing.
        host_name: The host's own name, with or without a domain; letter case does not matter.
        addresses: IP addresses of the host's interfaces.

    Raises:
        PlacementError: The named node is not in the cluster, or nothing fits, or the addresses fit several nodes.
    """
    if node_name:
        return _named(cluster, node_name)
    by_name = {node.name.casefold(): node for node in cluster.nodes}
    short_name = host_name.split(".", maxsplit=1)[0]
    for name in (host_name, short_name, hosts.node_name(host_name), hosts.node_name(short_name)):
        if name.casefold() in by_name:
            return by_name[name.casefold()]
    own = {_plain_address(address) for address in addresses}
    fitting = [node for node in cluster.nodes if node.address and _plain_address(node.address) in own]
    if len(fitting) != 1:
        raise PlacementError(_misfit(cluster, fitting, host_name, addresses))
    return fitting[0]


def device_of(node: Node, local_rank: int) -> Device:
    """The device that a worker computes on.

    Raises:
        PlacementError: The node has no device for that local rank.
    """
    if not 0 <= local_rank < node.num_devices:
        raise PlacementError(
            errors.explain(
                f"local rank on node {node.name}",
                got=local_rank,
                expected=f"0 to {node.num_devices - 1}, the {node.num_devices} device(s) that the cluster gives it",
                do="Start fewer workers on the node, or add devices to it in the cluster file",
            )
        )
    return node.devices[local_rank]


def _named(cluster: Cluster, node_name: str) -> Node:
    names = [node.name for node in cluster.nodes]
    for node in cluster.nodes:
        if node.name in (node_name, hosts.node_name(node_name)):
            return node
    raise PlacementError(
        errors.explain(
            f"node of this worker, from {NODE}",
            got=node_name,
            expected=f"a node of cluster {cluster.name} ({listed(names, len(names))})",
            do=closest(node_name, names) or f"Correct {NODE}, or unset it to go by host name and address",
        )
    )


def _misfit(cluster: Cluster, fitting: list[Node], host_name: str, addresses: Collection[str]) -> str:
    names = [node.name for node in cluster.nodes]
    known = [node.address for node in cluster.nodes if node.address]
    there = f"{listed(names, len(names))}; addresses {listed(known, len(known)) or 'not given'}"
    expected = f"the host name or address of one node of cluster {cluster.name} (names {there})"
    if fitting:
        expected += f", not those of {listed([node.name for node in fitting], len(fitting))} at once"
    got = f"host name {host_name}, addresses {listed(addresses, len(addresses)) or 'none'}"
    do = f"Set {NODE} to the name of the node, or add this host's name or address to the cluster file"
    return errors.explain("node of this worker", got=_Verbatim(got), expected=expected, do=do)


def _plain_address(text: str) -> str:
    """The address in one spelling, without the zone that interfaces add; other text stays as it is."""
    try:
        return str(ipaddress.ip_address(text.split("%", maxsplit=1)[0]))
    except ValueError:
        return text


class _Verbatim:
    """Text that is shown without quotes."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text
