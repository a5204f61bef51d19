"""Counters of collectives by schedule, and of traffic by peer, written to the event log now and then."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

from ringweave.comm.transport.interface import LinkTraffic

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
        self._traffic: TrafficRecorder | None = None

    def attach_traffic(self, recorder: "TrafficRecorder") -> None:
        """Count collectives by schedules there too."""
        self._traffic = recorder

    def begin_collective(self) -> None:
        """Note that a scheduled collective is in flight from here on, until `end_collective`."""
        if self._traffic is not None:
            self._traffic.begin_collective()

    def end_collective(self, num_bytes: int) -> None:
        if self._traffic is not None:
            self._traffic.end_collective(num_bytes)

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

    def close(self) -> None:
        self.flush()
        if self._traffic is not None:
            self._traffic.flush()


class TrafficRecorder:
    """Writes the scheduled collectives of this rank in one group, and the traffic to each peer, by windows."""

    def __init__(
        self,
        log: "EventLog",
        where: Mapping[str, object],
        read_links: Callable[[], Mapping[int, LinkTraffic]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin a window.

        Args:
            log: Gets the events.
            where: Their fields `rank`, `node` and `group`.
            read_links: Returns the sums so far, by global rank of the peer.
            clock: Monotonic seconds.
        """
        from ringweave.telemetry import process_usage  # late: a group without an event log needs none of it

        self._log, self._where, self._read_links, self._clock = log, dict(where), read_links, clock
        self._window_length_s = process_usage.window_length_s
        self._usage = process_usage.of_this_process()
        self._lock = threading.Lock()
        self._first_s = self._begun_s = self._flight_begun_s = clock()
        self._num_in_flight, self._num_ended, self._num_bytes, self._in_flight_s = 0, 0, 0, 0.0
        self._links: dict[int, LinkTraffic] = {}
        self._before = self._usage.read()

    def begin_collective(self) -> None:
        with self._lock:
            if self._num_in_flight == 0:
                self._flight_begun_s = self._clock()
            self._num_in_flight += 1

    def end_collective(self, num_bytes: int) -> None:
        """Note that a collective has ended, and write the window if it is over."""
        with self._lock:
            now_s = self._clock()
            self._num_in_flight -= 1
            if self._num_in_flight == 0:
                self._in_flight_s += now_s - self._flight_begun_s
            self._num_ended, self._num_bytes = self._num_ended + 1, self._num_bytes + num_bytes
            is_over = now_s - self._begun_s >= self._window_length_s(self._begun_s - self._first_s)
        if is_over:
            self.flush()

    def flush(self) -> None:
        """Write the window, unless no collective has ended in it, and begin another one."""
        with self._lock:
            now_s = self._clock()
            if self._num_in_flight:
                self._in_flight_s += now_s - self._flight_begun_s
                self._flight_begun_s = now_s
            if not self._num_ended:
                return
            links, usage = dict(self._read_links()), self._usage.read()
            window = {
                "wall_s": round(now_s - self._begun_s, 6),
                "in_flight_s": round(self._in_flight_s, 6),
                "collectives": self._num_ended,
                "bytes": self._num_bytes,
                "links": {
                    str(peer): asdict(traffic.since(self._links.get(peer, LinkTraffic())))
                    for peer, traffic in links.items()
                },
                **{name: round(value - self._before[name], 6) for name, value in usage.items()},
            }
            self._begun_s, self._links, self._before = now_s, links, usage
            self._num_ended, self._num_bytes, self._in_flight_s = 0, 0, 0.0
        self._log.write("traffic_measured", **self._where, **window)
