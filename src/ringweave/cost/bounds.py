"""Lower bound on the time of a collective on a cluster: the worst cut or partition of its nodes.

The partition bound of an allreduce is the maximum of 2 (parts - 1) / (rate out of all parts). Every allreduce without
reduction inside the network carries at least 2 (parts - 1) times the message out of the parts of any partition, and a
part lets out no more than its smallest cut. There are many partitions, but beside the bound of the smallest cut, 1/c,
only few count: those into which a tree falls when a *region*, a connected set of switches, is taken out. For let X_g be
the smallest cut's side of each part g, and let the ratio be larger than 1/c.

1. The X_g may be taken connected, and disjoint: by submodularity, joining two that share switches saves at least the
   cut around these, which is 2 c or more, for one part less; by the mediant, that raises the ratio.
2. No two are neighbours: joining them saves both directions of the link between them, 2 c or more.
3. So each link out of a part leads into one of the connected regions of the switches that belong to no part. Parts and
   regions form a tree in which region j has d_j neighbours, and the d_j - 1 add up to parts - 1. The ratio is the
   mediant of the regions' own ratios 2 (d_j - 1) / (rate into region j), so one of these is at least as large.

Dinkelbach's iteration (Management Science 13, 1967) finds the best region: for a ratio guessed too low, the region with
the largest 2 (d - 1) - ratio x (rate into it) has a larger ratio; for the right one no region has a larger one.

The other collectives take half of the copies, and their cuts less than the message. In an allgather all that is owned
outside of a set of nodes enters it, and all that is owned inside leaves it; a reduce-scatter is its mirror; a broadcast
enters each set without the root. Added up over parts, the entries of an allgather or broadcast are parts - 1 messages,
so the rates into the parts give no better bound than these cuts; the rates out of the parts may, where they are slower.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ringweave import units
from ringweave.cost.loads import ScheduleLoads, WaveLoad, vertices_of_ranks
from ringweave.cost.network import Floats, GroupNetwork, Ints, group_network
from ringweave.schedules import CollectiveKind, Schedule
from ringweave.topology import Cluster


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumptions:
    """Values that a cluster file does not contain. **Assumed**, until they are measured."""

    memory_bytes_per_s: float = 4e9
    """Rate at which a rank copies or adds data of a rank of its own node; two or three passes over ordinary memory."""
    message_s: float = 30e-6
    """Delay of the next message by each message that a rank sends or receives, in Python, on a free processor."""
    processor_message_s: float = 62e-6
    """CPU time of all its threads for a message, as `sim.HostModel.assumed` has it; it matters under a CPU quota."""
    cores: float = math.inf
    """CPU seconds per second that the rank with the least of them may use."""
    encryption_s_per_byte: float = 0.0
    """CPU seconds of a rank for each byte that it sends to another node or receives from one; 0 in a plain run. See
    `ENCRYPTION_S_PER_BYTE`."""
    coding_bytes_per_s: float = 1.5e9
    """Rate at which a processor encodes or decodes float32 values, in bytes of these. In int8 with error feedback a
    byte takes 0.32 ns to encode and 0.09 ns to decode, and in whole runs on a busy machine up to 0.7 ns (measured)."""
    coding_message_s: float = 25e-6
    """Further processor time of each message that is encoded or decoded (measured)."""
    processors: float = 1.0
    """Processors that a rank has for coding; below 1 where ranks share those of a host."""
    local_piece_bytes: float = 8e6
    """Best piece size in a group on one node: large pieces wake few ranks, small ones need less shared memory."""


ENCRYPTION_S_PER_BYTE = 0.67e-9
"""**Measured** once, of TLS 1.3 with AES-GCM by OpenSSL 3.0 in records of 16 KiB: half of what a gigabyte sent and one
received cost more than plain ones (`bench/encrypted_lab.py cost`, docs/notebook/2026-11.md)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleDemand:
    """Needs of a schedule on the links and ranks of one group, per byte of message; its time follows from them."""

    num_rounds: int
    num_latencies: int
    """Waves that pass a link: how often a message waits for one from another node."""
    waves_s_per_byte: float
    """Time of all waves in sequence, each as long as its most loaded link needs."""
    busiest_s_per_byte: float
    """Time of the most loaded link for all its traffic: a lower limit for any number of segments."""
    busiest: str
    """Name of that link, or of the rank whose copies inside its node take longer."""
    num_messages: int
    """Messages that the busiest rank sends and receives, if the message is one segment."""
    num_segment_messages: int
    """The same for each of several segments: more where a transfer of several chunks is then several messages."""
    num_receives: int
    """Largest number of messages that a rank receives for each of several segments."""
    streams_meet: bool
    """Some rank receives from more than one other rank."""
    largest_piece: float
    """Largest message of one of several segments, times their number, as a fraction of the whole."""
    message_s: float
    """Delay of the next message by each message."""
    processor_message_s: float
    """Processor time of all threads of a rank for each message."""
    local_piece_bytes: float
    """Best size of a piece inside a node."""
    latency_s: float
    """Alpha."""
    coding_s_per_byte: float = 0.0
    """Time of the rank that codes most, for coding alone; 0 in an exact schedule."""

    def segments_in_flight(self, num_segments: int, lag: int) -> int:
        """Return the number of segments that are in different rounds at the same time."""
        return 1 if lag == 0 else min(num_segments, max(1, math.ceil(self.num_rounds / lag)))

    def processor_s(self, num_segments: int) -> float:
        """Return the predicted processor seconds of the busiest rank for all its messages."""
        num_messages = self.num_messages if num_segments == 1 else self.num_segment_messages
        return num_segments * num_messages * self.processor_message_s

    def predicted_s(self, num_bytes: int, *, num_segments: int = 1, lag: int = 0) -> float:
        """Return the predicted seconds of one run.

        The first segment passes all waves, one after the other. Each further segment adds the longest of: its time on
        the most loaded link; its time through all waves divided by the segments in flight; its messages' CPU time:

        T = L alpha + W S/K + p + (K-1) max(B S/K, W S/(K F), p),  p = m o + C S/K

        with S bytes in K segments, L, W and B as in this class, m messages of o seconds each, F segments in flight, and
        C the time to encode and decode a byte, 0 in an exact schedule.

        It ignores that messages of one wave start together and share links unfairly; adding what arrives from other
        nodes (done while the next piece is on the wire); other traffic; stragglers; cores that ranks share.

        Source: the pipelined form of Hockney's alpha-beta model, as in Thakur, Rabenseifner and Gropp, "Optimization
        of collective communication operations in MPICH" (2005); the terms for waves and flight are our own.
        """
        bytes_per_segment = num_bytes / num_segments
        waves_s = self.waves_s_per_byte * bytes_per_segment
        num_messages = self.num_messages if num_segments == 1 else self.num_segment_messages
        messages_s = num_messages * self.message_s + self.coding_s_per_byte * bytes_per_segment
        in_flight = self.segments_in_flight(num_segments, lag)
        next_s = max(self.busiest_s_per_byte * bytes_per_segment, waves_s / in_flight, messages_s)
        return self.num_latencies * self.latency_s + waves_s + messages_s + (num_segments - 1) * next_s


