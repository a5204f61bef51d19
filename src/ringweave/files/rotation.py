"""Rotation: a log that processes append to, as files of limited size and number.

```text
events.jsonl               what is written now
events.jsonl.1-52341       lines 1 to 52341, set aside by one rename; events.jsonl.52342-104001 has the next ones
events.jsonl.kept-52341    what is kept of lines 1 to 52341, where the oldest are merged instead of removed
```

The numbers count all lines that the log has ever had. So a reader knows where it is, whatever is renamed or removed,
and how many lines it has missed. A process that is killed at any point leaves each line in exactly one file that
counts: only the rename changes which file a line is in, and a merged file replaces those whose lines it has.
"""

import fcntl
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ringweave.environment import LOG_MAX_FILES, LOG_MAX_SIZE
from ringweave.errors import UsageError, shorten
from ringweave.files import file_io
from ringweave.units import parse_bytes

MAX_LINE_BYTES = file_io.MAX_JSON_BYTES
"""Longest line that is read; the longest events list every link of a large cluster. Longer lines are skipped."""
MIN_FILE_BYTES = 64 * 1024
"""Smallest limit of a file: a line of a worker's output is as long."""
LOCK_WAIT_S = 0.2
"""Longest wait for another writer, which needs microseconds, or milliseconds when it sets the file aside. A stopped
process may hold the lock longer; then lines are written without it."""
OUTPUT_CHECK_S = 2.0
"""Time between two looks at the size of a process's own output."""
DEFAULT_FILE_BYTES = 16 * 2**20
"""Small enough to be merged within a fraction of a second."""
DEFAULT_FILES = 10
_SUFFIX = re.compile(r"\.(?:(\d+)-(\d+)|kept-(\d+))$")
_READ_BYTES = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class LogLimits:
    """Limits of one log on the disk."""

    max_bytes: int = DEFAULT_FILE_BYTES
    """Size of a file from which on the next one begins."""
    max_files: int = DEFAULT_FILES
    """Number of files, with the one that is written."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "LogLimits":
        """Read the variables; an empty one counts as absent.

        Raises:
            UsageError: A value is none, or too small.
        """
        size, files = environ.get(LOG_MAX_SIZE), environ.get(LOG_MAX_FILES)
        return cls.parse(size or None, files or None, where=(LOG_MAX_SIZE, LOG_MAX_FILES))

    @classmethod
    def parse(cls, size: str | None, files: str | None, *, where: tuple[str, str]) -> "LogLimits":
        """Return the limits of these texts, `16MB` and `10`; None: the default. `where` names their places, for errors.

        Raises:
            UsageError: A text is no limit, or it is too small.
        """
        most_bytes = DEFAULT_FILE_BYTES if size is None else parse_bytes(size)
        if most_bytes < MIN_FILE_BYTES:
            do = "Give a larger one, such as 16MB"
            raise UsageError(
                "size of a log file", got=size, expected=f">= {MIN_FILE_BYTES} bytes", do=do, where=where[0]
            )
        if files is not None and not (files.isascii() and files.isdigit() and 2 <= int(files) <= 1000):
            do = "Give a number such as 10"
            raise UsageError("files of a log", got=files, expected="2 to 1000", do=do, where=where[1])
        return cls(max_bytes=most_bytes, max_files=DEFAULT_FILES if files is None else int(files))

    def to_environ(self) -> dict[str, str]:
        """Return the variables that `from_environ` reads."""
        return {LOG_MAX_SIZE: str(self.max_bytes), LOG_MAX_FILES: str(self.max_files)}


DEFAULT_LIMITS = LogLimits()


@dataclass(frozen=True, kw_only=True, slots=True)
class LogSegment:
    """File with the lines from `first` to `last`, which is written no more."""

    first: int
    last: int
    path: Path


def find_segments(path: Path) -> tuple[list[LogSegment], LogSegment | None]:
    """Return the files of a log that were set aside, oldest first, and the merged one in place of the oldest.

    Files whose lines are in the merged one are left out.
    """
    found: list[LogSegment] = []
    kept: list[LogSegment] = []
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(path.parent) as entries:
        for entry in entries:
            match = _SUFFIX.fullmatch(entry.name, len(path.name)) if entry.name.startswith(path.name) else None
            if match is not None and match[3]:
                kept.append(LogSegment(first=1, last=int(match[3]), path=path.with_name(entry.name)))
            elif match is not None:
                found.append(LogSegment(first=int(match[1]), last=int(match[2]), path=path.with_name(entry.name)))
    newest = max(kept, key=lambda each: each.last, default=None)
    merged = newest.last if newest else 0
    return sorted((each for each in found if each.last > merged), key=lambda each: each.first), newest


def _last_line(segments: list[LogSegment], kept: LogSegment | None) -> int:
    """Return the number of the last line that was set aside; 0 before the first."""
    return max([each.last for each in segments], default=kept.last if kept else 0)


def exists(path: Path) -> bool:
    """Return whether there is a log at this path; the file itself may be missing for a moment."""
    return path.exists() or find_segments(path) != ([], None)


def find_logs(folder: Path, pattern: str) -> list[Path]:
    """Return the paths of the logs below a folder that match a pattern, sorted; each of them `exists`."""
    found = [path for path in folder.glob(f"{pattern}*") if not path.name.endswith(_PARTIAL)]
    logs = {path.with_name(_SUFFIX.sub("", path.name)) for path in found}
    return sorted(path for path in logs if path.match(pattern))


def read_tail(path: Path, max_bytes: int) -> bytes:
    """Return the last bytes of a log, over the ends of its files.

    Raises:
        FileNotFoundError: There is no log.
        OSError: It cannot be read.
    """
    content, last = b"", None
    while last is None or find_segments(path)[0][-1:] != last:  # set aside meanwhile: begin again
        segments = find_segments(path)[0]
        content, last = b"", segments[-1:]
        for each in (path, *(segment.path for segment in reversed(segments))):
            with suppress(FileNotFoundError), each.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - (max_bytes - len(content))))
                content = file.read(max_bytes - len(content)) + content
            if len(content) >= max_bytes:
                break
    if not content and not exists(path):
        raise FileNotFoundError(2, "no such log", str(path))
    return content


def last_lines(path: str | os.PathLike[str]) -> list[str]:
    """Return the lines of a log, or of its last MiB, oldest first; a log may be larger than memory.

    Raises:
        OSError: It cannot be read.
    """
    return read_tail(Path(path), 2**20).decode(errors="replace").splitlines()


LogMerge = Callable[[Iterable[bytes], int], list[bytes]]
"""Returns what is kept of lines, with their ends, within a number of bytes."""
_PARTIAL = ".partial"


class RotatingFile:
    """Appends records to a log; any number of processes may do so at once.

    Each record is one write under a lock of the file, so it is whole and in the file of its number. A record may be
    several lines. Where a file system has no locks, or a stopped process holds one, records are written without; then a
    file is set aside at twice its size, and a line may come into one that a follower has left already.
    """

    def __init__(
        self,
        path: str | Path,
        limits: LogLimits | None = None,
        *,
        merge: LogMerge | None = None,
        keeps_open: bool = False,
    ) -> None:
        """Open nothing yet.

        Args:
            path: Path of the newest file.
            limits: None: those of this process's environment.
            merge: Merges the oldest lines into what is kept of them; None: the oldest files are removed.
            keeps_open: Keep the file open between two records; then one thread at a time may call.
        """
        self.path = Path(path)
        self._limits = limits or LogLimits.from_environ(os.environ)
        self._merge, self._keeps_open = merge, keeps_open
        self._descriptor: int | None = None

    def append(self, record: bytes) -> int:
        """Append a record; return the bytes written, fewer on a full disk.

        Raises:
            OSError: It cannot be written.
        """
        written = self._try_append(record)
        if written is not None:
            return written
        while (written := self._try_append(record)) is None:
            pass
        with suppress(OSError):  # tried again when the next file is full
            self._remove_oldest()
        return written

    def close(self) -> None:
        """Close the file, if it was kept open."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _try_append(self, record: bytes) -> int | None:
        """Append a record; None: the file was set aside, by this process or another one, and the next one is meant."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        is_current = False
        try:
            with _locked(descriptor) as has_lock:
                is_current = file_io.is_same_file(self.path, descriptor) and not (
                    self._is_full(descriptor, len(record), has_lock=has_lock) and self._set_aside(descriptor)
                )
                if not is_current:
                    return None
                return os.write(descriptor, record) if record else 0
        finally:
            if is_current and self._keeps_open:
                self._descriptor = descriptor
            else:
                os.close(descriptor)

    def _is_full(self, descriptor: int, added: int, *, has_lock: bool) -> bool:
        size, most = os.fstat(descriptor).st_size, self._limits.max_bytes
        return size > 0 and size + added > (most if has_lock else 2 * most)

    def _set_aside(self, descriptor: int) -> bool:
        """Give the file the name of its lines; return whether that was possible."""
        segments, kept = find_segments(self.path)
        first = 1 + _last_line(segments, kept)
        last = first - 1 + max(1, _count_lines(descriptor))
        try:
            # Where there are no locks, another process may have been faster.
            if file_io.is_same_file(self.path, descriptor):
                self.path.rename(self.path.with_name(f"{self.path.name}.{first}-{last}"))
        except OSError:
            return False
        return True

    def _remove_oldest(self) -> None:
        """Remove the oldest files over the limit, or merge them into what is kept."""
        while True:
            segments, _ = find_segments(self.path)
            if len(segments) <= self._limits.max_files - (1 if self._merge is None else 2):
                return
            if self._merge is None:
                segments[0].path.unlink(missing_ok=True)
            elif not self._merge_oldest(segments[0], self._merge):
                return

    def _merge_oldest(self, oldest: LogSegment, merge: LogMerge) -> bool:
        """Merge a file into what is kept; return whether that is done, by this process or by another one before."""
        with oldest.path.open("r+b") as file:  # NFS locks what is open for writing
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released with the file, also if it is killed
            except OSError:
                return False
            if not file_io.is_same_file(oldest.path, file.fileno()):
                return True
            kept = find_segments(self.path)[1]
            merged = self.path.with_name(f"{self.path.name}.kept-{oldest.last}")
            partial = merged.with_name(merged.name + _PARTIAL)
            with partial.open("wb") as target:
                target.writelines(merge(_iter_lines(kept, file), self._limits.max_bytes))
                target.flush()
                file_io.fsync_file(target)
            partial.rename(merged)
            oldest.path.unlink()
        if kept is not None:
            kept.path.unlink(missing_ok=True)
        return True


def _iter_lines(kept: LogSegment | None, oldest: BinaryIO) -> Iterator[bytes]:
    if kept is not None:
        with kept.path.open("rb") as file:
            yield from file
    yield from oldest


@contextmanager
def _locked(descriptor: int, kind: int = fcntl.LOCK_EX) -> Iterator[bool]:
    """Hold the lock of a file; yield whether it could be had in time."""
    has_lock = _wait_lock(descriptor, kind)
    try:
        yield has_lock
    finally:
        if has_lock:  # by name: a process that was forked meanwhile has the same open file
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def _wait_lock(descriptor: int, kind: int) -> bool:
    deadline_s = None
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            deadline_s = time.monotonic() + LOCK_WAIT_S if deadline_s is None else deadline_s
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(0.001)
        except OSError:  # a file system without locks
            return False
        else:
            return True


def _count_lines(descriptor: int) -> int:
    count = position = 0
    while content := os.pread(descriptor, _READ_BYTES, position):
        count += content.count(b"\n")
        position += len(content)
    return count


@dataclass(frozen=True, kw_only=True, slots=True)
class LogCursor:
    """Place in a log. `parse_cursor(str(cursor)) == cursor`."""

    first: int = 1
    """First line of the file that is read."""
    offset: int = 0
    """Bytes of it that have been read."""
    lines: int = 0
    """Lines of it that have been read."""

    def __str__(self) -> str:
        return f"{self.first}:{self.offset}:{self.lines}"


LOG_START = LogCursor()
CURSOR_PATTERN = r"^([1-9]\d{0,17}):(\d{1,18}):(\d{1,18})$"


def parse_cursor(text: str) -> LogCursor:
    """Parse a cursor.

    Raises:
        ValueError: The text is none.
    """
    match = re.fullmatch(CURSOR_PATTERN, text)
    if match is None:
        raise ValueError(f"cursor in a log: {shorten(text)}, expected FIRST:OFFSET:LINES.")
    return LogCursor(first=int(match[1]), offset=int(match[2]), lines=int(match[3]))


def lines_gone_text(num_lines: int) -> bytes:
    """Return the line that stands for lines which were removed before they were read."""
    return f"[ringweave] {num_lines} earlier lines are gone ({LOG_MAX_SIZE}, {LOG_MAX_FILES})\n".encode()


class LineReader:
    """Reads lines as they are added to a log; each is read once, at constant cost, over the ends of its files."""

    def __init__(
        self, path: str | Path, *, gone: Callable[[int], bytes] = lines_gone_text, cursor: LogCursor = LOG_START
    ) -> None:
        """Begin to read.

        Args:
            path: Path of the newest file; it need not exist yet.
            gone: Returns the line to read in place of so many lines that were removed before they were read.
            cursor: Place to begin at.
        """
        self._path, self._gone, self.cursor = Path(path), gone, cursor
        self._is_endless = False
        self._seen: tuple[int, int, int] | None = None

    def read_new(self, *, at_end: bool = False) -> Iterator[bytes]:
        """Yield lines added since the last call, with their ends: an unfinished one later, an overlong one never.

        At most one of them is in memory.

        Args:
            at_end: An unfinished last line counts, unless it is only just being written.
        """
        if not at_end and self._seen is not None and self._seen == self._look():
            return
        while (found := self._open_next()) is not None:
            file, place, last, num_gone = found
            with file:
                self.cursor = place
                if num_gone:
                    yield self._gone(num_gone)
                file.seek(place.offset)
                yield from self._read_file(file, takes_rest=at_end or last is not None)
                if last is None:
                    status = os.fstat(file.fileno())
                    self._seen = (status.st_ino, self.cursor.offset, status.st_mtime_ns)
                    return
            self.cursor = LogCursor(first=last + 1)

    def _look(self) -> tuple[int, int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns

    def _read_file(self, file: BinaryIO, *, takes_rest: bool) -> Iterator[bytes]:
        first, offset, lines = self.cursor.first, self.cursor.offset, self.cursor.lines
        while content := file.readline(MAX_LINE_BYTES):
            if takes_rest and not content.endswith(b"\n") and len(content) < MAX_LINE_BYTES:
                with _locked(file.fileno(), fcntl.LOCK_SH):  # the rest of a record that a process is writing
                    content += file.readline(MAX_LINE_BYTES - len(content))
            is_end, was_endless = content.endswith(b"\n"), self._is_endless
            is_part = not is_end and len(content) == MAX_LINE_BYTES
            if not is_end and not is_part and not takes_rest:
                return
            offset, lines = offset + len(content), lines + is_end
            self.cursor, self._is_endless = LogCursor(first=first, offset=offset, lines=lines), is_part
            if not is_part and not was_endless:
                yield content

    def _open_next(self) -> tuple[BinaryIO, LogCursor, int | None, int] | None:
        """Open the file to read now; return it, the place in it, its last line and the lines gone before it.

        The last line is None for the newest file; no file: None.
        """
        while True:
            segments, kept = find_segments(self._path)
            segment = self._next_segment(segments, kept)
            try:
                file = (segment.path if segment else self._path).open("rb")
            except FileNotFoundError:
                if segment is None and find_segments(self._path) == (segments, kept):
                    return None
                continue  # set aside, merged or removed meanwhile
            if segment is None and find_segments(self._path) != (segments, kept):
                file.close()
                continue
            first = segment.first if segment else _last_line(segments, kept) + 1
            if segment is not None and segment is kept:
                return file, LOG_START, segment.last, 0
            if first == self.cursor.first:
                return file, self.cursor, segment.last if segment else None, 0
            num_gone = first - self.cursor.first - self.cursor.lines  # negative: another log in its place
            return file, LogCursor(first=first), segment.last if segment else None, max(0, num_gone)

    def _next_segment(self, segments: list[LogSegment], kept: LogSegment | None) -> LogSegment | None:
        """Return the file to read now; None: the newest."""
        if kept is not None and self.cursor == LOG_START:
            return kept
        return next((each for each in segments if each.first >= self.cursor.first), None)


def rotate_own_output() -> None:
    """Limit the file that this process's standard error goes to, if it is one, in a thread."""
    status = os.fstat(2)
    if stat.S_ISREG(status.st_mode) and status.st_nlink:
        path = Path("/proc/self/fd/2").readlink()
        log = RotatingFile(path.with_name(_SUFFIX.sub("", path.name)))
        threading.Thread(target=_rotate_output, args=(log,), name="rotation of output", daemon=True).start()


def _rotate_output(log: RotatingFile) -> None:
    while True:
        with suppress(OSError):
            if log.path.parent.is_dir():  # else the job was deleted
                log.append(b"")
                _redirect_output(log.path)
        time.sleep(OUTPUT_CHECK_S)


def _redirect_output(path: Path) -> None:
    """Let standard output and error go to the newest file, if they go to an earlier one."""
    earlier = os.fstat(2)
    if os.path.samestat(path.stat(), earlier):
        return
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        for own in (1, 2):
            if os.path.samestat(os.fstat(own), earlier):
                os.dup2(descriptor, own)
    finally:
        os.close(descriptor)
