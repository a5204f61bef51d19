"""Usage of this process that steps and collectives do not show: pauses, garbage collections, memory, disks."""

import functools
import gc
import os
import resource
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ringweave.topology import cgroups

FIRST_WINDOW_S, LAST_WINDOW_S = 1.0, 10.0
_GROWTH = 10
"""A window ends after this part of the time before it, so that short runs have several and long ones few."""


def window_length_s(elapsed_s: float) -> float:
    """Return the seconds of the next window of measurements: one at first, ten after 100 s."""
    return min(LAST_WINDOW_S, max(FIRST_WINDOW_S, elapsed_s / _GROWTH))


class ProcessUsage:
    """Sums over the life of this process and, for reads, of its children, such as the workers of a DataLoader.

    Stalls are those of the process's control group, or of the whole machine where the group has no such file.
    """

    def __init__(self, process: Path = cgroups.PROC_SELF, pressure: Path = Path("/proc/pressure")) -> None:
        self._process, self._quota = process, cgroups.ProcessCpuQuota(process)
        self._pressure_files = {kind: _pressure_file(process, pressure, kind) for kind in ("memory", "io")}
        self._collections_s, self._begun_s = 0.0, 0.0
        gc.callbacks.append(self._note_collection)

    def read(self) -> dict[str, float]:
        """Return the sums so far, by the names of the fields of the events, which say what they are.

        Cost:
            A dozen of small files: 0.2 to 0.5 ms.
        """
        return {
            "throttled_s": self._quota.throttled_s(),
            "collections_s": self._collections_s,
            "major_faults": resource.getrusage(resource.RUSAGE_SELF).ru_majflt,
            "memory_stall_s": _stalled_s(self._pressure_files["memory"]),
            "disk_stall_s": _stalled_s(self._pressure_files["io"]),
            "read_bytes": sum(map(_read_bytes, (self._process, *_children(self._process)))),
        }

    def memory_bytes(self) -> int:
        """Return the resident memory of this process; 0 where the kernel does not tell it."""
        words = cgroups.read_text(self._process / "statm").split()
        return int(words[1]) * resource.getpagesize() if len(words) > 1 else 0

    def _note_collection(self, phase: str, _: Mapping[str, Any]) -> None:
        now_s = time.perf_counter()
        if phase == "start":
            self._begun_s = now_s
        else:
            self._collections_s += now_s - self._begun_s


def of_this_process() -> ProcessUsage:
    """Return the one object of this process, also after a fork."""
    return _of_process(os.getpid())


@functools.cache
def _of_process(pid: int) -> ProcessUsage:
    del pid
    return ProcessUsage()


def _pressure_file(process: Path, of_machine: Path, kind: str) -> Path:
    """Return the file of the process's own group; that of the machine where there is none. Source: kernel, psi.rst."""
    own = cgroups.find_pressure_file(process, kind)
    return own or of_machine / kind


def _stalled_s(path: Path) -> float:
    """Return the seconds in which some process had to pause for want of memory, or of a disk."""
    for line in cgroups.read_text(path).splitlines():
        if line.startswith("some "):
            return int(line.rpartition("total=")[2]) * 1e-6
    return 0.0


def _children(process: Path) -> list[Path]:
    """Return the folders of the child processes."""
    lists = (cgroups.read_text(each / "children") for each in (process / "task").glob("*"))
    return [process.with_name(pid) for text in lists for pid in text.split()]


def _read_bytes(process: Path) -> int:
    """Return the bytes that a process has had read from a disk; 0 where it may not be known."""
    lines = cgroups.read_text(process / "io").splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), 0)
