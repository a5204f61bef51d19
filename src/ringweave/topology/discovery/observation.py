"""Observation of machines: a topology file of hwloc or NCCL, or this machine itself."""

import contextlib
import importlib
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ringweave.topology.discovery import machine as discovery_machine
from ringweave.topology.discovery import safe_xml, sysfs
from ringweave.topology.discovery.machine import (
    ComputeDevice,
    Machine,
    MachineBuilder,
    NetworkInterface,
    NvLinks,
    PciFunction,
)
from ringweave.topology.discovery.safe_xml import XmlElement, topology_file_error


def complete_from_sysfs(machine: Machine, sysfs_machine: Machine) -> Machine:
    """Return hwloc's machine, with missing facts of the same PCI functions from the other one.

    hwloc says neither whether NICs may access the memory of NVIDIA's GPUs (the module nvidia_peermem) nor the rates of
    RDMA ports that have no network interface.
    """
    workers = {discovery_machine.parse_pci_address(each.bus): each for each in sysfs_machine.workers if each.bus}
    interfaces = {
        (discovery_machine.parse_pci_address(each.bus), name): each
        for each in sysfs_machine.interfaces
        for name in _matching_names(each)
    }
    return replace(
        machine,
        workers=tuple(
            _completed_device(each, workers.get(discovery_machine.parse_pci_address(each.bus)))
            for each in machine.workers
        ),
        interfaces=tuple(
            _completed_interface(each, _matching_interface(each, interfaces)) for each in machine.interfaces
        ),
    )


def _matching_interface(
    nic: NetworkInterface, known: Mapping[tuple[discovery_machine.PciAddress | None, str], NetworkInterface]
) -> NetworkInterface | None:
    where = discovery_machine.parse_pci_address(nic.bus)
    return next((known[where, name] for name in _matching_names(nic) if where and (where, name) in known), None)


def _completed_device(worker: ComputeDevice, sysfs_device: ComputeDevice | None) -> ComputeDevice:
    if sysfs_device is None or worker.has_gpudirect is not None:
        return worker
    return replace(worker, has_gpudirect=sysfs_device.has_gpudirect)


def _completed_interface(nic: NetworkInterface, sysfs_interface: NetworkInterface | None) -> NetworkInterface:
    if sysfs_interface is None:
        return nic
    return replace(
        nic,
        verbs=nic.verbs or sysfs_interface.verbs,
        has_rdma=nic.has_rdma or sysfs_interface.has_rdma,
        is_infiniband=nic.is_infiniband or sysfs_interface.is_infiniband,
        is_up=sysfs_interface.is_up if nic.is_up is None else nic.is_up,
        rate_bytes_per_s=nic.rate_bytes_per_s or sysfs_interface.rate_bytes_per_s,
        hardware_address=nic.hardware_address or sysfs_interface.hardware_address,
        has_gpudirect=sysfs_interface.has_gpudirect if nic.has_gpudirect is None else nic.has_gpudirect,
    )


def _matching_names(nic: NetworkInterface) -> list[str]:
    """Return the names that identify it in both: its own, then that of its OpenFabrics device."""
    return [nic.name, *filter(None, [nic.verbs])]


_MAX_MATRIX_OBJECTS = 1024
_NVLINK_MATRIX = "NVLinkBandwidth"


def read_nvlink_matrix(root: XmlElement, where: str) -> dict[str, NvLinks]:
    """Return the NVLinks of each object by its gp_index; empty where the document lists none.

    Raises:
        UsageError: The matrix is malformed or does not fit its objects.
    """
    found: dict[str, NvLinks] = {}
    for tag in ("distances2", "distances2hetero"):
        for matrix in root.find_all(tag):
            if matrix.attributes.get("name") == _NVLINK_MATRIX:
                found |= _nvlinks_by_object(matrix, tag, f"{where}:{matrix.line}")
    return found


