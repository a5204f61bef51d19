"""What a link carries when leaders are chosen: one formula for members, and for switches that hold several members."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ringweave.planning.sharing.hierarchy import Hierarchy


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the message, and who leads how much of it in a tree of its own."""

    tree: Hierarchy
    """The whole tree, or one of which domains were taken out."""
    weight: float
    """Fraction of the message."""
    led: list[list[float]]
    """For each vertex z(vertex, w) for the domains w above it, from the root down, as fractions of this part."""


def carrying(num_members: Sequence[int], num_below: int) -> list[float]:
    """Factors f such that a link carries `num_below` + the sum of f[a] z(a), in and out.

    Let k members of a domain w be below the link, which lead z(a) of the message in the a-th domain above, w being the
    last. Up: each of the k sends what is led elsewhere, k (1 - z(w)), and what is led below goes on once,
    z(w) - z(root). Down, the same way back: what is led below goes to the other members of w, (m_w - k) z(w), and to
    those of each domain above, (m - 1) z.

    Args:
        num_members: Members of each domain above the link, from the root down to w.
        num_below: k.
    """
    factors = [float(count - 1) for count in num_members]
    factors[-1] += 2 - 2 * num_below
    factors[0] -= 1
    return factors


def busiest(parts: Sequence[Part], depth: int | None = None) -> float:
    """The largest tau, in seconds per byte of the message.

    Args:
        parts: Of the message, all of it; of the same whole tree.
        depth: Only the links of vertices this far below the root.
    """
    loads: defaultdict[int, float] = defaultdict(float)
    for part in parts:
        tree = part.tree
        above: list[list[int]] = [[] for _ in tree.parents]
        for vertex, parent in enumerate(tree.parents):
            if parent >= 0:
                above[vertex] = [*above[parent], len(tree.children[parent])]
        for link in tree.links():
            first, num_below = next(iter(link.members)), len(link.members)
            if depth in (None, tree.depths[first]):
                factors = carrying(above[first], num_below)
                carried = sum(f * sum(part.led[m][a] for m in link.members) for a, f in enumerate(factors))
                loads[link.vertex] += part.weight * (num_below + carried) / link.rate
    return max(loads.values())
