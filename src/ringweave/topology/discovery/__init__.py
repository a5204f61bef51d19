"""Hardware discovery: devices and NICs of a machine, their distances, and the device that leads.

`observe` reads this machine and `read_file` reads a topology file of hwloc or NCCL. `choose_leader` decides the NIC and
the leader and gives reasons. `machine_to_node` and `merge_nodes` make a cluster of machines.
"""

from ringweave.topology.discovery.leader_choice import (
    LeaderChoice,
    NodesWithRates,
    choose_leader,
    device_path,
    equivalent_interfaces,
    with_measured_rates,
)
from ringweave.topology.discovery.machine import ComputeDevice, Machine, MachinePart, NetworkInterface
from ringweave.topology.discovery.observation import observe, observe_links, read_file
from ringweave.topology.discovery.report import describe_machine, machine_document
from ringweave.topology.discovery.to_cluster import (
    assumed_rate_remarks,
    limit_to_visible_gpus,
    machine_to_node,
    merge_nodes,
    node_with_workers,
)
