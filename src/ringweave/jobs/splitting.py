"""The split: how many GPUs each node gets of a total, by each node's own capacity and with at least three each.

Filling nodes greedily breaks the rule of three: 11 on capacities (10, 5) would be 10 + 1, and 8 + 3 is legal.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ringweave.errors import JobError, explain

MIN_PER_NODE = 3
"""Fewer make no ring: with two every step is an exchange of halves, with one there is nothing to reduce in the node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """What a total comes to on some nodes."""

    total: int
    """GPUs (or CPU workers) asked for."""
    capacities: tuple[int, ...]
    """How many each node may run, in node order."""
    min_per_node: int
    """The least that a chosen node gets."""
    counts: tuple[int, ...] | None
    """How many each node gets, in node order, 0 where it is not used; None where no legal split exists."""
    nearest_below: int | None = None
    """The largest smaller total that can be split; None where there is none, or where this one can be."""
    nearest_above: int | None = None
    """The smallest larger total that can be split; None likewise."""

    @property
    def is_feasible(self) -> bool:
        """There is a legal split."""
        return self.counts is not None

    @property
    def num_nodes(self) -> int:
        """How many nodes are used."""
        return sum(1 for count in self.counts or () if count)

    def __str__(self) -> str:
        """`15 on (10, 5) -> 10, 5`."""
        capacities = ", ".join(map(str, self.capacities))
        counts = ", ".join(map(str, self.counts)) if self.counts is not None else "impossible"
        return f"{self.total} on ({capacities}) -> {counts}"

    def refusal(self, where: str = "") -> str:
        """Why there is no legal split, and the nearest totals that have one."""
        nearest = [str(total) for total in (self.nearest_below, self.nearest_above) if total is not None]
        if not nearest:
            do = f"Add a node with room for at least {self.min_per_node}"
        else:
            do = f"Ask for {' or '.join(nearest)}, the nearest that can be"
        capacities = tuple(self.capacities[:8]) + (("...",) if len(self.capacities) > 8 else ())
        shown = ", ".join(map(str, capacities))
        expected = f"a total that nodes of ({shown}) can share with at least {self.min_per_node} each"
        return explain("split", got=self.total, expected=expected, do=do, where=where)


def split(total: int, capacities: Sequence[int], *, min_per_node: int = MIN_PER_NODE) -> Split:
    """The total shared out over as few nodes as can hold it.

    Nodes with less room than the minimum are left out. Of the others the k largest are taken (ties by order), k being
    the smallest number whose room suffices; they are filled in node order, leaving the minimum for each still to come.

    Args:
        total: GPUs, or CPU workers, in all.
        capacities: How many each node may run, in node order.
        min_per_node: The least that a chosen node gets.

    Returns:
        The counts, or the nearest totals that can be split.

    Raises:
        JobError: A number is not a count.

    Cost: O(n log n) for n nodes.

    Source: the training platform's patent; the exact rule is ours, since greedy filling breaks the minimum.
    """
    _check(total, capacities, min_per_node)
    usable = [node for node, capacity in enumerate(capacities) if capacity >= min_per_node]
    by_size = sorted(usable, key=capacities.__getitem__, reverse=True)  # still in node order among equals
    spans = list(_spans([capacities[node] for node in by_size], min_per_node))
    fitting = next((k for k, (least, most) in enumerate(spans, 1) if least <= total <= most), None)
    asked = {"total": total, "capacities": tuple(capacities), "min_per_node": min_per_node}
    if fitting is None:
        below = max((most for _, most in spans if most < total), default=None)
        above = min((least for least, _ in spans if least > total), default=None)
        return Split(**asked, counts=None, nearest_below=below, nearest_above=above)
    return Split(**asked, counts=_filled(total, capacities, sorted(by_size[:fitting]), min_per_node))


def _spans(sizes: Sequence[int], min_per_node: int) -> Iterator[tuple[int, int]]:
    """For k = 1, 2, ...: least and most of the totals for which k is the smallest number of nodes that suffices.

    With fewer nodes nothing above the sum before fits; with k nodes nothing below k times the minimum is legal.
    """
    before = 0
    for k, most in enumerate(accumulate(sizes), 1):
        yield max(before + 1, k * min_per_node), most
        before = most


def _filled(total: int, capacities: Sequence[int], chosen: Sequence[int], min_per_node: int) -> tuple[int, ...]:
    counts = [0] * len(capacities)
    left = total
    for num_before, node in enumerate(chosen, 1):
        still_to_come = len(chosen) - num_before
        counts[node] = min(capacities[node], left - min_per_node * still_to_come)
        left -= counts[node]
    return tuple(counts)


def _check(total: int, capacities: Sequence[int], min_per_node: int) -> None:
    if not _is_count(total, 1):
        raise JobError(explain("total", got=total, expected="a whole number of at least 1", do="Ask for some GPUs"))
    if not _is_count(min_per_node, 1):
        do = f"Leave it out for {MIN_PER_NODE}"
        raise JobError(explain("minimum per node", got=min_per_node, expected="a whole number of at least 1", do=do))
    if not capacities:
        raise JobError(explain("capacities", got=(), expected="at least one node", do="Say how much each node may run"))
    for node, capacity in enumerate(capacities):
        if not _is_count(capacity, 0):
            do = "Write 0 for a node that may run nothing"
            raise JobError(
                explain(f"capacity of node {node}", got=capacity, expected="a whole number of at least 0", do=do)
            )


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**31
