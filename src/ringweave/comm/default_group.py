"""Default process group: the script's own, or one made from the launcher's environment; and this rank's description."""

import atexit
import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ringweave import topology
from ringweave.comm import group_info
from ringweave.environment import WorkerEnvironment
from ringweave.planning import group_planner


def ensure_process_group(environ: Mapping[str, str]) -> None:
    """Make the process group if the script has none; a script without a launcher is a world of one.

    The group made here is destroyed at exit, unless the script destroyed it: a Gloo thread that outlives the
    interpreter sometimes aborts the process.
    """
    if dist.is_initialized():
        return
    # Registered before the group's own hook, so that it runs after it: that one waits for running collectives.
    atexit.register(_destroy_at_exit)
    if "RANK" in environ:
        dist.init_process_group("ringweave")
    else:
        dist.init_process_group("ringweave", store=dist.HashStore(), rank=0, world_size=1)


def use_gpu_of(devices: Iterable[torch.device]) -> None:
    """Make the one GPU among these devices the current one of this thread; no effect without one, or with several.

    What takes no device takes the current one: NCCL's first call, events, random numbers, a script's `.cuda()`. Each
    thread begins with the first GPU of the node, where every rank would make a context of several hundred MB.
    """
    gpus = {device for device in devices if device.type == "cuda" and device.index is not None}
    if len(gpus) == 1:
        torch.cuda.set_device(gpus.pop())


def _destroy_at_exit() -> None:
    with contextlib.suppress(RuntimeError):
        if dist.is_initialized():
            dist.destroy_process_group()


@dataclass(frozen=True, kw_only=True, slots=True)
class DescribedRank:
    """Description of this rank by the cluster file; None where it says nothing, as JSON has no infinity."""

    speed: float = 1.0
    rate: float | None = None
    server_rate: float | None = None
    """Bytes per second that the best connected node can receive; the parameter server is there."""
    uplinks: dict[str, float] = field(default_factory=dict)
    """Name of each switch above its node, nearest first -> bytes per second of its uplink."""
    server_uplinks: dict[str, float] = field(default_factory=dict)
    """The same for the best connected node."""


def describe_rank(environment: WorkerEnvironment, environ: Mapping[str, str]) -> DescribedRank:
    """Return the cluster file's description of this rank, before any measurement.

    Raises:
        PlacementError: This process fits no node of the cluster.
        ClusterError: The cluster file is wrong.
    """
    if environment.cluster_path is None:
        return DescribedRank()
    cluster = topology.load(environment.cluster_path)
    name = group_info.locate_process(environment, environ).node
    node = next(node for node in cluster.nodes if node.name == name)
    local_rank = environ.get("LOCAL_RANK", "0")
    device = topology.device_of_local_rank(node, int(local_rank) if local_rank.isdecimal() else 0)
    if cluster.num_nodes == 1:
        return DescribedRank(speed=device.speed)
    best = group_planner.find_best_connected(cluster)
    return DescribedRank(
        speed=device.speed,
        rate=node.rate_bytes_per_s,
        server_rate=best.inflow_bytes_per_s,
        uplinks=_uplink_rates(cluster, name),
        server_uplinks=_uplink_rates(cluster, best.node),
    )


def _uplink_rates(cluster: topology.Cluster, node: str) -> dict[str, float]:
    rates = {switch.name: switch.uplink_bytes_per_s for switch in cluster.switches}
    return {name: rates[name] for name in cluster.ancestors(node) if name in rates}