def schedule_demand(
    schedule: Schedule, net: GroupNetwork, vertex_of_rank: Ints, assumptions: Assumptions | None = None
) -> ScheduleDemand:
    """Return the needs of a schedule on a network.

    Args:
        schedule: Any schedule.
        net: The network between the ranks' nodes.
        vertex_of_rank: The vertex of each rank's node (`vertices_of_ranks`).
        assumptions: None is the default ones.

    Raises:
        PlacementError: Not one vertex per rank.

    Cost:
        One pass over the rounds.
    """
    assumed = assumptions or Assumptions()
    loads = ScheduleLoads(schedule, net, vertex_of_rank)
    total = WaveLoad(*np.zeros((2, len(net))), *np.zeros((2, schedule.num_ranks)))
    waves_s, num_latencies = 0.0, 0
    last, last_s = None, 0.0
    for load in loads.wave_loads():
        if load is not last:
            last, last_s = load, _busiest_part(load, net, assumed)[0]
        waves_s += last_s
        num_latencies += bool(load.up.any())
        inside, coded = total.inside + load.inside, total.coded + load.coded
        total = WaveLoad(total.up + load.up, total.down + load.down, inside, coded)
    busiest_s, busiest = _busiest_part(total, net, assumed)
    coded_s = assumed.processor_message_s + assumed.coding_message_s if schedule.encoding else 0.0
    return ScheduleDemand(
        num_rounds=len(schedule.rounds),
        num_latencies=num_latencies,
        waves_s_per_byte=waves_s / loads.num_units,
        busiest_s_per_byte=busiest_s / loads.num_units,
        busiest=busiest,
        num_messages=int((loads.num_sends + loads.num_receives).max()),
        num_segment_messages=int((loads.num_chunk_sends + loads.num_chunk_receives).max()),
        num_receives=int(loads.num_chunk_receives.max()),
        streams_meet=loads.streams_meet,
        largest_piece=loads.largest_chunk_units / loads.num_units,
        message_s=max(assumed.message_s, assumed.processor_message_s / assumed.cores, coded_s / assumed.processors),
        processor_message_s=max(assumed.processor_message_s, coded_s / assumed.processors),
        local_piece_bytes=assumed.local_piece_bytes,
        latency_s=net.latency_s,
        coding_s_per_byte=float(total.coded.max()) / loads.num_units / assumed.coding_bytes_per_s / assumed.processors,
    )


