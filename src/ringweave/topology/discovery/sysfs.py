"""Reader of this machine from /sys: PCI devices, NUMA nodes, network interfaces; link facts from the kernel.

Link states, rates and addresses come from system calls and not from /sys, because /sys may show another network
namespace than that of this process (containers, labs).
"""

import array
import contextlib
import fcntl
import ipaddress
import re
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from ringweave.files.problems import shorten_names
from ringweave.topology.discovery import machine
from ringweave.topology.discovery.machine import Machine, MachineBuilder, NetworkInterface, PciFunction

BALANCING_MODES = ("balance-rr", "balance-xor", "802.3ad", "balance-alb")
"""Modes of a bond that send and receive by all of its members; balance-tlb receives by one of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StackedInterface:
    """An interface on top of others."""

    kind: str
    """`bond`, `bridge`, `team`, or `upper`: a VLAN and its like."""
    members: tuple[str, ...]
    """Names of the interfaces below it."""
    owned_members: frozenset[str] = frozenset()
    """Members that belong to it alone: they can have no use of their own."""
    mode: str = ""
    """Mode of a bond, such as 802.3ad."""
    active: str = ""
    """Active member of a bond that has one."""
    hardware_address: str = ""


def read_stacks(root: Path) -> dict[str, StackedInterface]:
    """Return all stacked interfaces by name; `root` is /sys except in tests."""
    found = {}
    for path in sorted((root / "class" / "net").glob("*")):
        members = tuple(sorted(each.name.removeprefix("lower_") for each in path.glob("lower_*")))
        if members:
            masters = {each: path.parent / each / "master" for each in members}
            found[path.name] = StackedInterface(
                kind=_stack_kind(path),
                members=members,
                owned_members=frozenset(each for each, master in masters.items() if master.resolve().name == path.name),
                mode=_read_bond_text(path / "bonding" / "mode").partition(" ")[0],
                active=_read_bond_text(path / "bonding" / "active_slave"),
                hardware_address=_read_bond_text(path / "address"),
            )
    return found


def add_stacks(machine: Machine, stacks: Mapping[str, StackedInterface]) -> Machine:
    """Return the machine with stacked interfaces in the place of their member NICs.

    A stacked interface replaces members that it owns, and members without an address; a VLAN whose NIC has one stays
    beside it. The rate of a balancing bond is the sum of its active members (many streams together get that); any other
    rate is that of the fastest member, because one carries all or the mode is unknown. Its distance from a device is
    that of its nearest member.

    Args:
        machine: Machine with link facts; interfaces of another network namespace are no members.
        stacks: By name, from `read_stacks`.
    """
    waiting = [name for name in stacks if _is_visible(machine, name, stacks[name])]
    while waiting:  # a stack on a stack comes after it
        ready = [name for name in waiting if not set(stacks[name].members) & set(waiting)] or waiting
        for name in ready:
            machine = _replace_members(machine, name, stacks[name])
        waiting = [name for name in waiting if name not in ready]
    return machine


def _replace_members(machine: Machine, name: str, stack: StackedInterface) -> Machine:
    """Return the machine with one stacked interface in its place, if any of its members has a part."""
    members = [nic for nic in machine.interfaces if nic.name in stack.members and _is_replaced(nic, stack)]
    if not any(nic.part is not None for nic in members):
        return machine
    (own,) = (nic for nic in machine.interfaces if nic.name == name)
    stacked = _stacked_interface(own, stack, [nic for nic in members if nic.part is not None])
    replaced = {nic.name for nic in members} | {name}
    first = next(index for index, nic in enumerate(machine.interfaces) if nic.name in replaced and nic.name != name)
    rest = [nic for nic in machine.interfaces[first:] if nic.name not in replaced]
    head = [nic for nic in machine.interfaces[:first] if nic.name not in replaced]
    names = [nic.name for nic in members]
    of = f"{stack.kind} of mode {stack.mode}" if stack.mode else stack.kind
    remark = f"{name} ({of}) is in the place of {shorten_names(names, len(names))}"
    return replace(machine, interfaces=(*head, stacked, *rest), remarks=(*machine.remarks, remark))


def _stacked_interface(
    own: NetworkInterface, stack: StackedInterface, members: Sequence[NetworkInterface]
) -> NetworkInterface:
    active = _active_members(stack, members)
    parts = list(dict.fromkeys(part for nic in members for part in nic.all_parts))
    return replace(
        own,
        is_virtual=False,
        part=parts[0],
        more_parts=tuple(parts[1:]),
        members=tuple(dict.fromkeys(name for nic in members for name in (nic.members or (nic.name,)))),
        bus=members[0].bus,
        verbs=active[0].verbs,
        has_rdma=all(nic.has_rdma for nic in active),
        is_infiniband=all(nic.is_infiniband for nic in active),
        rate_bytes_per_s=_stack_rate(stack, active),
        bus_bytes_per_s=_sum_if_all_known([nic.bus_bytes_per_s for nic in active]),
        has_gpudirect=active[0].has_gpudirect,
    )


def _active_members(stack: StackedInterface, members: Sequence[NetworkInterface]) -> Sequence[NetworkInterface]:
    """Return the members that carry traffic; all of them where none is known to."""
    up = [nic for nic in members if nic.is_up is not False]
    return [nic for nic in up if nic.name == stack.active] or up or members


def _stack_rate(stack: StackedInterface, active: Sequence[NetworkInterface]) -> float | None:
    rates = [nic.rate_bytes_per_s for nic in active]
    if stack.kind == "bond" and stack.mode in BALANCING_MODES:
        return _sum_if_all_known(rates)
    return max((rate for rate in rates if rate), default=None)


def _sum_if_all_known(rates: Sequence[float | None]) -> float | None:
    known = [rate for rate in rates if rate]
    return sum(known) if len(known) == len(rates) else None


def _is_replaced(nic: NetworkInterface, stack: StackedInterface) -> bool:
    return nic.name in stack.owned_members or not nic.addresses


def _is_visible(machine: Machine, name: str, stack: StackedInterface) -> bool:
    """Return whether this process sees it: not one of another namespace that has the same name."""
    own = next((nic for nic in machine.interfaces if nic.name == name), None)
    if own is None:
        return False
    told, seen = stack.hardware_address.casefold(), own.hardware_address.casefold()
    return not told or not seen or told == seen


def _stack_kind(path: Path) -> str:
    for kind, folder in (("bond", "bonding"), ("bridge", "bridge")):
        if (path / folder).is_dir():
            return kind
    return "team" if "DEVTYPE=team" in _read_bond_text(path / "uevent") or path.name.startswith("team") else "upper"


def _read_bond_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkFacts:
    """State, rate and addresses of one interface, from the kernel."""

    is_up: bool
    rate_bytes_per_s: float | None
    """Rate that its driver reports; None where unknown."""
    addresses: tuple[str, ...]
    """IP addresses that other hosts can use, IPv4 first."""
    is_loopback: bool
    hardware_address: str = ""
    networks: tuple[str, ...] = ()
    """Each of `addresses` with its prefix length, where known."""
    driver: str = ""
    """Name of its driver; for software, its kind."""


_SIOCETHTOOL, _GET_DRIVER = 0x8946, 3
_DRIVER_OFFSET, _DRIVER_BYTES, _ANSWER_BYTES = 4, 32, 196
"""Offsets and sizes of struct ethtool_drvinfo: linux/ethtool.h."""


def observe_link_facts() -> dict[str, LinkFacts]:
    """Return the facts of all interfaces in this process's network namespace."""
    addresses = psutil.net_if_addrs()
    found = {}
    for name, stats in psutil.net_if_stats().items():
        known = addresses.get(name, [])
        own = [each for each in known if each.family in (socket.AF_INET, socket.AF_INET6)]
        usable = _usable_addresses([each.address.split("%")[0] for each in own])
        found[name] = LinkFacts(
            is_up=stats.isup,
            rate_bytes_per_s=stats.speed * 1e6 / 8 if 0 < stats.speed < 2**31 - 1 else None,
            addresses=usable,
            networks=tuple(
                f"{address}/{_prefix_length(each.netmask)}"
                for address in usable
                for each in own
                if each.address == address and each.netmask
            ),
            driver=_driver_name(name),
            is_loopback="loopback" in stats.flags.split(","),
            hardware_address=next((each.address for each in known if each.family == psutil.AF_LINK), ""),
        )
    return found


