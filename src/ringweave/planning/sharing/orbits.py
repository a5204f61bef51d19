"""Vertices of a hierarchy that are alike, as one: 10,000 equal nodes in equal racks are one kind of node.

Two vertices are of one kind when everything below them is alike and the vertices above them are of one kind too. A fair
solution gives all of a kind the same: exchanging two of them changes nothing, and the mean of two solutions is one.
"""

from collections import defaultdict
from collections.abc import Iterator, Set
from dataclasses import dataclass, field

from ringweave.planning.sharing.hierarchy import Hierarchy, Span, contracted, spanned


@dataclass(frozen=True, slots=True)
class Orbits:
    """A tree of kinds; kind 0 is the root."""

    of_vertex: list[int]
    """Kind of each vertex."""
    parents: list[int]
    """Kind of the vertex above; -1 for the root."""
    counts: list[int]
    """Vertices of this kind in each vertex above them."""
    rates: list[float]
    """As in the hierarchy."""
    spans: tuple[Span, ...] = ()
    """As in the hierarchy, of kinds."""
    origins: list[int] = field(default_factory=list)
    """As in the hierarchy, of kinds."""
    children: list[list[int]] = field(init=False)
    """Kinds of the members."""
    num_members: list[int] = field(init=False)
    """Members of each vertex of this kind."""
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
        """All members of any domain are alike."""
        return not self.spans and all(len(kinds) <= 1 for kinds in self.children)

    def is_uniform(self, kind: int) -> bool:
        """It is a leaf or a domain of leaves that are alike."""
        below = self.children[kind]
        return not below or (len(below) == 1 and not self.children[below[0]])

    def links(self) -> Iterator[Span]:
        """The link of each kind, and of those that were taken out."""
        kinds = range(1, len(self.parents))
        yield from (Span(self.origins[kind], self.rates[kind], {kind: 1}) for kind in kinds)
        yield from self.spans

    def without(self, removed: Set[int]) -> "Orbits":
        """The tree in which some domains of this one, the whole, are spans; `of_vertex` is -1 for their vertices."""
        kept = [kind for kind in range(len(self.parents)) if kind not in removed]
        place = {kind: index for index, kind in enumerate(kept)}
        above, below = contracted(self.parents, removed), spanned(self.parents, removed, self.counts)
        counts = list(self.counts)
        for kind in range(1, len(counts)):
            if self.parents[kind] in removed:
                counts[kind] *= counts[self.parents[kind]]
        return Orbits(
            [place.get(kind, -1) for kind in self.of_vertex],
            [place[above[kind]] if kind else -1 for kind in kept],
            [counts[kind] for kind in kept],
            [self.rates[kind] for kind in kept],
            tuple(Span(v, self.rates[v], {place[m]: n for m, n in below[v].items()}) for v in sorted(removed)),
            kept,
        )


def orbits(tree: Hierarchy) -> Orbits:
    """The kinds of a hierarchy.

    Cost:
        Nearly linear in the vertices.
    """
    shapes = _shapes(tree)
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
    return Orbits(of_vertex, parents, [members[kind] or 1 for kind in range(len(kinds))], rates)


def _shapes(tree: Hierarchy) -> list[int]:
    """Equal numbers for vertices that are alike in rate and in everything below."""
    known: dict[tuple[float, tuple[int, ...]], int] = {}
    shapes = [0] * len(tree)
    for vertex in range(len(tree) - 1, -1, -1):
        below = tuple(sorted(shapes[child] for child in tree.children[vertex]))
        shapes[vertex] = known.setdefault((tree.rates[vertex], below), len(known))
    return shapes
