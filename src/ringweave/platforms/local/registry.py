"""Registry of this machine's jobs: one row each in SQLite, by name. It holds all state that has to survive."""

import contextlib
import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from ringweave.errors import LaunchError, explain
from ringweave.jobs import records
from ringweave.jobs.records import DesiredJobState, Job, JobEvent, JobRecord
from ringweave.jobs.request import JobRequest
from ringweave.platforms.api import EventView
from ringweave.platforms.local import job_folder
from ringweave.platforms.submission import JobOrigin

LOCK_TIMEOUT_S = 60.0
"""Upper limit of the wait for other writing processes, which need milliseconds each."""
SCHEMA_VERSION = 2
"""Format of the database and of the job folders beside it. A database of another format is refused."""
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
class LocalRegistryEntry:
    """Registered job."""

    id: str
    """Id of the job, never reused, so that nothing of it is mistaken for a later job of the same name."""
    job: Job
    origin: JobOrigin


class LocalJobRegistry:
    """Registry of the jobs of one user.

    It opens the database for every use, so no connection crosses a fork or a thread.
    """

    def __init__(self, path: Path) -> None:
        """Create the database if there is none.

        Raises:
            LaunchError: The database cannot be used.
        """
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._create_tables()
            self._check_version()
        except (OSError, sqlite3.Error) as error:
            do = "Make the folder writable, or set XDG_STATE_HOME to one that is"
            raise LaunchError(
                explain("registry of jobs", got=str(error), expected="a file that can be used", do=do, where=str(path))
            ) from error

    def insert(self, make: Callable[[Sequence[Job]], LocalRegistryEntry]) -> LocalRegistryEntry:
        """Register the entry that `make` builds from the present jobs; nothing changes if it raises.

        Only one process at a time is in this transaction, so that name and limits are checked and taken in one step.
        """
        with self._transaction() as connection:
            there = [_parse_row(row).job for row in connection.execute(f"SELECT {_COLUMNS} FROM jobs")]
            entry = make(there)
            job = entry.job
            values = (job.request.name, entry.id, job.requester, job.created_s, *_column_values(entry))
            connection.execute(f"INSERT INTO jobs ({_COLUMNS}) VALUES ({', '.join('?' * 9)})", values)
            return entry

    def all_entries(self) -> list[LocalRegistryEntry]:
        """Return all jobs, oldest first."""
        with self._connected() as connection:
            return [
                _parse_row(row) for row in connection.execute(f"SELECT {_COLUMNS} FROM jobs ORDER BY created_s, name")
            ]

    def find_by_name(self, name: str) -> LocalRegistryEntry | None:
        """Return the job of that name, or None."""
        return self._find_one("name", name)

    def find_by_id(self, job_id: str) -> LocalRegistryEntry | None:
        """Return the job of that id; None once it is deleted."""
        return self._find_one("id", job_id)

    def save_record(self, job_id: str, record: JobRecord, events: Sequence[JobEvent], now: float) -> None:
        """Save the record with its events in one transaction; an existing event stays unchanged."""
        with self._transaction() as connection:
            connection.execute("UPDATE jobs SET record = ? WHERE id = ?", (records.dump_record(record), job_id))
            connection.executemany(
                "INSERT OR IGNORE INTO events SELECT ?, ?, ?, ?, ? WHERE EXISTS (SELECT 1 FROM jobs WHERE id = ?)",
                [(job_id, event.key, now, event.kind, event.text, job_id) for event in events],
            )

    def update_desired(self, job_id: str, change: Callable[[Job, Sequence[Job]], DesiredJobState]) -> None:
        """Change the desired state of a job; nothing changes if `change` raises or the job is gone.

        `change` gets the job and all jobs, so that common limits are checked and taken in one step.
        """
        with self._transaction() as connection:
            there = [_parse_row(row) for row in connection.execute(f"SELECT {_COLUMNS} FROM jobs")]
            job = next((entry.job for entry in there if entry.id == job_id), None)
            if job is not None:
                desired = _DESIRED.dump_json(change(job, [entry.job for entry in there])).decode()
                connection.execute("UPDATE jobs SET desired = ? WHERE id = ?", (desired, job_id))

    def delete(self, job_id: str) -> None:
        """Delete the job and its events, which frees its name."""
        with self._transaction() as connection:
            connection.execute("DELETE FROM jobs WHERE id = ?", (job_id,))

    def events(self, job_id: str) -> tuple[EventView, ...]:
        """Return the events of a job, oldest first."""
        with self._connected() as connection:
            rows = connection.execute("SELECT time_s, kind, text FROM events WHERE id = ? ORDER BY rowid", (job_id,))
            return tuple(EventView(time_s=time_s, kind=kind, text=text) for time_s, kind, text in rows)

    def _find_one(self, column: str, value: str) -> LocalRegistryEntry | None:
        with self._connected() as connection:
            row = connection.execute(f"SELECT {_COLUMNS} FROM jobs WHERE {column} = ?", (value,)).fetchone()
            return _parse_row(row) if row else None

    def _create_tables(self) -> None:
        """Create the tables once, under a lock: SQLite does not wait when its journal mode is changed."""
        if self._path.exists() and self._version() == SCHEMA_VERSION:
            return
        with job_folder.lock_file(self._path.with_suffix(".making")), self._connected() as connection:
            if self._version() == 0:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
        self._path.chmod(0o600)

    def _check_version(self) -> None:
        found = self._version()
        if found != SCHEMA_VERSION:
            do = f"Delete its jobs with the ringweave that made them, then remove {self._path.parent}"
            expected = f"format {SCHEMA_VERSION}"
            raise LaunchError(
                explain("registry of jobs", got=f"format {found}", expected=expected, do=do, where=str(self._path))
            )

    def _version(self) -> int:
        with self._connected() as connection:
            return int(connection.execute("PRAGMA user_version").fetchone()[0])

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        with contextlib.closing(
            sqlite3.connect(self._path, timeout=LOCK_TIMEOUT_S, isolation_level=None)
        ) as connection:
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute("PRAGMA synchronous = NORMAL")
            yield connection

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._connected() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")


def _column_values(entry: LocalRegistryEntry) -> tuple[str, str, str, str, str]:
    job = entry.job
    return (
        _REQUEST.dump_json(job.request).decode(),
        json.dumps(job.counts),
        _ORIGIN.dump_json(entry.origin).decode(),
        _DESIRED.dump_json(job.desired).decode(),
        records.dump_record(job.record),
    )


def _parse_row(row: tuple[str, str, str, float, str, str, str, str, str]) -> LocalRegistryEntry:
    _, job_id, requester, created_s, request, counts, origin, desired, record = row
    job = Job(
        request=_REQUEST.validate_json(request),
        requester=requester,
        created_s=created_s,
        counts=tuple(json.loads(counts)),
        desired=_DESIRED.validate_json(desired),
        record=records.parse_record(record),
    )
    return LocalRegistryEntry(id=job_id, job=job, origin=_ORIGIN.validate_json(origin))


_REQUEST, _DESIRED, _ORIGIN = TypeAdapter(JobRequest), TypeAdapter(DesiredJobState), TypeAdapter(JobOrigin)
