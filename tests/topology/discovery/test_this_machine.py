from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringweave.errors import UsageError
from ringweave.topology import Device, Nic, Node, Switch, discovery
from ringweave.topology.discovery import observation, sysfs
from ringweave.topology.discovery.sysfs import LinkFacts


@pytest.fixture
def sys_root(tmp_path: Path) -> Path:
    """Two NUMA nodes; behind a switch of the second a GPU and an InfiniBand adapter; a plain NIC on the first."""

    def device(path: str, numa: int, **files: str) -> Path:
        folder = tmp_path / "devices" / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in (files | {"numa_node": str(numa)}).items():
            (folder / name).write_text(text + "\n")
        link = tmp_path / "bus" / "pci" / "devices" / folder.name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(folder)
        return folder

    def of_class(name: str, kind: str, folder: Path, **files: str) -> None:
        at = folder / kind / name
        at.mkdir(parents=True)
        for file, text in files.items():
            target = at / file.replace("__", "/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text + "\n")
        (tmp_path / "class" / kind).mkdir(parents=True, exist_ok=True)
        (tmp_path / "class" / kind / name).symlink_to(at)

    for numa in (0, 1):
        node = tmp_path / "devices" / "system" / "node" / f"node{numa}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(f"{numa}\n")
    plain = device("pci0000:00/0000:00:03.0", 0, **{"class": "0x020000", "vendor": "0x8086", "device": "0x1521"})
    of_class("eth0", "net", plain, address="02:00:00:00:00:01")
    device("pci0000:80/0000:80:01.0", 1, **{"class": "0x060400"})
    device("pci0000:80/0000:80:01.0/0000:81:00.0", 1, **{"class": "0x060400"})
    below = "pci0000:80/0000:80:01.0/0000:81:00.0"
    device(f"{below}/0000:82:00.0", 1, **{"class": "0x030200", "vendor": "0x10de", "device": "0x20b0"})
    fabric = device(f"{below}/0000:83:00.0", 1, **{"class": "0x020700", "vendor": "0x15b3", "device": "0x101b"})
    state = {"ports__1__state": "4: ACTIVE", "ports__1__rate": "200 Gb/sec (4X HDR)"}
    of_class("mlx5_0", "infiniband", fabric, **state, ports__1__link_layer="InfiniBand")
    return tmp_path


def test_sysfs(sys_root: Path) -> None:
    machine = sysfs.read_sysfs(sys_root, name="host")
    found = discovery.choose_leader(machine)
    nic = machine.interfaces[found.interface or 0]
    assert (nic.name, nic.has_rdma, nic.is_up, nic.rate_bytes_per_s) == ("mlx5_0", True, True, 25e9)
    assert [(worker.name, worker.bus) for worker in machine.workers] == [("gpu0", "0000:82:00.0")]
    way = found.candidates[0].path
    assert way is not None
    assert (way.num_hops, way.path_class) == (2, "PIX")
    assert machine.numa_of(nic.part) == 1


def test_what_the_kernel_says_of_links(sys_root: Path) -> None:
    machine = sysfs.read_sysfs(sys_root, name="host")
    mac = "02:00:00:00:00:01"
    own = LinkFacts(
        is_up=True, rate_bytes_per_s=1.25e8, addresses=("10.0.0.1",), is_loopback=False, hardware_address=mac
    )
    seen = sysfs.add_link_facts(
        machine, {"eth0": own, "lo": LinkFacts(is_up=True, rate_bytes_per_s=None, addresses=(), is_loopback=True)}
    )
    assert [nic.name for nic in seen.interfaces] == ["eth0", "mlx5_0"]
    assert seen.interfaces[0].rate_bytes_per_s == 1.25e8


def test_an_interface_of_another_namespace_is_not_taken_for_the_card_of_the_same_name(sys_root: Path) -> None:
    machine = sysfs.read_sysfs(sys_root, name="host")
    veth = LinkFacts(
        is_up=True,
        rate_bytes_per_s=1.25e9,
        addresses=("10.99.0.1",),
        is_loopback=False,
        hardware_address="0a:00:00:00:00:09",
    )
    seen = sysfs.add_link_facts(machine, {"eth0": veth})
    last = seen.interfaces[-1]
    assert (last.name, last.is_virtual, last.part, last.rate_bytes_per_s) == ("eth0", True, None, None)
    found = discovery.choose_leader(seen, "eth0")
    assert "where eth0 is attached is not known" in found.leader_reason


def test_nvml_adds_models_and_nvlinks(sys_root: Path) -> None:
    class NVMLError(Exception):
        pass

    calls: list[str] = []

    def state(handle: Any, link: int) -> int:
        if link == 2:
            raise NVMLError
        return 1

    def instance(handle: Any, index: int) -> int:
        if index == 1:
            raise NVMLError
        return index

    fake = SimpleNamespace(
        NVMLError=NVMLError,
        NVML_NVLINK_MAX_LINKS=18,
        nvmlInit=lambda: calls.append("init"),
        nvmlShutdown=lambda: calls.append("shutdown"),
        nvmlDeviceGetHandleByPciBusId=lambda bus: bus,
        nvmlDeviceGetName=lambda handle: b"A100",
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle.decode()}" if isinstance(handle, bytes) else f"MIG-{handle}",
        nvmlDeviceGetMaxMigDeviceCount=lambda handle: 3,
        nvmlDeviceGetMigDeviceHandleByIndex=instance,
        nvmlDeviceGetNvLinkState=state,
        nvmlDeviceGetNvLinkRemotePciInfo=lambda handle, link: SimpleNamespace(busId=f"00000000:C{link}:00.0"),
    )
    worker = observation.add_nvml_details(sysfs.read_sysfs(sys_root, name="host"), fake).workers[0]
    assert worker.model == "A100"
    assert worker.uuids == ("GPU-0000:82:00.0", "MIG-0", "MIG-2")
    assert worker.nvlinks is not None
    assert (worker.nvlinks.num_links, worker.nvlinks.peers) == (2, ("0000:c0:00.0", "0000:c1:00.0"))
    assert calls == ["init", "shutdown"]