def _nvlinks_by_object(matrix: XmlElement, tag: str, where: str) -> dict[str, NvLinks]:
    names = _matrix_words(matrix, "indexes")
    if tag == "distances2" and matrix.attributes.get("indexing") != "gp":
        return {}
    values = _matrix_words(matrix, "u64values")
    count = len(names)
    is_sound = 0 < count <= _MAX_MATRIX_OBJECTS and len(values) == count * count and all(map(str.isdecimal, values))
    if not is_sound or matrix.attributes.get("nbobjs") != str(count):
        got = f"{count} objects and {len(values)} values"
        expected = f"as many values as the square of the objects, at most {_MAX_MATRIX_OBJECTS} of them"
        raise topology_file_error(
            f"{_NVLINK_MATRIX} of a topology file", got, expected, "Export the machine again", where
        )
    rates = [float(value) * 1e6 for value in values]
    kinds = [name.rpartition(":")[0] for name in names]
    keys = [name.rpartition(":")[2] for name in names]
    found = {}
    for row, key in enumerate(keys):
        linked = [column for column in range(count) if column != row and rates[row * count + column] > 0]
        if linked:
            total = sum(rates[row * count + column] for column in linked)
            found[key] = NvLinks(bytes_per_s=total, peers=tuple(_peer_text(kinds[c], keys[c]) for c in linked))
    return found


def _peer_text(kind: str, key: str) -> str:
    """Return the name of a peer: GPUs are OS devices in the matrix, NVSwitches bare PCI functions."""
    return "NVSwitch" if kind == "PCIDev" else f"GPU {key}"


def _matrix_words(matrix: XmlElement, tag: str) -> Sequence[str]:
    return [word for part in matrix.find_all(tag) for word in part.text.split()]


HWLOC_ROOT = "topology"

_PART_KINDS = {"Group": "group", "Package": "package", "Socket": "package", "Die": "group", "NUMANode": "numa"}
_PCI_TYPE = re.compile(r"([0-9a-f]{4}) \[([0-9a-f]{4}):([0-9a-f]{4})\].*", re.IGNORECASE)
_PORT_ACTIVE = "4"
_IPOIB_ADDRESS_BYTES = 20

_OSDEV_BITS = {"network": 1 << 4, "verbs": 1 << 5, "coprocessor": 1 << 3}
_OSDEV_NUMBERS = {"network": 2, "verbs": 3, "coprocessor": 5}


def read_hwloc(root: XmlElement, *, where: str, fallback_name: str) -> Machine:
    """Read the machine from a document.

    `fallback_name`: name of the machine where the document has no host name.

    Raises:
        UsageError: It is not of a known format, or an object in it is malformed.
    """
    return _HwlocReader(root, where, fallback_name).machine()


