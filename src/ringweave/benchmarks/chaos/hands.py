"""What does the faults, and takes them back: signals to workers, cuts and rates in the lab, a disk that is filled."""

import abc
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ringweave.benchmarks.chaos import faults
from ringweave.benchmarks.chaos.faults import Fault
from ringweave.lab import Lab, processes

DISK_BYTES = 512 * 2**20
_BALLAST = "ballast"
_PIECE = bytes(1 << 16)


class Hands(abc.ABC):
    """Does one fault, and takes it back."""

    @abc.abstractmethod
    def begin(self, fault: Fault) -> tuple[str, Callable[[], None]] | None:
        """Let it happen now.

        Returns:
            What was hit, in words, and what takes it back; None if it is not there at the moment, such as a worker
            that is being started.
        """


class LabHands(Hands):
    """In a lab."""

    def __init__(self, lab: Lab, disk: Path, worker_pid: Callable[[int], int | None]) -> None:
        """`worker_pid` is the process of a rank that runs now; `disk` is one that only this job uses."""
        self._lab, self._disk, self._worker_pid = lab, disk, worker_pid

    def begin(self, fault: Fault) -> tuple[str, Callable[[], None]] | None:
        """Let it happen now."""
        if fault.kind in (faults.KILL, faults.PAUSE):
            return self._signal(fault)
        if fault.kind == faults.CUT:
            self._lab.cut(fault.target, fault.way)
            return f"node {fault.target}", lambda: self._lab.mend(fault.target)
        if fault.kind == faults.SLOW:
            before = self._lab.rate(fault.target)
            self._lab.set_rate(fault.target, fault.rate_bytes_per_s)
            return f"link {fault.target}", lambda: self._lab.set_rate(fault.target, before)
        fill(self._disk)
        return str(self._disk), lambda: (self._disk / _BALLAST).unlink(missing_ok=True)

    def _signal(self, fault: Fault) -> tuple[str, Callable[[], None]] | None:
        pid = self._worker_pid(int(fault.target))
        if pid is None or not _is_worker(pid):
            return None
        how = signal.SIGKILL if fault.kind == faults.KILL else signal.SIGSTOP
        handle = _send(pid, how)
        if handle is None:
            return None
        return f"process {pid}", lambda: _continue(handle, goes_on=fault.kind == faults.PAUSE)


def fill(folder: Path) -> None:
    """Write until the disk takes no more byte."""
    with (folder / _BALLAST).open("ab", buffering=0) as file:
        size = len(_PIECE)
        while size:
            try:
                file.write(_PIECE[:size])
            except OSError:
                size //= 2


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A disk of its own for a job, in memory, so that filling it harms nobody else. Make it before the lab."""
    folder.mkdir(parents=True, exist_ok=True)
    options = f"size={DISK_BYTES},mode=0755"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "ringweave-chaos", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False)


def _is_worker(pid: int) -> bool:
    return "watched.py" in processes.command_line(pid)


def _send(pid: int, how: signal.Signals) -> int | None:
    """A handle of the process that got the signal; None if it is gone, or another process has its id by now."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return None
    try:
        if _is_worker(pid):
            signal.pidfd_send_signal(handle, how)
            return handle
    except ProcessLookupError:
        pass
    os.close(handle)
    return None


def _continue(handle: int, *, goes_on: bool) -> None:
    try:
        if goes_on:
            signal.pidfd_send_signal(handle, signal.SIGCONT)
    except ProcessLookupError:
        pass
    finally:
        os.close(handle)
