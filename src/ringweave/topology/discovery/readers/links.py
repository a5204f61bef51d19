"""State, rate and addresses of this machine's interfaces, as the kernel tells them to this process.

Asked by the calls for it and not read from /sys, which may show another network namespace than the one that this
process is in (containers, labs).
"""

import array
import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import psutil

from ringweave.topology.discovery.machine import Interface, Machine


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkFacts:
    """What the kernel says of one interface."""

    is_up: bool
    rate_bytes_per_s: float | None
    """As its driver says; None where it does not know."""
    addresses: tuple[str, ...]
    """IP addresses that other hosts can use, IPv4 first."""
    is_loopback: bool
    hardware_address: str = ""
    networks: tuple[str, ...] = ()
    """Of each of `addresses` with the length of its network's prefix, as far as that is told."""
    driver: str = ""
    """Name of its driver: of software, what kind it is."""


_SIOCETHTOOL, _GET_DRIVER = 0x8946, 3
_DRIVER_AT, _DRIVER_BYTES, _ANSWER_BYTES = 4, 32, 196
"""Of struct ethtool_drvinfo: linux/ethtool.h."""


def observe() -> dict[str, LinkFacts]:
    """Facts of all interfaces of this process's network namespace."""
    addresses = psutil.net_if_addrs()
    found = {}
    for name, stats in psutil.net_if_stats().items():
        known = addresses.get(name, [])
        own = [each for each in known if each.family in (socket.AF_INET, socket.AF_INET6)]
        usable = _usable([each.address.split("%")[0] for each in own])
        found[name] = LinkFacts(
            is_up=stats.isup,
            rate_bytes_per_s=stats.speed * 1e6 / 8 if 0 < stats.speed < 2**31 - 1 else None,
            addresses=usable,
            networks=tuple(
                f"{address}/{_prefix(each.netmask)}"
                for address in usable
                for each in own
                if each.address == address and each.netmask
            ),
            driver=_driver(name),
            is_loopback="loopback" in stats.flags.split(","),
            hardware_address=next((each.address for each in known if each.family == psutil.AF_LINK), ""),
        )
    return found


def add_links(machine: Machine, facts: Mapping[str, LinkFacts]) -> Machine:
    """The machine with what the kernel says of its interfaces.

    Interfaces of the tree that this process cannot see are left out; those that hang on no PCI function come last and
    are virtual. What a driver of software says of its rate is no rate of a wire, and is left out.
    """
    known = []
    for nic in machine.interfaces:
        if nic.name in facts and _is_same(nic, facts[nic.name]):
            seen = facts[nic.name]
            rate = nic.rate_bytes_per_s or seen.rate_bytes_per_s
            of_link = replace(nic, is_up=seen.is_up, rate_bytes_per_s=rate, hardware_address=seen.hardware_address)
            known.append(replace(of_link, addresses=seen.addresses, networks=seen.networks))
        elif nic.name in (nic.verbs, nic.bus):
            known.append(nic)
    names = {nic.name for nic in known}
    virtual = [
        Interface(
            name=name,
            is_virtual=True,
            is_up=seen.is_up,
            hardware_address=seen.hardware_address,
            addresses=seen.addresses,
            networks=seen.networks,
            driver=seen.driver,
        )
        for name, seen in facts.items()
        if name not in names and not seen.is_loopback
    ]
    return replace(machine, interfaces=(*known, *virtual))


def _is_same(nic: Interface, seen: LinkFacts) -> bool:
    """Not one of another namespace that has the same name."""
    if not nic.hardware_address or not seen.hardware_address:
        return True
    return nic.hardware_address.casefold() == seen.hardware_address.casefold()


def _prefix(netmask: str) -> int:
    """24 of 255.255.255.0."""
    return int(ipaddress.ip_address(netmask)).bit_count()


def _driver(name: str) -> str:
    """What ethtool calls the driver of an interface; empty where the kernel does not tell."""
    answer = array.array("B", struct.pack("=I", _GET_DRIVER).ljust(_ANSWER_BYTES, b"\0"))
    asked = struct.pack("16sP", name.encode()[:15], answer.buffer_info()[0]).ljust(40, b"\0")
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, _SIOCETHTOOL, asked)
        told = answer.tobytes()[_DRIVER_AT : _DRIVER_AT + _DRIVER_BYTES]
        return told.partition(b"\0")[0].decode(errors="replace")
    return ""


def _usable(addresses: Sequence[str]) -> tuple[str, ...]:
    """Those that other hosts can use, IPv4 first."""
    parsed = [ipaddress.ip_address(text) for text in addresses]
    global_ones = [each for each in parsed if not (each.is_loopback or each.is_link_local or each.is_unspecified)]
    return tuple(str(each) for each in sorted(global_ones, key=lambda each: each.version))
