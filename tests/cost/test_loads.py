from collections import Counter
from fractions import Fraction
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringweave import cost, schedules, topology
from ringweave.cost import loads
from ringweave.errors import PlacementError
from ringweave.schedules import Collective, ReceiveOp, Round, Schedule
from ringweave.topology import Cluster
from tests.cost.trees import flat, random_trees
from tests.schedules import samples

TWO_RACKS = topology.load("examples/clusters/two-racks.yaml")
RANKS_OF_TWO_RACKS = [node.name for node in TWO_RACKS.nodes]


def walked(schedule: Schedule, cluster: Cluster, nodes: list[str], num_bytes: int) -> Counter:
    """Bytes by link, operation by operation along the routes."""
    total, on_link = sum(schedule.shares), Counter()
    for round_ in schedule.rounds:
        for src, dst, first, count, _ in round_.rows():
            moved = Fraction(sum(schedule.shares[first : first + count]), total) * num_bytes
            for link in cluster.route(nodes[src], nodes[dst]):
                on_link[link] += moved
    return on_link


@pytest.mark.slow
@given(random_trees(), st.sampled_from(sorted(samples.ALL)), st.integers(1, 9), st.randoms(use_true_random=False))
def test_bytes_on_links_are_those_of_all_operations_along_their_routes(
    case, name: str, num_ranks: int, random: Random
) -> None:
    cluster, taking_part, _ = case
    nodes = [random.choice(taking_part) for _ in range(num_ranks)]
    schedule = samples.ALL[name](num_ranks, random)
    expected = walked(schedule, cluster, nodes, 1000)
    found = cost.bytes_on_links(schedule, cluster, nodes, 1000)
    assert {link: moved for link, moved in found.items() if moved} == pytest.approx(
        {link: float(moved) for link, moved in expected.items() if moved}
    )


def test_a_round_like_the_last_that_does_not_stay_alone_in_its_wave_counts_once() -> None:
    first = Round.of([0, 1, 2], [1, 2, 0], [0, 1, 2], ReceiveOp.REDUCE)
    like_it = Round(first.src, first.dst, first.first_chunk[[2, 0, 1]], first.num_chunks, first.how)
    beside_it = Round.of([0], [1], [0], ReceiveOp.REDUCE)
    schedule = Schedule("made up", Collective("allreduce"), 3, (1, 1, 1), [first, like_it, beside_it])
    cluster, nodes = flat([1.0] * 3), ["n0", "n1", "n2"]
    net = cost.group_network(cluster)
    assert len(list(loads.ScheduleLoads(schedule, net, cost.vertices_of_ranks(net, nodes)).wave_loads())) == 2
    expected = walked(schedule, cluster, nodes, 3)
    assert cost.bytes_on_links(schedule, cluster, nodes, 3) == expected == expected | {"n0->core": 3, "core->n1": 3}


def test_an_ordered_ring_passes_each_uplink_once_each_way() -> None:
    found = cost.bytes_on_links(schedules.ring(8), TWO_RACKS, RANKS_OF_TWO_RACKS, 8_000_000)
    assert len(found) == 20
    assert set(found.values()) == {14_000_000}


def test_a_shuffled_ring_passes_the_uplinks_more_often() -> None:
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    found = cost.bytes_on_links(schedules.ring(8, order), TWO_RACKS, RANKS_OF_TWO_RACKS, 8_000_000)
    assert found["r0->core"] == found["core->r0"] == 4 * 14_000_000
    assert found["a-0->r0"] == 14_000_000


def test_rows_inside_racks_put_the_message_once_on_the_uplinks() -> None:
    matrix = schedules.leader_matrix([[rank] for rank in range(8)], 4)
    found = cost.bytes_on_links(matrix, TWO_RACKS, RANKS_OF_TWO_RACKS, 8_000_000)
    assert found["r0->core"] == found["core->r1"] == 8_000_000
    assert found["a-0->r0"] == 14_000_000


