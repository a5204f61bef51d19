"""How far the workers of a round are: iterations done and last loss, from their run's event log as it grows."""

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A node's own iteration result."""

    iterations: int | None = None
    """Training steps done; None where the script reports none."""
    last_loss: float | None = None
    """The loss of the last one; None likewise."""


class Results:
    """Reads what was appended to the event log since the last look, and no more."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._result = Result()

    def look(self) -> Result:
        """The newest result; returns at once."""
        try:
            with self._path.open("rb") as log:
                log.seek(self._position)
                lines = log.read().splitlines(keepends=True)
        except FileNotFoundError:
            return self._result
        for line in lines:
            if not line.endswith(b"\n"):  # still being written
                break
            self._position += len(line)
            if b'"iterations_done"' in line:
                self._take(line)
        return self._result

    def _take(self, line: bytes) -> None:
        try:
            event = json.loads(line)
            if event["kind"] == "iterations_done":
                self._result = Result(iterations=event["iterations"], last_loss=event["loss"])
        except (ValueError, KeyError, TypeError):  # a torn line
            return
