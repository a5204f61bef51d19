"""Logs of workers: the files of a job's run directories, their new text, and lines for people."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ringweave.files import rotation
from ringweave.platforms.api import LOG_FILES, LogLine, LogQuery

FOLLOW_INTERVAL_S = 0.2
"""Time between two polls of logs that may grow."""
MAX_READ_BYTES = 4 * 2**20
"""Text of a log, and of all logs of another host, that is read at a time."""
EVENTS = "events"
"""In place of a rank in the name of an event log."""
NewText = tuple[str, str, bytes]
"""Log (`NODE/ATTEMPT/ROUND/RANK`, or `.../events`), cursor after the text (`rotation.LogCursor`), text."""


_ALL_LOGS = LogQuery()


def find_logs(runs: Path, which: LogQuery = _ALL_LOGS) -> list[tuple[str, Path]]:
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

    A log that has been removed with its job has none.
    """
    for name, path in logs:
        cursor = rotation.parse_cursor(positions[name]) if name in positions else rotation.LOG_START
        reader, text = rotation.LineReader(path, cursor=cursor), bytearray()
        for line in reader.read_new(at_end=True) if max_bytes > 0 else ():
            text += line
            if len(text) >= max_bytes:
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
