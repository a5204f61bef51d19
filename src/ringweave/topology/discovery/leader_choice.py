"""Choice of the NIC between nodes and of the leading device, with reasons: pure decisions on a machine.

Distances count edges of the machine's tree and have NCCL's path classes. Rates that probing measured replace the
stated ones, NIC by NIC.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ringweave import units
from ringweave.errors import UsageError
from ringweave.files.problems import shorten_names, suggest_closest
from ringweave.topology.cluster import Nic, Node
from ringweave.topology.discovery.machine import BRIDGE_PART_KINDS, ComputeDevice, Machine, NetworkInterface

PATH_CLASS_MEANINGS = {
    "LOC": "the same PCI function",
    "PIX": "at most one PCIe switch between",
    "PXB": "several PCIe switches between, no host bridge",
    "PHB": "through the host bridge of their processors",
    "NODE": "from one host bridge to another of the same NUMA node",
    "SYS": "through the interconnect between NUMA nodes",
}
"""Path classes of NCCL and `nvidia-smi topo`, nearest first, with their meanings."""

DIRECT_PATH_CLASSES = ("LOC", "PIX", "PXB")
"""Classes of paths without a host bridge: the NIC can write into GPU memory without passing the processors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DevicePath:
    """The path from a compute device to an interface."""

    num_hops: int
    """Number of edges of the tree on the path."""
    path_class: str
    """One of `PATH_CLASS_MEANINGS`."""


def device_path(machine: Machine, worker: ComputeDevice, interface: NetworkInterface) -> DevicePath | None:
    """Return the path through the tree, up to the common part and down; None where the interface is not in the tree.

    For a bond or bridge with several members it is the shortest path.

    Every edge counts one: between ports of a switch, from a host bridge to its processors, from processors up to the
    machine (the interconnect of NUMA nodes) and down to others. Hop counts compare devices of one machine in one input
    only: hwloc lists each port of a switch, NCCL's files the switch as a whole.

    Source: NVIDIA/nccl, src/graph/topo.h (path types), and the legend of `nvidia-smi topo -m` for the classes.
    """
    paths = [_path_to_part(machine, worker, part) for part in interface.all_parts]
    return min(paths, key=lambda way: way.num_hops, default=None)


def _path_to_part(machine: Machine, worker: ComputeDevice, part: int) -> DevicePath:
    up, down = list(machine.path_to_root(worker.part)), list(machine.path_to_root(part))
    common = next(part for part in up if part in set(down))
    near, far = up[: up.index(common)], down[: down.index(common)]
    return DevicePath(num_hops=len(near) + len(far), path_class=_path_class(machine, near, far, common))


def _path_class(machine: Machine, near: list[int], far: list[int], common: int) -> str:
    """Return the class of a path.

    Args:
        machine: Machine with the tree.
        near: Parts from the compute device up to below the common one.
        far: Parts from the interface up to below the common one.
        common: Lowest part above both.
    """
    top = machine.parts[common]
    if top.kind == "host-bridge":
        return "PHB"
    if not top.holds_processors:
        return "LOC" if not near and not far else _switch_path_class(machine, near[1:], far[1:])
    is_one_numa = any(machine.parts[part].numas for part in machine.path_to_root(common))
    from_places = [machine.parts[part] for part in near if machine.parts[part].holds_processors]
    to_places = [part for part in far if machine.parts[part].holds_processors]
    starts_at_processors = not near or machine.parts[near[0]].holds_processors
    if not is_one_numa and (to_places or (from_places and not starts_at_processors)):
        return "SYS"
    if starts_at_processors:
        return "PHB"
    return "NODE" if machine.parts[far[-1]].kind == "host-bridge" else "PHB"


