"""CPU quotas: a control group for each device, version 1 or 2, whichever is mounted with the cpu controller.

Source: kernel, Documentation/admin-guide/cgroup-v2.rst (cpu.max) and cgroup-v1 with scheduler/sched-bwc.rst.
"""

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

from ringweave.errors import LabError, explain
from ringweave.lab.layout import PREFIX
from ringweave.lab.quotas import PERIOD_US, Quotas
from ringweave.topology import cgroups

LEAVE_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Hierarchy:
    """Where control groups can be made that limit CPU time."""

    version: int
    """1 or 2."""
    root: Path

    def of_lab(self, lab: str) -> Path:
        """The folder of a lab's groups."""
        return self.root / f"{PREFIX}{lab}"

    def of_device(self, lab: str, node: str, device: int) -> Path:
        """The folder of the group of one device."""
        return self.of_lab(lab) / f"{PREFIX}{node}:{device}"


def find(mounts: str | None = None) -> Hierarchy | None:
    """The hierarchy with the cpu controller; None if there is none.

    Args:
        mounts: Text in the form of /proc/self/mountinfo; None reads this process's own.
    """
    mount = cgroups.find(mounts)
    return Hierarchy(version=mount.version, root=mount.point) if mount else None


def make(hierarchy: Hierarchy, lab: str, quotas: Quotas) -> None:
    """Make the groups of a lab.

    Raises:
        LabError: The kernel refuses.
    """
    try:
        _make_parent(hierarchy, lab)
        for node, of_node in quotas.items():
            for device, quota_us in enumerate(of_node):
                _make_one(hierarchy, hierarchy.of_device(lab, node, device), quota_us)
    except OSError as error:
        raise LabError(
            explain(
                f"CPU quotas by cgroup v{hierarchy.version}",
                got=error.strerror,
                expected="control groups that can be made and limited",
                do="Run as root, in a container with --privileged or --cgroupns=host; or bring the lab up with "
                "--quotas never",
                where=str(error.filename),
            )
        ) from error


def change(group: Path, quota_us: int, hierarchy: Hierarchy) -> None:
    """Give the processes of a group another quota from now on.

    Raises:
        LabError: The kernel refuses, or the group is gone.
    """
    try:
        _limit(hierarchy, group, quota_us)
    except OSError as error:
        what, do = f"CPU quota of {group.name}", "Give at least 1 ms of each 40 ms, and see whether the lab is still up"
        raise LabError(
            explain(what, got=quota_us, expected="microseconds that the kernel takes", do=do, where=str(group))
        ) from error


def remove(hierarchy: Hierarchy, lab: str) -> None:
    """Remove the groups of a lab, once the processes in them have ended.

    Raises:
        LabError: A group does not empty.
    """
    folder = hierarchy.of_lab(lab)
    deadline = time.monotonic() + LEAVE_S
    while folder.exists():
        with contextlib.suppress(OSError):
            for group in [path for path in folder.iterdir() if path.is_dir()]:
                group.rmdir()
            folder.rmdir()
            return
        if time.monotonic() > deadline:
            raise LabError(f"control group {folder}: still in use, expected it to be empty. See its cgroup.procs.")
        time.sleep(0.01)


def members(hierarchy: Hierarchy, lab: str) -> set[int]:
    """Ids of the processes in the groups of a lab."""
    return {int(pid) for path in hierarchy.of_lab(lab).glob("*/cgroup.procs") for pid in _read_words(path)}


def _make_parent(hierarchy: Hierarchy, lab: str) -> None:
    folder = hierarchy.of_lab(lab)
    folder.mkdir(exist_ok=True)
    if hierarchy.version == 2:
        for above in (hierarchy.root, folder):
            (above / "cgroup.subtree_control").write_text("+cpu", encoding="ascii")


def _make_one(hierarchy: Hierarchy, group: Path, quota_us: int) -> None:
    group.mkdir(exist_ok=True)
    _limit(hierarchy, group, quota_us)


def _limit(hierarchy: Hierarchy, group: Path, quota_us: int) -> None:
    if hierarchy.version == 2:
        (group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}", encoding="ascii")
    else:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US), encoding="ascii")
        (group / "cpu.cfs_quota_us").write_text(str(quota_us), encoding="ascii")


def _read_words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").split()
    except OSError:
        return []
