"""The tree in which a message is shared out: switches, nodes and ranks, without the levels that have nothing to choose.

Its leaves are the ranks. A node with a single rank is that rank; a switch with a single vertex below it is left out,
and the vertex gets the smaller of the two rates. So every vertex that is no leaf is a domain of at least two members.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ringweave.cost import Network


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

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def num_leaves(self) -> int:
        """How many ranks there are."""
        return sum(rank >= 0 for rank in self.ranks)

    def ancestors(self, vertex: int) -> list[int]:
        """The domains above a vertex, from the root down."""
        above = []
        while (vertex := self.parents[vertex]) >= 0:
            above.append(vertex)
        return above[::-1]


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