def add_link_facts(machine: Machine, facts: Mapping[str, LinkFacts]) -> Machine:
    """Return the machine with the kernel's facts of its interfaces.

    Interfaces of the tree that this process cannot see are left out. Those without a PCI function come last and are
    virtual. The rate that a software driver reports is no rate of a wire, and is left out.
    """
    known = []
    for nic in machine.interfaces:
        if nic.name in facts and _is_same_interface(nic, facts[nic.name]):
            link_facts = facts[nic.name]
            rate = nic.rate_bytes_per_s or link_facts.rate_bytes_per_s
            of_link = replace(
                nic, is_up=link_facts.is_up, rate_bytes_per_s=rate, hardware_address=link_facts.hardware_address
            )
            known.append(replace(of_link, addresses=link_facts.addresses, networks=link_facts.networks))
        elif nic.name in (nic.verbs, nic.bus):
            known.append(nic)
    names = {nic.name for nic in known}
    virtual = [
        NetworkInterface(
            name=name,
            is_virtual=True,
            is_up=link_facts.is_up,
            hardware_address=link_facts.hardware_address,
            addresses=link_facts.addresses,
            networks=link_facts.networks,
            driver=link_facts.driver,
        )
        for name, link_facts in facts.items()
        if name not in names and not link_facts.is_loopback
    ]
    return replace(machine, interfaces=(*known, *virtual))