class _HwlocReader:
    def __init__(self, root: XmlElement, where: str, fallback_name: str) -> None:
        self._root = root
        self._where = where
        self._version = _format_version(root, where)
        tops = [child for child in _child_objects(root) if child.attributes.get("type") in ("Machine", "System")]
        if len(tops) != 1:
            raise topology_file_error(
                "topology file",
                f"{len(tops)} objects of type Machine",
                "exactly one",
                "Export the whole machine",
                where,
            )
        self._top = tops[0]
        self._names_interfaces = any(
            _osdev_kinds(each, self._version) & {"network", "verbs"} for each in _objects_below(self._top)
        )
        self._nvlinks = read_nvlink_matrix(root, where)
        name = _infos(self._top).get("HostName") or _infos(root).get("HostName") or fallback_name
        self._builder = MachineBuilder(name, f"{where} (hwloc {root.attributes.get('version', '1')})")

    def machine(self) -> Machine:
        """Walk the tree without recursion and build the machine."""
        waiting = [(child, 0) for child in reversed(_child_objects(self._top))]
        while waiting:
            element, parent = waiting.pop()
            part = self._visit(element, parent)
            waiting.extend((child, part) for child in reversed(_child_objects(element)))
        return self._builder.build()

    def _visit(self, element: XmlElement, parent: int) -> int:
        """Add the object and return the part that its children are attached to."""
        kind = self._attribute(element, "type")
        if kind == "Bridge":
            return self._bridge(element, parent)
        if kind == "PCIDev":
            self._builder.add_function(parent, self._function(element), lists_interfaces=self._names_interfaces)
        elif kind == "NUMANode" and not any(_child_objects(element)):
            if not _is_empty_cpuset(element.attributes.get("cpuset", "")):
                self._builder.mark_numa(parent, self._numa_index(element))
        elif kind in _PART_KINDS or any(
            child.attributes.get("type") == "NUMANode" for child in _child_objects(element)
        ):
            numas = [self._numa_index(element)] if kind == "NUMANode" else []
            name = f"NUMA {numas[0]}" if numas else f"{kind.lower()} {element.attributes.get('os_index', '')}".rstrip()
            return self._builder.add_part(_PART_KINDS.get(kind, "group"), name, parent, numas)
        return parent

    def _bridge(self, element: XmlElement, parent: int) -> int:
        if "pci_busid" not in element.attributes:
            return self._builder.add_part(
                "host-bridge", f"host bridge {element.attributes.get('bridge_pci', '')}", parent
            )
        return self._builder.add_part("bridge", f"bridge {self._bus_address(element)}", parent)

    def _function(self, element: XmlElement) -> PciFunction:
        match = _PCI_TYPE.fullmatch(self._attribute(element, "pci_type"))
        if match is None:
            got, expected = element.attributes["pci_type"], "class [vendor:device], such as 0200 [8086:1521]"
            raise topology_file_error("pci_type", got, expected, "Export the machine again", self._location(element))
        pci_class, vendor, device = (int(part, 16) for part in match.groups())
        names: dict[str, list[str]] = {"network": [], "verbs": [], "coprocessor": []}
        hardware: dict[str, str] = {}
        state = None
        for child in _child_objects(element):
            name = child.attributes.get("name", "")
            kinds = _osdev_kinds(child, self._version)
            kind = (
                "verbs"
                if "verbs" in kinds or discovery_machine.is_verbs_device_name(name)
                else next(iter(sorted(kinds)), "")
            )
            if name and kind in names:
                names[kind].append(name)
            infos = _infos(child)
            hardware[name] = infos.get("Address", "")
            state = infos.get("Port1State", state)
        return PciFunction(
            bus=self._bus_address(element),
            pci_class=pci_class,
            vendor=vendor,
            device=device,
            model=self._model(element),
            interfaces=names["network"],
            verbs=names["verbs"],
            accelerators=names["coprocessor"],
            infiniband_interfaces=[n for n, told in hardware.items() if told.count(":") == _IPOIB_ADDRESS_BYTES - 1],
            hardware_addresses=hardware,
            is_up=None if state is None else state == _PORT_ACTIVE,
            bus_bytes_per_s=_link_bytes_per_s(element.attributes.get("pci_link_speed", "")),
            nvlinks=self._nvlinks_of(element),
        )

    def _model(self, element: XmlElement) -> str:
        models = [_infos(child).get("GPUModel", "") for child in _child_objects(element)]
        return next(filter(None, models), "") or _infos(element).get("PCIDevice", "")

    def _nvlinks_of(self, element: XmlElement) -> NvLinks | None:
        ids = [each.attributes.get("gp_index", "") for each in (element, *_child_objects(element))]
        return next((self._nvlinks[each] for each in ids if each in self._nvlinks), None)

    def _bus_address(self, element: XmlElement) -> str:
        text = self._attribute(element, "pci_busid")
        if discovery_machine.parse_pci_address(text) is None:
            raise topology_file_error(
                "pci_busid", text, "an address such as 0000:01:00.0", "Correct it", self._location(element)
            )
        return text

    def _numa_index(self, element: XmlElement) -> int:
        text = self._attribute(element, "os_index")
        if not text.isascii() or not text.isdecimal() or len(text) > 5 or int(text) >= 2**16:
            raise topology_file_error(
                "os_index of a NUMA node", text, "a whole number below 65536", "Correct it", self._location(element)
            )
        return int(text)

    def _attribute(self, element: XmlElement, name: str) -> str:
        if name not in element.attributes:
            got = " ".join(f"{key}={value}" for key, value in list(element.attributes.items())[:3])
            what, expected = "object of a topology file", f'an object with the attribute "{name}"'
            raise topology_file_error(what, got, expected, "Export the machine again", self._location(element))
        return element.attributes[name]

    def _location(self, element: XmlElement) -> str:
        return f"{self._where}:{element.line}"


