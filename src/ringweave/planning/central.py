"""Which node is connected best: where a process belongs that all others talk to."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ringweave import cost
from ringweave.topology import Cluster


@dataclass(frozen=True, kw_only=True, slots=True)
class Central:
    """A node, and why it."""

    node: str
    inflow_bytes_per_s: float
    """What all other nodes together can send to it, predicted; infinite if there are none."""


def best_connected(cluster: Cluster, rates: Mapping[str, float] | None = None) -> Central:
    """The node that all others together can send to and hear from at the highest rate; of equals the first.

    Args:
        cluster: The machines.
        rates: Measured bytes per second by directed link name, in place of the cluster's.

    Cost: O(nodes and switches).
    """
    if cluster.num_nodes == 1:
        return Central(node=cluster.nodes[0].name, inflow_bytes_per_s=float("inf"))
    net = cost.network(cluster, rates=rates)
    inwards = _inflow(net, net.up_bytes_per_s, net.down_bytes_per_s)
    outwards = _inflow(net, net.down_bytes_per_s, net.up_bytes_per_s)
    worst = np.minimum(inwards, outwards)
    order = {node.name: place for place, node in enumerate(cluster.nodes)}
    best = max(
        (vertex for vertex in range(len(net)) if net.is_node[vertex]),
        key=lambda vertex: (worst[vertex], -order[net.names[vertex]]),
    )
    return Central(node=net.names[best], inflow_bytes_per_s=float(worst[best]))


def _inflow(net: "cost.Network", up: np.ndarray, down: np.ndarray) -> np.ndarray:
    """For each vertex the rate at which the rest of the network can send to it: in a tree a maximum flow adds up.

    `rising` is what comes out of a vertex to the one above it, `falling` what can come down to it from there.
    """
    count = len(net)
    inside = np.where(net.is_node, np.inf, 0.0)  # a node sends as fast as its link takes it
    rising, falling = np.zeros(count), np.zeros(count)
    for vertex in range(count - 1, 0, -1):
        rising[vertex] = min(up[vertex], inside[vertex])
        inside[net.parents[vertex]] += rising[vertex]
    for vertex in range(1, count):
        parent = net.parents[vertex]
        beside = inside[parent] - rising[vertex] + (falling[parent] if parent else 0.0)
        falling[vertex] = min(down[vertex], beside)
    return falling
