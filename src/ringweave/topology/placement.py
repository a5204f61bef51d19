"""Placement of workers: the node and device of a rank, node names from host names, the leading device of a NIC.

Planning asks here for leaders. Discovery sees the whole tree of a machine and puts its answer into the node that it
writes: `Nic.nearest`, where NUMA nodes alone would not give the same. All decisions are pure.
"""

import hashlib
import ipaddress
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ringweave import errors
from ringweave.environment import NODE
from ringweave.errors import PlacementError
from ringweave.files.problems import shorten_names, suggest_closest
from ringweave.topology import CORE

if TYPE_CHECKING:
    from ringweave.topology.cluster import Cluster, Device, Nic, Node

_BOOT_ID, _NETWORK_NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
_INVALID_IN_LABELS = re.compile(r"[^A-Za-z0-9-]+")
_MAX_LABEL_CHARS, _MAX_NAME_CHARS = 63, 253
"""Largest number of characters of a label and of a host name (RFC 1035)."""
_DIGEST_DIGITS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlacement:
    """Node, host and address that a rank reports."""

    global_rank: int
    node: str
    host: str
    """Its `host_id`; empty where unknown."""
    address: str


def node_name_of_host(host_name: str) -> str:
    """Return the node name of a host in cluster files; always the same for one host name.

    Characters that no host name may have (RFC 1123: `gpu_node_1`) become a hyphen. Labels of more than 63 characters,
    and names of more than 253, are cut and end in digits of a digest, since machines of one kind often differ at the
    end only. A host with the name of the root switch gets a suffix. A node's name stays as it is.
    """
    labels = [_INVALID_IN_LABELS.sub("-", label).strip("-") for label in host_name.split(".")]
    name = ".".join(_shorten_with_digest(label, _MAX_LABEL_CHARS) for label in labels if label)
    if not name:
        return f"node-{_digest(host_name)}"
    if len(name) > _MAX_NAME_CHARS:
        return _shorten_with_digest(name.replace(".", "-"), _MAX_LABEL_CHARS)
    return f"{name}-node" if name.casefold() == CORE else name


def host_id() -> str:
    """Return an id shared by exactly the processes that could be ranks of one node: machine boot and network namespace.

    Two machines may have the same name, as two containers on one machine may. Empty where the system does not say.
    """
    try:
        return _digest(f"{_BOOT_ID.read_text(encoding='ascii').strip()} {_NETWORK_NAMESPACE.stat().st_ino}")
    except OSError:
        return ""


def check_one_host_per_node(placements: Iterable[RankPlacement]) -> None:
    """Raise an error where ranks on different hosts report the same node.

    Raises:
        PlacementError: Two are; the text names both.
    """
    first: dict[str, RankPlacement] = {}
    for placement in placements:
        if not placement.host:
            continue
        other = first.setdefault(placement.node.casefold(), placement)
        if other.host != placement.host:
            both_ranks = " and ".join(f"rank {each.global_rank} at {each.address}" for each in (other, placement))
            raise PlacementError(
                f"hosts of node {placement.node}",
                got=f"two: {both_ranks}",
                expected="one host for each name of a node",
                do=f"Give the hosts names that differ, or set {NODE} to another name on each",
            )


def _shorten_with_digest(text: str, max_chars: int) -> str:
    kept = text[: max_chars - _DIGEST_DIGITS - 1].rstrip("-")
    return text if len(text) <= max_chars else f"{kept}-{_digest(text)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:_DIGEST_DIGITS]


def preferred_nics(nics: "Sequence[Nic]") -> "list[Nic]":
    """Return the NICs in order of preference: RDMA first, then the higher rate, then the given order."""
    return sorted(nics, key=lambda nic: (not nic.rdma, -nic.rate_bytes_per_s))


def nearest_devices(node: "Node", nic: "Nic") -> list[int]:
    """Return the device indices of the node, the one that should lead on the NIC first; ties by index."""
    return sorted(range(node.num_devices), key=lambda index: (device_distance(node, nic, index), index))


def device_distance(node: "Node", nic: "Nic", device_index: int) -> int:
    """Return the distance from a device to a NIC, to compare devices or NICs of one node.

    It is the device's place in `Nic.nearest`, if the node has one; devices that are not listed come last. Otherwise it
    is 0 on the NIC's NUMA node and 1 elsewhere, also where either NUMA node is unknown.
    """
    if nic.nearest:
        return nic.nearest.index(device_index) if device_index in nic.nearest else len(nic.nearest)
    return 0 if nic.numa is not None and node.devices[device_index].numa == nic.numa else 1


