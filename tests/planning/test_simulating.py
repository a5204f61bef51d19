"""Simulated seconds of candidates: whole, and estimated from a few segments."""

import pytest

from ringweave import topology
from ringweave.planning import Plan, plan_group, simulated
from ringweave.planning.plans import PLANNED_KINDS
from ringweave.schedules import CollectiveKind
from ringweave.sim import HostModel
from ringweave.topology import Cluster


def planned(text: str) -> tuple[Plan, Cluster]:
    cluster = topology.loads(text)
    return plan_group(cluster, [node.name for node in cluster.nodes for _ in node.devices]), cluster


def many(count: int) -> str:
    return f"name: many\nnodes: [{{name: a, nic: 1Gbit/s, devices: 1, count: {count}}}]\nlatency: 50us\n"


def test_an_estimate_is_near_the_whole_simulation() -> None:
    plan, cluster = planned(many(4))
    whole = simulated.simulate_best(plan, cluster, 5_000_000, count=2, machine=HostModel.assumed())
    found = simulated.estimate_candidates(plan, cluster, 5_000_000)
    assert list(found) == [choice.schedule for choice in plan.choices(5_000_000)[: len(found)]]
    for name, seconds in whole.items():
        assert found[name] == pytest.approx(seconds, rel=0.3)


@pytest.mark.parametrize("kind", PLANNED_KINDS[1:])
@pytest.mark.parametrize("name", ["two-racks", "unequal-nics", "three-racks"])
def test_the_other_collectives_come_near_their_bounds(name: str, kind: CollectiveKind) -> None:
    """From the first segments, in whose time the pipeline fills; the whole message takes less."""
    cluster = topology.load(f"examples/clusters/{name}.yaml")
    plan = plan_group(cluster, [node.name for node in cluster.nodes])
    choice = plan.choose(25_000_000, kind=kind)
    found = simulated.estimate_candidates(plan, cluster, 25_000_000, kind=kind)
    assert plan.bound_s(25_000_000, kind) / found[choice.schedule] > 0.9


def test_an_estimate_is_the_same_each_time() -> None:
    plan, cluster = planned(many(4))
    assert simulated.estimate_candidates(plan, cluster, 10**6) == simulated.estimate_candidates(plan, cluster, 10**6)


def test_it_is_made_at_the_rates_that_are_given() -> None:
    plan, cluster = planned(many(4))
    slow = {"a-0->core": 12.5e6, "core->a-0": 12.5e6}
    before, after = (simulated.estimate_candidates(plan, cluster, 10**6, rates=rates) for rates in (None, slow))
    assert all(after[name] > 3 * before[name] for name in before)


@pytest.mark.parametrize("count", [32, 100])
def test_a_group_of_many_ranks_has_no_estimates(count: int) -> None:
    plan, cluster = planned(many(count))
    assert simulated.estimate_candidates(plan, cluster, 10**6) == {}


def test_sixteen_ranks_have_estimates() -> None:
    plan, cluster = planned(many(16))
    assert len(simulated.estimate_candidates(plan, cluster, 10**5)) >= 2
