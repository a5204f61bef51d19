"""How much CPU time each device of a lab gets, from its speed. Pure."""

from collections.abc import Mapping
from typing import Literal

from ringweave.errors import ClusterError, explain
from ringweave.topology import Cluster

Mode = Literal["auto", "always", "never"]
PERIOD_US = 40_000
"""Short, so that a throttled worker stalls its peers only briefly."""
MIN_QUOTA_US = 1_000
"""Linux refuses less (kernel: Documentation/scheduler/sched-bwc.rst)."""
SHARE = 0.8
"""Part of the machine's CPU time that all devices get together; the rest is for what moves the data."""

Quotas = Mapping[str, tuple[int, ...]]
"""Node -> quota of each device, in microseconds of each period."""


def choose(cluster: Cluster, mode: Mode, num_cpus: int) -> Quotas | None:
    """Quotas in proportion to the devices' speeds; None if there shall be none.

    The fastest device gets at most one CPU, so that the proportions hold for programs of one thread as well.

    Args:
        cluster: Has the speeds.
        mode: `auto` gives quotas only if the speeds differ.
        num_cpus: CPUs of this machine.

    Raises:
        ClusterError: A device would get less than Linux can limit to.
    """
    speeds = [device.speed for node in cluster.nodes for device in node.devices]
    if mode == "never" or (mode == "auto" and len(set(speeds)) == 1):
        return None
    us_per_speed = min(PERIOD_US / max(speeds), SHARE * num_cpus * PERIOD_US / sum(speeds))
    if min(speeds) * us_per_speed < MIN_QUOTA_US:
        raise ClusterError(
            explain(
                f"speed of the slowest device of cluster {cluster.name}",
                got=min(speeds),
                expected=f"at least {MIN_QUOTA_US / us_per_speed:.3g}, so that it gets 1 ms of every 40 ms of CPU time "
                f"({num_cpus} CPUs for {len(speeds)} devices)",
                do="Use fewer devices or speeds closer to each other, or bring the lab up with --quotas never",
            )
        )
    return {node.name: tuple(int(d.speed * us_per_speed) for d in node.devices) for node in cluster.nodes}


def in_cpus(quota_us: int) -> float:
    """A quota as a number of CPUs."""
    return quota_us / PERIOD_US
