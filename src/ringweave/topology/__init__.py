"""The machines: nodes, devices, NICs and the tree of switches between them; the cluster file; who is on which node.

`load` reads a cluster file, `one_machine` makes the cluster of a run on this machine alone, `place_rank` says where a
worker is. A `Cluster` is frozen and was checked when it was made.
"""

from ringweave.topology.cluster import (
    ASSUMED_RATE_BYTES_PER_S,
    Cluster,
    Device,
    Link,
    Nic,
    Node,
    Switch,
    link_name,
    one_machine,
)
from ringweave.topology.cluster_file import load, loads
from ringweave.topology.placement import device_of, place_rank
from ringweave.topology.rules import CORE
from ringweave.topology.writing import dumps

__all__ = [
    "ASSUMED_RATE_BYTES_PER_S",
    "CORE",
    "Cluster",
    "Device",
    "Link",
    "Nic",
    "Node",
    "Switch",
    "device_of",
    "dumps",
    "link_name",
    "load",
    "loads",
    "one_machine",
    "place_rank",
]
