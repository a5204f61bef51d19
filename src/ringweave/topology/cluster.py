"""Cluster as frozen data: nodes with devices and NICs, the tree of switches between them, and its validation rules.

The constructor checks a cluster, in code as from a file, so code that receives one need not check it again. The
switches form a tree. Its root is called `core` and is never declared; nodes are its leaves. Links are full duplex: each
edge of the tree is two links, one for each direction, with the same rate.

The limits are far beyond any machine we know of. They catch typing errors (a rate in the wrong unit) and keep a wrong
file from filling the memory. The checks of a whole cluster run in order, each relying on the ones before it; the first
that finds something ends the search, so a mistake is reported once and not with its consequences. All are linear in
nodes and switches.
"""

import ipaddress
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Protocol

from ringweave import errors, units
from ringweave.errors import ClusterError
from ringweave.files import problems
from ringweave.files.problems import InputProblem, KeyPath, shorten_names, suggest_closest
from ringweave.topology import CORE

DEVICE_KINDS = ("cpu", "cuda")
MAX_NODES = 100_000
MAX_SWITCHES = 100_000
MAX_DEVICES = 1024
MAX_NICS = 64
MIN_RATE_BYTES_PER_S, MAX_RATE_BYTES_PER_S = 0.125, 0.125e18
MIN_SPEED, MAX_SPEED = 1e-6, 1e6
MAX_LATENCY_S = 3600.0

EXPECTED_RATE = (
    "a positive rate with a unit, such as 200Mbit/s (bit/s, kbit/s, Mbit/s, Gbit/s, Tbit/s; at most 1000000Tbit/s)"
)
EXPECTED_LATENCY = "a time with a unit, such as 50us (ns, us, ms, s; at most 3600s)"
EXPECTED_NODE_NAME = "a host name (letters, digits, hyphens; labels of at most 63 characters, separated by dots)"
EXPECTED_NAME = "at most 63 letters, digits, dots, hyphens and underscores, beginning with a letter or digit"
EXPECTED_NIC_NAME = "the name of a network interface, such as eth0 (no spaces, no slashes)"
EXPECTED_DEVICE_KIND = f"one of {', '.join(DEVICE_KINDS)}"
EXPECTED_SPEED = "a positive number, such as 0.5 (1.0 is a usual device; at most 1000000)"
EXPECTED_NUMA = "the index of a NUMA node, a whole number of at least 0"
EXPECTED_NEAREST = "a list of indices of the node's devices, each at most once, such as [1, 0]"
EXPECTED_ADDRESS = "the IP address of one host, such as 10.0.0.1"
EXPECTED_DEVICES = f"1 to {MAX_DEVICES} devices"
EXPECTED_NICS = f"1 to {MAX_NICS} NICs"

_LABEL_PATTERN = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST_NAME_PATTERN = re.compile(rf"(?=.{{1,253}}\Z){_LABEL_PATTERN}(?:\.{_LABEL_PATTERN})*")
_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_INTERFACE_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,126}")


def nic_problems(nic: "Nic") -> Iterator[InputProblem]:
    """Yield the problems of a NIC by itself."""
    yield from text_problems(("name",), "name of a NIC", nic.name, _INTERFACE_PATTERN, EXPECTED_NIC_NAME)
    yield from rate_problems(("rate_bytes_per_s",), f"rate of NIC {errors.shorten(nic.name)}", nic.rate_bytes_per_s)
    yield from _numa_problems(nic.numa)
    if not isinstance(nic.rdma, bool):
        yield _problem(("rdma",), "rdma of a NIC", nic.rdma, "true or false", "Write true if the NIC can do RDMA")
    if (
        not isinstance(nic.nearest, tuple)
        or not all(map(_is_device_index, nic.nearest))
        or any(repeated_indices(nic.nearest))
    ):
        do = "Leave the key out where NUMA nodes say it all"
        yield _problem(("nearest",), "nearest of a NIC", nic.nearest, EXPECTED_NEAREST, do)


