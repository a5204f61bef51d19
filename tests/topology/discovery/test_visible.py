"""Which GPUs LOCAL_RANK counts, by CUDA_VISIBLE_DEVICES and what NVML lists."""

from dataclasses import replace
from typing import Any

import pytest

from ringweave.cli import discover
from ringweave.topology import Device, Nic, Node, discovery
from ringweave.topology.discovery import ComputeDevice, Machine, MachinePart, NetworkInterface

NUM_GPUS = 4
PARTS = (
    MachinePart(kind="machine", name="host"),
    MachinePart(kind="numa", name="NUMA 0", parent=0, numas=(0,)),
    MachinePart(kind="numa", name="NUMA 1", parent=0, numas=(1,)),
    *(MachinePart(kind="pci", name=f"GPU {index}", parent=1 + index // 2) for index in range(NUM_GPUS)),
    MachinePart(kind="pci", name="NIC", parent=2),
)
GPUS = tuple(
    ComputeDevice(
        name=f"gpu{index}",
        kind="cuda",
        part=3 + index,
        bus=f"0000:0{index}:00.0",
        uuids=(f"GPU-{index}aa", f"MIG-{index}bb", f"MIG-{index}cc"),
    )
    for index in range(NUM_GPUS)
)
NIC = NetworkInterface(name="eth0", part=7, is_up=True, addresses=("10.0.0.5",), rate_bytes_per_s=1.25e9)
MACHINE = Machine(name="host", source="a test", parts=PARTS, workers=GPUS, interfaces=(NIC,))


def bare(machine: Machine = MACHINE) -> Machine:
    """As without NVML."""
    return replace(machine, workers=tuple(replace(worker, uuids=()) for worker in machine.workers))


def names(machine: Machine) -> list[str]:
    return [worker.name for worker in machine.workers]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, ["gpu0", "gpu1", "gpu2", "gpu3"]),
        ("2,3", ["gpu2", "gpu3"]),
        ("3, 0", ["gpu3", "gpu0"]),
        ("1,-1,2", ["gpu1"]),
        ("1,7,2", ["gpu1"]),
        ("1,1,2", ["gpu1"]),
        ("GPU-3aa,GPU-0", ["gpu3", "gpu0"]),
        ("GPU-", ["NUMA 0", "NUMA 1"]),
        ("MIG-2cc,MIG-3bb", ["gpu2"]),
        ("MIG-GPU-1aa/7/0", ["gpu1"]),
        ("", ["NUMA 0", "NUMA 1"]),
        ("NoDevFiles", ["NUMA 0", "NUMA 1"]),
    ],
)
def test_what_the_variable_leaves(setting: str | None, expected: list[str]) -> None:
    assert names(discovery.limit_to_visible_gpus(MACHINE, setting)) == expected


def test_leader_and_nodes_follow() -> None:
    seen = discovery.limit_to_visible_gpus(MACHINE, "1,3,0")
    found = discovery.choose_leader(seen)
    assert seen.workers[found.leader].name == "gpu3"
    node = discovery.machine_to_node(seen, found)
    assert [device.numa for device in node.devices] == [0, 1, 0]
    assert seen.remarks == ("CUDA_VISIBLE_DEVICES=1,3,0 leaves gpu1, gpu3, gpu0 of 4 GPUs to the workers",)


def test_numbers_count_what_the_driver_lists() -> None:
    """In a container the tree has all GPUs of the host, and NVML those that were given to it."""
    given = (*bare().workers[:2], *GPUS[2:])
    inside = replace(MACHINE, workers=given)
    assert names(discovery.limit_to_visible_gpus(inside, None)) == ["gpu2", "gpu3"]
    assert names(discovery.limit_to_visible_gpus(inside, "1")) == ["gpu3"]
    assert discovery.limit_to_visible_gpus(inside, None).remarks == ("NVML lists gpu2, gpu3 of 4 GPUs to the workers",)


def test_without_nvml_numbers_count_the_tree_and_uuids_say_nothing() -> None:
    assert names(discovery.limit_to_visible_gpus(bare(), "2")) == ["gpu2"]
    unknown = discovery.limit_to_visible_gpus(bare(), "GPU-3aa")
    assert names(unknown) == ["gpu0", "gpu1", "gpu2", "gpu3"]
    told = "CUDA_VISIBLE_DEVICES=GPU-3aa names UUIDs, which only NVML tells (ringweave[gpu]): all GPUs are taken"
    assert unknown.remarks == (told,)


def test_a_machine_without_gpus_has_nothing_to_hide() -> None:
    cpu = replace(MACHINE, workers=(ComputeDevice(name="NUMA 0", kind="cpu", part=1),))
    assert discovery.limit_to_visible_gpus(cpu, "0") is cpu


def test_workers_of_which_each_has_a_gpu_of_its_own() -> None:
    gpus = tuple(Device(kind="cuda", numa=index // 2) for index in range(NUM_GPUS))
    nic = Nic(name="eth0", rate_bytes_per_s=1e9, numa=1, nearest=(3, 2, 0, 1))
    node = discovery.node_with_workers(Node(name="a", devices=gpus, nics=(nic,)), 3, [1, 3, 0])
    assert [device.numa for device in node.devices] == [0, 1, 0]
    assert node.nics[0].nearest == (1, 2, 0)


@pytest.mark.parametrize(
    ("setting", "local_rank", "gpu"), [("2,3", "0", 2), ("2,3", "1", 3), ("3", "1", 3), (None, "1", 1), ("", "0", None)]
)
def test_what_a_rank_says_is_its_gpu(
    setting: str | None, local_rank: str, gpu: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all GPUs of its node in one variable, or with its own alone as Slurm may have it."""
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    seen = discovery.limit_to_visible_gpus(MACHINE, setting)
    told: dict[str, Any] = discover._host_report(MACHINE, seen, discovery.choose_leader(seen), is_given=False)
    assert told["gpu"] == gpu
    (node,) = discover._merge_hosts([told, told])
    assert [device.kind for device in node.devices] == ["cpu" if gpu is None else "cuda"] * 2
    if gpu is not None:
        assert [device.numa for device in node.devices] == [gpu // 2] * 2
