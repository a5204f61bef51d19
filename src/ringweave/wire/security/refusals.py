"""What is written down about those who were not let in, and how much of it."""

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

_QUIET_S = 10.0
_MOST_KEPT = 256


class Record(Protocol):
    """Writes an event down: `telemetry.EventLog.write`."""

    def __call__(self, kind: str, **fields: object) -> None:
        """Append one event of that kind."""
        ...


@dataclass(slots=True)
class _Seen:
    last_s: float
    unwritten: int = 0


class Refusals:
    """Counts refusals and records them: each reason and host at once, then at most every ten seconds.

    A stranger who knocks a thousand times a second cannot fill a disk, nor the memory.
    """

    def __init__(self, service: str, record: Record | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`service` is who refuses, as its identity prints."""
        self.total = 0
        self._service = service
        self._record = record
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: dict[tuple[str, str], _Seen] = {}

    def add(self, reason: str, host: str, port: int, text: str) -> None:
        """Note a refusal.

        Args:
            reason: One word for it: `certificate`, `token`, `job`, `role`, `message`, `deadline`, `full`.
            host: Address of the one refused.
            port: Its port.
            text: The error's text.
        """
        count = self._count(reason, host)
        if count and self._record is not None:
            with contextlib.suppress(OSError):  # a full disk must not open the door, nor close it
                self._record(
                    "wire_refused",
                    service=self._service,
                    peer=f"{host}:{port}",
                    reason=reason,
                    text=text[:1000],
                    refusals=count,
                )

    def _count(self, reason: str, host: str) -> int:
        """How many refusals the event stands for; 0 if none is due."""
        with self._lock:
            self.total += 1
            now_s = self._clock()
            seen = self._seen.get((reason, host))
            if seen is not None and now_s - seen.last_s < _QUIET_S:
                seen.unwritten += 1
                return 0
            if seen is None and len(self._seen) >= _MOST_KEPT:
                self._seen.pop(next(iter(self._seen)))
            self._seen[reason, host] = _Seen(now_s)
            return 1 + (seen.unwritten if seen is not None else 0)
