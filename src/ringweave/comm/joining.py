"""The process group that training happens in: the one that there is, or one made from what the launcher says."""

import atexit
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch.distributed as dist

from ringweave import topology
from ringweave.comm import members
from ringweave.environment import WorkerEnvironment
from ringweave.planning import central


def join(environ: Mapping[str, str]) -> None:
    """Make the process group if the script has none; a script that nobody launched is a world of one.

    What is made here is ended here, at the end of the script if nobody did before: a Gloo thread that outlives the
    interpreter aborts the process now and then.
    """
    if dist.is_initialized():
        return
    atexit.register(_end)  # before the group's own, so that it comes after: that one waits for what is under way
    if "RANK" in environ:
        dist.init_process_group("ringweave")
    else:
        dist.init_process_group("ringweave", store=dist.HashStore(), rank=0, world_size=1)


def _end() -> None:
    with contextlib.suppress(RuntimeError):
        if dist.is_initialized():
            dist.destroy_process_group()


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumed:
    """What the cluster file says of this rank; JSON has no infinity, so None is what nobody described."""

    speed: float = 1.0
    """Relative speed of its device."""
    rate: float | None = None
    """Bytes per second of its node's NICs."""
    server_rate: float | None = None
    """What the node that is connected best can receive, where the parameter server is."""
    uplinks: dict[str, float] = field(default_factory=dict)
    """Name of each switch above its node, the nearest first -> bytes per second of that one's uplink."""
    server_uplinks: dict[str, float] = field(default_factory=dict)
    """Likewise of the node that is connected best."""


def assumed(environment: WorkerEnvironment, environ: Mapping[str, str]) -> Assumed:
    """What is known before anything is measured.

    Raises:
        PlacementError: This process fits no node of the cluster.
        ClusterError: The cluster file is wrong.
    """
    if environment.cluster_path is None:
        return Assumed()
    cluster = topology.load(environment.cluster_path)
    name = members.own_place(environment, environ).node
    node = next(node for node in cluster.nodes if node.name == name)
    local_rank = environ.get("LOCAL_RANK", "0")
    device = topology.device_of(node, int(local_rank) if local_rank.isdecimal() else 0)
    if cluster.num_nodes == 1:
        return Assumed(speed=device.speed)
    best = central.best_connected(cluster)
    return Assumed(
        speed=device.speed,
        rate=node.rate_bytes_per_s,
        server_rate=best.inflow_bytes_per_s,
        uplinks=_uplinks(cluster, name),
        server_uplinks=_uplinks(cluster, best.node),
    )


def _uplinks(cluster: topology.Cluster, node: str) -> dict[str, float]:
    rates = {switch.name: switch.uplink_bytes_per_s for switch in cluster.switches}
    return {name: rates[name] for name in cluster.ancestors(node) if name in rates}
