"""The event log: what happened in a run, written by one writer and read by everything that shows something."""

from ringweave.telemetry.events import Event, EventLog, Lines, Tail, parse, read, read_last_attempt
from ringweave.telemetry.iterations import Iterations
from ringweave.telemetry.kind import Kind
from ringweave.telemetry.kinds import KINDS
from ringweave.telemetry.saying import say

__all__ = [
    "KINDS",
    "Event",
    "EventLog",
    "Iterations",
    "Kind",
    "Lines",
    "Tail",
    "parse",
    "read",
    "read_last_attempt",
    "say",
]
