"""From the entries of a cluster file to the cluster: units parsed, short forms written out, `count` expanded."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

from ringweave import units
from ringweave.errors import UsageError
from ringweave.files.problems import Path, Problem, ProblemsError, refuse_any
from ringweave.topology import rules
from ringweave.topology.cluster import DEFAULT_LATENCY_S, Cluster, Device, Nic, Node, Switch
from ringweave.topology.entries import ClusterEntry, NicEntry, NodeEntry, SwitchEntry

SHORT_FORM_NIC = "eth0"
"""Name of the NIC that `nic: 400Mbit/s` stands for."""

_Made = TypeVar("_Made")


def build(entry: ClusterEntry) -> Cluster:
    """The cluster that the entries describe.

    Raises:
        ProblemsError: Lists the mistakes; their paths are in the words of the file.
    """
    builder = _Builder()
    latency_s = DEFAULT_LATENCY_S if entry.latency is None else builder.latency(entry.latency)
    refuse_any(_count_problems(entry))
    nodes = [builder.nodes(("nodes", index), node) for index, node in enumerate(entry.nodes)]
    switches = [builder.switch(("switches", index), switch) for index, switch in enumerate(entry.switches)]
    refuse_any(builder.found)
    try:
        return Cluster(
            name=entry.name,
            nodes=tuple(node for group in nodes for node in group),
            switches=tuple(switch for switch in switches if switch is not None),
            latency_s=latency_s,
        )
    except ProblemsError as error:
        origins = [index for index, group in enumerate(nodes) for _ in group]
        # Nodes that count made have the same mistake at the same place; it is told once.
        found = reversed([_in_the_file(problem, origins) for problem in error.problems])
        once = {problem.path: problem for problem in found}
        raise ProblemsError(tuple(once.values())) from error


class _Builder:
    """Makes the parts one by one and keeps the problems of all; what it returns counts only if there are none."""

    def __init__(self) -> None:
        self.found: list[Problem] = []

    def latency(self, text: str) -> float:
        try:
            # A bare number would be seconds, which is never what is meant here.
            latency_s = float("nan") if text.strip()[-1:].isdigit() else units.parse_seconds(text)
        except UsageError:
            latency_s = float("nan")
        return self._checked(text, latency_s, rules.latency_problems(latency_s), ("latency",))

    def nodes(self, path: Path, entry: NodeEntry) -> list[Node]:
        nics = self._nics(path, entry)
        devices = [
            self._made((*path, "devices", index), lambda item=item: Device(**item.model_dump()))
            for index, item in enumerate(entry.devices)
        ]
        if None in nics or None in devices:
            return []
        first = self._made(
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
        last = self._made(path, lambda: replace(first, name=f"{entry.name}-{entry.count - 1}"))
        return [replace(first, name=f"{entry.name}-{index}") for index in range(entry.count)] if last else []

    def switch(self, path: Path, entry: SwitchEntry) -> Switch | None:
        rate = self._rate((*path, "uplink"), "uplink of a switch", entry.uplink)
        return self._made(path, lambda: Switch(name=entry.name, uplink_bytes_per_s=rate, parent=entry.parent))

    def _nics(self, path: Path, entry: NodeEntry) -> list[Nic | None]:
        if entry.nic is not None:
            rate = self._rate((*path, "nic"), "rate of a NIC", entry.nic)
            return [Nic(name=SHORT_FORM_NIC, rate_bytes_per_s=rate)]
        return [self._nic((*path, "nics", index), item) for index, item in enumerate(entry.nics or [])]

    def _nic(self, path: Path, entry: NicEntry) -> Nic | None:
        rate = self._rate((*path, "rate"), "rate of a NIC", entry.rate)
        given = entry.model_dump(exclude={"rate", "nearest"})
        return self._made(path, lambda: Nic(rate_bytes_per_s=rate, nearest=tuple(entry.nearest), **given))

    def _rate(self, path: Path, what: str, text: str) -> float:
        try:
            rate = units.parse_rate(text)
        except UsageError:
            rate = float("nan")
        return self._checked(text, rate, rules.rate_problems(path, what, rate), path)

    def _checked(self, text: str, value: float, problems: Iterable[Problem], path: Path) -> float:
        """The value, or a stand-in with which the rest can still be looked at."""
        wrong = [replace(problem, path=path, got=text) for problem in problems]
        self.found.extend(wrong)
        return 1.0 if wrong else value

    def _made(self, path: Path, make: Callable[[], _Made]) -> _Made | None:
        try:
            return make()
        except ProblemsError as error:
            self.found.extend(replace(problem, path=path + problem.path) for problem in error.problems)
            return None


def _count_problems(entry: ClusterEntry) -> Iterator[Problem]:
    """What the keys of a node say of each other, and whether `count` asks for too much; before anything is expanded."""
    num_nodes = 0
    for index, node in enumerate(entry.nodes):
        path: Path = ("nodes", index)
        num_nodes += node.count or 1
        if node.nic is None and node.nics is None:
            expected = "nic (a rate such as 400Mbit/s), or nics (a list)"
            do = 'Add "nic: 400Mbit/s"'
            yield Problem(path=path, what="missing key in a node", got=node.name, expected=expected, do=do)
        if node.nic is not None and node.nics is not None:
            do = "Keep nics if the node has several NICs, else nic"
            yield Problem(path=(*path, "nics"), what="nics beside nic", got=node.nic, expected="one of the two", do=do)
        if node.count is not None and node.address is not None:
            do = "Remove one of the two, or write the nodes one by one"
            got = node.address
            yield Problem(
                path=(*path, "address"), what="address beside count", got=got, expected="one of the two", do=do
            )
        if (node.count is not None and node.count < 1) or num_nodes > rules.MAX_NODES:
            expected = f"1 to {rules.MAX_NODES} nodes in all"
            do = "Leave count out for a single node, and make it smaller for a huge cluster"
            yield Problem(path=(*path, "count"), what="count", got=node.count, expected=expected, do=do)
            num_nodes = 0


def _in_the_file(problem: Problem, origins: list[int]) -> Problem:
    """The problem with a path in the file: nodes are counted before `count` is expanded."""
    path = problem.path
    if len(path) > 1 and path[0] == "nodes" and isinstance(path[1], int):
        path = ("nodes", origins[path[1]], *path[2:])
    return replace(problem, path=path)
