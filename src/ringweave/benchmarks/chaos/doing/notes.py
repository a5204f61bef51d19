"""What chaos tells a worker that is to die at a moment only the worker knows: a note, a file beside the events."""

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
    """For that process and no other of the same rank; whole or not there."""
    note.parent.mkdir(parents=True, exist_ok=True)
    aside = note.with_name(f"{note.name}.new")
    aside.write_text(f"{pid} {moment}", encoding="ascii")
    aside.replace(note)


def take(note: Path, pid: int) -> str:
    """What the note to this process says, once; empty if there is none."""
    try:
        wanted, _, moment = note.read_text(encoding="ascii").partition(" ")
    except OSError:
        return ""
    with contextlib.suppress(FileNotFoundError):
        note.unlink()
    return moment if wanted == str(pid) else ""
