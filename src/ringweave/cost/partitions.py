"""The partition of a network's nodes that bounds an allreduce most: max of 2 (parts - 1) / (rate out of all parts).

Every allreduce without reduction inside the network carries at least 2 (parts - 1) times the message out of the parts
of any partition, and a part lets out no more than its smallest cut. There are many partitions, but beside the bound of
the smallest cut, 1/c, only few count: those into which a tree falls when a *region*, a connected set of switches, is
taken out. For let X_g be the smallest cut's side of each part g, and let the ratio be larger than 1/c.

1. The X_g may be taken connected, and disjoint: by submodularity, joining two that share switches saves at least the
   cut around these, which is 2 c or more, for one part less; by the mediant, that raises the ratio.
2. No two are neighbours: joining them saves both directions of the link between them, 2 c or more.
3. So each link out of a part leads into one of the connected regions of the switches that belong to no part. Parts and
   regions form a tree in which region j has d_j neighbours, and the d_j - 1 add up to parts - 1. The ratio is the
   mediant of the regions' own ratios 2 (d_j - 1) / (rate into region j), so one of these is at least as large.

The best region is found by Dinkelbach's iteration (Management Science 13, 1967): for a ratio guessed too low, the
region with the largest 2 (d - 1) - ratio x (rate into it) has a larger ratio; for the right one it has no larger.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_NOTHING_GAINED = 1e-12


@dataclass(frozen=True, slots=True)
class Tree:
    """A network as plain lists, for loops over vertices; parents come before children, the root is vertex 0."""

    parents: Sequence[int]
    up: Sequence[float]
    """Rate of the link to the parent."""
    down: Sequence[float]
    """Rate of the link from the parent."""
    is_node: Sequence[bool]

    def turned(self) -> "Tree":
        """All links the other way round."""
        return Tree(self.parents, self.down, self.up, self.is_node)


@dataclass(frozen=True, slots=True)
class Region:
    """A connected set of switches, and the parts into which the nodes fall without it."""

    top: int
    """Its switch next to the root; where that is not the root, what is not below it is a part."""
    tops_of_parts: tuple[int, ...]
    """The other parts are what is below these vertices."""
    into_bytes_per_s: float
    """Rates of the links from the parts into the region, added up."""

    @property
    def num_parts(self) -> int:
        """How many parts there are."""
        return len(self.tops_of_parts) + (self.top != 0)

    @property
    def ratio(self) -> float:
        """Seconds per byte of a message."""
        return 2 * (self.num_parts - 1) / self.into_bytes_per_s


def worst_region(tree: Tree) -> Region:
    """The region of the largest ratio, at least two nodes being there.

    Cost:
        A few passes over the vertices.
    """
    best = _region(tree, 0, tree.is_node)
    while True:
        better = _largest_gain(tree, best.ratio)
        if better.ratio <= best.ratio * (1 + _NOTHING_GAINED):
            return best
        best = better


def _largest_gain(tree: Tree, ratio: float) -> Region:
    """The region with the largest 2 (parts - 1) - ratio x (rate into it)."""
    gains = [0.0] * len(tree.parents)  # of the best region with this top, but for the part above
    is_part = list(tree.is_node)
    best, top = -math.inf, 0
    for vertex in range(len(gains) - 1, -1, -1):
        as_part = 2 - ratio * tree.up[vertex]
        if not tree.is_node[vertex]:
            above = 2 - ratio * tree.down[vertex] if vertex else 0.0
            if gains[vertex] + above > best:
                best, top = gains[vertex] + above, vertex
            is_part[vertex] = as_part >= gains[vertex]
        if vertex:
            gains[tree.parents[vertex]] += as_part if is_part[vertex] else gains[vertex]
    return _region(tree, top, is_part)


def _region(tree: Tree, top: int, is_part: Sequence[bool]) -> Region:
    """The region below `top` that reaches down to the vertices that are parts."""
    inside, tops, into = [False] * len(tree.parents), [], 0.0
    inside[top] = True
    for vertex in range(top + 1, len(tree.parents)):
        if inside[tree.parents[vertex]]:
            inside[vertex] = not is_part[vertex]
            if is_part[vertex]:
                tops.append(vertex)
                into += tree.up[vertex]
    return Region(top, tuple(tops), into + (tree.down[top] if top else 0.0))
