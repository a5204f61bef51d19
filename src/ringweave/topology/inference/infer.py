"""Topology inference loop: receives measured rates and asks for batches until the tree is known.

Pairs come first: each pair in both directions, as a round robin. Then all nodes send at once, so that shared links fill
up. Then, as long as there is something to learn: a fit (`fit`), and an experiment (`experiments`) on a link that the
fit rests on. An edge between switches that does not hold back what is sent through it on purpose is refuted; so nothing
is invented from chance. Unexplained flows are measured again, beside fewer others. In the end all nodes send at random,
and the result has to be explained as well.
"""

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ringweave.topology.inference import observations, tree
from ringweave.topology.inference.fit import (
    CLEARLY_NOT_FULL,
    ComputeBudget,
    TreeFit,
    assess_edges,
    fit_tree,
    rival_edges,
)
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


_MIN_PROOFS = 2
_MIN_PRESSURE = 1.12
_SUFFICIENT_PROOFS = 3
_NUM_FINAL_CHECKS = 2
MAX_NODES_SEARCHED = 64
"""Above this number of nodes only NICs are tested, not switches and uplinks: a job that starts has too few batches to
find shared uplinks, and a switch that does not exist is worse than none."""
_NUM_EDGE_TRIALS = 3
"""A link never carries more than its rate, but flows that busy machines held back once get through another time."""
_NUM_REPEATS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class SurveyLimits:
    """Limits on the number of measurements and on CPU time."""

    num_rounds: int | None = None
    """Rounds of pairs, for latencies and for rates, and of all nodes at once; None: all rounds, so that every pair is
    measured in both directions."""
    num_trials: int | None = None
    """Batches after these; None: six for each node."""
    decision_cpu_s: float = 5.0
    """Seconds of CPU time for one decision: all other ranks wait meanwhile."""
    total_cpu_s: float = 120.0
    """Seconds of CPU time for all decisions; after them the current tree is the result."""

    def limit_rounds(self, max_rounds: int) -> int:
        """Return the number of rounds to run, at most `max_rounds`."""
        return max_rounds if self.num_rounds is None else min(self.num_rounds, max_rounds)


def infer_topology(
    num_nodes: int,
    generator: random.Random,
    limits: SurveyLimits | None = None,
    clock: Callable[[], float] = time.thread_time,
) -> Generator[FlowBatch, Sequence[float], tuple[Observations, TreeFit]]:
    """Yield batches, receive the rate of each flow in bytes per second, and return the observations and their fit.

    Args:
        num_nodes: At least 2.
        generator: Draws the receiver of each node when all nodes send.
        limits: Limits on measurements and CPU time; None measures all pairs.
        clock: Returns seconds of CPU time of this thread.

    Cost:
        For N nodes 2(N-1) batches of pairs (two more where N is odd), N-1 of all nodes, about N for the NICs, and six
        for each switch. Among more than `MAX_NODES_SEARCHED` nodes no switches are looked for.
    """
    limits = limits or SurveyLimits()
    observed, budget = Observations(num_nodes), ComputeBudget(limits.decision_cpu_s, limits.total_cpu_s, clock)
    for batch in itertools.islice(observations.pair_batches(num_nodes), 2 * limits.limit_rounds(num_nodes)):
        observed.add(batch, (yield batch))
    if num_nodes > 3:
        for shift in range(1, 1 + limits.limit_rounds(num_nodes - 1)):
            batch = observations.all_nodes_batch(_shuffled_nodes(num_nodes, generator), shift)
            observed.add(batch, (yield batch))
    known: tuple[Cut, ...] = ()
    if num_nodes > 2:
        num_trials = 6 * num_nodes if limits.num_trials is None else limits.num_trials
        known = yield from _run_trials(observed, generator, num_trials, budget)
    if num_nodes > MAX_NODES_SEARCHED:
        found = assess_edges(observed, ())
    else:
        budget.begin_decision()
        found = _fit_without_refuted(observed, lambda edge: True, budget, known)
    return observed, replace(found, not_searched=_not_searched_text(num_nodes, budget))


def _not_searched_text(num_nodes: int, budget: ComputeBudget) -> str | None:
    """Return a sentence on unsearched parts; None if the search was complete."""
    if num_nodes > MAX_NODES_SEARCHED:
        return f"switches were not looked for, as there are more than {MAX_NODES_SEARCHED} nodes: all hang on one"
    if budget.was_cut_short:
        return "switches were not looked for to the end, as the time for it was up: there may be more"
    return None


