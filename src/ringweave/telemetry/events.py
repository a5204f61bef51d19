"""The event log of a run: one JSON object per line, appended by every process of the run."""

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ringweave.errors import explain
from ringweave.telemetry.kinds import KINDS

Event = dict[str, Any]

_LOGGER = logging.getLogger("ringweave")


class EventLog:
    """Appends events to one file; any number of processes may do so at once.

    Each event is one write to a file opened for appending, so lines of different processes never mix. The file is
    opened for each event: events are rare, and nothing has to be closed or survive a fork. A disk that is full or gone
    costs events and nothing else; it is said in the log `ringweave`.
    """

    def __init__(self, path: str | Path, clock: Callable[[], float] = time.time) -> None:
        self.path = Path(path)
        self._clock = clock
        self._is_torn = False

    def write(self, kind: str, **fields: object) -> None:
        """Append one event.

        Args:
            kind: A name in `kinds.KINDS`.
            fields: Exactly the fields of that kind.

        Raises:
            ValueError: The kind is unknown, or the fields are not those of the kind.
        """
        _check(kind, fields)
        line = (json.dumps({"time": self._clock(), "kind": kind, **fields}) + "\n").encode()
        try:
            self._append(line)
        except OSError as error:
            _LOGGER.warning(
                "event %s: %s, expected to be written. It is lost, the work goes on. [%s]", kind, error, self.path
            )

    def _append(self, line: bytes) -> None:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            written = os.write(descriptor, b"\n" + line if self._is_torn else line)
            self._is_torn = written < len(line)
        finally:
            os.close(descriptor)


def read(path: str | Path) -> Iterator[Event]:
    """The events in the file, oldest first; none if there is no file. Torn lines are skipped."""
    path = Path(path)
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            event = _parse(line)
            if event is not None:
                yield event


class Tail:
    """Events as they are added to a file; each is read once, however long the file has become."""

    def __init__(self, path: str | Path) -> None:
        """`path` need not be there yet."""
        self._path, self._position = Path(path), 0

    def new(self) -> list[Event]:
        """Those that came since the last call, oldest first. Torn lines are skipped; one being written comes later."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                added = file.read()
        except FileNotFoundError:
            return []
        whole = added[: added.rfind(b"\n") + 1]
        self._position += len(whole)
        found = (_parse(f"{line}\n") for line in whole.decode("utf-8", errors="replace").split("\n"))
        return [event for event in found if event is not None]


def read_last_attempt(path: str | Path) -> list[Event]:
    """The events since the last `run_started`: those of the newest attempt in a run directory."""
    events: list[Event] = []
    for event in read(path):
        if event["kind"] == "run_started":
            events.clear()
        events.append(event)
    return events


def _check(kind: str, fields: dict[str, object]) -> None:
    if kind not in KINDS:
        raise ValueError(
            explain("event kind", got=kind, expected=f"one of {', '.join(KINDS)}", do="Add it to kinds.py")
        )
    wanted = KINDS[kind].fields.keys()
    if fields.keys() != wanted:
        raise ValueError(
            explain(
                f"fields of event {kind}",
                got=", ".join(sorted(fields)),
                expected=", ".join(sorted(wanted)),
                do="Write exactly the fields that kinds.py lists",
            )
        )


def _parse(line: str) -> Event | None:
    if not line.endswith("\n"):
        return None
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "kind" in event else None
