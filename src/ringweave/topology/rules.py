"""What makes one node, NIC, device or switch legal; as pure checks that yield problems.

Rules over the whole cluster are in `tree.py`.

The limits are far beyond any machine we know of. They catch slips of the pen (a rate typed in the wrong unit) and keep
a wrong file from filling the memory.
"""

import ipaddress
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ringweave import errors
from ringweave.files.problems import Path, Problem, closest

if TYPE_CHECKING:
    from ringweave.topology.cluster import Device, Link, Nic, Node, Switch

CORE = "core"
"""The root switch, which is never declared."""
DEVICE_KINDS = ("cpu", "cuda")
MAX_NODES = 100_000
MAX_SWITCHES = 100_000
MAX_DEVICES = 1024
MAX_NICS = 64
MIN_RATE_BYTES_PER_S, MAX_RATE_BYTES_PER_S = 0.125, 0.125e18
MIN_SPEED, MAX_SPEED = 1e-6, 1e6
MAX_LATENCY_S = 3600.0

RATE = "a positive rate with a unit, such as 200Mbit/s (bit/s, kbit/s, Mbit/s, Gbit/s, Tbit/s; at most 1000000Tbit/s)"
LATENCY = "a time with a unit, such as 50us (ns, us, ms, s; at most 3600s)"
NODE_NAME = "a host name (letters, digits, hyphens; labels of at most 63 characters, separated by dots)"
NAME = "at most 63 letters, digits, dots, hyphens and underscores, beginning with a letter or digit"
NIC_NAME = "the name of a network interface, such as eth0 (no spaces, no slashes)"
KIND = f"one of {', '.join(DEVICE_KINDS)}"
SPEED = "a positive number, such as 0.5 (1.0 is a usual device; at most 1000000)"
NUMA = "the index of a NUMA node, a whole number of at least 0"
NEAREST = "a list of indices of the node's devices, each at most once, such as [1, 0]"
ADDRESS = "the IP address of one host, such as 10.0.0.1"
DEVICES = f"1 to {MAX_DEVICES} devices"
NICS = f"1 to {MAX_NICS} NICs"

_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST_NAME = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(?:\.{_LABEL})*")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,126}")


def nic_problems(nic: "Nic") -> Iterator[Problem]:
    """What is wrong with a NIC by itself."""
    yield from text_problems(("name",), "name of a NIC", nic.name, _INTERFACE, NIC_NAME)
    yield from rate_problems(("rate_bytes_per_s",), f"rate of NIC {errors.shorten(nic.name)}", nic.rate_bytes_per_s)
    yield from _numa_problems(nic.numa)
    if not isinstance(nic.rdma, bool):
        yield _wrong(("rdma",), "rdma of a NIC", nic.rdma, "true or false", "Write true if the NIC can do RDMA")
    if not isinstance(nic.nearest, tuple) or not all(map(_is_place, nic.nearest)) or any(repeated(nic.nearest)):
        do = "Leave the key out where NUMA nodes say it all"
        yield _wrong(("nearest",), "nearest of a NIC", nic.nearest, NEAREST, do)


def device_problems(device: "Device") -> Iterator[Problem]:
    """What is wrong with a device by itself."""
    if device.kind not in DEVICE_KINDS:
        do = closest(device.kind, DEVICE_KINDS) or "Write cpu for a worker without an accelerator"
        yield _wrong(("kind",), "kind of a device", device.kind, KIND, do)
    if not _is_number(device.speed) or not MIN_SPEED <= device.speed <= MAX_SPEED:
        do = "Leave the key out for a device of usual speed"
        yield _wrong(("speed",), "speed of a device", device.speed, SPEED, do)
    yield from _numa_problems(device.numa)


def switch_problems(switch: "Switch") -> Iterator[Problem]:
    """What is wrong with a switch by itself."""
    what = f"uplink of switch {errors.shorten(switch.name)}"
    yield from text_problems(("name",), "name of a switch", switch.name, _NAME, NAME)
    yield from rate_problems(("uplink_bytes_per_s",), what, switch.uplink_bytes_per_s)
    if isinstance(switch.name, str) and switch.name.casefold() == CORE:
        do = f"Remove this switch: {CORE} is the root, always there, and has no uplink"
        yield _wrong(("name",), "name of a switch", switch.name, f"a name other than {CORE}", do)


