"""Who lives: a file is locked as long as a process, or one that inherited its descriptor, runs."""

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

INHERITED = 3
"""The descriptor by which a spawned process holds its lock."""


def try_lock(path: Path) -> int | None:
    """A descriptor that locks the file, to be closed or handed on; None if somebody holds it.

    Raises:
        OSError: The file cannot be made.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_held(path: Path) -> bool:
    """Somebody holds it; False also where there is no such file."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def spawn(argv: Sequence[str], environ: Mapping[str, str], *, lock: int, log: Path) -> int:
    """Start a process that outlives this one and its terminal, and that holds the lock; its process id.

    Args:
        argv: Command line, the program's full path first.
        environ: Its environment.
        lock: Descriptor of the lock; stays open here. The process has it as `INHERITED`.
        log: Gets its standard error, at the end; its standard output goes nowhere.

    Raises:
        OSError: It cannot be started.
    """
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
        (os.POSIX_SPAWN_OPEN, 2, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
        (os.POSIX_SPAWN_DUP2, lock, INHERITED),
    ]
    return os.posix_spawn(argv[0], list(argv), dict(environ), file_actions=actions, setsid=True)


def reap(pids: Sequence[int]) -> list[int]:
    """Those of our children that still run; the ended ones are collected."""
    running = []
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                running.append(pid)
    return running


@contextlib.contextmanager
def wait_locked(path: Path) -> Iterator[None]:
    """Hold the file for the length of a block; waits for whoever holds it.

    Raises:
        OSError: The file cannot be made.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def holders(path: Path) -> Sequence[int]:
    """Processes of this machine that have the lock's file open, as far as this user may look; those that hold it do."""
    wanted, found = os.path.realpath(path), []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and any(str(each.readlink()) == wanted for each in (entry / "fd").iterdir()):
                found.append(int(entry.name))
    return found
