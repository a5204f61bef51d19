"""A lab that is up: run commands in its nodes, read link counters, change rates, cut nodes off, report status.

A cut is silent: packets vanish and no program gets an error. An inbound cut limits the switch's queue towards the node
to less than one packet. An outbound cut locks the switch's port, so that it drops every frame of the node. Neither
changes link rates or counters.
"""

import json
import os
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ringweave import topology
from ringweave.environment import CPU_QUOTA
from ringweave.errors import ClusterError, LabError, UsageError, explain
from ringweave.files.problems import shorten_names, suggest_closest
from ringweave.lab import bring_up, cpu_quotas, lab_layout, lab_state, tools
from ringweave.lab.bring_up import ProgressCallback
from ringweave.lab.cpu_quotas import CgroupHierarchy, CpuQuotas, QuotaMode
from ringweave.lab.lab_layout import CablePort, LabLayout, NodeAddresses
from ringweave.topology import Cluster
from ringweave.units import format_bytes, format_rate

IN, OUT, BOTH = "in", "out", "both"
CUT_DIRECTIONS = (IN, OUT, BOTH)
INBOUND_CUTS = (IN, BOTH)
"""Directions in which the node receives nothing."""
_NO_PACKET_BYTES = 1


def check_direction(direction: str) -> None:
    """Refuse an unknown direction of a cut.

    Raises:
        UsageError: The direction is not `in`, `out` or `both`.
    """
    if direction not in CUT_DIRECTIONS:
        raise UsageError(
            "way of a cut", got=direction, expected=", ".join(CUT_DIRECTIONS), do="Say it from the node's side"
        )


def set_cut(layout: LabLayout, node: str, direction: str, lock: int) -> None:
    """Cut a node off in exactly this direction; an empty `direction` reconnects it."""
    _set_queue_limits(layout, node, lock, is_inbound_cut=direction in INBOUND_CUTS)
    run = ["ip", "-n", layout.switch_namespace, "-batch", "-"]
    tools.run_tool(
        run, lines=_port_lock_commands(ports_towards(layout, node), is_cut=direction in (OUT, BOTH)), lock=lock
    )


def cut_inbound(layout: LabLayout, node: str, lock: int) -> None:
    """Stop a node's inbound traffic; its outbound traffic is not changed."""
    _set_queue_limits(layout, node, lock, is_inbound_cut=True)


def nodes_behind_link(layout: LabLayout, link: str) -> list[str]:
    """Return the nodes that receive the traffic of a link."""
    return [node for node in layout.namespaces if any(port.link == link for port in ports_towards(layout, node))]


def current_cut(layout: LabLayout, node: str) -> str:
    """Return the direction in which a node is cut off: `in`, `out`, `both`, or empty."""
    ports = {port.interface for port in ports_towards(layout, node)}
    bridge_ports = json.loads(tools.run_tool(["ip", "-j", "-d", "-n", layout.switch_namespace, "link"]))
    is_in = any(
        each["dev"] in ports and each.get("options", {}).get("limit") == _NO_PACKET_BYTES for each in _queues(layout)
    )
    is_out = any(
        each["ifname"] in ports and each["linkinfo"].get("info_slave_data", {}).get("locked")
        for each in bridge_ports
        if "linkinfo" in each
    )
    return BOTH if is_in and is_out else IN if is_in else OUT if is_out else ""


def ports_towards(layout: LabLayout, node: str) -> list[CablePort]:
    """Return the switches' ends of the node's cables."""
    return [cable.upper for cable in layout.cables if cable.lower.namespace == layout.namespaces[node]]


