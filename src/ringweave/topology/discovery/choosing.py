"""Which interface connects the machine to others, which worker leads, and why: pure decisions on a machine."""

from collections.abc import Sequence
from dataclasses import dataclass

from ringweave import errors, units
from ringweave.errors import UsageError
from ringweave.files.problems import closest, listed
from ringweave.topology.discovery import distances
from ringweave.topology.discovery.distances import Way
from ringweave.topology.discovery.machine import Interface, Machine, Worker


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A worker as the leader of an interface."""

    index: int
    """Of the worker on its machine."""
    way: Way | None
    """To the interface; None where that has no place in the tree."""
    is_direct: bool | None
    """The interface can reach its memory without passing the processors; None for processors, which always can."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Leadership:
    """What was chosen, with the reasons in words."""

    interface: int | None
    """Index of the interface used between nodes; None where there is none to use."""
    interface_reason: str
    leader: int
    """Index of the worker that leads."""
    leader_reason: str
    candidates: tuple[Candidate, ...]
    """All workers, the leader first, then who would lead without it; in their own order where there is no interface."""


def choose(machine: Machine, nic_name: str | None = None) -> Leadership:
    """The interface between nodes and the leader.

    Args:
        machine: The machine.
        nic_name: The interface to use, by name, RDMA device or PCI address; None leaves the choice to the rules.

    Raises:
        UsageError: There is no interface of that name.
    """
    index, reason = _given(machine, nic_name) if nic_name else used_interface(machine)
    if index is None:
        everyone = tuple(Candidate(index=i, way=None, is_direct=None) for i in range(len(machine.workers)))
        words = f"{machine.workers[0].name} leads as {_first_of(everyone)}: without a NIC there are no distances"
        return Leadership(interface=None, interface_reason=reason, leader=0, leader_reason=words, candidates=everyone)
    candidates = nearest(machine, machine.interfaces[index])
    return Leadership(
        interface=index,
        interface_reason=reason,
        leader=candidates[0].index,
        leader_reason=_leader_words(machine, machine.interfaces[index], candidates),
        candidates=candidates,
    )


def used_interface(machine: Machine) -> tuple[int | None, str]:
    """Index of the interface used between nodes, and why it is that one; None where none can be used.

    Links that are down come last, before them those without an IP address or RDMA where others have one, then software;
    RDMA before none, then kernel bypass before none, then the higher rate, InfiniBand before Ethernet, the first in the
    tree.
    """
    usable = [index for index, interface in enumerate(machine.interfaces) if is_usable(interface)]
    if not usable:
        return None, "no network interface is known that could connect this machine to others"
    ordered = sorted(usable, key=lambda index: _preference(machine.interfaces[index]))
    best = machine.interfaces[ordered[0]]
    ties = [machine.interfaces[i].name for i in ordered[1:] if _preference(machine.interfaces[i]) == _preference(best)]
    reason = f"{best.name} is used between nodes: {', '.join(_merits(best))}"
    if len(ordered) == 1:
        return ordered[0], f"{reason}; the only one that can be used"
    if ties:
        return ordered[0], f"{reason}; the first of {len(ties) + 1} that are alike ({listed(ties, len(ties))})"
    return ordered[0], f"{reason}; preferred to {_names(machine, ordered[1:])}"


def is_usable(interface: Interface) -> bool:
    """It could carry traffic between nodes: software only where it is up and has an address."""
    if interface.is_unclassified:
        return False
    if interface.is_virtual:
        return bool(interface.is_up and interface.addresses)
    return True


def equals(machine: Machine, used: Interface) -> list[Interface]:
    """The other interfaces that are as good for traffic between nodes: known to be so, not just not known to be worse.

    Of the same kind and rate, up, with an address or RDMA. Software is alike where its driver is, and only for want of
    wires: a machine has bridges and tunnels of its own. What shares a wire with it is no other interface.
    """
    return [nic for nic in machine.interfaces if nic is not used and _is_equal(nic, used)]


def nearest(machine: Machine, interface: Interface) -> tuple[Candidate, ...]:
    """All workers, the one that should lead on the interface first.

    A GPU whose memory the interface reaches directly (GPUDirect RDMA) goes before one that it does not, then the one of
    fewer hops, then the first of the machine: ties are stable.
    """
    found = []
    for index, worker in enumerate(machine.workers):
        way = distances.way(machine, worker, interface)
        found.append(Candidate(index=index, way=way, is_direct=_is_direct(worker, interface, way)))
    return tuple(sorted(found, key=lambda each: (each.is_direct is False, each.way.num_hops if each.way else 0)))


