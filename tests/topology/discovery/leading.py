"""What is asked of every machine whose leader was derived by hand."""

from collections.abc import Sequence
from pathlib import Path

from ringweave import cost
from ringweave.planning import group_planner
from ringweave.topology import discovery, dumps, loads
from ringweave.topology.discovery import LeaderChoice

Hops = Sequence[tuple[int, str] | None]
"""Of each candidate: edges to the NIC, and what kind of way that is; None where nothing is known."""


def check_leader(path: Path, nic: str | None, leader: str, hops: Hops) -> tuple[LeaderChoice, str]:
    """The NIC, the leader and all ways to it are as expected; returns what was chosen, and how it is told."""
    machine = discovery.read_file(path)
    found = discovery.choose_leader(machine)
    assert (None if found.interface is None else machine.interfaces[found.interface].name) == nic
    assert machine.workers[found.leader].name == leader
    ways = {each.index: each.path for each in found.candidates}
    assert [way and (way.num_hops, way.path_class) for _, way in sorted(ways.items())] == hops
    text = discovery.describe_machine(machine, found)
    assert f"{leader} leads" in text
    return found, text


def check_planned_leader(path: Path) -> None:
    """Planning takes the same leader from the cluster file that discovery writes."""
    machine = discovery.read_file(path)
    found = discovery.choose_leader(machine)
    node = discovery.machine_to_node(machine, found)
    cluster = loads(dumps(discovery.merge_nodes([node])))
    ranks = [node.name] * node.num_devices
    layout = group_planner.lay_out_ranks(cluster, cost.group_network(cluster, ranks), ranks)
    assert layout.groups[0][0] == found.leader
