"""Surveys end, however many nodes there are and however hard they are to understand."""

import random
from collections.abc import Callable, Iterator
from itertools import count

import numpy as np
import pytest

from ringweave.topology import Cluster, loads
from ringweave.topology.inference.fit import (
    ComputeBudget,
    assess_edges,
    candidate_edges,
    fit_tree,
    score_edges,
    score_moves,
)
from ringweave.topology.inference.infer import SurveyLimits
from ringweave.topology.inference.observations import (
    Flow,
    FlowBatch,
    Observations,
    inside_matrix,
    nodes_inside,
    opposite_cut,
)
from ringweave.topology.inference.tree import NodeSpec, cluster_from_fit
from ringweave_bench.visible_edges import visible_edges
from tests.topology.recovery.simulated import Network, measure
from tests.topology.recovery.test_survey import FOUR_RACKS, MBIT, TWO_RACKS

AT_THE_START = SurveyLimits(num_rounds=8, num_trials=32)
"""What a job of many nodes does."""


def clock_of(tick_s: float = 1.0) -> Callable[[], float]:
    """A clock by which something takes so long each time that it is looked at."""
    ticks: Iterator[int] = count()
    return lambda: next(ticks) * tick_s


def many(num_nodes: int, more: str = "") -> Cluster:
    return loads(f"name: x\nnodes: [{{name: n, nic: 200Mbit/s, devices: 1, count: {num_nodes - 1}}}, {more}]")


@pytest.mark.slow
@pytest.mark.parametrize("num_nodes", [100, 400])
def test_many_nodes_are_known_by_their_nics_alone(num_nodes: int) -> None:
    truth = many(num_nodes, "{name: slow, nic: 50Mbit/s, devices: 1}")
    evidence, found_fit = measure(Network(truth, 0, 0.05), num_nodes, AT_THE_START)
    assert evidence.num_batches <= 8 * 2 + 8 + 32
    assert found_fit.not_searched == "switches were not looked for, as there are more than 64 nodes: all hang on one"
    hosts = [NodeSpec(name=node.name, address=None, num_devices=1) for node in truth.nodes]
    found, _ = cluster_from_fit("found", hosts, found_fit, 1e-5)
    assert found.switches == ()
    rates = [node.rate_bytes_per_s / MBIT for node in found.nodes]
    assert rates == pytest.approx([200] * (num_nodes - 1) + [50], rel=0.1)


@pytest.mark.slow
def test_among_less_many_nodes_racks_are_found_when_a_job_starts() -> None:
    racks = ", ".join(f"{{name: {x}, switch: {x}, nic: 200Mbit/s, devices: 1, count: 12}}" for x in "abc")
    uplinks = ", ".join(f"{{name: {x}, uplink: 800Mbit/s}}" for x in "abc")
    truth = loads(f"name: x\nnodes: [{racks}]\nswitches: [{uplinks}]")
    _, found = measure(Network(truth, 0, 0.05), 36, AT_THE_START)
    assert (set(found.edges[::2]), found.not_searched) == (visible_edges(truth).edges(36), None)


def test_who_has_no_time_to_think_knows_the_nics_and_says_so() -> None:
    truth = loads(TWO_RACKS)
    network = Network(truth)
    _, found = measure(network, 8, SurveyLimits(total_cpu_s=0.5), clock=clock_of())
    assert found.not_searched == "switches were not looked for to the end, as the time for it was up: there may be more"
    assert found.edges == ()
    assert len(network.batches) == 2 * 7 + 7, "pairs, and all at once, which need no thinking"
    assert [found.rate(1 << node) for node in range(8)] == pytest.approx([400 * MBIT] * 8)


@pytest.mark.parametrize(
    "effort", [SurveyLimits(total_cpu_s=300.0, decision_cpu_s=1e9), SurveyLimits(total_cpu_s=1e9, decision_cpu_s=30.0)]
)
def test_what_is_known_when_the_time_is_up_is_the_answer(effort: SurveyLimits) -> None:
    truth = loads(FOUR_RACKS)
    network = Network(truth, 0, 0.05)
    _, found = measure(network, 16, effort, seed=1, clock=clock_of())
    assert found.not_searched is not None
    assert 30 + 15 <= len(network.batches) < 80, "80 to the end"
    assert set(found.edges[::2]) <= visible_edges(truth).edges(16)
    assert all(found.num_proofs(cut) + found.num_proofs(opposite_cut(cut, 16)) >= 2 for cut in found.edges[::2])


