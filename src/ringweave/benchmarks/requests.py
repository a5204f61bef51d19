"""What a user asks for, read and checked before anything is started. Pure."""

import difflib
from dataclasses import dataclass

from ringweave import topology, units
from ringweave.benchmarks import layouts
from ringweave.benchmarks.systems import ALL
from ringweave.errors import UsageError, explain
from ringweave.topology import Cluster

LOCAL = "local:"
"""Begins the name of a target that is this machine as it is: `local:4` has four ranks."""
ELEMENT_BYTES = 4
MAX_BYTES = 4 * 10**9
_MAX_LOCAL = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A comparison to be made."""

    cluster: Cluster
    is_local: bool
    """On this machine as it is, without a lab."""
    sizes: tuple[int, ...]
    """Sizes of the messages in bytes."""
    systems: tuple[str, ...]
    orders: tuple[str, ...] = ("block",)
    num_rounds: int = 15
    """Measured rounds of each system at each size."""
    num_search_rounds: int = 3
    """Rounds that each knob of a peer gets before the best one is taken; 0 takes the defaults."""
    schedule: str | None = None
    """The schedule that ringweave has to use; None leaves the choice to it."""


def read_target(text: str) -> tuple[Cluster, bool]:
    """The cluster of `local:N` or of a cluster file, and whether it is this machine as it is.

    Raises:
        UsageError: N is not a number of ranks.
        ClusterError: The file is wrong, or has fewer than two ranks.
    """
    if text.startswith(LOCAL):
        count = text.removeprefix(LOCAL)
        if not (count.isascii() and count.isdigit() and 2 <= int(count) <= _MAX_LOCAL):
            expected = f"local:N with 2 to {_MAX_LOCAL} ranks"
            raise UsageError(explain("CLUSTER", got=text, expected=expected, do="Write it like local:4"))
        return topology.one_machine([int(count)]), True
    cluster = topology.load(text)
    if cluster.num_devices < 2:
        do = "Give its nodes more devices"
        raise UsageError(explain("ranks of the cluster", got=cluster.num_devices, expected="two or more", do=do))
    return cluster, False


def parse_sizes(text: str) -> tuple[int, ...]:
    """Sizes in bytes from `1MB,25MB`.

    Raises:
        UsageError: One is not a size, or not a positive multiple of four bytes.
    """
    sizes = [units.parse_bytes(part.strip()) for part in text.split(",")]
    for size in sizes:
        if size <= 0 or size % ELEMENT_BYTES or size > MAX_BYTES:
            expected = (
                f"a positive multiple of {ELEMENT_BYTES} bytes (float32), at most {units.format_bytes(MAX_BYTES)}"
            )
            raise UsageError(explain("--sizes", got=size, expected=expected, do="Write it like 1MB,25MB"))
    return tuple(dict.fromkeys(sizes))


def parse_systems(text: str) -> tuple[str, ...]:
    """Names of systems from `ringweave,gloo`.

    Raises:
        UsageError: There is no such system.
    """
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if name not in ALL:
            close = difflib.get_close_matches(name, ALL, n=1)
            do = f"Did you mean {close[0]}?" if close else "Name some of them"
            expected = f"{', '.join(ALL)}, separated by commas"
            raise UsageError(explain("--systems", got=name, expected=expected, do=do))
    return tuple(dict.fromkeys(names))


def parse_orders(text: str) -> tuple[str, ...]:
    """Names of orders from `block,shuffled`.

    Raises:
        UsageError: There is no such order.
    """
    return tuple(dict.fromkeys(layouts.check_order(part.strip()) for part in text.split(",")))


def check_count(option: str, count: int, least: int) -> int:
    """`count` itself if it is large enough.

    Raises:
        UsageError: It is not.
    """
    if count < least:
        raise UsageError(explain(option, got=count, expected=f"{least} or more", do="Give a larger number"))
    return count
