"""The tree in which a message is shared out: switches, nodes and ranks, without the levels that have nothing to choose.

Its leaves are the ranks. A node with a single rank is that rank; a switch with a single vertex below it is left out,
and the vertex gets the smaller of the two rates. So every vertex that is no leaf is a domain of at least two members.
"""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field

from ringweave.cost import Network


@dataclass(frozen=True, slots=True)
class Span:
    """A link and the members of one domain that are below it.

    That of a vertex is above itself alone. A switch that is no domain is above several: what is right below it is a
    member of the domain above it, beside others.
    """

    vertex: int
    """Which is below the link, of the whole tree."""
    rate: float
    """Of the link."""
    members: dict[int, int]
    """The members of the domain that are below it, with their count (1 for vertices, any for kinds of vertices)."""


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Vertices in an order in which the one above comes first; vertex 0 is the root."""

    parents: list[int]
    """Vertex above each; -1 for the root."""
    rates: list[float]
    """Bytes per second of the link to the vertex above, the slower direction; for a rank of a larger node what it
    copies; 1 for the root, where it does not count."""
    ranks: list[int]
    """The rank that a leaf is; -1 for a domain."""
    spans: tuple[Span, ...] = ()
    """Switches that were taken out, by `without`."""
    origins: list[int] = field(default_factory=list)
    """For each vertex the one that it is in the whole tree, of which nothing was taken out."""
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
        """How many ranks there are."""
        return sum(rank >= 0 for rank in self.ranks)

    def links(self) -> Iterator[Span]:
        """Every link, of the vertices and of the switches that were taken out."""
        yield from (Span(self.origins[vertex], self.rates[vertex], {vertex: 1}) for vertex in range(1, len(self)))
        yield from self.spans

    def without(self, removed: Set[int]) -> "Hierarchy":
        """The tree in which some domains of this one, the whole, are spans."""
        kept = [vertex for vertex in range(len(self)) if vertex not in removed]
        place = {vertex: index for index, vertex in enumerate(kept)}
        above = contracted(self.parents, removed)
        counts = spanned(self.parents, removed, [1] * len(self))
        spans = [Span(v, self.rates[v], {place[m]: n for m, n in counts[v].items()}) for v in sorted(removed)]
        parents = [place[above[vertex]] if vertex else -1 for vertex in kept]
        rates, ranks = [self.rates[vertex] for vertex in kept], [self.ranks[vertex] for vertex in kept]
        return Hierarchy(parents, rates, ranks, tuple(spans), kept)


def contracted(parents: Sequence[int], removed: Set[int]) -> list[int]:
    """For each vertex the nearest one above that is not removed."""
    above: list[int] = []
    for parent in parents:
        above.append(above[parent] if parent in removed else parent)
    return above


def spanned(parents: Sequence[int], removed: Set[int], counts: Sequence[int]) -> dict[int, dict[int, int]]:
    """For each removed vertex the nearest ones below that are not removed, and how many of each it has below it."""
    below: dict[int, dict[int, int]] = {vertex: {} for vertex in removed}
    for vertex in range(len(parents) - 1, 0, -1):
        if parents[vertex] in removed:
            for member, count in below.get(vertex, {vertex: 1}).items():
                below[parents[vertex]][member] = count * counts[vertex]
    return below


def hierarchy(net: Network, vertex_of_rank: Sequence[int], memory_bytes_per_s: float) -> Hierarchy:
    """The tree of a group.

    Args:
        net: The network between the nodes of the group.
        vertex_of_rank: The vertex of each rank's node.
        memory_bytes_per_s: What a rank copies from ranks of its own node.
    """
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
    return Hierarchy(parents_, rates_, ranks_)
