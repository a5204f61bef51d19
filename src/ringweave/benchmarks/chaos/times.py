"""Events of processes whose wall clock jumps, put back in time by the order of their lines. Pure."""

from collections.abc import Sequence

from ringweave.telemetry import Event

_STEADY = (
    "worker_watched",
    "train_step_done",
    "fault_begun",
    "fault_lifted",
    "chaos_ended",
    "worker_started",
    "worker_exited",
)
"""Written by the clock of when chaos began, or by processes outside of all nodes."""


def steady(events: Sequence[Event]) -> list[Event]:
    """The same events in the same order; a time that cannot be is that of the last event before whose clock is steady.

    Lines are appended as things happen, so what stands between two steady events has happened between them. A time off
    by less than a second is left alone: processes overtake each other on their way to the file.
    """
    latest_s = [0.0] * len(events)
    next_s = float("inf")
    for index in range(len(events) - 1, -1, -1):
        latest_s[index] = next_s
        if events[index]["kind"] in _STEADY:
            next_s = min(next_s, events[index]["time"])
    found, before_s = [], float("-inf")
    for event, after_s in zip(events, latest_s, strict=True):
        if event["kind"] in _STEADY:
            before_s = max(before_s, event["time"])
            found.append(event)
        elif before_s - 1 <= event["time"] <= after_s + 1 or before_s == float("-inf"):
            found.append(event)
        else:
            found.append({**event, "time": before_s})
    return found
