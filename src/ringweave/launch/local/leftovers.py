"""What workers started and left behind: found and ended. Only descendants of this process are ever touched."""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable

import psutil

PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.05


def adopt_orphans() -> None:
    """Make the kernel hand us processes whose parent dies, so that they stay our descendants."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> set[psutil.Process]:
    """Every process that comes from this one. Each knows when it began, so a reused id is never mistaken for it."""
    return set(psutil.Process().children(recursive=True))


def end_descendants(spared: Iterable[psutil.Process], *, leave_s: float, term_s: float) -> list[psutil.Process]:
    """End what workers left behind.

    Args:
        spared: Processes that were there before the run.
        leave_s: How long they may finish by themselves, as helpers that clean up after a worker do.
        term_s: How long they have between SIGTERM and SIGKILL.

    Returns:
        Those that even SIGKILL did not end, which only the kernel can hold.
    """
    spared = set(spared)
    _wait_gone(spared, leave_s)
    _send(signal.SIGTERM, spared)
    _wait_gone(spared, term_s)
    _send(signal.SIGKILL, spared)
    return _wait_gone(spared, 1.0)


def _send(signum: signal.Signals, spared: set[psutil.Process]) -> None:
    for process in descendants() - spared:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signum)


def _wait_gone(spared: set[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    deadline = time.monotonic() + timeout_s
    while left := _reap(descendants() - spared):
        if time.monotonic() >= deadline:
            return left
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
