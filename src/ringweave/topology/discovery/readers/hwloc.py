"""The XML of hwloc, as `lstopo --of xml` writes it: formats 1 (no version), 2.x and 3.x.

In format 1 a NUMA node holds the processors and devices near to it; since 2 it is a leaf beside them, and their common
parent is what it belongs to. Kinds of OS devices were numbers and became bits in format 3.

Source: open-mpi/hwloc, include/hwloc.h (hwloc_obj_osdev_type_t), hwloc/topology-xml.c.
"""

import re
from collections.abc import Iterator

from ringweave.topology.discovery import pci
from ringweave.topology.discovery.building import Function, MachineBuilder
from ringweave.topology.discovery.machine import Machine, NvLinks
from ringweave.topology.discovery.readers import hwloc_links
from ringweave.topology.discovery.readers.xml_text import Element, refusal

ROOT = "topology"

_KINDS = {"Group": "group", "Package": "package", "Socket": "package", "Die": "group", "NUMANode": "numa"}
_PCI_TYPE = re.compile(r"([0-9a-f]{4}) \[([0-9a-f]{4}):([0-9a-f]{4})\].*", re.IGNORECASE)
_PORT_ACTIVE = "4"
_IPOIB_ADDRESS_BYTES = 20

_OSDEV_BITS = {"network": 1 << 4, "verbs": 1 << 5, "coprocessor": 1 << 3}
_OSDEV_NUMBERS = {"network": 2, "verbs": 3, "coprocessor": 5}


def read(root: Element, *, where: str, fallback_name: str) -> Machine:
    """The machine of a document.

    Args:
        root: Its root element.
        where: Names the document in errors and as the source.
        fallback_name: Name of the machine where the document tells no host name.

    Raises:
        UsageError: It is not of a known format, or an object in it is malformed.
    """
    return _Reader(root, where, fallback_name).machine()


