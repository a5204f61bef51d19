"""The event log of a run: one JSON object per line, appended by every process of the run."""

import itertools
import json
import logging
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from ringweave.environment import WorkerEnvironment
from ringweave.errors import UsageError, explain, printable, shorten
from ringweave.files import file_io, rotation
from ringweave.telemetry.kinds import EVENT_KINDS, EVENTS_FORMAT, MAX_CLUSTER_TEXT

Event = dict[str, Any]

UNLISTED_FIELDS = ("time", "kind", "cluster_text")
"""Fields that are no part of an event's text in a list."""
MAX_FLAWS = 12
"""Different flaws of unread lines that are named; further ones are counted together."""

_LOGGER = logging.getLogger("ringweave")


class EventLog:
    """Appends events to one log of limited size; any number of processes may do so at once.

    Each event is one write, so lines of different processes never mix. The file is opened for each event: events are
    rare, and nothing has to be closed or survive a fork. If the disk is full or gone, events are lost and the logger
    `ringweave` gets a warning.
    """

    def __init__(
        self,
        path: str | Path,
        clock: Callable[[], float] = time.time,
        limits: rotation.LogLimits | None = None,
    ) -> None:
        """`limits` None: those of this process's environment."""
        self._file = rotation.RotatingFile(path, limits, merge=merge_events)
        self.path = self._file.path
        self._clock = clock
        self._is_torn = False

    def write(self, kind: str, **fields: object) -> None:
        """Append one event.

        `kind`: A name in `kinds.KINDS`.

        Raises:
            ValueError: The kind is unknown, or the fields are not those of the kind.
        """
        _check_fields(kind, fields)
        line = (json.dumps({"time": self._clock(), "kind": kind, **fields}) + "\n").encode()
        try:
            self._append(line)
        except OSError as error:
            _LOGGER.warning(
                "event %s: %s, expected to be written. It is lost, the work goes on. [%s]", kind, error, self.path
            )

    def _append(self, line: bytes) -> None:
        self._is_torn = self._file.append(b"\n" + line if self._is_torn else line) < len(line)


def event_writer(path: Path | None) -> Callable[..., None]:
    """Return the function that writes an event to the log at this path; without one, a function that drops it."""
    return (lambda *_, **__: None) if path is None else EventLog(path).write


_KIND = re.compile(rb'\{"time": [^,]*, "kind": "(\w+)"')
_SUMMED: Mapping[str, tuple[str, ...]] = {
    "rpc_refused": ("service", "reason"),
    "steps_measured": ("rank", "node"),
    "traffic_measured": ("rank", "node", "group"),
}
"""Kinds of windows -> fields that tell what is measured; two windows become one, with the sums of both."""
_SAMPLED: Mapping[str, tuple[str, ...]] = {
    "iterations_done": ("rank",),
    "outer_step": ("rank",),
    "pipeline_measured": ("rank",),
    "train_step_done": ("rank",),
}
"""Kinds of which the last one in a span of time is enough."""
_MEASURED = ("group", "version", "collective", "schedule", "bytes", "num_segments", "lag", "window", "wire")
_REPLACED: Mapping[str, tuple[str, ...]] = {
    "collectives": ("rank", "group"),
    "group_formed": ("group",),
    "params_counted": ("node",),
    "plan_made": ("group", "version"),
    "schedule_agreed": ("group", "collective", "schedule", "bytes"),
    "schedule_measured": _MEASURED,
    "training_prepared": (),
}
"""Kinds of which the last one counts."""
_MERGED = {**_SUMMED, **_SAMPLED, **_REPLACED}
_LASTING = {"run_started", *_MERGED}
_FIRST_SPAN_S, _LAST_SPAN_S = 60.0, 1e6


def merge_events(lines: Iterable[bytes], max_bytes: int) -> list[bytes]:
    """Return what is kept of old events: all of them, but measured windows as sums over longer and longer spans.

    If that is more than `max_bytes`, the oldest of the other events are left out, and `records_gone` counts them. Sums
    over an attempt, such as steps and bytes of each rank, stay as they were.
    """
    span_s = _FIRST_SPAN_S
    merged = _merge_spans(lines, span_s)
    while sum(map(len, merged)) > max_bytes // 2 and span_s < _LAST_SPAN_S:
        span_s *= 4
        merged = _merge_spans(merged, span_s)
    return _leave_out(_leave_out(merged, max_bytes, _LASTING), max_bytes, ("run_started",))


