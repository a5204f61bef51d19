"""Cluster file: reads YAML into a `Cluster` and writes it back; a mistake is a ClusterError with file, line and key.

The format is described in docs/reference/cluster-file.md. Pydantic checks keys and types only; the dataclasses of
`cluster` check the values.
"""

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from ringweave import units
from ringweave.errors import ClusterError, UsageError
from ringweave.files import yaml_files
from ringweave.files.problems import InputError, InputProblem, KeyPath, raise_problems
from ringweave.files.yaml_files import FileKind
from ringweave.topology import cluster
from ringweave.topology.cluster import DEFAULT_LATENCY_S, SHORT_FORM_NIC, Cluster, Device, Nic, Node, Switch


def _expand_device_count(devices: Any) -> Any:
    """Expand the short form `devices: 2` to two devices with default values."""
    is_count = isinstance(devices, int) and not isinstance(devices, bool)
    return [DeviceEntry()] * devices if is_count and 1 <= devices <= cluster.MAX_DEVICES else devices


class NicEntry(yaml_files.FileEntry):
    """One item of `nics`."""

    name: str = Field(description=cluster.EXPECTED_NIC_NAME, examples=["eth0"])
    rate: str = Field(description=cluster.EXPECTED_RATE, examples=["400Mbit/s"])
    numa: int | None = Field(default=None, description=cluster.EXPECTED_NUMA, examples=["0"])
    rdma: bool = Field(default=False, description="true or false", examples=["false"])
    nearest: list[int] = Field(default=[], description=cluster.EXPECTED_NEAREST, examples=["[1, 0]"])


class DeviceEntry(yaml_files.FileEntry):
    """One item of `devices`."""

    kind: str = Field(default="cpu", description=cluster.EXPECTED_DEVICE_KIND, examples=["cpu"])
    speed: float = Field(default=1.0, description=cluster.EXPECTED_SPEED, examples=["1.0"])
    numa: int | None = Field(default=None, description=cluster.EXPECTED_NUMA, examples=["0"])


class ClusterNodeEntry(yaml_files.FileEntry):
    """One item of `nodes`: a node, or `count` equal nodes."""

    name: str = Field(description=cluster.EXPECTED_NODE_NAME, examples=["a0"])
    switch: str | None = Field(default=None, description="the name of a switch", examples=["r0"])
    address: str | None = Field(default=None, description=cluster.EXPECTED_ADDRESS, examples=["10.0.0.1"])
    nic: str | None = Field(default=None, description=cluster.EXPECTED_RATE, examples=["400Mbit/s"])
    nics: list[NicEntry] | None = Field(
        default=None, description=f"a list of {cluster.EXPECTED_NICS}", examples=["[{name: eth0, rate: 400Mbit/s}]"]
    )
    devices: Annotated[list[DeviceEntry], BeforeValidator(_expand_device_count)] = Field(
        description=f"{cluster.EXPECTED_DEVICES}, as a number or as a list", examples=["2"]
    )
    count: int | None = Field(default=None, description=f"a whole number from 1 to {cluster.MAX_NODES}", examples=["4"])


class SwitchEntry(yaml_files.FileEntry):
    """One item of `switches`."""

    name: str = Field(description=cluster.EXPECTED_NAME, examples=["r0"])
    uplink: str = Field(description=cluster.EXPECTED_RATE, examples=["200Mbit/s"])
    parent: str | None = Field(default=None, description="the name of another switch", examples=["r1"])


class ClusterEntry(yaml_files.FileEntry):
    """The whole file."""

    name: str = Field(description=cluster.EXPECTED_NAME, examples=["two-racks"])
    nodes: list[ClusterNodeEntry] = Field(
        description="a list of nodes", examples=["[{name: a0, nic: 400Mbit/s, devices: 2}]"]
    )
    switches: list[SwitchEntry] = Field(
        default=[], description="a list of switches", examples=["[{name: r0, uplink: 200Mbit/s}]"]
    )
    latency: str | None = Field(default=None, description=cluster.EXPECTED_LATENCY, examples=["50us"])


def read_cluster_entries(value: Any) -> ClusterEntry:
    """Return the entries of a file, with keys and types checked.

    Raises:
        ProblemsError: Lists unknown keys, missing keys and values of the wrong type.
    """
    return yaml_files.validate_entries(ClusterEntry, value, "cluster file")


_Built = TypeVar("_Built")


def build_cluster(entry: ClusterEntry) -> Cluster:
    """Build the cluster that the entries describe.

    Raises:
        ProblemsError: Lists the mistakes; their paths are in the words of the file.
    """
    builder = _ClusterBuilder()
    latency_s = DEFAULT_LATENCY_S if entry.latency is None else builder.latency(entry.latency)
    raise_problems(_node_key_problems(entry))
    nodes = [builder.nodes(("nodes", index), node) for index, node in enumerate(entry.nodes)]
    switches = [builder.switch(("switches", index), switch) for index, switch in enumerate(entry.switches)]
    raise_problems(builder.problems)
    try:
        return Cluster(
            name=entry.name,
            nodes=tuple(node for group in nodes for node in group),
            switches=tuple(switch for switch in switches if switch is not None),
            latency_s=latency_s,
        )
    except InputError as error:
        origins = [index for index, group in enumerate(nodes) for _ in group]
        # Nodes expanded from one `count` have the same mistake at the same place; it is reported once.
        problems = reversed([_with_file_path(problem, origins) for problem in error.problems])
        once = {problem.path: problem for problem in problems}
        raise InputError(tuple(once.values())) from error


