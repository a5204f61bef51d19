"""A lab that is up: commands in its nodes, bytes on its links, and their rates."""

import json
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ringweave import topology
from ringweave.errors import ClusterError, LabError, UsageError, explain
from ringweave.files.problems import closest, listed
from ringweave.lab import bringing, cgroups, layout, processes, state, tools
from ringweave.lab.addresses import Addresses
from ringweave.lab.bringing import Progress
from ringweave.lab.faults import cuts
from ringweave.lab.layout import Layout
from ringweave.lab.quotas import Mode, Quotas
from ringweave.topology import Cluster

_ENTERED = 'cd "$1" && shift && exec "$@"'


@dataclass(frozen=True, kw_only=True, slots=True)
class Lab:
    """A cluster that is up on this machine."""

    layout: Layout
    quotas: Quotas | None
    """CPU quota of each device in microseconds of each 40 ms; None if there are none."""

    @property
    def name(self) -> str:
        """Name of the lab."""
        return self.layout.name

    @property
    def cluster(self) -> Cluster:
        """The cluster, every node with its address; the rates are those of its file."""
        return self.layout.cluster

    @property
    def addresses(self) -> Addresses:
        """Node -> address of each NIC."""
        return self.layout.addresses

    def interfaces(self, node: str) -> list[str]:
        """Names of the node's interfaces, in the order of its NICs."""
        return self.layout.interfaces(self.cluster.node(node).name)

    def command(self, node: str, argv: Sequence[str], device: int | None = None) -> list[str]:
        """The command line that runs another one in a node, for subprocess, from anywhere on this machine.

        Every program on the way replaces itself by the next, so the process that is started becomes the command:
        its id, exit status, signals, standard streams, environment and current directory are the command's own.

        Args:
            node: Name of the node.
            argv: The command and its arguments; found by PATH as usual. If it is not there, the exit code is 127.
            device: Index of the node's device that it computes on: it gets this one's CPU quota, if there are quotas.

        Raises:
            ClusterError: There is no such node.
            PlacementError: The node has no such device.
        """
        place = self.cluster.node(node)
        join = ""
        if device is not None:
            topology.device_of(place, device)
            group = self.control_group(node, device)
            join = f"echo $$ > {shlex.quote(group + '/cgroup.procs')} && " if group else ""
        files = [
            f"--net={state.NETNS / self.layout.namespaces[node]}",
            f"--uts={state.namespace_folder(self.name) / f'{node}.uts'}",
            f"--mount={state.namespace_folder(self.name) / f'{node}.mnt'}",
        ]
        enter = shlex.join([tools.find("nsenter") or "nsenter", *files, "--", "/bin/sh", "-c", _ENTERED, "rw-enter"])
        return ["/bin/sh", "-c", f'{join}exec {enter} "$(pwd -P)" "$@"', "rw-enter", *argv]

    @property
    def findings_folder(self) -> Path:
        """Where jobs in it keep what they find out about its network."""
        return state.findings_folder(self.name)

    def control_group(self, node: str, device: int) -> str | None:
        """Folder of the control group of a device; None if the lab has no quotas."""
        hierarchy = cgroups.find() if self.quotas is not None else None
        return str(hierarchy.of_device(self.name, node, device)) if hierarchy else None

    def set_quota(self, node: str, device: int, quota_us: int) -> None:
        """Give a device another CPU quota while programs run on it.

        Args:
            node: Name of the node.
            device: Index of its device.
            quota_us: Microseconds of each 40 ms, at least 1000.

        Raises:
            ClusterError: There is no such node.
            PlacementError: The node has no such device.
            LabError: The lab has no quotas, or the kernel refuses.
        """
        topology.device_of(self.cluster.node(node), device)
        hierarchy = cgroups.find() if self.quotas is not None else None
        if hierarchy is None:
            raise LabError(f"CPU quotas of lab {self.name}: none, expected some. Bring it up with --quotas always.")
        cgroups.change(hierarchy.of_device(self.name, node, device), quota_us, hierarchy)

    def bytes_on_links(self) -> dict[str, int]:
        """Link -> bytes sent on it since the lab is up: whole Ethernet frames, so about 5 % more than their content."""
        return {link: sum(entry["bytes"] for entry in entries) for link, entries in self._limits().items()}

    def rates(self) -> dict[str, float]:
        """Link -> its rate now, in bytes per second; that of several NICs is their sum."""
        return {
            link: float(sum(entry["options"]["rate"] for entry in entries)) for link, entries in self._limits().items()
        }

    def rate(self, link: str) -> float:
        """Rate of a link now, in bytes per second.

        Raises:
            ClusterError: There is no such link.
        """
        self._check_link(link)
        return self.rates()[link]

    def set_rate(self, link: str, rate_bytes_per_s: float) -> None:
        """Give a link another rate while it is in use: what is queued stays, nothing is lost.

        One direction only; several NICs of a node keep the proportions of the cluster file. What jobs in the lab found
        out about its network is forgotten.

        Raises:
            ClusterError: There is no such link, or the rate is not one that the lab can play.
            LabError: The lab is gone.
        """
        self._check_link(link)
        layout.check_rate(f"rate of link {link}", rate_bytes_per_s)
        ports = self.layout.ports(link)
        scale = rate_bytes_per_s / sum(port.rate_bytes_per_s for port in ports)
        changed = [replace(port, rate_bytes_per_s=port.rate_bytes_per_s * scale) for port in ports]
        with state.locked(self.name) as lock:
            deaf = [node for node in cuts.nodes_at(self.layout, link) if cuts.seen(self.layout, node) in cuts.DEAF]
            bringing.limit("change", changed, lock)
            state.forget_findings(self.name)
            for node in deaf:
                cuts.deafen(self.layout, node, lock)

    def cut(self, node: str, way: str = cuts.BOTH) -> None:
        """Cut a node off from the network, silently, as when a switch fails: nobody gets an error, packets vanish.

        Args:
            node: Name of the node.
            way: `in`: it gets nothing. `out`: nobody gets anything from it. `both`. A node that is cut off already is
                cut off in this way from now on.

        Raises:
            ClusterError: There is no such node.
            UsageError: There is no such way.
            LabError: The lab is gone, or the kernel cannot do it.
        """
        cuts.check_way(way)
        name = self.cluster.node(node).name
        with state.locked(self.name) as lock:
            cuts.put(self.layout, name, way, lock)

    def mend(self, node: str) -> None:
        """Connect a node again; one that is not cut off stays as it is.

        Raises:
            ClusterError: There is no such node.
            LabError: The lab is gone.
        """
        name = self.cluster.node(node).name
        with state.locked(self.name) as lock:
            if cuts.seen(self.layout, name):
                cuts.put(self.layout, name, "", lock)

    def cut_of(self, node: str) -> str:
        """How a node is cut off now: `in`, `out`, `both`, or empty.

        Raises:
            ClusterError: There is no such node.
        """
        return cuts.seen(self.layout, self.cluster.node(node).name)

    def processes(self) -> dict[str, list[int]]:
        """Node -> ids of the processes that run in it."""
        return {
            node: processes.inside(
                processes.identify(
                    [
                        state.NETNS / namespace,
                        *(state.namespace_folder(self.name) / f"{node}.{kind}" for kind in ("uts", "mnt")),
                    ]
                )
            )
            for node, namespace in self.layout.namespaces.items()
        }

    def _limits(self) -> dict[str, list[dict[str, Any]]]:
        """Link -> what tc says of the limit of each of its ports."""
        seen = _look({port.namespace for port in self.layout.ports()})
        links: dict[str, list[dict[str, Any]]] = {link.name: [] for link in self.cluster.links()}
        for port in self.layout.ports():
            links[port.link].append(seen[port.namespace, port.interface])
        return links

    def _check_link(self, link: str) -> None:
        names = [each.name for each in self.cluster.links()]
        if link not in names:
            raise ClusterError(
                explain(
                    f"link of lab {self.name}",
                    got=link,
                    expected=f"one of {listed(names, len(names))}",
                    do=closest(link, names) or "See ringweave lab status",
                )
            )