def test_this_machine_has_a_leader_with_a_reason() -> None:
    """Beside /sys itself: a NIC is so many PCI functions below its host bridge, which hangs on a NUMA node or none."""
    machine = sysfs.read_sysfs(Path("/sys"), name="here")
    found = discovery.choose_leader(machine)
    document = discovery.machine_document(machine, found)
    rows = [row for row in document["hops"] if row["hops"] is not None and row["device"].startswith("NUMA ")]
    for row in rows:
        device = Path("/sys/class/net", row["nic"], "device")
        bridge, *functions = [part for part in device.resolve().parts if part.startswith("pci") or part.count(":") == 2]
        numa = int((device / "numa_node").read_text()) if (device / "numa_node").exists() else -1
        to_bridge = 2 if numa < 0 else 1 if row["device"] == f"NUMA {numa}" else 3
        assert bridge.startswith("pci")
        assert row["hops"] == to_bridge + len(functions), row
    nearest = min((row["hops"] for row in rows if row["nic"] == document["nic"]), default=None)
    leader = machine.workers[found.leader].name
    assert document["leader"] == leader
    if nearest is not None and leader.startswith("NUMA "):
        assert document["leader_reason"].startswith(f"{leader} leads: {nearest} hops to {document['nic']} ")


def test_an_unknown_nic_is_refused_with_those_there_are(sys_root: Path) -> None:
    with pytest.raises(
        UsageError, match=r'--nic: .eth1., expected a NIC of host \(eth0, mlx5_0\). Did you mean "eth0"'
    ):
        discovery.choose_leader(sysfs.read_sysfs(sys_root, name="host"), "eth1")


def test_workers_of_a_node() -> None:
    gpus = (Device(kind="cuda", numa=0), Device(kind="cuda", numa=1))
    node = Node(name="a", devices=gpus, nics=(Nic(name="ib0", rate_bytes_per_s=1e9, numa=0, nearest=(1, 0)),))
    assert discovery.node_with_workers(node, 1).nics[0].nearest == (0,)
    shared = discovery.node_with_workers(node, 4)
    assert [device.numa for device in shared.devices] == [0, 1, 0, 1]
    assert shared.nics[0].nearest == (1, 3, 0, 2)
    cpus = Node(name="b", devices=(Device(numa=0), Device(numa=1)), nics=(Nic(name="eth0", rate_bytes_per_s=1e9),))
    assert discovery.node_with_workers(cpus, 3).devices == (Device(),) * 3
    alone = Node(name="c", devices=(Device(numa=0),), nics=cpus.nics)
    assert discovery.node_with_workers(alone, 2).devices == (Device(numa=0),) * 2


