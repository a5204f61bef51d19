"""Main program of the supervisor of one job on this machine: waits for its turn to start, then supervises.

    python -m ringweave.platforms.local.supervisor_main STATE ID

A job's start loads Python several times: here, in its agents, in its workers. Of many jobs that are submitted at once
as many start at a time as this machine has cores, so that the machine is not out of memory or out of descriptors, and
commands are answered meanwhile. Modules are imported only when it is the job's turn.
"""

import contextlib
import fcntl
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

STARTING_FOLDER = "starting"
"""Folder with a lock for each job that may start at a time."""
TURN_TIMEOUT_S = 300.0
"""Upper limit of the wait for a turn; a process that was stopped would block those behind it for ever."""
START_TIMEOUT_S = 20.0
"""Time after which a job whose groups are still starting gives its turn to the next one."""


def take_turn(state: Path, *, num_turns: int, timeout_s: float = TURN_TIMEOUT_S) -> Callable[[], None]:
    """Wait until fewer than `num_turns` jobs are starting; return the function that ends the turn.

    The turn ends by itself after `START_TIMEOUT_S`. The kernel serves the processes that wait for one lock in order,
    and no process polls. The main thread alone may call this.

    Raises:
        OSError: The folder cannot be written.
    """
    folder = state / STARTING_FOLDER
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(folder / str(os.getpid() % num_turns), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    before = signal.signal(signal.SIGALRM, _raise_timeout)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        with contextlib.suppress(TimeoutError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    ends_once = threading.Lock()

    def end() -> None:
        if ends_once.acquire(blocking=False):
            os.close(descriptor)

    timer = threading.Timer(START_TIMEOUT_S, end)
    timer.daemon = True
    timer.start()
    return end


def _raise_timeout(signum: int, frame: FrameType | None) -> None:
    raise TimeoutError


def main(state: Path, job_id: str) -> None:
    """Supervise the job; see `supervisor.main`."""
    end_turn: Callable[[], None] = lambda: None  # noqa: E731
    with contextlib.suppress(OSError):  # a full disk; the job starts without a turn
        end_turn = take_turn(state, num_turns=len(os.sched_getaffinity(0)))
    from ringweave.platforms.local import supervisor

    supervisor.main(state, job_id, end_turn)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
