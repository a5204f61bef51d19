"""Group planner: from a cluster and the nodes of a group to its rank layout, root node and plan."""

import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from ringweave import cost, schedules
from ringweave.cost import Assumptions, Bound, GroupNetwork, ScheduleDemand
from ringweave.cost.network import Ints
from ringweave.errors import RingweaveError
from ringweave.planning import chunk_shares, simulated
from ringweave.planning.chunk_shares import ShareTree
from ringweave.planning.plans import PLANNED_KINDS, CollectivePlan, Plan, WirePlan, best_pipelining
from ringweave.schedules import CollectiveKind, Domain, Schedule, Stripe, WireEncoding
from ringweave.sim import HostModel
from ringweave.topology import Cluster, Node, placement


@dataclass(frozen=True, kw_only=True, slots=True)
class BestConnectedNode:
    """A node, and the rate that makes it the best connected one."""

    node: str
    inflow_bytes_per_s: float
    """Predicted rate at which all other nodes together can send to it; infinite if there are none."""


def find_best_connected(cluster: Cluster) -> BestConnectedNode:
    """Return the node with the highest total rate from and to all others; of equals the first.

    Cost: O(nodes and switches).
    """
    if cluster.num_nodes == 1:
        return BestConnectedNode(node=cluster.nodes[0].name, inflow_bytes_per_s=float("inf"))
    net = cost.group_network(cluster)
    inwards = _max_inflow(net, net.up_bytes_per_s, net.down_bytes_per_s)
    outwards = _max_inflow(net, net.down_bytes_per_s, net.up_bytes_per_s)
    worst = np.minimum(inwards, outwards)
    order = {node.name: place for place, node in enumerate(cluster.nodes)}
    best = max(
        (vertex for vertex in range(len(net)) if net.is_node[vertex]),
        key=lambda vertex: (worst[vertex], -order[net.names[vertex]]),
    )
    return BestConnectedNode(node=net.names[best], inflow_bytes_per_s=float(worst[best]))


def _max_inflow(net: "cost.GroupNetwork", up: np.ndarray, down: np.ndarray) -> np.ndarray:
    """Return for each vertex the rate at which the rest of the network can send to it: a tree's maximum flows add up.

    `up` has the rates from each vertex to the one above it, `down` those from there to the vertex.
    """
    count = len(net)
    inside = np.where(net.is_node, np.inf, 0.0)  # a node sends at its link's rate
    rising, falling = np.zeros(count), np.zeros(count)
    for vertex in range(count - 1, 0, -1):
        rising[vertex] = min(up[vertex], inside[vertex])
        inside[net.parents[vertex]] += rising[vertex]
    for vertex in range(1, count):
        parent = net.parents[vertex]
        beside = inside[parent] - rising[vertex] + (falling[parent] if parent else 0.0)
        falling[vertex] = min(down[vertex], beside)
    return falling


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLayout:
    """Topology of a group as the schedule generators need it."""

    ring_order: tuple[int, ...]
    """Ranks of a node together, nodes of a switch together: the ring passes every link once in each direction."""
    groups: tuple[tuple[int, ...], ...]
    """Ranks of each node (or of each of its NICs), the leader first, in the order of the ring."""
    racks: tuple[tuple[int, ...], ...]
    """Indices of `groups` on the same switch."""
    root: int
    """First leader of the best connected node."""


def lay_out_ranks(
    cluster: Cluster, net: GroupNetwork, nodes: Sequence[str], *, leader_per_nic: bool = False
) -> RankLayout:
    """Return the layout of a group. `leader_per_nic`: give each NIC of a node a leader, not just each node."""
    ranks_on: dict[str, list[int]] = {}
    for rank, name in enumerate(nodes):
        ranks_on.setdefault(name, []).append(rank)
    groups: list[tuple[int, ...]] = []
    racks: dict[int, list[int]] = {}
    leaders: dict[int, int] = {}
    for vertex, name in enumerate(net.names):
        if net.is_node[vertex]:
            split = _node_groups(cluster.node(name), ranks_on[name], leader_per_nic)
            racks.setdefault(int(net.parents[vertex]), []).extend(range(len(groups), len(groups) + len(split)))
            leaders[vertex] = split[0][0]
            groups += split
    return RankLayout(
        ring_order=tuple(rank for group in groups for rank in sorted(group)),
        groups=tuple(groups),
        racks=tuple(map(tuple, racks.values())),
        root=leaders[_best_connected_vertex(net)],
    )


