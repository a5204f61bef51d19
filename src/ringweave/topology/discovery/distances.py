"""How far a worker is from a network interface: edges of the machine's tree, and the class of the way."""

from dataclasses import dataclass

from ringweave.topology.discovery.machine import BRIDGES, Interface, Machine, Worker

MEANINGS = {
    "LOC": "the same PCI function",
    "PIX": "at most one PCIe switch between",
    "PXB": "several PCIe switches between, no host bridge",
    "PHB": "through the host bridge of their processors",
    "NODE": "from one host bridge to another of the same NUMA node",
    "SYS": "through the interconnect between NUMA nodes",
}
"""The classes of NCCL and `nvidia-smi topo`, near ones first, and what they mean."""

DIRECT_CLASSES = ("LOC", "PIX", "PXB")
"""Ways that pass no host bridge: a NIC can write into the memory of a GPU without passing the processors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """The way from a worker to an interface."""

    num_hops: int
    """Edges of the tree on it."""
    kind: str
    """One of `MEANINGS`."""


def way(machine: Machine, worker: Worker, interface: Interface) -> Way | None:
    """The way through the tree, up to what both hang on and down again; None where the interface has no place in it.

    To a bond or bridge that has several it is the shortest.

    Every edge counts one, whatever it is: from a port of a switch to its next, from a host bridge to its processors,
    from processors up to the machine (the interconnect of NUMA nodes) and down to others. Hops compare devices of one
    machine as one input tells it; hwloc tells each port of a switch, NCCL's files the switch as a whole.

    Source: NVIDIA/nccl, src/graph/topo.h (path types), and the legend of `nvidia-smi topo -m` for the classes.
    """
    ways = [_way_to(machine, worker, part) for part in interface.all_parts]
    return min(ways, key=lambda way: way.num_hops, default=None)


def _way_to(machine: Machine, worker: Worker, part: int) -> Way:
    up, down = list(machine.way_up(worker.part)), list(machine.way_up(part))
    common = next(part for part in up if part in set(down))
    near, far = up[: up.index(common)], down[: down.index(common)]
    return Way(num_hops=len(near) + len(far), kind=_kind(machine, near, far, common))


def _kind(machine: Machine, near: list[int], far: list[int], common: int) -> str:
    """The class of a way.

    Args:
        machine: Whose tree it is.
        near: Parts from the worker up to below the common one.
        far: Parts from the interface up to below the common one.
        common: What both hang on.
    """
    top = machine.parts[common]
    if top.kind == "host-bridge":
        return "PHB"
    if not top.is_place:
        return "LOC" if not near and not far else _switch_kind(machine, near[1:], far[1:])
    is_one_numa = any(machine.parts[part].numas for part in machine.way_up(common))
    from_places = [machine.parts[part] for part in near if machine.parts[part].is_place]
    to_places = [part for part in far if machine.parts[part].is_place]
    is_on_processors = not near or machine.parts[near[0]].is_place
    if not is_one_numa and (to_places or (from_places and not is_on_processors)):
        return "SYS"
    if is_on_processors:
        return "PHB"
    return "NODE" if machine.parts[far[-1]].kind == "host-bridge" else "PHB"


def _switch_kind(machine: Machine, near: list[int], far: list[int]) -> str:
    """PIX or PXB, by the bridges on both sides of the one that both hang on.

    One port on each side is still one switch: its two downstream ports below its upstream port.
    """
    sides = [[machine.parts[part].kind for part in side if machine.parts[part].kind in BRIDGES] for side in (near, far)]
    return "PIX" if all(side in ([], ["bridge"]) for side in sides) else "PXB"
