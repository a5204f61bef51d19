"""Kill requests: files that ask a worker to kill itself at a moment that only the worker knows."""

import contextlib
from pathlib import Path

CLOCK_OFFSET_VARIABLE = "RINGWEAVE_CHAOS_OFFSET_S"
"""Environment variable: seconds since 1970, less the monotonic clock, when chaos began."""


RANK_VARIABLE = "RINGWEAVE_CHAOS_RANK"
"""Environment variable: rank among all workers, where each of them is told that it is rank 0 of 1."""


def kill_request_path(events: Path, rank: int) -> Path:
    """Return the path of the request to a rank."""
    return events.parent / "faults" / str(rank)


def write_kill_request(request: Path, pid: int, moment: str) -> None:
    """Write a request to this process only, not to others of the same rank; earlier confirmations are deleted."""
    _confirmation_path(request).unlink(missing_ok=True)
    _write_atomically(request, pid, moment)


def take_kill_request(request: Path, pid: int) -> str:
    """Return the moment requested of this process, once; empty if there is no request."""
    moment = _read_moment(request, pid)
    with contextlib.suppress(FileNotFoundError):
        request.unlink()
    return moment


def confirm_kill(request: Path, pid: int, moment: str) -> None:
    """Confirm that this process dies now, at that moment."""
    _write_atomically(_confirmation_path(request), pid, moment)


def confirmed_moment(request: Path, pid: int) -> str:
    """Return the moment that this process confirmed; empty if none."""
    return _read_moment(_confirmation_path(request), pid)


def _confirmation_path(request: Path) -> Path:
    return request.with_name(f"{request.name}.answer")


def _write_atomically(file: Path, pid: int, moment: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_name(f"{file.name}.new")
    aside.write_text(f"{pid} {moment}", encoding="ascii")
    aside.replace(file)


def _read_moment(file: Path, pid: int) -> str:
    """Return the moment that the file gives for this process."""
    try:
        owner, _, moment = file.read_text(encoding="ascii").partition(" ")
    except OSError:
        return ""
    return moment if owner == str(pid) else ""
