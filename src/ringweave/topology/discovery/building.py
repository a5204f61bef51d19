"""From what a reader sees, part by part, to a machine: what PCI functions are, which parts of the tree matter."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ringweave.files.problems import listed
from ringweave.topology.discovery import pci
from ringweave.topology.discovery.machine import Interface, Machine, NvLinks, Part, Worker


@dataclass(frozen=True, kw_only=True, slots=True)
class Function:
    """A PCI function as an input tells it."""

    bus: str
    """Its address as written; empty where it has none."""
    pci_class: int = 0
    """Class and subclass, such as 0x0200; 0 where it is not told."""
    vendor: int = 0
    device: int = 0
    model: str = ""
    interfaces: Sequence[str] = ()
    """Network interfaces that it is, such as eth0."""
    verbs: Sequence[str] = ()
    """OpenFabrics devices that it is."""
    accelerators: Sequence[str] = ()
    """What runtimes call it (cuda0, nvml0, rsmi0), where it is a GPU to them."""
    infiniband_interfaces: Sequence[str] = ()
    """Those of `interfaces` that are known to be IP over InfiniBand."""
    hardware_addresses: Mapping[str, str] = field(default_factory=dict)
    """Of `interfaces`, where they are told."""
    is_up: bool | None = None
    bus_bytes_per_s: float | None = None
    has_gpudirect: bool | None = None
    nvlinks: NvLinks | None = None
    rates: Mapping[str, float] = field(default_factory=dict)
    """Bytes per second by interface or OpenFabrics device, where they are told."""


class MachineBuilder:
    """Collects parts, interfaces and workers; `build` leaves out what leads nowhere."""

    def __init__(self, name: str, source: str) -> None:
        self._name = name
        self._source = source
        self._parts = [Part(kind="machine", name=name)]
        self._interfaces: list[Interface] = []
        self._gpus: list[tuple[tuple[tuple[int, ...], int], Worker]] = []
        self._idle: list[str] = []
        self._remarks: dict[str, None] = {}

    def add(self, kind: str, name: str, parent: int = 0, numas: Sequence[int] = ()) -> int:
        """Index of a new part."""
        self._parts.append(Part(kind=kind, name=name, parent=parent, numas=tuple(numas)))
        return len(self._parts) - 1

    def place_numa(self, part: int, numa: int) -> None:
        """Say that a part is the processors of a NUMA node."""
        old = self._parts[part]
        self._parts[part] = replace(old, numas=(*old.numas, numa))

    def remark(self, sentence: str) -> None:
        """Say what the input leaves open; once is enough."""
        self._remarks[sentence] = None

    def function(self, parent: int, function: Function, *, names_interfaces: bool) -> None:
        """Add a PCI function: a GPU, a NIC, or nothing of interest.

        Args:
            parent: The part that it hangs on.
            function: What is known of it.
            names_interfaces: The input tells interfaces, so an adapter without one is not in use.
        """
        if pci.is_gpu(function.pci_class, function.vendor):
            self._gpu(self.add("pci", f"GPU {function.bus}", parent), function)
        elif function.interfaces or function.verbs:
            self._nics(self.add("pci", f"NIC {function.bus}", parent), function)
        elif pci.is_network(function.pci_class):
            if names_interfaces:
                self._idle.append(function.bus)
            else:
                self._nics(self.add("pci", f"NIC {function.bus}", parent), function)
        elif function.accelerators:
            names = ", ".join(function.accelerators)
            self.remark(f"{function.bus} ({names}) is a display adapter that PyTorch has no CUDA or ROCm for: left out")

    def unclassified(self, parent: int, bus: str) -> None:
        """Add a PCI function of which the input tells nothing but that it is there."""
        part = self.add("pci", f"function {bus}", parent)
        self._interfaces.append(Interface(name=bus, part=part, bus=bus, is_unclassified=True))

    def virtual(self, interfaces: Iterable[Interface]) -> None:
        """Add interfaces that hang on no part."""
        self._interfaces.extend(interfaces)

    def build(self) -> Machine:
        """The machine: GPUs as workers, or NUMA nodes, or packages, or the machine itself."""
        gpus = [worker for _, worker in sorted(self._gpus, key=operator.itemgetter(0))]
        workers = _named(gpus) if gpus else self._processors()
        needed = {
            part for user in (*workers, *self._interfaces) if user.part is not None for part in self._up(user.part)
        }
        needed |= {part for index, part in enumerate(self._parts) if part.numas for part in self._up(index)}
        order = sorted(needed | {0})
        self._remark_functions()
        place = {old: new for new, old in enumerate(order)}
        parts = [replace(self._parts[old], parent=place.get(self._parts[old].parent, -1)) for old in order]
        return Machine(
            name=self._name,
            source=self._source,
            parts=tuple(parts),
            workers=tuple(replace(worker, part=place[worker.part]) for worker in workers),
            interfaces=tuple(
                replace(nic, part=None if nic.part is None else place[nic.part]) for nic in _once(self._interfaces)
            ),
            remarks=tuple(self._remarks),
        )

    def _remark_functions(self) -> None:
        unknown = [nic.name for nic in self._interfaces if nic.is_unclassified]
        if unknown:
            told = f"{len(unknown)} PCI functions ({listed(unknown, len(unknown))})"
            self.remark(f"the input does not tell what {told} are: GPUs or NICs; --nic ADDRESS says which is the NIC")
        if self._idle:
            names = listed(self._idle, len(self._idle))
            self.remark(f"network adapters that have no interface are left out: {names}")

    def _gpu(self, part: int, function: Function) -> None:
        name = function.accelerators[0] if function.accelerators else ""
        worker = Worker(
            name=name,
            kind="cuda",
            part=part,
            model=function.model,
            bus=function.bus,
            has_gpudirect=function.has_gpudirect,
            nvlinks=function.nvlinks,
        )
        self._gpus.append(((pci.parse_address(function.bus) or (), part), worker))

    def _nics(self, part: int, function: Function) -> None:
        """One interface each; where it has none its OpenFabrics device, or else the function itself."""
        verbs = function.verbs[0] if function.verbs else ""
        is_infiniband = pci.is_infiniband(function.pci_class)
        does_rdma = pci.does_rdma(verbs) or pci.is_rdma_adapter(function.pci_class, function.vendor, function.device)
        for name in function.interfaces or (verbs or function.bus,):
            told = name in function.infiniband_interfaces if function.infiniband_interfaces else is_infiniband
            self._interfaces.append(
                Interface(
                    name=name,
                    part=part,
                    bus=function.bus,
                    hardware_address=function.hardware_addresses.get(name, ""),
                    verbs=verbs,
                    has_rdma=does_rdma,
                    is_infiniband=told,
                    is_up=function.is_up,
                    rate_bytes_per_s=function.rates.get(name, function.rates.get(verbs)),
                    bus_bytes_per_s=function.bus_bytes_per_s,
                    has_gpudirect=function.has_gpudirect,
                )
            )

    def _processors(self) -> list[Worker]:
        found, are_numas = processors(self._parts)
        if not are_numas:
            self.remark("the input tells no NUMA nodes")
        return found

    def _up(self, part: int) -> list[int]:
        return _up(self._parts, part)


def processors(parts: Sequence[Part]) -> tuple[list[Worker], bool]:
    """(processors as workers, whether they are NUMA nodes): else they are packages, or the machine as a whole.

    NUMA nodes in the order of their indices; each place of several counts as its first one.
    """
    places = [(part.numas[0], index) for index, part in enumerate(parts) if part.numas]
    holders = {above for _, index in places for above in _up(parts, parts[index].parent)}
    inner = [(numa, index) for numa, index in places if index not in holders]
    if inner:
        return [Worker(name=f"NUMA {numa}", kind="cpu", part=index) for numa, index in sorted(inner)], True
    packages = [index for index, part in enumerate(parts) if part.kind == "package"] or [0]
    return [Worker(name=parts[index].name, kind="cpu", part=index) for index in packages], False


def _up(parts: Sequence[Part], part: int) -> list[int]:
    """The part and all above it."""
    found = []
    while part >= 0:
        found.append(part)
        part = parts[part].parent
    return found


def _named(gpus: Sequence[Worker]) -> list[Worker]:
    """GPUs without a name, or with one that another has, are called by their place."""
    taken = [worker.name for worker in gpus]
    return [
        worker if worker.name and taken.count(worker.name) == 1 else replace(worker, name=f"gpu{index}")
        for index, worker in enumerate(gpus)
    ]


def _once(interfaces: Sequence[Interface]) -> list[Interface]:
    """Names are unique on a machine; a second one gets its address, then a number."""
    found: dict[str, Interface] = {}
    for nic in interfaces:
        name, number = nic.name, 1
        while name in found:
            number += 1
            name = f"{nic.name}-{number}"
        found[name] = nic if name == nic.name else replace(nic, name=name)
    return list(found.values())
