"""Bonds, bridges and VLANs are in the place of the NICs that they stand on."""

from pathlib import Path

import pytest

from ringweave.topology import discovery
from ringweave.topology.discovery import ComputeDevice, Machine, MachinePart, NetworkInterface, sysfs
from ringweave.topology.discovery.sysfs import StackedInterface

GIGABIT = 1.25e8
PARTS = (
    MachinePart(kind="machine", name="host"),
    MachinePart(kind="numa", name="NUMA 0", parent=0, numas=(0,)),
    MachinePart(kind="numa", name="NUMA 1", parent=0, numas=(1,)),
    MachinePart(kind="pci", name="NIC 0000:01:00.0", parent=1),
    MachinePart(kind="pci", name="NIC 0000:81:00.0", parent=2),
)
WORKERS = (ComputeDevice(name="NUMA 0", kind="cpu", part=1), ComputeDevice(name="NUMA 1", kind="cpu", part=2))


def nic(
    name: str, part: int | None, *addresses: str, rate: float | None = 10 * GIGABIT, **more: object
) -> NetworkInterface:
    known = {"is_up": True, "is_virtual": part is None} | more
    return NetworkInterface(name=name, part=part, addresses=addresses, rate_bytes_per_s=rate, **known)  # pyrefly: ignore


def machine(*interfaces: NetworkInterface) -> Machine:
    return Machine(name="host", source="a test", parts=PARTS, workers=WORKERS, interfaces=interfaces)


def bonded(mode: str = "802.3ad", active: str = "") -> Machine:
    bond = StackedInterface(
        kind="bond", members=("eth0", "eth1"), owned_members=frozenset({"eth0", "eth1"}), mode=mode, active=active
    )
    found = machine(nic("eth0", 3), nic("eth1", 4), nic("bond0", None, "10.0.0.5", rate=None))
    return sysfs.add_stacks(found, {"bond0": bond})


def test_a_bond_is_used_and_not_its_members() -> None:
    found = bonded()
    chosen = discovery.choose_leader(found)
    assert [each.name for each in found.interfaces] == ["bond0"]
    assert chosen.interface_reason == (
        "bond0 is used between nodes: no RDMA, link up, 20Gbit/s, in the place of eth0, eth1, has an address; "
        "the only one that can be used"
    )
    node = discovery.machine_to_node(found, chosen)
    assert (node.address, [each.rate_bytes_per_s for each in node.nics]) == ("10.0.0.5", [20 * GIGABIT])
    assert found.remarks == ("bond0 (bond of mode 802.3ad) is in the place of eth0, eth1",)


def test_a_bond_is_as_near_as_the_nearest_of_its_members() -> None:
    found = bonded()
    ways = [discovery.device_path(found, worker, found.interfaces[0]) for worker in found.workers]
    assert [each and each.num_hops for each in ways] == [1, 1]
    assert found.numa_of(*found.interfaces[0].all_parts) is None
    text = discovery.describe_machine(found, discovery.choose_leader(found))
    assert text.count("bond0, of eth0, eth1, up, 20Gbit/s, 10.0.0.5") == 2, "at both places of the tree"


@pytest.mark.parametrize(
    ("mode", "active", "rate"),
    [
        ("balance-rr", "", 11 * GIGABIT),
        ("balance-alb", "eth0", 10 * GIGABIT),
        ("active-backup", "eth1", GIGABIT),
        ("balance-tlb", "", 10 * GIGABIT),
        ("broadcast", "", 10 * GIGABIT),
    ],
)
def test_what_a_bond_carries_depends_on_its_mode(mode: str, active: str, rate: float) -> None:
    bond = StackedInterface(
        kind="bond", members=("eth0", "eth1"), owned_members=frozenset({"eth0", "eth1"}), mode=mode, active=active
    )
    found = machine(nic("eth0", 3), nic("eth1", 4, rate=GIGABIT), nic("bond0", None, "10.0.0.5", rate=None))
    (made,) = sysfs.add_stacks(found, {"bond0": bond}).interfaces
    assert made.rate_bytes_per_s == rate


def test_a_member_that_is_down_carries_nothing() -> None:
    bond = StackedInterface(
        kind="bond", members=("eth0", "eth1"), owned_members=frozenset({"eth0", "eth1"}), mode="802.3ad"
    )
    found = machine(nic("eth0", 3), nic("eth1", 4, is_up=False), nic("bond0", None, "10.0.0.5", rate=None))
    (made,) = sysfs.add_stacks(found, {"bond0": bond}).interfaces
    assert made.rate_bytes_per_s == 10 * GIGABIT


