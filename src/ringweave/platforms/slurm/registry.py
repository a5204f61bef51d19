"""Slurm job registry: jobs as folders of a shared file system. A job's folder is created whole, in one step.

No server and no database:

```text
ROOT/submit.lock                    held while a name is reserved
ROOT/jobs/NAME/                     all of one job; also the contents that local/job_folder.py lists
    job.json                        the admitted job; never changes
    desired.json                    desired state; written by commands
    state.json                      record and allocation state; written by the controller
    events.jsonl                    events
    change.lock                     held while one of these files is changed
    controller.lock                 held by the running controller
    controller.log, controller.lease       errors of the controller; its lease
ROOT/gone/                          folders being removed
```
"""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from ringweave.errors import LaunchError
from ringweave.files import file_io, rotation
from ringweave.jobs import records
from ringweave.jobs.records import DesiredJobState, Job, JobEvent, JobRecord, JsonForm
from ringweave.platforms.api import EventView
from ringweave.platforms.local import job_folder
from ringweave.platforms.local.job_folder import JobFolder
from ringweave.platforms.slurm.batch_script import AllocationComponent
from ringweave.platforms.submission import JobOrigin

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocationState:
    """State of the job's allocation."""

    allocation: int | None = None
    """Slurm job that was requested and not released; None: Slurm has no job for it."""
    is_unconfirmed: bool = False
    """Slurm did not confirm the submission; the job is looked up in Slurm by its id."""
    claim: str = ""
    """Key (`12.1`: Slurm job, restarts) of the controller that may control the job; any other controller exits."""
    adopted: str = ""
    """Key of the last allocation whose start the record includes."""
    num_fruitless_requeues: int = 0
    """Number of requeues in a row before all nodes ran."""
    cleanup_job: int | None = None
    """Slurm job that removes this one after its TTL; None if there is none."""
    cleanup_at_s: float | None = None
    """Time of that removal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmRegistryEntry:
    """Registered job."""

    id: str
    """Unique id; never reused, unlike the name."""
    job: Job
    origin: JobOrigin
    components: tuple[AllocationComponent, ...]
    """Components of the allocation, in Slurm's order."""
    allocation_state: AllocationState = AllocationState()