def device_problems(device: "Device") -> Iterator[InputProblem]:
    """Yield the problems of a device by itself."""
    if device.kind not in DEVICE_KINDS:
        do = suggest_closest(device.kind, DEVICE_KINDS) or "Write cpu for a worker without an accelerator"
        yield _problem(("kind",), "kind of a device", device.kind, EXPECTED_DEVICE_KIND, do)
    if not _is_number(device.speed) or not MIN_SPEED <= device.speed <= MAX_SPEED:
        do = "Leave the key out for a device of usual speed"
        yield _problem(("speed",), "speed of a device", device.speed, EXPECTED_SPEED, do)
    yield from _numa_problems(device.numa)


def switch_problems(switch: "Switch") -> Iterator[InputProblem]:
    """Yield the problems of a switch by itself."""
    what = f"uplink of switch {errors.shorten(switch.name)}"
    yield from text_problems(("name",), "name of a switch", switch.name, _NAME_PATTERN, EXPECTED_NAME)
    yield from rate_problems(("uplink_bytes_per_s",), what, switch.uplink_bytes_per_s)
    if isinstance(switch.name, str) and switch.name.casefold() == CORE:
        do = f"Remove this switch: {CORE} is the root, always there, and has no uplink"
        yield _problem(("name",), "name of a switch", switch.name, f"a name other than {CORE}", do)


def node_problems(node: "Node") -> Iterator[InputProblem]:
    """Yield the problems of a node by itself; its NICs and devices were checked by their constructors."""
    yield from text_problems(("name",), "name of a node", node.name, _HOST_NAME_PATTERN, EXPECTED_NODE_NAME)
    if isinstance(node.name, str) and node.name.casefold() == CORE:
        do = f"Rename the node: {CORE} is the root switch"
        yield _problem(("name",), "name of a node", node.name, f"a name other than {CORE}", do)
    what = f"of node {errors.shorten(node.name)}"
    if node.address is not None:
        yield from _address_problems(f"address {what}", node.address)
    yield from tuple_problems(("devices",), f"devices {what}", node.devices, (1, MAX_DEVICES), EXPECTED_DEVICES)
    yield from tuple_problems(("nics",), f"NICs {what}", node.nics, (1, MAX_NICS), EXPECTED_NICS)
    if isinstance(node.nics, tuple):
        names = [nic.name for nic in node.nics]
        for index in repeated_indices(names):
            do = "Give each NIC of a node its own name"
            yield _problem(("nics", index, "name"), f"NIC {what}", names[index], "a name used once on the node", do)
        for index, nic in enumerate(node.nics):
            if isinstance(node.devices, tuple) and any(place >= len(node.devices) for place in nic.nearest):
                expected = f"indices of its devices, 0 to {len(node.devices) - 1}"
                do = "Count the node's devices from 0"
                yield _problem(
                    ("nics", index, "nearest"), f"nearest of NIC {nic.name} {what}", nic.nearest, expected, do
                )


def link_problems(link: "Link") -> Iterator[InputProblem]:
    """Yield the problems of a link by itself."""
    if not _is_number(link.bandwidth_bytes_per_s) or not 0 < link.bandwidth_bytes_per_s < float("inf"):
        do = "Remove the link if the two are not connected"
        yield _problem(
            ("bandwidth_bytes_per_s",), f"link {link.src}->{link.dst}", link.bandwidth_bytes_per_s, EXPECTED_RATE, do
        )
    yield from latency_problems(link.latency_s)


def text_problems(
    path: KeyPath, what: str, got: Any, pattern: re.Pattern[str], expected: str
) -> Iterator[InputProblem]:
    """Yield a problem unless the value is text that matches the pattern."""
    if not isinstance(got, str) or not pattern.fullmatch(got):
        do = "Put the name in quotes" if _is_number(got) else "Rename it; names become part of link and host names"
        yield _problem(path, what, got, expected, do)