def test_a_group_on_one_node_loads_no_link() -> None:
    assert cost.bytes_on_links(schedules.ring(3), flat([1.0, 1.0]), ["n0"] * 3, 100) == {}


def test_one_rank_has_nothing_to_send() -> None:
    assert cost.bytes_on_links(schedules.ring(1), flat([1.0]), ["n0"], 100) == {}


def test_too_few_nodes_are_refused() -> None:
    with pytest.raises(PlacementError) as caught:
        cost.bytes_on_links(schedules.ring(3), flat([1.0, 1.0]), ["n0", "n1"], 100)
    assert str(caught.value) == "nodes of ranks: 2, expected 3, one per rank of ring. Name each rank's node."


WAVES = {
    "ring": (schedules.ring(8), 14),
    "direct": (schedules.direct(8), 2),
    "ps": (schedules.parameter_server(8), 2),
    "halving-doubling": (schedules.halving_doubling(8), 6),
    "matrix of 2 x 4": (schedules.leader_matrix([[rank] for rank in range(8)], 4), 8),
}


@pytest.mark.parametrize("name", WAVES)
def test_waves_are_what_waits_for_each_other(name: str) -> None:
    schedule, num_waves = WAVES[name]
    net = cost.group_network(TWO_RACKS)
    counted = loads.ScheduleLoads(schedule, net, cost.vertices_of_ranks(net, RANKS_OF_TWO_RACKS))
    assert len(list(counted.wave_loads())) == num_waves


@pytest.mark.parametrize("name", WAVES)
def test_a_sample_of_the_chunks_shows_the_same_waves(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "_MAX_WATCHED_CELLS", 16)
    test_waves_are_what_waits_for_each_other(name)


@given(st.sampled_from(sorted(samples.ALL)), st.integers(1, 9), st.randoms(use_true_random=False))
def test_in_a_wave_nobody_sends_on_what_arrived_in_it(name: str, num_ranks: int, random: Random) -> None:
    """Waves, counted one operation at a time."""
    schedule = samples.ALL[name](num_ranks, random)
    num_waves, arrived = bool(len(schedule.rounds)), set()
    for round_ in schedule.rounds:
        rows = list(round_.rows())
        if any((src, chunk) in arrived for src, _, first, count, _ in rows for chunk in range(first, first + count)):
            num_waves, arrived = num_waves + 1, set()
        arrived |= {(dst, chunk) for _, dst, first, count, _ in rows for chunk in range(first, first + count)}
    net = cost.group_network(flat([1.0] * num_ranks))
    counted = loads.ScheduleLoads(schedule, net, cost.vertices_of_ranks(net, [f"n{rank}" for rank in range(num_ranks)]))
    assert len(list(counted.wave_loads())) == num_waves


@given(st.sampled_from(sorted(samples.ALL)), st.integers(1, 9), st.randoms(use_true_random=False))
def test_messages_are_counted_for_each_rank(name: str, num_ranks: int, random: Random) -> None:
    schedule = samples.ALL[name](num_ranks, random)
    sends, receives, sources, largest = Counter(), Counter(), set(), 0
    for round_ in schedule.rounds:
        for src, dst, first, count, _ in round_.rows():
            size = sum(schedule.shares[first : first + count])
            largest = max(largest, size)
            if size:
                sends[src] += 1
                receives[dst] += 1
                sources.add((dst, src))
    net = cost.group_network(flat([1.0] * num_ranks))
    counted = loads.ScheduleLoads(schedule, net, cost.vertices_of_ranks(net, [f"n{rank}" for rank in range(num_ranks)]))
    list(counted.wave_loads())
    assert counted.num_sends.tolist() == [sends[rank] for rank in range(num_ranks)]
    assert counted.num_receives.tolist() == [receives[rank] for rank in range(num_ranks)]
    assert counted.streams_meet == (len(sources) > len(receives))
    assert counted.largest_units == largest
