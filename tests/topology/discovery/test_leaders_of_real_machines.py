"""Leaders of real machines, each derived by hand from its file before the program was asked.

Hops are edges of the tree; "+2" below is the way from one NUMA node up to the machine and down to another.
"""

from pathlib import Path

import pytest

from ringweave import cost
from ringweave.planning import group_planner
from ringweave.topology import discovery
from tests.topology.discovery.leading import check_leader, check_planned_leader

FILES = Path(__file__).parents[4] / "shared" / "topologies"
pytestmark = pytest.mark.skipif(not FILES.is_dir(), reason="the files of real machines are not beside the repository")

EXPECTED = {
    # Two packages, each a NUMA node. Cisco VICs deep below switches; three have a usnic device with an active port and
    # so bypass the kernel, which puts the first of them (eth4) before the i350 ports eth0 and eth1. Package 0, host
    # bridge, 00:03.0, 06:00.0, 07:01.0, 09:00.0, 0a:00.0, 0b:00.0: 7 edges. The other package: 7 + 2.
    "16intel64-manyVFs.xml": ("eth4", "NUMA 0", [(7, "PHB"), (9, "SYS")]),
    # ConnectX (0c06, mlx4_0) below root port 00:05.0 of package 0; ib0 is its InfiniBand port, eth2 its other one.
    # Tesla 06:00.0 below 00:07.0 of the same host bridge: up 2, down 2. The Teslas 11:00.0 and 14:00.0 are below the
    # other package: port, host bridge, package, machine and the same down: 8. The ATI ES1000 only shows a screen.
    "24em64t-2n6c2t-pci.xml": ("ib0", "gpu0", [(4, "PHB"), (8, "SYS"), (8, "SYS")]),
    # mlx5_0 (ib0) and the K40m 84:00.0 (cuda0) are both below 80:03.0: 2 edges, no host bridge. 83:00.0 is below
    # another port of the same host bridge: 4. 03:00.0 is on the other package: 8. The Radeon 84:00.1 is as near as
    # cuda0, but only OpenCL knows it. NUMA nodes alone would have taken 83:00.0.
    "32em64t-2n8c2t-pci-normalio.xml": ("ib0", "cuda0", [(8, "SYS"), (4, "PHB"), (2, "PIX")]),
    # qib0 below 40:03.0, whose host bridge belongs to the group of packages 1 and 3: package, group, host bridge,
    # port, NIC: 4 edges for both; the first leads. From the other group +2. No GPU (a Matrox shows the screen).
    "40intel64-2g2n4c+pcilocality.xml": ("ib0", "NUMA 1", [(6, "SYS"), (4, "PHB"), (6, "SYS"), (4, "PHB")]),
    # Four groups, each a NUMA node with two Broadcom ports; all eight are alike, so the first, eth0, is used. Group,
    # host bridge, 00:1c.0, NIC: 3 edges; other groups +2.
    "96em64t-4n4d3ca2co-pci.xml": ("eth0", "NUMA 0", [(3, "PHB"), (5, "SYS"), (5, "SYS"), (5, "SYS")]),
    # InfiniBand 51:00.0 straight on the host bridge of package 1, which is NUMA node 0: 2 edges. Package 0: +2.
    "devel09-pci.xml": ("ib0", "NUMA 0", [(2, "PHB"), (4, "SYS")]),
    # Four switches, each with an EFA adapter and two GPUs: 2 edges by the switch. The other switch of the same cpu: 4
    # by the cpu. The other cpu: 6. The adapters are alike, the first is used; its two GPUs tie, the first leads.
    "aws-p4d-24xl-topo.xml": ("0000:10:1b.0", "gpu0", [(2, "PIX")] * 2 + [(4, "PHB")] * 2 + [(6, "SYS")] * 4),
    # Functions without a class: which are GPUs and which is the NIC stands in no line of the file.
    "aws-g5.48xl-topo.xml": (None, "NUMA 0", [None, None]),
    # One package, no PCI at all.
    "nvidia-dgx-gb10.xml": (None, "NUMA 0", [None]),
    # 16 GPUs and 12 NVSwitches, but no NIC in the file.
    "nvidiaDGX2.xml": (None, "nvml0", [None] * 16),
}


def test_every_file_is_expected() -> None:
    assert {path.name for path in FILES.glob("*.xml")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_leader_and_hops(name: str) -> None:
    nic, leader, hops = EXPECTED[name]
    found, text = check_leader(FILES / name, nic, leader, hops)
    assert "first of" in text or "hops to" in text or "the only device" in text
    if nic is None:
        assert "without a NIC there are no distances" in found.leader_reason


@pytest.mark.parametrize("name", [name for name, (nic, _, _) in EXPECTED.items() if nic])
def test_planning_takes_the_same_leader_from_the_written_file(name: str) -> None:
    check_planned_leader(FILES / name)


def test_order_is_written_only_where_numa_nodes_do_not_tell_it() -> None:
    def written(name: str) -> list[tuple[int, ...]]:
        machine = discovery.read_file(FILES / name)
        return [nic.nearest for nic in discovery.machine_to_node(machine, discovery.choose_leader(machine)).nics]

    assert written("24em64t-2n6c2t-pci.xml") == [()]
    assert written("32em64t-2n8c2t-pci-normalio.xml") == [(2, 1, 0)]
    assert written("aws-p4d-24xl-topo.xml")[:2] == [tuple(range(8)), (2, 3, 0, 1, 4, 5, 6, 7)]


def test_a_leader_for_each_nic_has_the_gpus_of_its_switch() -> None:
    machine = discovery.read_file(FILES / "aws-p4d-24xl-topo.xml")
    cluster = discovery.merge_nodes([discovery.machine_to_node(machine, discovery.choose_leader(machine))])
    ranks = [cluster.nodes[0].name] * 8
    layout = group_planner.lay_out_ranks(cluster, cost.group_network(cluster, ranks), ranks, leader_per_nic=True)
    assert layout.groups == ((0, 1), (2, 3), (4, 5), (6, 7))


def test_a_named_function_of_an_untold_kind_is_the_nic() -> None:
    machine = discovery.read_file(FILES / "aws-g5.48xl-topo.xml")
    found = discovery.choose_leader(machine, "0000:00:15.0")
    assert machine.workers[found.leader].name == "NUMA 1"
    assert "does not tell what 9 PCI functions" in machine.remarks[0]


def test_nvlinks_are_told() -> None:
    machine = discovery.read_file(FILES / "nvidiaDGX2.xml")
    links = machine.workers[0].nvlinks
    assert links is not None
    assert (links.bytes_per_s, links.peers) == (6 * 25e9, ("NVSwitch",) * 6)


def test_the_sample_of_the_manual_is_what_is_printed() -> None:
    path = FILES / "32em64t-2n8c2t-pci-normalio.xml"
    machine = discovery.read_file(path)
    _, *lines = discovery.describe_machine(machine, discovery.choose_leader(machine)).splitlines()
    manual = (Path(__file__).parents[3] / "docs" / "how-to" / "describe-or-discover-a-cluster.md").read_text()
    assert "\n".join(lines) in manual
