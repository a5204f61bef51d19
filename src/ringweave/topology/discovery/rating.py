"""Discovered nodes with the rates that probing measured, NIC by NIC."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ringweave import units
from ringweave.topology.cluster import Nic, Node


@dataclass(frozen=True, slots=True)
class Rated:
    """Nodes with measured rates."""

    nodes: tuple[Node, ...]
    remarks: tuple[str, ...]
    """What became of NICs that were not measured, in sentences."""


def measured(
    nodes: Sequence[Node], rates: Mapping[str, Mapping[str, float]], offers: Mapping[str, Collection[str]]
) -> Rated:
    """The nodes, each NIC at the rate that was measured of it.

    A NIC that was not measured has the rate of a measured one of its kind (the same RDMA and the same stated rate, as
    all NICs of a discovered node have), else its own; one by which probing could not reach the other nodes is left out.
    Where none of a node's NICs is what was measured (RDMA that TCP does not go by), they are scaled together:
    their sum is what TCP gets of the node. A node that was not measured stays.

    Args:
        nodes: As discovered.
        rates: Node -> NIC -> bytes per second of those that were measured.
        offers: Node -> NICs that probing looked at.
    """
    remarks: list[str] = []
    found = [_rated(node, rates.get(node.name, {}), offers.get(node.name, ()), remarks) for node in nodes]
    return Rated(tuple(found), tuple(remarks))


def _rated(node: Node, rates: Mapping[str, float], looked_at: Collection[str], remarks: list[str]) -> Node:
    known = [nic for nic in node.nics if nic.name in rates]
    if not rates:
        return node
    if not known:
        factor = sum(rates.values()) / node.rate_bytes_per_s
        remarks.append(f"{_names(node.nics)} on {node.name}: not measured, the node is taken for what TCP gets of it")
        nics = tuple(replace(nic, rate_bytes_per_s=nic.rate_bytes_per_s * factor) for nic in node.nics)
        return replace(node, nics=nics)
    gone = [nic for nic in node.nics if nic.name in looked_at and nic.name not in rates]
    if gone:
        remarks.append(f"{_names(gone)} on {node.name}: left out, the other nodes are not reached by it")
    kept = [nic for nic in node.nics if nic not in gone]
    return replace(node, nics=tuple(_with_rate(nic, node, known, rates, remarks) for nic in kept))


def _with_rate(nic: Nic, node: Node, known: Sequence[Nic], rates: Mapping[str, float], remarks: list[str]) -> Nic:
    if nic.name in rates:
        return replace(nic, rate_bytes_per_s=rates[nic.name])
    alike = [each for each in known if (each.rdma, each.rate_bytes_per_s) == (nic.rdma, nic.rate_bytes_per_s)]
    rate = rates[alike[0].name] if alike else nic.rate_bytes_per_s
    why = f"as {alike[0].name}, which is of its kind" if alike else "as stated"
    remarks.append(f"{nic.name} on {node.name}: not measured, {units.format_rate(rate)} {why}")
    return replace(nic, rate_bytes_per_s=rate)


def _names(nics: Sequence[Nic]) -> str:
    return ", ".join(nic.name for nic in nics)
