"""Cluster topology: nodes, devices, NICs and the tree of switches between them; the cluster file; placement of ranks.

`load` reads a cluster file, `one_machine` makes the cluster of a run on this machine alone, and `place_rank` finds the
node of a worker. A `Cluster` is frozen, and its constructor checks it.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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

CORE = "core"
"""The root switch, which is never declared."""
_MODULES = ("placement", "cluster", "cluster_file")
"""Modules of the public names, the quickest to import first."""


def __getattr__(name: str) -> object:
    """Load public names on first use: a worker without a cluster file starts in less time than their imports take."""
    for module in _MODULES if name in __all__ else ():
        loaded = importlib.import_module(f"{__name__}.{module}")
        if name in vars(loaded):
            return vars(loaded)[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
