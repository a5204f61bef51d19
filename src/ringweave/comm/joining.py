"""The process group that training happens in: the one that there is, or one made from what the launcher says."""

from collections.abc import Mapping

import torch.distributed as dist

from ringweave import topology
from ringweave.comm import members
from ringweave.environment import WorkerEnvironment


def join(environ: Mapping[str, str]) -> None:
    """Make the process group if the script has none; a script that nobody launched is a world of one."""
    if dist.is_initialized():
        return
    if "RANK" in environ:
        dist.init_process_group("ringweave")
    else:
        dist.init_process_group("ringweave", store=dist.HashStore(), rank=0, world_size=1)


def assumed_speed(environment: WorkerEnvironment, environ: Mapping[str, str]) -> float:
    """Relative speed of this rank's device in the cluster file; 1.0 where nobody described it.

    Raises:
        PlacementError: This process fits no node of the cluster.
        ClusterError: The cluster file is wrong.
    """
    if environment.cluster_path is None:
        return 1.0
    cluster = topology.load(environment.cluster_path)
    name = members.own_place(environment, environ).node
    node = next(node for node in cluster.nodes if node.name == name)
    local_rank = environ.get("LOCAL_RANK", "0")
    return topology.device_of(node, int(local_rank) if local_rank.isdecimal() else 0).speed
