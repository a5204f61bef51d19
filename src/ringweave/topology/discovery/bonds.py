"""Stacked interfaces (bonds, bridges, teams, VLANs) from /sys, put in the place of their member NICs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ringweave.files.problems import shorten_names
from ringweave.topology.discovery.machine import Machine, NetworkInterface

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
                mode=_read_text(path / "bonding" / "mode").partition(" ")[0],
                active=_read_text(path / "bonding" / "active_slave"),
                hardware_address=_read_text(path / "address"),
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
    return "team" if "DEVTYPE=team" in _read_text(path / "uevent") or path.name.startswith("team") else "upper"


def _read_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
