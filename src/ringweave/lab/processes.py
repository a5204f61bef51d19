"""The processes inside of a lab: found by their namespaces, ended by handles that never mean a stranger."""

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from pathlib import Path

from ringweave.errors import LabError, explain

Namespace = tuple[int, int]
"""Device and inode of a namespace, as stat(2) tells them."""

KINDS = ("net", "uts", "mnt")
TERM_S = 2.0
KILL_S = 3.0


def identify(paths: Collection[Path]) -> set[Namespace]:
    """The namespaces that are mounted at these files; never one that this process is in itself."""
    own = {found for kind in KINDS if (found := _stat(Path(f"/proc/self/ns/{kind}")))}
    return {found for path in paths if (found := _stat(path))} - own


def inside(namespaces: Collection[Namespace]) -> list[int]:
    """Ids of the running processes that are in at least one of these namespaces."""
    return [pid for pid in _running() if _is_inside(pid, namespaces)]


def command_line(pid: int) -> str:
    """What a process was started as; empty if it is gone."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return raw.rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")


def end(namespaces: Collection[Namespace], *, others: Callable[[], Collection[int]] = tuple) -> None:
    """End all processes in these namespaces: SIGTERM, then SIGKILL.

    Args:
        namespaces: Whoever is in one of them is ended.
        others: Ids of the further processes that shall end, as of now.

    Raises:
        LabError: Some do not end.
    """
    _send(signal.SIGTERM, namespaces, others, TERM_S)
    deadline = time.monotonic() + KILL_S
    while left := _send(signal.SIGKILL, namespaces, others, KILL_S):  # again, as they may have forked
        if time.monotonic() > deadline:
            raise LabError(
                explain(
                    "processes of the lab",
                    got=left,
                    expected="them to end when killed",
                    do="Look at them with ps; the kernel holds them",
                )
            )


def _send(
    how: signal.Signals, namespaces: Collection[Namespace], others: Callable[[], Collection[int]], wait_s: float
) -> list[int]:
    """Signal all and wait for their end; the ids of those that it was sent to."""
    with ExitStack() as stack:
        handles: dict[int, int] = {}
        for pid in {*inside(namespaces), *others()}:
            handle = _open(pid)
            if handle is None:
                continue
            stack.callback(os.close, handle)
            if _is_inside(pid, namespaces) or pid in others():  # still the same, now that the handle holds it
                handles[pid] = handle
        for handle in handles.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, how)
        _wait_ended(handles.values(), wait_s)
        return sorted(handles)


def _wait_ended(handles: Collection[int], wait_s: float) -> None:
    poll, left = select.poll(), set(handles)
    for handle in left:
        poll.register(handle, select.POLLIN)
    deadline = time.monotonic() + wait_s
    while left and (rest_s := deadline - time.monotonic()) > 0:
        for handle, _ in poll.poll(rest_s * 1000):
            poll.unregister(handle)
            left.discard(handle)


def _open(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _running() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _is_inside(pid: int, namespaces: Collection[Namespace]) -> bool:
    return any(_stat(Path(f"/proc/{pid}/ns/{kind}")) in namespaces for kind in KINDS)


def _stat(path: Path) -> Namespace | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
