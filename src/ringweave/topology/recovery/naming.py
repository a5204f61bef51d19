"""The slowest part of a cluster in one line."""

import statistics
from collections.abc import Sequence

from ringweave import units
from ringweave.topology.cluster import Cluster
from ringweave.topology.recovery.trees import MeasuredLink

_SLOW = 0.75
"""What has more than this of what is usual is not called slow."""
_WORDS = {1 / 2: "half", 1 / 3: "a third", 1 / 4: "a quarter", 1 / 5: "a fifth", 1 / 8: "an eighth", 1 / 10: "a tenth"}
_NEAR = 0.08


def slow_line(cluster: Cluster, links: Sequence[MeasuredLink]) -> str | None:
    """`slow: link a2->core carries 48.1Mbit/s, a quarter of the median NIC (measured)`; None where nothing is slow.

    A NIC is held against the median NIC, an uplink against what the NICs below it carry together (as much of it as
    there is NIC on the other side); the least part of that which it should be is named. A node whose NIC is slow in
    both directions is named as a node.
    """
    nodes = {node.name for node in cluster.nodes}
    rates = {(link.src, link.dst): link.rate_bytes_per_s for link in links}
    nics = [link for link in links if nodes & {link.src, link.dst}]
    usual = statistics.median(link.rate_bytes_per_s for link in nics)
    parts = [(link.rate_bytes_per_s / _wanted(cluster, link, rates, usual, nodes), link) for link in links]
    part, worst = min(parts, key=lambda pair: pair[0])
    if part > _SLOW:
        return None
    rate = _rate_text(worst.rate_bytes_per_s)
    if not nodes & {worst.src, worst.dst}:
        return f"slow: link {worst.name} carries {rate}, {_share(part)} of what the NICs on its sides do (measured)"
    node = worst.src if worst.src in nodes else worst.dst
    back = rates[worst.dst, worst.src]
    if back <= _SLOW * usual:
        rates_text = rate if abs(back / worst.rate_bytes_per_s - 1) < _NEAR else f"{rate} ({_rate_text(back)} back)"
        return (
            f"slow: node {node} (link {worst.name}) carries {rates_text}, {_share(part)} of the median NIC (measured)"
        )
    return f"slow: link {worst.name} carries {rate}, {_share(part)} of the median NIC (measured)"


def _wanted(
    cluster: Cluster,
    link: MeasuredLink,
    rates: dict[tuple[str, str], float],
    usual: float,
    nodes: set[str],
) -> float:
    if nodes & {link.src, link.dst}:
        return usual
    is_up = cluster.ancestors(link.src)[:1] == (link.dst,)
    lower = link.src if is_up else link.dst
    sends = {node.name: rates[node.name, cluster.ancestors(node.name)[0]] for node in cluster.nodes}
    takes = {node.name: rates[cluster.ancestors(node.name)[0], node.name] for node in cluster.nodes}
    below = {node.name for node in cluster.nodes if lower in cluster.ancestors(node.name)}
    inner, outer = (sends, takes) if is_up else (takes, sends)
    return min(sum(inner[name] for name in below), sum(outer[name] for name in nodes - below))


def _share(part: float) -> str:
    nearest = min(_WORDS, key=lambda known: abs(known - part))
    return _WORDS[nearest] if abs(nearest - part) <= _NEAR * nearest else f"{part:.0%}"


def _rate_text(bytes_per_s: float) -> str:
    """Three digits: it was measured."""
    return units.format_rate(float(f"{bytes_per_s * 8:.3g}") / 8)
