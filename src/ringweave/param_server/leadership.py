"""Leadership of two servers: the rules of failover, which are pure, and the logs that keep leadership records.

*Leadership records*, numbered from 0, settle which server leads. Each names the leader and the *members*: the
servers that have everything that was acknowledged. Of several records with one number, the first one appended
counts. A member may append the next record, to go on alone when the other server is silent, or to add the other
one. So of two servers that cannot reach each other at most one goes on, and it has everything.

A leader with a standby answers only while it can replicate everything to it and has heard from it lately (its
*lease*). Otherwise it appends a record to go on alone before it answers again, or finds that the other server has
taken over.

Of two servers that cannot reach each other either may win. The rings that each one hears (`Reachability`) indicate
which one should: a server whose node is cut off hears no ring, and leaves the lead to the other one. Reachability
only makes the better choice likely. The safety of the data rests on the records alone.

Both servers of a job append to the same log, and a record that was appended stays. On one machine the log is a folder.
In a job the nodes share no folder on every platform: the node agent has the log of its platform, and its parameter
server asks it over an inherited socket.
"""

import contextlib
import json
import os
import socket
import threading
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from enum import Enum, auto
from pathlib import Path
from typing import Any, Protocol

from pydantic import TypeAdapter

from ringweave.errors import NotLeaderError, UsageError
from ringweave.files import file_io


class Reachability(Enum):
    """Share of the rings that a server hears."""

    NONE = auto()
    """No ring: none needs the server, or its node is cut off."""
    SOME = auto()
    """Few rings, or only those of its own node, which it would hear without any network."""
    MOST = auto()
    """More than half of the known rings, and at least one from another node."""


class RingReachability:
    """Times at which the rings were last heard."""

    def __init__(self, fresh_s: float) -> None:
        """A ring counts as heard for `fresh_s` seconds; rings send several times in that."""
        self._fresh_s = fresh_s
        self._last_heard_s: dict[int, float] = {}
        self._last_heard_remote_s: float | None = None

    def note_heard(self, ring: int, at_s: float, *, is_remote: bool) -> None:
        """Note that a worker of the ring has sent something; any number stands for an unknown ring."""
        self._last_heard_s[ring] = at_s
        if is_remote:
            self._last_heard_remote_s = at_s

    def recently_heard(self, now_s: float) -> set[int]:
        """Return the rings that were heard lately."""
        return {ring for ring, at_s in self._last_heard_s.items() if now_s - at_s < self._fresh_s}

    def reachability(self, rings: Collection[int], now_s: float) -> Reachability:
        """Return which of these rings are heard; as long as no rings are known, any of them counts."""
        fresh = self.recently_heard(now_s)
        if not fresh:
            return Reachability.NONE
        if self._last_heard_remote_s is None or now_s - self._last_heard_remote_s >= self._fresh_s:
            return Reachability.SOME
        return Reachability.MOST if not rings or 2 * len(fresh.intersection(rings)) > len(rings) else Reachability.SOME


