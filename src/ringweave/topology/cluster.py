"""The machines as data: nodes with devices and NICs, and the tree of switches between them.

A cluster is checked when it is made, in code as from a file, so whoever holds one need not check again. The switches
form a tree whose root is called `core` and is never declared; nodes are its leaves. Links are full duplex: each edge of
the tree is two links, one for each direction, with the same rate.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ringweave import errors
from ringweave.errors import ClusterError
from ringweave.files.problems import closest, listed
from ringweave.topology import describing, rules, tree
from ringweave.topology.problems import refuse_any
from ringweave.topology.rules import CORE

DEFAULT_LATENCY_S = 50e-6
"""A message between two hosts of an ordinary Ethernet, through the kernel."""
ASSUMED_RATE_BYTES_PER_S = 1.25e9
"""10Gbit/s, where nobody knows a NIC's rate; whoever uses it says that it is assumed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Nic:
    """A network interface of a node."""

    name: str
    """Name of the interface, such as eth0."""
    rate_bytes_per_s: float
    """Rate of each direction."""
    numa: int | None = None
    """NUMA node that it hangs on; None means that it is not known."""
    rdma: bool = False
    """Can do RDMA."""
    nearest: tuple[int, ...] = ()
    """Indices of the node's devices, the one that should lead on this NIC first; empty leaves it to NUMA nodes."""

    def __post_init__(self) -> None:
        refuse_any(rules.nic_problems(self))


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """What one worker computes on."""

    kind: str = "cpu"
    """`cpu` or `cuda`."""
    speed: float = 1.0
    """Relative compute speed: a prior for planning, the CPU quota in the lab."""
    numa: int | None = None
    """NUMA node that it hangs on; None means that it is not known."""

    def __post_init__(self) -> None:
        refuse_any(rules.device_problems(self))


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One host with its devices."""

    name: str
    """Usable as a host name; unique in the cluster together with the names of switches."""
    devices: tuple[Device, ...]
    """LOCAL_RANK indexes them."""
    nics: tuple[Nic, ...]
    """What connects it to its switch."""
    switch: str | None = None
    """Name of the switch that it hangs on; None means the root."""
    address: str | None = None
    """Its IP address; None where it is assigned later (lab) or not known."""

    def __post_init__(self) -> None:
        refuse_any(rules.node_problems(self))

    @property
    def num_devices(self) -> int:
        """How many workers it takes."""
        return len(self.devices)

    @property
    def rate_bytes_per_s(self) -> float:
        """Rate of all its NICs together, each direction."""
        return sum(nic.rate_bytes_per_s for nic in self.nics)


@dataclass(frozen=True, kw_only=True, slots=True)
class Switch:
    """What connects nodes and other switches; inside, it forwards at any rate."""

    name: str
    """Unique in the cluster together with the names of nodes; never `core`."""
    uplink_bytes_per_s: float
    """Rate of each direction of the connection to its parent."""
    parent: str | None = None
    """Name of the switch above; None means the root."""

    def __post_init__(self) -> None:
        refuse_any(rules.switch_problems(self))


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A directed edge of the tree."""

    src: str
    """Name of the node or switch that sends."""
    dst: str
    """Name of the node or switch that receives."""
    latency_s: float
    """What the link adds to a message's latency; along any route these add up to the cluster's latency."""
    bandwidth_bytes_per_s: float
    """What it carries in this direction."""

    def __post_init__(self) -> None:
        refuse_any(rules.link_problems(self))

    @property
    def name(self) -> str:
        """`a0->r0`."""
        return link_name(self.src, self.dst)


