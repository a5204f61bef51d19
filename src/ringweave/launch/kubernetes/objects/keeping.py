"""Logs of attempts whose Pod goes: kept in a ConfigMap each until the job is forgotten."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ringweave.launch.kubernetes import names
from ringweave.launch.kubernetes.objects.owning import Object, Owner

MAX_BYTES = 512 * 1024
"""Of one attempt's log, its end; a ConfigMap has room for 1 MiB."""
MAX_LINES = 20_000
READ_S = 20.0
"""A node that has not sent the whole of a log by then does not answer."""
PATIENCE_S = 10.0
"""So long a Pod that is to go stays because its log cannot be read; its successor waits for that."""
LOG = "log"
LOG_LABEL = f"{names.GROUP}/log"


def has_log(pod: Mapping[str, Any]) -> bool:
    """A container of it has run."""
    statuses = pod.get("status", {}).get("containerStatuses", ())
    return any({"running", "terminated"} & item.get("state", {}).keys() for item in statuses)


@dataclass(slots=True)
class Tail:
    """The last lines that were added, as many as are kept."""

    lines: deque[str] = field(default_factory=deque)
    _num_bytes: int = 0

    def add(self, line: str) -> None:
        """One more; the oldest go that are not needed any more."""
        self.lines.append(line)
        self._num_bytes += len(line.encode()) + 1
        while self._num_bytes - len(self.lines[0].encode()) - 1 >= MAX_BYTES:
            self._num_bytes -= len(self.lines.popleft().encode()) + 1


def unread(error: Exception) -> str:
    """The line that stands for a log, or the end of one, that could not be had."""
    why = str(error) or f"no answer in {READ_S:g} s"
    return f"[ringweave] the rest of this log could not be read: {why}"


def log_map(owner: Owner, pod: Mapping[str, Any], lines: Iterable[str]) -> Object:
    """The ConfigMap that keeps what a Pod printed."""
    labels = pod["metadata"]["labels"]
    of_attempt = {key: labels[key] for key in (names.NODE_LABEL, names.ATTEMPT_LABEL)}
    text = "\n".join(lines).replace("\0", "")
    kept = text.encode()[-MAX_BYTES:].decode("utf-8", "ignore")
    metadata = owner.metadata(f"{pod['metadata']['name']}-log", **{LOG_LABEL: "true"}, **of_attempt)
    return {"metadata": metadata, "data": {LOG: kept}}