def column_count_candidates(layout: RankLayout) -> list[int | None]:
    """Return numbers of columns worth comparing: the most square matrix, and those whose rows lie inside racks.

    Rows that cross racks put n times more on the uplinks, so n divides the number of leaders of every rack.
    """
    inside = math.gcd(*map(len, layout.racks))
    smaller = max((n for n in range(1, inside) if inside % n == 0), default=inside)
    counts: list[int | None] = [None]
    return counts + [count for count in dict.fromkeys((inside, smaller)) if count > 1]


def matrix_candidates(layout: RankLayout) -> list[tuple[int | None, bool]]:
    """Return numbers of columns with plain rings, and with nested ones where these can save many messages."""
    counts = column_count_candidates(layout)
    is_large = len(layout.groups) >= _MIN_NESTED_LEADERS
    return [(count, nests_rings) for nests_rings in ((False, True) if is_large else (False,)) for count in counts]


def tier_candidates(layout: RankLayout) -> list[tuple[tuple[int, ...], ...]]:
    """Return groups worth comparing for the hierarchical schedule: of nodes, and of racks.

    Nodes of one rank each would make it a ring, which is considered anyway.
    """
    racks = tuple(tuple(rank for group in rack for rank in layout.groups[group]) for rack in layout.racks)
    return list(dict.fromkeys((layout.groups, racks) if max(map(len, layout.groups)) > 1 else (racks,)))


def _node_groups(node: Node, ranks: Sequence[int], leader_per_nic: bool) -> list[tuple[int, ...]]:
    """Return the ranks of a node, leader first, in one group or one per NIC.

    If all devices of the node take part, ranks are on them in order. A device then belongs to its nearest NIC, and
    leads there if it is the nearest of all (`topology.discovery.leader_choice`).
    """
    nics = placement.preferred_nics(node.nics)[: len(ranks) if leader_per_nic else 1]
    is_whole = len(ranks) == node.num_devices
    far = [[placement.device_distance(node, nic, i) if is_whole else 0 for i in range(len(ranks))] for nic in nics]
    members: list[list[int]] = [[] for _ in nics]
    for place in range(len(ranks)):
        members[min(range(len(nics)), key=lambda i: (far[i][place], len(members[i]), i))].append(place)
    groups = []
    for index, places in enumerate(members):
        if places:
            leader = min(places, key=lambda place: (far[index][place], place))
            groups.append(tuple(ranks[place] for place in sorted(places, key=lambda place: (place != leader, place))))
    return groups


def _best_connected_vertex(net: GroupNetwork) -> int:
    """Return the node with the fastest path to the root of the tree, the first of several."""
    rates = [math.inf]
    for vertex, parent in enumerate(net.parents.tolist()[1:], start=1):
        rates.append(min(rates[parent], float(net.up_bytes_per_s[vertex]), float(net.down_bytes_per_s[vertex])))
    return max((vertex for vertex in range(len(net)) if net.is_node[vertex]), key=lambda vertex: rates[vertex])


_VariantT = TypeVar("_VariantT")

_REFERENCE_BYTES = 25_000_000
"""Message size for the comparison of layouts: that of a bucket of DistributedDataParallel."""
_MAX_OPERATIONS = 4_000_000
"""Schedules with more operations are not counted; only the ring is, whose rounds are alike."""
_MAX_PLANNED_LEADERS = 4_000_000
"""Limit on chunks times domains of a multi-level schedule that is kept."""
_MAX_SWITCH_DEPTH = 64
_MIN_NESTED_LEADERS = 64
"""Leaders of the smallest matrix whose rings may be nested."""
MAX_RANKS_FOR_ALL_KINDS = 128
"""Largest group for which all collectives are planned unless asked otherwise."""