def _set_queue_limits(layout: LabLayout, node: str, lock: int, *, is_inbound_cut: bool) -> None:
    """Set the length of the queues towards a node; their present rates stay."""
    rates = {each["dev"]: each["options"]["rate"] for each in _queues(layout) if "rate" in each.get("options", {})}
    ports = [replace(port, rate_bytes_per_s=rates[port.interface]) for port in ports_towards(layout, node)]
    lines = bring_up.rate_limit_commands("change", ports)
    if is_inbound_cut:
        lines = [line.rsplit(" limit ", 1)[0] + f" limit {_NO_PACKET_BYTES}b" for line in lines]
    tools.run_tool(["tc", "-n", layout.switch_namespace, "-batch", "-"], lines=lines, lock=lock)


def _queues(layout: LabLayout) -> list[dict[str, Any]]:
    return json.loads(tools.run_tool(["tc", "-j", "-n", layout.switch_namespace, "qdisc"]))


def _port_lock_commands(ports: Sequence[CablePort], *, is_cut: bool) -> list[str]:
    options = "locked on learning off fdb_flush" if is_cut else "locked off learning on"
    return [f"link set dev {port.interface} type bridge_slave {options}" for port in ports]


@dataclass(frozen=True, kw_only=True, slots=True)
class Lab:
    """A cluster that is up on this machine."""

    layout: LabLayout
    quotas: CpuQuotas | None
    """CPU quota of each device in microseconds of each 40 ms; None if there are none."""
    hierarchy: CgroupHierarchy | None = None
    """Place of the control groups; None where there are no quotas, or a duty cycle stands in for control groups."""

    @property
    def name(self) -> str:
        return self.layout.name

    @property
    def cluster(self) -> Cluster:
        """The cluster, every node with its address; the rates are those of its file."""
        return self.layout.cluster

    @property
    def addresses(self) -> NodeAddresses:
        """Node -> address of each NIC."""
        return self.layout.addresses

    def interfaces(self, node: str) -> list[str]:
        """Return the names of the node's interfaces, in the order of its NICs."""
        return self.layout.interfaces(self.cluster.node(node).name)

    def command(self, node: str, argv: Sequence[str], device: int | None = None) -> list[str]:
        """Return the command line that runs a command in a node, for subprocess, from anywhere on this machine.

        Each program of the chain replaces itself by the next, so the started process becomes the command: its id, exit
        status, signals, standard streams, environment and current directory are the command's own.

        Args:
            node: Name of the node.
            argv: The command and its arguments; found by PATH as usual. If it is not there, the exit code is 127.
            device: Index of the node's device whose CPU quota applies, if there are quotas; None: no quota.

        Raises:
            ClusterError: There is no such node.
            PlacementError: The node has no such device.
        """
        place = self.cluster.node(node)
        join = ""
        if device is not None:
            topology.device_of_local_rank(place, device)
            group = self.control_group(node, device)
            told = [f"export {name}={value} && " for name, value in self.quota_environ(node, device).items()]
            join = f"echo $$ > {shlex.quote(group + '/cgroup.procs')} && " if group else "".join(told)
        files = [f"--{kind}={path}" for kind, path in self.namespace_files(node, device).items()]
        enter = shlex.join(
            [
                tools.find_program("nsenter") or "nsenter",
                *files,
                "--",
                "/bin/sh",
                "-c",
                tools.RUN_IN_FOLDER_SCRIPT,
                "rw-enter",
            ]
        )
        return ["/bin/sh", "-c", f'{join}exec {enter} "$(pwd -P)" "$@"', "rw-enter", *argv]

    def quota_environ(self, node: str, device: int) -> dict[str, str]:
        """Return the variable that tells a process its CPU quota; empty where a control group does, or without one."""
        if self.quota_kind != cpu_quotas.DUTY_CYCLE:
            return {}
        quota_us = lab_state.read_duty_cycle(self.name, node, device)
        return {CPU_QUOTA: f"{cpu_quotas.quota_in_cpus(quota_us):g}"}

    def namespace_files(self, node: str, device: int | None = None) -> dict[str, Path]:
        """Return the files of a node's namespaces, by nsenter's names, in the order in which they are entered.

        A device with a duty cycle has a namespace of host names of its own.
        """
        folder = lab_state.namespace_folder(self.name)
        has_own = device is not None and self.quota_kind == cpu_quotas.DUTY_CYCLE
        host_name = lab_state.device_file_name(node, device) if device is not None and has_own else node
        return {
            "net": lab_state.NETNS_FOLDER / self.layout.namespaces[node],
            "uts": folder / f"{host_name}.uts",
            "mount": folder / f"{node}.mnt",
        }

    @property
    def probe_results_folder(self) -> Path:
        """Folder in which jobs in the lab keep their measurements of its network."""
        return lab_state.probe_results_folder(self.name)

    def control_group(self, node: str, device: int) -> str | None:
        """Return the folder of a device's control group; None if the lab has no quotas, or a duty cycle for them."""
        return str(self.hierarchy.device_folder(self.name, node, device)) if self.hierarchy else None

    @property
    def quota_kind(self) -> str | None:
        """Kind of limit of CPU time: `cgroup v1`, `cgroup v2`, or the stand-in `duty cycle`; None without quotas."""
        if self.quotas is None:
            return None
        return self.hierarchy.kind if self.hierarchy else cpu_quotas.DUTY_CYCLE

    def set_quota(self, node: str, device: int, quota_us: int) -> None:
        """Change a device's CPU quota while programs run on it.

        `quota_us`: microseconds of each 40 ms, at least 1000.

        Raises:
            ClusterError: There is no such node.
            PlacementError: The node has no such device.
            LabError: The lab has no quotas, or the kernel refuses.
        """
        topology.device_of_local_rank(self.cluster.node(node), device)
        if self.quotas is None:
            raise LabError(f"CPU quotas of lab {self.name}: none, expected some. Bring it up with --quotas always.")
        if self.hierarchy is not None:
            cpu_quotas.change_quota(self.hierarchy.device_folder(self.name, node, device), quota_us, self.hierarchy)
        else:
            lab_state.write_duty_cycle(self.name, node, device, quota_us)

    def bytes_on_links(self) -> dict[str, int]:
        """Return link -> bytes sent since the lab is up: whole Ethernet frames, about 5 % more than their content."""
        return {link: sum(entry["bytes"] for entry in entries) for link, entries in self._queue_statistics().items()}

    def rates(self) -> dict[str, float]:
        """Return link -> its present rate in bytes per second; with several NICs their sum."""
        return {
            link: float(sum(entry["options"]["rate"] for entry in entries))
            for link, entries in self._queue_statistics().items()
        }

    def rate(self, link: str) -> float:
        """Return the present rate of a link in bytes per second.

        Raises:
            ClusterError: There is no such link.
        """
        self._check_link(link)
        return self.rates()[link]

    def set_rate(self, link: str, rate_bytes_per_s: float) -> None:
        """Change a link's rate while it is in use: queued packets stay and nothing is lost.

        One direction only; several NICs of a node keep the proportions of the cluster file. Jobs' measurements of the
        lab's network are deleted.

        Raises:
            ClusterError: There is no such link, or the lab cannot limit a link to this rate.
            LabError: The lab is gone.
        """
        self._check_link(link)
        lab_layout.check_link_rate(f"rate of link {link}", rate_bytes_per_s)
        ports = self.layout.ports(link)
        scale = rate_bytes_per_s / sum(port.rate_bytes_per_s for port in ports)
        changed = [replace(port, rate_bytes_per_s=port.rate_bytes_per_s * scale) for port in ports]
        with lab_state.hold_lock(self.name) as lock:
            inbound_cut_nodes = [
                node for node in nodes_behind_link(self.layout, link) if current_cut(self.layout, node) in INBOUND_CUTS
            ]
            bring_up.limit_ports("change", changed, lock)
            lab_state.remove_probe_results(self.name)
            for node in inbound_cut_nodes:
                cut_inbound(self.layout, node, lock)

    def cut(self, node: str, direction: str = BOTH) -> None:
        """Cut a node off from the network silently, as when a switch fails: packets vanish without errors.

        `direction`: `in`: the node receives nothing. `out`: nothing that it sends arrives. `both`. It replaces an
        earlier cut of the node.

        Raises:
            ClusterError: There is no such node.
            UsageError: There is no such direction.
            LabError: The lab is gone, or the kernel does not support it.
        """
        check_direction(direction)
        name = self.cluster.node(node).name
        with lab_state.hold_lock(self.name) as lock:
            set_cut(self.layout, name, direction, lock)

    def reconnect(self, node: str) -> None:
        """Reconnect a node; a node that is not cut off stays as it is.

        Raises:
            ClusterError: There is no such node.
            LabError: The lab is gone.
        """
        name = self.cluster.node(node).name
        with lab_state.hold_lock(self.name) as lock:
            if current_cut(self.layout, name):
                set_cut(self.layout, name, "", lock)

    def current_cut(self, node: str) -> str:
        """Return the direction in which a node is cut off: `in`, `out`, `both`, or empty.

        Raises:
            ClusterError: There is no such node.
        """
        return current_cut(self.layout, self.cluster.node(node).name)

    def processes(self) -> dict[str, list[int]]:
        """Return node -> ids of the processes that run in it."""
        return {
            node: lab_state.pids_inside(
                lab_state.identify_namespaces(
                    [
                        lab_state.NETNS_FOLDER / namespace,
                        *(lab_state.namespace_folder(self.name) / f"{node}.{kind}" for kind in ("uts", "mnt")),
                    ]
                )
            )
            for node, namespace in self.layout.namespaces.items()
        }

    def _queue_statistics(self) -> dict[str, list[dict[str, Any]]]:
        """Return link -> tc's statistics of the limit of each of its ports."""
        queues = _read_queues({port.namespace for port in self.layout.ports()})
        links: dict[str, list[dict[str, Any]]] = {link.name: [] for link in self.cluster.links()}
        for port in self.layout.ports():
            queue = queues.get((port.namespace, port.interface))
            if queue is None:  # it goes down: the kernel removes both ends of a cable with either namespace
                raise _not_readable(f"no limit of rate at {port.interface}", port.namespace)
            links[port.link].append(queue)
        return links

    def _check_link(self, link: str) -> None:
        names = [each.name for each in self.cluster.links()]
        if link not in names:
            raise ClusterError(
                f"link of lab {self.name}",
                got=link,
                expected=f"one of {shorten_names(names, len(names))}",
                do=suggest_closest(link, names) or "See ringweave lab status",
            )


