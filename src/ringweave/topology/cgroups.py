"""Control groups of version 1 or 2: their mount point, and the CPU quota and memory of this process.

Source: kernel, Documentation/admin-guide/cgroup-v2.rst (cpu.max, cpu.stat, memory.max, memory.events, memory.stat) and
cgroup-v1 with scheduler/sched-bwc.rst and memory.rst.
"""

import contextlib
import os
import weakref
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ringweave.environment import cpu_quota_of_environ

PROC_SELF = Path("/proc/self")
_MAX_SCHEDSTAT_BYTES = 128
_ESCAPED_SPACE = "\\040"
_US = 1e-6


_NO_LIMIT_BYTES = 2**60
"""Version 1 writes a number of this order where there is no limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CgroupMount:
    """Mount point of the control groups that can limit CPU time."""

    version: int
    """1 or 2."""
    point: Path
    root: str
    """Group visible at the mount point; not "/" where only a part of the hierarchy is mounted, as in containers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuQuota:
    """CPU time that the kernel grants to the processes of a control group."""

    cores: float
    """Processor time per second, for all processes together."""
    period_s: float
    """Period in which the quota is counted."""
    num_throttled: int
    """Periods so far in which the processes were throttled."""
    throttled_s: float = 0.0
    """Seconds so far for which they were throttled."""


def find_mount(mounts: str | None = None, *, controller: str = "cpu") -> CgroupMount | None:
    """Return the mount of a controller; None if it is not mounted.

    `mounts`: text in the form of /proc/self/mountinfo; None reads this process's own.
    """
    text = (PROC_SELF / "mountinfo").read_text(encoding="utf-8") if mounts is None else mounts
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        mounted_root, point = left.split()[3:5]
        root = Path(point.replace(_ESCAPED_SPACE, " "))
        kind, _, options = right.split(" ", maxsplit=2)
        if kind == "cgroup" and controller in options.split(","):
            return CgroupMount(version=1, point=root, root=mounted_root)
        if kind == "cgroup2" and controller in read_text(root / "cgroup.controllers").split():
            return CgroupMount(version=2, point=root, root=mounted_root)
    return None


def find_delegated_group(mount: CgroupMount, process: Path = PROC_SELF) -> Path | None:
    """Return the highest group above a process in which its user may make groups that limit CPU time; None without one.

    The process may join such a group: version 2 demands that the user may write to the group that both are in.
    """
    groups = _group_folders(mount, read_text(process / "cgroup"))
    return next((each for each in reversed(groups) if _is_delegated(each, mount.version)), None)


def _is_delegated(group: Path, version: int) -> bool:
    if not os.access(group, os.W_OK) or not os.access(group / "cgroup.procs", os.W_OK):
        return False
    if version == 1:
        return True
    children = group / "cgroup.subtree_control"
    has_controller = "cpu" in read_text(group / "cgroup.controllers").split() and os.access(children, os.W_OK)
    # A group with processes of its own may not give a controller to groups in it.
    return has_controller and ("cpu" in read_text(children).split() or not read_text(group / "cgroup.procs"))


class ProcessCpuQuota:
    """CPU quota of this process: the smallest among its group and the groups above it, as far as they are visible."""

    def __init__(self, process: Path = PROC_SELF) -> None:
        """Find the groups; the process is assumed to stay in them."""
        mount = find_mount(read_text(process / "mountinfo"))
        self._read_quota = _read_quota_v1 if mount and mount.version == 1 else _read_quota_v2
        self._groups = _group_folders(mount, read_text(process / "cgroup")) if mount else ()

    def read(self) -> CpuQuota | None:
        """Return the current quota; None where there is none or it is unknown.

        Reads two or three small files per group.
        """
        quotas = [quota for group in self._groups if (quota := self._read_quota(group))]
        return min(quotas, key=lambda quota: quota.cores, default=None)

    def throttled_s(self) -> float:
        """Return the seconds so far for which quotas, also former ones, have stopped the group or one above it."""
        return max(map(_throttled_s, self._groups), default=0.0)


