"""Counters of collectives by schedule, written to the event log now and then."""

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringweave.telemetry.events import EventLog

_COUNTERS_FLUSH_S = 1.0


class CollectiveCounters:
    """Cumulative counts per schedule of one group on one rank, written to the event log at intervals.

    Without an event log they are only counted.
    """

    def __init__(
        self, log: "EventLog | None", rank: int, group: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._rank = rank
        self.group = group
        self._clock = clock
        self._lock = threading.Lock()
        self._by_schedule: dict[str, dict[str, int]] = {}
        self._next_flush_s = clock()  # the first collective is written at once, so that even an aborted run shows it
        self._unwritten = False

    def count(self, schedule: str, num_bytes: int, num_messages: int) -> None:
        """Count one collective of `num_bytes` by `schedule`, in `num_messages` sends of this rank."""
        with self._lock:
            row = self._by_schedule.get(schedule)
            if row is None:
                row = self._by_schedule[schedule] = {"collectives": 0, "bytes": 0, "messages": 0}
            row["collectives"] += 1
            row["bytes"] += num_bytes
            row["messages"] += num_messages
            self._unwritten = True
        if self._log is not None and self._clock() >= self._next_flush_s:
            self.flush()

    def snapshot(self) -> dict[str, dict[str, int]]:
        """Return {schedule: {collectives, bytes, messages}} so far."""
        with self._lock:
            return {name: dict(row) for name, row in self._by_schedule.items()}

    def flush(self) -> None:
        """Write the counts if anything is new."""
        self._next_flush_s = self._clock() + _COUNTERS_FLUSH_S
        if self._log is not None and self._unwritten:
            self._unwritten = False
            self._log.write("collectives", rank=self._rank, group=self.group, by_schedule=self.snapshot())
