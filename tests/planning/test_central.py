import math

import pytest

from ringweave import topology
from ringweave.planning import group_planner


def loads(nodes: str, switches: str = "") -> topology.Cluster:
    return topology.loads(f"name: c\nnodes: [{nodes}]\n" + (f"switches: [{switches}]\n" if switches else ""))


def test_the_node_with_the_fastest_link_of_equals():
    found = group_planner.find_best_connected(
        loads(
            "{name: a, nic: 100Mbit/s, devices: 1}, {name: b, nic: 400Mbit/s, devices: 1},"
            " {name: c, nic: 200Mbit/s, devices: 1}"
        )
    )
    assert (found.node, found.inflow_bytes_per_s) == ("b", pytest.approx(300e6 / 8))


def test_a_fast_link_behind_a_slow_uplink_is_no_good():
    found = group_planner.find_best_connected(
        loads(
            "{name: a, nic: 1Gbit/s, devices: 1, switch: r0}, {name: b, nic: 400Mbit/s, devices: 1},"
            " {name: c, nic: 300Mbit/s, devices: 1}",
            "{name: r0, uplink: 100Mbit/s}",
        )
    )
    assert (found.node, found.inflow_bytes_per_s) == ("b", pytest.approx(400e6 / 8))


def test_one_node_is_its_own_best():
    assert group_planner.find_best_connected(topology.one_machine([3])).inflow_bytes_per_s == math.inf