def predict(  # noqa: PLR0913 - schedule, network, options
    schedule: Schedule,
    cluster: Cluster,
    node_of_rank: Sequence[str],
    num_bytes: int,
    *,
    num_segments: int = 1,
    lag: int = 0,
    rates: Mapping[str, float] | None = None,
    assumptions: Assumptions | None = None,
) -> float:
    """Return the predicted seconds of a schedule; `ScheduleDemand.predicted_s` has the formula and its limits.

    Args:
        schedule: Any schedule.
        cluster: Cluster that runs it.
        node_of_rank: Name of the node of each rank.
        num_bytes: Size of the message.
        num_segments: Segments that run the schedule independently.
        lag: Rounds by which a segment trails the one before it; 0 ends a round for all before the next.
        rates: Measured bytes per second by directed link name.
        assumptions: Values that the cluster file does not contain.

    Raises:
        PlacementError: Not one node per rank.
        ClusterError: A node or a link is not in the cluster, or a rate is not positive.
    """
    net = group_network(cluster, node_of_rank, rates)
    needed = schedule_demand(schedule, net, vertices_of_ranks(net, node_of_rank), assumptions)
    return needed.predicted_s(num_bytes, num_segments=num_segments, lag=lag)


def _busiest_part(load: WaveLoad, net: GroupNetwork, assumed: Assumptions) -> tuple[float, str]:
    """Return the seconds of the slowest link or rank, and its name."""
    up, down = load.up / net.up_bytes_per_s, load.down / net.down_bytes_per_s
    inside = load.inside / assumed.memory_bytes_per_s
    sealed = (load.up + load.down) * net.is_node * assumed.encryption_s_per_byte
    leaving, entering, rank, node = (int(each.argmax()) for each in (up, down, inside, sealed))
    longest = max(float(up[leaving]), float(down[entering]), float(inside[rank]), float(sealed[node]))
    if assumed.encryption_s_per_byte and sealed[node] >= longest:
        return longest, f"encryption of node {net.names[node]}"
    if inside[rank] >= longest:
        return longest, f"memory of rank {rank}"
    return longest, net.up_name(leaving) if up[leaving] >= longest else net.down_name(entering)


_NOTHING_GAINED = 1e-12


@dataclass(frozen=True, slots=True)
class LinkTree:
    """A network as plain lists, for loops over vertices; parents come before children, the root is vertex 0."""

    parents: Sequence[int]
    up: Sequence[float]
    """Rate of the link to the parent."""
    down: Sequence[float]
    """Rate of the link from the parent."""
    is_node: Sequence[bool]

    def with_links_reversed(self) -> "LinkTree":
        """Return the tree with the directions of all links swapped."""
        return LinkTree(self.parents, self.down, self.up, self.is_node)


@dataclass(frozen=True, slots=True)
class SwitchRegion:
    """A connected set of switches, and the parts that remain of the nodes without it."""

    top: int
    """Its switch next to the root; unless that is the root, everything outside its subtree is a part."""
    tops_of_parts: tuple[int, ...]
    """The subtrees of these vertices are the other parts."""
    into_bytes_per_s: float
    """Sum of the rates of the links from the parts into the region."""

    @property
    def num_parts(self) -> int:
        return len(self.tops_of_parts) + (self.top != 0)

    @property
    def ratio(self) -> float:
        """Seconds per byte of an allreduce."""
        return 2 * (self.num_parts - 1) / self.into_bytes_per_s


def worst_region(tree: LinkTree) -> SwitchRegion:
    """Return the region with the largest ratio; the tree has at least two nodes.

    Cost:
        A few passes over the vertices.
    """
    best = _region_below(tree, 0, tree.is_node)
    while True:
        better = _largest_gain(tree, best.ratio)
        if better.ratio <= best.ratio * (1 + _NOTHING_GAINED):
            return best
        best = better


def _largest_gain(tree: LinkTree, ratio: float) -> SwitchRegion:
    """Return the region with the largest 2 (parts - 1) - ratio x (rate into it)."""
    gains = [0.0] * len(tree.parents)  # of the best region with this top, without the part above
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
    return _region_below(tree, top, is_part)


