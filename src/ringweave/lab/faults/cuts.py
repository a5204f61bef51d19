"""Nodes cut off from the network, one way or both, silently: packets vanish, and nobody is told.

`in`, what the node would get: the switch's queue towards it is limited to less than a packet. `out`, what it sends: the
switch's port takes frames from known stations only, and knows none. Both leave rates and counters as they are.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ringweave.errors import UsageError, explain
from ringweave.lab import batches, tools
from ringweave.lab.layout import Layout, Port

IN, OUT, BOTH = "in", "out", "both"
WAYS = (IN, OUT, BOTH)
DEAF = (IN, BOTH)
"""Cut off so that the node gets nothing."""
_NO_PACKET_BYTES = 1


def check_way(way: str) -> None:
    """Refuse what is no direction.

    Raises:
        UsageError: It is none.
    """
    if way not in WAYS:
        raise UsageError(explain("way of a cut", got=way, expected=", ".join(WAYS), do="Say it from the node's side"))


def put(layout: Layout, node: str, way: str, lock: int) -> None:
    """Cut a node off in these ways and no other; `way` empty mends both."""
    _limit(layout, node, lock, is_deaf=way in DEAF)
    run = ["ip", "-n", layout.switch_namespace, "-batch", "-"]
    tools.run(run, lines=_doors(ports_to(layout, node), is_cut=way in (OUT, BOTH)), lock=lock)


def deafen(layout: Layout, node: str, lock: int) -> None:
    """Let a node get nothing; what it sends is left as it is."""
    _limit(layout, node, lock, is_deaf=True)


def nodes_at(layout: Layout, link: str) -> list[str]:
    """The nodes that get what is sent on a link."""
    return [node for node in layout.namespaces if any(port.link == link for port in ports_to(layout, node))]


def seen(layout: Layout, node: str) -> str:
    """How a node is cut off now: `in`, `out`, `both`, or empty."""
    ports = {port.interface for port in ports_to(layout, node)}
    doors = json.loads(tools.run(["ip", "-j", "-d", "-n", layout.switch_namespace, "link"]))
    is_in = any(
        each["dev"] in ports and each.get("options", {}).get("limit") == _NO_PACKET_BYTES for each in _queues(layout)
    )
    is_out = any(
        each["ifname"] in ports and each["linkinfo"].get("info_slave_data", {}).get("locked")
        for each in doors
        if "linkinfo" in each
    )
    return BOTH if is_in and is_out else IN if is_in else OUT if is_out else ""


def ports_to(layout: Layout, node: str) -> list[Port]:
    """The switches' ends of the node's cables."""
    return [cable.upper for cable in layout.cables if cable.lower.namespace == layout.namespaces[node]]


def _limit(layout: Layout, node: str, lock: int, *, is_deaf: bool) -> None:
    """Set the length of the queues towards a node; their rates stay what they are now."""
    rates = {each["dev"]: each["options"]["rate"] for each in _queues(layout) if "rate" in each.get("options", {})}
    ports = [replace(port, rate_bytes_per_s=rates[port.interface]) for port in ports_to(layout, node)]
    lines = batches.limit("change", ports)
    if is_deaf:
        lines = [line.rsplit(" limit ", 1)[0] + f" limit {_NO_PACKET_BYTES}b" for line in lines]
    tools.run(["tc", "-n", layout.switch_namespace, "-batch", "-"], lines=lines, lock=lock)


def _queues(layout: Layout) -> list[dict[str, Any]]:
    return json.loads(tools.run(["tc", "-j", "-n", layout.switch_namespace, "qdisc"]))


def _doors(ports: Sequence[Port], *, is_cut: bool) -> list[str]:
    how = "locked on learning off fdb_flush" if is_cut else "locked off learning on"
    return [f"link set dev {port.interface} type bridge_slave {how}" for port in ports]
