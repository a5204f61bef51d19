"""What workers started and left behind: found and ended. Only descendants of this process are ever touched.

Not all of those are the workers': one that is known to be somebody else's is left alone, with all that comes from it.
"""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable

import psutil

PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.05

IsOther = Callable[[psutil.Process], bool]
"""Whether a process that comes from this one is somebody else's; may raise psutil.Error for one that has ended."""


def all_are_ours(process: psutil.Process) -> bool:
    """Nobody else starts processes here."""
    return False


def adopt_orphans() -> None:
    """Make the kernel hand us processes whose parent dies, so that they stay our descendants."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(is_other: IsOther = all_are_ours) -> set[psutil.Process]:
    """Every process that comes from this one, but for others' with all that comes from those.

    Each knows when it began, so a reused id is never mistaken for it.
    """
    found = set(psutil.Process().children(recursive=True))
    for process in tuple(found):
        with contextlib.suppress(psutil.Error):
            if is_other(process):
                found -= {process, *process.children(recursive=True)}
    return found


def end_descendants(
    spared: Iterable[psutil.Process], *, leave_s: float, term_s: float, is_other: IsOther = all_are_ours
) -> list[psutil.Process]:
    """End what workers left behind.

    Args:
        spared: Processes that were there before the run.
        leave_s: How long they may finish by themselves, as helpers that clean up after a worker do.
        term_s: How long they have between SIGTERM and SIGKILL.
        is_other: Knows those that came later and are somebody else's.

    Returns:
        Those that even SIGKILL did not end, which only the kernel can hold.
    """
    before = set(spared)

    def left() -> set[psutil.Process]:
        return descendants(is_other) - before

    _wait_gone(left, leave_s)
    _send(signal.SIGTERM, left())
    _wait_gone(left, term_s)
    _send(signal.SIGKILL, left())
    return _wait_gone(left, 1.0)


def _send(signum: signal.Signals, processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signum)


def _wait_gone(left: Callable[[], Iterable[psutil.Process]], timeout_s: float) -> list[psutil.Process]:
    deadline = time.monotonic() + timeout_s
    while running := _reap(left()):
        if time.monotonic() >= deadline:
            return running
        time.sleep(POLL_S)
    return []


def _reap(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Collect the ended ones that are our own children; the rest still run."""
    running = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                running.append(process)
            elif process.ppid() == os.getpid():
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(process.pid, os.WNOHANG)
    return running
