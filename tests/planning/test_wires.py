"""Plans of encoded allreduces: which links are encoded, what `auto` takes, and that plan and simulation agree."""

import dataclasses
from pathlib import Path

import pytest

from ringweave import planning, sim, topology
from ringweave.cost import Assumptions, bytes_on_links
from ringweave.planning import Plan
from ringweave.topology import Cluster

NUM_BYTES = 25_000_000
RACKS = """
name: racks
nodes:
  - {name: a, switch: r0, nic: %s, devices: 1, count: 4}
  - {name: b, switch: r1, nic: %s, devices: 1, count: 4}
switches:
  - {name: r0, uplink: 200Mbit/s}
  - {name: r1, uplink: 200Mbit/s}
"""


def loaded(tmp_path: Path, text: str) -> Cluster:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return topology.load(path)


def planned(cluster: Cluster, assumptions: Assumptions | None = None) -> Plan:
    return planning.plan_group(cluster, [node.name for node in cluster.nodes], assumptions=assumptions)


def test_fast_nics_below_a_slow_uplink_stay_exact(tmp_path: Path) -> None:
    plan = planned(loaded(tmp_path, RACKS % ("40Gbit/s", "40Gbit/s")))
    assert {wire.zones for wire in plan.wires} == {(0, 0, 0, 0, 1, 1, 1, 1)}


def test_nics_that_would_bind_next_are_encoded_too(tmp_path: Path) -> None:
    plan = planned(loaded(tmp_path, RACKS % ("400Mbit/s", "400Mbit/s")))
    assert {wire.zones for wire in plan.wires} == {tuple(range(8))}
    exact, coded = plan.choose(NUM_BYTES), plan.choose(NUM_BYTES, wire="int8")
    assert (exact.wire, coded.wire) == ("exact", "int8")
    assert coded.predicted_s < 0.3 * exact.predicted_s


def test_plan_and_simulation_agree_and_the_bytes_are_a_quarter(tmp_path: Path) -> None:
    cluster = loaded(tmp_path, RACKS % ("400Mbit/s", "400Mbit/s"))
    plan = planned(cluster)
    choice = plan.choose(NUM_BYTES, wire="int8")
    schedule = plan.generate(choice.schedule, wire="int8")
    simulated = sim.simulate(schedule, cluster, plan.nodes, NUM_BYTES, pipelining=choice.pipelining)
    assert simulated.seconds == pytest.approx(choice.predicted_s, rel=0.1)
    coded = bytes_on_links(schedule, cluster, plan.nodes, NUM_BYTES)
    exact = bytes_on_links(dataclasses.replace(schedule, encoding=None), cluster, plan.nodes, NUM_BYTES)
    for link, num_bytes in exact.items():
        assert coded[link] == pytest.approx(num_bytes * 0.252, rel=1e-2)


@pytest.mark.parametrize(
    ("rate", "processors", "expected"),
    [("1Gbit/s", 1.0, "int8"), ("100Gbit/s", 1.0, "exact"), ("1Gbit/s", 0.25, "exact"), ("200Mbit/s", 0.25, "int8")],
)
def test_auto_encodes_where_the_forecast_gains(tmp_path: Path, rate: str, processors: float, expected: str) -> None:
    text = f"name: equal\nnodes:\n  - {{name: n, nic: {rate}, devices: 1, count: 8}}\n"
    plan = planned(loaded(tmp_path, text), Assumptions(processors=processors))
    assert plan.choose(NUM_BYTES, wire="auto").wire == expected


def test_plan_reads_back_and_one_node_has_no_encoded_schedules(tmp_path: Path) -> None:
    plan = planned(loaded(tmp_path, RACKS % ("400Mbit/s", "400Mbit/s")))
    assert Plan.parse(str(plan)) == plan
    alone = planning.plan_group(topology.one_machine([4]), ["node0"] * 4)
    assert alone.wires == ()
    assert alone.choose(NUM_BYTES, wire="int8").wire == "exact"