def _merge_spans(lines: Iterable[bytes], span_s: float) -> list[bytes]:
    found: dict[tuple[object, ...], bytes | Event] = {}
    attempt, numbers = 0, itertools.count()
    for line in lines:
        kind = _kind_of(line)
        attempt += kind == "run_started"
        event = parse_event(line) if kind in _MERGED else None
        if event is None:
            found[(next(numbers),)] = line
            continue
        span = None if kind in _REPLACED else event["time"] // span_s
        key = (kind, attempt, span, *(str(event.get(name)) for name in _MERGED[kind]))
        before = found.pop(key, None)
        found[key] = sum_windows(before, event) if isinstance(before, dict) and kind in _SUMMED else event
    return [each if isinstance(each, bytes) else f"{json.dumps(each)}\n".encode() for each in found.values()]


def _kind_of(line: bytes) -> str:
    match = _KIND.match(line)
    return match[1].decode() if match else ""


def _leave_out(lines: list[bytes], max_bytes: int, lasting: Container[str]) -> list[bytes]:
    """Return the lines without the oldest ones over a size, but for lasting kinds; an event in their place counts them.

    A quarter of the size is free then: not every further file begins this anew.
    """
    excess = sum(map(len, lines)) - max_bytes
    if excess <= 0:
        return lines
    kept: list[bytes] = []
    excess, num_gone, place = excess + max_bytes // 4, 0, 0
    for line in lines:
        kind = _kind_of(line)
        gone = parse_event(line) if kind == "records_gone" else None
        if gone is not None:
            num_gone, place = num_gone + gone["records"], len(kept)
        elif excess > 0 and kind not in lasting:
            num_gone, place, excess = num_gone + 1, len(kept), excess - len(line)
        else:
            kept.append(line)
    kept.insert(place, _records_gone(num_gone))
    return kept


def _records_gone(num_records: int) -> bytes:
    return f"{json.dumps({'time': time.time(), 'kind': 'records_gone', 'records': num_records})}\n".encode()


_NOT_SUMMED = ("time", "rank", "memory_bytes")


def sum_windows(first: Event, second: Event) -> Event:
    """Return one window in place of two: numbers are added, also in mappings; of texts the second one is taken."""
    kept = {key: second[key] for key in _NOT_SUMMED if key in second}
    longest_s = [each["longest_s"] for each in (first, second) if isinstance(each.get("longest_s"), int | float)]
    return _sum_values(first, second) | kept | ({"longest_s": max(longest_s)} if longest_s else {})


def _sum_values(first: Any, second: Any) -> Any:
    if isinstance(first, dict) and isinstance(second, dict):
        return {**first, **{key: _sum_values(first.get(key), value) for key, value in second.items()}}
    are_numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in (first, second))
    return first + second if are_numbers else second


def event_lines(path: str | Path) -> rotation.LineReader:
    """Return the reader of an event log's lines, in which `records_gone` stands for what it has missed."""
    return rotation.LineReader(path, gone=_records_gone)


