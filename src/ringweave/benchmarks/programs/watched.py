"""A script that is run as it is, while the steps of its optimizer are counted: `watched.py SCRIPT ARGUMENTS...`.

The events go to the run's log, or to the one that RINGWEAVE_EVENTS names. If a script has several optimizers, the first
one that makes a step counts.
"""

import os
import runpy
import socket
import sys
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from ringweave.environment import WorkerEnvironment
from ringweave.telemetry import EventLog


class Steps:
    """Writes an event for each step of the first optimizer."""

    def __init__(self, log: EventLog, rank: int) -> None:
        self._log, self._rank = log, rank
        self._optimizer: object = None
        self._count = 0

    def watched(self) -> None:
        """This process begins."""
        self._log.write("worker_watched", rank=self._rank, node=socket.gethostname(), pid=os.getpid())

    def done(self, optimizer: object, *_: Any) -> None:
        """A step was made."""
        self._optimizer = self._optimizer or optimizer
        if optimizer is self._optimizer:
            self._count += 1
            self._log.write("train_step_done", rank=self._rank, steps_since_start=self._count)


def main(argv: list[str]) -> None:
    """Run the script as if nobody watched."""
    path = WorkerEnvironment.from_environ(os.environ).events_path
    assert path is not None, "chaos says where events go"
    steps = Steps(EventLog(path), int(os.environ["RANK"]))
    steps.watched()
    register_optimizer_step_post_hook(steps.done)
    sys.argv, sys.path[0] = argv, str(Path(argv[0]).resolve().parent)
    runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
