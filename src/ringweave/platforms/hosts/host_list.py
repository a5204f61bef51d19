"""Hosts of a run as the user gives them: `a:2,b:1,join:1`, or a cluster file whose nodes have addresses."""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ringweave import topology
from ringweave.errors import UsageError
from ringweave.topology import Cluster

_NODE_NAME = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,61}[a-z0-9])?")
MAX_WORKERS_PER_HOST = 1024
JOINING = "join"
"""Word in the place of a host that joins by itself, since ssh does not reach it."""
THIS_MACHINE = "localhost"
"""Name of the machine of the command: nothing goes over ssh there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSpec:
    """One host of a run, as the user names it."""

    node: str
    """Name of the node in plans, logs and records: the host name without the user."""
    destination: str
    """Destination for ssh: an alias of `~/.ssh/config`, a host name or `user@host`; `localhost` without ssh; empty for
    a host that joins."""
    workers: int
    address: str | None = None
    """Address at which other hosts reach it; None: the one that the ssh connection arrived at."""

    @property
    def joins(self) -> bool:
        """Return whether a person starts this host by `ringweave join`, as ssh does not reach it."""
        return not self.destination


@dataclass(frozen=True, kw_only=True, slots=True)
class HostList:
    """Hosts of a run, in the order of their ranks."""

    hosts: tuple[HostSpec, ...]
    cluster_text: str | None = None
    """Text of the cluster file; None if the links are not described."""

    @property
    def num_workers(self) -> int:
        return sum(host.workers for host in self.hosts)

    @property
    def reached(self) -> tuple[HostSpec, ...]:
        return tuple(host for host in self.hosts if not host.joins)


def parse_hosts(text: str) -> HostList:
    """Return the hosts that `--hosts` names.

    Args:
        text: `a:2,user@b:1,join:1` (the number of workers defaults to 1), or the path of a cluster file (`.yaml`,
            `.yml`). Hosts called `join` get the names `join-1`, `join-2`, ..., and the last ranks.

    Raises:
        UsageError: The text names no host that ssh reaches, a host twice, or a wrong number of workers.
        ClusterError: The cluster file is wrong.
    """
    if text.endswith((".yaml", ".yml")):
        path = Path(text)
        if not path.is_file():
            do = "Check the path, or name the hosts: a:2,b:1"
            raise UsageError("--hosts", got=text, expected="the path of a cluster file", do=do)
        return HostList(hosts=hosts_of_cluster(topology.load(path)), cluster_text=path.read_text(encoding="utf-8"))
    numbers = itertools.count(1)
    hosts = tuple(_parse_host(part.strip(), numbers) for part in text.split(","))
    _check_distinct([host.node for host in hosts])
    if all(host.joins for host in hosts):
        do = "Name a host that ssh reaches as well: a:2,join:1. A host called join is user@join"
        raise UsageError("--hosts", got=text, expected="a host that others can join", do=do)
    return HostList(hosts=tuple(sorted(hosts, key=lambda host: host.joins)))


def hosts_of_cluster(cluster: Cluster) -> tuple[HostSpec, ...]:
    """Return one host for each node of a cluster file, with as many workers as it has devices.

    A node's address is also its ssh destination, unless `~/.ssh/config` gives its name another one: ssh gets the name
    of a node without an address.
    """
    return tuple(
        HostSpec(node=node.name, destination=node.address or node.name, workers=node.num_devices, address=node.address)
        for node in cluster.nodes
    )


def _parse_host(part: str, join_numbers: Iterator[int]) -> HostSpec:
    destination, count = _split_count(part)
    if destination == JOINING:
        return HostSpec(node=f"{JOINING}-{next(join_numbers)}", destination="", workers=count)
    node = destination.rpartition("@")[2].strip("[]").lower().replace(":", "-")
    if not destination or destination.startswith("-") or not _NODE_NAME.fullmatch(node):
        do = "Write hosts as ssh takes them, each with its number of workers: a:2,user@b:1"
        raise UsageError("host of --hosts", got=part, expected="HOST:WORKERS", do=do)
    return HostSpec(node=node, destination=destination.strip("[]"), workers=count)


def _split_count(part: str) -> tuple[str, int]:
    """Split `host:2`; a colon inside of an IPv6 address needs brackets: `[fe80::1]:2`."""
    host, colon, count = part.rpartition(":")
    if not colon or part.endswith("]"):
        return part, 1
    if not (count.isascii() and count.isdigit() and len(count) < 20 and 1 <= int(count) <= MAX_WORKERS_PER_HOST):
        do = "Write the number of workers after the colon: a:2"
        expected = f"a whole number from 1 to {MAX_WORKERS_PER_HOST}"
        raise UsageError(f"workers of host {host}", got=count, expected=expected, do=do, where="--hosts")
    return host, int(count)


def _check_distinct(names: Sequence[str]) -> None:
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        do = f"Add its workers up: {twice}:{names.count(twice)}"
        raise UsageError("--hosts", got=f"{twice} twice", expected="each host once", do=do)
