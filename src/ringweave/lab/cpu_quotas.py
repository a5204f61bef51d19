"""CPU quotas of a lab's devices: chosen from device speeds, enforced by cgroup v1 or v2.

An ordinary user's groups are in a group that was delegated to the user; where there is none, `Throttle` of
`user_namespace.py` stands in.

Source: kernel, Documentation/admin-guide/cgroup-v2.rst (cpu.max) and cgroup-v1 with scheduler/sched-bwc.rst.
"""

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ringweave.errors import ClusterError, LabError
from ringweave.lab.lab_layout import NAME_PREFIX
from ringweave.topology import Cluster, cgroups

QuotaMode = Literal["auto", "always", "never"]
QUOTA_PERIOD_US = 40_000
"""Short, so that a throttled worker stalls its peers only briefly."""
MIN_QUOTA_US = 1_000
"""Smallest quota that Linux accepts (kernel: Documentation/scheduler/sched-bwc.rst)."""
DEVICE_CPU_FRACTION = 0.8
"""Part of the machine's CPU time that all devices get together; the rest is for moving data."""

CpuQuotas = Mapping[str, tuple[int, ...]]
"""Node -> quota of each device, in microseconds of each period."""


def choose_quotas(cluster: Cluster, mode: QuotaMode, num_cpus: int) -> CpuQuotas | None:
    """Choose quotas in proportion to the devices' speeds; None if there are to be none.

    The fastest device gets at most one CPU, so that the proportions also hold for programs of one thread.

    `mode`: `auto` gives quotas only if the speeds differ.

    Raises:
        ClusterError: A device would get less than Linux can limit to.
    """
    speeds = [device.speed for node in cluster.nodes for device in node.devices]
    if mode == "never" or (mode == "auto" and len(set(speeds)) == 1):
        return None
    us_per_speed = min(QUOTA_PERIOD_US / max(speeds), DEVICE_CPU_FRACTION * num_cpus * QUOTA_PERIOD_US / sum(speeds))
    if min(speeds) * us_per_speed < MIN_QUOTA_US:
        raise ClusterError(
            f"speed of the slowest device of cluster {cluster.name}",
            got=min(speeds),
            expected=f"at least {MIN_QUOTA_US / us_per_speed:.3g}, so that it gets 1 ms of every 40 ms of CPU time "
            f"({num_cpus} CPUs for {len(speeds)} devices)",
            do="Use fewer devices or speeds closer to each other, or bring the lab up with --quotas never",
        )
    return {node.name: tuple(int(d.speed * us_per_speed) for d in node.devices) for node in cluster.nodes}


def quota_in_cpus(quota_us: int) -> float:
    """Convert a quota to a number of CPUs."""
    return quota_us / QUOTA_PERIOD_US


DUTY_CYCLE = "duty cycle"
"""Kind of limit that stands in for control groups; the other kinds are `cgroup v1` and `cgroup v2`."""
DUTY_CYCLE_NOTE = "a duty cycle by SIGSTOP and SIGCONT stands in for CPU quotas of control groups"
EMPTY_TIMEOUT_S = 2.0
_UID_MAP = Path("/proc/self/uid_map")


@dataclass(frozen=True, kw_only=True, slots=True)
class CgroupHierarchy:
    """Mounted cgroup hierarchy in which groups can limit CPU time."""

    version: int
    """Version of cgroups, 1 or 2."""
    root: Path

    @property
    def kind(self) -> str:
        return f"cgroup v{self.version}"

    def lab_folder(self, lab: str) -> Path:
        """Return the folder of a lab's groups."""
        return self.root / f"{NAME_PREFIX}{lab}"

    def device_folder(self, lab: str, node: str, device: int) -> Path:
        """Return the folder of one device's group."""
        return self.lab_folder(lab) / f"{NAME_PREFIX}{node}:{device}"


