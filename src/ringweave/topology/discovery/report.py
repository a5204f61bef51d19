"""Report of a discovered machine and its leader, as text and as a JSON document."""

from collections.abc import Sequence
from typing import Any

from ringweave import units
from ringweave.topology.discovery import leader_choice
from ringweave.topology.discovery.leader_choice import LeaderChoice
from ringweave.topology.discovery.machine import ComputeDevice, Machine, NetworkInterface, NvLinks

_MAX_COLUMNS = 12


def describe_machine(machine: Machine, leadership: LeaderChoice) -> str:
    """Return the machine's tree, the hops from each device to each NIC, the choice and its reasons."""
    blocks = [
        [f"{machine.name}, according to {machine.source}", "", *_machine_tree_lines(machine)],
        _hops_table(machine, leadership),
        _choice_lines(machine, leadership),
        [f"note     {remark}" for remark in machine.remarks],
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def machine_document(machine: Machine, leadership: LeaderChoice) -> dict[str, Any]:
    """Return the same as plain data for JSON."""
    used = None if leadership.interface is None else machine.interfaces[leadership.interface]
    return {
        "name": machine.name,
        "source": machine.source,
        "devices": [_device_document(machine, worker) for worker in machine.workers],
        "nics": [_interface_document(machine, nic) for nic in machine.interfaces if not nic.is_unclassified],
        "hops": [
            {"device": worker.name, "nic": nic.name, "hops": way and way.num_hops, "class": way and way.path_class}
            for worker in machine.workers
            for nic in machine.interfaces
            if not nic.is_unclassified or nic is used
            for way in (leader_choice.device_path(machine, worker, nic),)
        ],
        "nic": used and used.name,
        "nic_reason": leadership.interface_reason,
        "leader": machine.workers[leadership.leader].name,
        "leader_index": leadership.leader,
        "leader_reason": leadership.leader_reason,
        "rdma": bool(used and used.has_rdma),
        "rdma_reason": rdma_text(used),
        "tree": [
            {"kind": part.kind, "name": part.name, "parent": None if part.parent < 0 else part.parent}
            for part in machine.parts
        ],
        "remarks": list(machine.remarks),
    }


def rdma_text(used: NetworkInterface | None) -> str:
    """Return a sentence that says whether traffic between nodes can use RDMA, and the consequence."""
    if used is None:
        return "not known, as there is no NIC to use"
    if used.has_rdma:
        return (
            f"present on {used.name}: NCCL takes it for CUDA tensors by itself; CPU tensors go by TCP over its address"
        )
    return f"absent on {used.name}: all traffic between nodes goes by TCP through the kernel"


def _machine_tree_lines(machine: Machine) -> list[str]:
    users: dict[int | None, list[str]] = {}
    for worker in machine.workers:
        users.setdefault(worker.part, []).append(_device_text(worker))
    for nic in machine.interfaces:
        for part_index in nic.all_parts or (None,):
            users.setdefault(part_index, []).append(_interface_text(nic))
    below: dict[int, list[int]] = {}
    for index, part in enumerate(machine.parts):
        below.setdefault(part.parent, []).append(index)
    lines, waiting = [], [(0, 0)]
    while waiting:
        part_index, depth = waiting.pop()
        part = machine.parts[part_index]
        label = part.name if part.kind != "machine" else f"machine {part.name}"
        numas = ", ".join(f"NUMA {numa}" for numa in part.numas if f"NUMA {numa}" != part.name)
        attached = "; ".join(users.get(part_index, []))
        lines.append("  " * depth + label + (f" ({numas})" if numas else "") + (f"  {attached}" if attached else ""))
        waiting.extend((child, depth + 1) for child in reversed(below.get(part_index, [])))
    return lines + [f"not in the tree: {words}" for words in users.get(None, [])]


def _hops_table(machine: Machine, leadership: LeaderChoice) -> list[str]:
    """Return the table of devices by NICs; the interface in use and the leader are marked."""
    shown = [index for index, nic in enumerate(machine.interfaces) if not nic.is_unclassified and nic.part is not None]
    if leadership.interface is not None and leadership.interface not in shown:
        shown.insert(0, leadership.interface)
    if not shown:
        return []
    more = len(shown) - _MAX_COLUMNS
    head = ["", *(f"{'* ' * (i == leadership.interface)}{machine.interfaces[i].name}" for i in shown[:_MAX_COLUMNS])]
    rows = [head]
    for index, worker in enumerate(machine.workers):
        mark = "* " if index == leadership.leader else "  "
        ways = [leader_choice.device_path(machine, worker, machine.interfaces[i]) for i in shown[:_MAX_COLUMNS]]
        rows.append([mark + worker.name, *(f"{way.num_hops} {way.path_class}" if way else "?" for way in ways)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    kinds = {cell.partition(" ")[2] for row in rows[1:] for cell in row[1:]}
    legend = [f"{kind}: {meaning}" for kind, meaning in leader_choice.PATH_CLASS_MEANINGS.items() if kind in kinds]
    return [
        "hops from each device to each NIC: edges of the tree, and the class of the way (* used, * leader)",
        *lines,
        *([f"... and {more} more NICs"] if more > 0 else []),
        *legend,
    ]


def _choice_lines(machine: Machine, leadership: LeaderChoice) -> list[str]:
    used = None if leadership.interface is None else machine.interfaces[leadership.interface]
    return [
        f"nic      {leadership.interface_reason}",
        f"leader   {leadership.leader_reason}",
        f"rdma     {rdma_text(used)}",
    ]


def _device_text(worker: ComputeDevice) -> str:
    if worker.kind == "cpu":
        return "processors of one worker"
    direct = {True: "GPUDirect RDMA", False: "no GPUDirect RDMA", None: ""}[worker.has_gpudirect]
    return ", ".join(filter(None, (worker.name, worker.model, _nvlink_text(worker.nvlinks), direct)))


def _nvlink_text(nvlinks: NvLinks | None) -> str:
    if nvlinks is None:
        return ""
    count = f"{nvlinks.num_links} NVLinks" if nvlinks.num_links is not None else "NVLink"
    rate = f" of {units.format_rate(nvlinks.bytes_per_s)} in all" if nvlinks.bytes_per_s else ""
    return f"{count}{rate} to {_count_peers(nvlinks.peers)}" if nvlinks.peers else f"{count}{rate}"


def _count_peers(peers: Sequence[str]) -> str:
    return ", ".join(
        f"{peers.count(peer)} x {peer}" if peers.count(peer) > 1 else peer for peer in dict.fromkeys(peers)
    )


def _interface_text(nic: NetworkInterface) -> str:
    if nic.is_unclassified:
        return "unknown device"
    state = {True: "up", False: "down", None: ""}[nic.is_up]
    fabric = "InfiniBand" if nic.is_infiniband else "RDMA" if nic.has_rdma else ""
    rate = units.format_rate(nic.rate_bytes_per_s) if nic.rate_bytes_per_s else "rate not known"
    verbs = nic.verbs if nic.verbs != nic.name else ""
    name = nic.name if not nic.is_virtual else f"{nic.name} (virtual)"
    of = f"of {', '.join(nic.members)}" if nic.members else ""
    return ", ".join(filter(None, (name, of, verbs, fabric, state, rate, *nic.addresses)))


def _device_document(machine: Machine, worker: ComputeDevice) -> dict[str, Any]:
    return {
        "name": worker.name,
        "kind": worker.kind,
        "model": worker.model or None,
        "bus": worker.bus or None,
        "numa": machine.numa_of(worker.part),
        "gpudirect": worker.has_gpudirect,
        "nvlink": worker.nvlinks
        and {
            "links": worker.nvlinks.num_links,
            "rate": worker.nvlinks.bytes_per_s and units.format_rate(worker.nvlinks.bytes_per_s),
            "peers": list(worker.nvlinks.peers),
        },
    }


def _interface_document(machine: Machine, nic: NetworkInterface) -> dict[str, Any]:
    return {
        "name": nic.name,
        "bus": nic.bus or None,
        "rdma_device": nic.verbs or None,
        "rdma": nic.has_rdma,
        "infiniband": nic.is_infiniband,
        "virtual": nic.is_virtual,
        "members": list(nic.members),
        "up": nic.is_up,
        "rate": nic.rate_bytes_per_s and units.format_rate(nic.rate_bytes_per_s),
        "numa": machine.numa_of(*nic.all_parts),
        "addresses": list(nic.addresses),
    }