def plain_name_problems(path: KeyPath, what: str, got: Any) -> Iterator[InputProblem]:
    """Yield a problem unless the value is a plain name."""
    return text_problems(path, what, got, _NAME_PATTERN, EXPECTED_NAME)


def rate_problems(path: KeyPath, what: str, got: Any) -> Iterator[InputProblem]:
    """Yield a problem unless the value is a rate that a real link could have."""
    if not _is_number(got) or not MIN_RATE_BYTES_PER_S <= got <= MAX_RATE_BYTES_PER_S:
        yield _problem(path, what, got, EXPECTED_RATE, "Write the rate of one direction, such as 200Mbit/s")


def latency_problems(got: Any) -> Iterator[InputProblem]:
    """Yield a problem unless the value is a latency; zero is allowed, for thought experiments."""
    if not _is_number(got) or not 0 <= got <= MAX_LATENCY_S:
        yield _problem(
            ("latency_s",),
            "latency",
            got,
            EXPECTED_LATENCY,
            "Write what a small message takes from end to end, such as 50us",
        )


def tuple_problems(
    path: KeyPath, what: str, got: Any, limits: tuple[int, int], expected: str
) -> Iterator[InputProblem]:
    """Yield a problem unless the value is a tuple whose length is within the limits."""
    if not isinstance(got, tuple):
        yield _problem(path, what, got, f"a tuple of {expected}", "Make it a tuple")
    elif not limits[0] <= len(got) <= limits[1]:
        shown = got if len(got) < limits[0] else f"{len(got)} of them"
        yield _problem(path, what, shown, expected, "Add what is missing" if not got else "Remove what is too much")


def repeated_indices(names: Iterable[Any]) -> Iterator[int]:
    """Yield the indices of names that occurred before, ignoring letter case."""
    seen = set()
    for index, name in enumerate(names):
        folded = name.casefold() if isinstance(name, str) else name
        if folded in seen:
            yield index
        seen.add(folded)


def _address_problems(what: str, got: Any) -> Iterator[InputProblem]:
    try:
        address = ipaddress.ip_address(got if isinstance(got, str) else "")
    except ValueError:
        address = None
    if address is None or "%" in str(got) or address.is_unspecified or address.is_multicast:
        yield _problem(
            ("address",), what, got, EXPECTED_ADDRESS, "Write the node's own address in numbers, or leave the key out"
        )


def _numa_problems(got: Any) -> Iterator[InputProblem]:
    is_index = isinstance(got, int) and not isinstance(got, bool) and 0 <= got < 2**16
    if got is not None and not is_index:
        yield _problem(("numa",), "numa", got, EXPECTED_NUMA, "Leave the key out if it is not known")


def _is_device_index(got: Any) -> bool:
    return isinstance(got, int) and not isinstance(got, bool) and 0 <= got < MAX_DEVICES


def _is_number(got: Any) -> bool:
    return isinstance(got, int | float) and not isinstance(got, bool)


def _problem(path: KeyPath, what: str, got: Any, expected: str, do: str) -> InputProblem:
    return InputProblem(path=path, what=what, got=got, expected=expected, do=do)


MAX_DESCRIPTION_LINES = 20


def describe_cluster(cluster: "Cluster") -> str:
    """Return the tree of switches, equal nodes of a switch on one line; lines that do not fit are counted."""
    counts = f"{units.count_noun(cluster.num_nodes, 'node')}, {units.count_noun(cluster.num_devices, 'device')}"
    lines = [f"{cluster.name}: {counts}, latency {units.format_seconds(cluster.latency_s)}", *_describe_tree(cluster)]
    if len(lines) > MAX_DESCRIPTION_LINES:
        lines[MAX_DESCRIPTION_LINES - 1 :] = [f"... and {len(lines) - MAX_DESCRIPTION_LINES + 1} more lines"]
    return "\n".join(lines)


