"""A whole event of every kind, for tests that change a field or two."""

import functools
from typing import Any

from ringweave.telemetry import EVENT_KINDS, EVENTS_FORMAT, events

_COUNTS = {"ring": {"collectives": 1, "bytes": 4, "messages": 2}}
_LINKS = {"1": {"sent_bytes": 400, "busy_s": 0.5, "limited_s": 0.1}}
_VALUES = (1, 0.5, "a", True, None, [1], ["a"], ["0.0"], "0.0", [[0], [1]], {"a->core": 1e6}, {"1": 2})
_VALUES = (*_VALUES, _COUNTS, _LINKS, {"1": {"calls": 2.0}})


@functools.cache
def _example(kind: str) -> dict[str, Any]:
    event: dict[str, Any] = {"time": 1.0, "kind": kind}
    for name in EVENT_KINDS[kind].fields:
        found = (
            value for value in _VALUES if events.find_flaw({**event, name: value}) != f"{kind} with a wrong {name}"
        )
        event[name] = EVENTS_FORMAT if name == "format" else next(found)
    return event


def example(kind: str, **fields: Any) -> dict[str, Any]:
    """Return an event of that kind with these fields, and some value in the others."""
    return {**_example(kind), **fields}