LEASE_S = 1.0
"""Silence of the standby after which the leader goes on alone. The standby waits longer, and rings have to find it
then: together this stays below two seconds."""
_STANDBY_FACTOR = 1.25
"""Factor on the standby's wait: of two servers that hear the rings, but not each other, the leader should stay."""
_FEW_RINGS_FACTOR = 3.0
"""Factor on the wait of a server that hears few rings, or none from another node: its node may be cut off, and the
other's not. Rings that lost their representative to the cut have chosen another one by then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeadershipRecord:
    """Leader from here on, and the servers that have all its state."""

    number: int
    term: int
    """Counts leaders: it grows if another server leads than in the record before."""
    leader: int
    members: tuple[int, ...]


_RECORD = TypeAdapter(LeadershipRecord)


class FailoverRules:
    """Failover rules of one server; not thread-safe."""

    def __init__(self, own: int, *, lease_s: float = LEASE_S) -> None:
        """Start with nothing: it leads only once it has appended a record."""
        self.own = own
        self.record: LeadershipRecord | None = None
        """Newest record that this server has appended or follows."""
        self._lease_s = lease_s
        self._last_heard_s: float | None = None
        self._last_checked_s = 0.0
        self._has_lost_standby = False
        self._is_record_pending = False

    @property
    def leads(self) -> bool:
        """True if its own record is the newest that it knows of."""
        return self.record is not None and self.record.leader == self.own

    @property
    def term(self) -> int:
        """Term of the newest record that it knows of."""
        return self.record.term if self.record else 0

    def first_record(self) -> LeadershipRecord:
        """Return the record of the first server, where there is none at all."""
        return LeadershipRecord(number=0, term=0, leader=self.own, members=(self.own,))

    def record_without_other(self, newest: LeadershipRecord) -> LeadershipRecord | None:
        """Return the record to go on without the other; None if this server lacks some state."""
        if self.record is None or self.own not in newest.members:
            return None
        term = newest.term + (newest.leader != self.own)
        return LeadershipRecord(number=newest.number + 1, term=term, leader=self.own, members=(self.own,))

    def record_with_standby(self, other: int) -> LeadershipRecord:
        """Return the leader's record that the other server has all state, too."""
        assert self.record is not None, "only who leads takes others in"
        assert self.leads, "only who leads takes others in"
        return replace(self.record, number=self.record.number + 1, members=(self.own, other))

    def adopt(self, record: LeadershipRecord, now_s: float) -> None:
        """Adopt a record that this server has appended, or whose leader's state it has."""
        self.record, self._last_heard_s, self._last_checked_s = record, now_s, now_s
        self._has_lost_standby = self._is_record_pending = False

    def note_record_pending(self) -> None:
        """Note that an append is pending: until `adopt` its outcome is unknown."""
        self._is_record_pending = True

    def note_standby_lost(self) -> None:
        """Note that the standby is lost: nothing may be acknowledged before another record is adopted."""
        self._has_lost_standby = True

    def note_heard(self, at_s: float) -> None:
        """Note that the other server has answered a question of that time, or has sent something."""
        self._last_heard_s = at_s if self._last_heard_s is None else max(at_s, self._last_heard_s)

    def has_lease(self, now_s: float) -> bool:
        """Return whether no other server can have taken over: there is none, or it is up to date and was just heard."""
        if self.record is None or not self.leads or self._last_heard_s is None or self._is_record_pending:
            return False
        return len(self.record.members) == 1 or (
            not self._has_lost_standby and now_s - self._last_heard_s < self._lease_s
        )

    def is_silent(self, now_s: float) -> bool:
        """Return whether the other server is silent for too long; time that this one slept does not count."""
        since_check_s, self._last_checked_s = now_s - self._last_checked_s, now_s
        if self._last_heard_s is None or self.record is None:
            return False
        if since_check_s > self._lease_s / 2 and not self.leads:
            self._last_heard_s = now_s
        return now_s - self._last_heard_s > self._silence_limit_s

    def should_go_on(self, now_s: float, reachability: Reachability, *, is_other_gone: bool) -> bool:
        """Return whether to go on without the other server: it has closed or is silent, and rings are heard.

        `is_other_gone`: its connection has ended, so it need not be awaited.
        """
        silent_s = now_s - self._last_heard_s if self._last_heard_s is not None else 0.0
        match reachability:
            case Reachability.NONE:
                return False
            case Reachability.SOME:
                return is_other_gone or silent_s > self._silence_limit_s * _FEW_RINGS_FACTOR
            case Reachability.MOST:
                return is_other_gone or silent_s >= self._silence_limit_s

    @property
    def _silence_limit_s(self) -> float:
        return self._lease_s * (1.0 if self.leads else _STANDBY_FACTOR)


MAX_RECORD_BYTES = 1 << 16
"""Maximum size of a record's text."""
ANSWER_TIMEOUT_S = 4.0
"""Time for an answer over a socket. An election among the hosts of a run may take longer; then it is asked again."""
DESCRIPTOR_PREFIX = "fd:"
MAX_RECORDS = 16
"""Records that a folder keeps: the newest. Servers ask for the latest, and for what they have appended a moment ago."""