class _ClusterBuilder:
    """Builds the parts one by one and collects all problems; its results are valid only if there are none."""

    def __init__(self) -> None:
        self.problems: list[InputProblem] = []

    def latency(self, text: str) -> float:
        try:
            # A bare number would mean seconds, which is never intended here.
            latency_s = float("nan") if text.strip()[-1:].isdigit() else units.parse_seconds(text)
        except UsageError:
            latency_s = float("nan")
        return self._check_value(text, latency_s, cluster.latency_problems(latency_s), ("latency",))

    def nodes(self, path: KeyPath, entry: ClusterNodeEntry) -> list[Node]:
        nics = self._nics(path, entry)
        devices = [
            self._try_build((*path, "devices", index), lambda item=item: Device(**item.model_dump()))
            for index, item in enumerate(entry.devices)
        ]
        if None in nics or None in devices:
            return []
        first = self._try_build(
            path,
            lambda: Node(
                name=entry.name if entry.count is None else f"{entry.name}-0",
                devices=tuple(device for device in devices if device),
                nics=tuple(nic for nic in nics if nic),
                switch=entry.switch,
                address=entry.address,
            ),
        )
        if first is None or entry.count is None:
            return [first] if first else []
        last = self._try_build(path, lambda: replace(first, name=f"{entry.name}-{entry.count - 1}"))
        return [replace(first, name=f"{entry.name}-{index}") for index in range(entry.count)] if last else []

    def switch(self, path: KeyPath, entry: SwitchEntry) -> Switch | None:
        rate = self._rate((*path, "uplink"), "uplink of a switch", entry.uplink)
        return self._try_build(path, lambda: Switch(name=entry.name, uplink_bytes_per_s=rate, parent=entry.parent))

    def _nics(self, path: KeyPath, entry: ClusterNodeEntry) -> list[Nic | None]:
        if entry.nic is not None:
            rate = self._rate((*path, "nic"), "rate of a NIC", entry.nic)
            return [Nic(name=SHORT_FORM_NIC, rate_bytes_per_s=rate)]
        return [self._nic((*path, "nics", index), item) for index, item in enumerate(entry.nics or [])]

    def _nic(self, path: KeyPath, entry: NicEntry) -> Nic | None:
        rate = self._rate((*path, "rate"), "rate of a NIC", entry.rate)
        given = entry.model_dump(exclude={"rate", "nearest"})
        return self._try_build(path, lambda: Nic(rate_bytes_per_s=rate, nearest=tuple(entry.nearest), **given))

    def _rate(self, path: KeyPath, what: str, text: str) -> float:
        try:
            rate = units.parse_rate(text)
        except UsageError:
            rate = float("nan")
        return self._check_value(text, rate, cluster.rate_problems(path, what, rate), path)

    def _check_value(self, text: str, value: float, problems: Iterable[InputProblem], path: KeyPath) -> float:
        """Return the value, or 1.0 after a problem, so that the rest can still be checked."""
        wrong = [replace(problem, path=path, got=text) for problem in problems]
        self.problems.extend(wrong)
        return 1.0 if wrong else value

    def _try_build(self, path: KeyPath, make: Callable[[], _Built]) -> _Built | None:
        try:
            return make()
        except InputError as error:
            self.problems.extend(replace(problem, path=path + problem.path) for problem in error.problems)
            return None


def _node_key_problems(entry: ClusterEntry) -> Iterator[InputProblem]:
    """Yield problems of a node's keys taken together, and of a `count` that is too large, before expansion."""
    num_nodes = 0
    for index, node in enumerate(entry.nodes):
        path: KeyPath = ("nodes", index)
        num_nodes += node.count or 1
        if node.nic is None and node.nics is None:
            expected = "nic (a rate such as 400Mbit/s), or nics (a list)"
            do = 'Add "nic: 400Mbit/s"'
            yield InputProblem(path=path, what="missing key in a node", got=node.name, expected=expected, do=do)
        if node.nic is not None and node.nics is not None:
            do = "Keep nics if the node has several NICs, else nic"
            yield InputProblem(
                path=(*path, "nics"), what="nics beside nic", got=node.nic, expected="one of the two", do=do
            )
        if node.count is not None and node.address is not None:
            do = "Remove one of the two, or write the nodes one by one"
            got = node.address
            yield InputProblem(
                path=(*path, "address"), what="address beside count", got=got, expected="one of the two", do=do
            )
        if (node.count is not None and node.count < 1) or num_nodes > cluster.MAX_NODES:
            expected = f"1 to {cluster.MAX_NODES} nodes in all"
            do = "Leave count out for a single node, and make it smaller for a huge cluster"
            yield InputProblem(path=(*path, "count"), what="count", got=node.count, expected=expected, do=do)
            num_nodes = 0


