"""The seam between a run and the place where it runs: start, observe, stop, logs."""

import abc
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from ringweave.launch.workers import WorkerGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class Exit:
    """How a worker ended."""

    exit_code: int | None
    """None if a signal ended it."""
    signal_name: str | None
    """`SIGKILL`; None if it ended by itself."""
    time_s: float
    """When it was seen to have ended, on the launcher's clock."""
    stopped: bool
    """It ended after the launcher had begun to stop the workers, so it tells nothing about the cause."""

    @property
    def is_good(self) -> bool:
        """It ended by itself with exit code 0."""
        return self.exit_code == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerState:
    """What is seen of one worker."""

    global_rank: int
    exit: Exit | None
    """None while it runs."""


class Launcher(abc.ABC):
    """Runs worker groups in one kind of place. What to do, and when, is decided elsewhere."""

    @abc.abstractmethod
    def start(self, group: WorkerGroup) -> None:
        """Start all workers of the group.

        Raises:
            LaunchError: A worker could not be started; those already started have to be stopped.
        """

    @abc.abstractmethod
    def observe(self) -> Sequence[WorkerState]:
        """The state of every worker now, by global rank; returns at once."""

    @abc.abstractmethod
    def stop(self, how: signal.Signals) -> None:
        """Send a signal to all workers that still run, and to what they started; returns at once.

        What members of an elastic job started gets SIGKILL alone: they need it to finish their step.
        """

    @abc.abstractmethod
    def logs(self, global_rank: int, num_lines: int) -> list[str]:
        """The last lines that a worker printed."""
