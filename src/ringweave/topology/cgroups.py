"""Control groups of version 1 or 2: where they are mounted, and the CPU quota that binds this process.

Source: kernel, Documentation/admin-guide/cgroup-v2.rst (cpu.max, cpu.stat) and cgroup-v1 with scheduler/sched-bwc.rst.
"""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

PROCESS = Path("/proc/self")
_ESCAPED_SPACE = "\\040"
_US = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Mount:
    """Where the control groups are that can limit CPU time."""

    version: int
    """1 or 2."""
    point: Path
    inside: str
    """The group that is seen there; not "/" where only a part of the hierarchy is mounted, as in containers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Quota:
    """What the kernel lets the processes of a control group work."""

    cores: float
    """Processor time of all of them together by the second."""
    period_s: float
    """In which that is counted."""
    num_throttled: int
    """Periods until now in which they had to pause for it."""


def find(mounts: str | None = None) -> Mount | None:
    """Where the cpu controller is mounted; None if it is not.

    Args:
        mounts: Text in the form of /proc/self/mountinfo; None reads this process's own.
    """
    text = (PROCESS / "mountinfo").read_text(encoding="utf-8") if mounts is None else mounts
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        inside, point = left.split()[3:5]
        root = Path(point.replace(_ESCAPED_SPACE, " "))
        kind, _, options = right.split(" ", maxsplit=2)
        if kind == "cgroup" and "cpu" in options.split(","):
            return Mount(version=1, point=root, inside=inside)
        if kind == "cgroup2" and "cpu" in _read(root / "cgroup.controllers").split():
            return Mount(version=2, point=root, inside=inside)
    return None


class OwnQuota:
    """The CPU quota of this process: the least of its group's and of those above it, as far as they can be seen."""

    def __init__(self, process: Path = PROCESS) -> None:
        """Looks up the groups, in which the process is taken to stay."""
        mount = find(_read(process / "mountinfo"))
        self._read = _version_1 if mount and mount.version == 1 else _version_2
        self._groups = _groups(mount, _read(process / "cgroup")) if mount else ()

    def read(self) -> Quota | None:
        """As it is now; None where there is none, or nobody says. Reads two or three small files a group."""
        quotas = [quota for group in self._groups if (quota := self._read(group))]
        return min(quotas, key=lambda quota: quota.cores, default=None)


def cores_of_one(num_siblings: int, process: Path = PROCESS) -> float | None:
    """Processor time by the second that a quota leaves this process; None where there is no quota.

    Args:
        num_siblings: Processes that its parent has started, itself included. They share a quota that holds for the
            parent too, as in a container; one that does not is taken to be this process's alone.
        process: Its folder below /proc.
    """
    quota = OwnQuota(process).read()
    if quota is None:
        return None
    stat = _read(process / "stat").rpartition(")")[2].split()  # state, parent, and more; a name may have blanks
    parent = process.with_name(stat[1]) if len(stat) > 1 else process
    is_shared = _read(parent / "cgroup") == _read(process / "cgroup")
    return quota.cores / (max(1, num_siblings) if is_shared else 1)


def _groups(mount: Mount, memberships: str) -> tuple[Path, ...]:
    """Folders of the process's group and of those above it, below the mount point and with it."""
    own = next((path for line in memberships.splitlines() if (path := _path(line, mount.version))), mount.inside)
    try:
        below = PurePosixPath(own).relative_to(mount.inside)
    except ValueError:  # the group lies beside what is mounted
        below = PurePosixPath()
    folder = mount.point / below
    return tuple(each for each in (folder, *folder.parents) if each.is_relative_to(mount.point))


def _path(line: str, version: int) -> str | None:
    """The group that a line of /proc/self/cgroup tells, if it is of the cpu controller."""
    number, _, rest = line.partition(":")
    controllers, _, path = rest.partition(":")
    is_it = "cpu" in controllers.split(",") if version == 1 else (number, controllers) == ("0", "")
    return path if is_it else None


def _version_1(group: Path) -> Quota | None:
    quota_us, period_us = _read(group / "cpu.cfs_quota_us").strip(), _read(group / "cpu.cfs_period_us").strip()
    return None if quota_us in ("", "-1") else _quota(group, quota_us, period_us)


def _version_2(group: Path) -> Quota | None:
    quota_us, _, period_us = _read(group / "cpu.max").strip().partition(" ")
    return None if quota_us in ("", "max") else _quota(group, quota_us, period_us)


def _quota(group: Path, quota_us: str, period_us: str) -> Quota:
    told = dict(line.split(maxsplit=1) for line in _read(group / "cpu.stat").splitlines())
    period_s = int(period_us) * _US
    return Quota(
        cores=int(quota_us) * _US / period_s, period_s=period_s, num_throttled=int(told.get("nr_throttled", "0"))
    )


def _read(path: Path) -> str:
    """The text of a file; nothing where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