def leader_reason(node: "Node", nic: "Nic", device_index: int) -> str:
    """Return why this device leads on the NIC, in words that follow its name: "on NUMA node 1, as ib0 is"."""
    if node.num_devices == 1:
        return "the only device of its node"
    far = [device_distance(node, nic, index) for index in range(node.num_devices)]
    alike = ", the first of those that are" if far.count(far[device_index]) > 1 else ""
    if nic.nearest:
        return f"nearest to {nic.name}, by the order in the node's description{alike}"
    if nic.numa is not None and node.devices[device_index].numa == nic.numa:
        return f"on NUMA node {nic.numa}, as {nic.name} is{alike}"
    return f"the first device: no device is known to be nearer to {nic.name}"


def place_rank(cluster: "Cluster", *, node_name: str | None, host_name: str, addresses: Collection[str]) -> "Node":
    """Return a worker's node: by the given node name, else by its host name, else by one of its addresses.

    Args:
        cluster: Cluster that the worker is part of.
        node_name: Name given by the launcher (RINGWEAVE_NODE); None or empty where it gave none.
        host_name: The host's own name, with or without a domain; letter case does not matter.
        addresses: IP addresses of the host's interfaces.

    Raises:
        PlacementError: The named node is not in the cluster, or nothing fits, or the addresses fit several nodes.
    """
    if node_name:
        return _node_by_name(cluster, node_name)
    by_name = {node.name.casefold(): node for node in cluster.nodes}
    short_name = host_name.split(".", maxsplit=1)[0]
    for name in (host_name, short_name, node_name_of_host(host_name), node_name_of_host(short_name)):
        if name.casefold() in by_name:
            return by_name[name.casefold()]
    own_addresses = {_plain_address(address) for address in addresses}
    matching = [node for node in cluster.nodes if node.address and _plain_address(node.address) in own_addresses]
    if len(matching) != 1:
        raise PlacementError(_no_match_text(cluster, matching, host_name, addresses))
    return matching[0]


def device_of_local_rank(node: "Node", local_rank: int) -> "Device":
    """Return the compute device of a worker.

    Raises:
        PlacementError: The node has no device for that local rank.
    """
    if not 0 <= local_rank < node.num_devices:
        raise PlacementError(
            f"local rank on node {node.name}",
            got=local_rank,
            expected=f"0 to {node.num_devices - 1}, the {node.num_devices} device(s) that the cluster gives it",
            do="Start fewer workers on the node, or add devices to it in the cluster file",
        )
    return node.devices[local_rank]


def _node_by_name(cluster: "Cluster", node_name: str) -> "Node":
    names = [node.name for node in cluster.nodes]
    for node in cluster.nodes:
        if node.name in (node_name, node_name_of_host(node_name)):
            return node
    raise PlacementError(
        f"node of this worker, from {NODE}",
        got=node_name,
        expected=f"a node of cluster {cluster.name} ({shorten_names(names, len(names))})",
        do=suggest_closest(node_name, names) or f"Correct {NODE}, or unset it to go by host name and address",
    )


def _no_match_text(cluster: "Cluster", matching: "list[Node]", host_name: str, addresses: Collection[str]) -> str:
    names = [node.name for node in cluster.nodes]
    known = [node.address for node in cluster.nodes if node.address]
    there = f"{shorten_names(names, len(names))}; addresses {shorten_names(known, len(known)) or 'not given'}"
    expected = f"the host name or address of one node of cluster {cluster.name} (names {there})"
    if matching:
        expected += f", not those of {shorten_names([node.name for node in matching], len(matching))} at once"
    got = f"host name {host_name}, addresses {shorten_names(addresses, len(addresses)) or 'none'}"
    do = f"Set {NODE} to the name of the node, or add this host's name or address to the cluster file"
    return errors.explain("node of this worker", got=_UnquotedText(got), expected=expected, do=do)


def _plain_address(text: str) -> str:
    """Return the address in one spelling, without the zone that interfaces add; other text stays as it is."""
    try:
        return str(ipaddress.ip_address(text.split("%", maxsplit=1)[0]))
    except ValueError:
        return text


class _UnquotedText:
    """Text that is shown without quotes."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text
