"""What does the faults, and takes them back: signals to processes, cuts and rates in the lab, clocks, a full disk."""

import abc
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ringweave.benchmarks.chaos import faults
from ringweave.benchmarks.chaos.doing import clocks, crews, notes
from ringweave.benchmarks.chaos.doing.crews import Crew
from ringweave.benchmarks.chaos.faults import Fault
from ringweave.lab import Lab, processes, tools

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

    def __init__(self, lab: Lab, disk: Path, events: Path, crew: Crew) -> None:
        """`disk` is one that only this job uses; beside the events lie the notes to workers."""
        self._lab, self._disk, self._events, self._crew = lab, disk, events, crew
        self._noted: dict[Fault, int] = {}
        self._slowed: dict[str, tuple[float, list[float]]] = {}
        """Link -> its rate without faults, and those of the faults that are under way."""

    def begin(self, fault: Fault) -> tuple[str, Callable[[], None]] | None:
        """Let it happen now."""
        if fault.moment:
            return self._at_moment(fault)
        if fault.kind in (faults.KILL, faults.PAUSE):
            return self._signal(fault)
        if fault.kind == faults.CUT:
            self._lab.cut(fault.target, fault.way)
            return f"node {fault.target}", lambda: self._lab.mend(fault.target)
        if fault.kind == faults.SLOW:
            return self._slow(fault)
        if fault.kind == faults.CLOCK:
            clocks.shift(self._lab, fault.target, fault.shift_s)
            return f"clock of node {fault.target}", lambda: clocks.shift(self._lab, fault.target, 0.0)
        fill(self._disk)
        return str(self._disk), lambda: (self._disk / _BALLAST).unlink(missing_ok=True)

    def _slow(self, fault: Fault) -> tuple[str, Callable[[], None]]:
        """Others may be under way on the link, and end before this one or after."""
        link, rate = fault.target, fault.rate_bytes_per_s
        usual, under_way = self._slowed.setdefault(link, (self._lab.rate(link), []))
        under_way.append(rate)
        self._lab.set_rate(link, rate)

        def lift() -> None:
            under_way.remove(rate)
            self._lab.set_rate(link, under_way[-1] if under_way else usual)
            if not under_way:
                del self._slowed[link]

        return f"link {link}", lift

    def _signal(self, fault: Fault) -> tuple[str, Callable[[], None]] | None:
        crew, target = self._crew, fault.target
        pid = crew.worker_pid(int(target)) if fault.hits_worker else crew.service_pid(target)
        if pid is None or not _is_ours(pid):
            return None
        how = signal.SIGKILL if fault.kind == faults.KILL else signal.SIGSTOP
        handle = _send(pid, how)
        if handle is None:
            return None
        return f"process {pid}", lambda: _continue(handle, goes_on=fault.kind == faults.PAUSE)

    def _at_moment(self, fault: Fault) -> tuple[str, Callable[[], None]] | None:
        """The worker does it itself; it has happened when the process is gone."""
        pid = self._noted.get(fault)
        if pid is None:
            pid = self._crew.worker_pid(int(fault.target))
            if pid is not None and _is_ours(pid):
                notes.leave(notes.path(self._events, int(fault.target)), pid, fault.moment)
                self._noted[fault] = pid
            return None
        return None if _is_ours(pid) else (f"process {pid}", lambda: None)


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
    """A disk of its own for a job, in memory, so that filling it harms nobody else. Make it before the lab.

    Raises:
        LabError: It cannot be mounted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    options = f"size={DISK_BYTES},mode=0755"
    tools.run(["mount", "-t", "tmpfs", "-o", options, "ringweave-chaos", str(folder)])
    try:
        yield folder
    finally:
        tools.run(["umount", "--lazy", str(folder)], may_fail=True)


def _is_ours(pid: int) -> bool:
    return crews.is_of_job(processes.command_line(pid))


def _send(pid: int, how: signal.Signals) -> int | None:
    """A handle of the process that got the signal; None if it is gone, or another process has its id by now."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return None
    try:
        if _is_ours(pid):
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
