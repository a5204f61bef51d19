"""Reader of NCCL's XML (NCCL_TOPO_DUMP_FILE, NCCL_TOPO_FILE), and GPU details from NVML.

A system holds cpus (NUMA nodes), which hold pci functions and whole switches. Below a function NCCL writes its kind:
gpu (with nvlink), or nic with its nets. Static files of clouds give less, and NCCL asks the running system for the
rest; from the file alone the rest stays open, and a remark says so. NVML adds models, UUIDs and NVLinks by the optional
package nvidia-ml-py.

Source: NVIDIA/nccl, src/graph/xml.cc and topo.cc.
"""

import contextlib
from dataclasses import replace
from typing import Any

from ringweave.topology.discovery import machine
from ringweave.topology.discovery.machine import ComputeDevice, Machine, MachineBuilder, NvLinks, PciFunction
from ringweave.topology.discovery.safe_xml import XmlElement, topology_file_error

NCCL_ROOT = "system"


def read_nccl(root: XmlElement, *, where: str, fallback_name: str) -> Machine:
    """Read the machine from a document.

    Args:
        root: Its root element.
        where: Name of the document in errors and as the source.
        fallback_name: Name of the machine, because NCCL's files have none.

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
    if machine.parse_pci_address(bus) is None:
        raise topology_file_error(
            "busid", bus, "an address such as 0000:01:00.0", "Correct it", f"{where}:{element.line}"
        )
    if machine.is_bridge_class(_pci_class(element, where)) or any(element.find_all("pci")):
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
    verbs = [name for name in names if machine.is_verbs_device_name(name)]
    marks = [each.attributes["gdr"] for each in (*nets, *((gpu,) if gpu else ())) if "gdr" in each.attributes]
    return PciFunction(
        bus=bus,
        pci_class=_pci_class(element, where) or (0x0302 if gpu else 0x0200 if nets else 0),
        vendor=_hex_attribute(element, "vendor", where) or (machine.NVIDIA_VENDOR if gpu else 0),
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
    return int(text) * 1e6 / 8 if text.isdecimal() and 0 < int(text) < 10**9 else None


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
    if not text.removeprefix("-").isdecimal() or not -1 <= int(text) < 2**16:
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
    parsed = machine.parse_pci_address(address)
    return address if parsed is None else "{:04x}:{:02x}:{:02x}.{:x}".format(*parsed)


def _decode_text(text: str | bytes) -> str:
    """Decode a text; older releases of the package return bytes."""
    return text.decode(errors="replace") if isinstance(text, bytes) else text
