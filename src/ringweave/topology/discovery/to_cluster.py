"""Conversion of discovered machines to nodes of a cluster file, and the GPUs that a job's workers see."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ringweave import units
from ringweave.errors import UsageError
from ringweave.files.problems import shorten_names
from ringweave.topology import placement
from ringweave.topology.cluster import ASSUMED_RATE_BYTES_PER_S, DEFAULT_LATENCY_S, Cluster, Device, Nic, Node, Switch
from ringweave.topology.discovery import leader_choice
from ringweave.topology.discovery import machine as discovery_machine
from ringweave.topology.discovery.leader_choice import LeaderChoice
from ringweave.topology.discovery.machine import ComputeDevice, Machine, NetworkInterface


def machine_to_node(
    machine: Machine, leadership: LeaderChoice, *, name: str | None = None, is_given: bool = False
) -> Node:
    """Return the cluster-file node of a machine, with the chosen interface and its equivalents.

    Unknown rates are assumed (`assumed_rate_remarks` lists them).

    `name`: name of the node; None is the machine's own.

    Raises:
        UsageError: The machine has no interface that could be used.
        ClusterError: Its name cannot be a node's, or it has too many devices.
    """
    if leadership.interface is None:
        raise UsageError(
            f"network interface of {machine.name}",
            got="none",
            expected="one that connects it to other nodes, as a cluster file needs",
            do="Run discover on the machine itself, or name a PCI function by --nic",
            where=machine.source,
        )
    devices = tuple(Device(kind=each.kind, numa=machine.numa_of(each.part)) for each in machine.workers)
    used = machine.interfaces[leadership.interface]
    chosen = [used] if is_given else [used, *leader_choice.equivalent_interfaces(machine, used)]
    node = Node(
        name=placement.node_name_of_host(name or machine.name),
        devices=devices,
        nics=tuple(_nic_of_interface(machine, nic) for nic in chosen),
        address=next(iter(used.addresses), None),
    )
    return replace(node, nics=_with_device_orders(machine, node, chosen))


def assumed_rate_remarks(machine: Machine, node: Node) -> list[str]:
    """Return the assumed values of the node, in sentences."""
    by_name = {nic.name: nic for nic in machine.interfaces}
    return [
        f"the rate of {nic.name} on {node.name} is not known: {units.format_rate(nic.rate_bytes_per_s)} is assumed"
        for nic in node.nics
        if by_name[nic.name].rate_bytes_per_s is None
    ]


def node_with_workers(node: Node, num_workers: int, gpus: Sequence[int] | None = None) -> Node:
    """Return the node with one device for each worker that runs on it.

    If there are more workers than GPUs, they share these in turn. The system places workers without GPUs, so their NUMA
    node is known only where there is a single one.

    `gpus`: device index of each worker; None: LOCAL_RANK i has GPU i, by PCI addresses.

    Raises:
        ClusterError: There are too many workers, or none.
    """
    first = node.devices[0] if node.devices else Device()
    if first.kind == "cpu":
        numa = first.numa if node.num_devices == 1 else None
        nics = tuple(replace(nic, nearest=()) for nic in node.nics)
        bare = replace(node, nics=nics)
        return replace(bare, devices=(replace(first, numa=numa),) * num_workers)
    gpu_of_worker = gpus or [index % node.num_devices for index in range(num_workers)]
    devices = tuple(node.devices[index] for index in gpu_of_worker)
    shared = [_worker_order(nic.nearest, gpu_of_worker) for nic in node.nics]
    bare = replace(node, nics=tuple(replace(nic, nearest=()) for nic in node.nics), devices=devices)
    return replace(bare, nics=tuple(replace(nic, nearest=order) for nic, order in zip(bare.nics, shared, strict=True)))


def merge_nodes(
    nodes: Sequence[Node],
    *,
    name: str = "discovered",
    switches: Sequence[Switch] = (),
    switch_of_node: Mapping[str, str] | None = None,
    latency_s: float = DEFAULT_LATENCY_S,
) -> Cluster:
    """Return the cluster of nodes that were discovered one by one.

    Args:
        nodes: In the order in which ranks are counted.
        name: Name of the cluster.
        switches: Switches between the nodes, where known; without any, all nodes are attached to the root.
        switch_of_node: Switch name by node name; other nodes are attached to the root.
        latency_s: Alpha, as measured or the usual one.

    Raises:
        ClusterError: Two nodes have the same name, or a switch is not there.
    """
    switch_by_node = switch_of_node or {}
    address_counts = Counter(node.address for node in nodes)
    # Nodes that share an address are one machine that emulates several; the address identifies none of them.
    placed = [
        replace(
            node,
            switch=switch_by_node.get(node.name, node.switch),
            address=node.address if address_counts[node.address] == 1 else None,
        )
        for node in nodes
    ]
    return Cluster(
        name=name,
        nodes=tuple(placed),
        switches=tuple(switches),
        latency_s=latency_s,
    )


def _nic_of_interface(machine: Machine, nic: NetworkInterface) -> Nic:
    """Return the NIC; an unknown rate is assumed, up to the rate of its PCIe link."""
    assumed = min(ASSUMED_RATE_BYTES_PER_S, nic.bus_bytes_per_s or ASSUMED_RATE_BYTES_PER_S)
    rate = nic.rate_bytes_per_s or assumed
    return Nic(name=nic.name, rate_bytes_per_s=rate, numa=machine.numa_of(*nic.all_parts), rdma=nic.has_rdma)


def _with_device_orders(machine: Machine, node: Node, chosen: Sequence[NetworkInterface]) -> tuple[Nic, ...]:
    """Return the NICs with the order of devices by hops; unchanged where NUMA nodes give the same order for all."""
    orders = [[candidate.index for candidate in leader_choice.leader_candidates(machine, nic)] for nic in chosen]
    if all(placement.nearest_devices(node, nic) == order for nic, order in zip(node.nics, orders, strict=True)):
        return node.nics
    return tuple(replace(nic, nearest=tuple(order)) for nic, order in zip(node.nics, orders, strict=True))


def _worker_order(order: Sequence[int], device_of_worker: Sequence[int]) -> tuple[int, ...]:
    """Return the order of workers that follows from the order of their devices."""
    return tuple(worker for device in order for worker, own in enumerate(device_of_worker) if own == device)


VISIBLE_DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"


def limit_to_visible_gpus(machine: Machine, setting: str | None) -> Machine:
    """Return the machine with the GPUs that PyTorch sees as its devices, in the order of LOCAL_RANK.

    Numbers index the GPUs that NVML lists (in a container fewer than are in the tree), by PCI address; without NVML,
    those of the tree. As in CUDA, the first entry that is no GPU ends the list, and so does a MIG instance, because a
    process can use only one. Where no GPU is left, the devices are processors.

    `setting`: value of CUDA_VISIBLE_DEVICES: numbers, UUIDs or prefixes of UUIDs, of GPUs or MIG instances; None where
    it is not set.

    Source: CUDA C++ Programming Guide, environment variables; NVIDIA MIG User Guide, device names.
    """
    gpus = [worker for worker in machine.workers if worker.kind == "cuda"]
    known = [worker for worker in gpus if worker.uuids]
    if not gpus:
        return machine
    if setting is not None and not known and any(_is_gpu_uuid(entry) for entry in _setting_entries(setting)):
        remark = (
            f"{VISIBLE_DEVICES_VARIABLE}={setting} names UUIDs, which only NVML tells (ringweave[gpu]): "
            "all GPUs are taken"
        )
        return replace(machine, remarks=(*machine.remarks, remark))
    visible = (known or gpus) if setting is None else _visible_gpus(known or gpus, _setting_entries(setting))
    if visible == gpus:
        return machine
    cause = "NVML lists" if setting is None else f"{VISIBLE_DEVICES_VARIABLE}={setting} leaves"
    names = shorten_names([worker.name for worker in visible], len(visible)) or "no GPU"
    workers = visible or discovery_machine.processor_devices(machine.parts)[0]
    remark = f"{cause} {names} of {len(gpus)} GPUs to the workers"
    return replace(machine, workers=tuple(workers), remarks=(*machine.remarks, remark))


def _visible_gpus(gpus: Sequence[ComputeDevice], entries: Sequence[str]) -> list[ComputeDevice]:
    found: list[ComputeDevice] = []
    for entry in entries:
        gpu = _gpu_of_entry(gpus, entry)
        if gpu is None or gpu in found:
            break
        found.append(gpu)
        if entry.startswith("MIG-"):
            break
    return found


def _gpu_of_entry(gpus: Sequence[ComputeDevice], entry: str) -> ComputeDevice | None:
    if entry.isdecimal():
        return gpus[int(entry)] if int(entry) < len(gpus) else None
    if not _is_gpu_uuid(entry):
        return None
    # Up to release 450 of the driver an instance is MIG-GPU-<UUID of the GPU>/<GPU instance>/<compute instance>.
    start = entry.removeprefix("MIG-").partition("/")[0] if entry.startswith("MIG-GPU-") else entry
    matching = [gpu for gpu in gpus if any(uuid.startswith(start) for uuid in gpu.uuids)]
    return matching[0] if len(matching) == 1 else None


def _is_gpu_uuid(entry: str) -> bool:
    return entry.startswith(("GPU-", "MIG-"))


def _setting_entries(setting: str) -> list[str]:
    return [entry.strip() for entry in setting.split(",")]
