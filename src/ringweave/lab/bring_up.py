"""Creation and removal of labs. A run that was interrupted, even by kill -9, is cleaned up by the next one."""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from ringweave import topology
from ringweave.errors import LabError, UsageError
from ringweave.lab import cpu_quotas, lab_layout, lab_state, tools
from ringweave.lab.cpu_quotas import CpuQuotas, QuotaMode
from ringweave.lab.lab_layout import NAME_PREFIX, CablePort, LabLayout
from ringweave.lab.lab_state import LabRecord
from ringweave.topology import Cluster, cluster

MIN_BURST_BYTES = 80 * 1024
"""Smallest bucket. TCP hands down segments of 64 KiB plus the headers of their packets; a smaller bucket would split
them."""
BURST_S = 1e-3
"""Time that the bucket lasts at high rates; the timer that refills it may be late by a good part of this."""
MIN_QUEUE_BYTES = 2**20
FIRST_ROUTING_TABLE = 101
"""Routing table of a node's first NIC, where it has several."""

SYSCTL_SCRIPT = """
for conf in /proc/sys/net/ipv6/conf/all /proc/sys/net/ipv6/conf/default; do
    if [ -e "$conf" ]; then echo 1 > "$conf/disable_ipv6"; fi
done
for conf in /proc/sys/net/ipv4/conf/all /proc/sys/net/ipv4/conf/default; do
    echo 1 > "$conf/arp_ignore"
    echo 2 > "$conf/arp_announce"
    echo 0 > "$conf/rp_filter"
done
"""
"""Turns off IPv6's own traffic; each address is answered for, and used as source, only by its own interface."""

NODE_SETUP_SCRIPT = f"""set -e
name=$1 hosts=$2 home=$3 netns=$4
hide() {{
    for attempt in 1 2 3 4 5 6 7 8 9; do
        if ! mountpoint -q "$1"; then return 0; fi
        if umount -l -R "$1" 2>/dev/null; then return 0; fi
    done
    umount -l -R "$1"
}}
hostname "$name"
{SYSCTL_SCRIPT}
if [ -e /etc/hosts ]; then mount --bind "$hosts" /etc/hosts; fi
mount -t tmpfs -o mode=1777,nosuid,nodev rw-shm /dev/shm
mount -t sysfs -o nosuid,nodev,noexec rw-sys "$home/sys"
if [ -d "$home/sys/fs/cgroup" ]; then mount --rbind /sys/fs/cgroup "$home/sys/fs/cgroup"; fi
mount --move "$home/sys" /sys
hide "$netns"
mount -t tmpfs -o mode=0755,size=64k rw-none "$netns"
for mounted in "$home"/labs/*/ns; do hide "$mounted"; done
mount -t tmpfs -o mode=0755,size=64k rw-inside "$home"
echo "$name" > "$home/inside"
"""
"""Shell script run in the namespaces of a new node. It sets the host name, a private /dev/shm, and a /sys with the
node's own interfaces. It unmounts the folders of labs, so that no node keeps the namespaces of another alive. If a
mount of another lab vanishes meanwhile, it looks again."""


def namespace_commands(layout: LabLayout) -> list[str]:
    """Return the `ip` commands that create all network namespaces."""
    return [f"netns add {name}" for name in (layout.switch_namespace, *layout.namespaces.values())]


def switch_commands(layout: LabLayout) -> list[str]:
    """Return the `ip` commands for the switches' namespace: bridges, and cables with their lower ends in the nodes."""
    lines = ["link set dev lo up"]
    for bridge in layout.bridges.values():
        lines += [
            f"link add name {bridge} type bridge stp_state 0 forward_delay 0 mcast_snooping 0",
            f"link set dev {bridge} up",
        ]
    for cable in layout.cables:
        lower, upper = cable.lower, cable.upper
        peer_namespace = "" if cable.lower_switch else f" netns {lower.namespace}"
        lines.append(f"link add name {upper.interface} type veth peer name {lower.interface}{peer_namespace}")
        if cable.lower_switch:
            lines.append(f"link set dev {lower.interface} master {layout.bridges[cable.lower_switch]} up")
        lines.append(f"link set dev {upper.interface} master {layout.bridges[cable.upper_switch]} up")
    return lines


