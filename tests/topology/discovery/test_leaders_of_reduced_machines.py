"""Leaders of small copies of real machines, derived by hand before the program was asked.

The copies are part of the repository, so the choice is guarded where the files of the real machines are not at hand.
Hops are edges of the tree.
"""

from pathlib import Path

import pytest

from ringweave import cost
from ringweave.planning import group_planner
from ringweave.topology import discovery
from tests.topology.discovery.leading import check_leader, check_planned_leader

FILES = Path(__file__).parent / "files"

EXPECTED = {
    # The adapter and cuda0 are below the same port, 80:03.0: 2 edges, no host bridge. 83:00.0 is below another port of
    # the same host bridge: 4. 03:00.0 is on the other package: port, host bridge, package, machine, and down again: 8.
    "reduced-gpu-beside-infiniband.xml": ("ib0", "cuda0", [(8, "SYS"), (4, "PHB"), (2, "PIX")]),
    # The host bridge belongs to the group of packages 1 and 3: package, group, host bridge, port, adapter: 4 edges for
    # both, and the first of them leads. From the other group also up to the machine and down: 2 more.
    "reduced-groups-of-packages.xml": ("ib0", "NUMA 1", [(6, "SYS"), (4, "PHB"), (6, "SYS"), (4, "PHB")]),
    # 2 edges by the own switch, 4 by the same cpu, 6 by the other one. The adapters are alike, so the first is used.
    "reduced-eight-gpus-four-nics.xml": (
        "0000:10:1b.0",
        "gpu0",
        [(2, "PIX")] * 2 + [(4, "PHB")] * 2 + [(6, "SYS")] * 4,
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_leader_and_hops(name: str) -> None:
    check_leader(FILES / name, *EXPECTED[name])


@pytest.mark.parametrize("name", EXPECTED)
def test_planning_takes_the_same_leader_from_the_written_file(name: str) -> None:
    check_planned_leader(FILES / name)


def test_a_leader_for_each_nic_has_the_gpus_of_its_switch() -> None:
    machine = discovery.read_file(FILES / "reduced-eight-gpus-four-nics.xml")
    cluster = discovery.merge_nodes([discovery.machine_to_node(machine, discovery.choose_leader(machine))])
    ranks = [cluster.nodes[0].name] * 8
    layout = group_planner.lay_out_ranks(cluster, cost.group_network(cluster, ranks), ranks, leader_per_nic=True)
    assert layout.groups == ((0, 1), (2, 3), (4, 5), (6, 7))
