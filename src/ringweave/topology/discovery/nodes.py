"""From what was discovered to the cluster file: a machine as a node, and the nodes of many machines as a cluster."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ringweave import errors, units
from ringweave.errors import UsageError
from ringweave.topology import hosts, leaders
from ringweave.topology.cluster import ASSUMED_RATE_BYTES_PER_S, DEFAULT_LATENCY_S, Cluster, Device, Nic, Node, Switch
from ringweave.topology.discovery import choosing
from ringweave.topology.discovery.choosing import Leadership
from ringweave.topology.discovery.machine import Interface, Machine


def to_node(machine: Machine, leadership: Leadership, *, name: str | None = None, is_given: bool = False) -> Node:
    """The node of a cluster file that a machine is, with the interface that was chosen and its equals.

    Rates that are not known are assumed (`assumptions` says which).

    Args:
        machine: The machine.
        leadership: What was chosen on it.
        name: Name of the node; None is the machine's own.
        is_given: The interface was named by somebody, so that its equals are left out.

    Raises:
        UsageError: The machine has no interface that could be used.
        ClusterError: Its name cannot be a node's, or it has too many devices.
    """
    if leadership.interface is None:
        raise UsageError(
            errors.explain(
                f"network interface of {machine.name}",
                got="none",
                expected="one that connects it to other nodes, as a cluster file needs",
                do="Run discover on the machine itself, or name a PCI function by --nic",
                where=machine.source,
            )
        )
    devices = tuple(Device(kind=each.kind, numa=machine.numa_of(each.part)) for each in machine.workers)
    used = machine.interfaces[leadership.interface]
    chosen = [used] if is_given else [used, *choosing.equals(machine, used)]
    node = Node(
        name=hosts.node_name(name or machine.name),
        devices=devices,
        nics=tuple(_nic(machine, nic) for nic in chosen),
        address=next(iter(used.addresses), None),
    )
    return replace(node, nics=_with_orders(machine, node, chosen))


def assumptions(machine: Machine, node: Node) -> list[str]:
    """What the node says that nobody told, in sentences."""
    by_name = {nic.name: nic for nic in machine.interfaces}
    return [
        f"the rate of {nic.name} on {node.name} is not known: {units.format_rate(nic.rate_bytes_per_s)} is assumed"
        for nic in node.nics
        if by_name[nic.name].rate_bytes_per_s is None
    ]


def with_workers(node: Node, num_workers: int, gpus: Sequence[int] | None = None) -> Node:
    """The node with as many devices as workers run on it.

    More workers than GPUs share them in turn. Workers without GPUs are wherever the system puts them, so their NUMA
    node is known only where there is a single one.

    Args:
        node: With all devices of the machine.
        num_workers: How many run on it.
        gpus: Of each worker, which of these devices it has; None: LOCAL_RANK i has GPU i, by PCI addresses.

    Raises:
        ClusterError: There are too many workers, or none.
    """
    first = node.devices[0] if node.devices else Device()
    if first.kind == "cpu":
        numa = first.numa if node.num_devices == 1 else None
        nics = tuple(replace(nic, nearest=()) for nic in node.nics)
        bare = replace(node, nics=nics)
        return replace(bare, devices=(replace(first, numa=numa),) * num_workers)
    has = gpus or [index % node.num_devices for index in range(num_workers)]
    devices = tuple(node.devices[index] for index in has)
    shared = [_shared(nic.nearest, has) for nic in node.nics]
    bare = replace(node, nics=tuple(replace(nic, nearest=()) for nic in node.nics), devices=devices)
    return replace(bare, nics=tuple(replace(nic, nearest=order) for nic, order in zip(bare.nics, shared, strict=True)))


def merge(
    nodes: Sequence[Node],
    *,
    name: str = "discovered",
    switches: Sequence[Switch] = (),
    hangs_on: Mapping[str, str] | None = None,
    latency_s: float = DEFAULT_LATENCY_S,
) -> Cluster:
    """The cluster of nodes that were discovered one by one.

    Args:
        nodes: In the order in which ranks are counted.
        name: Name of the cluster.
        switches: Those between the nodes, where somebody found them out; none means that all hang on the root.
        hangs_on: Name of the switch of each node by the node's name; those not in it hang on the root.
        latency_s: Alpha, as measured or the usual one.

    Raises:
        ClusterError: Two nodes have the same name, or a switch is not there.
    """
    above = hangs_on or {}
    told = Counter(node.address for node in nodes)
    # Nodes that share an address are one machine that plays several; the address leads to none of them in particular.
    placed = [
        replace(
            node,
            switch=above.get(node.name, node.switch),
            address=node.address if told[node.address] == 1 else None,
        )
        for node in nodes
    ]
    return Cluster(
        name=name,
        nodes=tuple(placed),
        switches=tuple(switches),
        latency_s=latency_s,
    )


def _nic(machine: Machine, nic: Interface) -> Nic:
    """Of an assumed rate where none is known, though never above that of its PCIe link."""
    assumed = min(ASSUMED_RATE_BYTES_PER_S, nic.bus_bytes_per_s or ASSUMED_RATE_BYTES_PER_S)
    rate = nic.rate_bytes_per_s or assumed
    return Nic(name=nic.name, rate_bytes_per_s=rate, numa=machine.numa_of(*nic.all_parts), rdma=nic.has_rdma)


def _with_orders(machine: Machine, node: Node, chosen: Sequence[Interface]) -> tuple[Nic, ...]:
    """The NICs with the order of devices by hops; as they are where NUMA nodes give the same for all of them."""
    orders = [[candidate.index for candidate in choosing.nearest(machine, nic)] for nic in chosen]
    if all(leaders.nearest(node, nic) == order for nic, order in zip(node.nics, orders, strict=True)):
        return node.nics
    return tuple(replace(nic, nearest=tuple(order)) for nic, order in zip(node.nics, orders, strict=True))


def _shared(order: Sequence[int], has: Sequence[int]) -> tuple[int, ...]:
    """The order of workers by the order of the devices that they have."""
    return tuple(worker for device in order for worker, own in enumerate(has) if own == device)