def _switch_path_class(machine: Machine, near: list[int], far: list[int]) -> str:
    """Return PIX or PXB, by the bridges on both sides of the common part.

    One port on each side is still one switch: its two downstream ports below its upstream port.
    """
    sides = [
        [machine.parts[part].kind for part in side if machine.parts[part].kind in BRIDGE_PART_KINDS]
        for side in (near, far)
    ]
    return "PIX" if all(side in ([], ["bridge"]) for side in sides) else "PXB"


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaderCandidate:
    """A compute device as a possible leader on an interface."""

    index: int
    """Index of the device on its machine."""
    path: DevicePath | None
    """Path to the interface; None where the interface has no place in the tree."""
    is_direct: bool | None
    """The interface reaches its memory without passing the processors; None for processors, which always allow it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaderChoice:
    """The chosen interface and leader, with the reasons in words."""

    interface: int | None
    """Index of the interface used between nodes; None where there is none."""
    interface_reason: str
    leader: int
    """Index of the leading device."""
    leader_reason: str
    candidates: tuple[LeaderCandidate, ...]
    """All devices, the leader first, then the next best; in their own order where there is no interface."""


def choose_leader(machine: Machine, nic_name: str | None = None) -> LeaderChoice:
    """Choose the interface between nodes and the leader.

    `nic_name`: the interface to use, by name, RDMA device or PCI address; None leaves the choice to the rules.

    Raises:
        UsageError: There is no interface of that name.
    """
    index, reason = _interface_by_name(machine, nic_name) if nic_name else choose_interface(machine)
    if index is None:
        all_candidates = tuple(LeaderCandidate(index=i, path=None, is_direct=None) for i in range(len(machine.workers)))
        words = (
            f"{machine.workers[0].name} leads as {_first_device_text(all_candidates)}: "
            "without a NIC there are no distances"
        )
        return LeaderChoice(
            interface=None, interface_reason=reason, leader=0, leader_reason=words, candidates=all_candidates
        )
    candidates = leader_candidates(machine, machine.interfaces[index])
    return LeaderChoice(
        interface=index,
        interface_reason=reason,
        leader=candidates[0].index,
        leader_reason=_leader_reason(machine, machine.interfaces[index], candidates),
        candidates=candidates,
    )


def choose_interface(machine: Machine) -> tuple[int | None, str]:
    """Return the index of the interface used between nodes, and the reason; None where there is none.

    The criteria in order: link not down, has an IP address or RDMA, hardware before software, RDMA, kernel bypass,
    higher rate, InfiniBand before Ethernet, first in the tree.
    """
    usable = [index for index, interface in enumerate(machine.interfaces) if is_usable_interface(interface)]
    if not usable:
        return None, "no network interface is known that could connect this machine to others"
    ordered = sorted(usable, key=lambda index: _preference_key(machine.interfaces[index]))
    best = machine.interfaces[ordered[0]]
    ties = [
        machine.interfaces[i].name
        for i in ordered[1:]
        if _preference_key(machine.interfaces[i]) == _preference_key(best)
    ]
    reason = f"{best.name} is used between nodes: {', '.join(_interface_merits(best))}"
    if len(ordered) == 1:
        return ordered[0], f"{reason}; the only one that can be used"
    if ties:
        return ordered[0], f"{reason}; the first of {len(ties) + 1} that are alike ({shorten_names(ties, len(ties))})"
    return ordered[0], f"{reason}; preferred to {_interface_names(machine, ordered[1:])}"


def is_usable_interface(interface: NetworkInterface) -> bool:
    """Return whether it could carry traffic between nodes; software must be up and have an address."""
    if interface.is_unclassified:
        return False
    if interface.is_virtual:
        return bool(interface.is_up and interface.addresses)
    return True


def equivalent_interfaces(machine: Machine, used: NetworkInterface) -> list[NetworkInterface]:
    """Return the other interfaces known to be as good for traffic between nodes as the one used.

    They have the same kind and rate, are up, and have an address or RDMA. Software interfaces must also have the same
    driver, because a machine has bridges and tunnels of its own. Interfaces that share a wire with the used one are
    left out.
    """
    return [nic for nic in machine.interfaces if nic is not used and _is_equivalent(nic, used)]


def leader_candidates(machine: Machine, interface: NetworkInterface) -> tuple[LeaderCandidate, ...]:
    """Return all compute devices, the one that should lead on the interface first.

    A GPU whose memory the interface reaches directly (GPUDirect RDMA) comes first, then the device with fewer hops,
    then the first of the machine: ties are stable.
    """
    found = []
    for index, worker in enumerate(machine.workers):
        path = device_path(machine, worker, interface)
        found.append(
            LeaderCandidate(index=index, path=path, is_direct=_reaches_memory_directly(worker, interface, path))
        )
    return tuple(sorted(found, key=lambda each: (each.is_direct is False, each.path.num_hops if each.path else 0)))


def _is_equivalent(nic: NetworkInterface, used: NetworkInterface) -> bool:
    is_ready = nic.is_up is not False and (nic.has_rdma or bool(nic.is_up and nic.addresses))
    shares_wire = not {*nic.members, nic.name}.isdisjoint({*used.members, used.name})
    return is_usable_interface(nic) and is_ready and not shares_wire and _equivalence_key(nic) == _equivalence_key(used)


def _equivalence_key(nic: NetworkInterface) -> tuple[object, ...]:
    fabric = (nic.has_rdma, nic.is_infiniband, bool(nic.verbs))
    return (*fabric, nic.is_virtual, nic.driver if nic.is_virtual else "", nic.rate_bytes_per_s)


def _interface_by_name(machine: Machine, nic_name: str) -> tuple[int, str]:
    for index, nic in enumerate(machine.interfaces):
        if nic_name in (nic.name, nic.verbs, nic.bus):
            return index, f"{nic.name} is used between nodes: it was given"
    names = [nic.name for nic in machine.interfaces if is_usable_interface(nic)] or [
        nic.name for nic in machine.interfaces
    ]
    raise UsageError(
        "--nic",
        got=nic_name,
        expected=f"a NIC of {machine.name} ({shorten_names(names, len(names)) or 'it has none'})",
        do=suggest_closest(nic_name, names) or "Look at the list of ringweave discover without --nic",
        where=machine.source,
    )


def _preference_key(nic: NetworkInterface) -> tuple[object, ...]:
    rate = nic.rate_bytes_per_s or 0.0
    last = (nic.is_up is False, not nic.is_reachable, nic.is_virtual)
    return (*last, not nic.has_rdma, not nic.verbs, -rate, not nic.is_infiniband)


def _interface_merits(nic: NetworkInterface) -> list[str]:
    fabric = "RDMA over InfiniBand" if nic.is_infiniband else "RDMA"
    by = f" ({nic.verbs})" if nic.verbs and nic.verbs != nic.name else ""
    path = f"{fabric}{by}" if nic.has_rdma else f"kernel bypass{by}, no RDMA" if nic.verbs else "no RDMA"
    state = {True: "link up", False: "link down", None: "state of the link unknown"}[nic.is_up]
    rate = units.format_rate(nic.rate_bytes_per_s) if nic.rate_bytes_per_s else "rate not known"
    of = [f"in the place of {', '.join(nic.members)}"] if nic.members else []
    return [path, state, rate, *of, *(["has an address"] if nic.addresses else []), *(["virtual"] * nic.is_virtual)]


def _reaches_memory_directly(worker: ComputeDevice, nic: NetworkInterface, path: DevicePath | None) -> bool | None:
    if worker.kind == "cpu":
        return None
    is_refused = worker.has_gpudirect is False or nic.has_gpudirect is False
    return nic.has_rdma and not is_refused and path is not None and path.path_class in DIRECT_PATH_CLASSES


def _leader_reason(machine: Machine, nic: NetworkInterface, candidates: Sequence[LeaderCandidate]) -> str:
    best, others = candidates[0], candidates[1:]
    name = machine.workers[best.index].name
    if best.path is None:
        return f"{name} leads as {_first_device_text(candidates)}: where {nic.name} is attached is not known"
    hops = (
        f"{best.path.num_hops} hops to {nic.name} ({best.path.path_class}: {PATH_CLASS_MEANINGS[best.path.path_class]})"
    )
    ties = [each.index for each in others if (each.path, each.is_direct) == (best.path, best.is_direct)]
    if not others:
        words = f"{name} leads: {hops}; it is the only device"
    elif ties:
        tied = shorten_names((machine.workers[index].name for index in ties), len(ties))
        words = f"{name} leads: {hops}, as few as {tied}; the first of them leads"
    else:
        runner_up = others[0]
        runner_up_hops = runner_up.path.num_hops if runner_up.path else 0
        words = f"{name} leads: {hops}; next is {machine.workers[runner_up.index].name} with {runner_up_hops}"
    return f"{words}. {_memory_access_text(machine, nic, best)}" if best.is_direct is not None else words


def _first_device_text(candidates: Sequence[LeaderCandidate]) -> str:
    return f"the first of {len(candidates)} devices" if len(candidates) > 1 else "the only device"


def _memory_access_text(machine: Machine, nic: NetworkInterface, best: LeaderCandidate) -> str:
    worker = machine.workers[best.index]
    if best.is_direct and worker.has_gpudirect and nic.has_gpudirect is not False:
        return f"{nic.name} reaches its memory directly (GPUDirect RDMA), which is preferred"
    if best.is_direct:
        return (
            f"No host bridge is between, so {nic.name} can reach its memory directly (GPUDirect RDMA) "
            "if the driver offers it, which the input does not say"
        )
    if not nic.has_rdma:
        return f"{nic.name} has no RDMA, so its memory is reached through the host's"
    if worker.has_gpudirect is False or nic.has_gpudirect is False:
        return "GPUDirect RDMA is stated not to work, so its memory is reached through the host's"
    return "A host bridge is between, so its memory is reached through the host's"


def _interface_names(machine: Machine, indices: Sequence[int]) -> str:
    return shorten_names((machine.interfaces[index].name for index in indices), len(indices))


@dataclass(frozen=True, slots=True)
class NodesWithRates:
    """Nodes with measured rates."""

    nodes: tuple[Node, ...]
    remarks: tuple[str, ...]
    """Sentences about NICs that were not measured."""


def with_measured_rates(
    nodes: Sequence[Node], rates: Mapping[str, Mapping[str, float]], probed_nics: Mapping[str, Collection[str]]
) -> NodesWithRates:
    """Return the nodes, each NIC with its measured rate.

    A NIC that was not measured gets the rate of a measured one of its kind (the same RDMA and the same stated rate, as
    all NICs of a discovered node have), else keeps its own. A NIC by which probing could not reach the other nodes is
    left out. If none of a node's NICs was measured (RDMA that TCP does not use), they are scaled so that their sum is
    the TCP rate of the node. A node that was not measured stays as it is.

    Args:
        nodes: As discovered.
        rates: Node -> NIC -> bytes per second of those that were measured.
        probed_nics: Node -> NICs that probing tried.
    """
    remarks: list[str] = []
    found = [
        _with_node_rates(node, rates.get(node.name, {}), probed_nics.get(node.name, ()), remarks) for node in nodes
    ]
    return NodesWithRates(tuple(found), tuple(remarks))


def _with_node_rates(node: Node, rates: Mapping[str, float], probed_nics: Collection[str], remarks: list[str]) -> Node:
    known = [nic for nic in node.nics if nic.name in rates]
    if not rates:
        return node
    if not known:
        factor = sum(rates.values()) / node.rate_bytes_per_s
        remarks.append(
            f"{_nic_names(node.nics)} on {node.name}: not measured, the node is taken for what TCP gets of it"
        )
        nics = tuple(replace(nic, rate_bytes_per_s=nic.rate_bytes_per_s * factor) for nic in node.nics)
        return replace(node, nics=nics)
    unreachable = [nic for nic in node.nics if nic.name in probed_nics and nic.name not in rates]
    if unreachable:
        remarks.append(f"{_nic_names(unreachable)} on {node.name}: left out, the other nodes are not reached by it")
    kept = [nic for nic in node.nics if nic not in unreachable]
    return replace(node, nics=tuple(_with_nic_rate(nic, node, known, rates, remarks) for nic in kept))


def _with_nic_rate(nic: Nic, node: Node, known: Sequence[Nic], rates: Mapping[str, float], remarks: list[str]) -> Nic:
    if nic.name in rates:
        return replace(nic, rate_bytes_per_s=rates[nic.name])
    alike = [each for each in known if (each.rdma, each.rate_bytes_per_s) == (nic.rdma, nic.rate_bytes_per_s)]
    rate = rates[alike[0].name] if alike else nic.rate_bytes_per_s
    why = f"as {alike[0].name}, which is of its kind" if alike else "as stated"
    remarks.append(f"{nic.name} on {node.name}: not measured, {units.format_rate(rate)} {why}")
    return replace(nic, rate_bytes_per_s=rate)


def _nic_names(nics: Sequence[Nic]) -> str:
    return ", ".join(nic.name for nic in nics)
