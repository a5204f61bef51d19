"""The time that no allreduce can beat on a cluster, and the links that say so."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ringweave import units
from ringweave.cost.network import Network, network
from ringweave.cost.partitions import Region, Tree, worst_region
from ringweave.topology import Cluster

_CLEARLY_LARGER = 1 + 1e-9
_MAX_NAMED = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """A lower bound and its reason."""

    seconds: float
    """No allreduce of the message takes less, whatever its schedule."""
    binding: str
    """The cut or the partition that says so, in words."""
    links: tuple[str, ...]
    """Names of the links that are the cut, or that lead out of (or into) the parts of the partition."""


def bound(
    cluster: Cluster,
    num_bytes: int,
    *,
    nodes: Sequence[str] | None = None,
    rates: Mapping[str, float] | None = None,
) -> Bound:
    """The least time of an allreduce among nodes of a cluster, at the rates of its links.

    S max(max over cuts A of 1/B+(A), max over partitions P of 2 (|P|-1) / (B+(g) added up over the parts g)), where B+
    is the smallest cut out of a set of nodes; and the same with B-, the smallest cut into it, which differs only where
    the rates of the two directions differ (an allreduce run backwards is an allreduce).

    It ignores latency, what happens inside a node, and that TCP delivers less than the rate of a link: pass measured
    rates for an honest comparison. It holds for networks that forward and do not reduce.

    Args:
        cluster: The machines.
        num_bytes: Size of the message, S.
        nodes: Names of the nodes that take part; all by default.
        rates: Measured bytes per second by directed link name (`a0->r0`), in place of the cluster's.

    Raises:
        ClusterError: A node or a link is not in the cluster, or a rate is not positive.

    Cost:
        10,000 nodes take a few tenths of a second.

    Source:
        For equal links Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations"
        (2009). In general: a set of nodes has to let out its sum and let in the others' (S each), and among |P| parts
        each byte takes |P|-1 messages to be summed and |P|-1 to be spread.
    """
    return network_bound(network(cluster, nodes, rates), num_bytes)


def network_bound(net: Network, num_bytes: int) -> Bound:
    """The bound of a network that is there already."""
    if len(net) == 1:
        text = f"none: all ranks are on node {net.names[0]}, so that no link is passed"
        return Bound(seconds=0.0, binding=text, links=())
    largest = _cut(net)
    for found in _partitions(net):
        if found.s_per_byte > largest.s_per_byte * _CLEARLY_LARGER:
            largest = found
    return Bound(seconds=num_bytes * largest.s_per_byte, binding=largest.text, links=largest.links)


@dataclass(frozen=True, slots=True)
class _Found:
    s_per_byte: float
    text: str
    links: tuple[str, ...]


def _cut(net: Network) -> _Found:
    """The slowest single link: on a tree it is the smallest cut, as every link separates nodes of the group."""
    vertex = 1 + int(np.minimum(net.up_bytes_per_s, net.down_bytes_per_s)[1:].argmin())
    up, down = float(net.up_bytes_per_s[vertex]), float(net.down_bytes_per_s[vertex])
    link = net.up_name(vertex) if up <= down else net.down_name(vertex)
    way = "leaves" if up <= down else "enters"
    rate = min(up, down)
    text = f"cut: all that {way} {_named(net.nodes_below(vertex))} passes {link} ({units.show_rate(rate)})"
    return _Found(1 / rate, text, (link,))


def _partitions(net: Network) -> Iterator[_Found]:
    tree = Tree(net.parents.tolist(), net.up_bytes_per_s.tolist(), net.down_bytes_per_s.tolist(), net.is_node.tolist())
    yield _described(net, worst_region(tree), "leave")
    if tree.up != tree.down:
        yield _described(net, worst_region(tree.turned()), "enter")


def _described(net: Network, region: Region, way: str) -> _Found:
    parts = [net.nodes_below(vertex) for vertex in region.tops_of_parts]
    away, towards = (net.up_name, net.down_name) if way == "leave" else (net.down_name, net.up_name)
    links = [away(vertex) for vertex in region.tops_of_parts]
    if region.top:
        below = set(net.nodes_below(region.top))
        parts.append(tuple(name for name in net.nodes_below(0) if name not in below))
        links.append(towards(region.top))
    count = region.num_parts
    shown = "; ".join(map(_named, parts[:_MAX_NAMED]))
    more = f"; and {count - _MAX_NAMED} more" if count > _MAX_NAMED else ""
    text = (
        f"partition into {count} parts ({shown}{more}): the message {2 * (count - 1)} times has to {way} them, at "
        f"{units.show_rate(region.into_bytes_per_s)} together"
    )
    return _Found(region.ratio, text, tuple(links))


def _named(names: tuple[str, ...]) -> str:
    if len(names) <= _MAX_NAMED:
        return ", ".join(names)
    return f"{names[0]} .. {names[-1]} ({len(names)} nodes)"