def _region_below(tree: LinkTree, top: int, is_part: Sequence[bool]) -> SwitchRegion:
    """Return the region below `top` that reaches down to the vertices that are parts."""
    inside, tops, into = [False] * len(tree.parents), [], 0.0
    inside[top] = True
    for vertex in range(top + 1, len(tree.parents)):
        if inside[tree.parents[vertex]]:
            inside[vertex] = not is_part[vertex]
            if is_part[vertex]:
                tops.append(vertex)
                into += tree.up[vertex]
    return SwitchRegion(top, tuple(tops), into + (tree.down[top] if top else 0.0))


_CLEARLY_LARGER = 1 + 1e-9
_MAX_NAMED_NODES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """A lower bound with its reason."""

    seconds: float
    """No such collective of the message is faster, with any schedule."""
    binding: str
    """Description of the binding cut or partition."""
    links: tuple[str, ...]
    """Names of the links of the cut, or of those that lead out of (or into) the parts of the partition."""


def bound(
    cluster: Cluster,
    num_bytes: int,
    *,
    nodes: Sequence[str] | None = None,
    rates: Mapping[str, float] | None = None,
    kind: CollectiveKind = "allreduce",
    root: int = 0,
) -> Bound:
    """Return the minimum time of a collective among nodes of a cluster, at the rates of its links.

    Of an allreduce: S max(max over cuts A of 1/B+(A), max over partitions P of 2 (|P|-1) / (B+(g) added up over the
    parts g)), where B+ is the smallest cut out of a set of nodes; and the same with B-, the smallest cut into it, which
    differs only where the rates of the two directions differ (an allreduce run backwards is an allreduce).

    Of an allgather of equal blocks: S max(max over links l of (fraction owned at the sending side of l)/B(l), max over
    P of (|P|-1) / (B+(g) added up)). A reduce-scatter is an allgather run backwards. Of a broadcast: S max(1/B(l) over
    the links l that lead away from the root, max over P of (|P|-1) / (B+(g) added up)).

    It ignores latency, traffic inside a node, and that TCP delivers less than the rate of a link: pass measured rates
    for a fair comparison. It holds for networks that forward and do not reduce or copy.

    Args:
        cluster: Cluster with the nodes.
        num_bytes: Size of the message, S: of all blocks together.
        nodes: Name of the node of each rank; None is one rank on every node.
        rates: Measured bytes per second by directed link name (`a0->r0`), in place of the cluster's.
        kind: The collective: allreduce, reduce-scatter, allgather or broadcast.
        root: Rank that broadcasts.

    Raises:
        ClusterError: A node or a link is not in the cluster, or a rate is not positive.

    Cost:
        10,000 nodes take a few tenths of a second.

    Source:
        For equal links Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations"
        (2009). In general: a set of nodes has to let out its sum and let in the others' (S each), and among |P| parts
        each byte takes |P|-1 messages to be summed and |P|-1 to be spread.
    """
    net = group_network(cluster, nodes, rates)
    ranks = nodes if nodes is not None else [node.name for node in cluster.nodes]
    return network_bound(net, num_bytes, kind, vertices_of_ranks(net, ranks), root)


def network_bound(
    net: GroupNetwork,
    num_bytes: int,
    kind: CollectiveKind = "allreduce",
    vertex_of_rank: Ints | None = None,
    root: int = 0,
) -> Bound:
    """Return the bound of an existing network; `vertex_of_rank` is needed for all collectives but allreduce."""
    if len(net) == 1:
        text = f"none: all ranks are on node {net.names[0]}, so that no link is passed"
        return Bound(seconds=0.0, binding=text, links=())
    needs = _link_needs(net, kind, vertex_of_rank, root)
    largest = _slowest_cut(net, needs)
    for found in _partition_bounds(net, needs):
        if found.s_per_byte > largest.s_per_byte * _CLEARLY_LARGER:
            largest = found
    return Bound(seconds=num_bytes * largest.s_per_byte, binding=largest.text, links=largest.links)


@dataclass(frozen=True, slots=True, eq=False)
class _LinkNeeds:
    """Fractions of the message that a collective moves at least."""

    leaving: Floats
    """For each vertex, out of its subtree."""
    entering: Floats
    """For each vertex, into its subtree."""
    leaving_text: str
    entering_text: str
    num_copies: int
    """Messages out of the parts of a partition, per part but one."""
    ways: tuple[str, ...]
    """Directions in which a partition may bind more than its cuts: `leave`, `enter`."""


