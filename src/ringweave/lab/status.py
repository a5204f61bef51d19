"""What there is of a lab now: nodes, addresses, quotas, processes, links. Looked at, then put in words."""

from collections.abc import Sequence
from typing import Any

from ringweave.lab import lab, processes, quotas
from ringweave.lab.lab import Lab
from ringweave.units import format_bytes, format_rate


def describe(name: str) -> dict[str, Any]:
    """One lab as a document for JSON.

    `bytes_on_link` and the `bytes` of each link are whole Ethernet frames; rates are in bytes per second. A lab that
    was not finished, or is being made or removed, has nothing but its name and state.
    """
    if not lab.is_up(name):
        return {"name": name, "state": "incomplete", "nodes": [], "links": [], "bytes_on_link": {}}
    found = lab.find(name)
    sent = found.bytes_on_links()
    return {
        "name": name,
        "state": "up",
        "nodes": _nodes(found),
        "links": _links(found, sent),
        "bytes_on_link": sent,
    }


def to_text(labs: Sequence[dict[str, Any]]) -> str:
    """The documents of labs for people."""
    return "\n".join(_lab_text(each) for each in labs) if labs else "no lab is up\n"


def _nodes(found: Lab) -> list[dict[str, Any]]:
    inside = found.processes()
    return [
        {
            "name": node.name,
            "switch": node.switch,
            "interfaces": found.interfaces(node.name),
            "addresses": list(found.addresses[node.name]),
            "cpus_of_devices": [quotas.in_cpus(us) for us in found.quotas[node.name]] if found.quotas else None,
            "processes": [{"pid": pid, "command": processes.command_line(pid)} for pid in inside[node.name]],
        }
        for node in found.cluster.nodes
    ]


def _links(found: Lab, sent: dict[str, int]) -> list[dict[str, Any]]:
    rates = found.rates()
    return [
        {
            "name": link.name,
            "rate_bytes_per_s": rates[link.name],
            "file_rate_bytes_per_s": link.bandwidth_bytes_per_s,
            "bytes": sent[link.name],
        }
        for link in found.cluster.links()
    ]


def _lab_text(document: dict[str, Any]) -> str:
    name = document["name"]
    if document["state"] != "up":
        return f"lab {name}: incomplete. Clear it away: ringweave lab down --lab {name}\n"
    nodes = [("node", "switch", "addresses", "CPUs of devices", "processes"), *map(_node_row, document["nodes"])]
    links = [("link", "rate", "in the file", "sent"), *map(_link_row, document["links"])]
    return "\n".join([f"lab {name}: up", "", *_table(nodes), "", *_table(links)]) + "\n"


def _node_row(node: dict[str, Any]) -> tuple[str, ...]:
    cpus = node["cpus_of_devices"]
    shares = "no quotas" if cpus is None else ", ".join(f"{each:.3g}" for each in cpus)
    programs = ", ".join(f"{each['pid']} {each['command'].split(' ')[0]}" for each in node["processes"][:4])
    more = len(node["processes"]) - 4
    return (
        node["name"],
        node["switch"] or "core",
        ", ".join(node["addresses"]),
        shares,
        programs + (f" and {more} more" if more > 0 else "") or "-",
    )


def _link_row(link: dict[str, Any]) -> tuple[str, ...]:
    now, wanted = link["rate_bytes_per_s"], link["file_rate_bytes_per_s"]
    is_same = abs(now - wanted) <= 1e-6 * wanted + 64  # tc counts in whole bytes per second, for each NIC
    return (
        link["name"],
        format_rate(wanted if is_same else now),
        "the same" if is_same else format_rate(wanted),
        format_bytes(link["bytes"]),
    )


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