class SlurmJobRegistry:
    """Job registry below one folder."""

    def __init__(self, root: Path) -> None:
        """Create the folder if it is missing.

        Raises:
            LaunchError: The folder cannot be used.
        """
        self._root = root
        try:
            for folder in (root, root / "jobs", root / "gone"):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            do = "Make it writable, or set XDG_STATE_HOME to a folder that all machines share"
            raise LaunchError(
                "folder of jobs", got=str(error), expected="one that can be written", do=do, where=str(root)
            ) from error

    def folder(self, name: str) -> JobFolder:
        return JobFolder(root=self._root / "jobs" / name)

    def insert(self, make: Callable[[Sequence[Job]], SlurmRegistryEntry]) -> SlurmRegistryEntry:
        """Register the entry that `make` makes from the existing jobs; nothing changes if it raises.

        One process at a time runs this. Even if locks do not work between hosts, the folder of the name is created by
        one rename, which fails if the folder exists. Then `make` is called again and refuses the second request.
        """
        with self.admission_lock() as existing:
            self._remove_leftovers()
            entry = make(existing)
            temporary = self._root / "gone" / f"new-{entry.id}"
            temporary.mkdir(mode=0o700)
            (temporary / "job.json").write_bytes(records.add_format(_ENTRY_ADAPTER.dump_json(entry)))
            try:
                temporary.rename(self.folder(entry.job.request.name).root)
            except OSError:
                shutil.rmtree(temporary, ignore_errors=True)
                make([each.job for each in self.all_entries()])
                raise
            return entry

    @contextmanager
    def admission_lock(self) -> Iterator[Sequence[Job]]:
        """Yield all jobs. Within this block no other process takes a name, or GPUs of a limit."""
        with job_folder.lock_file(self._root / "submit.lock"):
            yield [each.job for each in self.all_entries()]

    def all_entries(self) -> list[SlurmRegistryEntry]:
        """Return all jobs, oldest first."""
        names = [path.name for path in (self._root / "jobs").iterdir()]
        found = [entry for name in names if (entry := self.find_by_name(name)) is not None]
        return sorted(found, key=lambda entry: (entry.job.created_s, entry.job.request.name))

    def find_by_name(self, name: str) -> SlurmRegistryEntry | None:
        """Return the job of that name; None also after it was forgotten.

        Raises:
            JobError: Another version of ringweave made it, with another format.
        """
        root = self.folder(name).root
        try:
            text = file_io.read_bounded(root / "job.json")
        except (FileNotFoundError, NotADirectoryError):
            return None
        records.check_format(text, f"job {name}", where=str(root))
        entry = _ENTRY_ADAPTER.validate_json(file_io.bounded(text))
        desired = _read_json_file(root / "desired.json", _DESIRED_JSON, entry.job.desired)
        record, allocation_state = _read_json_file(
            root / "state.json", _STATE_JSON, (entry.job.record, entry.allocation_state)
        )
        return replace(entry, job=replace(entry.job, desired=desired, record=record), allocation_state=allocation_state)

    @contextmanager
    def locked_entry(self, name: str) -> Iterator[SlurmRegistryEntry | None]:
        """Yield the current job. Within this block no other process changes it."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(FileNotFoundError):  # the job was forgotten
                stack.enter_context(job_folder.lock_file(self.folder(name).root / "change.lock"))
            yield self.find_by_name(name)

    def update_desired(self, name: str, desired: DesiredJobState) -> None:
        """Save the desired state of a job. Call it inside `locked_entry`."""
        file_io.replace_text(self.folder(name).root / "desired.json", _DESIRED_JSON.dump(desired))

    def save_record(self, name: str, record: JobRecord, allocation_state: AllocationState) -> None:
        """Save record and allocation state of a job in one step. Call it inside `locked_entry`."""
        file_io.replace_text(self.folder(name).root / "state.json", _STATE_JSON.dump((record, allocation_state)))

    def add_events(self, name: str, events: Sequence[JobEvent], now: float) -> None:
        """Add events; known ones are left out, and the oldest over a limit."""
        path = self.folder(name).root / "events.jsonl"
        there = _read_event_lines(path)
        known = {event["key"] for event in there}
        new = [
            {"key": event.key, "time_s": now, "kind": event.kind, "text": event.text}
            for event in events
            if event.key not in known
        ]
        if new:
            newest = [*there, *new][-records.MAX_EVENTS :]
            file_io.replace_text(path, "".join(f"{json.dumps(event)}\n" for event in newest))

    def events(self, name: str) -> tuple[EventView, ...]:
        """Return the events of a job, oldest first."""
        found = _read_event_lines(self.folder(name).root / "events.jsonl")
        return tuple(EventView(time_s=each["time_s"], kind=each["kind"], text=each["text"]) for each in found)

    def delete(self, entry: SlurmRegistryEntry) -> None:
        """Remove the job; its name is free at once."""
        with contextlib.suppress(FileNotFoundError):
            self.folder(entry.job.request.name).root.rename(self._root / "gone" / entry.id)
        shutil.rmtree(self._root / "gone" / entry.id, ignore_errors=True)

    def _remove_leftovers(self) -> None:
        """Remove leftovers of killed processes. The held lock keeps others from creating anything there."""
        for path in (self._root / "gone").iterdir():
            shutil.rmtree(path, ignore_errors=True)


def _read_json_file(path: Path, form: JsonForm[T], absent: T) -> T:
    try:
        return form.parse(file_io.read_bounded(path))
    except FileNotFoundError:
        return absent


def _read_event_lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines; a line cut short by a crash is skipped."""
    found = []
    for line in rotation.LineReader(path).read_new():
        with contextlib.suppress(ValueError):
            event = file_io.parse_json(line)
            if isinstance(event, dict) and event.keys() >= _EVENT_KEYS:
                found.append(event)
    return found


_EVENT_KEYS = {"key", "time_s", "kind", "text"}
_ENTRY_ADAPTER = TypeAdapter(SlurmRegistryEntry)
_DESIRED_JSON, _STATE_JSON = JsonForm(DesiredJobState), JsonForm(tuple[JobRecord, AllocationState])