def _describe_tree(cluster: "Cluster") -> Iterator[str]:
    nodes, switches = defaultdict(list), defaultdict(list)
    for node in cluster.nodes:
        nodes[node.switch or CORE].append(node)
    for switch in cluster.switches:
        switches[switch.parent or CORE].append(switch)
    stack = [(CORE, CORE, 0)]
    while stack:
        name, text, depth = stack.pop()
        yield "  " * depth + text
        for _, alike in groupby(nodes[name], key=lambda node: (node.nics, node.devices)):
            yield "  " * (depth + 1) + _describe_nodes(list(alike))
        for switch in reversed(switches[name]):
            uplink = units.format_rate(switch.uplink_bytes_per_s)
            stack.append((switch.name, f"{switch.name}, uplink {uplink}", depth + 1))


def _describe_nodes(alike: list["Node"]) -> str:
    first, last = alike[0].name, alike[-1].name
    names = first if len(alike) == 1 else f"{first} .. {last} ({len(alike)} nodes)"
    return f"{names}: {_describe_equipment(alike[0])}"


def _describe_equipment(node: "Node") -> str:
    """`nic 400Mbit/s, 2 x cpu, 1 x cpu at 0.5`."""
    rates = " + ".join(units.format_rate(nic.rate_bytes_per_s) for nic in node.nics[:8])
    kinds = [device.kind if device.speed == 1 else f"{device.kind} at {device.speed:g}" for device in node.devices]
    devices = [(text, len(list(alike))) for text, alike in groupby(kinds)][:8]
    return f"nic {rates}, " + ", ".join(f"{count} x {text}" for text, count in devices)


class ClusterProblemsError(problems.InputError, ClusterError):
    """A ClusterError that keeps its problems as data; code outside this package catches ClusterError."""


def raise_if_cluster_problems(found: Iterable[InputProblem]) -> None:
    """Raise when there are problems.

    Raises:
        ClusterProblemsError: At least one problem was found.
    """
    problems.raise_problems(found, error=ClusterProblemsError)


def check_cluster(cluster: "Cluster") -> None:
    """Refuse a cluster that is not a tree of well-named parts.

    Raises:
        ProblemsError: Lists all problems, in the order of the nodes, then of the switches.
    """
    for find in (
        _cluster_shape_problems,
        _duplicate_name_problems,
        _reference_problems,
        _switch_loop_problems,
        _unused_switch_problems,
    ):
        raise_if_cluster_problems(find(cluster))


def _cluster_shape_problems(cluster: "Cluster") -> Iterator[InputProblem]:
    yield from plain_name_problems(("name",), "name of the cluster", cluster.name)
    yield from latency_problems(cluster.latency_s)
    limits = (1, MAX_NODES)
    yield from tuple_problems(("nodes",), "nodes of the cluster", cluster.nodes, limits, _range_text("nodes", *limits))
    limits = (0, MAX_SWITCHES)
    expected = _range_text("switches", *limits)
    yield from tuple_problems(("switches",), "switches of the cluster", cluster.switches, limits, expected)


def _duplicate_name_problems(cluster: "Cluster") -> Iterator[InputProblem]:
    parts = [*cluster.nodes, *cluster.switches]
    for index in repeated_indices(part.name for part in parts):
        is_node = index < len(cluster.nodes)
        path: KeyPath = ("nodes", index) if is_node else ("switches", index - len(cluster.nodes))
        yield InputProblem(
            path=(*path, "name"),
            what="name of a node" if is_node else "name of a switch",
            got=parts[index].name,
            expected="a name that no other node or switch has (upper and lower case are the same)",
            do="Rename one of them, or remove the one that is there twice",
        )
    addressed = [index for index, node in enumerate(cluster.nodes) if node.address is not None]
    addresses = [ipaddress.ip_address(str(cluster.nodes[index].address)) for index in addressed]
    for position in repeated_indices(addresses):
        node = cluster.nodes[addressed[position]]
        yield InputProblem(
            path=("nodes", addressed[position], "address"),
            what=f"address of node {node.name}",
            got=node.address,
            expected="an address that no other node has",
            do="Give each node its own address, or leave the key out",
        )


