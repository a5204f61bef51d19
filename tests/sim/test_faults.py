"""Stragglers slow, failures end: who never finishes, and when the others notice."""

import dataclasses
import math

import pytest

from ringweave import schedules, sim
from ringweave.errors import UsageError
from ringweave.sim import HostModel, LinkRateChange, NodeSlowdown, RankFailure, StartDelay
from ringweave.topology import Cluster
from tests.cost.trees import flat

SIZE = 4 * 400


def four() -> Cluster:
    """A ring of four takes 6 rounds of 1 + 4 seconds."""
    return dataclasses.replace(flat([100.0] * 4), latency_s=1.0)


def run(*faults, machine: HostModel | None = None, **options):
    cluster = four()
    nodes = [node.name for node in cluster.nodes]
    return sim.simulate(schedules.ring(4), cluster, nodes, SIZE, machine=machine, faults=faults, **options)


def test_without_a_fault() -> None:
    assert run().seconds == pytest.approx(30)


def test_a_rank_that_begins_late_makes_all_late() -> None:
    found = run(StartDelay(rank=2, seconds=7.0))
    assert found.seconds == pytest.approx(37)
    assert min(found.finish_s) > 30, "what waited for it was sent without a pause, and made up for some latency"


def test_a_slow_node_takes_longer_for_its_work_alone() -> None:
    machine = HostModel(message_s=0.5)
    assert run(machine=machine).seconds == pytest.approx(36)
    assert run(NodeSlowdown(node="n1", times=4.0), machine=machine).seconds > 36


def test_a_link_with_another_rate_from_some_time_on() -> None:
    """From second 10 on, after two rounds, four rounds of 1 + 8 seconds behind the slow link."""
    found = run(LinkRateChange(link="n0->core", bytes_per_s=50.0, at_s=10.0))
    assert found.seconds == pytest.approx(10 + 4 * 9, abs=4)
    assert run(LinkRateChange(link="n0->core", bytes_per_s=50.0, at_s=100.0)).seconds == pytest.approx(30)


def test_a_rate_changes_while_bytes_are_under_way() -> None:
    cluster = dataclasses.replace(flat([100.0, 100.0]), latency_s=0.0)
    change = LinkRateChange(link="n0->core", bytes_per_s=25.0, at_s=1.0)
    found = sim.simulate(schedules.ring(2), cluster, ["n0", "n1"], 800, faults=[change])
    # 400 bytes: 100 in the first second, 300 at a quarter; then 400 at a quarter
    assert found.seconds == pytest.approx(1 + 12 + 16)


def test_a_killed_rank_is_noticed_by_its_neighbours_and_then_by_theirs() -> None:
    found = run(RankFailure(rank=1, at_s=12.0))
    assert found.died == (1,)
    assert found.finish_s == (math.inf,) * 4
    assert found.noticed_s == {0: 13.0, 2: 13.0, 3: 14.0}
    assert found.seconds == math.inf


def test_a_rank_that_is_killed_when_all_is_over_harms_nobody() -> None:
    found = run(RankFailure(rank=1, at_s=31.0))
    assert (found.died, found.noticed_s, found.seconds) == ((), {}, pytest.approx(30))


def test_behind_a_cut_link_all_wait_until_their_time_is_up() -> None:
    found = run(
        LinkRateChange(link="core->n3", bytes_per_s=0.0, at_s=2.0), StartDelay(rank=0, seconds=1.0), timeout_s=60.0
    )
    assert found.noticed_s == {0: 61.0, 1: 60.0, 2: 60.0, 3: 60.0}
    assert found.died == ()


def test_a_cut_link_that_comes_back() -> None:
    gone, back = (LinkRateChange(link="core->n3", bytes_per_s=rate, at_s=at) for rate, at in ((0.0, 2.0), (100.0, 8.0)))
    assert run(gone, back).seconds == pytest.approx(36)


def test_a_death_inside_a_node() -> None:
    cluster = flat([100.0], num_devices=3)
    machine = HostModel(inside_s_per_byte=0.1)
    death = RankFailure(rank=2, at_s=1.0)
    found = sim.simulate(schedules.direct(3), cluster, ["n0"] * 3, 1200, machine=machine, faults=[death])
    assert found.died == (2,)
    assert set(found.noticed_s) == {0, 1}


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (StartDelay(rank=9, seconds=1), r"rank of a fault: 9, expected 0 to 3\. Name a rank of the group\."),
        (RankFailure(rank=-1), r"rank of a fault: -1, expected 0 to 3\. Name a rank of the group\."),
        (NodeSlowdown(node="n7", times=2), r"node of a fault: 'n7', expected a node with ranks of this group\."),
        (
            LinkRateChange(link="n0->r9", bytes_per_s=1),
            r"link of a fault: 'n0->r9', expected a link between nodes of this group, such as n0->core\.",
        ),
    ],
)
def test_faults_of_strangers(fault, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        run(fault)
