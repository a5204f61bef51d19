"""Platform of plain runs on this machine: `ringweave run` without a job, found by its run directory.

It reads what the run writes. A run is stopped by SIGINT to its command, as Ctrl-C does.
"""

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from ringweave import telemetry, topology
from ringweave.errors import JobError, RingweaveError, UnknownJobError
from ringweave.files import file_io
from ringweave.jobs import records
from ringweave.jobs.request import JobRequest
from ringweave.jobs.states import JobState, NodeState, Reason, make_reason
from ringweave.launcher import run_dir
from ringweave.launcher.run_dir import RunDir
from ringweave.platforms import api, submission
from ringweave.platforms.api import AttemptView, EventView, JobView, LogLine, LogQuery, NodeView, Platform, Submission
from ringweave.platforms.local import job_folder
from ringweave.telemetry import Event

PLATFORM = "runs"
RUNS_FOLDER = Path("runs")
"""Folder below the current one in which `ringweave run` makes run directories."""
_MAX_COUNT = 2**31
"""Numbers in a run.json are below it."""
_STATES = {
    "running": JobState.RUNNING,
    "done": JobState.SUCCEEDED,
    "failed": JobState.FAILED,
    "interrupted": JobState.STOPPED,
}
_NODE_STATES = {
    JobState.RUNNING: NodeState.RUNNING,
    JobState.SUCCEEDED: NodeState.SUCCEEDED,
    JobState.FAILED: NodeState.FAILED,
    JobState.STOPPED: NodeState.STOPPED,
}


def find_run_dir(name: str) -> RunDir | None:
    """Return the run directory of that path, or of that name below `runs/`; None if there is none."""
    for path in (Path(name), RUNS_FOLDER / name):
        if (path / "run.json").is_file():
            return RunDir(root=path.absolute())
    return None


def find_holders(directory: RunDir) -> list[int]:
    """Return the processes that hold a run directory: its `ringweave run`; none after its end."""
    inode = directory.root.stat().st_ino
    rows = [line.split() for line in Path("/proc/locks").read_text(encoding="ascii").splitlines()]
    locking = {int(row[4]) for row in rows if row[1] == "FLOCK" and row[-3].rpartition(":")[2] == str(inode)}
    return [pid for pid in job_folder.lock_holders(directory.root) if pid in locking]


class RunDirectoryPlatform(Platform):
    """Platform of the runs whose run directories are named, or are in `runs/`."""

    def __init__(self, requester: str, sleep: Callable[[float], None] = time.sleep) -> None:
        self._requester, self._sleep = requester, sleep
        self._events: dict[Path, _RunEvents] = {}

    def submit(
        self, request: JobRequest, *, base: Path, script_text: str | None = None, dry_run: bool = False
    ) -> Submission:
        """Refuse: such runs are started by `ringweave run`.

        Raises:
            JobError: Always.
        """
        do = "Use ringweave run, or leave --on out"
        raise JobError("--on", got=PLATFORM, expected="a platform of jobs", do=do)

    def jobs(self) -> Sequence[JobView]:
        names = [path.parent.name for path in RUNS_FOLDER.glob("*/run.json")]
        return sorted(map(self._readable_or_not, names), key=lambda view: view.created_s)

    def _readable_or_not(self, name: str) -> JobView:
        """Return the view of a run; one whose files cannot be read is a failed one, and hides no other."""
        try:
            return self.job(name)
        except (OSError, RingweaveError) as error:
            reason = Reason(code="Unreadable", text=str(error), hint="Remove the folder if it is of no use")
            return api.job_view(api.unreadable_job(name, self._requester, 0.0, reason), platform=PLATFORM)

    def job(self, name: str) -> JobView:
        return self._view(_require_run_dir(name), name)

    def act(self, name: str, verb: str) -> JobView:
        directory = _require_run_dir(name)
        if verb != "stop":
            do = "Submit a job for that, see ringweave submit --help" if verb != "delete" else "Remove its folder"
            raise JobError(f"{verb} of run {name}", got="a run without a job", expected="stop", do=do)
        holders = find_holders(directory)
        if not holders:
            raise JobError(f"run {name}", got="ended", expected="one that runs", do="Nothing to do")
        for pid in holders:
            os.kill(pid, signal.SIGINT)
        return self._view(directory, name)

    def _view(self, directory: RunDir, name: str) -> JobView:
        events = self._events.setdefault(directory.root, _RunEvents(telemetry.EventTail(directory.events)))
        events.read()
        return view_run(directory, name, self._requester, events)

    def logs(self, name: str, which: LogQuery) -> Iterator[LogLine]:
        directory = _require_run_dir(name)
        nodes = {rank: name for name, ranks in _ranks_by_node(_read_record(directory)).items() for rank in ranks}

        def find_logs() -> list[tuple[str, Path]]:
            events = [] if which.events == "none" else [(f"/1/1/{api.EVENTS}", directory.events)]
            ranks = {} if which.events == "only" else directory.logs_by_rank()
            return [*events, *((f"{nodes.get(rank, '')}/1/1/{rank}", path) for rank, path in ranks.items())]

        return api.follow_logs(
            lambda positions: api.read_new_text(find_logs(), positions),
            which,
            is_over=lambda: not run_dir.is_run_dir_held(directory),
            sleep=self._sleep,
        )


@dataclass(slots=True)
class _RunEvents:
    """Events of the last attempt of a run, read as they are added."""

    tail: telemetry.EventTail
    begun_s: float | None = None
    progress: Event | None = None
    newest: deque[EventView] = field(default_factory=lambda: deque(maxlen=records.MAX_EVENTS))

    def read(self) -> None:
        for event in self.tail.iter_new():
            if event["kind"] == "run_started":
                self.begun_s, self.progress = event["time"], None
                self.newest.clear()
            elif event["kind"] == "iterations_done":
                self.progress = event
            self.newest.append(_event_view(event))


