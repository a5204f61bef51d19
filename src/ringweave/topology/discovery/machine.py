"""Machine as data: the tree of its parts, its network interfaces and compute devices; PCI classes; the builder.

The tree is that of the input, without branches that lead to no device of interest: the machine, groups and packages and
NUMA nodes, host bridges, PCIe bridges, PCI functions. Nothing here reads anything; the readers make machines.
"""

import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ringweave.files.problems import shorten_names

PROCESSOR_PART_KINDS = ("machine", "group", "package", "numa")
"""Kinds of parts that hold processors; a path between two of them takes the interconnect of NUMA nodes."""
BRIDGE_PART_KINDS = ("bridge", "switch")
"""Kinds of PCIe parts that hold others. hwloc and sysfs list every port of a switch, NCCL the switch as a whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MachinePart:
    """A vertex of the tree."""

    kind: str
    """`machine`, `group`, `package`, `numa`, `host-bridge`, `bridge` (one port), `switch` (a whole one) or `pci`."""
    name: str
    """Display name: `NUMA 0`, `bridge 0000:00:01.0`. Not unique: some files repeat bus addresses."""
    parent: int = -1
    """Index of the part above, which comes before this one; -1 for the machine."""
    numas: tuple[int, ...] = ()
    """NUMA nodes whose processors this part is; empty where it is none, or where that is unknown."""

    @property
    def holds_processors(self) -> bool:
        return self.kind in PROCESSOR_PART_KINDS


@dataclass(frozen=True, kw_only=True, slots=True)
class NvLinks:
    """NVLinks of a GPU, as far as the input lists them."""

    num_links: int | None = None
    """None where the input gives only their rate."""
    bytes_per_s: float | None = None
    """Rate of all together, in one direction; None where unknown."""
    peers: tuple[str, ...] = ()
    """Remote ends: bus addresses, or kinds such as NVSwitch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeDevice:
    """Compute device of one worker: a GPU, or the processors of one NUMA node."""

    name: str
    """`cuda0`, `gpu1`, `NUMA 0`; unique on the machine."""
    kind: str
    """`cuda` or `cpu`."""
    part: int
    model: str = ""
    """Product name; empty where unknown."""
    bus: str = ""
    """PCI address; empty for processors."""
    has_gpudirect: bool | None = None
    """GPUDirect RDMA works, as the input states; None where it says nothing."""
    nvlinks: NvLinks | None = None
    """None where the input lists none."""
    uuids: tuple[str, ...] = ()
    """UUIDs of the GPU and of its MIG instances from NVML; empty where NVML does not list it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkInterface:
    """A network interface of the machine."""

    name: str
    """`eth0`, or the RDMA device or PCI address where there is no interface; unique on the machine."""
    part: int | None = None
    """Index of its PCI function in the tree; None where it has none (virtual) or it is unknown."""
    more_parts: tuple[int, ...] = ()
    """PCI functions of further members of a bond or bridge."""
    members: tuple[str, ...] = ()
    """Names of the members that a bond or bridge replaces."""
    bus: str = ""
    """PCI address; empty where it has none."""
    hardware_address: str = ""
    """MAC address or similar; empty where unknown."""
    verbs: str = ""
    """Its OpenFabrics device, such as mlx5_0; empty where there is none."""
    has_rdma: bool = False
    is_infiniband: bool = False
    """Its link layer is InfiniBand."""
    is_virtual: bool = False
    """Software, such as veth or a bridge."""
    is_unclassified: bool = False
    """The input lists a PCI function without its class: a NIC only if the user says so."""
    is_up: bool | None = None
    """Its link is up; None where the input does not say."""
    rate_bytes_per_s: float | None = None
    """Rate of each direction; None where unknown."""
    bus_bytes_per_s: float | None = None
    """Rate of its PCIe link, an upper limit; None where unknown."""
    has_gpudirect: bool | None = None
    """GPUDirect RDMA works with it, as the input states; None where it says nothing."""
    addresses: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()
    """Its IP addresses with prefix lengths, such as 10.0.0.5/24."""
    driver: str = ""
    """Kind of a software interface, such as veth or bridge; empty where unknown."""

    @property
    def all_parts(self) -> tuple[int, ...]:
        """Indices of all its parts in the tree."""
        return () if self.part is None else (self.part, *self.more_parts)

    @property
    def is_reachable(self) -> bool:
        """Other machines can address it: by IP, or by RDMA, which has its own addresses."""
        return bool(self.addresses) or self.has_rdma


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A machine as described by one input; `source` names the input."""

    name: str
    """Host name, or the name of the file where it has none."""
    source: str
    """Completes "according to"."""
    parts: tuple[MachinePart, ...]
    """Parents before children; the first is the machine itself."""
    workers: tuple[ComputeDevice, ...]
    """GPUs by bus address, or NUMA nodes by index if there are none. LOCAL_RANK indexes them."""
    interfaces: tuple[NetworkInterface, ...]
    """In tree order; those without a part come last."""
    remarks: tuple[str, ...] = ()
    """Sentences about gaps of the input, and about left-out parts."""

    def path_to_root(self, part: int) -> Iterator[int]:
        """Yield the part and all parts above it, up to the machine."""
        while part >= 0:
            yield part
            part = self.parts[part].parent

    def numa_of(self, *parts: int) -> int | None:
        """Return the NUMA node that all parts belong to; None where it is unknown, or where there are several."""
        numas = {
            numa
            for part in parts
            for numa in next((self.parts[at].numas for at in self.path_to_root(part) if self.parts[at].numas), (None,))
        }
        return numas.pop() if len(numas) == 1 else None


