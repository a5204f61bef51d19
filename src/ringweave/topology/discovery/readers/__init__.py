"""Where machines come from: a topology file of hwloc or NCCL, or this machine itself."""

import importlib
import socket
from pathlib import Path
from typing import Any

from ringweave.topology.discovery.machine import Machine
from ringweave.topology.discovery.readers import completing, hwloc, links, lstopo, nccl, nvml, stacks, sysfs, xml_text
from ringweave.topology.discovery.readers.xml_text import Element

__all__ = ["observe", "observe_links", "read_file"]

_SYSFS = Path("/sys")


def read_file(path: Path) -> Machine:
    """The machine of a topology file, of hwloc or NCCL as its root element says.

    Raises:
        UsageError: The file cannot be read, is not well-formed, or is neither of the two.
    """
    return _read(xml_text.read(path), str(path), path.name.split(".", maxsplit=1)[0])


def observe() -> Machine:
    """This machine: by sysfs, the tree by hwloc where that is installed; links by the kernel; GPUs by NVML."""
    name, program = socket.gethostname(), lstopo.find()
    content = lstopo.ask(program) if program else None
    machine = sysfs.read(_SYSFS, name=name)
    if content:
        machine = completing.complete(_read(xml_text.parse(content, str(program)), str(program), name), machine)
    return nvml.add_gpus(_with_links(machine), _nvml())


def observe_links() -> Machine:
    """This machine by sysfs and the kernel alone: its interfaces, in a moment and without another program."""
    return _with_links(sysfs.read(_SYSFS, name=socket.gethostname()))


def _with_links(machine: Machine) -> Machine:
    return stacks.add_stacks(links.add_links(machine, links.observe()), stacks.read(_SYSFS))


def _read(root: Element, where: str, fallback_name: str) -> Machine:
    readers = {hwloc.ROOT: hwloc.read, nccl.ROOT: nccl.read}
    if root.tag not in readers:
        expected = "<topology> of hwloc or <system> of NCCL"
        do = "Write the file by lstopo --of xml FILE, or by NCCL_TOPO_DUMP_FILE"
        raise xml_text.refusal("root element of a topology file", root.tag, expected, do, f"{where}:{root.line}")
    return readers[root.tag](root, where=where, fallback_name=fallback_name)


def _nvml() -> Any:
    """The module, or None: it is an optional dependency."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None
