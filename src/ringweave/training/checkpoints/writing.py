"""The thread that writes: the newest that is asked for, one at a time, and gone when there is nothing to do."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from ringweave.training.checkpoints.staging import Staged


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One checkpoint to be written."""

    train_step: int
    staged: Staged | None
    """None where some of it is still at a parameter server."""
    document: dict
    copy_s: float
    """How long training waited for it."""
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    """What is known of it, where that is not staged yet."""


class Writer:
    """Runs jobs in a thread. At most one waits: a disk that is too slow gets fewer checkpoints, and stalls nobody."""

    def __init__(self, run: Callable[[Job], None], passed_over: Callable[[Job], None]) -> None:
        """`run` writes a job, and tells of its failure itself; `passed_over` gets one that a newer one replaced."""
        self._run, self._passed_over = run, passed_over
        self._changed = threading.Condition()
        self._waiting: Job | None = None
        self._thread: threading.Thread | None = None

    def submit(self, job: Job) -> None:
        """Have it written soon. At the end of the program Python waits for it."""
        with self._changed:
            replaced, self._waiting = self._waiting, job
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="ringweave-checkpoints", daemon=False)
                self._thread.start()
        if replaced is not None:
            self._passed_over(replaced)

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is left to write; False if time was up before."""
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, timeout_s)

    def _work(self) -> None:
        while (job := self._next()) is not None:
            self._run(job)

    def _next(self) -> Job | None:
        with self._changed:
            job, self._waiting = self._waiting, None
            if job is None:
                self._thread = None
                self._changed.notify_all()
            return job