def _with_file_path(problem: InputProblem, origins: list[int]) -> InputProblem:
    """Return the problem with its path in the file, where nodes are counted before `count` is expanded."""
    path = problem.path
    if len(path) > 1 and path[0] == "nodes" and isinstance(path[1], int):
        path = ("nodes", origins[path[1]], *path[2:])
    return replace(problem, path=path)


CLUSTER_FILE_KIND = FileKind(
    noun="cluster file",
    error=ClusterError,
    expected_keys="a map with the keys name and nodes",
    fix_empty='Begin with "name: my-cluster", then list the nodes',
    fix_too_large="Use count for like nodes",
)


def load(path: str | os.PathLike[str]) -> Cluster:
    """Read the cluster from a file.

    Raises:
        ClusterError: The file cannot be read or is wrong; the text gives the place and the fix, on one screen.
    """
    return _load_text(yaml_files.read_yaml_file(path, CLUSTER_FILE_KIND), os.fspath(path))


def loads(text: str, *, source: str = "<text>") -> Cluster:
    """Read the cluster from a text.

    Args:
        text: The content of a cluster file.
        source: Name of the text in errors; a file's path.

    Raises:
        ClusterError: The text is wrong; the error gives the place and the fix, on one screen.
    """
    return _load_text(text, source)


@functools.lru_cache(maxsize=4)
def _load_text(text: str, source: str) -> Cluster:
    """Parse a text, unless it was parsed before: each group reads the cluster, in 3 ms for eight nodes."""
    return yaml_files.load_yaml_text(text, CLUSTER_FILE_KIND, _build_from_yaml, source=source)


def _build_from_yaml(value: Any) -> Cluster:
    return build_cluster(read_cluster_entries(value))


def dumps(cluster: Cluster) -> str:
    """Return the cluster file of a cluster, in short forms and with `count` where possible; `loads(dumps(c)) == c`."""
    content: dict[str, Any] = {"name": cluster.name}
    content["nodes"] = [_node_entry(node, count) for node, count in _runs_of_equal_nodes(cluster.nodes)]
    if cluster.switches:
        content["switches"] = [_switch_entry(switch) for switch in cluster.switches]
    content["latency"] = units.format_seconds(cluster.latency_s)
    return yaml_files.dump_yaml(content)


def _runs_of_equal_nodes(nodes: tuple[Node, ...]) -> Iterator[tuple[Node, int]]:
    """Yield each node with 1, or the first node of a run that `count` can write, with the run's length."""
    start = 0
    while start < len(nodes):
        length = _equal_run_length(nodes, start)
        yield nodes[start], length
        start += length


def _equal_run_length(nodes: tuple[Node, ...], start: int) -> int:
    first = nodes[start]
    stem = first.name.removesuffix("-0")
    if stem == first.name or first.address is not None:
        return 1
    length = 1
    while start + length < len(nodes):
        node = nodes[start + length]
        if node.name != f"{stem}-{length}" or replace(node, name=first.name) != first:
            break
        length += 1
    return length


def _node_entry(node: Node, count: int) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": node.name if count == 1 else node.name.removesuffix("-0")}
    entry |= _without_none(switch=node.switch, address=node.address)
    rates = [nic.rate_bytes_per_s for nic in node.nics]
    if node.nics == (Nic(name=SHORT_FORM_NIC, rate_bytes_per_s=rates[0]),):
        entry["nic"] = units.format_rate(rates[0])
    else:
        entry["nics"] = _flow_style(_nic_entry(nic) for nic in node.nics)
    is_usual = all(device == Device() for device in node.devices)
    entry["devices"] = len(node.devices) if is_usual else _flow_style(_device_entry(device) for device in node.devices)
    if count > 1:
        entry["count"] = count
    return entry


def _nic_entry(nic: Nic) -> dict[str, Any]:
    return {"name": nic.name, "rate": units.format_rate(nic.rate_bytes_per_s)} | _without_none(
        numa=nic.numa, rdma=nic.rdma or None, nearest=list(nic.nearest) or None
    )


def _device_entry(device: Device) -> dict[str, Any]:
    speed = None if device.speed == 1 else device.speed
    return {"kind": device.kind} | _without_none(speed=speed, numa=device.numa)


def _switch_entry(switch: Switch) -> CommentedMap:
    entry = CommentedMap(
        {"name": switch.name, "uplink": units.format_rate(switch.uplink_bytes_per_s)}
        | _without_none(parent=switch.parent)
    )
    entry.fa.set_flow_style()
    return entry


def _without_none(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _flow_style(entries: Iterator[dict[str, Any]]) -> CommentedSeq:
    items = CommentedSeq(entries)
    items.fa.set_flow_style()
    return items
