"""One machine as data: the tree of what its devices hang on, its network interfaces, and what workers compute on.

The tree is that of the input, without what leads to no device of interest: the machine, groups and packages and NUMA
nodes, host bridges, PCIe bridges, PCI functions. Nothing here reads anything; `readers` make machines.
"""

from collections.abc import Iterator
from dataclasses import dataclass

PLACES = ("machine", "group", "package", "numa")
"""Kinds of parts that hold processors; the way between two of them takes the interconnect of NUMA nodes."""
BRIDGES = ("bridge", "switch")
"""Kinds of PCIe parts that hold others. hwloc and sysfs tell every port of a switch, NCCL the switch as a whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A vertex of the tree."""

    kind: str
    """`machine`, `group`, `package`, `numa`, `host-bridge`, `bridge` (one port), `switch` (a whole one) or `pci`."""
    name: str
    """What people call it: `NUMA 0`, `bridge 0000:00:01.0`. Not unique: files of strangers repeat bus addresses."""
    parent: int = -1
    """Index of the part above, which comes before this one; -1 for the machine."""
    numas: tuple[int, ...] = ()
    """NUMA nodes whose processors this part is; empty where it is none, or where that is not known."""

    @property
    def is_place(self) -> bool:
        """It holds processors."""
        return self.kind in PLACES


@dataclass(frozen=True, kw_only=True, slots=True)
class NvLinks:
    """The NVLinks of a GPU, as far as the input tells."""

    num_links: int | None = None
    """None where only their rate is told."""
    bytes_per_s: float | None = None
    """Of all together, one direction; None where it is not told."""
    peers: tuple[str, ...] = ()
    """What is at the other ends: bus addresses or kinds, such as NVSwitch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Worker:
    """What one worker computes on: a GPU, or the processors of one NUMA node."""

    name: str
    """`cuda0`, `gpu1`, `NUMA 0`; unique on the machine."""
    kind: str
    """`cuda` or `cpu`."""
    part: int
    """Where it is in the tree."""
    model: str = ""
    """What its maker calls it; empty where it is not told."""
    bus: str = ""
    """PCI address; empty for processors."""
    has_gpudirect: bool | None = None
    """GPUDirect RDMA works, as the input states; None where it says nothing."""
    nvlinks: NvLinks | None = None
    """None where the input tells of none."""
    uuids: tuple[str, ...] = ()
    """Of the GPU and of its instances by MIG, as NVML tells; empty where NVML does not list it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interface:
    """What connects the machine to a network."""

    name: str
    """`eth0`, or the RDMA device or PCI address where there is no interface; unique on the machine."""
    part: int | None = None
    """Its PCI function in the tree; None where it has no place there (virtual), or none that is known."""
    more_parts: tuple[int, ...] = ()
    """Of a bond or bridge, the PCI functions of its further members."""
    members: tuple[str, ...] = ()
    """Of a bond or bridge that is in the place of NICs, their names."""
    bus: str = ""
    """PCI address; empty where it has none."""
    hardware_address: str = ""
    """Its MAC address or its like; empty where it is not told."""
    verbs: str = ""
    """Its OpenFabrics device, such as mlx5_0; empty where there is none."""
    has_rdma: bool = False
    """Can do RDMA."""
    is_infiniband: bool = False
    """Its link layer is InfiniBand."""
    is_virtual: bool = False
    """Software, such as veth or a bridge."""
    is_unclassified: bool = False
    """The input tells a PCI function but not what it is: a NIC only if somebody says so."""
    is_up: bool | None = None
    """Its link is up; None where the input does not say."""
    rate_bytes_per_s: float | None = None
    """Rate of each direction; None where it is not known."""
    bus_bytes_per_s: float | None = None
    """Rate of its PCIe link, which it cannot pass; None where it is not known."""
    has_gpudirect: bool | None = None
    """GPUDirect RDMA works with it, as the input states; None where it says nothing."""
    addresses: tuple[str, ...] = ()
    """Its IP addresses."""
    networks: tuple[str, ...] = ()
    """Its IP addresses with the lengths of their networks' prefixes, such as 10.0.0.5/24."""
    driver: str = ""
    """Of software, what kind it is, such as veth or bridge; empty where that is not told."""

    @property
    def all_parts(self) -> tuple[int, ...]:
        """Its place in the tree, or its places."""
        return () if self.part is None else (self.part, *self.more_parts)

    @property
    def is_reachable(self) -> bool:
        """Other machines can address it: by IP, or by RDMA, which has addresses of its own."""
        return bool(self.addresses) or self.has_rdma


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A machine as far as an input tells; `source` says which input that is."""

    name: str
    """Host name, or the name of the file where it has none."""
    source: str
    """Completes "according to"."""
    parts: tuple[Part, ...]
    """Parents before children; the first is the machine itself."""
    workers: tuple[Worker, ...]
    """GPUs by bus address, or, where there is none, NUMA nodes by index. LOCAL_RANK counts them."""
    interfaces: tuple[Interface, ...]
    """In the order of the tree; those without a place last."""
    remarks: tuple[str, ...] = ()
    """What the input leaves open or what was left out, in sentences."""

    def way_up(self, part: int) -> Iterator[int]:
        """The part and all above it, up to the machine."""
        while part >= 0:
            yield part
            part = self.parts[part].parent

    def numa_of(self, *parts: int) -> int | None:
        """The NUMA node that all parts belong to; None where that is not known, or where there are several."""
        numas = {
            numa
            for part in parts
            for numa in next((self.parts[at].numas for at in self.way_up(part) if self.parts[at].numas), (None,))
        }
        return numas.pop() if len(numas) == 1 else None
