"""Simulated times: equal to formulas where there are any, never below the bound, the same every time."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringweave import cost, schedules, sim, topology
from ringweave.errors import PlacementError, UsageError
from ringweave.schedules.program import Pipelining
from ringweave.sim import HostModel, simulation
from ringweave.topology import Cluster, Device, Nic, Node
from tests import effort
from tests.cost.trees import flat, random_trees
from tests.sim.cases import MACHINES, PIPELININGS, any_allreduce, message_bytes

SEEDS = st.integers(0, 2**32 - 1)


def names(cluster: Cluster) -> list[str]:
    return [node.name for node in cluster.nodes for _ in node.devices]


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("message_s", [0.0, 0.25])
def test_a_ring_takes_what_the_formula_says(count: int, message_s: float) -> None:
    cluster = dataclasses.replace(flat([100.0] * count), latency_s=0.5)
    machine = HostModel(message_s=message_s, combine_s_per_byte=0.01)
    found = sim.simulate(schedules.ring(count), cluster, names(cluster), 4 * 100 * count, machine=machine)
    rounds = count - 1
    expected = 2 * rounds * (0.5 + 400 / 100 + 2 * message_s) + rounds * 400 * 0.01
    assert found.seconds == pytest.approx(expected, rel=1e-12)
    assert found.finish_s == pytest.approx([expected] * count)


def test_messages_inside_a_node_have_a_cost_of_their_own() -> None:
    """One message each way and, of four in a row, one after the other."""
    nodes = (Node(name="a", nics=(Nic(name="eth0", rate_bytes_per_s=100.0),), devices=(Device(),) * 2),)
    cluster = Cluster(name="one", nodes=nodes, latency_s=0.0)
    found = sim.simulate(schedules.ring(2), cluster, names(cluster), 800, machine=HostModel(inside_message_s=0.5))
    assert found.seconds == pytest.approx(4 * 0.5), "a send and a receive in each of two rounds"
    assert sim.simulate(schedules.ring(2), cluster, names(cluster), 800, machine=HostModel(message_s=0.5)).seconds == 0


def test_who_sleeps_until_a_message_comes_has_to_wake_up() -> None:
    """In a ring everybody waits for each message; who has so much to do that all messages are there never sleeps."""
    cluster = dataclasses.replace(flat([100.0] * 4), latency_s=0.5)
    found = sim.simulate(schedules.ring(4), cluster, names(cluster), 1600, machine=HostModel(wake_s=0.25))
    assert found.num_wakes == 4 * 6
    assert found.seconds == pytest.approx(6 * (0.5 + 400 / 100 + 0.25))
    late = [sim.StartDelay(rank=0, seconds=1000.0)]
    found = sim.simulate(schedules.ring(4), cluster, names(cluster), 1600, machine=HostModel(wake_s=0.25), faults=late)
    assert found.num_wakes == 4 * 6 - 3, "three messages to the late one were there before it began"
    busy = HostModel(wake_s=0.25, message_s=100.0, num_processors=1)
    assert sim.simulate(schedules.ring(4), cluster, names(cluster), 1600, machine=busy).num_wakes < 4 * 6


def test_bursts_wake_who_waits_for_the_whole_message() -> None:
    """Two ranks, pieces of four bursts: three come too early, the fourth ends the piece."""
    cluster = dataclasses.replace(flat([100.0] * 2), latency_s=0.0)
    machine = HostModel(wake_s=0.25, burst_bytes=100.0)
    found = sim.simulate(schedules.ring(2), cluster, names(cluster), 800, machine=machine)
    assert found.num_wakes == 2 * 2 * 4
    assert found.seconds == pytest.approx(2 * (500 / 100 + 0.25)), "a burst is forwarded as a whole; one waking counts"


@pytest.mark.parametrize("burst", [float("inf"), 100.0])
def test_what_the_kernel_does_for_each_byte_and_what_it_takes_to_begin(burst: float) -> None:
    """Of each piece's 400 bytes one burst's are copied while nothing else goes on."""
    cluster = dataclasses.replace(flat([100.0] * 4), latency_s=0.0)
    machine = HostModel(kernel_s_per_byte=0.01, start_s=3.0, burst_bytes=burst)
    found = sim.simulate(schedules.ring(4), cluster, names(cluster), 1600, machine=machine)
    near = min(burst, 400)
    forwarded_s = 0 if burst == float("inf") else burst / 100
    assert found.seconds == pytest.approx(3 + 6 * (400 / 100 + forwarded_s + 2 * near * 0.01))


def test_streams_that_meet_share_the_link() -> None:
    """All send a quarter to the root at once, its link being the bottleneck, then it to all."""
    cluster = dataclasses.replace(flat([100.0] * 5), latency_s=0.0)
    found = sim.simulate(schedules.parameter_server(5), cluster, names(cluster), 1600)
    assert found.seconds == pytest.approx(2 * 4 * 1600 / 100)


@pytest.mark.parametrize(("name", "least", "most"), [("ps", 1.15, 1.4), ("direct", 0.98, 1.02)])
def test_who_waits_for_the_slowest_of_uneven_streams(name: str, least: float, most: float) -> None:
    """In a star all can send more than the root's link takes, and it passes on what all have delivered."""
    schedule = {"ps": schedules.parameter_server, "direct": schedules.direct}[name](8)
    cluster, pipelining = flat([200e6 / 8] * 8), Pipelining(num_segments=8, lag=2, window=28)
    even, uneven = (
        sim.simulate(
            schedule,
            cluster,
            names(cluster),
            1_000_000,
            pipelining=pipelining,
            machine=dataclasses.replace(HostModel.assumed(), unevenness=unevenness),
        ).seconds
        for unevenness in (0.0, 0.43)
    )
    assert least < uneven / even < most


