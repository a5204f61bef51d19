import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringweave import cost, schedules, topology
from ringweave.cost import Assumptions
from ringweave.errors import ClusterError
from tests.cost.trees import flat, random_trees
from tests.schedules import samples

MB = 10**6
FREE = Assumptions(message_s=0.0)
NAMES = [f"n{rank}" for rank in range(8)]


def test_a_ring_on_equal_nodes_is_the_published_formula() -> None:
    """2(N-1)(a + S/(N B)), the reduction cost left out."""
    predicted_s = cost.predict(schedules.ring(8), flat([25.0 * MB] * 8), NAMES, 80 * MB, assumptions=FREE)
    assert math.isclose(predicted_s, 2 * 7 * (50e-6 + 80 / (8 * 25)))


def test_each_message_takes_the_processor() -> None:
    cluster, assumed = flat([25.0 * MB] * 8), Assumptions(message_s=1e-3)
    with_messages = cost.predict(schedules.ring(8), cluster, NAMES, 80 * MB, assumptions=assumed)
    without = cost.predict(schedules.ring(8), cluster, NAMES, 80 * MB, assumptions=FREE)
    assert math.isclose(with_messages - without, (14 + 14) * 1e-3)


def test_copies_inside_a_node_take_its_memory() -> None:
    assumed = Assumptions(memory_bytes_per_s=1e9, message_s=0.0)
    predicted_s = cost.predict(schedules.ring(4), flat([1.0]), ["n0"] * 4, 100 * MB, assumptions=assumed)
    assert math.isclose(predicted_s, 2 * 3 / 4 * 0.1)


@pytest.mark.parametrize(("rate", "lasts"), [(12.5e9, 28 / 8 * 80 * MB * 1e-9), (25.0 * MB, 14 * 80 / (8 * 25))])
def test_encryption_takes_time_on_links_that_are_faster_than_it(rate: float, lasts: float) -> None:
    """Each of the 14 steps encrypts a chunk and decrypts another one, which a slow link hides."""
    assumed = Assumptions(message_s=0.0, encryption_s_per_byte=1e-9)
    predicted_s = cost.predict(schedules.ring(8), flat([rate] * 8), NAMES, 80 * MB, assumptions=assumed)
    assert math.isclose(predicted_s, 2 * 7 * 50e-6 + lasts)


def test_phases_that_use_different_directions_overlap_in_segments() -> None:
    """A leaf sends all it has in the first phase and receives in the second: 2 S/B, or S/B where they overlap."""
    cluster, shares = flat([20.0 * MB] * 3 + [5.0 * MB]), [1, 1, 1, 0]
    nodes, direct = NAMES[:4], schedules.direct(4, shares)

    def predicted_s(num_segments: int, lag: int) -> float:
        return (
            cost.predict(direct, cluster, nodes, 10 * MB, num_segments=num_segments, lag=lag, assumptions=FREE)
            - 2 * 50e-6
        )

    assert math.isclose(predicted_s(1, 0), 4.0)
    assert math.isclose(predicted_s(10, 0), 4.0)
    assert math.isclose(predicted_s(10, 2), 4.0 / 10 + 9 * 2.0 / 10)
    assert cost.bound(cluster, 10 * MB).seconds == 2.0


@pytest.mark.slow
@given(
    random_trees(min_nodes=2),
    st.sampled_from(sorted(samples.ALL)),
    st.integers(1, 64),
    st.integers(0, 5),
    st.randoms(use_true_random=False),
)
def test_nothing_is_predicted_to_beat_the_bound(case, name: str, num_segments: int, lag: int, random: Random) -> None:
    cluster, nodes, rates = case
    schedule = samples.ALL[name](len(nodes), random)
    predicted_s = cost.predict(
        schedule, cluster, nodes, 100, num_segments=num_segments, lag=lag, rates=rates, assumptions=FREE
    )
    assert predicted_s >= cost.bound(cluster, 100, nodes=nodes, rates=rates).seconds * (1 - 1e-9)