# Long: a third is its docstring, the rest one list of candidates and of the plan's fields.
def plan_group(
    cluster: Cluster,
    nodes: Sequence[str],
    *,
    rates: Mapping[str, float] | None = None,
    assumptions: Assumptions | None = None,
    leader_per_nic: bool = False,
    kinds: Sequence[CollectiveKind] | None = None,
    on_progress: Callable[[str], None] = lambda what: None,
) -> Plan:
    """Return the plan of a group of ranks.

    Args:
        cluster: The machines.
        nodes: Name of the node of each group rank.
        rates: Measured bytes per second by directed link name (`a0->r0`), in place of the cluster's.
        assumptions: Values that the cluster file lacks; None is the default ones.
        leader_per_nic: Give each NIC of a node a leader in the matrix, not just each node.
        kinds: Collectives to plan, besides allreduce; None is all of `PLANNED_KINDS` in groups of up to
            `MAX_RANKS_FOR_ALL_KINDS` ranks, and none in larger ones. Without any by request, allreduces are planned
            exact only, and otherwise in wire formats too, in groups of up to that size.
        on_progress: Called with a short text at each stage of the computation.

    Raises:
        ClusterError: A node or a link is not in the cluster, or a rate is not positive.

    Cost:
        About 90 ms for 8 ranks, and 13 ms for exact allreduces alone (measured); where unequal racks need the linear
        program, its first use loads HiGHS.
    """
    net = cost.group_network(cluster, nodes, rates)
    layout = lay_out_ranks(cluster, net, nodes, leader_per_nic=leader_per_nic)
    candidates = _CandidateSet(net, nodes, assumptions or Assumptions(), on_progress)
    count = len(nodes)
    candidates.consider("ring", [layout.ring_order], lambda order: schedules.ring(count, order))
    num_columns, nests_rings = candidates.consider(
        "leader-matrix",
        matrix_candidates(layout),
        lambda matrix: schedules.leader_matrix(layout.groups, matrix[0], nests_rings=matrix[1]),
    )
    tiers = candidates.consider("hierarchical", tier_candidates(layout), schedules.hierarchical)
    bound = cost.network_bound(net, 1)
    on_progress("planning the leaders of chunks")
    direct_shares, stripes = candidates.direct_shares(), candidates.level_stripes(bound.seconds)
    if candidates.is_affordable("ps"):
        candidates.consider("ps", [layout.root], lambda root: schedules.parameter_server(count, root))
    if candidates.is_affordable("direct"):
        candidates.consider("direct", [direct_shares], lambda each: schedules.direct(count, each))
    if stripes:
        candidates.consider("multi-level", [stripes], schedules.multi_level_striped)
    candidates.consider("halving-doubling", [count], schedules.halving_doubling)
    others = _other_kinds(kinds, count)
    blocks = _CandidateSet(net, nodes, candidates.assumptions, on_progress)
    plan = Plan(
        nodes=tuple(nodes),
        ring_order=layout.ring_order,
        groups=layout.groups,
        num_columns=len(schedules.arrange_leaders([group[0] for group in layout.groups], num_columns)[0]),
        nests_rings=nests_rings,
        tiers=tiers,
        root=layout.root,
        direct_shares=direct_shares,
        stripes=stripes,
        block_stripe=blocks.block_stripe() if others else None,
        collectives=(("allreduce", candidates.collective_plan(bound)),),
    )
    if kinds is None or kinds:
        plan = dataclasses.replace(plan, wires=_plan_wires(plan, net, candidates.assumptions))
    planned = [(kind, _plan_collective(plan, net, kind, candidates.assumptions, blocks.left_out)) for kind in others]
    return dataclasses.replace(plan, collectives=(*plan.collectives, *planned))


def _other_kinds(kinds: Sequence[CollectiveKind] | None, num_ranks: int) -> list[CollectiveKind]:
    """Return the collectives to plan besides allreduce, in the order of all."""
    if kinds is None:
        kinds = PLANNED_KINDS if num_ranks <= MAX_RANKS_FOR_ALL_KINDS else ()
    return [kind for kind in PLANNED_KINDS if kind in kinds and kind != "allreduce"]