def node_commands(layout: LabLayout, node: str) -> list[str]:
    """Return the `ip` commands for a node's namespace: its addresses and routes.

    With several NICs, traffic from an address leaves by that address's interface (one routing table for each). Traffic
    without a source address leaves by the NIC in its destination's network, or by the first NIC.
    """
    own = list(zip(layout.interfaces(node), layout.addresses[node], strict=True))
    networks = lab_layout.address_networks(layout.addresses)
    lines = ["link set dev lo up"]
    for nic_index, (interface, address) in enumerate(own):
        lines += [
            f"address add {lab_layout.interface_address(address, nic_index)} dev {interface} noprefixroute",
            f"link set dev {interface} up",
        ]
    lines += [
        _route_command(network, *own[nic_index if nic_index < len(own) else 0]) for network, nic_index in networks
    ]
    for table, (interface, address) in enumerate(own, start=FIRST_ROUTING_TABLE) if len(own) > 1 else ():
        lines += [f"{_route_command(network, interface, address)} table {table}" for network, _ in networks]
        lines.append(f"rule add from {address} lookup {table}")
    return lines


def _route_command(network: str, interface: str, address: str) -> str:
    return f"route add {network} dev {interface} scope link src {address}"


def rate_limit_commands(verb: str, ports: Iterable[CablePort]) -> list[str]:
    """Return the `tc` commands that limit each port's sending; the verb is `add`, or `change` while it sends."""
    return [f"qdisc {verb} dev {port.interface} root {token_bucket_options(port.rate_bytes_per_s)}" for port in ports]


def token_bucket_options(rate_bytes_per_s: float) -> str:
    """Return tc's token bucket options for a rate (tc's `bps` is bytes per second).

    A full bucket passes at once, so after a pause 80 KiB pass unlimited, or 1 ms at 655 Mbit/s and above.
    """
    burst = max(MIN_BURST_BYTES, round(rate_bytes_per_s * BURST_S))
    queue = max(MIN_QUEUE_BYTES, 4 * burst)
    return f"tbf rate {round(rate_bytes_per_s)}bps burst {burst}b limit {queue}b"


def remove_commands(layout: LabLayout) -> list[str]:
    """Return the commands for `ip -force` in the switches' namespace that remove every cable and bridge.

    Removing the namespaces is not enough: a namespace lives as long as any process or mount holds it.
    """
    names = [cable.upper.interface for cable in layout.cables] + list(layout.bridges.values())
    return [f"link delete dev {name}" for name in names]


def hosts_file_text(layout: LabLayout) -> str:
    """Return the text of /etc/hosts for every node."""
    lines = ["127.0.0.1 localhost"]
    lines += [f"{own[0]} {node}" for node, own in layout.addresses.items()]
    # A program that listens on IPv6 sees such peer addresses and looks up their names; else DNS would be asked.
    lines += [f"::ffff:{address} {node}.lab" for node, own in layout.addresses.items() for address in own]
    return "\n".join(lines) + "\n"


ProgressCallback = Callable[[str], None]
MOUNTINFO = Path("/proc/self/mountinfo")


def make_lab(cluster: Cluster, name: str, mode: QuotaMode, progress: ProgressCallback) -> None:
    """Bring a cluster up under a name, after clearing away the remains of a failed attempt.

    Raises:
        ClusterError: The cluster cannot be a lab.
        LabError: This machine does not support it, or the lab is up already. Nothing of it is left.
    """
    lab_state.refuse_inside_node()
    planned = lab_layout.plan_layout(cluster, name)
    chosen = cpu_quotas.choose_quotas(cluster, mode, len(os.sched_getaffinity(0)))
    tools.raise_lab_problems(tools.lab_problems(needs_quotas=chosen is not None))
    record = LabRecord(
        name=name,
        cluster_text=topology.dumps(planned.cluster),
        quotas=chosen,
        is_complete=False,
        boot_id=lab_state.current_boot_id(),
        hierarchy=cpu_quotas.find_hierarchy() if chosen is not None else None,
    )
    with lab_state.hold_lock(name) as lock:
        if is_record_up(lab_state.read_record(name)):
            raise LabError(
                "name of the lab",
                got=name,
                expected="one that no lab has",
                do=f"Take that one down first: ringweave lab down --lab {name}, or give another --name",
            )
        if _has_remains(name):
            progress("clearing away what an earlier attempt has left")
            _remove_parts(name, lock)
        try:
            _make_parts(planned, record, progress, lock)
        except BaseException:
            _remove_parts(name, lock)
            lab_state.remove_lock_file(name)
            raise
        lab_state.write_record(replace(record, is_complete=True))