def up(cluster: Cluster, name: str | None = None, quotas: Mode = "auto", progress: Progress = lambda what: None) -> Lab:
    """Bring a cluster up on this machine.

    Args:
        cluster: What to bring up.
        name: Name of the lab; None takes that of the cluster.
        quotas: Whether devices get CPU quotas by their speeds; `auto`: only if these differ.
        progress: Is told what is being made.

    Raises:
        UsageError: The cluster cannot be a lab, or the name is not allowed.
        LabError: This machine cannot have it, or a lab of that name is up. Nothing of it is left.
    """
    name = cluster.name if name is None else name
    bringing.check_name(name)
    bringing.make(cluster, name, quotas, progress)
    return find(name)


def find(name: str) -> Lab:
    """The lab of that name.

    Raises:
        UsageError: None is up that is called so.
    """
    state.refuse_inside()
    tools.refuse_others()
    record = state.read(name)
    if not bringing.is_up(record):
        raise UsageError(_not_up(name))
    assert record is not None
    return Lab(layout=layout.lay_out(topology.loads(record.cluster_text), name), quotas=record.quotas)


def names() -> list[str]:
    """All labs of this machine that are up, and what is left of those that were not finished.

    Raises:
        UsageError: This process is in a node of a lab.
    """
    state.refuse_inside()
    return state.names()


def is_up(name: str) -> bool:
    """Whether a lab is complete; False for one that is being made or removed, or was left halfway."""
    return bringing.is_up(state.read(name))


def down(name: str) -> bool:
    """Take a lab down, complete or not; processes in it get SIGTERM, and SIGKILL two seconds later.

    Returns:
        Whether there was anything of it.

    Raises:
        LabError: Something of it could not be removed.
    """
    return bringing.remove(name)


def _look(namespaces: set[str]) -> dict[tuple[str, str], dict[str, Any]]:
    """(namespace, interface) -> what tc says of its queue; all namespaces at once."""
    tc = tools.find("tc") or "tc"
    running = {
        name: subprocess.Popen([tc, "-s", "-j", "-n", name, "qdisc"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for name in sorted(namespaces)
    }
    seen = {}
    outputs = {name: process.communicate() for name, process in running.items()}
    for name, process in running.items():
        said, complaint = outputs[name]
        if process.returncode != 0:
            raise LabError(
                explain(
                    "links of the lab",
                    got=" ".join(complaint.decode(errors="replace").split()),
                    expected="a lab that is still up",
                    do="Look for it: ringweave lab status",
                    where=name,
                )
            )
        seen |= {(name, entry["dev"]): entry for entry in json.loads(said) if entry.get("root")}
    return seen


def _not_up(name: str) -> str:
    there = [each for each in state.names() if is_up(each)]
    return explain(
        "lab",
        got=name,
        expected=f"one that is up ({listed(there, len(there))})" if there else "one that is up (none is)",
        do=closest(name, there) or "Bring it up first: ringweave lab up CLUSTER",
    )