NVIDIA_VENDOR, AMD_VENDOR, AMAZON_VENDOR = 0x10DE, 0x1002, 0x1D0F

_DISPLAY_CLASS, _3D_CLASS, _OTHER_DISPLAY_CLASS = 0x0300, 0x0302, 0x0380
_INFINIBAND_CLASSES = (0x0207, 0x0C06)
_BRIDGE_CLASS = 0x0604
_NETWORK_BASE_CLASS, _ACCELERATOR_BASE_CLASS = 0x02, 0x12
_EFA_DEVICES = range(0xEFA0, 0xEFB0)
"""Amazon's Elastic Fabric Adapter: RDMA, although its class is Ethernet (rdma-core, providers/efa)."""

_PCI_ADDRESS_PATTERN = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", re.IGNORECASE)

_VERBS_NAME_PATTERN = re.compile(
    r"(mlx[45]_|mthca|qib|hfi1_|ipath|ehca|usnic_|efa_|rdmap|bnxt_re|irdma|i40iw|i\w*cxgb|cxgb4_|ocrdma|hns_|qedr|erdma_)"
)
"""Names of OpenFabrics devices; old files list some of these as network interfaces."""


PciAddress = tuple[int, int, int, int]
"""Domain, bus, device and function."""


def parse_pci_address(text: str) -> PciAddress | None:
    """Return domain, bus, device and function, which sort like the bus; None if it is no PCI address."""
    match = _PCI_ADDRESS_PATTERN.fullmatch(text)
    if match is None:
        return None
    domain, bus, device, function = (int(part or "0", 16) for part in match.groups())
    return domain, bus, device, function


def is_infiniband_class(pci_class: int) -> bool:
    """Return whether it is an InfiniBand controller, of the old class or the new one."""
    return pci_class in _INFINIBAND_CLASSES


def is_network_class(pci_class: int) -> bool:
    """Return whether it is a network adapter."""
    return pci_class >> 8 == _NETWORK_BASE_CLASS or is_infiniband_class(pci_class)


def is_bridge_class(pci_class: int) -> bool:
    """Return whether it is a PCI bridge."""
    return pci_class == _BRIDGE_CLASS


def is_gpu_function(pci_class: int, vendor: int) -> bool:
    """Return whether PyTorch could compute on it: NVIDIA displays; AMD devices without a screen (Instinct)."""
    if vendor == NVIDIA_VENDOR:
        return pci_class in (_DISPLAY_CLASS, _3D_CLASS)
    return vendor == AMD_VENDOR and (
        pci_class in (_3D_CLASS, _OTHER_DISPLAY_CLASS) or pci_class >> 8 == _ACCELERATOR_BASE_CLASS
    )


def is_rdma_adapter(pci_class: int, vendor: int, device: int) -> bool:
    """Return whether it supports RDMA."""
    return is_infiniband_class(pci_class) or (vendor == AMAZON_VENDOR and device in _EFA_DEVICES)


