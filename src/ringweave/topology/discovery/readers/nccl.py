"""The XML of NCCL: what NCCL_TOPO_DUMP_FILE writes and NCCL_TOPO_FILE reads.

A system holds cpus (NUMA nodes), these hold pci functions and whole switches; below a function NCCL writes what it is:
gpu (with nvlink), or nic with its nets. Static files of clouds give less, and NCCL asks the running system for the
rest; from the file alone the rest stays open, and is said to.

Source: NVIDIA/nccl, src/graph/xml.cc and topo.cc.
"""

from ringweave.topology.discovery import pci
from ringweave.topology.discovery.building import Function, MachineBuilder
from ringweave.topology.discovery.machine import Machine, NvLinks
from ringweave.topology.discovery.readers.xml_text import Element, refusal

ROOT = "system"


def read(root: Element, *, where: str, fallback_name: str) -> Machine:
    """The machine of a document.

    Args:
        root: Its root element.
        where: Names the document in errors and as the source.
        fallback_name: Name of the machine, as NCCL's files tell none.

    Raises:
        UsageError: It is of another version, holds no cpu, or an element in it is malformed.
    """
    version = root.attributes.get("version", "1")
    if version != "1":
        do = "Write it again with a release of NCCL that writes version 1"
        raise refusal("version of NCCL's format", version, "1", do, f"{where}:{root.line}")
    cpus = list(root.find_all("cpu"))
    if not cpus:
        do = "Write it by NCCL_TOPO_DUMP_FILE"
        raise refusal(
            "NCCL topology", "a system without cpu", "at least one <cpu numaid=...>", do, f"{where}:{root.line}"
        )
    builder = MachineBuilder(fallback_name, f"{where} (NCCL)")
    for cpu in cpus:
        numa = _number(cpu, "numaid", where)
        place = builder.add("numa", f"NUMA {numa}" if numa >= 0 else "processors", 0, [numa] if numa >= 0 else [])
        waiting = [(child, place) for child in reversed(cpu.children)]
        while waiting:
            element, parent = waiting.pop()
            below = _visit(builder, element, parent, where)
            if below is not None:
                waiting.extend((child, below) for child in reversed(element.children))
    return builder.build()


def _visit(builder: MachineBuilder, element: Element, parent: int, where: str) -> int | None:
    """Add what the element is; the part that its children hang on, or None where no parts can follow."""
    if element.tag == "nic" and any(element.find_all("net")):
        # An adapter whose PCI function NCCL does not know.
        builder.function(parent, _function(element, "", where), names_interfaces=False)
    if element.tag != "pci":
        return None
    if "busid" not in element.attributes:
        do = 'Write busid="0000:01:00.0"'
        raise refusal("pci of an NCCL topology", "no busid", "a busid", do, f"{where}:{element.line}")
    bus = element.attributes["busid"]
    if pci.parse_address(bus) is None:
        raise refusal("busid", bus, "an address such as 0000:01:00.0", "Correct it", f"{where}:{element.line}")
    if pci.is_bridge(_class_of(element, where)) or any(element.find_all("pci")):
        return builder.add("switch", f"switch {bus}", parent)
    if "class" not in element.attributes and not element.children:
        builder.unclassified(parent, bus)
    else:
        builder.function(parent, _function(element, bus, where), names_interfaces=False)
    return None


def _function(element: Element, bus: str, where: str) -> Function:
    gpu = next(element.find_all("gpu"), None)
    nics = [element] if element.tag == "nic" else list(element.find_all("nic"))
    nets = [net for nic in nics for net in nic.find_all("net")]
    names = [net.attributes["name"] for net in nets if net.attributes.get("name")]
    verbs = [name for name in names if pci.is_verbs_name(name)]
    marks = [each.attributes["gdr"] for each in (*nets, *((gpu,) if gpu else ())) if "gdr" in each.attributes]
    return Function(
        bus=bus,
        pci_class=_class_of(element, where) or (0x0302 if gpu else 0x0200 if nets else 0),
        vendor=_hex(element, "vendor", where) or (pci.NVIDIA if gpu else 0),
        device=_hex(element, "device", where),
        interfaces=[name for name in names if name not in verbs],
        verbs=verbs,
        accelerators=[f"cuda{gpu.attributes['dev']}"] if gpu and gpu.attributes.get("dev", "").isdecimal() else [],
        rates={net.attributes["name"]: rate for net in nets if "name" in net.attributes and (rate := _rate(net))},
        has_gpudirect="1" in marks if marks else None,
        nvlinks=_nvlinks(gpu, where) if gpu else None,
    )


def _nvlinks(gpu: Element, where: str) -> NvLinks | None:
    links = list(gpu.find_all("nvlink"))
    peers = tuple(link.attributes.get("target", "unknown") for link in links)
    return NvLinks(num_links=sum(_number(link, "count", where) for link in links), peers=peers) if links else None


def _class_of(element: Element, where: str) -> int:
    """Class and subclass of 0x030200, whose last byte is the interface."""
    return _hex(element, "class", where) >> 8


def _rate(net: Element) -> float | None:
    """Bytes per second of NCCL's Mbit/s."""
    text = net.attributes.get("speed", "")
    return int(text) * 1e6 / 8 if text.isdecimal() and 0 < int(text) < 10**9 else None


def _hex(element: Element, name: str, where: str) -> int:
    text = element.attributes.get(name, "0x0")
    try:
        value = int(text, 16)
    except ValueError:
        value = -1
    if not 0 <= value < 2**32:
        do, at = f'Write {name}="0x030200"', f"{where}:{element.line}"
        raise refusal(f"{name} of a pci element", text, "a hexadecimal number such as 0x030200", do, at)
    return value


def _number(element: Element, name: str, where: str) -> int:
    text = element.attributes.get(name, "")
    if not text.removeprefix("-").isdecimal() or not -1 <= int(text) < 2**16:
        got, at = text or f"no {name}", f"{where}:{element.line}"
        raise refusal(f"{name} of a {element.tag} element", got, "a whole number", f'Write {name}="0"', at)
    return int(text)
