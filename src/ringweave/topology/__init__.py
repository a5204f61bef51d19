"""Cluster topology: nodes, devices, NICs and the tree of switches between them; the cluster file; placement of ranks.

`load` reads a cluster file, `one_machine` makes the cluster of a run on this machine alone, and `place_rank` finds the
node of a worker. A `Cluster` is frozen, and its constructor checks it.
"""

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
from ringweave.topology.cluster_file import dumps, load, loads
from ringweave.topology.placement import device_of_local_rank, place_rank

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