def _is_same_interface(nic: NetworkInterface, link_facts: LinkFacts) -> bool:
    """Return whether it is not one of another namespace that has the same name."""
    if not nic.hardware_address or not link_facts.hardware_address:
        return True
    return nic.hardware_address.casefold() == link_facts.hardware_address.casefold()


def _prefix_length(netmask: str) -> int:
    """Return the prefix length: 24 for 255.255.255.0."""
    return int(ipaddress.ip_address(netmask)).bit_count()


def _driver_name(name: str) -> str:
    """Return ethtool's name of an interface's driver; empty where the kernel has none."""
    answer = array.array("B", struct.pack("=I", _GET_DRIVER).ljust(_ANSWER_BYTES, b"\0"))
    request = struct.pack("16sP", name.encode()[:15], answer.buffer_info()[0]).ljust(40, b"\0")
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, _SIOCETHTOOL, request)
        name_field = answer.tobytes()[_DRIVER_OFFSET : _DRIVER_OFFSET + _DRIVER_BYTES]
        return name_field.partition(b"\0")[0].decode(errors="replace")
    return ""


def _usable_addresses(addresses: Sequence[str]) -> tuple[str, ...]:
    """Return the addresses that other hosts can use, IPv4 first."""
    parsed = [ipaddress.ip_address(text) for text in addresses]
    global_ones = [each for each in parsed if not (each.is_loopback or each.is_link_local or each.is_unspecified)]
    return tuple(str(each) for each in sorted(global_ones, key=lambda each: each.version))


_HOST_BRIDGE_PATTERN = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_PORT_RATE_PATTERN = re.compile(r"(\d+(?:\.\d+)?) Gb/sec.*")


def read_sysfs(root: Path, *, name: str) -> Machine:
    """Read the machine from the files under `root`, which is /sys except in tests."""
    return _SysfsReader(root, name).machine()


