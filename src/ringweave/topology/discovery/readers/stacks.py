"""Interfaces that stand on others (bonds, bridges, teams, VLANs), as /sys tells them, put in the place of those."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ringweave.files.problems import listed
from ringweave.topology.discovery.machine import Interface, Machine

BALANCING = ("balance-rr", "balance-xor", "802.3ad", "balance-alb")
"""Modes of a bond that send and receive by all of its members; balance-tlb receives by one of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """An interface that stands on others."""

    kind: str
    """`bond`, `bridge`, `team`, or `upper`: a VLAN and its like."""
    members: tuple[str, ...]
    """What it stands on."""
    owns: frozenset[str] = frozenset()
    """Those of the members that it has for itself: they can have no use of their own."""
    mode: str = ""
    """Of a bond, such as 802.3ad."""
    active: str = ""
    """Of a bond that has one, the member in use."""
    hardware_address: str = ""


def read(root: Path) -> dict[str, Stack]:
    """All of them by their names; `root` is /sys but in tests."""
    found = {}
    for path in sorted((root / "class" / "net").glob("*")):
        members = tuple(sorted(each.name.removeprefix("lower_") for each in path.glob("lower_*")))
        if members:
            masters = {each: path.parent / each / "master" for each in members}
            found[path.name] = Stack(
                kind=_kind(path),
                members=members,
                owns=frozenset(each for each, master in masters.items() if master.resolve().name == path.name),
                mode=_text(path / "bonding" / "mode").partition(" ")[0],
                active=_text(path / "bonding" / "active_slave"),
                hardware_address=_text(path / "address"),
            )
    return found


def add_stacks(machine: Machine, stacks: Mapping[str, Stack]) -> Machine:
    """The machine whose stacks are in the place of the NICs that they stand on.

    A stack takes the place of members that it owns, and of those that have no address; a VLAN whose NIC has one stays
    beside it. Its rate is the sum of its active members where it is a bond that balances (many streams together get
    that), else that of the fastest of them: one carries all, or nobody tells. It is as far from a device as the nearest
    of its members.

    Args:
        machine: With its links; interfaces of another network namespace are no members.
        stacks: By name, as `read` gives them.
    """
    waiting = [name for name in stacks if _is_here(machine, name, stacks[name])]
    while waiting:  # a stack on a stack comes after it
        ready = [name for name in waiting if not set(stacks[name].members) & set(waiting)] or waiting
        for name in ready:
            machine = _placed(machine, name, stacks[name])
        waiting = [name for name in waiting if name not in ready]
    return machine


def _placed(machine: Machine, name: str, stack: Stack) -> Machine:
    """The machine with one of them in its place, if any of its members has one."""
    members = [nic for nic in machine.interfaces if nic.name in stack.members and _is_held(nic, stack)]
    if not any(nic.part is not None for nic in members):
        return machine
    (own,) = (nic for nic in machine.interfaces if nic.name == name)
    made = _standing(own, stack, [nic for nic in members if nic.part is not None])
    gone = {nic.name for nic in members} | {name}
    first = next(index for index, nic in enumerate(machine.interfaces) if nic.name in gone and nic.name != name)
    rest = [nic for nic in machine.interfaces[first:] if nic.name not in gone]
    head = [nic for nic in machine.interfaces[:first] if nic.name not in gone]
    names = [nic.name for nic in members]
    of = f"{stack.kind} of mode {stack.mode}" if stack.mode else stack.kind
    remark = f"{name} ({of}) is in the place of {listed(names, len(names))}"
    return replace(machine, interfaces=(*head, made, *rest), remarks=(*machine.remarks, remark))


def _standing(own: Interface, stack: Stack, members: Sequence[Interface]) -> Interface:
    active = _active(stack, members)
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
        rate_bytes_per_s=_rate(stack, active),
        bus_bytes_per_s=_total([nic.bus_bytes_per_s for nic in active]),
        has_gpudirect=active[0].has_gpudirect,
    )


def _active(stack: Stack, members: Sequence[Interface]) -> Sequence[Interface]:
    """Those that carry traffic; all of them where none is known to."""
    up = [nic for nic in members if nic.is_up is not False]
    return [nic for nic in up if nic.name == stack.active] or up or members


def _rate(stack: Stack, active: Sequence[Interface]) -> float | None:
    rates = [nic.rate_bytes_per_s for nic in active]
    if stack.kind == "bond" and stack.mode in BALANCING:
        return _total(rates)
    return max((rate for rate in rates if rate), default=None)


def _total(rates: Sequence[float | None]) -> float | None:
    known = [rate for rate in rates if rate]
    return sum(known) if len(known) == len(rates) else None


def _is_held(nic: Interface, stack: Stack) -> bool:
    return nic.name in stack.owns or not nic.addresses


def _is_here(machine: Machine, name: str, stack: Stack) -> bool:
    """Seen by this process: not one of another namespace that has the same name."""
    own = next((nic for nic in machine.interfaces if nic.name == name), None)
    if own is None:
        return False
    told, seen = stack.hardware_address.casefold(), own.hardware_address.casefold()
    return not told or not seen or told == seen


def _kind(path: Path) -> str:
    for kind, folder in (("bond", "bonding"), ("bridge", "bridge")):
        if (path / folder).is_dir():
            return kind
    return "team" if "DEVTYPE=team" in _text(path / "uevent") or path.name.startswith("team") else "upper"


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
