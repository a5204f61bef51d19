"""The event log: each process of a run appends events; status, plots and tests read them."""

from ringweave.telemetry.events import (
    UNLISTED_FIELDS,
    Event,
    EventLog,
    EventTail,
    Iterations,
    UnreadRecords,
    event_lines,
    event_writer,
    parse_event,
    print_line,
    read_events,
    read_last_attempt,
    read_run,
)
from ringweave.telemetry.kinds import EVENT_KINDS, EVENTS_FORMAT, MAX_CLUSTER_TEXT