def node_problems(node: "Node") -> Iterator[Problem]:
    """What is wrong with a node by itself; its NICs and devices have been checked when they were made."""
    yield from text_problems(("name",), "name of a node", node.name, _HOST_NAME, NODE_NAME)
    if isinstance(node.name, str) and node.name.casefold() == CORE:
        do = f"Rename the node: {CORE} is the root switch"
        yield _wrong(("name",), "name of a node", node.name, f"a name other than {CORE}", do)
    what = f"of node {errors.shorten(node.name)}"
    if node.address is not None:
        yield from _address_problems(f"address {what}", node.address)
    yield from tuple_problems(("devices",), f"devices {what}", node.devices, (1, MAX_DEVICES), DEVICES)
    yield from tuple_problems(("nics",), f"NICs {what}", node.nics, (1, MAX_NICS), NICS)
    if isinstance(node.nics, tuple):
        names = [nic.name for nic in node.nics]
        for index in repeated(names):
            do = "Give each NIC of a node its own name"
            yield _wrong(("nics", index, "name"), f"NIC {what}", names[index], "a name used once on the node", do)
        for index, nic in enumerate(node.nics):
            if isinstance(node.devices, tuple) and any(place >= len(node.devices) for place in nic.nearest):
                expected = f"indices of its devices, 0 to {len(node.devices) - 1}"
                do = "Count the node's devices from 0"
                yield _wrong(("nics", index, "nearest"), f"nearest of NIC {nic.name} {what}", nic.nearest, expected, do)


def link_problems(link: "Link") -> Iterator[Problem]:
    """What is wrong with a link by itself."""
    if not _is_number(link.bandwidth_bytes_per_s) or not 0 < link.bandwidth_bytes_per_s < float("inf"):
        do = "Remove the link if the two are not connected"
        yield _wrong(("bandwidth_bytes_per_s",), f"link {link.src}->{link.dst}", link.bandwidth_bytes_per_s, RATE, do)
    yield from latency_problems(link.latency_s)


def text_problems(path: Path, what: str, got: Any, pattern: re.Pattern[str], expected: str) -> Iterator[Problem]:
    """A problem unless the value is text of the pattern."""
    if not isinstance(got, str) or not pattern.fullmatch(got):
        do = "Put the name in quotes" if _is_number(got) else "Rename it; names become part of link and host names"
        yield _wrong(path, what, got, expected, do)


def name_problems(path: Path, what: str, got: Any) -> Iterator[Problem]:
    """A problem unless the value is a plain name."""
    return text_problems(path, what, got, _NAME, NAME)


def rate_problems(path: Path, what: str, got: Any) -> Iterator[Problem]:
    """A problem unless the value is a rate that some wire could have."""
    if not _is_number(got) or not MIN_RATE_BYTES_PER_S <= got <= MAX_RATE_BYTES_PER_S:
        yield _wrong(path, what, got, RATE, "Write the rate of one direction, such as 200Mbit/s")


def latency_problems(got: Any) -> Iterator[Problem]:
    """A problem unless the value is a latency; zero is one, for thought experiments."""
    if not _is_number(got) or not 0 <= got <= MAX_LATENCY_S:
        yield _wrong(
            ("latency_s",), "latency", got, LATENCY, "Write what a small message takes from end to end, such as 50us"
        )


def tuple_problems(path: Path, what: str, got: Any, limits: tuple[int, int], expected: str) -> Iterator[Problem]:
    """A problem unless the value is a tuple whose length is within the limits."""
    if not isinstance(got, tuple):
        yield _wrong(path, what, got, f"a tuple of {expected}", "Make it a tuple")
    elif not limits[0] <= len(got) <= limits[1]:
        shown = got if len(got) < limits[0] else f"{len(got)} of them"
        yield _wrong(path, what, shown, expected, "Add what is missing" if not got else "Remove what is too much")


def repeated(names: Iterable[Any]) -> Iterator[int]:
    """Indices of the names that came before, letter case aside."""
    seen = set()
    for index, name in enumerate(names):
        folded = name.casefold() if isinstance(name, str) else name
        if folded in seen:
            yield index
        seen.add(folded)


def _address_problems(what: str, got: Any) -> Iterator[Problem]:
    try:
        address = ipaddress.ip_address(got if isinstance(got, str) else "")
    except ValueError:
        address = None
    if address is None or "%" in str(got) or address.is_unspecified or address.is_multicast:
        yield _wrong(("address",), what, got, ADDRESS, "Write the node's own address in numbers, or leave the key out")


def _numa_problems(got: Any) -> Iterator[Problem]:
    is_index = isinstance(got, int) and not isinstance(got, bool) and 0 <= got < 2**16
    if got is not None and not is_index:
        yield _wrong(("numa",), "numa", got, NUMA, "Leave the key out if it is not known")


def _is_place(got: Any) -> bool:
    return isinstance(got, int) and not isinstance(got, bool) and 0 <= got < MAX_DEVICES


def _is_number(got: Any) -> bool:
    return isinstance(got, int | float) and not isinstance(got, bool)


def _wrong(path: Path, what: str, got: Any, expected: str, do: str) -> Problem:
    return Problem(path=path, what=what, got=got, expected=expected, do=do)
