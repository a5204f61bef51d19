"""Cluster topology: nodes, devices, NICs and the tree of switches between them; the cluster file; placement of ranks.

`load` reads a cluster file, `one_machine` makes the cluster of a run on this machine alone, and `place_rank` finds the
node of a worker. A `Cluster` is frozen, and its constructor checks it.
"""

from typing import TYPE_CHECKING

from ringweave.topology.cluster import (
    ASSUMED_RATE_BYTES_PER_S,
    CORE,
    Cluster,
    Device,
    Link,
    Nic,
    Node,
    Switch,
    link_name,
    one_machine,
)
from ringweave.topology.placement import device_of_local_rank, place_rank

if TYPE_CHECKING:
    from ringweave.topology.cluster_file import dumps, load, loads

__all__ = [
    "ASSUMED_RATE_BYTES_PER_S",
    "CORE",
    "Cluster",
    "Device",
    "Link",
    "Nic",
    "Node",
    "Switch",
    "device_of_local_rank",
    "dumps",
    "link_name",
    "load",
    "loads",
    "one_machine",
    "place_rank",
]


def __getattr__(name: str) -> object:
    """Load the cluster file's functions on first use: their imports take longer than the start of a worker without."""
    if name in ("dumps", "load", "loads"):
        from ringweave.topology import cluster_file

        return getattr(cluster_file, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
