"""Options of a benchmark, parsed and checked before anything is started; placement of ranks on nodes. Pure."""

import difflib
import random
from dataclasses import dataclass

from ringweave import topology, units
from ringweave.errors import UsageError
from ringweave.schedules import CollectiveKind
from ringweave.topology import Cluster
from ringweave_bench.systems import SYSTEMS

RANK_ORDERS = ("block", "round-robin", "shuffled")
"""block: ranks count through the nodes; round-robin: they take turns; shuffled: random, with a fixed seed."""
_SHUFFLE_SEED = 1


def place_ranks(cluster: Cluster, order: str) -> tuple[str, ...]:
    """Return the name of each rank's node, one rank per device."""
    block = [node.name for node in cluster.nodes for _ in node.devices]
    if order == "round-robin":
        most = max(node.num_devices for node in cluster.nodes)
        block = [node.name for turn in range(most) for node in cluster.nodes if turn < node.num_devices]
    if order == "shuffled":
        random.Random(_SHUFFLE_SEED).shuffle(block)
    return tuple(block)


def distinct_layouts(cluster: Cluster, orders: tuple[str, ...]) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """Return layouts by rank order, and a note for each order left out because it equals an earlier one."""
    layouts: dict[str, tuple[str, ...]] = {}
    notes = []
    for order in orders:
        layout = place_ranks(cluster, order)
        same = next((other for other, known in layouts.items() if known == layout), None)
        if same is None:
            layouts[order] = layout
        else:
            notes.append(f"order {order} is left out: on this cluster it is the same as {same}")
    return layouts, notes


def check_order(name: str) -> str:
    """Return `name` if it is a rank order.

    Raises:
        UsageError: There is no such order.
    """
    if name in RANK_ORDERS:
        return name
    close = difflib.get_close_matches(name, RANK_ORDERS, n=1)
    do = f"Did you mean {close[0]}?" if close else "Name one of them"
    raise UsageError("--orders", got=name, expected=f"{', '.join(RANK_ORDERS)}, separated by commas", do=do)


LOCAL_PREFIX = "local:"
"""Prefix of a target that is this machine as it is: `local:4` has four ranks."""
ELEMENT_BYTES = 4
MAX_MESSAGE_BYTES = 4 * 10**9
_MAX_LOCAL_RANKS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkRequest:
    """Options of one comparison."""

    cluster: Cluster
    is_local: bool
    """True for this machine as it is, without a lab."""
    sizes: tuple[int, ...]
    """Sizes of the messages in bytes."""
    systems: tuple[str, ...]
    collective: CollectiveKind = "allreduce"
    orders: tuple[str, ...] = ("block",)
    num_rounds: int = 15
    """Measured rounds of each system at each size."""
    num_search_rounds: int = 3
    """Rounds for each knob of a peer before the best one is chosen; 0: the default knob."""
    schedule: str | None = None
    """Schedule that ringweave must use; None: its planner chooses."""


def read_target(text: str) -> tuple[Cluster, bool]:
    """Return the cluster of `local:N` or of a cluster file, and whether it is this machine as it is.

    Raises:
        UsageError: N is not a number of ranks.
        ClusterError: The file is wrong, or has fewer than two ranks.
    """
    if text.startswith(LOCAL_PREFIX):
        count = text.removeprefix(LOCAL_PREFIX)
        if not (count.isascii() and count.isdigit() and 2 <= int(count) <= _MAX_LOCAL_RANKS):
            expected = f"local:N with 2 to {_MAX_LOCAL_RANKS} ranks"
            raise UsageError("CLUSTER", got=text, expected=expected, do="Write it like local:4")
        return topology.one_machine([int(count)]), True
    cluster = topology.load(text)
    if cluster.num_devices < 2:
        do = "Give its nodes more devices"
        raise UsageError("ranks of the cluster", got=cluster.num_devices, expected="two or more", do=do)
    return cluster, False


def whole_blocks(sizes: tuple[int, ...], num_ranks: int) -> tuple[int, ...]:
    """Return the sizes without what is left of each where every rank has an equal block of float32.

    Raises:
        UsageError: A size has less than an element for each rank.
    """
    grain = ELEMENT_BYTES * num_ranks
    if min(sizes) < grain:
        expected = f"an element of {ELEMENT_BYTES} bytes for each of {num_ranks} ranks"
        raise UsageError("--sizes", got=min(sizes), expected=expected, do="Give a larger size")
    return tuple(dict.fromkeys(size - size % grain for size in sizes))


def parse_sizes(text: str) -> tuple[int, ...]:
    """Parse sizes in bytes from `1MB,25MB`.

    Raises:
        UsageError: One is not a size, or not a positive multiple of four bytes.
    """
    sizes = [units.parse_bytes(part.strip()) for part in text.split(",")]
    for size in sizes:
        if size <= 0 or size % ELEMENT_BYTES or size > MAX_MESSAGE_BYTES:
            expected = (
                f"a positive multiple of {ELEMENT_BYTES} bytes (float32), at most "
                f"{units.format_bytes(MAX_MESSAGE_BYTES)}"
            )
            raise UsageError("--sizes", got=size, expected=expected, do="Write it like 1MB,25MB")
    return tuple(dict.fromkeys(sizes))


def parse_systems(text: str) -> tuple[str, ...]:
    """Parse names of systems from `ringweave,gloo`.

    Raises:
        UsageError: There is no such system.
    """
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if name not in SYSTEMS:
            close = difflib.get_close_matches(name, SYSTEMS, n=1)
            do = f"Did you mean {close[0]}?" if close else "Name some of them"
            expected = f"{', '.join(SYSTEMS)}, separated by commas"
            raise UsageError("--systems", got=name, expected=expected, do=do)
    return tuple(dict.fromkeys(names))


def parse_orders(text: str) -> tuple[str, ...]:
    """Parse rank orders from `block,shuffled`.

    Raises:
        UsageError: There is no such order.
    """
    return tuple(dict.fromkeys(check_order(part.strip()) for part in text.split(",")))


def check_count(option: str, count: int, minimum: int) -> int:
    """Return `count` if it is large enough.

    Raises:
        UsageError: It is too small.
    """
    if count < minimum:
        raise UsageError(option, got=count, expected=f"{minimum} or more", do="Give a larger number")
    return count
