"""Processes inside a lab: found by their namespaces, signalled through pidfds so that a reused pid is never hit."""

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from pathlib import Path

from ringweave.errors import LabError

NamespaceId = tuple[int, int]
"""Device and inode of a namespace, from stat(2)."""

NAMESPACE_KINDS = ("net", "uts", "mnt")
TERM_WAIT_S = 2.0
KILL_WAIT_S = 3.0


def identify_namespaces(paths: Collection[Path]) -> set[NamespaceId]:
    """Return the namespaces that are mounted at these files, except those that this process is in."""
    own = {found for kind in NAMESPACE_KINDS if (found := namespace_id(Path(f"/proc/self/ns/{kind}")))}
    return {found for path in paths if (found := namespace_id(path))} - own


def pids_inside(namespaces: Collection[NamespaceId]) -> list[int]:
    """Return ids of the running processes that are in at least one of these namespaces."""
    return [pid for pid in all_pids() if _is_inside(pid, namespaces)]


def command_line(pid: int) -> str:
    """Return the command line that started a process; empty if it is gone."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return raw.rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")


def end_processes(namespaces: Collection[NamespaceId], *, other_pids: Callable[[], Collection[int]] = tuple) -> None:
    """End all processes in these namespaces: SIGTERM, then SIGKILL.

    Raises:
        LabError: Some processes do not end.
    """
    _signal_all(signal.SIGTERM, namespaces, other_pids, TERM_WAIT_S)
    deadline = time.monotonic() + KILL_WAIT_S
    while left := _signal_all(signal.SIGKILL, namespaces, other_pids, KILL_WAIT_S):  # again, as they may have forked
        if time.monotonic() > deadline:
            raise LabError(
                "processes of the lab",
                got=left,
                expected="them to end when killed",
                do="Look at them with ps; the kernel holds them",
            )


def _signal_all(
    signal_number: signal.Signals,
    namespaces: Collection[NamespaceId],
    other_pids: Callable[[], Collection[int]],
    wait_s: float,
) -> list[int]:
    """Signal all processes and wait for their end; return the ids that the signal went to."""
    with ExitStack() as stack:
        handles: dict[int, int] = {}
        for pid in {*pids_inside(namespaces), *other_pids()}:
            handle = _open_pidfd(pid)
            if handle is None:
                continue
            stack.callback(os.close, handle)
            if _is_inside(pid, namespaces) or pid in other_pids():  # still the same, now that the handle holds it
                handles[pid] = handle
        for handle in handles.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal_number)
        _wait_exited(handles.values(), wait_s)
        return sorted(handles)


def _wait_exited(handles: Collection[int], wait_s: float) -> None:
    poll, left = select.poll(), set(handles)
    for handle in left:
        poll.register(handle, select.POLLIN)
    deadline = time.monotonic() + wait_s
    while left and (rest_s := deadline - time.monotonic()) > 0:
        for handle, _ in poll.poll(rest_s * 1000):
            poll.unregister(handle)
            left.discard(handle)


def _open_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def all_pids() -> Iterator[int]:
    """Yield the ids of all processes that this one sees."""
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _is_inside(pid: int, namespaces: Collection[NamespaceId]) -> bool:
    return any(namespace_id(Path(f"/proc/{pid}/ns/{kind}")) in namespaces for kind in NAMESPACE_KINDS)


def namespace_id(path: Path) -> NamespaceId | None:
    """Return the namespace of a file, or of an entry in /proc/PID/ns; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
