"""Progress of a training script: iterations done and the last loss, written to the event log."""

import os
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

from ringweave.environment import WorkerEnvironment
from ringweave.telemetry.events import EventLog

INTERVAL_S = 0.5
"""Shortest time between two events of one process; a sooner iteration is reported by the next event, or by `close`."""


class Iterations:
    """Reports the progress of training to the event log, for `ringweave status`; does nothing outside of a run.

    Only one worker of each node writes (local rank 0). Use it as a context manager, or close it in the end:

        with ringweave.Iterations() as iterations:
            for step, batch in enumerate(batches, 1):
                ...
                iterations.done(step, loss.item())
    """

    def __init__(
        self,
        environ: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`environ` None: the process's own environment."""
        environ = os.environ if environ is None else environ
        run_dir = WorkerEnvironment.from_environ(environ).run_dir
        writes_events = run_dir is not None and environ.get("LOCAL_RANK", "0") == "0"
        self._log = EventLog(run_dir / "events.jsonl") if run_dir and writes_events else None
        self._rank = int(environ.get("RANK", "0"))
        self._clock = clock
        self._last_written_s: float | None = None
        self._pending: tuple[int, float | None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def done(self, iterations: int, loss: float | None = None) -> None:
        """Report the number of iterations done.

        Args:
            iterations: In all, including those before a resumed checkpoint.
            loss: Loss of the last one, if known.
        """
        if self._log is None:
            return
        self._pending = (iterations, loss)
        now_s = self._clock()
        if self._last_written_s is None or now_s - self._last_written_s >= INTERVAL_S:
            self._last_written_s = now_s
            self.close()

    def close(self) -> None:
        """Write the last iteration, unless it is written already."""
        if self._log is not None and self._pending is not None:
            iterations, loss = self._pending
            self._log.write("iterations_done", rank=self._rank, iterations=iterations, loss=loss)
            self._pending = None
