"""Share tree: the tree that divides a message among leaders, its classes of equal vertices, and its links' loads.

Its leaves are the ranks. A node with a single rank is that rank. A switch with a single vertex below it is left out,
and the vertex gets the smaller of the two rates. Every inner vertex is thus a domain of at least two members.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field

from ringweave.cost import GroupNetwork


@dataclass(frozen=True, slots=True)
class LinkSpan:
    """A link and the members of one domain that are below it.

    A vertex's link is above that vertex alone. The link of a switch that is no domain is above several: the vertices
    below it are members of the domain above it, besides others.
    """

    vertex: int
    """Vertex of the whole tree below the link."""
    rate: float
    members: dict[int, int]
    """Members of the domain that are below it, with their counts (1 for vertices, any for classes of vertices)."""


@dataclass(frozen=True, slots=True)
class ShareTree:
    """Vertices, ordered so that parents come first; vertex 0 is the root."""

    parents: list[int]
    """Vertex above each; -1 for the root."""
    rates: list[float]
    """Bytes per second of the link to the vertex above, in the slower direction; for a rank of a larger node, its copy
    rate; 1 for the root, where it is unused."""
    ranks: list[int]
    """Rank of a leaf; -1 for a domain."""
    spans: tuple[LinkSpan, ...] = ()
    """Switches that `without` removed."""
    origins: list[int] = field(default_factory=list)
    """Vertex of the whole tree that each vertex corresponds to."""
    children: list[list[int]] = field(init=False)
    """Members of each domain."""
    depths: list[int] = field(init=False)
    """Domains above each vertex."""

    def __post_init__(self) -> None:
        children: list[list[int]] = [[] for _ in self.parents]
        depths = [0] * len(self.parents)
        for vertex, parent in enumerate(self.parents):
            if parent >= 0:
                children[parent].append(vertex)
                depths[vertex] = depths[parent] + 1
        object.__setattr__(self, "children", children)
        object.__setattr__(self, "depths", depths)
        object.__setattr__(self, "origins", self.origins or list(range(len(self.parents))))

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def num_leaves(self) -> int:
        return sum(rank >= 0 for rank in self.ranks)

    def links(self) -> Iterator[LinkSpan]:
        """Yield every link, of the vertices and of the removed switches."""
        yield from (LinkSpan(self.origins[vertex], self.rates[vertex], {vertex: 1}) for vertex in range(1, len(self)))
        yield from self.spans

    def without(self, removed: Set[int]) -> "ShareTree":
        """Return the tree in which some domains of this one, the whole, are spans."""
        kept = [vertex for vertex in range(len(self)) if vertex not in removed]
        place = {vertex: index for index, vertex in enumerate(kept)}
        above = contract_parents(self.parents, removed)
        counts = members_below_removed(self.parents, removed, [1] * len(self))
        spans = [LinkSpan(v, self.rates[v], {place[m]: n for m, n in counts[v].items()}) for v in sorted(removed)]
        parents = [place[above[vertex]] if vertex else -1 for vertex in kept]
        rates, ranks = [self.rates[vertex] for vertex in kept], [self.ranks[vertex] for vertex in kept]
        return ShareTree(parents, rates, ranks, tuple(spans), kept)


def contract_parents(parents: Sequence[int], removed: Set[int]) -> list[int]:
    """Return for each vertex the nearest one above that is not removed."""
    above: list[int] = []
    for parent in parents:
        above.append(above[parent] if parent in removed else parent)
    return above


def members_below_removed(
    parents: Sequence[int], removed: Set[int], counts: Sequence[int]
) -> dict[int, dict[int, int]]:
    """Return for each removed vertex the nearest kept ones below it, and how many of each it has."""
    below: dict[int, dict[int, int]] = {vertex: {} for vertex in removed}
    for vertex in range(len(parents) - 1, 0, -1):
        if parents[vertex] in removed:
            for member, count in below.get(vertex, {vertex: 1}).items():
                below[parents[vertex]][member] = count * counts[vertex]
    return below


def build_share_tree(net: GroupNetwork, vertex_of_rank: Sequence[int], memory_bytes_per_s: float) -> ShareTree:
    """Build the tree of a group. `memory_bytes_per_s`: rate at which a rank copies from ranks of its own node."""
    ranks_at: list[list[int]] = [[] for _ in range(len(net))]
    for rank, vertex in enumerate(vertex_of_rank):
        ranks_at[vertex].append(rank)
    below = net.children()
    rates = [min(up, down) for up, down in zip(net.up_bytes_per_s, net.down_bytes_per_s, strict=True)]
    parents_, rates_, ranks_ = [], [], []
    stack = [(0, -1, 1.0)]
    while stack:
        vertex, parent, rate = stack.pop()
        while len(below[vertex]) == 1:
            vertex = below[vertex][0]
            rate = min(rate, rates[vertex])
        place, own = len(parents_), ranks_at[vertex]
        parents_.append(parent)
        rates_.append(float(rate))
        ranks_.append(own[0] if len(own) == 1 else -1)
        stack.extend((child, place, rates[child]) for child in reversed(below[vertex]))
        if len(own) > 1:
            parents_.extend([place] * len(own))
            rates_.extend([memory_bytes_per_s] * len(own))
            ranks_.extend(own)
    return ShareTree(parents_, rates_, ranks_)


@dataclass(frozen=True, slots=True)
class MessagePart:
    """A part of the message, and the fractions that each vertex leads in the part's own tree."""

    tree: ShareTree
    """The whole tree, or one with some domains removed."""
    weight: float
    led: list[list[float]]
    """For each vertex, z(vertex, w) for the domains w above it, from the root down, as fractions of this part."""


