"""What collectives of each kind took, for those who compare it with what was predicted."""

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict

from ringweave.planning import Choice
from ringweave.telemetry.events import EventLog

_INTERVAL_S = 30.0
_MAX_KINDS = 512
_NEWEST = 101
"""Times of a kind that the median is taken of."""

_Key = tuple[int, Choice, int]
"""Version of the plan, what was chosen, bytes."""


class Timings:
    """Times of a group's collectives by plan, schedule, size and pipelining, written to the event log now and then.

    The first rank of a group writes for all. Its times include waiting for ranks that come late.
    """

    def __init__(
        self, log: EventLog | None, rank: int, group: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`log` is None where nothing is to be written."""
        self._log = log
        self._where = {"rank": rank, "group": group}
        self._clock = clock
        self._lock = threading.Lock()
        self._seconds: dict[_Key, deque[float]] = {}
        self._rounds: dict[_Key, int] = {}
        self._unwritten: dict[_Key, None] = {}  # a set that keeps its order
        self._next_flush_s = clock() + _INTERVAL_S

    def note(self, version: int, choice: Choice, num_bytes: int, seconds: float) -> None:
        """A collective by this version of the group's plan took so long on this rank."""
        if self._log is None:
            return
        key = version, choice, num_bytes
        with self._lock:
            if key not in self._seconds and len(self._seconds) >= _MAX_KINDS:
                return
            self._seconds.setdefault(key, deque(maxlen=_NEWEST)).append(seconds)
            self._rounds[key] = self._rounds.get(key, 0) + 1
            self._unwritten[key] = None
        if self._clock() >= self._next_flush_s:
            self.flush()

    def flush(self) -> None:
        """Write what is new."""
        if self._log is None:
            return
        self._next_flush_s = self._clock() + _INTERVAL_S
        with self._lock:
            rows = [(key, statistics.median(self._seconds[key]), self._rounds[key]) for key in self._unwritten]
            self._unwritten.clear()
        for (version, choice, num_bytes), measured_s, rounds in rows:
            fields: dict[str, object] = {"version": version, **asdict(choice)}
            fields["predicted_s"] = choice.predicted_s if choice.predicted_s < float("inf") else None
            measured = {"bytes": num_bytes, "measured_s": measured_s, "rounds": rounds}
            self._log.write("schedule_measured", **self._where, **fields, **measured)