def remove_lab(name: str) -> bool:
    """Take a lab down, complete or not, with all processes in it.

    Returns:
        True if there was anything to remove.

    Raises:
        LabError: A part of it could not be removed.
    """
    lab_state.refuse_inside_node()
    if not _has_remains(name):
        return False
    tools.require_root()
    with lab_state.hold_lock(name) as lock:
        was_there = _has_remains(name)
        _remove_parts(name, lock)
        lab_state.remove_lock_file(name)
    return was_there


def is_record_up(record: LabRecord | None) -> bool:
    """True if the lab is complete and of this boot."""
    return record is not None and record.is_complete and record.boot_id == lab_state.current_boot_id()


def namespace_paths(name: str) -> list[Path]:
    """Return every file that holds a namespace of the lab."""
    return [
        *lab_state.NETNS_FOLDER.glob(lab_layout.namespace_name(name, "*")),
        *lab_state.namespace_folder(name).glob("*"),
    ]


def check_lab_name(name: str) -> None:
    """Refuse a name that no cluster could have either.

    Raises:
        UsageError: The name is not allowed.
    """
    if next(cluster.plain_name_problems((), "name", name), None):
        raise UsageError(
            "name of the lab",
            got=name,
            expected="at most 63 letters, digits, dots, hyphens and underscores, beginning with a letter or digit",
            do="Give another --name",
        )


def _make_parts(planned: LabLayout, record: LabRecord, progress: ProgressCallback, lock: int) -> None:
    name = planned.name
    lab_state.write_record(record)
    lab_state.remove_probe_results(name)
    progress("namespaces")
    lab_state.hosts_path(name).write_text(hosts_file_text(planned), encoding="utf-8")
    _make_namespace_folder(name, lock)
    # In a network namespace of its own: `ip netns add` returns to where it was, and a user may not enter the machine's.
    tools.run_tool(["unshare", "--net", "ip", "-batch", "-"], lines=namespace_commands(planned), lock=lock)
    for node, namespace in planned.namespaces.items():
        _make_node_namespaces(name, node, namespace, lock)
    enter = ["nsenter", f"--net={lab_state.NETNS_FOLDER / planned.switch_namespace}"]
    tools.run_tool([*enter, "sh", "-ec", SYSCTL_SCRIPT], lock=lock)
    progress("links")
    tools.run_tool(["ip", "-n", planned.switch_namespace, "-batch", "-"], lines=switch_commands(planned), lock=lock)
    for node, namespace in planned.namespaces.items():
        tools.run_tool(["ip", "-n", namespace, "-batch", "-"], lines=node_commands(planned, node), lock=lock)
    limit_ports("add", planned.ports(), lock)
    if record.quotas is not None:
        progress("CPU quotas")
        if record.hierarchy is not None:
            cpu_quotas.make_groups(record.hierarchy, name, record.quotas)
        else:
            _make_duty_cycles(name, record.quotas, lock)


def limit_ports(verb: str, ports: list[CablePort], lock: int) -> None:
    """Limit the ports' sending, with one `tc` for each namespace; the verb is `add`, or `change` for a new rate."""
    by_namespace: dict[str, list[CablePort]] = defaultdict(list)
    for port in ports:
        by_namespace[port.namespace].append(port)
    for namespace, own in by_namespace.items():
        tools.run_tool(["tc", "-n", namespace, "-batch", "-"], lines=rate_limit_commands(verb, own), lock=lock)