def _format_version(root: XmlElement, where: str) -> int:
    text = root.attributes.get("version", "1")
    major = text.split(".", maxsplit=1)[0]
    if major not in ("1", "2", "3"):
        do = "Export the machine with a release of hwloc that writes one of these"
        raise topology_file_error("version of hwloc's format", text, "1, 2.x or 3.x", do, f"{where}:{root.line}")
    return int(major)


def _child_objects(element: XmlElement) -> list[XmlElement]:
    return list(element.find_all("object"))


def _objects_below(element: XmlElement) -> Iterator[XmlElement]:
    waiting = [element]
    while waiting:
        at = waiting.pop()
        yield at
        waiting.extend(_child_objects(at))


def _osdev_kinds(element: XmlElement, version: int) -> set[str]:
    """Return the kinds of an OS device: network, verbs, coprocessor; InfiniBand devices of format 3 have two."""
    text = element.attributes.get("osdev_type", "")
    if not (text.isdecimal() and len(text) < 20):
        return set()
    if version < 3:
        return {kind for kind, number in _OSDEV_NUMBERS.items() if int(text) == number}
    return {kind for kind, bit in _OSDEV_BITS.items() if int(text) & bit}


def _infos(element: XmlElement) -> dict[str, str]:
    return {info.attributes.get("name", ""): info.attributes.get("value", "") for info in element.find_all("info")}


def _is_empty_cpuset(cpuset: str) -> bool:
    """Return whether the NUMA node has no processors: memory alone, where no worker runs."""
    return bool(cpuset) and not cpuset.replace("0x", "").replace(",", "").strip("0")


def _link_bytes_per_s(text: str) -> float | None:
    """Return bytes per second from hwloc's GB/s; 0 means unknown."""
    try:
        gigabytes_per_s = float(text)
    except ValueError:
        return None
    return gigabytes_per_s * 1e9 if 0 < gigabytes_per_s < 1e6 else None


LSTOPO_TIMEOUT_S = 30
LSTOPO_NAMES = ("lstopo-no-graphics", "lstopo")


def find_lstopo() -> str | None:
    """Return the path of the program; None where hwloc is not installed."""
    return next(filter(None, map(shutil.which, LSTOPO_NAMES)), None)


