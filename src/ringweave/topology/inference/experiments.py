"""Experiments on one link: batches that offer it more than it ever carried, with room everywhere else."""

import random
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ringweave.topology.inference import observations
from ringweave.topology.inference.fit import TreeFit
from ringweave.topology.inference.observations import Cut, Flow, FlowBatch, Observations, rates_across_cut

TRIAL_FACTORS = (2.0, 4.0, float("inf"))
"""Capacity of the other ends as a multiple of a NIC's largest load, in its first, second and last experiment."""
_MAX_PARALLEL_TRIALS = 1
"""NIC experiments up to this number run in parallel; later ones have the network for themselves."""
_NEGLIGIBLE = 0.06
"""Part of a node's rate that may stay unused: a flow for so little would take a full share of both its NICs."""
_HALF = 0.5


def edge_trial_batch(found: TreeFit, cut: Cut, num_nodes: int) -> FlowBatch:
    """Return a batch in which all nodes inside send to all outside at full rate, so that the edge is the only limit."""
    senders, receivers = rates_across_cut(dict(zip(found.cuts, found.capacities.tolist(), strict=True)), cut, num_nodes)
    flows = proportional_flows(senders, receivers)
    return FlowBatch(flows, f"{len(senders)} nodes to {len(receivers)} others")


def choose_nic_trials(
    found: TreeFit, observed: Observations, cuts: Iterable[Cut], num_tried: Mapping[Cut, int]
) -> tuple[Cut, ...]:
    """Return as many of these experiments as can run in parallel: they share no node."""
    taken: set[int] = set()
    chosen: list[Cut] = []
    for cut in cuts:
        if chosen and _node_of_nic(cut, observed.num_nodes)[0] in taken:
            continue
        ends = {end for flow in nic_trial_flows(found, observed, cut, num_tried[cut]) for end in (flow.src, flow.dst)}
        if not chosen or (num_tried[cut] < _MAX_PARALLEL_TRIALS and taken.isdisjoint(ends)):
            chosen.append(cut)
            taken |= ends
            if num_tried[cut] >= _MAX_PARALLEL_TRIALS:
                break
    return tuple(chosen)


def nic_trial_batch(
    found: TreeFit, observed: Observations, cuts: Iterable[Cut], num_tried: Mapping[Cut, int]
) -> FlowBatch:
    """Return the batch of these NIC experiments in parallel."""
    flows = [nic_trial_flows(found, observed, cut, num_tried[cut]) for cut in cuts]
    return FlowBatch(tuple(flow for each in flows for flow in each), f"{len(flows)} NICs")


def nic_trial_flows(found: TreeFit, observed: Observations, cut: Cut, num_tried: int) -> tuple[Flow, ...]:
    """Return flows from one node to several others, or from them; its fastest partners first."""
    num_nodes = observed.num_nodes
    node, is_outward = _node_of_nic(cut, num_nodes)
    best = observed.best_rates()
    rates = best[node] if is_outward else best[:, node]
    others = [other for other in np.argsort(-rates, kind="stable").tolist() if other != node]
    wanted = TRIAL_FACTORS[min(num_tried, len(TRIAL_FACTORS) - 1)] * found.capacity(cut)
    chosen, offered = [], 0.0
    for other in others:
        if offered >= wanted and len(chosen) > 1:
            break
        chosen.append(other)
        offered += float(found.capacities[other + (num_nodes if is_outward else 0)])
    return tuple(Flow(node, other) if is_outward else Flow(other, node) for other in chosen)


def _node_of_nic(nic: Cut, num_nodes: int) -> tuple[int, bool]:
    """Return the node of a NIC, and whether the cut is outward."""
    is_outward = nic.bit_count() == 1
    return (nic if is_outward else observations.opposite_cut(nic, num_nodes)).bit_length() - 1, is_outward


def repeat_flow_batch(flows: Sequence[Flow], doubtful: Flow, generator: random.Random) -> FlowBatch:
    """Return a batch with an unexplained flow and about half of the others, to find the one that shares its edge."""
    others = [flow for flow in flows if flow != doubtful and generator.random() < _HALF]
    return FlowBatch((doubtful, *others), "a slow flow again, beside fewer")


def proportional_flows(senders: Mapping[int, float], receivers: Mapping[int, float]) -> tuple[Flow, ...]:
    """Return flows by which all nodes send and receive in proportion to their rates, large with large.

    Returns:
        Fewer than len(senders) + len(receivers) flows (the north-west corner rule).
    """
    wholes = dict(_sorted_shares(senders)), dict(_sorted_shares(receivers))
    left = [list(whole.items()) for whole in wholes]
    flows = []
    while left[0] and left[1]:
        ends = left[0].pop(), left[1].pop()
        flows.append(Flow(ends[0][0], ends[1][0]))
        moved = min(share for _, share in ends)
        for side, whole, (node, share) in zip(left, wholes, ends, strict=True):
            if share - moved > _NEGLIGIBLE * whole[node]:
                side.append((node, share - moved))
    return tuple(flows)


def _sorted_shares(rates: Mapping[int, float]) -> list[tuple[int, float]]:
    """Return the fraction of each node, smallest first; they add up to 1."""
    total = sum(rates.values())
    return sorted(((node, rate / total) for node, rate in rates.items()), key=lambda pair: (pair[1], -pair[0]))
