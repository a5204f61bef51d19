"""Archived logs of attempts, each in a ConfigMap: of each node the newest are kept until the job is deleted."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringweave.files import rotation
from ringweave.launcher.run_dir import RunDir
from ringweave.platforms.kubernetes import objects, pod_status
from ringweave.platforms.kubernetes.objects import WORKER_CONTAINER, JobOwner, Object

MAX_LOG_BYTES = 512 * 1024
"""Maximum size of one attempt's log, cut at the front; a ConfigMap has room for 1 MiB."""
MAX_LOG_LINES = 20_000
MAX_LOGS = 20
"""Newest attempts of a node whose logs are kept, as the run directories of its newest rounds are elsewhere."""
LOG_READ_TIMEOUT_S = 20.0
"""Timeout for reading a whole log; a slower node counts as unresponsive."""
LOG_RETRY_TIMEOUT_S = 10.0
"""Time for which a Pod is kept because its log cannot be read; its successor waits for that."""
ROUND_LINE_PREFIX = "[ringweave] round "
"""Prefix of the line by which an agent marks the start of its workers in a round."""
EVENT_LINE_PREFIX = "[ringweave] event "
"""Prefix of the line by which an agent hands an event on: what reads a Pod's log sees its event log too."""
LOG_KEY = "log"
LOG_LABEL = f"{objects.API_GROUP}/log"


def has_log(pod: Mapping[str, Any]) -> bool:
    """Return whether the worker container has run."""
    return bool({"running", "terminated"} & pod_status.container_state(pod).keys())


def log_parameters(**params: str) -> dict[str, str]:
    """Return the parameters of a log request for the worker container, whatever other containers there are."""
    return {"container": WORKER_CONTAINER, **params}


@dataclass(slots=True)
class LogTail:
    """Last lines of a log, as many as are kept; a quarter of them are events if there are more."""

    _kept: dict[bool, deque[tuple[int, int, str]]] = field(default_factory=lambda: {True: deque(), False: deque()})
    """Whether they are events -> number, bytes and text of the lines."""
    _num_bytes: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    _num_lines: int = 0

    @property
    def lines(self) -> list[str]:
        return [line for _, _, line in sorted([*self._kept[True], *self._kept[False]])]

    def add(self, line: str) -> None:
        """Add a line and drop the oldest ones over the limit."""
        is_event, size = line.startswith(EVENT_LINE_PREFIX), len(line.encode()) + 1
        self._kept[is_event].append((self._num_lines, size, line))
        self._num_bytes[is_event] += size
        self._num_lines += 1
        while sum(self._num_bytes.values()) > MAX_LOG_BYTES:
            drops_event = self._num_bytes[True] > MAX_LOG_BYTES // 4 or not self._kept[False]
            self._num_bytes[drops_event] -= self._kept[drops_event].popleft()[1]


def unread_log_line(error: Exception) -> str:
    """Return the line that replaces a log, or the end of one, that could not be read."""
    why = str(error) or f"no answer in {LOG_READ_TIMEOUT_S:g} s"
    return f"[ringweave] the rest of this log could not be read: {why}"


def read_worker_logs(home: Path) -> list[str]:
    """Return events and output of an attempt's workers as in its Pod's log, but rank by rank, each cut at the front.

    Args:
        home: Folder of the attempt, with one run directory for each round.
    """
    rounds = sorted((int(path.name.removeprefix("round-")), path) for path in home.glob("round-*"))
    logs = [(round_, _log_paths(RunDir(root=path))) for round_, path in rounds]
    most_bytes = MAX_LOG_BYTES // max(1, sum(len(paths) for _, paths in logs))
    lines = []
    for round_, paths in logs:
        lines.append(f"{ROUND_LINE_PREFIX}{round_}")
        for prefix, path in paths.items():
            lines += [f"{prefix}{line}" for line in _last_lines(path, most_bytes)]
    return lines


def _log_paths(run_dir: RunDir) -> dict[str, Path]:
    """Return prefix of its lines -> log: the event log, and those of the workers."""
    events = {EVENT_LINE_PREFIX: run_dir.events} if run_dir.events.exists() else {}
    return events | {f"[{rank}] ": path for rank, path in run_dir.logs_by_rank().items()}


def _last_lines(path: Path, most_bytes: int) -> list[str]:
    """Return the last complete lines of a log."""
    content = rotation.read_tail(path, most_bytes + 1)
    lines = content.decode("utf-8", "replace").split("\n")
    whole = lines if len(content) <= most_bytes else lines[1:]
    return whole if whole and whole[-1] else whole[:-1]


def log_config_map(owner: JobOwner, pod: Mapping[str, Any], lines: Iterable[str]) -> Object:
    """Return the ConfigMap that archives the log of a Pod."""
    labels = pod["metadata"]["labels"]
    of_attempt = {key: labels[key] for key in (objects.NODE_LABEL, objects.ATTEMPT_LABEL)}
    text = "\n".join(lines).replace("\0", "")
    kept = text.encode()[-MAX_LOG_BYTES:].decode("utf-8", "ignore")
    metadata = owner.metadata(f"{pod['metadata']['name']}-log", **{LOG_LABEL: "true"}, **of_attempt)
    return {"metadata": metadata, "data": {LOG_KEY: kept}}


def old_logs_selector(owner: JobOwner, node: int, attempt: int) -> str:
    """Return the label selector of a node's archived logs, but for those that are kept once that attempt has ended."""
    kept = ", ".join(str(each) for each in range(max(1, attempt - MAX_LOGS + 1), attempt + 1))
    of_node = f"{objects.NODE_LABEL}={node},{objects.ATTEMPT_LABEL} notin ({kept})"
    return f"{owner.selector},{LOG_LABEL},{of_node}"