def _run_trials(
    observed: Observations, generator: random.Random, num_trials: int, budget: ComputeBudget
) -> Generator[FlowBatch, Sequence[float], tuple[Cut, ...]]:
    """Run experiments until nothing is left to learn, or the budget is spent; return the edges known by then."""
    num_nodes = observed.num_nodes
    searches_switches = num_nodes <= MAX_NODES_SEARCHED
    tried: Counter[Cut] = Counter()
    repeated: Counter[int] = Counter()
    num_checks = num_rivals = 0
    found = assess_edges(observed, ())
    for _ in range(num_trials):
        found = _next_fit(observed, found, tried, budget)
        if budget.is_spent:
            break
        edges = [cut for cut in found.edges if not tried[cut]]
        trusted = [cut for cut in found.edges if tried[cut] < _NUM_EDGE_TRIALS]
        doubtful = [cut for cut in found.nics if _needs_trial(found, cut, tried[cut])]
        slow = _least_explained_flow(observed, found, repeated) if searches_switches else None
        unfilled = _untested_rack(observed, found, tried) if searches_switches else ()
        if edges:
            chosen: tuple[Cut, ...] = (edges[0],)
            batch = edge_trial_batch(found, edges[0], num_nodes)
        elif doubtful:
            chosen = choose_nic_trials(found, observed, doubtful, tried)
            batch = nic_trial_batch(found, observed, chosen, tried)
        elif num_rivals < num_nodes and (new := _first_untried(rival_edges(observed, found, budget), tried, num_nodes)):
            num_rivals += 1
            chosen, batch = new, edge_trial_batch(found, new[0], num_nodes)
        elif unfilled:
            chosen, batch = unfilled, edge_trial_batch(found, unfilled[0], num_nodes)
        elif slow is not None and num_nodes > 3 and repeated.total() < num_nodes:
            number = int(observed.batch[slow])
            repeated[number] += 1
            chosen, batch = (), repeat_flow_batch(observed.flows_of(number), observed.flow(slow), generator)
        elif num_nodes > 3 and num_checks < _NUM_FINAL_CHECKS:
            num_checks += 1
            chosen, batch = (), observations.all_nodes_batch(_shuffled_nodes(num_nodes, generator), 1)
        elif trusted:
            chosen, batch = (trusted[0],), edge_trial_batch(found, trusted[0], num_nodes)
        else:
            break
        tried.update(chosen)
        observed.add(batch, (yield batch))
    return found.edges[::2]


def _next_fit(observed: Observations, found: TreeFit, tried: Counter[Cut], budget: ComputeBudget) -> TreeFit:
    """Return the fit before the next experiment."""
    budget.begin_decision()
    if observed.num_nodes > MAX_NODES_SEARCHED:
        return assess_edges(observed, ())

    def had_its_trial(edge: Cut) -> bool:
        return bool(tried[edge] and tried[observations.opposite_cut(edge, observed.num_nodes)])

    return _fit_without_refuted(observed, had_its_trial, budget, found.edges[::2])


def _first_untried(edges: Sequence[Cut], tried: Counter[Cut], num_nodes: int) -> tuple[Cut, ...]:
    """Return the first untested direction of these edges; empty if all were tested."""
    both = [cut for edge in edges for cut in (edge, observations.opposite_cut(edge, num_nodes))]
    return tuple(cut for cut in both if not tried[cut])[:1]


def _untested_rack(observed: Observations, found: TreeFit, tried: Counter[Cut]) -> tuple[Cut, ...]:
    """Return the first direction of a possible rack whose uplink no batch has filled yet; empty if there is none.

    Other batches fill an uplink of many nodes only by chance, because that takes nearly all of them at once. Nodes of
    one switch that has other neighbours may be such a rack, or those of them with equal NICs.
    """
    num_nodes = found.num_nodes
    both = [cut for rack in tree.possible_racks(found) for cut in (rack, observations.opposite_cut(rack, num_nodes))]
    fresh = [cut for cut in both if not tried[cut]]
    carried = (
        observations.observed_capacities(observed.loads(observed.crossed(observations.inside_matrix(fresh, num_nodes))))
        if fresh
        else ()
    )
    for cut, most in zip(fresh, carried, strict=True):
        if _offered_rate(found, cut) > _MIN_PRESSURE * most:
            return (cut,)
    return ()


def _needs_trial(found: TreeFit, cut: Cut, num_tried: int) -> bool:
    """Return whether a NIC needs an experiment: it was seldom the bottleneck, or never in spite of an experiment."""
    return num_tried < len(TRIAL_FACTORS) and found.num_proofs(cut) < (1 if num_tried else _SUFFICIENT_PROOFS)


def _least_explained_flow(observed: Observations, found: TreeFit, repeated: Counter[int]) -> int | None:
    """Return the least explained flow, of a batch that was not repeated often enough; None if all is explained."""
    fresh = np.array([repeated[int(number)] < _NUM_REPEATS for number in observed.batch])
    missing = np.where(fresh, found.unexplained, 0.0)
    return int(missing.argmax()) if missing.max() > CLEARLY_NOT_FULL else None


def _fit_without_refuted(
    observed: Observations, had_its_trial: Callable[[Cut], object], budget: ComputeBudget, known: Sequence[Cut]
) -> TreeFit:
    """Return the fit without edges that were tested and have too few proofs.

    Once the budget of this decision is spent, its edges are those found by then, or the known ones.
    """
    refuted: set[Cut] = set()
    while True:
        found = fit_tree(observed, budget, refuted, [cut for cut in known if cut not in refuted])
        known = found.edges[::2]
        failed = {
            out
            for out, back in zip(known, found.edges[1::2], strict=True)
            if (had_its_trial(out) and found.num_proofs(out) + found.num_proofs(back) < _MIN_PROOFS)
            or min(_pressure(found, out), _pressure(found, back)) < _MIN_PRESSURE
        }
        if not failed:
            return found
        refuted |= failed


def _pressure(found: TreeFit, cut: Cut) -> float:
    """Return the rate that the links on the sides of a cut would let through, divided by the rate of the cut.

    A cut that carries about as much as they do, in one direction at least, is no link of its own, only their sum: a
    cable has one rate for both directions, so a lower rate in one of them is chance.
    """
    return _offered_rate(found, cut) / found.capacity(cut)


def _offered_rate(found: TreeFit, cut: Cut) -> float:
    """Return the bytes per second that the links on the sides of a cut would let through."""
    rates = dict(zip(found.cuts, found.capacities.tolist(), strict=True))
    return min(sum(side.values()) for side in rates_across_cut(rates, cut, found.num_nodes))


def _shuffled_nodes(num_nodes: int, generator: random.Random) -> list[int]:
    order = list(range(num_nodes))
    generator.shuffle(order)
    return order
