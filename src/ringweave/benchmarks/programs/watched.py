"""A script that is run as it is, while the steps of its optimizer are counted: `watched.py SCRIPT ARGUMENTS...`.

The events go to the run's log, or to the one that RINGWEAVE_EVENTS names. If a script has several optimizers, the first
one that makes a step counts. A worker that finds a note in `faults/RANK` beside the events dies at the moment of its
next step that is written there, and leaves word of it.
"""

import os
import runpy
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ringweave.benchmarks.chaos.doing import notes
from ringweave.benchmarks.programs import moments
from ringweave.environment import WorkerEnvironment
from ringweave.telemetry import EventLog


class Steps:
    """Writes an event for each step of the first optimizer."""

    def __init__(self, log: EventLog, rank: int) -> None:
        self._log, self._rank = log, rank
        self._note = notes.path(log.path, rank)
        self._optimizer: object = None
        self._count = 0

    def watched(self) -> None:
        """This process begins."""
        self._log.write("worker_watched", rank=self._rank, node=socket.gethostname(), pid=os.getpid())

    def done(self, optimizer: Optimizer, *_: Any) -> None:
        """A step was made."""
        self._optimizer = self._optimizer or optimizer
        if optimizer is not self._optimizer:
            return
        self._count += 1
        self._log.write("train_step_done", rank=self._rank, steps_since_start=self._count)
        moment = notes.take(self._note, os.getpid())
        if moment:
            moments.arm(moment, optimizer, self._end)

    def _end(self, reached: str) -> NoReturn:
        """Say at which moment first: nobody else knows whether it was the one that was asked for."""
        with suppress(OSError):  # it dies all the same
            notes.answer(self._note, os.getpid(), reached)
        moments.die()


def steady_clock(environ: Mapping[str, str]) -> Callable[[], float]:
    """Seconds since 1970 as they were when chaos began: the clock that jumps does not tell when it did."""
    offset_s = float(environ.get(notes.OFFSET, time.time() - time.monotonic()))
    return lambda: time.monotonic() + offset_s


def main(argv: list[str]) -> None:
    """Run the script as if nobody watched."""
    path = WorkerEnvironment.from_environ(os.environ).events_path
    assert path is not None, "chaos says where events go"
    steps = Steps(EventLog(path, steady_clock(os.environ)), int(os.environ.get(notes.RANK) or os.environ["RANK"]))
    steps.watched()
    register_optimizer_step_post_hook(steps.done)
    sys.argv, sys.path[0] = argv, str(Path(argv[0]).resolve().parent)
    runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
