"""Logs of attempts whose Pod goes: kept in a ConfigMap each until the job is forgotten."""

import os
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringweave.launch.kubernetes import names
from ringweave.launch.kubernetes.api.failures import ApiError
from ringweave.launch.kubernetes.objects import seeing
from ringweave.launch.kubernetes.objects.owning import Object, Owner
from ringweave.launch.kubernetes.objects.pods import CONTAINER
from ringweave.launch.run_dirs import RunDir

MAX_BYTES = 512 * 1024
"""Of one attempt's log, its end; a ConfigMap has room for 1 MiB."""
MAX_LINES = 20_000
READ_S = 20.0
"""A node that has not sent the whole of a log by then does not answer."""
PATIENCE_S = 10.0
"""So long a Pod that is to go stays because its log cannot be read; its successor waits for that."""
ROUND = "[ringweave] round "
"""Begins the line by which an agent says that its workers start, for which round."""
LOG = "log"
LOG_LABEL = f"{names.GROUP}/log"


def has_log(pod: Mapping[str, Any]) -> bool:
    """Its workers' container has run."""
    return bool({"running", "terminated"} & seeing.state_of(pod).keys())


def asked_for(**params: str) -> dict[str, str]:
    """The parameters of a request for the log of a Pod: of the workers' container, whatever else is in it."""
    return {"container": CONTAINER, **params}


def has_nothing_to_tell(error: ApiError) -> bool:
    """The API server has no log, since nothing ran, or nothing is left of it."""
    return error.is_gone or (error.status == 400 and "waiting to start" in error.message)


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


def printed(home: Path) -> list[str]:
    """What the workers of an attempt printed, as its Pod's log has it, but rank by rank: the end of each one's.

    Args:
        home: Folder of the attempt, with a run directory for each round.
    """
    rounds = sorted((int(path.name.removeprefix("round-")), path) for path in home.glob("round-*"))
    logs = [(round_, RunDir(root=path).logs_by_rank()) for round_, path in rounds]
    most_bytes = MAX_BYTES // max(1, sum(len(by_rank) for _, by_rank in logs))
    lines = []
    for round_, by_rank in logs:
        lines.append(f"{ROUND}{round_}")
        for rank, path in by_rank.items():
            lines += [f"[{rank}] {line}" for line in _end(path, most_bytes)]
    return lines


def _end(path: Path, most_bytes: int) -> list[str]:
    """The last whole lines of a file."""
    with path.open("rb") as log:
        size = log.seek(0, os.SEEK_END)
        log.seek(max(0, size - most_bytes))
        lines = log.read().decode("utf-8", "replace").split("\n")
    whole = lines if size <= most_bytes else lines[1:]
    return whole if whole and whole[-1] else whole[:-1]


def log_map(owner: Owner, pod: Mapping[str, Any], lines: Iterable[str]) -> Object:
    """The ConfigMap that keeps what a Pod printed."""
    labels = pod["metadata"]["labels"]
    of_attempt = {key: labels[key] for key in (names.NODE_LABEL, names.ATTEMPT_LABEL)}
    text = "\n".join(lines).replace("\0", "")
    kept = text.encode()[-MAX_BYTES:].decode("utf-8", "ignore")
    metadata = owner.metadata(f"{pod['metadata']['name']}-log", **{LOG_LABEL: "true"}, **of_attempt)
    return {"metadata": metadata, "data": {LOG: kept}}
