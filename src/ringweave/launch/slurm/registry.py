"""Jobs as folders of a shared file system: the name is a folder, made whole in one step. No server, no database.

```text
ROOT/submit.lock                    held while a name is taken
ROOT/jobs/NAME/                     all of one job; also what local/jobs/folders.py lists: config, gate, groups, runs
    job.json                        what was admitted; never changes
    desired.json                    what verbs ask of it; written by commands
    state.json                      the record, and which allocation it has; written by the controller
    events.jsonl                    what happened
    change.lock                     held while one of these is changed
    controller.lock                 held while a controller leads it
    controller.log, beat.json       what the controller could not tell anybody; that it lives
ROOT/gone/                          what is being removed
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

from ringweave import telemetry
from ringweave.errors import LaunchError, explain
from ringweave.files import json_text
from ringweave.jobs.life.actions import Event
from ringweave.jobs.life.records import Desired, Job, Record
from ringweave.launch.local.jobs import locks
from ringweave.launch.local.jobs.folders import JobFolder, replace_text
from ringweave.launch.services.submitting import Origin
from ringweave.launch.services.views import EventView
from ringweave.launch.slurm.asking.requesting import Component

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Hold:
    """What the job has of Slurm."""

    allocation: int | None = None
    """The job of Slurm that was asked for and not given back; None: nothing of it is in Slurm's hands."""
    unsure: bool = False
    """Slurm did not say whether it took the job; it is looked for there by the job's id."""
    claim: str = ""
    """Key (`12.1`: job of Slurm, restarts) of the controller that may lead it; any other one leaves."""
    adopted: str = ""
    """Key of the last allocation whose beginning the record knows of."""
    num_fruitless: int = 0
    """How often in a row Slurm has taken the allocation back and given another one before all nodes ran."""
    sweeper: int | None = None
    """The job of Slurm that removes this one when its TTL is over; None where there is none."""
    sweeps_at_s: float | None = None
    """When that is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A job as it is registered."""

    id: str
    """Never used again, unlike the name."""
    job: Job
    origin: Origin
    components: tuple[Component, ...]
    """Of its allocation, in Slurm's order."""
    hold: Hold = Hold()


class Registry:
    """The jobs below one folder."""

    def __init__(self, root: Path) -> None:
        """Makes the folder if there is none.

        Raises:
            LaunchError: It cannot be used.
        """
        self._root = root
        try:
            for folder in (root, root / "jobs", root / "gone"):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            do = "Make it writable, or set XDG_STATE_HOME to a folder that all machines share"
            raise LaunchError(
                explain("folder of jobs", got=str(error), expected="one that can be written", do=do, where=str(root))
            ) from error

    def folder(self, name: str) -> JobFolder:
        """Where all of a job lies."""
        return JobFolder(root=self._root / "jobs" / name)

    def submit(self, make: Callable[[Sequence[Job]], Entry]) -> Entry:
        """Register what `make` makes of the jobs that there are; nothing changes if it raises.

        One process at a time is in here. Even where locks do not work between machines, the folder of the name is made
        by one rename, which fails where there is one: who comes second is refused by `make` when it is asked again.
        """
        with self.admitting() as there:
            self._sweep()
            entry = make(there)
            beside = self._root / "gone" / f"new-{entry.id}"
            beside.mkdir(mode=0o700)
            (beside / "job.json").write_bytes(_ENTRY.dump_json(entry))
            try:
                beside.rename(self.folder(entry.job.request.name).root)
            except OSError:
                shutil.rmtree(beside, ignore_errors=True)
                make([each.job for each in self.all()])
                raise
            return entry

    @contextmanager
    def admitting(self) -> Iterator[Sequence[Job]]:
        """All jobs; nobody else takes a name, or GPUs of a limit, in this block."""
        with locks.wait_locked(self._root / "submit.lock"):
            yield [each.job for each in self.all()]

    def all(self) -> list[Entry]:
        """All jobs, oldest first."""
        names = [path.name for path in (self._root / "jobs").iterdir()]
        found = [entry for name in names if (entry := self.find(name)) is not None]
        return sorted(found, key=lambda entry: (entry.job.created_s, entry.job.request.name))

    def find(self, name: str) -> Entry | None:
        """The job of that name; None also once it is forgotten."""
        root = self.folder(name).root
        try:
            entry = _ENTRY.validate_json((root / "job.json").read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None
        desired = _read(root / "desired.json", _DESIRED, entry.job.desired)
        record, hold = _read(root / "state.json", _STATE, (entry.job.record, entry.hold))
        return replace(entry, job=replace(entry.job, desired=desired, record=record), hold=hold)

    @contextmanager
    def changing(self, name: str) -> Iterator[Entry | None]:
        """The job as it is now; nobody else changes it in this block."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(FileNotFoundError):  # it is forgotten
                stack.enter_context(locks.wait_locked(self.folder(name).root / "change.lock"))
            yield self.find(name)

    def ask(self, name: str, desired: Desired) -> None:
        """Change what is asked of a job; call it inside of `changing`."""
        replace_text(self.folder(name).root / "desired.json", _DESIRED.dump_json(desired).decode())

    def save(self, name: str, record: Record, hold: Hold) -> None:
        """Save what is known of a job, in one step; call it inside of `changing`."""
        replace_text(self.folder(name).root / "state.json", _STATE.dump_json((record, hold)).decode())

    def tell(self, name: str, events: Sequence[Event], now: float) -> None:
        """Add events; one that is there already is left out."""
        path = self.folder(name).root / "events.jsonl"
        known = {event["key"] for event in _lines(path)}
        lines = [
            json.dumps({"key": event.key, "time_s": now, "kind": event.kind, "text": event.text})
            for event in events
            if event.key not in known
        ]
        if lines:
            with path.open("a", encoding="utf-8") as log:
                log.write("".join(f"{line}\n" for line in lines))

    def events(self, name: str) -> tuple[EventView, ...]:
        """What happened to a job, oldest first."""
        found = _lines(self.folder(name).root / "events.jsonl")
        return tuple(EventView(time_s=each["time_s"], kind=each["kind"], text=each["text"]) for each in found)

    def forget(self, entry: Entry) -> None:
        """Remove all of the job; its name is free at once."""
        with contextlib.suppress(FileNotFoundError):
            self.folder(entry.job.request.name).root.rename(self._root / "gone" / entry.id)
        shutil.rmtree(self._root / "gone" / entry.id, ignore_errors=True)

    def _sweep(self) -> None:
        """Remove what somebody who was killed left; nobody makes anything there while the lock is held."""
        for path in (self._root / "gone").iterdir():
            shutil.rmtree(path, ignore_errors=True)


def _read(path: Path, adapter: TypeAdapter[T], absent: T) -> T:
    try:
        return adapter.validate_json(path.read_bytes())
    except FileNotFoundError:
        return absent


def _lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines; one that a crash cut short is none."""
    found = []
    for line in telemetry.Lines(path).new():
        with contextlib.suppress(ValueError):
            event = json_text.loads(line)
            if isinstance(event, dict) and event.keys() >= _KEYS:
                found.append(event)
    return found


_KEYS = {"key", "time_s", "kind", "text"}
_ENTRY, _DESIRED = TypeAdapter(Entry), TypeAdapter(Desired)
_STATE = TypeAdapter(tuple[Record, Hold])