@pytest.mark.slow
@settings(max_examples=effort.share_of(120))
@given(random_trees(min_nodes=2), SEEDS, PIPELININGS, MACHINES)
def test_nothing_beats_the_bound_and_links_carry_what_the_theory_says(case, seed, pipelining, machine) -> None:
    cluster, nodes, rates = case
    schedule = any_allreduce(len(nodes), seed)
    size = message_bytes(schedule, pipelining)
    found = sim.simulate(schedule, cluster, nodes, size, pipelining=pipelining, rates=rates, machine=machine)
    assert found.seconds >= cost.bound(cluster, size, nodes=nodes, rates=rates).seconds * (1 - 1e-9)
    theory = cost.bytes_on_links(schedule, cluster, nodes, size)
    assert found.bytes_on_link == pytest.approx(theory, rel=1e-6, abs=1e-6)
    assert not found.died
    assert not found.noticed_s


@pytest.mark.slow
@settings(max_examples=effort.share_of(60))
@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), SEEDS, PIPELININGS, MACHINES)
def test_ranks_of_a_node_come_to_an_end_together(counts, seed, pipelining, machine) -> None:
    cluster = dataclasses.replace(flat([50.0] * len(counts)), latency_s=0.1)
    nodes = [f"n{index}" for index, count in enumerate(counts) for _ in range(count)]
    schedule = any_allreduce(len(nodes), seed)
    size = message_bytes(schedule, pipelining)
    found, again = (
        sim.simulate(schedule, cluster, nodes, size, pipelining=pipelining, machine=machine, keeps_trace=True)
        for _ in range(2)
    )
    assert found == again
    assert found.seconds < float("inf")
    assert found.bytes_on_link == pytest.approx(cost.bytes_on_links(schedule, cluster, nodes, size), abs=1e-6)


def test_copies_inside_a_node_take_time_there() -> None:
    cluster = flat([1.0], num_devices=2)
    machine = HostModel(inside_s_per_byte=0.5)
    found = sim.simulate(schedules.direct(2), cluster, ["n0", "n0"], 80, machine=machine)
    # each shows a half, reads and adds the other's, shows its sum, reads the other's: 4 x 40 bytes at half the cost
    assert found.seconds == pytest.approx(4 * 40 * 0.5 / 2)
    assert found.bytes_on_link == {}