def test_edges_that_were_known_do_where_there_is_no_time_to_look_for_them() -> None:
    evidence, whole = measure(Network(loads(TWO_RACKS)), 8)
    spent = ComputeBudget(0.0, 0.0, clock_of())
    assert fit_tree(evidence, spent).edges == ()
    assert fit_tree(evidence, spent, known=whole.edges[::2]).edges == whole.edges
    assert spent.was_cut_short


def test_time_is_given_for_each_decision_and_for_all() -> None:
    now = [0.0]
    thinking = ComputeBudget(step_s=2.0, total_s=5.0, clock=lambda: now[0])
    for now[0] in (2.0, 4.0):
        assert not thinking.is_spent
        thinking.begin_decision()
    now[0] = 5.5
    assert thinking.is_spent, "all of it is spent"
    thinking.begin_decision()
    assert thinking.is_spent, "and does not come back"
    other = ComputeBudget(step_s=2.0, total_s=50.0, clock=lambda: now[0])
    now[0] += 3.0
    assert other.is_spent


def observed(num_nodes: int, seed: int) -> Observations:
    """Anything at all."""
    draws, evidence = random.Random(seed), Observations(num_nodes)
    for _ in range(9):
        ends = [draws.sample(range(num_nodes), 2) for _ in range(draws.randint(1, 2 * num_nodes))]
        evidence.add(FlowBatch(tuple(Flow(*each) for each in ends), ""), [draws.uniform(1, 9) * MBIT for _ in ends])
    return evidence


@pytest.mark.parametrize("seed", range(8))
def test_the_score_of_a_set_with_one_node_moved_is_that_of_the_other_set(seed: int) -> None:
    evidence = observed(14, seed)
    unexplained = assess_edges(evidence, ()).unexplained
    inside = np.random.default_rng(seed).random(14) < 0.4
    now, moved = score_moves(evidence, unexplained, inside)
    assert now == pytest.approx(score_edges(evidence, unexplained, inside[None])[0])
    assert moved == pytest.approx(score_edges(evidence, unexplained, inside ^ np.eye(14, dtype=bool)))
    assert moved.max() > 0


def test_sets_are_scored_in_parts_where_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    evidence = observed(14, 0)
    unexplained, inside = assess_edges(evidence, ()).unexplained, np.random.default_rng(0).random((50, 14)) < 0.5
    whole = score_edges(evidence, unexplained, inside)
    monkeypatch.setattr("ringweave.topology.inference.fit._MAX_CELLS", 7 * len(evidence.src))
    assert score_edges(evidence, unexplained, inside).tolist() == whole.tolist()
    assert len(score_edges(evidence, unexplained, inside[:0])) == 0


def test_where_there_is_no_time_sets_are_taken_as_they_are() -> None:
    evidence = observed(14, 3)
    unexplained = assess_edges(evidence, ()).unexplained
    patient = set(candidate_edges(evidence, unexplained, ComputeBudget(1e9, 1e9)))
    hasty = set(candidate_edges(evidence, unexplained, ComputeBudget(0.0, 0.0, clock_of())))
    assert hasty
    assert hasty != patient


@pytest.mark.parametrize("num_nodes", [1, 7, 8, 9, 64, 100])
def test_rows_are_the_bits_of_cuts(num_nodes: int) -> None:
    cuts = [random.Random(num_nodes).getrandbits(num_nodes), 0, (1 << num_nodes) - 1]
    assert inside_matrix(cuts, num_nodes).tolist() == [[bool(cut >> n & 1) for n in range(num_nodes)] for cut in cuts]
    assert nodes_inside(cuts[0], num_nodes) == [n for n in range(num_nodes) if cuts[0] >> n & 1]
    assert inside_matrix([], num_nodes).shape == (0, num_nodes)
