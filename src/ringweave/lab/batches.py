"""What to tell `ip`, `tc` and `sh` to make a lab, as text. Pure.

Lines go to `ip -batch` and `tc -batch`, one process for each namespace instead of one for each setting.
"""

from collections.abc import Iterable

from ringweave.lab import addresses
from ringweave.lab.layout import Layout, Port

MIN_BURST_BYTES = 80 * 1024
"""More than the 64 KiB, plus the headers of its packets, that TCP hands down in one piece: what does not fit into the
bucket has to be cut up first."""
BURST_S = 1e-3
"""Time for which the bucket lasts at high rates; the timer that refills it may be late by a good part of this."""
MIN_QUEUE_BYTES = 2**20
FIRST_TABLE = 101
"""Routing table of a node's first NIC, where it has several."""

SYSCTLS = """
for conf in /proc/sys/net/ipv6/conf/all /proc/sys/net/ipv6/conf/default; do
    if [ -e "$conf" ]; then echo 1 > "$conf/disable_ipv6"; fi
done
for conf in /proc/sys/net/ipv4/conf/all /proc/sys/net/ipv4/conf/default; do
    echo 1 > "$conf/arp_ignore"
    echo 2 > "$conf/arp_announce"
    echo 0 > "$conf/rp_filter"
done
"""
"""No traffic of IPv6's own; and every address is answered for, and spoken from, by its own interface alone."""

NODE_SETUP = f"""set -e
name=$1 hosts=$2 home=$3 netns=$4
hide() {{
    for attempt in 1 2 3 4 5 6 7 8 9; do
        if ! mountpoint -q "$1"; then return 0; fi
        if umount -l -R "$1" 2>/dev/null; then return 0; fi
    done
    umount -l -R "$1"
}}
echo "$name" > /proc/sys/kernel/hostname
{SYSCTLS}
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
"""Run by sh in the namespaces of a new node: its host name, its own /dev/shm, /sys with its own interfaces; the labs
themselves are out of sight, and so no node holds on to the namespaces of another. Whatever other labs take down in the
meantime vanishes from here as well, between a look and the `umount`: then it is looked at again."""


def make_namespaces(layout: Layout) -> list[str]:
    """For `ip`: every network namespace."""
    return [f"netns add {name}" for name in (layout.switch_namespace, *layout.namespaces.values())]


def make_switches(layout: Layout) -> list[str]:
    """For `ip` in the namespace of the switches: bridges, and all cables, their lower ends in the nodes."""
    lines = ["link set dev lo up"]
    for bridge in layout.bridges.values():
        lines += [
            f"link add name {bridge} type bridge stp_state 0 forward_delay 0 mcast_snooping 0",
            f"link set dev {bridge} up",
        ]
    for cable in layout.cables:
        lower, upper = cable.lower, cable.upper
        there = "" if cable.lower_switch else f" netns {lower.namespace}"
        lines.append(f"link add name {upper.interface} type veth peer name {lower.interface}{there}")
        if cable.lower_switch:
            lines.append(f"link set dev {lower.interface} master {layout.bridges[cable.lower_switch]} up")
        lines.append(f"link set dev {upper.interface} master {layout.bridges[cable.upper_switch]} up")
    return lines


def make_node(layout: Layout, node: str) -> list[str]:
    """For `ip` in the namespace of a node: its addresses and routes.

    With several NICs, what is sent from an address leaves by that address's interface (a routing table for each); what
    is sent from none in particular leaves by the NIC of the network that it goes to, or by the first.
    """
    own = list(zip(layout.interfaces(node), layout.addresses[node], strict=True))
    networks = addresses.networks(layout.addresses)
    lines = ["link set dev lo up"]
    for nic_index, (interface, address) in enumerate(own):
        lines += [
            f"address add {addresses.interface(address, nic_index)} dev {interface} noprefixroute",
            f"link set dev {interface} up",
        ]
    lines += [_route(network, *own[nic_index if nic_index < len(own) else 0]) for network, nic_index in networks]
    for table, (interface, address) in enumerate(own, start=FIRST_TABLE) if len(own) > 1 else ():
        lines += [f"{_route(network, interface, address)} table {table}" for network, _ in networks]
        lines.append(f"rule add from {address} lookup {table}")
    return lines


def _route(network: str, interface: str, address: str) -> str:
    return f"route add {network} dev {interface} scope link src {address}"


def limit(verb: str, ports: Iterable[Port]) -> list[str]:
    """For `tc` in the namespace of these ports: limit what each sends. Verb: `add`, or `change` while it sends."""
    return [f"qdisc {verb} dev {port.interface} root {tbf(port.rate_bytes_per_s)}" for port in ports]


def tbf(rate_bytes_per_s: float) -> str:
    """The token bucket of a rate (tc's `bps` is bytes per second).

    A full bucket passes at once, so 80 KiB, or 1 ms at 655 Mbit/s and above, are for free after a pause.
    """
    burst = max(MIN_BURST_BYTES, round(rate_bytes_per_s * BURST_S))
    queue = max(MIN_QUEUE_BYTES, 4 * burst)
    return f"tbf rate {round(rate_bytes_per_s)}bps burst {burst}b limit {queue}b"


def remove(layout: Layout) -> list[str]:
    """For `ip -force` in the namespace of the switches: every cable and bridge that is there.

    The namespaces alone would not do: one lives on as long as any process or mount, even out of our reach, holds it.
    """
    names = [cable.upper.interface for cable in layout.cables] + list(layout.bridges.values())
    return [f"link delete dev {name}" for name in names]


def hosts_file(layout: Layout) -> str:
    """The text of /etc/hosts in every node."""
    lines = ["127.0.0.1 localhost"]
    lines += [f"{own[0]} {node}" for node, own in layout.addresses.items()]
    # Whoever listens on IPv6 sees peers so, and asks for their names; without an answer here, DNS would be asked.
    lines += [f"::ffff:{address} {node}.lab" for node, own in layout.addresses.items() for address in own]
    return "\n".join(lines) + "\n"
