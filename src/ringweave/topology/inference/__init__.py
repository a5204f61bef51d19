"""Topology inference: the tree of switches and all rates, from the rates of flows between nodes. Pure: no sockets.

`infer_topology` decides what to measure, batch by batch; `cluster_from_fit` makes a cluster of the result;
`visible_edges` returns the edges of a known cluster that measurements can see.
"""

from ringweave.topology.inference.fit import TreeFit
from ringweave.topology.inference.infer import SurveyLimits, infer_topology
from ringweave.topology.inference.observations import Flow, FlowBatch, Observations, round_robin_pairs
from ringweave.topology.inference.tree import MeasuredLink, NodeSpec, cluster_from_fit

__all__ = [
    "Flow",
    "FlowBatch",
    "MeasuredLink",
    "NodeSpec",
    "Observations",
    "SurveyLimits",
    "TreeFit",
    "cluster_from_fit",
    "infer_topology",
    "round_robin_pairs",
]
