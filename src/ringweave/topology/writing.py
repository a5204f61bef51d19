"""The cluster file written: `Cluster` in, YAML out; reading the text gives an equal cluster."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ruamel.yaml.comments import CommentedMap, CommentedSeq

from ringweave import units
from ringweave.files import yaml_text
from ringweave.topology.building import SHORT_FORM_NIC
from ringweave.topology.cluster import Cluster, Device, Nic, Node, Switch


def dumps(cluster: Cluster) -> str:
    """The cluster file of a cluster: short forms and `count` where they say the same, so `loads(dumps(c)) == c`."""
    content: dict[str, Any] = {"name": cluster.name}
    content["nodes"] = [_node(node, count) for node, count in _groups(cluster.nodes)]
    if cluster.switches:
        content["switches"] = [_switch(switch) for switch in cluster.switches]
    content["latency"] = units.format_seconds(cluster.latency_s)
    return yaml_text.dumps(content)


def _groups(nodes: tuple[Node, ...]) -> Iterator[tuple[Node, int]]:
    """Each node with 1, but the first of a run that `count` can write with the run's length."""
    start = 0
    while start < len(nodes):
        length = _run_length(nodes, start)
        yield nodes[start], length
        start += length


def _run_length(nodes: tuple[Node, ...], start: int) -> int:
    first = nodes[start]
    stem = first.name.removesuffix("-0")
    if stem == first.name or first.address is not None:
        return 1
    length = 1
    while start + length < len(nodes):
        node = nodes[start + length]
        if node.name != f"{stem}-{length}" or replace(node, name=first.name) != first:
            break
        length += 1
    return length


def _node(node: Node, count: int) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": node.name if count == 1 else node.name.removesuffix("-0")}
    entry |= _given(switch=node.switch, address=node.address)
    rates = [nic.rate_bytes_per_s for nic in node.nics]
    if node.nics == (Nic(name=SHORT_FORM_NIC, rate_bytes_per_s=rates[0]),):
        entry["nic"] = units.format_rate(rates[0])
    else:
        entry["nics"] = _on_one_line(_nic(nic) for nic in node.nics)
    is_usual = all(device == Device() for device in node.devices)
    entry["devices"] = len(node.devices) if is_usual else _on_one_line(_device(device) for device in node.devices)
    if count > 1:
        entry["count"] = count
    return entry


def _nic(nic: Nic) -> dict[str, Any]:
    return {"name": nic.name, "rate": units.format_rate(nic.rate_bytes_per_s)} | _given(
        numa=nic.numa, rdma=nic.rdma or None, nearest=list(nic.nearest) or None
    )


def _device(device: Device) -> dict[str, Any]:
    speed = None if device.speed == 1 else device.speed
    return {"kind": device.kind} | _given(speed=speed, numa=device.numa)


def _switch(switch: Switch) -> CommentedMap:
    entry = CommentedMap(
        {"name": switch.name, "uplink": units.format_rate(switch.uplink_bytes_per_s)} | _given(parent=switch.parent)
    )
    entry.fa.set_flow_style()
    return entry


def _given(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _on_one_line(entries: Iterator[dict[str, Any]]) -> CommentedSeq:
    items = CommentedSeq(entries)
    items.fa.set_flow_style()
    return items