class _Named(Protocol):
    @property
    def name(self) -> str: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """All machines and what connects them.

    Raises:
        ClusterError: A part refers to something that is not there, names clash, switches form a loop, a switch has no
            node below it, there is no node, or a limit of `rules` is passed.
    """

    name: str
    """At most 63 letters, digits, dots, hyphens and underscores."""
    nodes: tuple[Node, ...]
    """In the order in which ranks are counted."""
    switches: tuple[Switch, ...] = ()
    """All but the root; empty where all nodes hang on it."""
    latency_s: float = DEFAULT_LATENCY_S
    """Alpha: what an empty message takes from end to end, whatever the number of hops."""
    _nodes: dict[str, Node] = field(init=False, repr=False, compare=False)
    _parents: dict[str, str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        tree.check(self)
        parents = {node.name: node.switch or CORE for node in self.nodes}
        parents.update((switch.name, switch.parent or CORE) for switch in self.switches)
        object.__setattr__(self, "_nodes", {node.name: node for node in self.nodes})
        object.__setattr__(self, "_parents", parents)

    @property
    def num_nodes(self) -> int:
        """How many hosts there are."""
        return len(self.nodes)

    @property
    def num_devices(self) -> int:
        """How many workers the cluster takes: the world size of a run on all of it."""
        return sum(node.num_devices for node in self.nodes)

    def node(self, name: str) -> Node:
        """The node of that name.

        Raises:
            ClusterError: There is none; the text names those there are.
        """
        if name not in self._nodes:
            raise ClusterError(self._no_such("node", name, self.nodes))
        return self._nodes[name]

    def ancestors(self, name: str) -> tuple[str, ...]:
        """The switches above a node or a switch, nearest first, ending in `core`; empty for `core` itself.

        Raises:
            ClusterError: Nothing has that name.
        """
        above, at = [], name
        while at != CORE:
            if at not in self._parents:
                raise ClusterError(self._no_such("node or switch", name, [*self.nodes, *self.switches]))
            at = self._parents[at]
            above.append(at)
        return tuple(above)

    def links(self) -> tuple[Link, ...]:
        """Every edge in both directions: nodes in order, then switches in order, upwards before downwards.

        The NICs of a node count as one link of their summed rate, as if traffic were spread over them; who drives them
        one by one finds them on the node. Any route passes exactly two links of nodes, so each carries half of the
        cluster's latency and the links between switches none.

        Cost: one object for each direction of each node and switch.
        """
        nodes = [(node.name, node.rate_bytes_per_s, self.latency_s / 2) for node in self.nodes]
        switches = [(switch.name, switch.uplink_bytes_per_s, 0.0) for switch in self.switches]
        return tuple(
            Link(src=src, dst=dst, latency_s=latency_s, bandwidth_bytes_per_s=rate)
            for name, rate, latency_s in nodes + switches
            for src, dst in ((name, self._parents[name]), (self._parents[name], name))
        )

    def route(self, src_node: str, dst_node: str) -> tuple[str, ...]:
        """Names of the links from one node to another, in the order passed; empty from a node to itself.

        Raises:
            ClusterError: One of them is not a node of the cluster.
        """
        up = [self.node(src_node).name, *self.ancestors(src_node)]
        down = [self.node(dst_node).name, *self.ancestors(dst_node)]
        while len(up) > 1 and len(down) > 1 and up[-2] == down[-2]:
            up.pop()
            down.pop()
        if src_node == dst_node:
            return ()
        down.reverse()
        return (*map(link_name, up, up[1:]), *map(link_name, down, down[1:]))

    def describe(self) -> str:
        """The cluster on one screen: the tree of switches, with the nodes that are alike on one line."""
        return describing.describe(self)

    def _no_such(self, noun: str, name: str, parts: Sequence[_Named]) -> str:
        names = [part.name for part in parts]
        return errors.explain(
            f"{noun} of cluster {self.name}",
            got=name,
            expected=f"one of {listed(names, len(names))}",
            do=closest(name, names) or "Use a name of the cluster file",
        )


def link_name(src: str, dst: str) -> str:
    """`a0->r0`, the name of the link from one to the other."""
    return f"{src}->{dst}"


def one_machine(num_workers_per_node: Sequence[int]) -> Cluster:
    """The cluster that `ringweave run --workers 3,2` assumes: node0 with three CPU devices, node1 with two.

    The nodes are all this machine, so their traffic takes the loopback interface. Its rate is **assumed** to be
    10Gbit/s for each node; it was not measured.

    Raises:
        ClusterError: There is no node, or one has no worker or too many.
    """
    for index, num_workers in enumerate(num_workers_per_node):
        if not 1 <= num_workers <= rules.MAX_DEVICES:
            raise ClusterError(
                errors.explain(
                    f"workers of node{index}",
                    got=num_workers,
                    expected=f"1 to {rules.MAX_DEVICES} workers",
                    do="Give each node at least one worker, such as 3,2 for two nodes",
                )
            )
    nics = (Nic(name="lo", rate_bytes_per_s=ASSUMED_RATE_BYTES_PER_S),)
    nodes = [
        Node(name=f"node{index}", devices=(Device(),) * num_workers, nics=nics)
        for index, num_workers in enumerate(num_workers_per_node)
    ]
    return Cluster(name="one-machine", nodes=tuple(nodes))