def run_lstopo(program: str) -> bytes | None:
    """Return the XML; None where the program fails, and sysfs has to do."""
    try:
        answer = subprocess.run(
            [program, "--of", "xml", "-"], capture_output=True, timeout=LSTOPO_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout


NCCL_ROOT = "system"


def read_nccl(root: XmlElement, *, where: str, fallback_name: str) -> Machine:
    """Read the machine from a document.

    `fallback_name`: name of the machine, because NCCL's files have none.

    Raises:
        UsageError: It is of another version, holds no cpu, or an element in it is malformed.
    """
    version = root.attributes.get("version", "1")
    if version != "1":
        do = "Write it again with a release of NCCL that writes version 1"
        raise topology_file_error("version of NCCL's format", version, "1", do, f"{where}:{root.line}")
    cpus = list(root.find_all("cpu"))
    if not cpus:
        do = "Write it by NCCL_TOPO_DUMP_FILE"
        raise topology_file_error(
            "NCCL topology", "a system without cpu", "at least one <cpu numaid=...>", do, f"{where}:{root.line}"
        )
    builder = MachineBuilder(fallback_name, f"{where} (NCCL)")
    for cpu in cpus:
        numa = _int_attribute(cpu, "numaid", where)
        place = builder.add_part("numa", f"NUMA {numa}" if numa >= 0 else "processors", 0, [numa] if numa >= 0 else [])
        waiting = [(child, place) for child in reversed(cpu.children)]
        while waiting:
            element, parent = waiting.pop()
            below = _add_element(builder, element, parent, where)
            if below is not None:
                waiting.extend((child, below) for child in reversed(element.children))
    return builder.build()


def _add_element(builder: MachineBuilder, element: XmlElement, parent: int, where: str) -> int | None:
    """Add the element and return the part that its children are attached to, or None where no parts can follow."""
    if element.tag == "nic" and any(element.find_all("net")):
        # An adapter whose PCI function NCCL does not know.
        builder.add_function(parent, _pci_function(element, "", where), lists_interfaces=False)
    if element.tag != "pci":
        return None
    if "busid" not in element.attributes:
        do = 'Write busid="0000:01:00.0"'
        raise topology_file_error("pci of an NCCL topology", "no busid", "a busid", do, f"{where}:{element.line}")
    bus = element.attributes["busid"]
    if discovery_machine.parse_pci_address(bus) is None:
        raise topology_file_error(
            "busid", bus, "an address such as 0000:01:00.0", "Correct it", f"{where}:{element.line}"
        )
    if discovery_machine.is_bridge_class(_pci_class(element, where)) or any(element.find_all("pci")):
        return builder.add_part("switch", f"switch {bus}", parent)
    if "class" not in element.attributes and not element.children:
        builder.add_unclassified(parent, bus)
    else:
        builder.add_function(parent, _pci_function(element, bus, where), lists_interfaces=False)
    return None


def _pci_function(element: XmlElement, bus: str, where: str) -> PciFunction:
    gpu = next(element.find_all("gpu"), None)
    nics = [element] if element.tag == "nic" else list(element.find_all("nic"))
    nets = [net for nic in nics for net in nic.find_all("net")]
    names = [net.attributes["name"] for net in nets if net.attributes.get("name")]
    verbs = [name for name in names if discovery_machine.is_verbs_device_name(name)]
    marks = [each.attributes["gdr"] for each in (*nets, *((gpu,) if gpu else ())) if "gdr" in each.attributes]
    return PciFunction(
        bus=bus,
        pci_class=_pci_class(element, where) or (0x0302 if gpu else 0x0200 if nets else 0),
        vendor=_hex_attribute(element, "vendor", where) or (discovery_machine.NVIDIA_VENDOR if gpu else 0),
        device=_hex_attribute(element, "device", where),
        interfaces=[name for name in names if name not in verbs],
        verbs=verbs,
        accelerators=[f"cuda{gpu.attributes['dev']}"] if gpu and gpu.attributes.get("dev", "").isdecimal() else [],
        rates={net.attributes["name"]: rate for net in nets if "name" in net.attributes and (rate := _net_rate(net))},
        has_gpudirect="1" in marks if marks else None,
        nvlinks=_nvlinks_of_element(gpu, where) if gpu else None,
    )


def _nvlinks_of_element(gpu: XmlElement, where: str) -> NvLinks | None:
    links = list(gpu.find_all("nvlink"))
    peers = tuple(link.attributes.get("target", "unknown") for link in links)
    return (
        NvLinks(num_links=sum(_int_attribute(link, "count", where) for link in links), peers=peers) if links else None
    )


def _pci_class(element: XmlElement, where: str) -> int:
    """Return class and subclass of 0x030200; the last byte is the programming interface."""
    return _hex_attribute(element, "class", where) >> 8


def _net_rate(net: XmlElement) -> float | None:
    """Return bytes per second of NCCL's Mbit/s."""
    text = net.attributes.get("speed", "")
    return int(text) * 1e6 / 8 if text.isdecimal() and len(text) < 10 and 0 < int(text) < 10**9 else None


def _hex_attribute(element: XmlElement, name: str, where: str) -> int:
    text = element.attributes.get(name, "0x0")
    try:
        value = int(text, 16)
    except ValueError:
        value = -1
    if not 0 <= value < 2**32:
        do, at = f'Write {name}="0x030200"', f"{where}:{element.line}"
        raise topology_file_error(f"{name} of a pci element", text, "a hexadecimal number such as 0x030200", do, at)
    return value


def _int_attribute(element: XmlElement, name: str, where: str) -> int:
    text = element.attributes.get(name, "")
    if not text.removeprefix("-").isdecimal() or len(text) > 6 or not -1 <= int(text) < 2**16:
        got, at = text or f"no {name}", f"{where}:{element.line}"
        raise topology_file_error(f"{name} of a {element.tag} element", got, "a whole number", f'Write {name}="0"', at)
    return int(text)


def add_nvml_details(machine: Machine, nvml: Any) -> Machine:
    """Return the machine with the models, UUIDs and NVLinks of its GPUs.

    Args:
        machine: The machine found so far; GPUs are matched by PCI address.
        nvml: The module `pynvml`, or None where it is not installed; then the machine is returned unchanged.
    """
    if nvml is None or not any(worker.kind == "cuda" for worker in machine.workers):
        return machine
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return replace(machine, remarks=(*machine.remarks, f"NVML tells nothing of the GPUs: {error}"))
    try:
        return replace(machine, workers=tuple(_with_nvml_details(worker, nvml) for worker in machine.workers))
    finally:
        nvml.nvmlShutdown()


def _with_nvml_details(worker: ComputeDevice, nvml: Any) -> ComputeDevice:
    if worker.kind != "cuda":
        return worker
    try:
        handle = nvml.nvmlDeviceGetHandleByPciBusId(worker.bus.encode())
        detailed = replace(
            worker, model=_decode_text(nvml.nvmlDeviceGetName(handle)), nvlinks=_nvlinks_of_gpu(handle, nvml)
        )
        return replace(detailed, uuids=(_decode_text(nvml.nvmlDeviceGetUUID(handle)), *_mig_uuids(handle, nvml)))
    except nvml.NVMLError:
        return worker


def _mig_uuids(handle: Any, nvml: Any) -> list[str]:
    """Return the UUIDs of a GPU's MIG instances; empty where it has none, or cannot have any."""
    found: list[str] = []
    try:
        for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            with contextlib.suppress(nvml.NVMLError):  # that place is free
                found.append(
                    _decode_text(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)))
                )
    except nvml.NVMLError:
        return []
    return found


