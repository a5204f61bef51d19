"""The partition of a network's nodes that bounds an allreduce most: max of 2 (parts - 1) / (rate out of all parts).

Every allreduce without reduction inside the network carries at least 2 (parts - 1) times the message out of the parts
of any partition, and a part lets out no more than its smallest cut. Here the parts are connected sets of vertices,
no two of them overlapping, each with at least one node; switches may belong to none. Leaving out parts that overlap
loses nothing beside the bound of the single cuts: by submodularity of cuts, two that share switches can be joined,
which saves at least the cut around the shared switches, and that is at least twice the smallest cut of all. So
max(cuts, partitions) is the same.

The ratio is maximised by Dinkelbach's iteration (Management Science 13, 1967): for a ratio guessed too low, the
partition with the largest 2 (parts - 1) - ratio x (rate out) has a larger ratio; for the right one it has no larger.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_NOTHING_GAINED = 1e-12
_IMPOSSIBLE = -math.inf


@dataclass(frozen=True, slots=True)
class Partition:
    """Parts as vertices, and what they let out."""

    part_of: tuple[int, ...]
    """For each vertex the topmost vertex of its part; -1 for a switch that belongs to none."""
    num_parts: int
    """How many parts there are."""
    out_bytes_per_s: float
    """Rates of all links that leave a part, added up; one between two parts counts for the part that it leaves."""

    @property
    def ratio(self) -> float:
        """Seconds per byte of a message."""
        return 2 * (self.num_parts - 1) / self.out_bytes_per_s


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

    def upwards(self) -> Iterator[tuple[int, int]]:
        """(vertex, parent), children first."""
        return ((vertex, self.parents[vertex]) for vertex in range(len(self.parents) - 1, 0, -1))


def worst_partition(tree: Tree) -> Partition:
    """The partition of the largest ratio, at least two nodes being there.

    Cost:
        A few passes over the vertices.
    """
    best = _partition(tree, [vertex if node else -1 for vertex, node in enumerate(tree.is_node)])
    while True:
        better = _partition(tree, _largest_gain(tree, best.ratio))
        if better.num_parts < 2 or better.ratio <= best.ratio * (1 + _NOTHING_GAINED):
            return best
        best = better


def _partition(tree: Tree, part_of: list[int]) -> Partition:
    out = 0.0
    for vertex, parent in tree.upwards():
        if part_of[vertex] != part_of[parent]:
            out += tree.up[vertex] * (part_of[vertex] >= 0) + tree.down[vertex] * (part_of[parent] >= 0)
    return Partition(tuple(part_of), len(set(part_of) - {-1}), out)


class _Values:
    """The largest gain below each vertex, by what the vertex itself is.

    `none`: it belongs to no part. `bare`: its part has no node below it so far. `held`: its part has one. The part of
    the vertex itself is counted, as 2, by whoever ends it.
    """

    def __init__(self, tree: Tree, ratio: float) -> None:
        count = len(tree.parents)
        self.none, self.bare, self.held = [0.0] * count, [0.0] * count, [0.0] * count
        self.up = [ratio * rate for rate in tree.up]
        self.down = [ratio * rate for rate in tree.down]
        shortfall = [_IMPOSSIBLE] * count
        for vertex in range(count - 1, -1, -1):
            if tree.is_node[vertex]:
                self.none[vertex] = self.bare[vertex] = _IMPOSSIBLE
            else:
                self.held[vertex] += min(0.0, shortfall[vertex])
            if vertex:
                parent = tree.parents[vertex]
                apart = self.apart(vertex)
                self.none[parent] += max(self.none[vertex], self.ended(vertex))
                self.bare[parent] += apart
                self.held[parent] += max(apart, self.held[vertex])
                shortfall[parent] = max(shortfall[parent], self.held[vertex] - apart)

    def ended(self, vertex: int) -> float:
        """The vertex is the top of a part."""
        return self.held[vertex] + 2 - self.up[vertex]

    def apart(self, vertex: int) -> float:
        """The parent is in a part, which gets no node from this vertex."""
        without = max(self.none[vertex], self.ended(vertex)) - self.down[vertex]
        return max(self.bare[vertex], without)


def _largest_gain(tree: Tree, ratio: float) -> list[int]:
    """`part_of` of the partition with the largest 2 parts - ratio x out."""
    values = _Values(tree, ratio)
    count = len(tree.parents)
    giver = _givers(tree, values)
    part_of = [-1] * count
    is_held = [False] * count
    if values.held[0] + 2 >= values.none[0]:
        part_of[0], is_held[0] = 0, True
    for vertex in range(1, count):
        parent = tree.parents[vertex]
        if part_of[parent] >= 0:
            apart = values.apart(vertex)
            if is_held[parent] and (giver[parent] == vertex or values.held[vertex] >= apart):
                part_of[vertex], is_held[vertex] = part_of[parent], True
                continue
            if values.bare[vertex] >= apart:
                part_of[vertex] = part_of[parent]
                continue
        if values.ended(vertex) >= values.none[vertex]:
            part_of[vertex], is_held[vertex] = vertex, True
    return part_of


def _givers(tree: Tree, values: _Values) -> list[int]:
    """For each switch the vertex below it that loses least by giving a node to the switch's part."""
    giver = [-1] * len(tree.parents)
    least = [_IMPOSSIBLE] * len(tree.parents)
    for vertex, parent in tree.upwards():
        gain = values.held[vertex] - values.apart(vertex)
        if gain > least[parent]:
            least[parent], giver[parent] = gain, vertex
    return giver
