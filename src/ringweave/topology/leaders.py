"""Which NIC of a node is used first, and which of its devices leads on a NIC: the one place that decides it.

Planning asks here. Discovery, which sees the whole tree of a machine, puts its answer into the node that it writes:
`Nic.nearest`, where NUMA nodes alone would not give the same.
"""

from collections.abc import Sequence

from ringweave.topology.cluster import Nic, Node


def preferred(nics: Sequence[Nic]) -> list[Nic]:
    """The NICs, the one to use first: RDMA before none, then the higher rate, then the first."""
    return sorted(nics, key=lambda nic: (not nic.rdma, -nic.rate_bytes_per_s))


def nearest(node: Node, nic: Nic) -> list[int]:
    """Indices of the node's devices, the one that should lead on the NIC first; ties by index."""
    return sorted(range(node.num_devices), key=lambda index: (remoteness(node, nic, index), index))


def remoteness(node: Node, nic: Nic, device_index: int) -> int:
    """How far a device is from a NIC, to compare devices or NICs of one node.

    Its place in the order that the node tells (`Nic.nearest`), devices that are not in it after those that are; else 0
    on the NIC's NUMA node and 1 elsewhere, also where one of the two is not known.
    """
    if nic.nearest:
        return nic.nearest.index(device_index) if device_index in nic.nearest else len(nic.nearest)
    return 0 if nic.numa is not None and node.devices[device_index].numa == nic.numa else 1


def reason(node: Node, nic: Nic, device_index: int) -> str:
    """Why this device leads on the NIC, in words that follow its name: "on NUMA node 1, as ib0 is"."""
    if node.num_devices == 1:
        return "the only device of its node"
    far = [remoteness(node, nic, index) for index in range(node.num_devices)]
    alike = ", the first of those that are" if far.count(far[device_index]) > 1 else ""
    if nic.nearest:
        return f"nearest to {nic.name}, by the order that the node tells{alike}"
    if nic.numa is not None and node.devices[device_index].numa == nic.numa:
        return f"on NUMA node {nic.numa}, as {nic.name} is{alike}"
    return f"the first device: nothing is told that is nearer to {nic.name}"
