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

from ringweave.topology.discovery import machine
from ringweave.topology.discovery.machine import Machine, MachineBuilder, NetworkInterface, PciFunction


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