def test_a_full_send_buffer_is_waited_for_before_memory_is_overwritten() -> None:
    cluster = dataclasses.replace(flat([1.0, 1.0, 1.0]), latency_s=0.0)
    ring = schedules.ring(3)
    times = [
        sim.simulate(ring, cluster, names(cluster), 1200, machine=HostModel(send_buffer_bytes=size)).seconds
        for size in (0.0, float("inf"))
    ]
    assert times[0] >= times[1]


def test_few_processors_for_many_ranks_take_longer() -> None:
    cluster = dataclasses.replace(flat([1e9] * 4), latency_s=0.0)
    own, shared = (
        sim.simulate(
            schedules.ring(4), cluster, names(cluster), 1600, machine=HostModel(message_s=1.0, num_processors=n)
        )
        for n in (None, 1)
    )
    assert own.seconds == pytest.approx(12, rel=1e-5)
    assert shared.seconds == pytest.approx(48, rel=1e-5)


def test_the_plan_can_be_simulated() -> None:
    from ringweave import planning

    cluster = topology.load("examples/clusters/two-racks.yaml")
    plan = planning.plan_group(cluster, names(cluster))
    choice = plan.choose(25_000_000)
    pipelining = Pipelining(num_segments=choice.num_segments, lag=choice.lag, window=choice.window)
    found = sim.simulate(
        plan.generate(choice.schedule),
        cluster,
        plan.nodes,
        25_000_000,
        pipelining=pipelining,
        machine=HostModel.assumed(),
    )
    assert found.seconds == pytest.approx(choice.predicted_s, rel=0.1)


def test_one_rank_has_nothing_to_wait_for() -> None:
    found = sim.simulate(schedules.ring(1), flat([1.0]), ["n0"], 400)
    assert (found.seconds, found.bytes_on_link) == (0.0, {})


def test_not_one_node_per_rank() -> None:
    with pytest.raises(PlacementError, match=r"nodes of ranks: 2, expected 3, one per rank of the schedule\. Name"):
        sim.simulate(schedules.ring(3), flat([1.0] * 3), ["n0", "n1"], 400)


def test_too_many_messages_to_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "REGULAR_FROM_MESSAGES", 1)
    monkeypatch.setattr(simulation, "MAX_MESSAGES", 10)
    cluster = flat([1.0] * 4)
    text = (
        r"messages of ring: 'more than 10', expected at most 10, or a schedule that is regular; here there are 2 "
        r"segments\. Take one segment \(simulate --segments 1\), or another schedule, such as "
        r"ring or leader-matrix with one rank a node\."
    )
    with pytest.raises(UsageError, match=text):
        sim.simulate(schedules.ring(4), cluster, names(cluster), 400, pipelining=Pipelining(num_segments=2))


@pytest.mark.parametrize(
    "wrong", [{"message_s": -1.0}, {"combine_s_per_byte": float("inf")}, {"send_buffer_bytes": float("nan")}]
)
def test_machines_that_cannot_be(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected finite times and sizes, none negative"):
        HostModel(**wrong)


def test_a_machine_without_processors() -> None:
    with pytest.raises(ValueError, match="machine: 0 processors, expected at least one, or None"):
        HostModel(num_processors=0)


def test_who_asks_is_told_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "_PROGRESS_EVERY", 1)
    cluster, told = flat([1.0] * 4), []
    sim.simulate(schedules.ring(4), cluster, names(cluster), 400, progress=lambda *counts: told.append(counts))
    assert told[-1] == (24, 24)
    assert told == sorted(told)
    monkeypatch.setattr(simulation, "REGULAR_FROM_MESSAGES", 1)
    told.clear()
    sim.simulate(schedules.ring(4), cluster, names(cluster), 400, progress=lambda *counts: told.append(counts))
    assert told == [(done, 6) for done in range(1, 7)], "round by round"
