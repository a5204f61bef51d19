"""What the cluster file says of a rank before anything is measured."""

from pathlib import Path

from ringweave.comm import default_group
from ringweave.environment import WorkerEnvironment

CLUSTER = """
name: two-racks
nodes:
  - {name: a, switch: r0, nic: 400Mbit/s, devices: [{speed: 0.5}]}
  - {name: b, switch: r1, nic: 800Mbit/s, devices: 1}
  - {name: c, nic: 800Mbit/s, devices: 1}
switches:
  - {name: r0, parent: s0, uplink: 80Mbit/s}
  - {name: r1, parent: s0, uplink: 160Mbit/s}
  - {name: s0, uplink: 40Mbit/s}
"""


def test_switches_above_a_rank_are_known_from_the_nearest_up(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER)
    found = default_group.describe_rank(WorkerEnvironment(cluster_path=path, node="a"), {})
    assert (found.speed, found.rate) == (0.5, 50e6)
    assert list(found.uplinks.items()) == [("r0", 10e6), ("s0", 5e6)]
    assert found.server_rate == 15e6, "the server is on b: 10 MB/s from a, and 5 from c"
    assert list(found.server_uplinks.items()) == [("r1", 20e6), ("s0", 5e6)]
    assert default_group.describe_rank(WorkerEnvironment(cluster_path=path, node="c"), {}).uplinks == {}


def test_on_one_node_and_without_a_file_there_are_none(tmp_path: Path) -> None:
    assert default_group.describe_rank(WorkerEnvironment(), {}).uplinks == {}
    path = tmp_path / "cluster.yaml"
    path.write_text("name: one\nnodes:\n  - {name: a, nic: 1Gbit/s, devices: 2}\n")
    found = default_group.describe_rank(WorkerEnvironment(cluster_path=path, node="a"), {})
    assert (found.uplinks, found.server_uplinks) == ({}, {})
