"""Counters and durations of collectives by schedule, written to the event log now and then."""

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from ringweave.planning import ScheduleChoice
    from ringweave.telemetry.events import EventLog

_TIMINGS_FLUSH_S = 30.0
_MAX_TIMED_KINDS = 512
_NUM_TIMES_KEPT = 101
"""Number of the latest times of a kind whose median is taken."""

_TimingKey: TypeAlias = "tuple[int, ScheduleChoice, int]"
"""Version of the plan, choice, bytes."""


class ScheduleTimings:
    """Durations of a group's collectives by plan, schedule, size and pipelining, written to the event log at intervals.

    The first rank of a group writes for all. Its times include waiting for late ranks.
    """

    def __init__(
        self, log: "EventLog | None", rank: int, group: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`log` is None where nothing is to be written."""
        self._log = log
        self._labels = {"rank": rank, "group": group}
        self._clock = clock
        self._lock = threading.Lock()
        self._seconds: dict[_TimingKey, deque[float]] = {}
        self._rounds: dict[_TimingKey, int] = {}
        self._unwritten: dict[_TimingKey, None] = {}  # a set that keeps its order
        self._next_flush_s = clock() + _TIMINGS_FLUSH_S

    def record(self, version: int, choice: "ScheduleChoice", num_bytes: int, seconds: float) -> None:
        """Record the seconds of a collective on this rank under this version of the plan."""
        if self._log is None:
            return
        key = version, choice, num_bytes
        with self._lock:
            if key not in self._seconds and len(self._seconds) >= _MAX_TIMED_KINDS:
                return
            self._seconds.setdefault(key, deque(maxlen=_NUM_TIMES_KEPT)).append(seconds)
            self._rounds[key] = self._rounds.get(key, 0) + 1
            self._unwritten[key] = None
        if self._clock() >= self._next_flush_s:
            self.flush()

    def flush(self) -> None:
        """Write new times to the log."""
        if self._log is None:
            return
        self._next_flush_s = self._clock() + _TIMINGS_FLUSH_S
        with self._lock:
            rows = [(key, statistics.median(self._seconds[key]), self._rounds[key]) for key in self._unwritten]
            self._unwritten.clear()
        for (version, choice, num_bytes), measured_s, rounds in rows:
            fields: dict[str, object] = {"version": version, **asdict(choice)}
            fields["predicted_s"] = choice.predicted_s if choice.predicted_s < float("inf") else None
            measured = {"bytes": num_bytes, "measured_s": measured_s, "rounds": rounds}
            self._log.write("schedule_measured", **self._labels, **fields, **measured)


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
            row = self._by_schedule.setdefault(schedule, {"collectives": 0, "bytes": 0, "messages": 0})
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