def load_factors(num_members: Sequence[int], num_below: int) -> list[float]:
    """Return factors f such that a link carries `num_below` + the sum of f[a] z(a), in and out.

    Let k members of a domain w be below the link, which lead z(a) of the message in the a-th domain above, w being the
    last. Up: each of the k sends what is led elsewhere, k (1 - z(w)), and what is led below goes on once,
    z(w) - z(root). Down, the same way back: what is led below goes to the other members of w, (m_w - k) z(w), and to
    those of each domain above, (m - 1) z.

    `num_members`: members of each domain above the link, from the root down to w.
    """
    factors = [float(count - 1) for count in num_members]
    factors[-1] += 2 - 2 * num_below
    factors[0] -= 1
    return factors


def busiest_link_s_per_byte(parts: Sequence[MessagePart], depth: int | None = None) -> float:
    """Return the largest tau, in seconds per byte of the message.

    Args:
        parts: All parts of the message, of the same whole tree.
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
                factors = load_factors(above[first], num_below)
                carried = sum(f * sum(part.led[m][a] for m in link.members) for a, f in enumerate(factors))
                loads[link.vertex] += part.weight * (num_below + carried) / link.rate
    return max(loads.values())


@dataclass(frozen=True, slots=True)
class SymmetryClasses:
    """Tree of classes of equal vertices; class 0 is the root."""

    class_of_vertex: list[int]
    parents: list[int]
    """Class of the vertex above; -1 for the root."""
    counts: list[int]
    """Vertices of this class in each vertex above them."""
    rates: list[float]
    """As in the share tree."""
    spans: tuple[LinkSpan, ...] = ()
    """As in the share tree, of classes."""
    origins: list[int] = field(default_factory=list)
    """As in the share tree, of classes."""
    children: list[list[int]] = field(init=False)
    num_members: list[int] = field(init=False)
    """Members of each vertex of this class."""
    depths: list[int] = field(init=False)
    """Domains above."""

    def __post_init__(self) -> None:
        children: list[list[int]] = [[] for _ in self.parents]
        depths = [0] * len(self.parents)
        for kind, parent in enumerate(self.parents):
            if parent >= 0:
                children[parent].append(kind)
                depths[kind] = depths[parent] + 1
        object.__setattr__(self, "children", children)
        object.__setattr__(self, "depths", depths)
        object.__setattr__(self, "num_members", [sum(self.counts[kind] for kind in kinds) for kinds in children])
        object.__setattr__(self, "origins", self.origins or list(range(len(self.parents))))

    @property
    def is_symmetric(self) -> bool:
        """Return True if all members of any domain are alike."""
        return not self.spans and all(len(kinds) <= 1 for kinds in self.children)

    def is_uniform(self, kind: int) -> bool:
        """Return True for a leaf, or a domain of leaves that are alike."""
        below = self.children[kind]
        return not below or (len(below) == 1 and not self.children[below[0]])

    def links(self) -> Iterator[LinkSpan]:
        """Yield the link of each class, and those of the removed switches."""
        kinds = range(1, len(self.parents))
        yield from (LinkSpan(self.origins[kind], self.rates[kind], {kind: 1}) for kind in kinds)
        yield from self.spans

    def without(self, removed: Set[int]) -> "SymmetryClasses":
        """Return the tree in which some domains of this one, the whole, are spans; their vertices have class -1."""
        kept = [kind for kind in range(len(self.parents)) if kind not in removed]
        place = {kind: index for index, kind in enumerate(kept)}
        above, below = (
            contract_parents(self.parents, removed),
            members_below_removed(self.parents, removed, self.counts),
        )
        counts = list(self.counts)
        for kind in range(1, len(counts)):
            if self.parents[kind] in removed:
                counts[kind] *= counts[self.parents[kind]]
        return SymmetryClasses(
            [place.get(kind, -1) for kind in self.class_of_vertex],
            [place[above[kind]] if kind else -1 for kind in kept],
            [counts[kind] for kind in kept],
            [self.rates[kind] for kind in kept],
            tuple(LinkSpan(v, self.rates[v], {place[m]: n for m, n in below[v].items()}) for v in sorted(removed)),
            kept,
        )


def find_symmetry_classes(tree: ShareTree) -> SymmetryClasses:
    """Return the symmetry classes of a tree.

    Cost:
        Nearly linear in the vertices.
    """
    shapes = _subtree_shapes(tree)
    kinds: dict[tuple[int, int], int] = {(-1, shapes[0]): 0}
    of_vertex, parents, rates = [0] * len(tree), [-1], [tree.rates[0]]
    members: defaultdict[int, int] = defaultdict(int)
    representative = {0: 0}
    for vertex in range(1, len(tree)):
        parent = tree.parents[vertex]
        key = of_vertex[parent], shapes[vertex]
        if key not in kinds:
            kinds[key] = len(kinds)
            parents.append(of_vertex[parent])
            rates.append(tree.rates[vertex])
            representative[kinds[key]] = parent
        kind = of_vertex[vertex] = kinds[key]
        members[kind] += representative[kind] == parent
    return SymmetryClasses(of_vertex, parents, [members[kind] or 1 for kind in range(len(kinds))], rates)


def _subtree_shapes(tree: ShareTree) -> list[int]:
    """Return equal numbers for vertices that are alike in rate and in everything below."""
    known: dict[tuple[float, tuple[int, ...]], int] = {}
    shapes = [0] * len(tree)
    for vertex in range(len(tree) - 1, -1, -1):
        below = tuple(sorted(shapes[child] for child in tree.children[vertex]))
        shapes[vertex] = known.setdefault((tree.rates[vertex], below), len(known))
    return shapes
