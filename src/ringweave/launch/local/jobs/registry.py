"""The registry of this machine's jobs: one row each in SQLite, by name. All that has to survive is here."""

import contextlib
import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from ringweave.errors import LaunchError, explain
from ringweave.jobs.life import records
from ringweave.jobs.life.actions import Event
from ringweave.jobs.life.records import Desired, Job, Record
from ringweave.jobs.requests.request import Request
from ringweave.launch.local.jobs import locks
from ringweave.launch.services.submitting import Origin
from ringweave.launch.services.views import EventView

BUSY_S = 60.0
"""How long to wait for other processes that write; each of them needs milliseconds."""
VERSION = 1
_SCHEMA = """
CREATE TABLE jobs (
  name TEXT PRIMARY KEY, id TEXT NOT NULL UNIQUE, requester TEXT NOT NULL, created_s REAL NOT NULL,
  request TEXT NOT NULL, counts TEXT NOT NULL, origin TEXT NOT NULL, desired TEXT NOT NULL, record TEXT NOT NULL
) STRICT;
CREATE TABLE events (
  id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE, key TEXT NOT NULL, time_s REAL NOT NULL,
  kind TEXT NOT NULL, text TEXT NOT NULL, PRIMARY KEY (id, key)
) STRICT;
"""
_COLUMNS = "name, id, requester, created_s, request, counts, origin, desired, record"


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A job as it is registered."""

    id: str
    """Never used again, so that nothing of a job is mistaken for something of a later one with its name."""
    job: Job
    origin: Origin


class Registry:
    """Opened anew for every use: it holds no connection that a fork or a thread could share."""

    def __init__(self, path: Path) -> None:
        """Makes the file if there is none.

        Raises:
            LaunchError: It cannot be used.
        """
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._make()
        except (OSError, sqlite3.Error) as error:
            do = "Make the folder writable, or set XDG_STATE_HOME to one that is"
            raise LaunchError(
                explain("registry of jobs", got=str(error), expected="a file that can be used", do=do, where=str(path))
            ) from error

    def submit(self, make: Callable[[Sequence[Job]], Entry]) -> Entry:
        """Register what `make` makes of the jobs that there are; nothing changes if it raises.

        One process at a time is in here, so that name and limit are checked and taken in one step.
        """
        with self._writing() as connection:
            there = [_entry(row).job for row in connection.execute(f"SELECT {_COLUMNS} FROM jobs")]
            entry = make(there)
            job = entry.job
            values = (job.request.name, entry.id, job.requester, job.created_s, *_texts(entry))
            connection.execute(f"INSERT INTO jobs ({_COLUMNS}) VALUES ({', '.join('?' * 9)})", values)
            return entry

    def all(self) -> list[Entry]:
        """All jobs, oldest first."""
        with self._connected() as connection:
            return [_entry(row) for row in connection.execute(f"SELECT {_COLUMNS} FROM jobs ORDER BY created_s, name")]

    def find(self, name: str) -> Entry | None:
        """The job of that name."""
        return self._one("name", name)

    def load(self, job_id: str) -> Entry | None:
        """The job of that id; None once it is forgotten."""
        return self._one("id", job_id)

    def save(self, job_id: str, record: Record, events: Sequence[Event], now: float) -> None:
        """Save the record with its events, in one transaction; an event that is there already stays as it is."""
        with self._writing() as connection:
            connection.execute("UPDATE jobs SET record = ? WHERE id = ?", (records.dump_record(record), job_id))
            connection.executemany(
                "INSERT OR IGNORE INTO events SELECT ?, ?, ?, ?, ? WHERE EXISTS (SELECT 1 FROM jobs WHERE id = ?)",
                [(job_id, event.key, now, event.kind, event.text, job_id) for event in events],
            )

    def ask(self, job_id: str, change: Callable[[Job, Sequence[Job]], Desired]) -> None:
        """Change what is asked of a job; nothing changes if `change` raises, or if it is gone.

        `change` gets the job, and all that there are: what they may have together is checked and taken in one step.
        """
        with self._writing() as connection:
            there = [_entry(row) for row in connection.execute(f"SELECT {_COLUMNS} FROM jobs")]
            job = next((entry.job for entry in there if entry.id == job_id), None)
            if job is not None:
                desired = _DESIRED.dump_json(change(job, [entry.job for entry in there])).decode()
                connection.execute("UPDATE jobs SET desired = ? WHERE id = ?", (desired, job_id))

    def forget(self, job_id: str) -> None:
        """Remove the job and its events; its name is free."""
        with self._writing() as connection:
            connection.execute("DELETE FROM jobs WHERE id = ?", (job_id,))

    def events(self, job_id: str) -> tuple[EventView, ...]:
        """What happened to a job, oldest first."""
        with self._connected() as connection:
            rows = connection.execute("SELECT time_s, kind, text FROM events WHERE id = ? ORDER BY rowid", (job_id,))
            return tuple(EventView(time_s=time_s, kind=kind, text=text) for time_s, kind, text in rows)

    def _one(self, column: str, value: str) -> Entry | None:
        with self._connected() as connection:
            row = connection.execute(f"SELECT {_COLUMNS} FROM jobs WHERE {column} = ?", (value,)).fetchone()
            return _entry(row) if row else None

    def _make(self) -> None:
        """Of those who begin at once one makes the tables; SQLite does not wait when its mode is changed."""
        if self._path.exists() and self._version() == VERSION:
            return
        with locks.wait_locked(self._path.with_suffix(".making")), self._connected() as connection:
            if self._version() != VERSION:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")
        self._path.chmod(0o600)

    def _version(self) -> int:
        with self._connected() as connection:
            return int(connection.execute("PRAGMA user_version").fetchone()[0])

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        with contextlib.closing(sqlite3.connect(self._path, timeout=BUSY_S, isolation_level=None)) as connection:
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute("PRAGMA synchronous = NORMAL")
            yield connection

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._connected() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")


def _texts(entry: Entry) -> tuple[str, str, str, str, str]:
    job = entry.job
    return (
        _REQUEST.dump_json(job.request).decode(),
        json.dumps(job.counts),
        _ORIGIN.dump_json(entry.origin).decode(),
        _DESIRED.dump_json(job.desired).decode(),
        records.dump_record(job.record),
    )


def _entry(row: tuple[str, str, str, float, str, str, str, str, str]) -> Entry:
    _, job_id, requester, created_s, request, counts, origin, desired, record = row
    job = Job(
        request=_REQUEST.validate_json(request),
        requester=requester,
        created_s=created_s,
        counts=tuple(json.loads(counts)),
        desired=_DESIRED.validate_json(desired),
        record=records.parse_record(record),
    )
    return Entry(id=job_id, job=job, origin=_ORIGIN.validate_json(origin))


_REQUEST, _DESIRED, _ORIGIN = TypeAdapter(Request), TypeAdapter(Desired), TypeAdapter(Origin)
