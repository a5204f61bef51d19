"""Batches that put one link to the test: offer it more than it ever carried, with room everywhere else."""

import random
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ringweave.topology.recovery import evidence as seen
from ringweave.topology.recovery.batches import Batch, Flow
from ringweave.topology.recovery.evidence import Cut, Evidence
from ringweave.topology.recovery.fitting import Fit
from ringweave.topology.recovery.through import room

FACTORS = (2.0, 4.0, float("inf"))
"""How many times what a NIC carried the other ends can take, in its first, second and last trial."""
_TOGETHER = 1
"""Trials of NICs up to this number run beside each other; later ones have the network for themselves."""
_NEGLIGIBLE = 0.06
"""Part of what a node can send that it need not: a flow for so little would take a full share of both its NICs."""
_HALF = 0.5


def edge_trial(found: Fit, cut: Cut, num_nodes: int) -> Batch:
    """All nodes inside send to all outside, each as much as it can: whatever the tree lets through, goes through."""
    senders, receivers = room(dict(zip(found.cuts, found.capacities.tolist(), strict=True)), cut, num_nodes)
    flows = spread(senders, receivers)
    return Batch(flows, f"{len(senders)} nodes to {len(receivers)} others")


def nic_trials(found: Fit, evidence: Evidence, cuts: Iterable[Cut], num_tried: Mapping[Cut, int]) -> tuple[Cut, ...]:
    """As many of these trials as can run beside each other: they share no node."""
    taken: set[int] = set()
    chosen: list[Cut] = []
    for cut in cuts:
        if chosen and _node(cut, evidence.num_nodes)[0] in taken:
            continue
        ends = {end for flow in nic_flows(found, evidence, cut, num_tried[cut]) for end in (flow.src, flow.dst)}
        if not chosen or (num_tried[cut] < _TOGETHER and taken.isdisjoint(ends)):
            chosen.append(cut)
            taken |= ends
            if num_tried[cut] >= _TOGETHER:
                break
    return tuple(chosen)


def nic_batch(found: Fit, evidence: Evidence, cuts: Iterable[Cut], num_tried: Mapping[Cut, int]) -> Batch:
    """The trials of these NICs beside each other."""
    flows = [nic_flows(found, evidence, cut, num_tried[cut]) for cut in cuts]
    return Batch(tuple(flow for each in flows for flow in each), f"{len(flows)} NICs")


def nic_flows(found: Fit, evidence: Evidence, cut: Cut, num_tried: int) -> tuple[Flow, ...]:
    """One node to or from several others, those first that it was fastest with."""
    num_nodes = evidence.num_nodes
    node, is_outward = _node(cut, num_nodes)
    best = evidence.best_rates()
    rates = best[node] if is_outward else best[:, node]
    others = [other for other in np.argsort(-rates, kind="stable").tolist() if other != node]
    wanted = FACTORS[min(num_tried, len(FACTORS) - 1)] * found.capacity(cut)
    chosen, room = [], 0.0
    for other in others:
        if room >= wanted and len(chosen) > 1:
            break
        chosen.append(other)
        room += float(found.capacities[other + (num_nodes if is_outward else 0)])
    return tuple(Flow(node, other) if is_outward else Flow(other, node) for other in chosen)


def _node(nic: Cut, num_nodes: int) -> tuple[int, bool]:
    """The node of a NIC, and whether the cut is outward."""
    is_outward = nic.bit_count() == 1
    return (nic if is_outward else seen.other_side(nic, num_nodes)).bit_length() - 1, is_outward


def again(flows: Sequence[Flow], doubtful: Flow, generator: random.Random) -> Batch:
    """A flow that nothing explains, with about half of those that it ran beside: which of them does it meet?"""
    others = [flow for flow in flows if flow != doubtful and generator.random() < _HALF]
    return Batch((doubtful, *others), "a slow flow again, beside fewer")


def spread(senders: Mapping[int, float], receivers: Mapping[int, float]) -> tuple[Flow, ...]:
    """Flows by which everybody sends and receives in proportion to what it can, large with large.

    Returns:
        Less than len(senders) + len(receivers) of them (the north-west corner rule).
    """
    wholes = dict(_shares(senders)), dict(_shares(receivers))
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


def _shares(rates: Mapping[int, float]) -> list[tuple[int, float]]:
    """By rate, the largest last; they add up to 1."""
    total = sum(rates.values())
    return sorted(((node, rate / total) for node, rate in rates.items()), key=lambda pair: (pair[1], -pair[0]))