def _plan_collective(
    plan: Plan, net: GroupNetwork, kind: CollectiveKind, assumptions: Assumptions, left_out: Mapping[str, str]
) -> CollectivePlan:
    """Return the basis of the choices for a collective, from the schedules that `plan` generates for it."""
    candidates = _CandidateSet(net, plan.nodes, assumptions, lambda what: None)
    for name in schedules.schedule_names(kind):
        if name == "multi-level" and plan.block_stripe is None:
            candidates.left_out |= left_out
        elif name != "direct" or candidates.is_affordable(name):
            candidates.consider(name, [name], lambda name: plan.generate(name, kind))
    vertices = cost.vertices_of_ranks(net, plan.nodes)
    return candidates.collective_plan(cost.network_bound(net, 1, kind, vertices))


_WIRE_TIE_RATIO = 1.05
"""Zones with fewer encoded links are taken up to this ratio to the least predicted time."""
_LINK_LEVEL_RATIO = 1.25
"""Links whose rates differ by less are of one level."""
_MAX_LINK_LEVELS = 4
_MAX_WIRE_CANDIDATE_RATIO = 3.0
"""Exact schedules that take longer than this ratio to the fastest are not considered encoded."""


def _plan_wires(plan: Plan, net: GroupNetwork, assumptions: Assumptions) -> tuple[WirePlan, ...]:
    """Return the encoded allreduces: of each format, with as few encoded links as are as fast as encoding all."""
    vertices = cost.vertices_of_ranks(net, plan.nodes)
    zone_candidates = _zone_candidates(net, vertices)
    if not zone_candidates or len(plan.nodes) > MAX_RANKS_FOR_ALL_KINDS:
        return ()
    choices = plan.choices(_REFERENCE_BYTES)
    slowest_s = choices[0].predicted_s * _MAX_WIRE_CANDIDATE_RATIO
    exact = {each.schedule: plan.generate(each.schedule) for each in choices if each.predicted_s <= slowest_s}

    def encode(name: str, zones: tuple[int, ...]) -> WirePlan:
        encoding = WireEncoding(name, zones)
        demands = {
            schedule: cost.schedule_demand(dataclasses.replace(made, encoding=encoding), net, vertices, assumptions)
            for schedule, made in exact.items()
        }
        return WirePlan(format=name, zones=zones, demands=tuple(demands.items()))

    def seconds(wire: WirePlan) -> float:
        return min(best_pipelining(name, asked, _REFERENCE_BYTES).predicted_s for name, asked in wire.demands)

    tried = [(wire, seconds(wire)) for wire in (encode("int8", zones) for zones in zone_candidates)]
    limit_s = min(found_s for _, found_s in tried) * _WIRE_TIE_RATIO
    int8 = next(wire for wire, found_s in tried if found_s <= limit_s)
    return encode("bf16", int8.zones), int8, encode("int4", int8.zones)


def _zone_candidates(net: GroupNetwork, vertices: Ints) -> list[tuple[int, ...]]:
    """Return zones of the ranks that encode the slowest links, then these and the next faster ones, up to all."""
    rates = np.minimum(net.up_bytes_per_s, net.down_bytes_per_s)
    levels: list[float] = []
    for rate in sorted(rates[1:].tolist()):
        if not levels or rate > _LINK_LEVEL_RATIO * levels[-1]:
            levels.append(rate)
    found: dict[tuple[int, ...], None] = {}
    for level in [*levels[: _MAX_LINK_LEVELS - 1], math.inf]:
        zone_of = list(range(len(net)))
        for vertex in range(1, len(net)):
            if rates[vertex] > _LINK_LEVEL_RATIO * level:
                zone_of[vertex] = zone_of[int(net.parents[vertex])]
        zones = [zone_of[vertex] for vertex in vertices.tolist()]
        numbers = {zone: number for number, zone in enumerate(dict.fromkeys(zones))}
        if len(numbers) > 1:
            found[tuple(numbers[zone] for zone in zones)] = None
    return list(found)


