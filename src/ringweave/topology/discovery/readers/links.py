"""State, rate and addresses of this machine's interfaces, as the kernel tells them to this process.

Asked by the calls for it and not read from /sys, which may show another network namespace than the one that this
process is in (containers, labs).
"""

import ipaddress
import socket
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


def observe() -> dict[str, LinkFacts]:
    """Facts of all interfaces of this process's network namespace."""
    addresses = psutil.net_if_addrs()
    found = {}
    for name, stats in psutil.net_if_stats().items():
        known = addresses.get(name, [])
        own = [each.address.split("%")[0] for each in known if each.family in (socket.AF_INET, socket.AF_INET6)]
        found[name] = LinkFacts(
            is_up=stats.isup,
            rate_bytes_per_s=stats.speed * 1e6 / 8 if 0 < stats.speed < 2**31 - 1 else None,
            addresses=_usable(own),
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
            known.append(replace(nic, is_up=seen.is_up, rate_bytes_per_s=rate, addresses=seen.addresses))
        elif nic.name in (nic.verbs, nic.bus):
            known.append(nic)
    names = {nic.name for nic in known}
    virtual = [
        Interface(name=name, is_virtual=True, is_up=seen.is_up, addresses=seen.addresses)
        for name, seen in facts.items()
        if name not in names and not seen.is_loopback
    ]
    return replace(machine, interfaces=(*known, *virtual))


def _is_same(nic: Interface, seen: LinkFacts) -> bool:
    """Not one of another namespace that has the same name."""
    if not nic.hardware_address or not seen.hardware_address:
        return True
    return nic.hardware_address.casefold() == seen.hardware_address.casefold()


def _usable(addresses: Sequence[str]) -> tuple[str, ...]:
    """Those that other hosts can use, IPv4 first."""
    parsed = [ipaddress.ip_address(text) for text in addresses]
    global_ones = [each for each in parsed if not (each.is_loopback or each.is_link_local or each.is_unspecified)]
    return tuple(str(each) for each in sorted(global_ones, key=lambda each: each.version))
