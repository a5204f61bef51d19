"""Who meets whom."""

from itertools import combinations, permutations

import pytest

from ringweave.topology.inference.observations import Flow, all_nodes_batch, pair_batches, round_robin_pairs


@pytest.mark.parametrize("num_nodes", range(2, 12))
def test_everybody_meets_everybody_once(num_nodes: int) -> None:
    rounds = list(round_robin_pairs(num_nodes))
    assert len(rounds) == num_nodes - 1 + num_nodes % 2
    assert sorted(tuple(sorted(pair)) for pairs in rounds for pair in pairs) == list(combinations(range(num_nodes), 2))
    assert all(len({node for pair in pairs for node in pair}) == 2 * len(pairs) for pairs in rounds)


@pytest.mark.parametrize("num_nodes", range(2, 9))
def test_every_pair_is_measured_in_both_directions_and_nobody_sends_and_receives(num_nodes: int) -> None:
    batches = list(pair_batches(num_nodes))
    assert sorted((f.src, f.dst) for batch in batches for f in batch.flows) == list(permutations(range(num_nodes), 2))
    for batch in batches:
        assert {flow.src for flow in batch.flows}.isdisjoint(flow.dst for flow in batch.flows)


def test_in_a_crowd_everybody_sends_and_receives() -> None:
    assert all_nodes_batch([2, 0, 1], 1).flows == (Flow(2, 0), Flow(0, 1), Flow(1, 2))