def find_hierarchy(mounts: str | None = None) -> CgroupHierarchy | None:
    """Return the hierarchy with the cpu controller; None if there is none, or none that this user may use.

    Args:
        mounts: Text in the form of /proc/self/mountinfo; None reads this process's own.
    """
    mount = cgroups.find_mount(mounts)
    if mount is None:
        return None
    root = cgroups.find_delegated_group(mount) if has_duty_cycle() else mount.point
    return CgroupHierarchy(version=mount.version, root=root) if root else None


def has_duty_cycle() -> bool:
    """Return whether a duty cycle may stand in for control groups: for ordinary users, also as root of a namespace."""
    return os.geteuid() != 0 or _UID_MAP.read_text(encoding="ascii").split()[1] != "0"


def make_groups(hierarchy: CgroupHierarchy, lab: str, quotas: CpuQuotas) -> None:
    """Make the groups of a lab.

    Raises:
        LabError: The kernel refuses.
    """
    try:
        _make_lab_group(hierarchy, lab)
        for node, node_quotas in quotas.items():
            for device, quota_us in enumerate(node_quotas):
                _make_device_group(hierarchy, hierarchy.device_folder(lab, node, device), quota_us)
    except OSError as error:
        raise LabError(
            f"CPU quotas by cgroup v{hierarchy.version}",
            got=error.strerror,
            expected="control groups that can be made and limited",
            do="Run as root, in a container with --privileged or --cgroupns=host; or bring the lab up with "
            "--quotas never",
            where=str(error.filename),
        ) from error


def change_quota(group: Path, quota_us: int, hierarchy: CgroupHierarchy) -> None:
    """Change the quota of the processes in a group.

    Raises:
        LabError: The kernel refuses, or the group is gone.
    """
    try:
        _write_quota(hierarchy, group, quota_us)
    except OSError as error:
        what, do = f"CPU quota of {group.name}", "Give at least 1 ms of each 40 ms, and see whether the lab is still up"
        raise LabError(
            what, got=quota_us, expected="microseconds that the kernel takes", do=do, where=str(group)
        ) from error


def remove_groups(hierarchy: CgroupHierarchy, lab: str) -> None:
    """Remove the groups of a lab, once the processes in them have ended.

    Raises:
        LabError: A group does not empty.
    """
    folder = hierarchy.lab_folder(lab)
    deadline = time.monotonic() + EMPTY_TIMEOUT_S
    while folder.exists():
        with contextlib.suppress(OSError):
            for group in [path for path in folder.iterdir() if path.is_dir()]:
                group.rmdir()
            folder.rmdir()
            return
        if time.monotonic() > deadline:
            raise LabError(f"control group {folder}: still in use, expected it to be empty. See its cgroup.procs.")
        time.sleep(0.01)


def group_pids(hierarchy: CgroupHierarchy, lab: str) -> set[int]:
    """Return the ids of the processes in the groups of a lab."""
    return {int(pid) for path in hierarchy.lab_folder(lab).glob("*/cgroup.procs") for pid in _read_words(path)}


def _make_lab_group(hierarchy: CgroupHierarchy, lab: str) -> None:
    folder = hierarchy.lab_folder(lab)
    folder.mkdir(exist_ok=True)
    if hierarchy.version == 2:
        for above in (hierarchy.root, folder):
            (above / "cgroup.subtree_control").write_text("+cpu", encoding="ascii")


def _make_device_group(hierarchy: CgroupHierarchy, group: Path, quota_us: int) -> None:
    group.mkdir(exist_ok=True)
    _write_quota(hierarchy, group, quota_us)


def _write_quota(hierarchy: CgroupHierarchy, group: Path, quota_us: int) -> None:
    if hierarchy.version == 2:
        (group / "cpu.max").write_text(f"{quota_us} {QUOTA_PERIOD_US}", encoding="ascii")
    else:
        (group / "cpu.cfs_period_us").write_text(str(QUOTA_PERIOD_US), encoding="ascii")
        (group / "cpu.cfs_quota_us").write_text(str(quota_us), encoding="ascii")


def _read_words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").split()
    except OSError:
        return []