def test_merge_takes_switches() -> None:
    nics = (Nic(name="eth0", rate_bytes_per_s=1e9), Nic(name="eth1", rate_bytes_per_s=3e9))
    nodes = [Node(name=name, devices=(Device(),), nics=nics) for name in ("a", "b")]
    switches = [Switch(name="r0", uplink_bytes_per_s=1e9)]
    cluster = discovery.merge_nodes(nodes, switches=switches, switch_of_node={"a": "r0"})
    assert [node.switch for node in cluster.nodes] == ["r0", None]
    assert cluster.nodes[1].nics == nics


def test_gpudirect_goes_before_hops(tmp_path: Path) -> None:
    """gpu0 is one port nearer to the NIC's switch by hops but states that GPUDirect does not work."""
    text = """<system version="1"><cpu numaid="0"><pci busid="0000:01:00.0" class="0x060400">
      <pci busid="0000:02:00.0" class="0x030200" vendor="0x10de"><gpu dev="0" gdr="0"/></pci>
      <pci busid="0000:03:00.0" class="0x020700"><nic><net name="mlx5_0" speed="200000" gdr="1"/></nic></pci>
      <pci busid="0000:04:00.0" class="0x060400">
        <pci busid="0000:05:00.0" class="0x030200" vendor="0x10de"><gpu dev="1" gdr="1"><nvlink target="0000:02:00.0"
          count="4" tclass="0x030200"/></gpu></pci></pci>
    </pci></cpu></system>"""
    path = tmp_path / "dump.xml"
    path.write_text(text)
    machine = discovery.read_file(path)
    found = discovery.choose_leader(machine)
    assert machine.workers[found.leader].name == "cuda1"
    assert [(each.path and (each.path.num_hops, each.path.path_class)) for each in found.candidates] == [
        (3, "PXB"),
        (2, "PIX"),
    ]
    assert "reaches its memory directly (GPUDirect RDMA), which is preferred" in found.leader_reason
    assert machine.interfaces[0].rate_bytes_per_s == 25e9
    assert machine.workers[1].nvlinks is not None
    assert machine.workers[1].nvlinks.num_links == 4


def test_an_address_that_several_nodes_share_is_left_out() -> None:
    nic = (Nic(name="eth0", rate_bytes_per_s=1e9),)
    nodes = [
        Node(name=n, devices=(Device(),), nics=nic, address=f"10.0.0.{i}") for n, i in (("a", 1), ("b", 1), ("c", 2))
    ]
    assert [node.address for node in discovery.merge_nodes(nodes).nodes] == [None, None, "10.0.0.2"]


def test_hwloc_says_no_less_than_sysfs(sys_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """hwloc's tree, with the rate of the RDMA port and GPUDirect, of which only sysfs tells."""
    xml = """<topology version="2.0"><object type="Machine"><object type="Bridge" bridge_pci="0000:[80-83]">
      <object type="Bridge" bridge_pci="0000:[81-83]" pci_busid="0000:80:01.0">
      <object type="PCIDev" pci_busid="0000:82:00.0" pci_type="0302 [10de:20b0] [0000:0000] a1"/>
      <object type="PCIDev" pci_busid="0000:83:00.0" pci_type="0207 [15b3:101b] [0000:0000] 00">
        <object type="OSDev" name="mlx5_0" osdev_type="3"/></object>
    </object></object></object></topology>"""
    (sys_root / "module" / "nvidia_peermem").mkdir(parents=True)
    monkeypatch.setattr(observation, "_SYSFS", sys_root)
    monkeypatch.setattr(observation, "find_lstopo", lambda: "/usr/bin/lstopo")
    monkeypatch.setattr(observation, "run_lstopo", lambda program: xml.encode())
    machine = discovery.observe()
    assert machine.source == "/usr/bin/lstopo (hwloc 2.0)"
    (port,) = (nic for nic in machine.interfaces if nic.name == "mlx5_0")
    assert (port.rate_bytes_per_s, port.is_up, port.has_rdma, port.is_infiniband) == (25e9, True, True, True)
    assert [worker.has_gpudirect for worker in machine.workers] == [True]
    found = discovery.choose_leader(machine)
    assert "RDMA over InfiniBand, link up, 200Gbit/s" in found.interface_reason
    assert "mlx5_0 reaches its memory directly (GPUDirect RDMA), which is preferred" in found.leader_reason
