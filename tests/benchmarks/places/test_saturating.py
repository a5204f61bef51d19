import pytest
from hypothesis import given, settings

from ringweave import topology
from ringweave.testing import clusters
from ringweave_bench.link_rates import TcpStream, plan_trials, trial_routes
from tests import effort

ALIKE = topology.loads("name: c\nnodes: [{name: a, nic: 100Mbit/s, devices: 1, count: 4}]")
RACKS = topology.loads("""
name: c
nodes:
  - {name: a, switch: r, nic: 100Mbit/s, devices: 1, count: 3}
  - {name: b, nic: 400Mbit/s, devices: 1}
switches: [{name: r, uplink: 250Mbit/s}]
""")


def test_equal_nodes_take_two_batches() -> None:
    found = plan_trials(ALIKE)
    assert found.unmeasurable == ()
    assert [[trial.streams for trial in batch] for batch in found.batches] == [
        [(TcpStream("a-0", "a-1"),), (TcpStream("a-2", "a-3"),)],
        [(TcpStream("a-1", "a-0"),), (TcpStream("a-3", "a-2"),)],
    ]
    assert found.batches[0][0].links == ("a-0->core", "core->a-1")


def test_a_wide_link_takes_several_streams_and_one_may_be_out_of_reach() -> None:
    found = plan_trials(RACKS)
    trials = {link: trial for batch in found.batches for trial in batch for link in trial.links}
    assert trials["r->core"].streams == (TcpStream("a-0", "b"), TcpStream("a-1", "b"), TcpStream("a-2", "b"))
    assert set(found.unmeasurable) == {"b->core", "core->b"}  # 400 Mbit/s behind 250


def test_a_node_with_two_nics_is_filled_by_what_its_peers_nics_take() -> None:
    cluster = topology.loads("""
name: c
nodes:
  - {name: a, nics: [{name: x, rate: 20Mbit/s}, {name: y, rate: 10Mbit/s}], devices: 1, count: 2}
  - {name: b, nic: 30Mbit/s, devices: 1}
""")
    found = plan_trials(cluster)
    trials = {link: trial for batch in found.batches for trial in batch for link in trial.links}
    assert trials["a-0->core"].streams == (TcpStream("a-0", "a-1"),)
    assert trials["b->core"].streams == (TcpStream("b", "a-0"), TcpStream("b", "a-1"))


@settings(max_examples=effort.share_of(80))
@given(clusters.clusters())
def test_every_link_is_filled_once_or_named_as_out_of_reach(cluster: topology.Cluster) -> None:
    found = plan_trials(cluster)
    rates = {link.name: link.bandwidth_bytes_per_s for link in cluster.links()}
    filled = {link for batch in found.batches for trial in batch for link in trial.links}
    assert filled | set(found.unmeasurable) == set(rates)
    assert not filled & set(found.unmeasurable)
    for batch in found.batches:
        cables = [
            {frozenset(name.split("->")) for route in trial_routes(cluster, trial).values() for name in route}
            for trial in batch
        ]
        assert sum(map(len, cables)) == len(set().union(*cables))
        for trial in batch:
            for link in trial.links:
                feeders = [stream for stream, route in trial_routes(cluster, trial).items() if link in route]
                reach = sum(cluster.node(stream.src).rate_bytes_per_s for stream in feeders)
                assert reach >= rates[link] * (1 - 1e-6)


@pytest.mark.parametrize(("rate", "batches"), [("400Mbit/s", 2), ("600Mbit/s", 4)])
def test_a_small_machine_is_not_asked_for_too_much_at_once(rate: str, batches: int) -> None:
    cluster = topology.loads(f"name: c\nnodes: [{{name: a, nic: {rate}, devices: 1, count: 4}}]")
    assert len(plan_trials(cluster).batches) == batches
