"""Registry of this machine's jobs: one row each in SQLite, by name. It holds all state that has to survive."""

import contextlib
import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from ringweave.errors import JobError, LaunchError, shorten
from ringweave.jobs import records
from ringweave.jobs.records import DesiredJobState, Job, JobEvent, JobRecord, JsonForm
from ringweave.jobs.request import JobRequest
from ringweave.jobs.states import Reason
from ringweave.platforms import api
from ringweave.platforms.api import EventView
from ringweave.platforms.local import job_folder
from ringweave.platforms.submission import JobOrigin

LOCK_TIMEOUT_S = 60.0
"""Upper limit of the wait for other writing processes, which need a millisecond each: whatever takes longer is done
before the transaction, and a transaction reads only the rows that it needs."""
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
_REMEDIES = {
    sqlite3.SQLITE_BUSY: "Try again: other commands write it, or a stopped one holds its lock",
    sqlite3.SQLITE_FULL: "Free space on its disk",
    sqlite3.SQLITE_IOERR: "Free space on its disk, and check that it works",
    sqlite3.SQLITE_READONLY: "Make the folder writable, or set XDG_STATE_HOME to one that is",
    sqlite3.SQLITE_CANTOPEN: "Make the folder writable, or set XDG_STATE_HOME to one that is",
    sqlite3.SQLITE_CORRUPT: "Move the file away: its jobs are forgotten, and their folders stay beside it",
    sqlite3.SQLITE_NOTADB: "Move the file away: its jobs are forgotten, and their folders stay beside it",
}
"""Primary result code of SQLite -> what to do."""
_COLUMNS = "name, id, requester, created_s, request, counts, origin, desired, record"


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalRegistryEntry:
    """Registered job."""

    id: str
    """Id of the job, never reused, so that nothing of it is mistaken for a later job of the same name."""
    job: Job
    origin: JobOrigin
    problem: str = ""
    """Reason for which its row cannot be read; `job` then only shows that. Nothing but a deletion changes such a job.
    """


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
        except OSError as error:
            do = "Make the folder writable, or set XDG_STATE_HOME to one that is"
            raise self._error(error.strerror or str(error), do) from error

    def rivals(self, request: JobRequest) -> list[Job]:
        """Return the jobs that the admission of a request depends on: see `_read_rivals`."""
        with self._connected() as connection:
            return _read_rivals(connection, request)

    def insert(self, entry: LocalRegistryEntry, admit: Callable[[Sequence[Job]], Job]) -> LocalRegistryEntry:
        """Register the entry with the job that `admit` returns; nothing changes if it raises.

        Only one process at a time is in this transaction, so that name and limits are checked and taken in one step.

        Args:
            entry: The entry, whose request was admitted before.
            admit: Admits the request once more, by its rivals at this moment.
        """
        with self._transaction() as connection:
            entry = replace(entry, job=admit(_read_rivals(connection, entry.job.request)))
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
            connection.execute("UPDATE jobs SET record = ? WHERE id = ?", (records.RECORD_JSON.dump(record), job_id))
            connection.executemany(
                "INSERT OR IGNORE INTO events SELECT ?, ?, ?, ?, ? WHERE EXISTS (SELECT 1 FROM jobs WHERE id = ?)",
                [(job_id, event.key, now, event.kind, event.text, job_id) for event in events],
            )
            older = "SELECT rowid FROM events WHERE id = ? ORDER BY rowid DESC LIMIT -1 OFFSET ?"
            connection.execute(f"DELETE FROM events WHERE rowid IN ({older})", (job_id, records.MAX_EVENTS))

    def update_desired(self, job_id: str, change: Callable[[Job, Sequence[Job]], DesiredJobState]) -> None:
        """Change the desired state of a job; nothing changes if `change` raises or the job is gone.

        `change` gets the job and its rivals, so that common limits are checked and taken in one step.
        """
        with self._transaction() as connection:
            row = connection.execute(f"SELECT {_COLUMNS} FROM jobs WHERE id = ?", (job_id,)).fetchone()
            if row is not None:
                job = _parse_row(row).job
                desired = _DESIRED.dump(change(job, _read_rivals(connection, job.request)))
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
        found = self._version() if self._path.exists() else 0
        if found == 0:
            with job_folder.lock_file(self._path.with_suffix(".making")), self._connected() as connection:
                if (found := _version(connection)) == 0:
                    connection.execute("PRAGMA journal_mode = WAL")
                    connection.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
                    found = SCHEMA_VERSION
            self._path.chmod(0o600)
        if found != SCHEMA_VERSION:
            do = f"Delete its jobs with the ringweave that made them, then remove {self._path.parent}"
            raise self._error(f"format {found}", do, expected=f"format {SCHEMA_VERSION}")

    def _version(self) -> int:
        with self._connected() as connection:
            return _version(connection)

    def _error(self, got: str, do: str, *, expected: str = "a file that can be used") -> LaunchError:
        return LaunchError("registry of jobs", got=got, expected=expected, do=do, where=str(self._path))

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection."""
        try:
            with contextlib.closing(
                sqlite3.connect(self._path, timeout=LOCK_TIMEOUT_S, isolation_level=None)
            ) as connection:
                connection.execute("PRAGMA foreign_keys = ON")
                connection.execute("PRAGMA synchronous = NORMAL")
                yield connection
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the extended part tells nothing that helps
            raise self._error(str(error), _REMEDIES.get(code, _REMEDIES[sqlite3.SQLITE_CANTOPEN])) from error

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
        _REQUEST.dump(job.request),
        json.dumps(job.counts),
        _ORIGIN.dump(entry.origin),
        _DESIRED.dump(job.desired),
        records.RECORD_JSON.dump(job.record),
    )


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _read_rivals(connection: sqlite3.Connection, request: JobRequest) -> list[Job]:
    """Return the job of that name and, for a request of GPUs, all jobs with GPUs, which common limits count."""
    rows = connection.execute(
        f'SELECT {_COLUMNS} FROM jobs WHERE name = ? OR (? AND request LIKE \'%"device":"cuda"%\')',
        (request.name, request.device == "cuda"),
    )
    return [_parse_row(row).job for row in rows]


def _parse_row(row: tuple[str, str, str, float, str, str, str, str, str]) -> LocalRegistryEntry:
    """Return the entry of a row; one that is none of ours becomes an entry with a problem, and hides no other."""
    name, job_id, requester, created_s, request, counts, origin, desired, record = row
    try:
        job = Job(
            request=_REQUEST.parse(request),
            requester=requester,
            created_s=created_s,
            counts=_COUNTS.parse(counts),
            desired=_DESIRED.parse(desired),
            record=records.RECORD_JSON.parse(record),
        )
        _check_lengths(job)
        return LocalRegistryEntry(id=job_id, job=job, origin=_ORIGIN.parse(origin))
    except (ValueError, JobError) as error:
        problem = f"its record cannot be read: {_mistake(error)}"
        hint = f"ringweave delete {name} removes it with its processes; or use the ringweave that wrote it"
        reason = Reason(code="Unreadable", text=problem, hint=hint)
        job = api.unreadable_job(name, requester, created_s, reason)
        return LocalRegistryEntry(
            id=job_id, job=job, origin=JobOrigin(directory="", script_text=None, environ={}), problem=problem
        )


def _check_lengths(job: Job) -> None:
    asked, kept = len(job.request.nodes), len(job.record.nodes)
    if not len(job.counts) == asked == kept:
        raise ValueError(f"{len(job.counts)} counts, {asked} nodes in its request, {kept} in its record")


def _mistake(error: ValueError | JobError) -> str:
    """Return what is wrong with a row, on one line."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False)[0]
    return f"{error.title} has {shorten(first['input'])} as {'.'.join(map(str, first['loc'])) or 'its text'}"


_REQUEST, _DESIRED, _ORIGIN = JsonForm(JobRequest), JsonForm(DesiredJobState), JsonForm(JobOrigin)
_COUNTS = JsonForm(tuple[int, ...])
