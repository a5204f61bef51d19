"""The event log: each process of a run appends events; status, plots and tests read them."""

from ringweave.telemetry.events import (
    Event,
    EventLog,
    EventTail,
    Iterations,
    LineReader,
    RunTail,
    UnreadRecords,
    parse_event,
    print_line,
    read_events,
    read_last_attempt,
    read_run,
)
from ringweave.telemetry.kinds import EVENT_KINDS, EVENTS_FORMAT, EventKind

__all__ = [
    "EVENTS_FORMAT",
    "EVENT_KINDS",
    "Event",
    "EventKind",
    "EventLog",
    "EventTail",
    "Iterations",
    "LineReader",
    "RunTail",
    "UnreadRecords",
    "parse_event",
    "print_line",
    "read_events",
    "read_last_attempt",
    "read_run",
]
