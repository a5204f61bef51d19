"""This machine by the files of Linux under /sys: PCI devices, NUMA nodes, network interfaces, OpenFabrics devices."""

import re
from collections.abc import Iterator
from pathlib import Path

from ringweave.topology.discovery import pci
from ringweave.topology.discovery.building import Function, MachineBuilder
from ringweave.topology.discovery.machine import Machine

_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_RATE = re.compile(r"(\d+(?:\.\d+)?) Gb/sec.*")


def read(root: Path, *, name: str) -> Machine:
    """The machine whose files are under `root`, which is /sys but in tests."""
    return _Reader(root, name).machine()


class _Reader:
    def __init__(self, root: Path, name: str) -> None:
        self._root = root
        self._builder = MachineBuilder(name, f"{root} (sysfs)")
        self._parts: dict[str, int] = {}
        self._numas: dict[int, int] = {}
        self._interfaces = _by_address(root / "class" / "net")
        self._verbs = _by_address(root / "class" / "infiniband")

    def machine(self) -> Machine:
        for numa, cpus in _numa_nodes(self._root):
            if cpus:
                self._numas[numa] = self._builder.add("numa", f"NUMA {numa}", 0, [numa])
        devices = self._root / "bus" / "pci" / "devices"
        chains = sorted(filter(None, (_chain(path) for path in _entries(devices))), key=_order)
        for chain in chains:
            self._function(chain)
        return self._builder.build()

    def _function(self, chain: list[Path]) -> None:
        pci_class = _hex(chain[-1] / "class") >> 8
        if not pci.is_bridge(pci_class):
            parent = self._parent(chain[:-1], chain[-1])
            self._builder.function(parent, self._seen(chain[-1], pci_class), names_interfaces=True)

    def _parent(self, above: list[Path], path: Path) -> int:
        """The part that a function hangs on, added with all above it unless it is there."""
        parent = self._numas.get(_whole(path / "numa_node"), 0)
        for part in above:
            if part.name not in self._parts:
                kind = "bridge" if pci.parse_address(part.name) else "host-bridge"
                name = part.name if kind == "bridge" else part.name.removeprefix("pci")
                self._parts[part.name] = self._builder.add(kind, f"{kind.replace('-', ' ')} {name}", parent)
            parent = self._parts[part.name]
        return parent

    def _seen(self, path: Path, pci_class: int) -> Function:
        verbs = self._verbs.get(path.name, [])
        ports = [self._root / "class" / "infiniband" / name / "ports" / "1" for name in verbs]
        states = [_text(port / "state") for port in ports]
        rates = {name: rate for name, port in zip(verbs, ports, strict=True) if (rate := _rate(_text(port / "rate")))}
        has_infiniband = any(_text(port / "link_layer") == "InfiniBand" for port in ports)
        interfaces = self._interfaces.get(path.name, [])
        return Function(
            bus=path.name,
            pci_class=pci_class,
            vendor=_hex(path / "vendor"),
            device=_hex(path / "device"),
            interfaces=interfaces,
            verbs=verbs,
            infiniband_interfaces=interfaces if has_infiniband else (),
            hardware_addresses={name: _text(self._root / "class" / "net" / name / "address") for name in interfaces},
            is_up=states[0].startswith("4") if states and states[0] else None,
            rates=rates,
            has_gpudirect=self._gpudirect(_hex(path / "vendor")),
        )

    def _gpudirect(self, vendor: int) -> bool | None:
        """The module that lets NICs into the memory of NVIDIA's GPUs is there; without it dma-buf may still do."""
        has_module = any((self._root / "module" / name).exists() for name in ("nvidia_peermem", "nv_peer_mem"))
        return True if vendor == pci.NVIDIA and has_module else None


def _by_address(folder: Path) -> dict[str, list[str]]:
    """Names of a class of devices by the PCI address of their function."""
    found: dict[str, list[str]] = {}
    for path in _entries(folder):
        addresses = [part for part in path.resolve().parts if pci.parse_address(part)]
        if addresses:
            found.setdefault(addresses[-1], []).append(path.name)
    return found


def _chain(path: Path) -> list[Path]:
    """Host bridge, bridges and the function itself, from the place of a device in the tree of devices."""
    whole = path.resolve()
    steps = [*reversed(whole.parents), whole]
    return [step for step in steps if _HOST_BRIDGE.fullmatch(step.name) or pci.parse_address(step.name)]


def _order(chain: list[Path]) -> list[tuple[int, ...]]:
    return [pci.parse_address(step.name) or () for step in chain]


def _numa_nodes(root: Path) -> Iterator[tuple[int, str]]:
    folder = root / "devices" / "system" / "node"
    for path in sorted(_entries(folder), key=lambda path: (len(path.name), path.name)):
        if re.fullmatch(r"node\d{1,5}", path.name):
            yield int(path.name[4:]), _text(path / "cpulist")


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    """What a file of sysfs says; empty where it is not there or its driver refuses to tell."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _hex(path: Path) -> int:
    try:
        return int(_text(path) or "0", 16)
    except ValueError:
        return 0


def _whole(path: Path) -> int:
    text = _text(path)
    return int(text) if text.removeprefix("-").isdecimal() else -1


def _rate(text: str) -> float | None:
    """Bytes per second of `100 Gb/sec (4X EDR)`."""
    match = _RATE.fullmatch(text)
    return float(match.group(1)) * 1e9 / 8 if match and float(match.group(1)) > 0 else None
