"""Interface between a run and the workers of one kind of environment: start, observe, stop, logs."""

import abc
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from ringweave.launcher.workers import WorkerGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerExit:
    """End of a worker process."""

    exit_code: int | None
    """None if a signal ended it."""
    signal_name: str | None
    """`SIGKILL`; None if it ended by itself."""
    time_s: float
    """Time at which its end was observed, on the launcher's clock."""
    was_stopped: bool
    """It ended after the launcher had begun to stop the workers, so its end says nothing about the cause."""

    @property
    def is_success(self) -> bool:
        """It exited by itself with code 0."""
        return self.exit_code == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerState:
    """Observed state of one worker."""

    global_rank: int
    exit: WorkerExit | None
    """None while it runs."""


class Launcher(abc.ABC):
    """Abstract launcher: runs worker groups on one kind of machine. It decides nothing."""

    @abc.abstractmethod
    def start(self, group: WorkerGroup) -> None:
        """Start all workers of the group.

        Raises:
            LaunchError: A worker could not be started; those already started have to be stopped.
        """

    @abc.abstractmethod
    def observe(self) -> Sequence[WorkerState]:
        """Return the current state of every worker, by global rank, without waiting."""

    @abc.abstractmethod
    def stop(self, signum: signal.Signals) -> None:
        """Send a signal to all running workers and their child processes, without waiting.

        Child processes of members of an elastic job get only SIGKILL: the members need them to finish their step.
        """

    @abc.abstractmethod
    def logs(self, global_rank: int, num_lines: int) -> list[str]:
        """Return the last lines of a worker's output."""
