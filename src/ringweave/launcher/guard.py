"""Guard process beside a run: if the launcher is killed, it kills what the workers started.

The kernel kills the workers themselves then (`bootstrap`), but not their children. The guard reads the workers'
session ids from a pipe. A pipe that ends without the word `done` means that the launcher is gone. The id of a worker
that has ended comes again with a minus: once no process of its session is left, the kernel may give that number to
another program, so the guard forgets it. A bare interpreter runs this file as a script, so it imports nothing of
ringweave. A child that opened a session of its own is not found.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path


def main() -> None:
    """Wait for the end of the launcher, then for the end of its workers' sessions."""
    for how in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(how, signal.SIG_IGN)
    end_sessions(read_sessions(sys.stdin))


def read_sessions(lines: Iterable[str]) -> set[int]:
    """Return the sessions that are to be ended, once the launcher is gone; none if it has ended as it should."""
    session_ids: set[int] = set()
    for word in map(str.strip, lines):
        if word == "done":
            return set()
        if not word.startswith("-"):
            session_ids.add(int(word))
        elif int(word[1:]) not in map(_session_of, _running()):
            session_ids.discard(int(word[1:]))
    return session_ids


def end_sessions(session_ids: set[int]) -> None:
    """Kill every process of these sessions, until no new ones appear."""
    while pids := [pid for pid in _running() if _session_of(pid) in session_ids]:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _running() -> Iterable[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _session_of(pid: int) -> int | None:
    """Return the session of a running process."""
    try:
        state, _, _, session = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[:4]
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else int(session)


if __name__ == "__main__":
    main()