class LeadershipLog(Protocol):
    """Log of leadership records that both servers share."""

    def latest(self) -> LeadershipRecord | None:
        """Return the record with the highest number; None before the first.

        Raises:
            NotLeaderError: The log cannot be read.
        """
        ...

    def append(self, record: LeadershipRecord) -> bool:
        """Append a record; False if there is another one of that number already.

        Raises:
            NotLeaderError: The log cannot be written. The record may or may not exist then.
        """
        ...


class FolderLeadershipLog:
    """Log in a folder that both servers share; each record is one hard link, and the newest are kept."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def latest(self) -> LeadershipRecord | None:
        try:
            paths = self._list_records()
            return self._read(paths[-1]) if paths else None
        except (OSError, ValueError, TypeError, KeyError) as cause:
            raise self._error(cause) from cause

    def append(self, record: LeadershipRecord) -> bool:
        partial = self._folder / f"partial-{os.getpid()}-{record.leader}-{record.number}"
        path = self._folder / f"claim-{record.number:08d}.json"
        try:
            try:
                partial.write_text(dump_record(record), encoding="ascii")
                os.link(partial, path)
            except FileExistsError:
                return self._read(path) == record  # written by an earlier attempt with unknown outcome
            finally:
                partial.unlink(missing_ok=True)
            paths = self._list_records()
        except (OSError, ValueError, TypeError, KeyError) as cause:
            raise self._error(cause) from cause
        for old in paths[:-MAX_RECORDS]:  # this one among them, if later ones had superseded and removed it before
            with contextlib.suppress(OSError):
                old.unlink()
        return path in paths[-MAX_RECORDS:]

    def _list_records(self) -> list[Path]:
        """Return the files of records, the latest last."""
        return sorted(each for each in self._folder.iterdir() if each.match("claim-*.json"))

    def _read(self, path: Path) -> LeadershipRecord:
        return _RECORD.validate_python(file_io.load_json(path, MAX_RECORD_BYTES))

    def _error(self, cause: Exception) -> NotLeaderError:
        expected, do = "a folder that both servers can read and write", "Look at that disk"
        return log_error(str(cause), expected=expected, do=do, where=str(self._folder))


class SocketLeadershipLog:
    """Log beyond a socket; thread-safe. Requests are numbered, so that a late answer is not taken for the next one."""

    def __init__(self, connection: socket.socket, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        """`connection` is one end of a pair of stream sockets; `LogServer` has the other one."""
        connection.settimeout(timeout_s)
        self._connection, self._received = connection, b""
        self._lock, self._number = threading.Lock(), 0

    def latest(self) -> LeadershipRecord | None:
        found = self._ask({"latest": True})["record"]
        return None if found is None else _RECORD.validate_python(found)

    def append(self, record: LeadershipRecord) -> bool:
        return bool(self._ask({"append": asdict(record)})["appended"])

    def close(self) -> None:
        self._connection.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            self._number += 1
            try:
                self._connection.sendall(_to_line(request | {"request": self._number}))
                answer = self._read_answer()
            except (OSError, ValueError, TypeError, KeyError) as cause:
                raise _agent_error(str(cause) or type(cause).__name__) from cause
        if answer.get("error"):
            raise NotLeaderError(str(answer["error"]))
        return answer

    def _read_answer(self) -> dict[str, Any]:
        while True:
            line, separator, rest = self._received.partition(b"\n")
            if not separator:
                content = self._connection.recv(MAX_RECORD_BYTES)
                if not content:
                    raise OSError("the node agent has closed the socket")
                self._received += content
                if len(self._received) > MAX_RECORD_BYTES:
                    raise OSError(f"an answer of more than {MAX_RECORD_BYTES} bytes")
                continue
            self._received = rest
            answer = file_io.parse_json(line)
            if answer["request"] == self._number:
                return answer


class LogServer:
    """Other end of a `SocketLeadershipLog`: answers from a log, in a thread, until the socket is closed."""

    def __init__(self, log: LeadershipLog) -> None:
        self._log = log

    def open(self) -> int:
        """Start to answer; return the descriptor of the end for the server's process, which inherits it."""
        own, other = socket.socketpair()
        threading.Thread(target=self._serve, args=(own,), name="leadership log", daemon=True).start()
        return other.detach()

    def _serve(self, connection: socket.socket) -> None:
        with (
            connection,
            connection.makefile("rb") as lines,
            contextlib.suppress(OSError, ValueError, LookupError, TypeError),
        ):
            while line := lines.readline(MAX_RECORD_BYTES):
                connection.sendall(_to_line(self._answer(file_io.parse_json(line))))

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = {"request": request["request"]}
        try:
            if "append" in request:
                return answer | {"appended": self._log.append(_RECORD.validate_python(request["append"]))}
            found = self._log.latest()
        except NotLeaderError as error:
            return answer | {"error": str(error)}
        return answer | {"record": None if found is None else asdict(found)}


