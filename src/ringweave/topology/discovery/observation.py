"""Observation of machines: a topology file of hwloc or NCCL, or this machine itself."""

import importlib
import socket
from pathlib import Path
from typing import Any

from ringweave.topology.discovery import bonds, hwloc, nccl_xml, safe_xml, sysfs
from ringweave.topology.discovery.machine import Machine
from ringweave.topology.discovery.safe_xml import XmlElement

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
    name, program = socket.gethostname(), hwloc.find_lstopo()
    content = hwloc.run_lstopo(program) if program else None
    machine = sysfs.read_sysfs(_SYSFS, name=name)
    if content:
        machine = hwloc.complete_from_sysfs(
            _read_root(safe_xml.parse_xml(content, str(program)), str(program), name), machine
        )
    return nccl_xml.add_nvml_details(_with_links(machine), _import_nvml())


def observe_links() -> Machine:
    """Return this machine from sysfs and the kernel alone: its interfaces, quickly and without another program."""
    return _with_links(sysfs.read_sysfs(_SYSFS, name=socket.gethostname()))


def _with_links(machine: Machine) -> Machine:
    return bonds.add_stacks(sysfs.add_link_facts(machine, sysfs.observe_link_facts()), bonds.read_stacks(_SYSFS))


def _read_root(root: XmlElement, where: str, fallback_name: str) -> Machine:
    readers = {hwloc.HWLOC_ROOT: hwloc.read_hwloc, nccl_xml.NCCL_ROOT: nccl_xml.read_nccl}
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
