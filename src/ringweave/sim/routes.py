"""The links that a message between two ranks passes, as numbers; and their names and rates."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ringweave.cost import Network, vertices
from ringweave.cost.network import Ints
from ringweave.errors import PlacementError, UsageError, explain
from ringweave.files.problems import closest


class Routes:
    """Links of a group's network: number 2 v leaves vertex v upwards, 2 v + 1 enters it.

    Raises:
        PlacementError: Not one node per rank.
    """

    def __init__(self, net: Network, node_of_rank: Sequence[str], num_ranks: int) -> None:
        if len(node_of_rank) != num_ranks:
            got, expected = len(node_of_rank), f"{num_ranks}, one per rank of the schedule"
            raise PlacementError(explain("nodes of ranks", got=got, expected=expected, do="Name each rank's node"))
        self.latency_s = net.latency_s
        self.nodes = tuple(node_of_rank)
        self.capacities = [
            float(rate) for pair in zip(net.up_bytes_per_s, net.down_bytes_per_s, strict=True) for rate in pair
        ]
        """Bytes per second by number; the first two are the root's, which nothing passes."""
        self.names = [name for vertex in range(1, len(net)) for name in (net.up_name(vertex), net.down_name(vertex))]
        """From number 2 on."""
        self._vertices = vertices(net, node_of_rank)
        self._parents = net.parents

    def between(self, src: int, dst: int) -> tuple[int, ...]:
        """From rank to rank, upwards and then downwards; empty inside a node."""
        up, down = list[int](), list[int]()
        left, right = int(self._vertices[src]), int(self._vertices[dst])
        while left != right:  # in preorder the larger of two is never above the other one
            if left > right:
                up.append(2 * left)
                left = int(self._parents[left])
            else:
                down.append(2 * right + 1)
                right = int(self._parents[right])
        return (*up, *reversed(down))

    def pairs(self, src: NDArray[np.integer], dst: NDArray[np.integer]) -> tuple[Ints, Ints]:
        """The routes of many messages at once: each message's index with each link that it passes."""
        left, right = self._vertices[src], self._vertices[dst]
        flows, links = list[Ints](), list[Ints]()
        while (apart := np.flatnonzero(left != right)).size:
            up, down = apart[left[apart] > right[apart]], apart[left[apart] < right[apart]]
            flows += [up, down]
            links += [2 * left[up], 2 * right[down] + 1]
            left[up], right[down] = self._parents[left[up]], self._parents[right[down]]
        none = np.zeros(0, np.int64)
        return np.concatenate([none, *flows]), np.concatenate([none, *links])

    def number(self, link: str) -> int:
        """Of a link by its name.

        Raises:
            UsageError: No route of this group passes such a link.
        """
        if link not in self.names:
            expected = f"a link between nodes of this group, such as {self.names[0]}" if self.names else "none"
            do = closest(link, self.names) or "Name it by what it connects, sender first"
            raise UsageError(explain("link of a fault", got=link, expected=expected, do=do))
        return 2 + self.names.index(link)

    def rank(self, number: int) -> int:
        """The rank itself.

        Raises:
            UsageError: This group has no such rank.
        """
        if not 0 <= number < len(self.nodes):
            expected = f"0 to {len(self.nodes) - 1}"
            raise UsageError(explain("rank of a fault", got=number, expected=expected, do="Name a rank of the group"))
        return number

    def on_node(self, node: str) -> list[int]:
        """The ranks on a node.

        Raises:
            UsageError: It has none.
        """
        if node not in self.nodes:
            do = closest(node, sorted(set(self.nodes))) or "Name one of them"
            raise UsageError(explain("node of a fault", got=node, expected="a node with ranks of this group", do=do))
        return [rank for rank, name in enumerate(self.nodes) if name == node]

    def by_name(self, values: Sequence[float]) -> dict[str, float]:
        """Numbers by link, named."""
        return dict(zip(self.names, values[2:], strict=True))
