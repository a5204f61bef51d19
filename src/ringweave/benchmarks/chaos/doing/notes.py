"""What chaos tells a worker that is to die at a moment only the worker knows, and what that says as it dies: files."""

import contextlib
from pathlib import Path

OFFSET = "RINGWEAVE_CHAOS_OFFSET_S"
"""Environment variable: seconds since 1970, less the monotonic clock, when chaos began."""


RANK = "RINGWEAVE_CHAOS_RANK"
"""Environment variable: rank among all workers, where each of them is told that it is rank 0 of 1."""


def path(events: Path, rank: int) -> Path:
    """Where the note to a rank lies."""
    return events.parent / "faults" / str(rank)


def leave(note: Path, pid: int, moment: str) -> None:
    """For that process and no other of the same rank; what an earlier one has answered is of the past."""
    _answer_to(note).unlink(missing_ok=True)
    _write(note, pid, moment)


def take(note: Path, pid: int) -> str:
    """What the note to this process says, once; empty if there is none."""
    moment = _read(note, pid)
    with contextlib.suppress(FileNotFoundError):
        note.unlink()
    return moment


def answer(note: Path, pid: int, moment: str) -> None:
    """This process dies now, at that moment."""
    _write(_answer_to(note), pid, moment)


def answered(note: Path, pid: int) -> str:
    """The moment at which this process has said that it dies; empty if it said nothing."""
    return _read(_answer_to(note), pid)


def _answer_to(note: Path) -> Path:
    return note.with_name(f"{note.name}.answer")


def _write(file: Path, pid: int, moment: str) -> None:
    """Whole or not there."""
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_name(f"{file.name}.new")
    aside.write_text(f"{pid} {moment}", encoding="ascii")
    aside.replace(file)


def _read(file: Path, pid: int) -> str:
    """What it says of this process."""
    try:
        whose, _, moment = file.read_text(encoding="ascii").partition(" ")
    except OSError:
        return ""
    return moment if whose == str(pid) else ""