def _reference_problems(cluster: "Cluster") -> Iterator[InputProblem]:
    known = {CORE, *(switch.name for switch in cluster.switches)}
    for index, node in enumerate(cluster.nodes):
        if node.switch is not None and node.switch not in known:
            yield _unknown_switch_problem(
                cluster, ("nodes", index, "switch"), f"switch of node {node.name}", node.switch
            )
    for index, switch in enumerate(cluster.switches):
        if switch.parent is not None and switch.parent not in known:
            yield _unknown_switch_problem(
                cluster, ("switches", index, "parent"), f"parent of switch {switch.name}", switch.parent
            )


def _switch_loop_problems(cluster: "Cluster") -> Iterator[InputProblem]:
    parents = {switch.name: switch.parent or CORE for switch in cluster.switches}
    indices = {switch.name: index for index, switch in enumerate(cluster.switches)}
    checked = {CORE}
    for start in parents:
        climbed: dict[str, None] = {}
        name = start
        while name not in checked and name not in climbed:
            climbed[name] = None
            name = parents[name]
        if name in climbed:
            loop = list(climbed)[list(climbed).index(name) :]
            yield InputProblem(
                path=("switches", indices[name], "parent"),
                what=f"parent of switch {name}",
                got=parents[name],
                expected=f"a way up to {CORE}, not the loop {_loop_text([*loop, name])}",
                do=f"Leave parent out of the switch that hangs on {CORE}",
            )
        checked.update(climbed)


def _unused_switch_problems(cluster: "Cluster") -> Iterator[InputProblem]:
    parents = {switch.name: switch.parent or CORE for switch in cluster.switches}
    used = {CORE}
    for node in cluster.nodes:
        name = node.switch or CORE
        while name not in used:
            used.add(name)
            name = parents[name]
    for index, switch in enumerate(cluster.switches):
        if switch.name not in used:
            yield InputProblem(
                path=("switches", index),
                what="switch with no node below it",
                got=switch.name,
                expected="at least one node below every switch",
                do=f'Write "switch: {switch.name}" in the nodes that hang on it, or remove the switch',
            )


def _unknown_switch_problem(cluster: "Cluster", path: KeyPath, what: str, got: object) -> InputProblem:
    names = [switch.name for switch in cluster.switches]
    known = (
        f"one of the switches ({shorten_names(names, len(names))})" if names else "none, as no switches are declared"
    )
    return InputProblem(
        path=path,
        what=what,
        got=got,
        expected=f"{known}, or {CORE}",
        do=suggest_closest(got, [*names, CORE]) or f"Declare it under switches, or leave the key out to hang on {CORE}",
    )


def _loop_text(names: list[str]) -> str:
    return " -> ".join(names if len(names) <= 6 else [*names[:4], "...", names[-1]])


def _range_text(noun: str, low: int, high: int) -> str:
    return f"{low} to {high} {noun}"


DEFAULT_LATENCY_S = 50e-6
"""Latency of a message between two hosts on ordinary Ethernet, through the kernel."""
ASSUMED_RATE_BYTES_PER_S = 1.25e9
"""10Gbit/s, used where a NIC's rate is unknown; the code that uses it reports the assumption."""