class _CandidateSet:
    """Schedules considered so far."""

    def __init__(
        self, net: cost.GroupNetwork, nodes: Sequence[str], assumptions: Assumptions, on_progress: Callable[[str], None]
    ) -> None:
        self.demands: dict[str, ScheduleDemand] = {}
        self.left_out: dict[str, str] = {}
        self.assumptions = assumptions
        self._net = net
        self._on_progress = on_progress
        self._vertices = cost.vertices_of_ranks(net, nodes)

    def consider(
        self, name: str, variants: Sequence[_VariantT], generate: Callable[[_VariantT], Schedule]
    ) -> _VariantT:
        """Return the variant of the least predicted time for a message of usual size; keep its demand."""
        best: tuple[float, _VariantT, ScheduleDemand] | None = None
        for number, variant in enumerate(variants, start=1):
            self._on_progress(
                f"planning {name}" + (f", layout {number} of {len(variants)}" if len(variants) > 1 else "")
            )
            demand = cost.schedule_demand(generate(variant), self._net, self._vertices, self.assumptions)
            predicted_s = best_pipelining(name, demand, _REFERENCE_BYTES).predicted_s
            if best is None or predicted_s < best[0]:
                best = predicted_s, variant, demand
        assert best is not None
        self.demands[name] = best[2]
        return best[1]

    def collective_plan(self, bound: Bound) -> CollectivePlan:
        """Return the basis of the choices for the collective with this bound."""
        return CollectivePlan(
            demands=tuple(self.demands.items()),
            left_out=tuple(self.left_out.items()),
            bound_s_per_byte=bound.seconds,
            binding=bound.binding,
        )

    def is_affordable(self, name: str) -> bool:
        """Return True if there are few enough ranks for a schedule of 2 N^2 operations."""
        return self._check_num_operations(name, 2 * len(self._vertices) ** 2)

    def _check_num_operations(self, name: str, num_operations: int) -> bool:
        if num_operations > _MAX_OPERATIONS:
            self.left_out[name] = f"{num_operations} operations are too many to count"
        return num_operations <= _MAX_OPERATIONS

    def direct_shares(self) -> tuple[int, ...]:
        """Return each rank's share if all were on one switch, the ranks of a node sharing its link."""
        count = len(self._vertices)
        if count == 1:
            return (1,)
        rates, on_node = [], [0] * len(self._net)
        for vertex in self._vertices.tolist():
            on_node[vertex] += 1
        for vertex in self._vertices.tolist():
            up, down = self._net.up_bytes_per_s[vertex], self._net.down_bytes_per_s[vertex]
            rates.append(min(float(min(up, down)), self.assumptions.memory_bytes_per_s) / on_node[vertex])
        flat = ShareTree([-1] + [0] * count, [1.0, *rates], [-1, *range(count)])
        owned = [0] * count
        for first, end, leaf in chunk_shares.lay_out_message(chunk_shares.solve_fractions(flat)).stripes[0].led_by[0]:
            owned[leaf - 1] += end - first
        return tuple(owned)

    def level_stripes(self, bound_s_per_byte: float) -> tuple[Stripe, ...]:
        """Return trees and shares of the multi-level schedule; if none, the reason goes to `left_out`."""
        if len(self._vertices) == 1:
            return (Stripe(Domain((0,), (0,)), (1,)),)
        tree = self._checked_share_tree()
        if tree and self._check_num_operations("multi-level", _num_operations(map(len, tree.children))):
            try:
                stripes = chunk_shares.make_stripes(tree, bound_s_per_byte)
                sizes = (len(domain.members) for stripe in stripes for domain in stripe.domain.walk())
                return stripes if _num_operations(sizes) <= _MAX_OPERATIONS else chunk_shares.make_stripes(tree)
            except RingweaveError as error:
                self.left_out["multi-level"] = str(error)
        return ()

    def block_stripe(self) -> Stripe | None:
        """Return the tree and chunks of the multi-level allgather; if none, the reason goes to `left_out`."""
        if len(self._vertices) == 1:
            return Stripe(Domain((0,), (0,)), (1,))
        self._on_progress("planning the leaders of blocks")
        if tree := self._checked_share_tree():
            try:
                stripe = chunk_shares.make_block_stripe(tree)
            except RingweaveError as error:
                self.left_out["multi-level"] = str(error)
            else:
                return stripe if self._check_num_operations("multi-level", _num_block_operations(stripe)) else None
        return None

    def _checked_share_tree(self) -> ShareTree | None:
        """Return the tree of a group of several ranks, unless it is too large for leaders on every level."""
        tree = chunk_shares.build_share_tree(self._net, self._vertices.tolist(), self.assumptions.memory_bytes_per_s)
        num_domains = len(tree) - tree.num_leaves
        if max(tree.depths) > _MAX_SWITCH_DEPTH:
            self.left_out["multi-level"] = f"switches below each other more than {_MAX_SWITCH_DEPTH} deep"
        elif tree.num_leaves * num_domains > _MAX_PLANNED_LEADERS:
            self.left_out["multi-level"] = f"leaders of {tree.num_leaves} chunks in {num_domains} domains are too many"
        else:
            return tree
        return None