class _Reader:
    def __init__(self, root: Element, where: str, fallback_name: str) -> None:
        self._root = root
        self._where = where
        self._version = _version(root, where)
        tops = [child for child in _objects(root) if child.attributes.get("type") in ("Machine", "System")]
        if len(tops) != 1:
            raise refusal(
                "topology file",
                f"{len(tops)} objects of type Machine",
                "exactly one",
                "Export the whole machine",
                where,
            )
        self._top = tops[0]
        self._names_interfaces = any(
            _kinds_of(each, self._version) & {"network", "verbs"} for each in _below(self._top)
        )
        self._nvlinks = hwloc_links.nvlinks(root, where)
        name = _info(self._top).get("HostName") or _info(root).get("HostName") or fallback_name
        self._builder = MachineBuilder(name, f"{where} (hwloc {root.attributes.get('version', '1')})")

    def machine(self) -> Machine:
        """Walk the tree without recursion and build."""
        waiting = [(child, 0) for child in reversed(_objects(self._top))]
        while waiting:
            element, parent = waiting.pop()
            part = self._visit(element, parent)
            waiting.extend((child, part) for child in reversed(_objects(element)))
        return self._builder.build()

    def _visit(self, element: Element, parent: int) -> int:
        """Add what the object is; the part that its children hang on."""
        kind = self._attribute(element, "type")
        if kind == "Bridge":
            return self._bridge(element, parent)
        if kind == "PCIDev":
            self._builder.function(parent, self._function(element), names_interfaces=self._names_interfaces)
        elif kind == "NUMANode" and not any(_objects(element)):
            if not _is_empty_set(element.attributes.get("cpuset", "")):
                self._builder.place_numa(parent, self._index(element))
        elif kind in _KINDS or any(child.attributes.get("type") == "NUMANode" for child in _objects(element)):
            numas = [self._index(element)] if kind == "NUMANode" else []
            name = f"NUMA {numas[0]}" if numas else f"{kind.lower()} {element.attributes.get('os_index', '')}".rstrip()
            return self._builder.add(_KINDS.get(kind, "group"), name, parent, numas)
        return parent

    def _bridge(self, element: Element, parent: int) -> int:
        if "pci_busid" not in element.attributes:
            return self._builder.add("host-bridge", f"host bridge {element.attributes.get('bridge_pci', '')}", parent)
        return self._builder.add("bridge", f"bridge {self._bus(element)}", parent)

    def _function(self, element: Element) -> Function:
        match = _PCI_TYPE.fullmatch(self._attribute(element, "pci_type"))
        if match is None:
            got, expected = element.attributes["pci_type"], "class [vendor:device], such as 0200 [8086:1521]"
            raise refusal("pci_type", got, expected, "Export the machine again", self._at(element))
        pci_class, vendor, device = (int(part, 16) for part in match.groups())
        names: dict[str, list[str]] = {"network": [], "verbs": [], "coprocessor": []}
        hardware: dict[str, str] = {}
        state = None
        for child in _objects(element):
            name = child.attributes.get("name", "")
            kinds = _kinds_of(child, self._version)
            kind = "verbs" if "verbs" in kinds or pci.is_verbs_name(name) else next(iter(sorted(kinds)), "")
            if name and kind in names:
                names[kind].append(name)
            infos = _info(child)
            hardware[name] = infos.get("Address", "")
            state = infos.get("Port1State", state)
        return Function(
            bus=self._bus(element),
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
            bus_bytes_per_s=_positive(element.attributes.get("pci_link_speed", "")),
            nvlinks=self._links_of(element),
        )

    def _model(self, element: Element) -> str:
        models = [_info(child).get("GPUModel", "") for child in _objects(element)]
        return next(filter(None, models), "") or _info(element).get("PCIDevice", "")

    def _links_of(self, element: Element) -> NvLinks | None:
        ids = [each.attributes.get("gp_index", "") for each in (element, *_objects(element))]
        return next((self._nvlinks[each] for each in ids if each in self._nvlinks), None)

    def _bus(self, element: Element) -> str:
        text = self._attribute(element, "pci_busid")
        if pci.parse_address(text) is None:
            raise refusal("pci_busid", text, "an address such as 0000:01:00.0", "Correct it", self._at(element))
        return text

    def _index(self, element: Element) -> int:
        text = self._attribute(element, "os_index")
        if not text.isascii() or not text.isdecimal() or int(text) >= 2**16:
            raise refusal(
                "os_index of a NUMA node", text, "a whole number below 65536", "Correct it", self._at(element)
            )
        return int(text)

    def _attribute(self, element: Element, name: str) -> str:
        if name not in element.attributes:
            got = " ".join(f"{key}={value}" for key, value in list(element.attributes.items())[:3])
            what, expected = "object of a topology file", f'an object with the attribute "{name}"'
            raise refusal(what, got, expected, "Export the machine again", self._at(element))
        return element.attributes[name]

    def _at(self, element: Element) -> str:
        return f"{self._where}:{element.line}"


def _version(root: Element, where: str) -> int:
    text = root.attributes.get("version", "1")
    major = text.split(".", maxsplit=1)[0]
    if major not in ("1", "2", "3"):
        do = "Export the machine with a release of hwloc that writes one of these"
        raise refusal("version of hwloc's format", text, "1, 2.x or 3.x", do, f"{where}:{root.line}")
    return int(major)


def _objects(element: Element) -> list[Element]:
    return list(element.find_all("object"))


def _below(element: Element) -> Iterator[Element]:
    waiting = [element]
    while waiting:
        at = waiting.pop()
        yield at
        waiting.extend(_objects(at))


def _kinds_of(element: Element, version: int) -> set[str]:
    """Which of network, verbs and coprocessor an OS device is; InfiniBand devices of format 3 are two of them."""
    text = element.attributes.get("osdev_type", "")
    if not text.isdecimal():
        return set()
    if version < 3:
        return {kind for kind, number in _OSDEV_NUMBERS.items() if int(text) == number}
    return {kind for kind, bit in _OSDEV_BITS.items() if int(text) & bit}


def _info(element: Element) -> dict[str, str]:
    return {info.attributes.get("name", ""): info.attributes.get("value", "") for info in element.find_all("info")}


def _is_empty_set(cpuset: str) -> bool:
    """A NUMA node without processors: memory alone, where no worker runs."""
    return bool(cpuset) and not cpuset.replace("0x", "").replace(",", "").strip("0")


def _positive(text: str) -> float | None:
    """Bytes per second from hwloc's GB/s; 0 means that it was not known."""
    try:
        gigabytes_per_s = float(text)
    except ValueError:
        return None
    return gigabytes_per_s * 1e9 if 0 < gigabytes_per_s < 1e6 else None