SHORT_FORM_NIC = "eth0"
"""Name of the NIC that `nic: 400Mbit/s` of a cluster file stands for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Nic:
    """A network interface of a node."""

    name: str
    """Name of the interface, such as eth0."""
    rate_bytes_per_s: float
    """Rate of each direction."""
    numa: int | None = None
    """NUMA node that it is attached to; None means unknown."""
    rdma: bool = False
    nearest: tuple[int, ...] = ()
    """Device indices, the one that should lead on this NIC first; empty: NUMA nodes decide."""

    def __post_init__(self) -> None:
        raise_if_cluster_problems(nic_problems(self))


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """Compute device of one worker."""

    kind: str = "cpu"
    """`cpu` or `cuda`."""
    speed: float = 1.0
    """Relative compute speed: a prior for planning, the CPU quota in the lab."""
    numa: int | None = None
    """NUMA node that it is attached to; None means unknown."""

    def __post_init__(self) -> None:
        raise_if_cluster_problems(device_problems(self))


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One host with its devices."""

    name: str
    """Usable as a host name; unique in the cluster together with the names of switches."""
    devices: tuple[Device, ...]
    """Indexed by LOCAL_RANK."""
    nics: tuple[Nic, ...]
    """Interfaces that connect it to its switch."""
    switch: str | None = None
    """Name of the switch that it is attached to; None means the root."""
    address: str | None = None
    """IP address; None where it is assigned later (lab) or unknown."""

    def __post_init__(self) -> None:
        raise_if_cluster_problems(node_problems(self))

    @property
    def num_devices(self) -> int:
        """Number of workers that the node takes."""
        return len(self.devices)

    @property
    def rate_bytes_per_s(self) -> float:
        """Rate of all its NICs together, in each direction."""
        return sum(nic.rate_bytes_per_s for nic in self.nics)


@dataclass(frozen=True, kw_only=True, slots=True)
class Switch:
    """Connects nodes and other switches; inside, it forwards at any rate."""

    name: str
    """Unique in the cluster together with the names of nodes; never `core`."""
    uplink_bytes_per_s: float
    """Rate of each direction of the connection to its parent."""
    parent: str | None = None
    """Name of the switch above; None means the root."""

    def __post_init__(self) -> None:
        raise_if_cluster_problems(switch_problems(self))


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A directed edge of the tree."""

    src: str
    """Name of the node or switch that sends."""
    dst: str
    """Name of the node or switch that receives."""
    latency_s: float
    """Latency that the link adds to a message; along any route these add up to the cluster's latency."""
    bandwidth_bytes_per_s: float
    """Rate in this direction."""

    def __post_init__(self) -> None:
        raise_if_cluster_problems(link_problems(self))

    @property
    def name(self) -> str:
        """`a0->r0`."""
        return link_name(self.src, self.dst)


