"""What a training script says of itself: iterations done, and the last loss."""

import os
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

from ringweave.environment import WorkerEnvironment
from ringweave.telemetry.events import EventLog

INTERVAL_S = 0.5
"""Between two events of one process; what comes sooner is told by the next, or by `close`."""


class Iterations:
    """Tells the event log how far training is, for `ringweave status`; does nothing outside of a run.

    One worker of each node speaks for it (local rank 0). A context manager, or to be closed in the end:

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
        """`environ` is the process's own environment if it is None."""
        environ = os.environ if environ is None else environ
        run_dir = WorkerEnvironment.from_environ(environ).run_dir
        speaks = run_dir is not None and environ.get("LOCAL_RANK", "0") == "0"
        self._log = EventLog(run_dir / "events.jsonl") if run_dir and speaks else None
        self._rank = int(environ.get("RANK", "0"))
        self._clock = clock
        self._told_s: float | None = None
        self._untold: tuple[int, float | None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def done(self, iterations: int, loss: float | None = None) -> None:
        """So many iterations are done.

        Args:
            iterations: In all, those before a resumed checkpoint included.
            loss: Of the last one, where it is known.
        """
        if self._log is None:
            return
        self._untold = (iterations, loss)
        now_s = self._clock()
        if self._told_s is None or now_s - self._told_s >= INTERVAL_S:
            self._told_s = now_s
            self.close()

    def close(self) -> None:
        """Tell what was not told yet."""
        if self._log is not None and self._untold is not None:
            iterations, loss = self._untold
            self._log.write("iterations_done", rank=self._rank, iterations=iterations, loss=loss)
            self._untold = None