class ProcessorQueue:
    """Waits of a process's main thread for a processor, while others run there or a quota is used up.

    The kernel's file stays open: it is read several times in a train step.
    """

    def __init__(self, process: Path = PROC_SELF) -> None:
        try:
            self._descriptor = os.open(process / "schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # a kernel that does not count it
            self._descriptor = None
        else:
            weakref.finalize(self, os.close, self._descriptor)

    def waited_s(self) -> float | None:
        """Return the seconds so far in which the thread was ready to run and had no processor; None if not counted."""
        if self._descriptor is None:
            return None
        try:
            return int(os.pread(self._descriptor, _MAX_SCHEDSTAT_BYTES, 0).split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return None


def find_pressure_file(process: Path, kind: str) -> Path | None:
    """Return the file of stalls (`memory`, `io`) of a process's own group; None in the root group and in version 1."""
    mounts = read_text(process / "mountinfo")
    mount = find_mount(mounts, controller="memory") if mounts else None
    if mount is None or mount.version == 1:
        return None
    found = _group_folders(mount, read_text(process / "cgroup"))[0] / f"{kind}.pressure"
    return found if found.is_file() else None


def cores_per_process(num_siblings: int, process: Path = PROC_SELF) -> float | None:
    """Return the processor time per second that a quota leaves this process; None where there is no quota.

    Where no control group has one, `RINGWEAVE_CPU_QUOTA` counts, which a lab with a duty cycle sets.

    Args:
        num_siblings: Processes that its parent has started, including this one. They share a quota that also binds the
            parent, as in a container; any other quota is assumed to bind this process alone.
        process: Its folder below /proc.

    Raises:
        UsageError: `RINGWEAVE_CPU_QUOTA` is no number of processors.
    """
    quota = ProcessCpuQuota(process).read()
    if quota is None:
        return cpu_quota_of_environ(os.environ)
    return quota.cores / (max(1, num_siblings) if _is_shared_with_parent(process) else 1)


def _is_shared_with_parent(process: Path) -> bool:
    """Return whether the process is in the groups of its parent, so that their limits bind both."""
    stat = read_text(process / "stat").rpartition(")")[2].split()  # state, parent, and more; a name may have blanks
    parent = process.with_name(stat[1]) if len(stat) > 1 else process
    return read_text(parent / "cgroup") == read_text(process / "cgroup")


def memory_limit_bytes(process: Path = PROC_SELF) -> int | None:
    """Return the smallest memory limit among a process's group and the groups above it; None where there is none."""
    mount = find_mount(read_text(process / "mountinfo"), controller="memory")
    if mount is None:
        return None
    name = "memory.max" if mount.version == 2 else "memory.limit_in_bytes"
    texts = [read_text(each / name).strip() for each in _group_folders(mount, read_text(process / "cgroup"), "memory")]
    limits = [int(text) for text in texts if text.isdecimal() and int(text) < _NO_LIMIT_BYTES]
    return min(limits, default=None)


class ProcessMemory:
    """Memory of this process, and of its group: limit, use, and processes that the kernel has killed for memory."""

    def __init__(self, num_siblings: int, process: Path = PROC_SELF) -> None:
        """Find the group; the process is assumed to stay in it.

        Args:
            num_siblings: Processes that its parent has started, including this one; as in `cores_per_process`.
            process: Its folder below /proc.
        """
        mount = find_mount(read_text(process / "mountinfo"), controller="memory")
        groups = _group_folders(mount, read_text(process / "cgroup"), "memory") if mount else ()
        self._process, self._group, self._version = (
            process,
            groups[0] if groups else None,
            mount.version if mount else 0,
        )
        self._num_sharing = max(1, num_siblings) if _is_shared_with_parent(process) else 1

    def limit_bytes(self) -> int | None:
        """Return the bytes that this process may use, without those of others in its group; None without a limit."""
        limit = memory_limit_bytes(self._process)
        if limit is None or self._num_sharing > 1:
            return None if limit is None else limit // self._num_sharing
        in_group = self._group_numbers("memory.stat").get("total_rss" if self._version == 1 else "anon", 0)
        return limit - max(0, in_group - self._status_bytes("RssAnon"))

    def reset_peak(self) -> None:
        """Let `peak_bytes` start anew; without permission it stays the peak of the whole life."""
        with contextlib.suppress(OSError):
            (self._process / "clear_refs").write_text("5", encoding="ascii")

    def peak_bytes(self) -> int:
        """Return the most memory since the last reset, without pages of files, which the kernel can drop."""
        return self._status_bytes("VmHWM") - self._status_bytes("RssFile")

    def num_oom_kills(self) -> int:
        """Return the processes of the group that the kernel has killed for memory so far."""
        return self._group_numbers("memory.oom_control" if self._version == 1 else "memory.events").get("oom_kill", 0)

    def _group_numbers(self, name: str) -> dict[str, int]:
        if self._group is None:
            return {}
        pairs = (line.split() for line in read_text(self._group / name).splitlines())
        return {words[0]: int(words[1]) for words in pairs if len(words) == 2 and words[1].isdecimal()}

    def _status_bytes(self, name: str) -> int:
        """Return a value of the process's status, which is in KiB; 0 where the kernel does not tell it."""
        lines = read_text(self._process / "status").splitlines()
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)


def _group_folders(mount: CgroupMount, memberships: str, controller: str = "cpu") -> tuple[Path, ...]:
    """Return the folders of the process's group and of the groups above it, up to and including the mount point."""
    own = next(
        (path for line in memberships.splitlines() if (path := _parse_group_path(line, mount.version, controller))),
        mount.root,
    )
    try:
        below = PurePosixPath(own).relative_to(mount.root)
    except ValueError:  # the group lies outside the mounted part
        below = PurePosixPath()
    folder = mount.point / below
    return tuple(each for each in (folder, *folder.parents) if each.is_relative_to(mount.point))


def _parse_group_path(line: str, version: int, controller: str) -> str | None:
    """Return the group in a line of /proc/self/cgroup, if the line is about the controller."""
    number, _, rest = line.partition(":")
    controllers, _, path = rest.partition(":")
    is_meant = controller in controllers.split(",") if version == 1 else (number, controllers) == ("0", "")
    return path if is_meant else None


def _read_quota_v1(group: Path) -> CpuQuota | None:
    quota_us, period_us = (
        read_text(group / "cpu.cfs_quota_us").strip(),
        read_text(group / "cpu.cfs_period_us").strip(),
    )
    return None if quota_us in ("", "-1") else _parse_quota(group, quota_us, period_us)


def _read_quota_v2(group: Path) -> CpuQuota | None:
    quota_us, _, period_us = read_text(group / "cpu.max").strip().partition(" ")
    return None if quota_us in ("", "max") else _parse_quota(group, quota_us, period_us)


def _read_statistics(group: Path) -> dict[str, str]:
    return dict(line.split(maxsplit=1) for line in read_text(group / "cpu.stat").splitlines())


def _throttled_s(group: Path) -> float:
    statistics = _read_statistics(group)
    throttled_ns, throttled_us = statistics.get("throttled_time", "0"), statistics.get("throttled_usec", "0")
    return int(throttled_ns) * 1e-9 + int(throttled_us) * _US


def _parse_quota(group: Path, quota_us: str, period_us: str) -> CpuQuota:
    period_s = int(period_us) * _US
    return CpuQuota(
        cores=int(quota_us) * _US / period_s,
        period_s=period_s,
        num_throttled=int(_read_statistics(group).get("nr_throttled", "0")),
        throttled_s=_throttled_s(group),
    )


def read_text(path: Path) -> str:
    """Return the text of a file; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
