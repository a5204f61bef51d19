"""The NICs of nodes that no cluster file tells of: which of them all nodes reach each other by, and at what rates."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from torch.distributed import Store

from ringweave.comm import hearing
from ringweave.comm.members import Members
from ringweave.comm.probing.findings import Findings, rate_rounded
from ringweave.errors import PeerError, explain
from ringweave.topology import Cluster, Nic, Node

_KEY = "probing/nics"
_ALIKE = 0.1
"""Shares that differ by less are one share: equal hardware shall look equal."""

Rates = Mapping[str, Mapping[str, float]]
"""Bytes per second by name of the NIC, by name of the node."""


def rates_of(cluster: Cluster) -> Rates:
    """Those of a cluster that was measured."""
    return {node.name: {nic.name: nic.rate_bytes_per_s for nic in node.nics} for node in cluster.nodes}


def settle(store: Store, group: Members, found: Findings | None, timeout: timedelta) -> Members:
    """The members of a new group, reached by the NICs that probing found good, each at its rate; all ranks call this.

    Where nothing is known of the further NICs that nodes offer, every node is reached at its first address alone:
    whether the others lead anywhere, and how fast they are, nobody has seen.

    Args:
        store: The group's.
        group: As its ranks met.
        found: On the first rank, what is known of the network; None on all others.
        timeout: How long the first rank may take.

    Raises:
        PeerError: The first rank did not come.
        DisagreementError: It said something else.
    """
    if not all(member.place.networks and member.place.more_addresses for member in group.ranks):
        return group
    if group.group_rank == 0:
        store.set(_KEY, json.dumps(rates_of(found.cluster()) if found else {}))
    try:
        store.wait([_KEY], timeout)
    except RuntimeError as cause:
        do, where = "Look into its log", f"rank {group.own.global_rank}"
        got, expected = "nothing in time", f"{group.name(0)} to say what probing found"
        raise PeerError(explain("NICs of the nodes", got=got, expected=expected, do=do, where=where)) from cause
    expected = f"rates of NICs, as {group.name(0)} found them"
    return _reached(group, hearing.read(store.get(_KEY), "NICs of the nodes", _rates_in, expected=expected))


def _rates_in(document: Any) -> Rates:
    return {str(node): {str(nic): _rate(rate) for nic, rate in rates.items()} for node, rates in document.items()}


def _rate(value: float) -> float:
    if not 0 < value < math.inf:
        raise ValueError(f"{value} is no rate")
    return float(value)


def _reached(group: Members, known: Rates) -> Members:
    """The members at the addresses of NICs that are known on every node."""
    told = [known.get(member.place.node, {}) for member in group.ranks]
    count = len(group.own.place.addresses)
    pairs = list(zip(group.ranks, told, strict=True))
    kept = [index for index in range(count) if all(member.place.nics[index] in rates for member, rates in pairs)]
    ranks = [
        member.only(kept, [rates[member.place.nics[i]] for i in kept]) if 0 in kept else member.only([0], [1.0])
        for member, rates in pairs
    ]
    return replace(group, ranks=tuple(ranks))


def put(cluster: Cluster, seen: Mapping[str, Mapping[str, float]]) -> Cluster:
    """The cluster whose nodes have the NICs that were used, each with its share of the rate of its node.

    Args:
        cluster: As recovered, with one NIC a node.
        seen: Node -> NIC -> the most bytes per second that were seen to pass it; nodes that are not in it stay.
    """
    shares = {name: _shares(list(rates.values())) for name, rates in seen.items()}
    counts = {len(each) for each in shares.values()}
    if len(counts) == 1 and shares:
        (count,) = counts
        usual = [statistics.median(each[i] for each in shares.values()) for i in range(count)]
        near = {name for name, each in shares.items() if _is_near(each, usual)}
        shares |= {name: _shares(usual) for name in near}
    return replace(cluster, nodes=tuple(_with_nics(node, seen, shares.get(node.name, [])) for node in cluster.nodes))


def _with_nics(node: Node, seen: Rates, shares: Sequence[float]) -> Node:
    if not shares:
        return node
    rates = [rate_rounded(node.rate_bytes_per_s * share) for share in shares[1:]]
    first = node.rate_bytes_per_s - sum(rates)  # so that the sum is what was measured of the node
    nics = [Nic(name=name, rate_bytes_per_s=rate) for name, rate in zip(seen[node.name], [first, *rates], strict=True)]
    return replace(node, nics=tuple(nics))


def _shares(rates: Sequence[float]) -> list[float]:
    total = sum(rates)
    return [rate / total for rate in rates]


def _is_near(shares: Sequence[float], usual: Sequence[float]) -> bool:
    return all(abs(own - each) <= _ALIKE * each for own, each in zip(shares, usual, strict=True))