class UnreadRecords:
    """Tally of lines of event logs that could not be read, by their flaws."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, flaw: str) -> None:
        self._counts[flaw if flaw in self._counts or len(self._counts) < MAX_FLAWS else "other flaws"] += 1

    @property
    def count(self) -> int:
        """Number of lines so far."""
        return self._counts.total()

    def text(self) -> str:
        """Return a sentence about them; empty without any."""
        found = ", ".join(f"{flaw} ({count})" for flaw, count in sorted(self._counts.items()))
        records = "1 record of the event log" if self.count == 1 else f"{self.count} records of the event log"
        return f"{records} could not be read: {found}." if found else ""


def read_events(path: str | Path, unread: UnreadRecords | None = None) -> Iterator[Event]:
    """Yield the events in the file, oldest first; none without a file.

    Lines that are no event as its kind has to be are counted in `unread`, and skipped; so are overlong lines.

    Raises:
        UsageError: An attempt in it has events of another format.
    """
    for line in event_lines(path).read_new():
        event = parse_event(line, unread)
        if event is not None:
            _check_format(event, path)
            yield event


class EventTail:
    """Reads events as they are added to a file."""

    def __init__(self, path: str | Path, unread: UnreadRecords | None = None) -> None:
        """`path` need not exist yet; `unread` counts lines that are no event as its kind has to be."""
        self._path, self._lines, self._unread = path, event_lines(path), unread

    def read_new(self) -> list[Event]:
        """Return events added since the last call, oldest first; an unfinished line comes later.

        Raises:
            OSError: The file cannot be read, and there were no new events.
            UsageError: An attempt in it has events of another format.
        """
        found: list[Event] = []
        try:
            found += self._parse_new()
        except OSError:
            if not found:
                raise
        for event in found:
            _check_format(event, self._path)
        return found

    def iter_new(self) -> Iterator[Event]:
        """Yield the same events one by one, with one of them in memory; an error comes where it is met."""
        for event in self._parse_new():
            _check_format(event, self._path)
            yield event

    def _parse_new(self) -> Iterator[Event]:
        for line in self._lines.read_new():
            event = parse_event(line, self._unread)
            if event is not None:
                yield event


def find_event_files(folder: str | Path) -> tuple[int, list[Path]]:
    """Return the last round of a run, 0 without rounds, and its files of events, of all nodes."""
    folder = Path(folder)
    patterns = ("*/*/round-*/events.jsonl", "hosts/*/*/*/round-*/events.jsonl")
    paths = [path for pattern in patterns for path in rotation.find_logs(folder, pattern)]
    rounds = {path: int(path.parent.name.removeprefix("round-")) for path in paths}
    last = max(rounds.values(), default=0)
    if not last:
        return 0, [folder / "events.jsonl"]
    return last, sorted(path for path, number in rounds.items() if number == last)


def read_run(folder: str | Path, unread: UnreadRecords | None = None) -> list[Event]:
    """Return the events of the last attempt of a run, or of its last round on all nodes, by their times."""
    last, paths = find_event_files(folder)
    if not last:
        return read_last_attempt(paths[0], unread)
    return sorted((event for path in paths for event in read_events(path, unread)), key=lambda event: event["time"])


def read_last_attempt(path: str | Path, unread: UnreadRecords | None = None) -> list[Event]:
    """Return the events since the last `run_started`: those of the newest attempt in a run directory."""
    events: list[Event] = []
    for event in read_events(path, unread):
        if event["kind"] == "run_started":
            events.clear()
        events.append(event)
    return events


def _check_format(event: Event, path: str | Path) -> None:
    if event["kind"] == "run_started" and event.get("format") != EVENTS_FORMAT:
        do = "Read it with the ringweave that wrote it, or start the run in another directory"
        got, expected = event.get("format", "none"), str(EVENTS_FORMAT)
        raise UsageError("format of the events file", got=got, expected=expected, do=do, where=str(path))


def _check_fields(kind: str, fields: dict[str, object]) -> None:
    if kind not in EVENT_KINDS:
        raise ValueError(
            explain("event kind", got=kind, expected=f"one of {', '.join(EVENT_KINDS)}", do="Add it to kinds.py")
        )
    expected_fields = EVENT_KINDS[kind].fields.keys()
    if fields.keys() != expected_fields:
        raise ValueError(
            explain(
                f"fields of event {kind}",
                got=", ".join(sorted(fields)),
                expected=", ".join(sorted(expected_fields)),
                do="Write exactly the fields that kinds.py lists",
            )
        )


def parse_event(line: bytes, unread: UnreadRecords | None = None) -> Event | None:
    """Parse the event in a line; None, and counted in `unread`, if it is none as its kind has to be."""
    try:
        event = file_io.parse_json(line.decode("utf-8", errors="replace"), rotation.MAX_LINE_BYTES)
    except ValueError:
        event = None
    flaw = "truncated, or no JSON object with a kind"
    if isinstance(event, dict) and isinstance(event.get("kind"), str):
        event = add_later_fields(event)
        flaw = find_flaw(event)
    if flaw and unread is not None:
        unread.add(flaw)
    return None if flaw else event


Check = Callable[[Any], bool]
"""Returns whether a JSON value is of a type."""

_MAX_NUMBER = 2**63
"""Numbers beyond it, up or down, are no measurements."""
_MAX_TIME_S = 10**11
"""Latest time, in seconds since 1970."""
_DIGITS, _MEMBER = re.compile(r"\d{1,18}"), re.compile(r"\d{1,18}\.\d{1,18}")


def _is_int(value: Any) -> bool:
    return type(value) is int and -_MAX_NUMBER < value < _MAX_NUMBER


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and -_MAX_NUMBER < value < _MAX_NUMBER  # not NaN


def _is_rate(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < _MAX_NUMBER


def _is_any_number(value: Any) -> bool:
    return type(value) in (int, float)  # also NaN, of training that diverges


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_cluster_text(value: Any) -> bool:
    return type(value) is str and len(value) <= MAX_CLUSTER_TEXT


def _is_bool(value: Any) -> bool:
    return type(value) is bool


def _is_digits(value: Any) -> bool:
    return type(value) is str and _DIGITS.fullmatch(value) is not None


def _is_member(value: Any) -> bool:
    """Return whether it is the name of a member of an elastic job, `SLOT.INCARNATION`."""
    return type(value) is str and _MEMBER.fullmatch(value) is not None


def _maybe(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _list_of(check: Check) -> Check:
    return lambda value: type(value) is list and all(map(check, value))


def _map_of(check_key: Check, check: Check) -> Check:
    return lambda value: type(value) is dict and all(map(check_key, value)) and all(map(check, value.values()))


def _record(**checks: Check) -> Check:
    return lambda value: (
        type(value) is dict and all(key in value and check(value[key]) for key, check in checks.items())
    )


_TEXTS = """address binding collective digest expected_fingerprint fault fingerprint folder group mode node outcome part
    path peer reason refused request_id requested_mode schedule service target text verdict why wire"""
_BY_NAME: Mapping[str, Check] = {
    **dict.fromkeys(_TEXTS.split(), _is_text),
    **dict.fromkeys(("cause", "cluster", "not_searched", "signal", "slow"), _maybe(_is_text)),
    **dict.fromkeys(("exact", "is_return", "last", "stopped"), _is_bool),
    **dict.fromkeys(("ahead", "exit_code", "total"), _maybe(_is_int)),
    **dict.fromkeys(("fixed_bytes", "sample_bytes"), _maybe(_is_number)),
    **dict.fromkeys(("bound_s_per_byte", "inner_lr_factor", "seconds", "train_steps"), _is_number),
    **dict.fromkeys(("major_faults", "memory_bytes", "read_bytes", "received_bytes", "sent_bytes"), _is_number),
    **dict.fromkeys(("after", "best", "by_rank", "leaving", "shares", "splits", "starting"), _list_of(_is_int)),
    **dict.fromkeys(("rings", "sites"), _list_of(_list_of(_is_int))),
    **dict.fromkeys(("command", "newcomers", "nodes", "switches"), _list_of(_is_text)),
    "cluster_text": _is_cluster_text,
    "loss": _maybe(_is_any_number),
    **dict.fromkeys(("new_s", "old_s"), _is_any_number),
    "member": _is_member,
    "members": _list_of(_is_member),
    "rates": _map_of(_is_text, _is_rate),
    "speeds": _list_of(_is_number),
}
"""Checks of fields; of the others, those named `_s` are numbers, and the rest whole numbers."""
_COUNTS, _NAMES = _record(collectives=_is_int, bytes=_is_int, messages=_is_int), _list_of(_is_text)
_LINK = _record(sent_bytes=_is_number, busy_s=_is_number, limited_s=_is_number)
_BY_KIND: Mapping[str, Mapping[str, Check]] = {
    "blocks_moved": {"before": _list_of(_is_int)},
    "collectives": {"by_schedule": _map_of(_is_text, _COUNTS)},
    "group_formed": {"members": _list_of(_is_int)},
    "move_failed": {"before": _list_of(_is_int)},
    "outer_step": dict.fromkeys(("samples", "inner_steps", "computing_s"), _list_of(_is_number)),
    "params_counted": {
        "rpc": _map_of(_is_text, _map_of(_is_text, _maybe(_is_number))),
        **dict.fromkeys(("staleness", "pushes"), _map_of(_is_digits, _is_int)),
    },
    "params_leader_changed": {"members": _list_of(_is_int)},
    "partition_solved": {"rates": _list_of(_is_number)},
    "pipeline_measured": dict.fromkeys(("rates", "compute_s"), _list_of(_is_number)),
    "residuals_lost": {"members": _NAMES},
    "wire_chosen": {"members": _NAMES},
    "schedule_measured": {"predicted_s": _maybe(_is_number)},
    "schedule_tuned": {
        "predicted_s": _map_of(_is_text, _maybe(_is_number)),
        "measured_s": _map_of(_is_text, _is_number),
    },
    "traffic_measured": {"links": _map_of(_is_digits, _LINK)},
}
"""Checks of fields whose name means another thing elsewhere."""
_LATER: Mapping[str, Any] = {
    **dict.fromkeys(("disk_stall_s", "forward_s", "input_processor_s", "memory_stall_s"), 0.0),
    **dict.fromkeys(("memory_bytes", "read_bytes", "trials", "trials_s"), 0),
    **dict.fromkeys(("cluster_text", "part"), ""),
    "inner_lr_factor": 1.0,
    "total": None,
    "wire": "exact",
}
"""Fields that logs of the same format may lack, as they came later, and the values that stand for them."""


def _check_of(kind: str, name: str) -> Check:
    default = _is_number if name.endswith("_s") else _is_int
    return _BY_KIND.get(kind, {}).get(name, _BY_NAME.get(name, default))


_CHECKS = {kind: {name: _check_of(kind, name) for name in EVENT_KINDS[kind].fields} for kind in EVENT_KINDS}


def add_later_fields(event: dict[str, Any]) -> dict[str, Any]:
    """Return the event with the fields of its kind that came later and that it lacks."""
    known = _CHECKS.get(event["kind"], {})
    return event | {name: value for name, value in _LATER.items() if name in known and name not in event}


def find_flaw(event: Mapping[str, Any]) -> str:
    """Return what is wrong with an event, in a few words; empty if nothing is, or its attempt has another format."""
    kind = event["kind"]
    if kind not in _CHECKS:
        return f"unknown kind {shorten(kind)}"
    if kind == "run_started" and event.get("format") != EVENTS_FORMAT:
        return ""
    if not (_is_number(event.get("time")) and 0 <= event["time"] < _MAX_TIME_S):
        return f"{kind} with a wrong time"
    for name, check in _CHECKS[kind].items():
        if name not in event:
            return f"{kind} without {name}"
        if not check(event[name]):
            return f"{kind} with a wrong {name}"
    return ""


def print_line(text: str, *, is_error: bool = False) -> None:
    """Print a line at once, escaped but for line ends and tabs. If the output cannot take it, it is lost."""
    output = sys.stderr if is_error else sys.stdout
    try:
        print(printable(text, keeps="\n\t"), file=output, flush=True)
    except OSError:
        with suppress(OSError):
            _discard_buffered(output)


def _discard_buffered(output: TextIO) -> None:
    """Drop buffered output; later output is tried again."""
    descriptor = output.fileno()
    saved, null = os.dup(descriptor), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, descriptor)
        output.flush()
    finally:
        os.dup2(saved, descriptor)
        os.close(saved)
        os.close(null)


INTERVAL_S = 0.5
"""Shortest time between two events of one process; a sooner iteration is reported by the next event, or by `close`."""


class Iterations:
    """Reports the progress of training to the event log, for `ringweave status`; does nothing outside of a run.

    Only one worker of each node writes (local rank 0). Use it as a context manager, or close it in the end:

        with ringweave.Iterations() as iterations:
            for step, batch in enumerate(batches, 1):
                ...
                iterations.done(step, loss.item())
    """

    def __init__(
        self,
        environ: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        total: int | None = None,
    ) -> None:
        """Begin.

        Args:
            environ: None: the process's own environment.
            clock: Seconds, for the time between two events.
            total: Number of iterations that there will be in all, for the time to go; None: unknown.
        """
        environ = os.environ if environ is None else environ
        run_dir = WorkerEnvironment.from_environ(environ).run_dir
        writes_events = run_dir is not None and environ.get("LOCAL_RANK", "0") == "0"
        self._log = EventLog(run_dir / "events.jsonl") if run_dir and writes_events else None
        self._rank = int(environ.get("RANK", "0"))
        self._clock, self._total = clock, total
        self._last_written_s: float | None = None
        self._pending: tuple[int, float | None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def done(self, iterations: int, loss: float | None = None) -> None:
        """Report the number of iterations done. `iterations`: in all, including those before a resumed checkpoint."""
        if self._log is None:
            return
        self._pending = (iterations, loss)
        now_s = self._clock()
        if self._last_written_s is None or now_s - self._last_written_s >= INTERVAL_S:
            self._last_written_s = now_s
            self.close()

    def close(self) -> None:
        """Write the last iteration, unless it is written already."""
        if self._log is not None and self._pending is not None:
            iterations, loss = self._pending
            self._log.write("iterations_done", rank=self._rank, iterations=iterations, total=self._total, loss=loss)
            self._pending = None