def is_verbs_device_name(name: str) -> bool:
    """Return whether the name is one of OpenFabrics devices and not of network interfaces."""
    return _VERBS_NAME_PATTERN.match(name) is not None


def verbs_device_does_rdma(verbs_name: str) -> bool:
    """Return whether an OpenFabrics device supports RDMA: all except Cisco's usNIC, which sends datagrams only (UD)."""
    return bool(verbs_name) and not verbs_name.startswith("usnic_")


@dataclass(frozen=True, kw_only=True, slots=True)
class PciFunction:
    """A PCI function as described by an input."""

    bus: str
    """Its address as written; empty where it has none."""
    pci_class: int = 0
    """Class and subclass, such as 0x0200; 0 where unknown."""
    vendor: int = 0
    device: int = 0
    model: str = ""
    interfaces: Sequence[str] = ()
    """Its network interfaces, such as eth0."""
    verbs: Sequence[str] = ()
    """Its OpenFabrics devices."""
    accelerators: Sequence[str] = ()
    """Names that runtimes give it (cuda0, nvml0, rsmi0), where it is a GPU to them."""
    infiniband_interfaces: Sequence[str] = ()
    """The subset of `interfaces` known to be IP over InfiniBand."""
    hardware_addresses: Mapping[str, str] = field(default_factory=dict)
    """By interface, where known."""
    is_up: bool | None = None
    bus_bytes_per_s: float | None = None
    has_gpudirect: bool | None = None
    nvlinks: NvLinks | None = None
    rates: Mapping[str, float] = field(default_factory=dict)
    """Bytes per second by interface or OpenFabrics device, where known."""


