"""Runner of a user's script that counts the steps of its optimizer: `watched.py SCRIPT ARGUMENTS...`.

The events go to the run's log, or to the one that RINGWEAVE_EVENTS names. If a script has several optimizers, the first
one that makes a step counts. A worker that finds a request in `faults/RANK` beside the events kills itself at the
moment that it names in the next step, and confirms it.
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

from ringweave.environment import WorkerEnvironment
from ringweave.telemetry import EventLog
from ringweave_bench.chaos import kill_requests
from ringweave_bench.programs import moments


class StepCounter:
    """Writes an event for each step of the first optimizer."""

    def __init__(self, log: EventLog, rank: int) -> None:
        self._log, self._rank = log, rank
        self._kill_request = kill_requests.kill_request_path(log.path, rank)
        self._optimizer: object = None
        self._count = 0

    def write_start(self) -> None:
        self._log.write("worker_watched", rank=self._rank, node=socket.gethostname(), pid=os.getpid())

    def count_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._optimizer = self._optimizer or optimizer
        if optimizer is not self._optimizer or not _has_gradients(optimizer):
            return  # without gradients it changed nothing: a step that misses samples is yet to be done
        self._count += 1
        self._log.write("train_step_done", rank=self._rank, steps_since_start=self._count)
        moment = kill_requests.take_kill_request(self._kill_request, os.getpid())
        if moment:
            moments.arm_moment(moment, optimizer, self._confirm_and_die)

    def _confirm_and_die(self, reached: str) -> NoReturn:
        """Confirm the moment first: only this process knows whether it is the requested one."""
        with suppress(OSError):  # it dies all the same
            kill_requests.confirm_kill(self._kill_request, os.getpid(), reached)
        moments.kill_self()


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])


def steady_clock(environ: Mapping[str, str]) -> Callable[[], float]:
    """Return a clock in seconds since 1970, as of the beginning of chaos: it ignores later jumps of the wall clock."""
    offset_s = float(environ.get(kill_requests.CLOCK_OFFSET_VARIABLE, time.time() - time.monotonic()))
    return lambda: time.monotonic() + offset_s


def main(argv: list[str]) -> None:
    """Run the script as if it was not watched."""
    path = WorkerEnvironment.from_environ(os.environ).events_path
    assert path is not None, "chaos says where events go"
    steps = StepCounter(
        EventLog(path, steady_clock(os.environ)), int(os.environ.get(kill_requests.RANK_VARIABLE) or os.environ["RANK"])
    )
    steps.write_start()
    register_optimizer_step_post_hook(steps.count_step)
    sys.argv, sys.path[0] = argv, str(Path(argv[0]).resolve().parent)
    runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