def _is_equal(nic: Interface, used: Interface) -> bool:
    is_ready = nic.is_up is not False and (nic.has_rdma or bool(nic.is_up and nic.addresses))
    shares_wire = not {*nic.members, nic.name}.isdisjoint({*used.members, used.name})
    return is_usable(nic) and is_ready and not shares_wire and _likeness(nic) == _likeness(used)


def _likeness(nic: Interface) -> tuple[object, ...]:
    fabric = (nic.has_rdma, nic.is_infiniband, bool(nic.verbs))
    return (*fabric, nic.is_virtual, nic.driver if nic.is_virtual else "", nic.rate_bytes_per_s)


def _given(machine: Machine, nic_name: str) -> tuple[int, str]:
    for index, nic in enumerate(machine.interfaces):
        if nic_name in (nic.name, nic.verbs, nic.bus):
            return index, f"{nic.name} is used between nodes: it was given"
    names = [nic.name for nic in machine.interfaces if is_usable(nic)] or [nic.name for nic in machine.interfaces]
    raise UsageError(
        errors.explain(
            "--nic",
            got=nic_name,
            expected=f"a NIC of {machine.name} ({listed(names, len(names)) or 'it has none'})",
            do=closest(nic_name, names) or "Look at the list of ringweave discover without --nic",
            where=machine.source,
        )
    )


def _preference(nic: Interface) -> tuple[object, ...]:
    rate = nic.rate_bytes_per_s or 0.0
    last = (nic.is_up is False, not nic.is_reachable, nic.is_virtual)
    return (*last, not nic.has_rdma, not nic.verbs, -rate, not nic.is_infiniband)


def _merits(nic: Interface) -> list[str]:
    fabric = "RDMA over InfiniBand" if nic.is_infiniband else "RDMA"
    by = f" ({nic.verbs})" if nic.verbs and nic.verbs != nic.name else ""
    path = f"{fabric}{by}" if nic.has_rdma else f"kernel bypass{by}, no RDMA" if nic.verbs else "no RDMA"
    state = {True: "link up", False: "link down", None: "state of the link not told"}[nic.is_up]
    rate = units.format_rate(nic.rate_bytes_per_s) if nic.rate_bytes_per_s else "rate not known"
    of = [f"in the place of {', '.join(nic.members)}"] if nic.members else []
    return [path, state, rate, *of, *(["has an address"] if nic.addresses else []), *(["virtual"] * nic.is_virtual)]


def _is_direct(worker: Worker, nic: Interface, way: Way | None) -> bool | None:
    if worker.kind == "cpu":
        return None
    is_refused = worker.has_gpudirect is False or nic.has_gpudirect is False
    return nic.has_rdma and not is_refused and way is not None and way.kind in distances.DIRECT_CLASSES


def _leader_words(machine: Machine, nic: Interface, candidates: Sequence[Candidate]) -> str:
    best, others = candidates[0], candidates[1:]
    name = machine.workers[best.index].name
    if best.way is None:
        return f"{name} leads as {_first_of(candidates)}: where {nic.name} is attached is not known"
    hops = f"{best.way.num_hops} hops to {nic.name} ({best.way.kind}: {distances.MEANINGS[best.way.kind]})"
    ties = [each.index for each in others if (each.way, each.is_direct) == (best.way, best.is_direct)]
    if not others:
        words = f"{name} leads: {hops}; it is the only device"
    elif ties:
        tied = listed((machine.workers[index].name for index in ties), len(ties))
        words = f"{name} leads: {hops}, as few as {tied}; the first of them leads"
    else:
        then = others[0]
        then_hops = then.way.num_hops if then.way else 0
        words = f"{name} leads: {hops}; next is {machine.workers[then.index].name} with {then_hops}"
    return f"{words}. {_direct_words(machine, nic, best)}" if best.is_direct is not None else words


def _first_of(candidates: Sequence[Candidate]) -> str:
    return f"the first of {len(candidates)} devices" if len(candidates) > 1 else "the only device"


def _direct_words(machine: Machine, nic: Interface, best: Candidate) -> str:
    worker = machine.workers[best.index]
    if best.is_direct and worker.has_gpudirect and nic.has_gpudirect is not False:
        return f"{nic.name} reaches its memory directly (GPUDirect RDMA), which is preferred"
    if best.is_direct:
        return (
            f"No host bridge is between, so {nic.name} can reach its memory directly (GPUDirect RDMA) "
            "if the driver offers it, which is not told"
        )
    if not nic.has_rdma:
        return f"{nic.name} has no RDMA, so its memory is reached through the host's"
    if worker.has_gpudirect is False or nic.has_gpudirect is False:
        return "GPUDirect RDMA is stated not to work, so its memory is reached through the host's"
    return "A host bridge is between, so its memory is reached through the host's"


def _names(machine: Machine, indices: Sequence[int]) -> str:
    return listed((machine.interfaces[index].name for index in indices), len(indices))