def _link_needs(net: GroupNetwork, kind: CollectiveKind, vertex_of_rank: Ints | None, root: int) -> _LinkNeeds:
    whole = np.ones(len(net))
    differ = not np.array_equal(net.up_bytes_per_s, net.down_bytes_per_s)
    if kind == "allreduce":
        return _LinkNeeds(whole, whole, "all", "all", 2, ("leave", "enter") if differ else ("leave",))
    assert vertex_of_rank is not None, "it depends on the number of ranks of each node"
    if kind == "broadcast":
        inside = net.sums_below(np.bincount(vertex_of_rank[[root]], minlength=len(net)).astype(np.float64))
        text = "the message"
        return _LinkNeeds(inside, whole - inside, text, text, 1, ("leave",) if differ else ())
    owned = net.sums_below(np.bincount(vertex_of_rank, minlength=len(net)) / len(vertex_of_rank))
    if kind == "allgather":
        texts = "what they own", "what others own"
        return _LinkNeeds(owned, whole - owned, *texts, 1, ("leave",) if differ else ())
    assert kind == "reduce-scatter", f"{kind} has no bound"
    texts = "their sum of what others own", "the others' sum of what they own"
    return _LinkNeeds(whole - owned, owned, *texts, 1, ("enter",) if differ else ())


@dataclass(frozen=True, slots=True)
class _BoundCandidate:
    s_per_byte: float
    text: str
    links: tuple[str, ...]


def _slowest_cut(net: GroupNetwork, needs: _LinkNeeds) -> _BoundCandidate:
    """Return the slowest single link: on a tree it is the worst cut, as every link separates nodes of the group."""
    out, into = (needs.leaving / net.up_bytes_per_s)[1:], (needs.entering / net.down_bytes_per_s)[1:]
    vertex = 1 + int(np.maximum(out, into).argmax())
    leaves = out[vertex - 1] >= into[vertex - 1]
    link, rates = (net.up_name, net.up_bytes_per_s) if leaves else (net.down_name, net.down_bytes_per_s)
    part, what = (needs.leaving, needs.leaving_text) if leaves else (needs.entering, needs.entering_text)
    nodes, way, fraction = _node_list_text(net.nodes_below(vertex)), "leave" if leaves else "enter", float(part[vertex])
    passed = f"{link(vertex)} ({units.show_rate(float(rates[vertex]))})"
    if what == "all":
        text = f"cut: all that {way}s {nodes} passes {passed}"
    else:
        size = "" if fraction == 1 else f", {fraction:.4g} of the message,"
        text = f"cut: {what}{size} has to {way} {nodes} by {passed}"
    return _BoundCandidate(max(float(out[vertex - 1]), float(into[vertex - 1])), text, (link(vertex),))


def _partition_bounds(net: GroupNetwork, needs: _LinkNeeds) -> Iterator[_BoundCandidate]:
    tree = LinkTree(
        net.parents.tolist(), net.up_bytes_per_s.tolist(), net.down_bytes_per_s.tolist(), net.is_node.tolist()
    )
    for way in needs.ways:
        region = worst_region(tree if way == "leave" else tree.with_links_reversed())
        yield _describe_region(net, region, way, needs.num_copies)


def _describe_region(net: GroupNetwork, region: SwitchRegion, way: str, num_copies: int) -> _BoundCandidate:
    parts = [net.nodes_below(vertex) for vertex in region.tops_of_parts]
    away, towards = (net.up_name, net.down_name) if way == "leave" else (net.down_name, net.up_name)
    links = [away(vertex) for vertex in region.tops_of_parts]
    if region.top:
        below = set(net.nodes_below(region.top))
        parts.append(tuple(name for name in net.nodes_below(0) if name not in below))
        links.append(towards(region.top))
    count = region.num_parts
    shown = "; ".join(map(_node_list_text, parts[:_MAX_NAMED_NODES]))
    more = f"; and {count - _MAX_NAMED_NODES} more" if count > _MAX_NAMED_NODES else ""
    copies = num_copies * (count - 1)
    text = (
        f"partition into {count} parts ({shown}{more}): the message {copies} times has to {way} them, at "
        f"{units.show_rate(region.into_bytes_per_s)} together"
    )
    return _BoundCandidate(copies / region.into_bytes_per_s, text, tuple(links))


def _node_list_text(names: tuple[str, ...]) -> str:
    if len(names) <= _MAX_NAMED_NODES:
        return ", ".join(names)
    return f"{names[0]} .. {names[-1]} ({len(names)} nodes)"