class _SysfsReader:
    def __init__(self, root: Path, name: str) -> None:
        self._root = root
        self._builder = MachineBuilder(name, f"{root} (sysfs)")
        self._parts: dict[str, int] = {}
        self._numas: dict[int, int] = {}
        self._interfaces = _names_by_address(root / "class" / "net")
        self._verbs = _names_by_address(root / "class" / "infiniband")

    def machine(self) -> Machine:
        for numa, cpus in _numa_nodes(self._root):
            if cpus:
                self._numas[numa] = self._builder.add_part("numa", f"NUMA {numa}", 0, [numa])
        devices = self._root / "bus" / "pci" / "devices"
        chains = sorted(filter(None, (_bridge_chain(path) for path in _list_folder(devices))), key=_chain_order)
        for chain in chains:
            self._add_function(chain)
        return self._builder.build()

    def _add_function(self, chain: list[Path]) -> None:
        pci_class = _read_hex(chain[-1] / "class") >> 8
        if not machine.is_bridge_class(pci_class):
            parent = self._parent_part(chain[:-1], chain[-1])
            self._builder.add_function(parent, self._pci_function(chain[-1], pci_class), lists_interfaces=True)

    def _parent_part(self, above: list[Path], path: Path) -> int:
        """Return the part that a function is attached to; missing parts above it are added."""
        parent = self._numas.get(_read_int(path / "numa_node"), 0)
        for part in above:
            if part.name not in self._parts:
                kind = "bridge" if machine.parse_pci_address(part.name) else "host-bridge"
                name = part.name if kind == "bridge" else part.name.removeprefix("pci")
                self._parts[part.name] = self._builder.add_part(kind, f"{kind.replace('-', ' ')} {name}", parent)
            parent = self._parts[part.name]
        return parent

    def _pci_function(self, path: Path, pci_class: int) -> PciFunction:
        verbs = self._verbs.get(path.name, [])
        ports = [self._root / "class" / "infiniband" / name / "ports" / "1" for name in verbs]
        states = [_read_text(port / "state") for port in ports]
        rates = {
            name: rate
            for name, port in zip(verbs, ports, strict=True)
            if (rate := _port_rate(_read_text(port / "rate")))
        }
        has_infiniband = any(_read_text(port / "link_layer") == "InfiniBand" for port in ports)
        interfaces = self._interfaces.get(path.name, [])
        return PciFunction(
            bus=path.name,
            pci_class=pci_class,
            vendor=_read_hex(path / "vendor"),
            device=_read_hex(path / "device"),
            interfaces=interfaces,
            verbs=verbs,
            infiniband_interfaces=interfaces if has_infiniband else (),
            hardware_addresses={
                name: _read_text(self._root / "class" / "net" / name / "address") for name in interfaces
            },
            is_up=states[0].startswith("4") if states and states[0] else None,
            rates=rates,
            has_gpudirect=self._gpudirect(_read_hex(path / "vendor")),
        )

    def _gpudirect(self, vendor: int) -> bool | None:
        """Return True if the module is loaded that lets NICs access NVIDIA GPU memory; dma-buf may allow it without."""
        has_module = any((self._root / "module" / name).exists() for name in ("nvidia_peermem", "nv_peer_mem"))
        return True if vendor == machine.NVIDIA_VENDOR and has_module else None


def _names_by_address(folder: Path) -> dict[str, list[str]]:
    """Return the names of a class of devices by the PCI address of their function."""
    found: dict[str, list[str]] = {}
    for path in _list_folder(folder):
        addresses = [part for part in path.resolve().parts if machine.parse_pci_address(part)]
        if addresses:
            found.setdefault(addresses[-1], []).append(path.name)
    return found


def _bridge_chain(path: Path) -> list[Path]:
    """Return host bridge, bridges and the function itself, from the path of a device."""
    whole = path.resolve()
    steps = [*reversed(whole.parents), whole]
    return [step for step in steps if _HOST_BRIDGE_PATTERN.fullmatch(step.name) or machine.parse_pci_address(step.name)]


def _chain_order(chain: list[Path]) -> list[tuple[int, ...]]:
    return [machine.parse_pci_address(step.name) or () for step in chain]


def _numa_nodes(root: Path) -> Iterator[tuple[int, str]]:
    folder = root / "devices" / "system" / "node"
    for path in sorted(_list_folder(folder), key=lambda path: (len(path.name), path.name)):
        if re.fullmatch(r"node\d{1,5}", path.name):
            yield int(path.name[4:]), _read_text(path / "cpulist")


def _list_folder(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _read_text(path: Path) -> str:
    """Return the text of a sysfs file; empty where it is missing or its driver refuses to read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _read_hex(path: Path) -> int:
    try:
        return int(_read_text(path) or "0", 16)
    except ValueError:
        return 0


def _read_int(path: Path) -> int:
    text = _read_text(path)
    return int(text) if text.removeprefix("-").isdecimal() else -1


def _port_rate(text: str) -> float | None:
    """Return bytes per second of `100 Gb/sec (4X EDR)`."""
    match = _PORT_RATE_PATTERN.fullmatch(text)
    return float(match.group(1)) * 1e9 / 8 if match and float(match.group(1)) > 0 else None