class MachineBuilder:
    """Collects parts, interfaces and devices; `build` leaves out branches without any."""

    def __init__(self, name: str, source: str) -> None:
        self._name = name
        self._source = source
        self._parts = [MachinePart(kind="machine", name=name)]
        self._interfaces: list[NetworkInterface] = []
        self._gpus: list[tuple[tuple[tuple[int, ...], int], ComputeDevice]] = []
        self._idle: list[str] = []
        self._remarks: dict[str, None] = {}

    def add_part(self, kind: str, name: str, parent: int = 0, numas: Sequence[int] = ()) -> int:
        self._parts.append(MachinePart(kind=kind, name=name, parent=parent, numas=tuple(numas)))
        return len(self._parts) - 1

    def mark_numa(self, part: int, numa: int) -> None:
        """Mark a part as the processors of a NUMA node."""
        old = self._parts[part]
        self._parts[part] = replace(old, numas=(*old.numas, numa))

    def add_remark(self, sentence: str) -> None:
        """Add a remark on something that the input leaves open; duplicates are ignored."""
        self._remarks[sentence] = None

    def add_function(self, parent: int, function: PciFunction, *, lists_interfaces: bool) -> None:
        """Add a PCI function: a GPU, a NIC, or nothing of interest.

        `lists_interfaces`: the input lists interfaces, so an adapter without one is not in use.
        """
        if is_gpu_function(function.pci_class, function.vendor):
            self._add_gpu(self.add_part("pci", f"GPU {function.bus}", parent), function)
        elif function.interfaces or function.verbs:
            self._add_interfaces(self.add_part("pci", f"NIC {function.bus}", parent), function)
        elif is_network_class(function.pci_class):
            if lists_interfaces:
                self._idle.append(function.bus)
            else:
                self._add_interfaces(self.add_part("pci", f"NIC {function.bus}", parent), function)
        elif function.accelerators:
            names = ", ".join(function.accelerators)
            self.add_remark(
                f"{function.bus} ({names}) is a display adapter that PyTorch has no CUDA or ROCm for: left out"
            )

    def add_unclassified(self, parent: int, bus: str) -> None:
        """Add a PCI function without a known class."""
        part = self.add_part("pci", f"function {bus}", parent)
        self._interfaces.append(NetworkInterface(name=bus, part=part, bus=bus, is_unclassified=True))

    def build(self) -> Machine:
        """Return the machine. Its compute devices are GPUs, else NUMA nodes, else packages, else the machine itself."""
        gpus = [worker for _, worker in sorted(self._gpus, key=operator.itemgetter(0))]
        workers = _with_unique_device_names(gpus) if gpus else self._processor_devices()
        needed = {
            part
            for user in (*workers, *self._interfaces)
            if user.part is not None
            for part in self._part_and_above(user.part)
        }
        needed |= {part for index, part in enumerate(self._parts) if part.numas for part in self._part_and_above(index)}
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
                replace(nic, part=None if nic.part is None else place[nic.part])
                for nic in _with_unique_interface_names(self._interfaces)
            ),
            remarks=tuple(self._remarks),
        )

    def _remark_functions(self) -> None:
        unknown = [nic.name for nic in self._interfaces if nic.is_unclassified]
        if unknown:
            told = f"{len(unknown)} PCI functions ({shorten_names(unknown, len(unknown))})"
            self.add_remark(
                f"the input does not tell what {told} are: GPUs or NICs; --nic ADDRESS says which is the NIC"
            )
        if self._idle:
            names = shorten_names(self._idle, len(self._idle))
            self.add_remark(f"network adapters that have no interface are left out: {names}")

    def _add_gpu(self, part: int, function: PciFunction) -> None:
        name = function.accelerators[0] if function.accelerators else ""
        worker = ComputeDevice(
            name=name,
            kind="cuda",
            part=part,
            model=function.model,
            bus=function.bus,
            has_gpudirect=function.has_gpudirect,
            nvlinks=function.nvlinks,
        )
        self._gpus.append(((parse_pci_address(function.bus) or (), part), worker))

    def _add_interfaces(self, part: int, function: PciFunction) -> None:
        """Add its interfaces; where there are none, its OpenFabrics device, or else the function itself."""
        verbs = function.verbs[0] if function.verbs else ""
        is_infiniband = is_infiniband_class(function.pci_class)
        does_rdma = verbs_device_does_rdma(verbs) or is_rdma_adapter(
            function.pci_class, function.vendor, function.device
        )
        for name in function.interfaces or (verbs or function.bus,):
            told = name in function.infiniband_interfaces if function.infiniband_interfaces else is_infiniband
            self._interfaces.append(
                NetworkInterface(
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

    def _processor_devices(self) -> list[ComputeDevice]:
        found, are_numas = processor_devices(self._parts)
        if not are_numas:
            self.add_remark("the input tells no NUMA nodes")
        return found

    def _part_and_above(self, part: int) -> list[int]:
        return _part_and_parts_above(self._parts, part)


def processor_devices(parts: Sequence[MachinePart]) -> tuple[list[ComputeDevice], bool]:
    """Return the processors as compute devices, and whether these are NUMA nodes (else packages, or the machine).

    NUMA nodes come in the order of their indices; a part with several NUMA nodes counts as its first one.
    """
    places = [(part.numas[0], index) for index, part in enumerate(parts) if part.numas]
    holders = {above for _, index in places for above in _part_and_parts_above(parts, parts[index].parent)}
    inner = [(numa, index) for numa, index in places if index not in holders]
    if inner:
        return [ComputeDevice(name=f"NUMA {numa}", kind="cpu", part=index) for numa, index in sorted(inner)], True
    packages = [index for index, part in enumerate(parts) if part.kind == "package"] or [0]
    return [ComputeDevice(name=parts[index].name, kind="cpu", part=index) for index in packages], False


def _part_and_parts_above(parts: Sequence[MachinePart], part: int) -> list[int]:
    found = []
    while part >= 0:
        found.append(part)
        part = parts[part].parent
    return found


def _with_unique_device_names(gpus: Sequence[ComputeDevice]) -> list[ComputeDevice]:
    """Name GPUs that have no name or a duplicate one by their index."""
    taken = [worker.name for worker in gpus]
    return [
        worker if worker.name and taken.count(worker.name) == 1 else replace(worker, name=f"gpu{index}")
        for index, worker in enumerate(gpus)
    ]


def _with_unique_interface_names(interfaces: Sequence[NetworkInterface]) -> list[NetworkInterface]:
    """Make names unique: a duplicate gets a number."""
    found: dict[str, NetworkInterface] = {}
    for nic in interfaces:
        name, number = nic.name, 1
        while name in found:
            number += 1
            name = f"{nic.name}-{number}"
        found[name] = nic if name == nic.name else replace(nic, name=name)
    return list(found.values())
