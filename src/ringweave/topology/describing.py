"""A cluster as a few lines of text that fit on a screen."""

from collections import defaultdict
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING

from ringweave import units
from ringweave.topology.rules import CORE

if TYPE_CHECKING:
    from ringweave.topology.cluster import Cluster, Node

MAX_LINES = 20


def describe(cluster: "Cluster") -> str:
    """The tree of switches, like nodes of a switch on one line; what does not fit is counted."""
    counts = f"{_counted(cluster.num_nodes, 'node')}, {_counted(cluster.num_devices, 'device')}"
    lines = [f"{cluster.name}: {counts}, latency {units.format_seconds(cluster.latency_s)}", *_tree(cluster)]
    if len(lines) > MAX_LINES:
        lines[MAX_LINES - 1 :] = [f"... and {len(lines) - MAX_LINES + 1} more lines"]
    return "\n".join(lines)


def _tree(cluster: "Cluster") -> Iterator[str]:
    nodes, switches = defaultdict(list), defaultdict(list)
    for node in cluster.nodes:
        nodes[node.switch or CORE].append(node)
    for switch in cluster.switches:
        switches[switch.parent or CORE].append(switch)
    stack = [(CORE, CORE, 0)]
    while stack:
        name, text, depth = stack.pop()
        yield "  " * depth + text
        for _, alike in groupby(nodes[name], key=lambda node: (node.nics, node.devices)):
            yield "  " * (depth + 1) + _nodes(list(alike))
        for switch in reversed(switches[name]):
            uplink = units.format_rate(switch.uplink_bytes_per_s)
            stack.append((switch.name, f"{switch.name}, uplink {uplink}", depth + 1))


def _nodes(alike: list["Node"]) -> str:
    first, last = alike[0].name, alike[-1].name
    names = first if len(alike) == 1 else f"{first} .. {last} ({len(alike)} nodes)"
    return f"{names}: {_equipment(alike[0])}"


def _equipment(node: "Node") -> str:
    """`nic 400Mbit/s, 2 x cpu, 1 x cpu at 0.5`."""
    rates = " + ".join(units.format_rate(nic.rate_bytes_per_s) for nic in node.nics[:8])
    kinds = [device.kind if device.speed == 1 else f"{device.kind} at {device.speed:g}" for device in node.devices]
    devices = [(text, len(list(alike))) for text, alike in groupby(kinds)][:8]
    return f"nic {rates}, " + ", ".join(f"{count} x {text}" for text, count in devices)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
