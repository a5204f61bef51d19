"""Observed states and ends of worker processes."""

from dataclasses import dataclass


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