def _nvlinks_of_gpu(handle: Any, nvml: Any) -> NvLinks | None:
    peers = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            if nvml.nvmlDeviceGetNvLinkState(handle, link):
                peers.append(_peer_address(_decode_text(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)))
        except nvml.NVMLError:
            break
    return NvLinks(num_links=len(peers), peers=tuple(dict.fromkeys(peers))) if peers else None


def _peer_address(address: str) -> str:
    parsed = discovery_machine.parse_pci_address(address)
    return address if parsed is None else "{:04x}:{:02x}:{:02x}.{:x}".format(*parsed)


def _decode_text(text: str | bytes) -> str:
    """Decode a text; older releases of the package return bytes."""
    return text.decode(errors="replace") if isinstance(text, bytes) else text


__all__ = ["observe", "observe_links", "read_file"]

_SYSFS = Path("/sys")


def read_file(path: Path) -> Machine:
    """Read the machine from a topology file of hwloc or NCCL; the root element says which.

    Raises:
        UsageError: The file cannot be read, is not well-formed, or is neither of the two.
    """
    return _read_root(safe_xml.read_xml(path), str(path), path.name.split(".", maxsplit=1)[0])


def observe() -> Machine:
    """Return this machine: sysfs; the tree from hwloc where installed; link states from the kernel; GPUs from NVML."""
    name, program = socket.gethostname(), find_lstopo()
    content = run_lstopo(program) if program else None
    machine = sysfs.read_sysfs(_SYSFS, name=name)
    if content:
        machine = complete_from_sysfs(
            _read_root(safe_xml.parse_xml(content, str(program)), str(program), name), machine
        )
    return add_nvml_details(_with_links(machine), _import_nvml())


def observe_links() -> Machine:
    """Return this machine from sysfs and the kernel alone: its interfaces, quickly and without another program."""
    return _with_links(sysfs.read_sysfs(_SYSFS, name=socket.gethostname()))


def _with_links(machine: Machine) -> Machine:
    return sysfs.add_stacks(sysfs.add_link_facts(machine, sysfs.observe_link_facts()), sysfs.read_stacks(_SYSFS))


def _read_root(root: XmlElement, where: str, fallback_name: str) -> Machine:
    readers = {HWLOC_ROOT: read_hwloc, NCCL_ROOT: read_nccl}
    if root.tag not in readers:
        expected = "<topology> of hwloc or <system> of NCCL"
        do = "Write the file by lstopo --of xml FILE, or by NCCL_TOPO_DUMP_FILE"
        raise safe_xml.topology_file_error(
            "root element of a topology file", root.tag, expected, do, f"{where}:{root.line}"
        )
    return readers[root.tag](root, where=where, fallback_name=fallback_name)


def _import_nvml() -> Any:
    """Return the module, or None: it is an optional dependency."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None
