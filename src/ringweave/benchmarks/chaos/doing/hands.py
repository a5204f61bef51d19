"""What does the faults, and takes them back: signals to processes, cuts and rates in the lab, clocks, a full disk."""

import abc
import itertools
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
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


class Overlaps:
    """Which faults of a kind are under way for one target: one that is taken back leaves what the others do."""

    def __init__(self) -> None:
        self._under_way: dict[tuple[str, str], dict[int, Fault]] = {}
        self._numbers = itertools.count()

    def has(self, kind: str, target: str) -> bool:
        """Some are."""
        return (kind, target) in self._under_way

    def begin(self, kind: str, target: str, fault: Fault, act: Callable[[Sequence[Fault]], None]) -> Callable[[], None]:
        """One more is.

        Args:
            kind: Of the fault.
            target: What is hit, as it is at this moment: a process and not its rank.
            fault: The fault.
            act: Does what all of them together want, oldest first; takes everything back where there are none.

        Returns:
            What takes this one back.
        """
        number, under_way = next(self._numbers), self._under_way.setdefault((kind, target), {})
        under_way[number] = fault
        act(list(under_way.values()))

        def lift() -> None:
            del under_way[number]
            if not under_way:
                del self._under_way[kind, target]
            act(list(under_way.values()))

        return lift


class LabHands(Hands):
    """In a lab."""

    def __init__(self, lab: Lab, disk: Path, events: Path, crew: Crew) -> None:
        """`disk` is one that only this job uses; beside the events lie the notes to workers."""
        self._lab, self._disk, self._events, self._crew = lab, disk, events, crew
        self._noted: dict[Fault, int] = {}
        self._overlaps = Overlaps()
        self._usual_rates: dict[str, float] = {}
        """Link -> its rate without the faults that are under way."""

    def begin(self, fault: Fault) -> tuple[str, Callable[[], None]] | None:
        """Let it happen now."""
        if fault.moment:
            return self._at_moment(fault)
        if fault.kind in (faults.KILL, faults.PAUSE):
            return self._signal(fault)
        target = fault.target
        if fault.kind == faults.SLOW and not self._overlaps.has(faults.SLOW, target):
            self._usual_rates[target] = self._lab.rate(target)
        words, act = {
            faults.CUT: (f"node {target}", lambda left: self._cut(target, left)),
            faults.SLOW: (f"link {target}", lambda left: self._slow(target, left)),
            faults.CLOCK: (f"clock of node {target}", lambda left: self._shift(target, left)),
            faults.FILL: (str(self._disk), self._fill),
        }[fault.kind]
        return words, self._overlaps.begin(fault.kind, target, fault, act)

    def _cut(self, node: str, left: Sequence[Fault]) -> None:
        """Deaf by one and not heard by another is cut off both ways."""
        ways = {each.way for each in left}
        if ways:
            self._lab.cut(node, ways.pop() if len(ways) == 1 else "both")
        else:
            self._lab.mend(node)

    def _slow(self, link: str, left: Sequence[Fault]) -> None:
        self._lab.set_rate(link, left[-1].rate_bytes_per_s if left else self._usual_rates[link])

    def _shift(self, node: str, left: Sequence[Fault]) -> None:
        clocks.shift(self._lab, node, left[-1].shift_s if left else 0.0)

    def _fill(self, left: Sequence[Fault]) -> None:
        if left:
            fill(self._disk)
        else:
            (self._disk / _BALLAST).unlink(missing_ok=True)

    def _signal(self, fault: Fault) -> tuple[str, Callable[[], None]] | None:
        crew, target = self._crew, fault.target
        pid = crew.worker_pid(int(target)) if fault.hits_worker else crew.service_pid(target)
        if pid is None or not _is_ours(pid):
            return None
        how = signal.SIGKILL if fault.kind == faults.KILL else signal.SIGSTOP
        handle = _send(pid, how)
        if handle is None:
            return None
        if fault.kind == faults.KILL:
            return f"process {pid}", lambda: os.close(handle)
        lift = self._overlaps.begin(faults.PAUSE, str(pid), fault, lambda left: None if left else _continue(handle))
        return f"process {pid}", lambda: _lift_and_close(lift, handle)

    def _at_moment(self, fault: Fault) -> tuple[str, Callable[[], None]] | None:
        """The worker does it itself; it has happened when the process is gone, and has said so.

        One that is gone without a word died of something else: the fault waits for the process that comes after it, as
        it does for one that another fault has left a note to.
        """
        note, pid = notes.path(self._events, int(fault.target)), self._noted.get(fault)
        if pid is not None:
            if _is_ours(pid):
                return None
            del self._noted[fault]
            reached = notes.answered(note, pid)
            if reached:
                return f"process {pid} during {reached}", lambda: None
        pid = self._crew.worker_pid(int(fault.target))
        if pid is not None and pid not in self._noted.values() and _is_ours(pid):
            notes.leave(note, pid, fault.moment)
            self._noted[fault] = pid
        return None


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


def _continue(handle: int) -> None:
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(handle, signal.SIGCONT)


def _lift_and_close(lift: Callable[[], None], handle: int) -> None:
    try:
        lift()
    finally:
        os.close(handle)