def _make_namespace_folder(name: str, lock: int) -> None:
    folder = lab_state.namespace_folder(name)
    folder.mkdir()
    (lab_state.LAB_HOME / "sys").mkdir(exist_ok=True)
    tools.run_tool(["mount", "-t", "tmpfs", "-o", "mode=0700,size=1m", f"{NAME_PREFIX}{name}", str(folder)], lock=lock)
    tools.run_tool(
        ["mount", "--make-private", str(folder)], lock=lock
    )  # the kernel keeps namespaces of mounts in no other


def _make_node_namespaces(lab: str, node: str, namespace: str, lock: int) -> None:
    files = {kind: lab_state.namespace_folder(lab) / f"{node}.{kind}" for kind in ("uts", "mnt")}
    for path in files.values():
        path.touch()
    net = ["nsenter", f"--net={lab_state.NETNS_FOLDER / namespace}"]
    unshare = ["unshare", f"--uts={files['uts']}", f"--mount={files['mnt']}", "--propagation", "private"]
    arguments = [node, str(lab_state.hosts_path(lab)), str(lab_state.LAB_HOME), str(lab_state.NETNS_FOLDER)]
    with tools.run_on_first_cpu():
        tools.run_tool([*net, *unshare, "sh", "-c", NODE_SETUP_SCRIPT, "rw-setup", *arguments], lock=lock)


def _make_duty_cycles(lab: str, quotas: CpuQuotas, lock: int) -> None:
    """Give each device a UTS namespace, by which its processes are found, and a file with its quota."""
    folder = lab_state.duty_cycle_folder(lab)
    folder.mkdir()
    for node, node_quotas in quotas.items():
        for device, quota_us in enumerate(node_quotas):
            file_name = lab_state.device_file_name(node, device)
            path = lab_state.namespace_folder(lab) / f"{file_name}.uts"
            path.touch()
            tools.run_tool(["unshare", f"--uts={path}", "hostname", node], lock=lock)
            (folder / file_name).write_text(str(quota_us), encoding="ascii")


def _remove_parts(name: str, lock: int) -> None:
    record = lab_state.read_record(name)
    if record is not None and record.is_complete:
        lab_state.write_record(replace(record, is_complete=False))
    hierarchy = (record and record.hierarchy) or cpu_quotas.find_hierarchy()
    others = (lambda: cpu_quotas.group_pids(hierarchy, name)) if hierarchy else tuple
    lab_state.end_processes(lab_state.identify_namespaces(namespace_paths(name)), other_pids=others)
    if hierarchy is not None:
        cpu_quotas.remove_groups(hierarchy, name)
    present = [path.name for path in lab_state.NETNS_FOLDER.glob(lab_layout.namespace_name(name, "*"))]
    if record is not None:
        planned = lab_layout.plan_layout(topology.loads(record.cluster_text), name)
        if planned.switch_namespace in present:
            command = ["ip", "-force", "-n", planned.switch_namespace, "-batch", "-"]
            tools.run_tool(command, lines=remove_commands(planned), may_fail=True, lock=lock)
    if present:
        lines = [f"netns delete {namespace}" for namespace in present]
        tools.run_tool(["ip", "-force", "-batch", "-"], lines=lines, may_fail=True, lock=lock)
    _unmount(lab_state.namespace_folder(name), lock)
    left = [str(path) for path in lab_state.NETNS_FOLDER.glob(lab_layout.namespace_name(name, "*"))]
    if left:
        raise LabError(f"network namespaces: {', '.join(left)} still there, expected none. Remove them by ip netns.")
    lab_state.remove_lab_folder(name)


def _has_remains(name: str) -> bool:
    return lab_state.lab_folder(name).exists() or bool(namespace_paths(name))


def _unmount(folder: Path, lock: int) -> None:
    while any(line.split()[4] == str(folder) for line in MOUNTINFO.read_text(encoding="utf-8").splitlines()):
        tools.run_tool(["umount", "--recursive", "--lazy", str(folder)], lock=lock)