def test_a_bridge_on_a_bond_and_one_of_containers() -> None:
    found = machine(
        nic("eth0", 3),
        nic("bond0", None, rate=None),
        nic("br0", None, "10.0.0.5", rate=None),
        nic("veth7", None, rate=None),
        nic("docker0", None, "172.17.0.1", rate=None),
    )
    known = {
        "br0": StackedInterface(kind="bridge", members=("bond0",), owned_members=frozenset({"bond0"})),
        "bond0": StackedInterface(kind="bond", members=("eth0",), owned_members=frozenset({"eth0"}), mode="802.3ad"),
        "docker0": StackedInterface(kind="bridge", members=("veth7",), owned_members=frozenset({"veth7"})),
    }
    made = sysfs.add_stacks(found, known)
    assert [each.name for each in made.interfaces] == ["br0", "veth7", "docker0"]
    assert made.interfaces[0].members == ("eth0",)
    chosen = discovery.choose_leader(made)
    assert [each.name for each in discovery.machine_to_node(made, chosen).nics] == ["br0"]


def test_vlans_share_the_wire_of_their_nic() -> None:
    vlans = {name: StackedInterface(kind="upper", members=("eth0",)) for name in ("eth0.1", "eth0.2")}
    upper = [nic(f"eth0.{index}", None, f"10.0.{index}.5", rate=None) for index in (1, 2)]
    made = sysfs.add_stacks(machine(nic("eth0", 3), *upper), vlans)
    assert made.interfaces[0].name == "eth0.1"
    assert [each.name for each in discovery.machine_to_node(made, discovery.choose_leader(made)).nics] == ["eth0.1"]
    beside = sysfs.add_stacks(machine(nic("eth0", 3, "10.0.0.5"), *upper), vlans)
    assert [each.name for each in beside.interfaces] == ["eth0", "eth0.1", "eth0.2"]
    assert discovery.choose_leader(beside).interface == 0


def test_a_nic_with_an_address_goes_before_a_faster_one_without() -> None:
    found = machine(nic("eth1", 3), nic("eth0", 4, "10.0.0.5", rate=GIGABIT))
    assert found.interfaces[discovery.choose_leader(found).interface or 0].name == "eth0"
    rdma = machine(nic("eth0", 4, "10.0.0.5", rate=GIGABIT), nic("mlx5_0", 3, has_rdma=True, verbs="mlx5_0"))
    assert rdma.interfaces[discovery.choose_leader(rdma).interface or 0].name == "mlx5_0"


def test_software_is_equal_only_to_its_like() -> None:
    used = nic("eth0", None, "10.0.0.5", rate=None, driver="veth")
    twin = nic("eth1", None, "10.0.1.5", rate=None, driver="veth")
    bridge = nic("docker0", None, "172.17.0.1", rate=None, driver="bridge")
    assert discovery.equivalent_interfaces(machine(used, twin, bridge), used) == [twin]


def test_what_the_files_of_the_kernel_say(tmp_path: Path) -> None:
    net = tmp_path / "class" / "net"
    for name in ("bond0/bonding", "br0/bridge", "eth0", "eth1", "eth1.5"):
        (net / name).mkdir(parents=True)
    (net / "bond0" / "lower_eth0").symlink_to(net / "eth0")
    (net / "eth0" / "master").symlink_to(net / "bond0")
    (net / "eth1.5" / "lower_eth1").symlink_to(net / "eth1")
    (net / "bond0" / "bonding" / "mode").write_text("active-backup 1\n")
    (net / "bond0" / "bonding" / "active_slave").write_text("eth0\n")
    (net / "bond0" / "address").write_text("02:00:00:00:00:01\n")
    mac = "02:00:00:00:00:01"
    owned = frozenset({"eth0"})
    assert sysfs.read_stacks(tmp_path) == {
        "bond0": StackedInterface(
            kind="bond",
            members=("eth0",),
            owned_members=owned,
            mode="active-backup",
            active="eth0",
            hardware_address=mac,
        ),
        "eth1.5": StackedInterface(kind="upper", members=("eth1",)),
    }


def test_a_bond_of_another_network_namespace_is_not_taken_for_the_one_of_the_same_name() -> None:
    bond = StackedInterface(
        kind="bond", members=("eth0",), owned_members=frozenset({"eth0"}), hardware_address="02:00:00:00:00:01"
    )
    found = machine(nic("eth0", 3), nic("bond0", None, "10.0.0.5", rate=None, hardware_address="02:00:00:00:00:02"))
    assert sysfs.add_stacks(found, {"bond0": bond}) == found