class _Named(Protocol):
    @property
    def name(self) -> str: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """All nodes, and the switches and links between them.

    Raises:
        ClusterError: A part refers to something that is not there, names clash, switches form a loop, a switch has no
            node below it, there is no node, or a limit of `rules` is passed.
    """

    name: str
    """At most 63 letters, digits, dots, hyphens and underscores."""
    nodes: tuple[Node, ...]
    """In the order in which ranks are counted."""
    switches: tuple[Switch, ...] = ()
    """All except the root; empty where all nodes are attached to it."""
    latency_s: float = DEFAULT_LATENCY_S
    """Alpha: end-to-end time of an empty message, for any number of hops."""
    _nodes: dict[str, Node] = field(init=False, repr=False, compare=False)
    _parents: dict[str, str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_cluster(self)
        parents = {node.name: node.switch or CORE for node in self.nodes}
        parents.update((switch.name, switch.parent or CORE) for switch in self.switches)
        object.__setattr__(self, "_nodes", {node.name: node for node in self.nodes})
        object.__setattr__(self, "_parents", parents)

    @property
    def num_nodes(self) -> int:
        return len(self.nodes)

    @property
    def num_devices(self) -> int:
        """Number of workers that the cluster takes: the world size of a run on all of it."""
        return sum(node.num_devices for node in self.nodes)

    def node(self, name: str) -> Node:
        """Return the node of that name.

        Raises:
            ClusterError: There is none; the text names those there are.
        """
        if name not in self._nodes:
            raise ClusterError(self._unknown_name_text("node", name, self.nodes))
        return self._nodes[name]

    def ancestors(self, name: str) -> tuple[str, ...]:
        """Return the switches above a node or a switch, nearest first, ending in `core`; empty for `core` itself.

        Raises:
            ClusterError: Nothing has that name.
        """
        above, current = [], name
        while current != CORE:
            if current not in self._parents:
                raise ClusterError(self._unknown_name_text("node or switch", name, [*self.nodes, *self.switches]))
            current = self._parents[current]
            above.append(current)
        return tuple(above)

    def links(self) -> tuple[Link, ...]:
        """Return every edge in both directions: nodes in order, then switches in order, upwards before downwards.

        The NICs of a node count as one link of their summed rate, as if traffic were spread over them; code that drives
        them one by one finds them on the node. Any route passes exactly two links of nodes, so each carries half of the
        cluster's latency and the links between switches none.

        Cost: one object for each direction of each node and switch.
        """
        nodes = [(node.name, node.rate_bytes_per_s, self.latency_s / 2) for node in self.nodes]
        switches = [(switch.name, switch.uplink_bytes_per_s, 0.0) for switch in self.switches]
        return tuple(
            Link(src=src, dst=dst, latency_s=latency_s, bandwidth_bytes_per_s=rate)
            for name, rate, latency_s in nodes + switches
            for src, dst in ((name, self._parents[name]), (self._parents[name], name))
        )

    def route(self, src_node: str, dst_node: str) -> tuple[str, ...]:
        """Return the names of the links from one node to another, in order; empty from a node to itself.

        Raises:
            ClusterError: One of them is not a node of the cluster.
        """
        up = [self.node(src_node).name, *self.ancestors(src_node)]
        down = [self.node(dst_node).name, *self.ancestors(dst_node)]
        while len(up) > 1 and len(down) > 1 and up[-2] == down[-2]:
            up.pop()
            down.pop()
        if src_node == dst_node:
            return ()
        down.reverse()
        return (*map(link_name, up, up[1:]), *map(link_name, down, down[1:]))

    def describe(self) -> str:
        """Return the cluster on one screen: the tree of switches, with equal nodes on one line."""
        return describe_cluster(self)

    def _unknown_name_text(self, noun: str, name: str, parts: Sequence[_Named]) -> str:
        names = [part.name for part in parts]
        return errors.explain(
            f"{noun} of cluster {self.name}",
            got=name,
            expected=f"one of {shorten_names(names, len(names))}",
            do=suggest_closest(name, names) or "Use a name of the cluster file",
        )


def link_name(src: str, dst: str) -> str:
    """Return `a0->r0`, the name of the link from `src` to `dst`."""
    return f"{src}->{dst}"


def one_machine(num_workers_per_node: Sequence[int]) -> Cluster:
    """Return the cluster that `ringweave run --workers 3,2` assumes: node0 with three CPU devices, node1 with two.

    The nodes are all this machine, so their traffic takes the loopback interface. Its rate is **assumed** to be
    10Gbit/s for each node; it was not measured.

    Raises:
        ClusterError: There is no node, or one has no worker or too many.
    """
    for index, num_workers in enumerate(num_workers_per_node):
        if not 1 <= num_workers <= MAX_DEVICES:
            raise ClusterError(
                f"workers of node{index}",
                got=num_workers,
                expected=f"1 to {MAX_DEVICES} workers",
                do="Give each node at least one worker, such as 3,2 for two nodes",
            )
    nics = (Nic(name="lo", rate_bytes_per_s=ASSUMED_RATE_BYTES_PER_S),)
    nodes = [
        Node(name=f"node{index}", devices=(Device(),) * num_workers, nics=nics)
        for index, num_workers in enumerate(num_workers_per_node)
    ]
    return Cluster(name="one-machine", nodes=tuple(nodes))
