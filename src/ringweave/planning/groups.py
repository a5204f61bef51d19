"""From a cluster and a group's nodes to the group's plan."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from ringweave import cost, schedules
from ringweave.cost import Assumptions, Demand
from ringweave.errors import RingweaveError
from ringweave.planning import layouts, sharing
from ringweave.planning.choices import pipelined
from ringweave.planning.plans import Plan
from ringweave.planning.sharing import Hierarchy
from ringweave.schedules import Domain, Schedule, Stripe
from ringweave.topology import Cluster

_T = TypeVar("_T")

_USUAL_BYTES = 25_000_000
"""What layouts are compared at: the size of a bucket of DistributedDataParallel."""
_MAX_OPERATIONS = 4_000_000
"""Schedules of more are not counted; the ring, whose rounds are alike, is."""
_MAX_LEADERS = 4_000_000
"""Chunks times domains of a multi-level schedule that are kept."""
_MAX_DEPTH = 64


def plan_group(
    cluster: Cluster,
    nodes: Sequence[str],
    *,
    rates: Mapping[str, float] | None = None,
    assumptions: Assumptions | None = None,
    leader_per_nic: bool = False,
    tell: Callable[[str], None] = lambda what: None,
) -> Plan:
    """The plan of a group of ranks.

    Args:
        cluster: The machines.
        nodes: Name of the node of each group rank.
        rates: Measured bytes per second by directed link name (`a0->r0`), in place of the cluster's.
        assumptions: What the cluster file does not say; None is the default ones.
        leader_per_nic: Give each NIC of a node a leader in the matrix, not just each node.
        tell: Gets what is being computed, in a few words, several times.

    Raises:
        ClusterError: A node or a link is not in the cluster, or a rate is not positive.

    Cost:
        About 10 ms for 8 ranks; where unequal racks need the linear program, the first use imports scipy.
    """
    net = cost.network(cluster, nodes, rates)
    layout = layouts.lay_out(cluster, net, nodes, leader_per_nic=leader_per_nic)
    candidates = _Candidates(net, nodes, assumptions or Assumptions(), tell)
    count = len(nodes)
    candidates.consider("ring", [layout.ring_order], lambda order: schedules.ring(count, order))
    num_columns = candidates.consider(
        "leader-matrix", layouts.column_counts(layout), lambda columns: schedules.leader_matrix(layout.groups, columns)
    )
    tiers = candidates.consider("hierarchical", layouts.tierings(layout), schedules.hierarchical)
    bound = cost.network_bound(net, 1)
    tell("planning who leads what")
    direct_shares, stripes = candidates.direct_shares(), candidates.level_stripes(bound.seconds)
    if candidates.are_few("ps"):
        candidates.consider("ps", [layout.root], lambda root: schedules.parameter_server(count, root))
    if candidates.are_few("direct"):
        candidates.consider("direct", [direct_shares], lambda each: schedules.direct(count, each))
    if stripes:
        candidates.consider("multi-level", [stripes], schedules.multi_level_striped)
    candidates.consider("halving-doubling", [count], schedules.halving_doubling)
    return Plan(
        nodes=tuple(nodes),
        ring_order=layout.ring_order,
        groups=layout.groups,
        num_columns=len(schedules.matrix([group[0] for group in layout.groups], num_columns)[0]),
        tiers=tiers,
        root=layout.root,
        direct_shares=direct_shares,
        stripes=stripes,
        demands=tuple(candidates.demands.items()),
        left_out=tuple(candidates.left_out.items()),
        bound_s_per_byte=bound.seconds,
        binding=bound.binding,
    )


class _Candidates:
    """What was considered so far."""

    def __init__(
        self, net: cost.Network, nodes: Sequence[str], assumed: Assumptions, tell: Callable[[str], None]
    ) -> None:
        self.demands: dict[str, Demand] = {}
        self.left_out: dict[str, str] = {}
        self._net = net
        self._assumed, self._tell = assumed, tell
        self._vertices = cost.vertices(net, nodes)

    def consider(self, name: str, variants: Sequence[_T], generate: Callable[[_T], Schedule]) -> _T:
        """The variant of the least predicted time for a message of usual size; its demand is kept."""
        best: tuple[float, _T, Demand] | None = None
        for number, variant in enumerate(variants, start=1):
            self._tell(f"planning {name}" + (f", layout {number} of {len(variants)}" if len(variants) > 1 else ""))
            asked = cost.demand(generate(variant), self._net, self._vertices, self._assumed)
            predicted_s = pipelined(name, asked, _USUAL_BYTES).predicted_s
            if best is None or predicted_s < best[0]:
                best = predicted_s, variant, asked
        assert best is not None
        self.demands[name] = best[2]
        return best[1]

    def are_few(self, name: str) -> bool:
        """Whether there are few enough ranks for a schedule of 2 N^2 operations."""
        return self._are_countable(name, 2 * len(self._vertices) ** 2)

    def _are_countable(self, name: str, num_operations: int) -> bool:
        if num_operations > _MAX_OPERATIONS:
            self.left_out[name] = f"{num_operations} operations are too many to count"
        return num_operations <= _MAX_OPERATIONS

    def direct_shares(self) -> tuple[int, ...]:
        """What each rank owns if all were on one switch, the ranks of a node sharing its link."""
        count = len(self._vertices)
        if count == 1:
            return (1,)
        rates, on_node = [], [0] * len(self._net)
        for vertex in self._vertices.tolist():
            on_node[vertex] += 1
        for vertex in self._vertices.tolist():
            up, down = self._net.up_bytes_per_s[vertex], self._net.down_bytes_per_s[vertex]
            rates.append(min(float(min(up, down)), self._assumed.memory_bytes_per_s) / on_node[vertex])
        flat = Hierarchy([-1] + [0] * count, [1.0, *rates], [-1, *range(count)])
        owned = [0] * count
        for first, end, leaf in sharing.cut(sharing.fractions(flat)).stripes[0].led_by[0]:
            owned[leaf - 1] += end - first
        return tuple(owned)

    def level_stripes(self, bound_s_per_byte: float) -> tuple[Stripe, ...]:
        """Domain trees and shares of the multi-level schedule, or none and why in `left_out`."""
        if len(self._vertices) == 1:
            return (Stripe(Domain((0,), (0,)), (1,)),)
        tree = sharing.hierarchy(self._net, self._vertices.tolist(), self._assumed.memory_bytes_per_s)
        num_domains = len(tree) - tree.num_leaves
        num_operations = _num_operations(map(len, tree.children))
        if max(tree.depths) > _MAX_DEPTH:
            self.left_out["multi-level"] = f"switches below each other more than {_MAX_DEPTH} deep"
        elif tree.num_leaves * num_domains > _MAX_LEADERS:
            self.left_out["multi-level"] = f"leaders of {tree.num_leaves} chunks in {num_domains} domains are too many"
        elif self._are_countable("multi-level", num_operations):
            try:
                stripes = sharing.level_stripes(tree, bound_s_per_byte)
                sizes = (len(domain.members) for stripe in stripes for domain in stripe.domain.walk())
                return stripes if _num_operations(sizes) <= _MAX_OPERATIONS else sharing.level_stripes(tree)
            except RingweaveError as error:
                self.left_out["multi-level"] = str(error)
        return ()


def _num_operations(domain_sizes: Iterable[int]) -> int:
    """Of a multi-level schedule, about: up and down, all members of a domain to each of its leaders."""
    return 2 * sum(size**2 for size in domain_sizes)