def open_log(where: str) -> LeadershipLog:
    """Open the log at a folder, or at `fd:N`, an inherited socket.

    Raises:
        UsageError: It is no number of a descriptor.
        OSError: The descriptor is no socket.
    """
    if where.startswith(DESCRIPTOR_PREFIX):
        number = where.removeprefix(DESCRIPTOR_PREFIX)
        if not number.isascii() or not number.isdigit():
            do = "Leave --claims to the launcher, or give a folder"
            raise UsageError("leadership log", got=where, expected="a folder, or fd:N", do=do)
        return SocketLeadershipLog(socket.socket(fileno=int(number)))
    return FolderLeadershipLog(Path(where))


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundLeadership:
    """Log of a platform that keeps one value for a job: the latest record of the job's latest round."""

    round: int
    record: LeadershipRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class LogAnswer:
    """Answer of such a log to a record that a server appends, or to none."""

    latest: LeadershipRecord | None
    """Latest record of the round; None before the first."""
    is_appended: bool
    """The record is the latest: it has just become so, or was so already."""


def append_to(known: RoundLeadership | None, round_: int, record: LeadershipRecord | None) -> LogAnswer:
    """Return the answer of a log that keeps the latest record alone; the caller stores it if it is appended. Pure.

    An earlier record than the latest is refused, also if it was appended once: another one has superseded it. So is one
    of an earlier round, whose servers have ended.

    Args:
        known: The kept value; None before the first record of the job.
        round_: Round of the servers that ask.
        record: Record to append; None only reads.
    """
    latest = known.record if known is not None and known.round == round_ else None
    if record is None or (known is not None and known.round > round_):
        return LogAnswer(latest=latest, is_appended=False)
    is_next = record.number == (0 if latest is None else latest.number + 1)
    return (
        LogAnswer(latest=record, is_appended=True)
        if is_next or record == latest
        else LogAnswer(latest=latest, is_appended=False)
    )


def dump_answer(answer: LogAnswer) -> str:
    """Return the answer as JSON."""
    return json.dumps(asdict(answer))


def parse_answer(text: str) -> LogAnswer:
    """Parse the JSON of an answer.

    Raises:
        ValueError: It is none.
    """
    return TypeAdapter(LogAnswer).validate_json(file_io.bounded(text))


def dump_record(record: LeadershipRecord) -> str:
    """Return the record as JSON."""
    return json.dumps(asdict(record))


def parse_record(text: str) -> LeadershipRecord:
    """Parse the JSON of a record.

    Raises:
        ValueError: It is none.
    """
    return _RECORD.validate_json(file_io.bounded(text))


def log_error(got: str, *, expected: str, do: str, where: str = "") -> NotLeaderError:
    """Return the error of a log that cannot be used."""
    return NotLeaderError("leadership log", got=got, expected=expected, do=do, where=where)


def _agent_error(got: str) -> NotLeaderError:
    return log_error(got, expected="an answer of the node agent", do="Nothing: it is asked again")


def _to_line(content: dict[str, Any]) -> bytes:
    return json.dumps(content).encode() + b"\n"