@given(random_trees(min_nodes=2), st.sampled_from(sorted(samples.ALL)), st.randoms(use_true_random=False))
def test_the_busiest_link_is_the_largest_of_bytes_over_rates(case, name: str, random: Random) -> None:
    cluster, nodes, rates = case
    schedule = samples.ALL[name](len(nodes), random)
    net = cost.group_network(cluster, nodes, rates)
    asked = cost.schedule_demand(schedule, net, cost.vertices_of_ranks(net, nodes), FREE)
    rate_of = {link.name: link.bandwidth_bytes_per_s for link in cluster.links()} | rates
    needed = {link: moved / rate_of[link] for link, moved in cost.bytes_on_links(schedule, cluster, nodes, 1).items()}
    assert math.isclose(asked.busiest_s_per_byte, max(needed.values()))
    assert math.isclose(needed[asked.busiest], asked.busiest_s_per_byte)
    assert asked.waves_s_per_byte >= asked.busiest_s_per_byte * (1 - 1e-9)


def test_only_waves_that_pass_a_link_wait_for_its_latency() -> None:
    cluster = flat([25.0 * MB] * 2, num_devices=2)
    net = cost.group_network(cluster)
    nodes = ["n0", "n0", "n1", "n1"]
    asked = cost.schedule_demand(schedules.hierarchical([[0, 1], [2, 3]]), net, cost.vertices_of_ranks(net, nodes))
    assert (asked.num_rounds, asked.num_latencies) == (5, 2)


@pytest.mark.parametrize(("lag", "in_flight"), [(0, 1), (1, 10), (4, 4), (14, 1), (99, 1)])
def test_segments_in_flight(lag: int, in_flight: int) -> None:
    net = cost.group_network(flat([1.0] * 8))
    asked = cost.schedule_demand(schedules.ring(8), net, cost.vertices_of_ranks(net, NAMES))
    assert asked.segments_in_flight(10, lag) == in_flight


def test_measured_rates_count_instead_of_the_clusters() -> None:
    rates = {"n3->core": 5.0 * MB}
    predicted_s = cost.predict(schedules.ring(8), flat([25.0 * MB] * 8), NAMES, 80 * MB, rates=rates, assumptions=FREE)
    assert math.isclose(predicted_s, 2 * 7 * (50e-6 + 80 / (8 * 5)))


def test_a_node_that_is_not_there_is_refused() -> None:
    with pytest.raises(ClusterError, match="node of cluster flat: 'n8', expected one of n0, n1"):
        cost.predict(schedules.ring(2), flat([1.0, 1.0]), ["n0", "n8"], 100)


@pytest.mark.slow
def test_a_ring_of_ten_thousand_is_counted_in_seconds() -> None:
    lines = ["name: big", "nodes:", "  - {name: n, nic: 1Gbit/s, devices: 1, count: 10000}"]
    cluster = topology.loads("\n".join(lines))
    nodes = [node.name for node in cluster.nodes]
    predicted_s = cost.predict(schedules.ring(10_000), cluster, nodes, 10**9, assumptions=FREE)
    assert math.isclose(predicted_s, 2 * 9999 * (50e-6 + 10**9 / 10_000 / 1.25e8), rel_tol=1e-9)


@pytest.mark.parametrize(
    ("schedule", "meet"),
    [
        (schedules.ring(6), False),
        (schedules.ring(6, (3, 1, 0, 2, 5, 4)), False),
        (schedules.direct(2), False),
        (schedules.direct(3), True),
        (schedules.halving_doubling(8), True),
        (schedules.leader_matrix([(rank,) for rank in range(6)], 3), True),
        (schedules.parameter_server(3), True),
    ],
    ids=lambda value: value.name if isinstance(value, schedules.Schedule) else None,
)
def test_streams_meet_where_a_rank_receives_from_several(schedule: schedules.Schedule, meet: bool) -> None:
    net, nodes = cost.group_network(flat([25.0 * MB] * schedule.num_ranks)), NAMES[: schedule.num_ranks]
    assert cost.schedule_demand(schedule, net, cost.vertices_of_ranks(net, nodes)).streams_meet is meet