def up(
    cluster: Cluster,
    name: str | None = None,
    quotas: QuotaMode = "auto",
    progress: ProgressCallback = lambda what: None,
) -> Lab:
    """Bring a cluster up on this machine.

    Args:
        cluster: The cluster.
        name: Name of the lab; None takes that of the cluster.
        quotas: CPU quotas by the devices' speeds; `auto`: only if the speeds differ.
        progress: Called with a text before each part is made.

    Raises:
        UsageError: The cluster cannot be a lab, or the name is not allowed.
        LabError: This machine does not support it, or a lab of that name is up. Nothing of it is left.
    """
    name = cluster.name if name is None else name
    bring_up.check_lab_name(name)
    bring_up.make_lab(cluster, name, quotas, progress)
    return find(name)


def find(name: str) -> Lab:
    """Return the lab of that name.

    Raises:
        UsageError: No lab of that name is up.
    """
    lab_state.refuse_inside_node()
    tools.require_root()
    record = lab_state.read_record(name)
    if not bring_up.is_record_up(record):
        raise UsageError(_not_up_text(name))
    assert record is not None
    layout = lab_layout.plan_layout(topology.loads(record.cluster_text), name)
    return Lab(layout=layout, quotas=record.quotas, hierarchy=record.hierarchy)


def names() -> list[str]:
    """Return the names of all labs of this user, including incomplete ones; none outside of the user's namespaces.

    Raises:
        UsageError: This process is in a node of a lab.
    """
    lab_state.refuse_inside_node()
    return lab_state.lab_names() if os.geteuid() == 0 else []


