"""Archived logs of attempts: each is kept in a ConfigMap until the job is deleted."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringweave.files import rotation
from ringweave.launcher.run_dir import RunDir
from ringweave.platforms.kubernetes import names, pod_status
from ringweave.platforms.kubernetes.api_errors import ApiError
from ringweave.platforms.kubernetes.objects import WORKER_CONTAINER, JobOwner, Object

MAX_LOG_BYTES = 512 * 1024
"""Maximum size of one attempt's log, cut at the front; a ConfigMap has room for 1 MiB."""
MAX_LOG_LINES = 20_000
LOG_READ_TIMEOUT_S = 20.0
"""Timeout for reading a whole log; a slower node counts as unresponsive."""
LOG_RETRY_TIMEOUT_S = 10.0
"""Time for which a Pod is kept because its log cannot be read; its successor waits for that."""
ROUND_LINE_PREFIX = "[ringweave] round "
"""Prefix of the line by which an agent marks the start of its workers in a round."""
LOG_KEY = "log"
LOG_LABEL = f"{names.API_GROUP}/log"


def has_log(pod: Mapping[str, Any]) -> bool:
    """Return whether the worker container has run."""
    return bool({"running", "terminated"} & pod_status.container_state(pod).keys())


def log_parameters(**params: str) -> dict[str, str]:
    """Return the parameters of a log request for the worker container, whatever other containers there are."""
    return {"container": WORKER_CONTAINER, **params}


def is_no_log_error(error: ApiError) -> bool:
    """Return whether the API server has no log, since nothing ran, or nothing is left of it."""
    return error.is_not_found or (error.status == 400 and "waiting to start" in error.message)


@dataclass(slots=True)
class LogTail:
    """Last lines of a log, as many as are kept."""

    lines: deque[str] = field(default_factory=deque)
    _num_bytes: int = 0

    def add(self, line: str) -> None:
        """Add a line and drop the oldest ones over the limit."""
        self.lines.append(line)
        self._num_bytes += len(line.encode()) + 1
        while self._num_bytes - len(self.lines[0].encode()) - 1 >= MAX_LOG_BYTES:
            self._num_bytes -= len(self.lines.popleft().encode()) + 1


def unread_log_line(error: Exception) -> str:
    """Return the line that replaces a log, or the end of one, that could not be read."""
    why = str(error) or f"no answer in {LOG_READ_TIMEOUT_S:g} s"
    return f"[ringweave] the rest of this log could not be read: {why}"


def read_worker_logs(home: Path) -> list[str]:
    """Return the output of an attempt's workers as in its Pod's log, but rank by rank, each cut at the front.

    Args:
        home: Folder of the attempt, with one run directory for each round.
    """
    rounds = sorted((int(path.name.removeprefix("round-")), path) for path in home.glob("round-*"))
    logs = [(round_, RunDir(root=path).logs_by_rank()) for round_, path in rounds]
    most_bytes = MAX_LOG_BYTES // max(1, sum(len(by_rank) for _, by_rank in logs))
    lines = []
    for round_, by_rank in logs:
        lines.append(f"{ROUND_LINE_PREFIX}{round_}")
        for rank, path in by_rank.items():
            lines += [f"[{rank}] {line}" for line in _last_lines(path, most_bytes)]
    return lines


def _last_lines(path: Path, most_bytes: int) -> list[str]:
    """Return the last complete lines of a log."""
    content = rotation.read_tail(path, most_bytes + 1)
    lines = content.decode("utf-8", "replace").split("\n")
    whole = lines if len(content) <= most_bytes else lines[1:]
    return whole if whole and whole[-1] else whole[:-1]


def log_config_map(owner: JobOwner, pod: Mapping[str, Any], lines: Iterable[str]) -> Object:
    """Return the ConfigMap that archives the log of a Pod."""
    labels = pod["metadata"]["labels"]
    of_attempt = {key: labels[key] for key in (names.NODE_LABEL, names.ATTEMPT_LABEL)}
    text = "\n".join(lines).replace("\0", "")
    kept = text.encode()[-MAX_LOG_BYTES:].decode("utf-8", "ignore")
    metadata = owner.metadata(f"{pod['metadata']['name']}-log", **{LOG_LABEL: "true"}, **of_attempt)
    return {"metadata": metadata, "data": {LOG_KEY: kept}}