def _num_block_operations(stripe: Stripe) -> int:
    """Return a limit on the operations of a multi-level allgather: each run of chunks to each member of a domain."""
    count = 0
    for domain in stripe.domain.walk():
        changes = np.count_nonzero(np.diff(domain.leaders))
        inside = len(stripe.shares) if domain is stripe.domain else len(set(domain.leaders))
        count += (len(domain.members) - 1) * (1 + changes + inside)
    return int(count)


def _num_operations(domain_sizes: Iterable[int]) -> int:
    """Return a multi-level schedule's approximate operations: up and down, each member of a domain to each leader."""
    return 2 * sum(size**2 for size in domain_sizes)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPlacement:
    """Placement of a group on the cluster."""

    cluster: Cluster
    nodes: tuple[str, ...]
    """Name of each rank's node in the cluster."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """Measured bytes per second of links, by name, that replace the cluster's before anything runs."""
    assumptions: Assumptions | None = None
    leader_per_nic: bool = False
    """Each NIC of a node has a leader, not only each node."""

    @property
    def num_nodes(self) -> int:
        return len(set(self.nodes))

    def plan(self, rates: Mapping[str, float], *, is_whole: bool = True) -> Plan:
        """Return the plan for these link rates, which override those known before.

        Unless `is_whole`, it has exact allreduces only, the same as in the whole plan.
        """
        known = tuple(sorted({**self.rates, **rates}.items()))
        with _PLANNING:
            return _plan_cached(self.cluster, self.nodes, known, self.assumptions, self.leader_per_nic, is_whole)

    def network(self, rates: Mapping[str, float]) -> cost.GroupNetwork:
        return cost.group_network(self.cluster, self.nodes, {**self.rates, **rates})

    def link_rates(self) -> dict[str, float]:
        """Return bytes per second of all links, by name, as known before anything ran."""
        net = self.network({})
        ups = {net.up_name(vertex): float(net.up_bytes_per_s[vertex]) for vertex in range(1, len(net))}
        downs = {net.down_name(vertex): float(net.down_bytes_per_s[vertex]) for vertex in range(1, len(net))}
        return ups | downs

    def rates_of_links(self, rates: Mapping[str, float]) -> dict[str, float]:
        """Return those of these rates whose links are between the group's nodes: another one may have had others."""
        known = self.link_rates() if rates and self.num_nodes > 1 else {}
        return {name: rate for name, rate in rates.items() if name in known}

    def simulate_candidates(self, plan: Plan, num_bytes: int, rates: Mapping[str, float]) -> dict[str, float]:
        """Return simulated seconds of likely candidates (`simulated.estimate_candidates`); empty inside one node."""
        if self.num_nodes == 1:
            return {}
        known, machine = {**self.rates, **rates}, HostModel.assumed(self.assumptions)
        return simulated.estimate_candidates(plan, self.cluster, num_bytes, rates=known, machine=machine)


_PLANNING = threading.Lock()
"""Held while a plan is made: another thread that wants the same one waits for it."""


@functools.lru_cache(maxsize=16)
def _plan_cached(
    cluster: Cluster,
    nodes: tuple[str, ...],
    rates: tuple[tuple[str, float], ...],
    assumptions: Assumptions | None,
    leader_per_nic: bool,
    is_whole: bool,
) -> Plan:
    """Cache plans: an elastic job forms one group after another, and two at once when a worker joins."""
    return plan_group(
        cluster,
        nodes,
        rates=dict(rates),
        assumptions=assumptions,
        leader_per_nic=leader_per_nic,
        kinds=None if is_whole else (),
    )