def is_up(name: str) -> bool:
    """True if a lab is complete; False while it is made or removed, or if that was interrupted."""
    return bring_up.is_record_up(lab_state.read_record(name))


def down(name: str) -> bool:
    """Take a lab down, complete or not; processes in it get SIGTERM, and SIGKILL two seconds later.

    Returns:
        True if there was anything to remove.

    Raises:
        LabError: A part of it could not be removed.
    """
    return bring_up.remove_lab(name)


def _read_queues(namespaces: set[str]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return (namespace, interface) -> tc's description of its queue; all namespaces are read at once."""
    tc = tools.find_program("tc") or "tc"
    running = {
        name: subprocess.Popen([tc, "-s", "-j", "-n", name, "qdisc"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for name in sorted(namespaces)
    }
    queues = {}
    outputs = {name: process.communicate() for name, process in running.items()}
    for name, process in running.items():
        output, error_output = outputs[name]
        if process.returncode != 0:
            raise _not_readable(" ".join(error_output.decode(errors="replace").split()), name)
        queues |= {(name, entry["dev"]): entry for entry in json.loads(output) if entry.get("root")}
    return queues


def _not_readable(got: str, where: str) -> LabError:
    do = "Look for it: ringweave lab status"
    return LabError("links of the lab", got=got, expected="a lab that is still up", do=do, where=where)


def _not_up_text(name: str) -> str:
    there = [each for each in lab_state.lab_names() if is_up(each)]
    return explain(
        "lab",
        got=name,
        expected=f"one that is up ({shorten_names(there, len(there))})" if there else "one that is up (none is)",
        do=suggest_closest(name, there) or "Bring it up first: ringweave lab up CLUSTER",
    )


def lab_document(name: str) -> dict[str, Any]:
    """Describe one lab as a JSON document.

    `bytes_on_link` and the `bytes` of each link are whole Ethernet frames; rates are in bytes per second. An incomplete
    lab, or one that is being made or removed, has only its name and state.
    """
    if is_up(name):
        try:
            return _up_document(name)
        except (UsageError, LabError):
            if is_up(name):
                raise
    return {"name": name, "state": "incomplete", "nodes": [], "links": [], "bytes_on_link": {}}


def _up_document(name: str) -> dict[str, Any]:
    found = find(name)
    sent = found.bytes_on_links()
    return {
        "name": name,
        "state": "up",
        "quotas": found.quota_kind,
        "nodes": _node_documents(found),
        "links": _link_documents(found, sent),
        "bytes_on_link": sent,
    }


def labs_text(labs: Sequence[dict[str, Any]]) -> str:
    """Return the text of the labs' documents for people."""
    return "\n".join(_lab_text(each) for each in labs) if labs else "no lab is up\n"


def _node_documents(found: Lab) -> list[dict[str, Any]]:
    inside = found.processes()
    return [
        {
            "name": node.name,
            "switch": node.switch,
            "interfaces": found.interfaces(node.name),
            "addresses": list(found.addresses[node.name]),
            "cpus_of_devices": [cpu_quotas.quota_in_cpus(us) for us in found.quotas[node.name]]
            if found.quotas
            else None,
            "processes": [{"pid": pid, "command": lab_state.command_line(pid)} for pid in inside[node.name]],
        }
        for node in found.cluster.nodes
    ]


def _link_documents(found: Lab, sent: dict[str, int]) -> list[dict[str, Any]]:
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
    is_stand_in = document["quotas"] == cpu_quotas.DUTY_CYCLE
    head = f"lab {name}: up" + (f"; {cpu_quotas.DUTY_CYCLE_NOTE}" if is_stand_in else "")
    return "\n".join([head, "", *_table_lines(nodes), "", *_table_lines(links)]) + "\n"


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


def _table_lines(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