def view_run(directory: RunDir, name: str, requester: str, events: _RunEvents | None = None) -> JobView:
    """Return the view of a run, from its run.json and events; without these, they and progress are left out."""
    record = _read_record(directory)
    state = _STATES.get(record.get("outcome", ""), JobState.RUNNING)
    if state is JobState.RUNNING and not run_dir.is_run_dir_held(directory):
        state = JobState.FAILED  # its command was killed, and the workers with it
    begun_s = events.begun_s if events else None
    created_s = _started_s(directory, record) if begun_s is None else begun_s
    ended_s = created_s + (record.get("wall_s") or 0.0) if state.is_end else None
    progress = events.progress if events else None
    return JobView(
        name=name,
        platform=PLATFORM,
        requester=requester,
        state=state,
        reason=_reason(state, record, name),
        created_s=created_s,
        since_s=created_s if ended_s is None else ended_s,
        ended_s=ended_s,
        workers=record["world_size"],
        device=_device_kind(directory),
        mode=record.get("mode") or "auto",
        run=record.get("attempt", 1),
        round=1,
        ttl_s=None,
        nodes=tuple(_node_view(node, len(ranks), state, progress) for node, ranks in _ranks_by_node(record).items()),
        events=tuple(events.newest) if events else (),
        files=str(directory.root),
    )


def _started_s(directory: RunDir, record: Mapping[str, Any]) -> float:
    try:
        return datetime.fromisoformat(record["started"]).timestamp()
    except (KeyError, OverflowError, TypeError, ValueError):
        return directory.run_json.stat().st_mtime


def _device_kind(directory: RunDir) -> str:
    """Return the kind of device that the cluster file of the run gives its workers."""
    if not directory.cluster_file.exists():
        return "cpu"
    nodes = topology.load(directory.cluster_file).nodes
    return "cuda" if any(device.kind == "cuda" for node in nodes for device in node.devices) else "cpu"


def _reason(state: JobState, record: Mapping[str, Any], name: str) -> Reason | None:
    if state is JobState.RUNNING:
        return None
    if state is JobState.SUCCEEDED:
        return make_reason("Completed", job=name)
    if state is JobState.STOPPED:
        return make_reason("Stopped", job=name)
    text = record.get("cause") or "its command was killed, and the workers ended with it"
    return Reason(code="Failed", text=text, hint="See its logs, then start it again with ringweave run")


def _ranks_by_node(record: Mapping[str, Any]) -> dict[str, Sequence[int]]:
    """Return the global ranks of each node; the record of a job has their numbers alone."""
    found: dict[str, Sequence[int]] = {}
    for node in record["cluster"]["nodes"]:
        first, workers = sum(map(len, found.values())), node["workers"]
        found[node["name"]] = range(first, first + workers) if isinstance(workers, int) else workers
    return found


def _node_view(node: str, count: int, state: JobState, progress: Event | None) -> NodeView:
    return NodeView(
        name=node,
        workers=count,
        capacity=count,
        state=_NODE_STATES[state],
        reason=None,
        retries=0,
        max_retries=0,
        iterations=progress["iterations"] if progress else None,
        last_loss=progress["loss"] if progress else None,
        attempts=(AttemptView(attempt=1),),
    )


def _event_view(event: Event) -> EventView:
    fields = {key: value for key, value in event.items() if key not in telemetry.UNLISTED_FIELDS}
    text = ", ".join(f"{key} {value}" for key, value in fields.items())
    return EventView(time_s=event["time"], kind=event["kind"], text=text)


def _read_record(directory: RunDir) -> dict[str, Any]:
    """Return run.json."""
    try:
        record = file_io.load_json(directory.run_json, run_dir.MAX_RUN_JSON_BYTES)
    except (OSError, ValueError):
        record = None
    if isinstance(record, dict) and record.get("format") == run_dir.RUN_JSON_FORMAT and _is_record(record):
        return record
    do = "Name the folder of a run of this ringweave"
    what = f"run.json of {directory.root}"
    raise UnknownJobError(what, got="another file", expected="the record of a run", do=do)


def _is_record(record: Mapping[str, Any]) -> bool:
    """Return whether the keys of a run.json that are used here are of the right types; a script may add others."""
    try:
        nodes = [(each["name"], each["workers"]) for each in record["cluster"]["nodes"]]
        texts = [name for name, _ in nodes] + [record.get(key) or "" for key in ("outcome", "mode", "cause")]
        counts = [count for _, each in nodes for count in (each if isinstance(each, list) else [each])]
        numbers = [record["world_size"], record.get("attempt", 1), *counts]
        wall_s = record.get("wall_s") or 0.0
    except (KeyError, TypeError):
        return False
    are_counts = all(type(each) is int and 0 <= each < _MAX_COUNT for each in numbers)
    is_time = type(wall_s) in (int, float) and 0 <= wall_s < _MAX_COUNT
    return are_counts and is_time and all(isinstance(each, str) for each in texts)


def _require_run_dir(name: str) -> RunDir:
    """Return the run directory of that name."""
    directory = find_run_dir(name)
    if directory is None:
        do = "Give the path of its run directory, or its name below runs/"
        raise UnknownJobError("run", got=name, expected="a folder with a run.json", do=do)
    return directory


def open_service(environ: Mapping[str, str]) -> RunDirectoryPlatform:
    """Open the platform for the user of this process."""
    return RunDirectoryPlatform(submission.os_user())
