"""split_workers: distributes a number of workers over nodes by capacity, with at least three on each used node.

Filling nodes greedily breaks the rule of three: 11 on capacities (10, 5) would be 10 + 1, and 8 + 3 is legal.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ringweave.errors import JobError, explain

MIN_PER_NODE = 3
"""Fewer workers make no ring: with two each step exchanges halves, with one there is nothing to reduce in the node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSplit:
    """Result of splitting a number of workers over nodes."""

    total: int
    """Requested GPUs or CPU workers."""
    capacities: tuple[int, ...]
    """Capacity of each node, in node order."""
    min_per_node: int
    """Minimum number of workers on a used node."""
    counts: tuple[int, ...] | None
    """Workers of each node, in node order, 0 if the node is not used; None if no legal split exists."""
    nearest_below: int | None = None
    """Largest smaller total that can be split; None if there is none, or if this total can be split."""
    nearest_above: int | None = None
    """Smallest larger total that can be split; None if there is none, or if this total can be split."""

    @property
    def is_feasible(self) -> bool:
        """Return whether a legal split exists."""
        return self.counts is not None

    @property
    def num_nodes(self) -> int:
        return sum(1 for count in self.counts or () if count)

    def __str__(self) -> str:
        capacities = ", ".join(map(str, self.capacities))
        counts = ", ".join(map(str, self.counts)) if self.counts is not None else "impossible"
        return f"{self.total} on ({capacities}) -> {counts}"

    def refusal_text(self, where: str = "") -> str:
        """Return the error text for a total without a legal split, with the nearest totals that have one."""
        nearest = [str(total) for total in (self.nearest_below, self.nearest_above) if total is not None]
        if not nearest:
            do = f"Add a node with room for at least {self.min_per_node}"
        else:
            do = f"Ask for {' or '.join(nearest)}, the nearest possible totals"
        capacities = tuple(self.capacities[:8]) + (("...",) if len(self.capacities) > 8 else ())
        shown = ", ".join(map(str, capacities))
        expected = f"a total that nodes of ({shown}) can share with at least {self.min_per_node} each"
        return explain("split", got=self.total, expected=expected, do=do, where=where)


def split_workers(total: int, capacities: Sequence[int], *, min_per_node: int = MIN_PER_NODE) -> WorkerSplit:
    """Split the workers over as few nodes as can hold them.

    Nodes with a capacity below the minimum are left out. The k largest others are used (ties by order), where k is the
    smallest sufficient number. They are filled in node order, leaving the minimum for each later node.

    Returns:
        The counts, or the nearest totals that can be split.

    Raises:
        JobError: A number is not a count.

    Cost: O(n log n) for n nodes.

    Source: the training platform's patent; the exact rule is ours, since greedy filling breaks the minimum.
    """
    _check_numbers(total, capacities, min_per_node)
    usable = [node for node, capacity in enumerate(capacities) if capacity >= min_per_node]
    by_size = sorted(usable, key=capacities.__getitem__, reverse=True)  # equal ones stay in node order
    total_ranges = list(_total_ranges([capacities[node] for node in by_size], min_per_node))
    num_nodes = next((k for k, (least, most) in enumerate(total_ranges, 1) if least <= total <= most), None)
    request = {"total": total, "capacities": tuple(capacities), "min_per_node": min_per_node}
    if num_nodes is None:
        below = max((most for _, most in total_ranges if most < total), default=None)
        above = min((least for least, _ in total_ranges if least > total), default=None)
        return WorkerSplit(**request, counts=None, nearest_below=below, nearest_above=above)
    return WorkerSplit(**request, counts=_fill_nodes(total, capacities, sorted(by_size[:num_nodes]), min_per_node))


def _total_ranges(sizes: Sequence[int], min_per_node: int) -> Iterator[tuple[int, int]]:
    """Yield, for k = 1, 2, ..., the smallest and largest total for which k is the smallest sufficient number of nodes.

    With fewer nodes nothing above the sum before fits; with k nodes nothing below k times the minimum is legal.
    """
    before = 0
    for k, most in enumerate(accumulate(sizes), 1):
        yield max(before + 1, k * min_per_node), most
        before = most


def _fill_nodes(total: int, capacities: Sequence[int], chosen: Sequence[int], min_per_node: int) -> tuple[int, ...]:
    counts = [0] * len(capacities)
    left = total
    for num_before, node in enumerate(chosen, 1):
        still_to_come = len(chosen) - num_before
        counts[node] = min(capacities[node], left - min_per_node * still_to_come)
        left -= counts[node]
    return tuple(counts)


def _check_numbers(total: int, capacities: Sequence[int], min_per_node: int) -> None:
    if not _is_count(total, 1):
        raise JobError("total", got=total, expected="a whole number of at least 1", do="Ask for some GPUs")
    if not _is_count(min_per_node, 1):
        do = f"Leave it out for {MIN_PER_NODE}"
        raise JobError("minimum per node", got=min_per_node, expected="a whole number of at least 1", do=do)
    if not capacities:
        raise JobError("capacities", got=(), expected="at least one node", do="Give the capacity of each node")
    for node, capacity in enumerate(capacities):
        if not _is_count(capacity, 0):
            do = "Write 0 for a node without workers"
            raise JobError(f"capacity of node {node}", got=capacity, expected="a whole number of at least 0", do=do)


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**31
