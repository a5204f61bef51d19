"""Interface of a platform, its view of a job (also as JSON) and of the job's logs, and tombstones of removed jobs."""

import abc
import contextlib
import json
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from ringweave.files import file_io, rotation
from ringweave.jobs import records
from ringweave.jobs.records import AttemptEnd, EndCause, Job, JobRecord, NodeRecord
from ringweave.jobs.request import JobRequest, NodeRequest
from ringweave.jobs.states import JobState, NodeState, Reason

TOMBSTONE_FILE = "tombstone.json"
"""Name of the file in the job's folder; it exists if a process watches the job."""
MAX_WATCHED_JOBS = 64
"""Upper limit of watched jobs of one platform; above it the oldest is dropped."""


def write_tombstone(folder: Path, record: JobRecord) -> None:
    """Write the final record of a job for the processes that watch its folder; does nothing if there are none."""
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(folder / TOMBSTONE_FILE, os.O_WRONLY | os.O_CLOEXEC)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(records.RECORD_JSON.dump(record))


class Tombstones:
    """Tombstones of the jobs that a platform was asked about."""

    def __init__(self) -> None:
        self._watched: OrderedDict[str, tuple[Job, int]] = OrderedDict()

    def watch_job(self, folder: Path, job: Job) -> None:
        """Watch the job, as it was just seen, for its end, if it has a TTL."""
        name = job.request.name
        known = self._watched.pop(name, None)
        if known is not None and known[0].created_s == job.created_s:
            self._watched[name] = (job, known[1])
            return
        if known is not None:
            os.close(known[1])
        if job.request.ttl_s is None:
            return
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(folder / TOMBSTONE_FILE, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._watched[name] = (job, descriptor)
        if len(self._watched) > MAX_WATCHED_JOBS:
            os.close(self._watched.popitem(last=False)[1][1])

    def take_final_job(self, name: str) -> Job | None:
        """Return the final state of a watched job that its TTL has removed; only once."""
        job, descriptor = self._watched.pop(name, (None, -1))
        if job is None:
            return None
        with os.fdopen(descriptor, encoding="utf-8") as file:
            text = file.read()
        record = records.RECORD_JSON.parse(text) if text else job.record
        if record.outcome is None:
            return None
        reason = record.outcome_reason
        return replace(job, record=replace(record, state=record.outcome, reason=reason, deleting=False))

    def close(self) -> None:
        while self._watched:
            os.close(self._watched.popitem()[1][1])


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptView:
    """One attempt of a node."""

    attempt: int
    """Number of the attempt, from 1; with the node it names the worker group and its logs."""
    cause: EndCause | None = None
    """Cause of its end; None while it runs, and after a good end."""
    charged: bool = False
    """It cost one of the node's retries."""
    exit_code: int | None = None
    """Exit code of the first failed worker, if there is one."""
    text: str = ""
    """Description of its end, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeView:
    """One node of a job."""

    name: str
    workers: int
    """Number of GPUs or CPU workers by the split; 0 for an unused node."""
    capacity: int
    """Maximum number of workers."""
    state: NodeState
    reason: Reason | None
    """Reason of the state, with a hint; None only while the node runs."""
    retries: int
    """Number of replacements after its own failures in this run."""
    max_retries: int
    iterations: int | None
    """Train steps done, as last reported; None without a report."""
    last_loss: float | None
    attempts: tuple[AttemptView, ...]
    """All attempts, oldest first; the last one is the current one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EventView:
    """An event of a job."""

    time_s: float
    """Seconds since 1970."""
    kind: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class JobView:
    """A job, with everything that `status`, `why` and `events` print."""

    name: str
    platform: str
    """Name of the platform: `local`, `slurm`, `kubernetes`, ..."""
    requester: str
    """User who submitted it, by the platform."""
    state: JobState
    reason: Reason | None
    """Reason of the state, with a hint; None only while the job runs."""
    created_s: float
    """Seconds since 1970."""
    since_s: float
    """Start of its present state, seconds since 1970."""
    ended_s: float | None
    """Time of its outcome, seconds since 1970; None before."""
    workers: int
    """Number of GPUs or CPU workers in all."""
    device: str
    """`cuda` or `cpu`."""
    mode: str
    run: int
    """Number of the run: 1, and one more for each `retry`."""
    round: int
    """Number of rounds so far, which is the number of times that all nodes had to become ready."""
    ttl_s: float | None
    nodes: tuple[NodeView, ...]
    """Nodes in the order of the request."""
    events: tuple[EventView, ...] = ()
    """Events, oldest first; empty in lists of jobs."""
    files: str = ""
    """Folder of logs and run directories, for people; empty if the platform has none."""

    @property
    def used_nodes(self) -> tuple[NodeView, ...]:
        return tuple(node for node in self.nodes if node.workers)


def job_view(job: Job, *, platform: str, events: Sequence[EventView] = (), files: str = "") -> JobView:
    """Return the view of a job, from its last saved record."""
    record, request = job.record, job.request
    return JobView(
        name=request.name,
        platform=platform,
        requester=job.requester,
        state=record.state,
        reason=record.reason,
        created_s=job.created_s,
        since_s=record.since_s,
        ended_s=record.ended_s,
        workers=request.num_workers,
        device=request.device,
        mode=request.mode,
        run=record.run,
        round=record.round,
        ttl_s=request.ttl_s,
        nodes=tuple(_node_view(job, index) for index in range(len(request.nodes))),
        events=tuple(events),
        files=files,
    )


def are_files_here(view: JobView) -> bool:
    """Return whether the event logs of a job are on this machine; those of a run on hosts come when it is over."""
    return view.platform != "hosts" and bool(view.files) and Path(view.files).is_dir()


def unreadable_job(
    name: str, requester: str, created_s: float, reason: Reason, *, num_workers: int = 1, device: str = "cpu"
) -> Job:
    """Return a failed job that stands for one whose stored form cannot be read, so that lists still show it.

    `device`: `cuda` or `cpu`, as far as known.
    """
    nodes = (NodeRequest(name="n0", capacity=num_workers),)
    request = JobRequest(name="unreadable", num_workers=num_workers, script="-", device=device, nodes=nodes)
    object.__setattr__(request, "name", name)  # shown as it is stored, even if no request may have such a name
    job = records.new_job(request, requester=requester, counts=(0,), now=created_s)
    return replace(job, record=replace(job.record, state=JobState.FAILED, reason=reason))


def job_view_document(view: JobView) -> dict[str, Any]:
    """Return the view as a JSON object, which `parse_job_view` reads."""
    return _JOB_VIEW_ADAPTER.dump_python(view, mode="json")


def parse_job_view(content: object) -> JobView:
    """Parse the JSON object of a view.

    Raises:
        ValueError: The object is no view.
    """
    return _JOB_VIEW_ADAPTER.validate_json(file_io.bounded(json.dumps(content)))


def _node_view(job: Job, index: int) -> NodeView:
    node_request, node_record = job.request.nodes[index], job.record.nodes[index]
    return NodeView(
        name=node_request.name,
        workers=job.counts[index],
        capacity=node_request.capacity,
        state=node_record.state,
        reason=node_record.reason,
        retries=node_record.retries,
        max_retries=node_request.max_retries,
        iterations=node_record.iterations,
        last_loss=node_record.last_loss,
        attempts=_attempt_views(node_record) if job.counts[index] else (),
    )


def _attempt_views(node_record: NodeRecord) -> tuple[AttemptView, ...]:
    current = (
        AttemptView(attempt=node_record.attempt) if node_record.ended is None else _attempt_view(node_record.ended)
    )
    return (*map(_attempt_view, node_record.history), current)


def _attempt_view(ended: AttemptEnd) -> AttemptView:
    return AttemptView(
        attempt=ended.attempt, cause=ended.cause, charged=ended.charged, exit_code=ended.exit_code, text=ended.text
    )


_JOB_VIEW_ADAPTER = TypeAdapter(JobView)


@dataclass(frozen=True, kw_only=True, slots=True)
class RenderedObject:
    """Object of a job on its platform, as text: a file, a batch script, a manifest."""

    name: str
    """Name on the platform: `config.json`, `ConfigMap/text`."""
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """An admitted request."""

    job: JobView
    """Initial state of the job."""
    objects: tuple[RenderedObject, ...] = ()
    """Objects of the job on its platform, in order, for `--dry-run=full`; a platform may leave them out otherwise."""


EventLines = Literal["none", "also", "only"]
LOG_FILES: Mapping[EventLines, tuple[str, ...]] = {
    "none": ("logs/rank-*.log",),
    "also": ("events.jsonl", "logs/rank-*.log"),
    "only": ("events.jsonl",),
}
"""Files of a run directory that a query reads, as patterns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogQuery:
    """Filter of a job's log lines."""

    node: str | None = None
    """Only this node; None: all."""
    rank: int | None = None
    """Only this worker, by global rank; None: all."""
    attempt: int | None = None
    """Only this attempt of the nodes; None: all attempts, oldest first."""
    follow: bool = False
    """Wait for more lines until the job has ended."""
    events: EventLines = "none"
    """Whether to yield also the event logs of run directories, or these only; without them where a rank is named."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogLine:
    """One line that a worker printed, or a remark of the platform about its log."""

    node: str
    attempt: int
    round: int
    """Round of the job: an attempt whose node was restarted has one log for each round."""
    rank: int | None
    """Global rank of the worker; None: the agent's log, an event log, or a remark about a log."""
    text: str
    """Without the end of the line."""
    is_event: bool = False
    """A line of an event log (docs/reference/events.md)."""


class Platform(abc.ABC):
    """Interface of a platform; it identifies the requester by itself (OS user, Kubernetes user).

    Every method raises JobError for a refusal (no permission, a verb that does not apply now), with a fix in its text,
    UnknownJobError if there is no such job, and LaunchError if the platform cannot be reached or does not work.
    """

    @abc.abstractmethod
    def submit(
        self, request: JobRequest, *, base: Path, script_text: str | None = None, dry_run: bool = False
    ) -> Submission:
        """Admit the request and start its job; return when the job is recorded, before any process of it runs.

        The name is taken atomically: only one of several concurrent submissions gets it.

        Args:
            request: Well-formed request.
            base: Base of the request's relative paths; the folder has to exist as long as the job.
            script_text: Script that came with a request without a directory; no file is read then. None: it is read
                from its path.
            dry_run: Make all checks, and change nothing.
        """

    @abc.abstractmethod
    def jobs(self) -> Sequence[JobView]:
        """Return all jobs that the requester may see, oldest first, without events."""

    @abc.abstractmethod
    def job(self, name: str) -> JobView:
        """Return one job, with its events."""

    @abc.abstractmethod
    def act(self, name: str, verb: str) -> JobView:
        """Apply one of `jobs.admission.VERB_NAMES` to a job; return when that is recorded, before it is done.

        The call is idempotent.
        """

    @abc.abstractmethod
    def logs(self, name: str, which: LogQuery) -> Iterator[LogLine]:
        """Yield the output of its workers, of the newest attempts of each node; and their events, if asked."""


FOLLOW_INTERVAL_S = 0.2
"""Time between two polls of logs that may grow."""
PIECE_BYTES = 2**18
MAX_READ_BYTES = 4 * 2**20
"""Text of a log, and of all logs of another host, that is read at a time."""
EVENTS = "events"
"""In place of a rank in the name of an event log."""
NewText = tuple[str, str, bytes]
"""Log (`NODE/ATTEMPT/ROUND/RANK`, or `.../events`), cursor after the text (`rotation.LogCursor`), text."""


def find_logs(runs: Path, which: LogQuery) -> list[tuple[str, Path]]:
    """Return the wanted logs with their names, in the order of output.

    `runs`: folder with the run directories of all attempts; it may be gone.
    """
    found = []
    with contextlib.suppress(FileNotFoundError):  # the job is being removed
        patterns = [f"*/*/round-*/{each}" for each in LOG_FILES[which.events]]
        for path in (path for each in patterns for path in rotation.find_logs(runs, each)):
            node, attempt, round_ = path.relative_to(runs).parts[:3]
            name = path.stem.removeprefix("rank-")
            if _is_wanted(node, int(attempt), _rank_of(name), which):
                order = int(attempt), int(round_.removeprefix("round-")), node, name.zfill(9)
                found.append((order, f"{node}/{attempt}/{order[1]}/{name}", path))
    return [(name, path) for _, name, path in sorted(found)]


def read_new_text(
    logs: Iterable[tuple[str, Path]], positions: Mapping[str, str], max_bytes: int = MAX_READ_BYTES
) -> Iterator[NewText]:
    """Yield the text that logs have got since the given positions, at most so many bytes of each; the rest comes later.

    It comes in pieces: what is made of one is all that is in memory, however much there is to catch up with.
    A log that has been removed with its job has none.
    """
    for name, path in logs:
        cursor = rotation.parse_cursor(positions[name]) if name in positions else rotation.LOG_START
        reader, text, num_left = rotation.LineReader(path, cursor=cursor), bytearray(), max_bytes
        for line in reader.read_new(at_end=True) if max_bytes > 0 else ():
            text += line
            if len(text) >= min(PIECE_BYTES, num_left):
                num_left -= len(text)
                yield name, str(reader.cursor), bytes(text)
                text.clear()
                if num_left <= 0:
                    break
        if text:
            yield name, str(reader.cursor), bytes(text)


def follow_logs(
    read: Callable[[dict[str, str]], Iterable[NewText]],
    which: LogQuery,
    *,
    is_over: Callable[[], bool],
    sleep: Callable[[float], None],
) -> Iterator[LogLine]:
    """Yield the wanted lines; a query that follows ends when the job is over.

    Args:
        read: Returns what has come since these positions, by the names of logs.
        which: Query of the lines.
        is_over: Returns whether the job is over.
        sleep: Waits between two polls.
    """
    positions: dict[str, str] = {}
    rests: dict[str, bytes] = {}
    while True:
        is_over_now = not which.follow or is_over()  # before the last read, so that no line is missed
        num_bytes = 0
        for name, end, text in read(positions):
            positions[name] = end
            num_bytes += len(text)
            *whole, rests[name] = (rests.get(name, b"") + text).split(b"\n")
            yield from _lines(name, whole, which)
        if is_over_now and num_bytes < MAX_READ_BYTES:
            for name, rest in rests.items():
                yield from _lines(name, [rest] if rest else [], which)
            return
        if not num_bytes:
            sleep(FOLLOW_INTERVAL_S)


def _lines(name: str, lines: Sequence[bytes], which: LogQuery) -> Iterator[LogLine]:
    node, attempt, round_, last = name.split("/")
    rank = _rank_of(last)
    if _is_wanted(node, int(attempt), rank, which):
        for line in lines:
            text, is_event = line.decode(errors="replace"), rank is None
            yield LogLine(node=node, attempt=int(attempt), round=int(round_), rank=rank, text=text, is_event=is_event)


def _rank_of(name: str) -> int | None:
    return None if name == EVENTS else int(name)


def _is_wanted(node: str, attempt: int, rank: int | None, which: LogQuery) -> bool:
    return which.node in (None, node) and which.rank in (None, rank) and which.attempt in (None, attempt)
