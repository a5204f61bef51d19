"""The event log of a run: one JSON object per line, appended by every process of the run."""

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ringweave.errors import explain
from ringweave.files import json_text
from ringweave.telemetry.kinds import KINDS

Event = dict[str, Any]

MAX_LINE_BYTES = json_text.MAX_BYTES
"""Of an event; the longest tell of every link of a large cluster. What is longer is none, and is skipped."""

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
    """The events in the file, oldest first; none if there is no file. Torn and endless lines are skipped."""
    for line in Lines(path).new():
        event = parse(line)
        if event is not None:
            yield event


class Lines:
    """Lines as they are added to a file that many write to; each is read once, however long the file has become."""

    def __init__(self, path: str | Path) -> None:
        """`path` need not be there yet."""
        self._path, self._position = Path(path), 0
        self._is_endless = False

    def new(self) -> Iterator[bytes]:
        """Those that came since the last call, each with its end; one being written comes later, an endless one never.

        No more than one of them is in memory.
        """
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            file.seek(self._position)
            while piece := file.readline(MAX_LINE_BYTES):
                is_end, was_endless = piece.endswith(b"\n"), self._is_endless
                if not is_end and len(piece) < MAX_LINE_BYTES:
                    return
                self._position += len(piece)
                self._is_endless = not is_end
                if is_end and not was_endless:
                    yield piece


class Tail:
    """Events as they are added to a file."""

    def __init__(self, path: str | Path) -> None:
        """`path` need not be there yet."""
        self._lines = Lines(path)

    def new(self) -> list[Event]:
        """Those that came since the last call, oldest first. Torn lines are skipped; one being written comes later.

        Raises:
            OSError: The file cannot be read, and nothing new was.
        """
        found: list[Event] = []
        try:
            found += filter(None, map(parse, self._lines.new()))
        except OSError:
            if not found:
                raise
        return found


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


def parse(line: bytes) -> Event | None:
    """The event in a line; None if it is torn, or something else."""
    try:
        event = json_text.loads(line.decode("utf-8", errors="replace"), MAX_LINE_BYTES)
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("kind"), str) else None
