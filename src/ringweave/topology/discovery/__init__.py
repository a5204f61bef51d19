"""What is in a machine, how far its devices are from its NICs, and which device leads.

`observe` looks at this machine, `read_file` reads a topology file of hwloc or NCCL; `choose` decides the NIC and the
leader and says why; `to_node` and `merge` make a cluster of it.
"""

from ringweave.topology.discovery.choosing import Candidate, Leadership, choose, equals
from ringweave.topology.discovery.describing import describe, document
from ringweave.topology.discovery.distances import Way, way
from ringweave.topology.discovery.machine import Interface, Machine, Part, Worker
from ringweave.topology.discovery.nodes import assumptions, merge, to_node, with_workers
from ringweave.topology.discovery.rating import Rated, measured
from ringweave.topology.discovery.readers import observe, observe_links, read_file
from ringweave.topology.discovery.visible import limit

__all__ = [
    "Candidate",
    "Interface",
    "Leadership",
    "Machine",
    "Part",
    "Rated",
    "Way",
    "Worker",
    "assumptions",
    "choose",
    "describe",
    "document",
    "equals",
    "limit",
    "measured",
    "merge",
    "observe",
    "observe_links",
    "read_file",
    "to_node",
    "way",
    "with_workers",
]
