"""Source of a page: reads a job's state, the events of its run directories, and the output of its workers."""

import contextlib
import heapq
import math
import queue
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ringweave import telemetry
from ringweave.errors import LaunchError, RingweaveError, UnknownJobError
from ringweave.files import rotation
from ringweave.page.aggregation import Document
from ringweave.page.run_model import RunModel, show_text
from ringweave.platforms import api, run_directory, submission
from ringweave.platforms.api import JobView, LogLine, LogQuery, Platform
from ringweave.telemetry import Event

EVENT_FILES = ("events.jsonl", "*/*/round-*/events.jsonl", "hosts/*/*/*/round-*/events.jsonl")
"""Places of event logs below the folder of a run or a job."""
STATE_INTERVAL_S = 2.0
"""Time between two looks at the state of a job."""
SLICE_S = 0.5
"""Longest time for which events are read before the page is updated."""
MAX_LOG_LINES = 300
"""Last lines of a worker that are shown."""
MAX_LOG_CHARACTERS = 2_000_000
"""Characters of the output of all workers together."""
MAX_WAITING_LINES = 10_000
"""Lines of event logs that have come from another machine and are not read yet."""
RETRY_S = 2.0
"""Time after which a platform that did not answer is asked for its logs again."""
_ROUND_FOLDER = re.compile(r"([^/]+)/(\d+)/round-(\d+)/[^/]+$")
"""Event log of a round on a node: node, attempt, round."""


class EventConsumer(Protocol):
    """Gets the events of a job, each once, in the order of each event log."""

    def begin_attempt(self, round_: int | None = None) -> None:
        """Another attempt begins, or that round of a job; no events of earlier ones come any more."""

    def add(self, event: Event) -> None:
        """Add an event of the newest attempt."""


class AttemptEvents:
    """Keeps the events of the newest attempt or round."""

    def __init__(self) -> None:
        self._events: list[Event] = []

    def begin_attempt(self, round_: int | None = None) -> None:
        """Forget those of the attempt before."""
        del round_
        self._events.clear()

    def add(self, event: Event) -> None:
        """Keep an event."""
        self._events.append(event)

    def in_order(self) -> list[Event]:
        """Return them by their times."""
        return sorted(self._events, key=lambda event: event["time"])


@dataclass(slots=True)
class _EventLogPlace:
    """Place up to which the event log of a round on a node has been read."""

    last: Event | None = None
    newest_s: float = -math.inf
    is_replayed: bool = False
    """Its lines come again from the first on."""

    def is_new(self, event: Event) -> bool:
        """Return whether an event has not come before. Where `last` is gone, later times are new."""
        if self.is_replayed and event["time"] <= self.newest_s:
            self.is_replayed = event != self.last
            return False
        self.last, self.newest_s, self.is_replayed = event, max(self.newest_s, event["time"]), False
        return True


class JobReader:
    """Reads state, events and output of one job or run, again and again; all calls are made by one thread at a time.

    Event logs are read from their files, or, where these are on other machines, from the platform beside the output.
    """

    def __init__(self, platform: Platform, name: str, clock: Callable[[], float] = time.time) -> None:
        """`platform` knows the job of that name."""
        self._platform, self._name, self._clock = platform, name, clock
        is_run = isinstance(platform, run_directory.RunDirectoryPlatform)
        self.directory = run_directory.find_run_dir(name) if is_run else None
        self.output, self._streamed = WorkerOutput(), queue.Queue[LogLine | None](MAX_WAITING_LINES)
        self.view, self._viewed_s = self._read_view(), clock()
        self.has_files = self.directory is not None or api.are_files_here(self.view)
        """Event logs are on this machine."""
        self.trouble, self.unread = "", telemetry.UnreadRecords()
        self._attempt, self.is_gone = -1, False
        self._places: dict[tuple[str, int, int], _EventLogPlace] = {}
        self._tails: dict[Path, telemetry.EventTail] = {}
        self._follower: threading.Thread | None = None
        self._news = self._read_news()

    def follow_logs(self, *, events_only: bool = False) -> None:
        """Read the output of workers from now on, in a thread of its own, with events that are elsewhere."""
        query = LogQuery(follow=True, events="only" if events_only else "none" if self.has_files else "also")
        self._follower = threading.Thread(target=self._follow_logs, args=(query,), daemon=True)
        self._follower.start()

    def _follow_logs(self, query: LogQuery) -> None:
        while not self.output.read(self._platform, self._name, query, self._streamed.put) and not self.is_gone:
            time.sleep(RETRY_S)
            if not self.has_files:
                self._streamed.put(None)  # all of them come again

    def is_over(self) -> bool:
        """Return whether the job has ended, and no more events come than those that wait to be read."""
        self.update_view()
        if self.has_files:
            return self.view.state.is_end
        if self._follower is not None and self._follower.is_alive():
            return False
        self._update_view()  # of a run that has been removed, the files are here
        return not self.has_files

    def read_all(self, consumer: EventConsumer, *, events_only: bool = False) -> None:
        """Read events, and the output of workers, up to their ends."""
        while self.feed(consumer):
            pass
        if events_only and self.has_files:
            return
        query = LogQuery(events="only" if events_only else "none" if self.has_files else "also")
        self.output.read(
            self._platform, self._name, query, lambda line: self._feed_until(consumer, self._parse_streamed(line))
        )

    def feed(self, consumer: EventConsumer, limit_s: float = math.inf) -> bool:
        """Hand new events on, for at most so long; return whether there is more."""
        has_more = self._feed_until(consumer, self._news, time.monotonic() + limit_s)
        if not has_more:
            self._news = self._read_news()
        return has_more

    def update_view(self) -> None:
        """Look at the state of the job, now and then."""
        now_s = self._clock()
        # One whose events come from elsewhere may be removed after its end: its files are here then.
        if now_s - self._viewed_s >= STATE_INTERVAL_S and not (self.view.state.is_end and self.has_files):
            self._viewed_s = now_s
            self._update_view()

    def _update_view(self) -> None:
        try:
            self.view, self.trouble, self.is_gone = self._read_view(), "", False
        except UnknownJobError as error:
            was_elsewhere = not self.has_files and self.view.files
            directory = run_directory.find_run_dir(self.view.files) if was_elsewhere else None
            self.trouble, self.is_gone = "" if directory else self._removed_text(error), directory is None
            if directory is not None:
                self.directory, self.has_files = directory, True
                self.view = self._read_view()
                self._begin_replay()
        except RingweaveError as error:
            self.trouble = str(error)

    def _removed_text(self, error: UnknownJobError) -> str:
        files = " Its output and files are where it was started." if self.view.platform == "hosts" else ""
        return f"{error} It was {self.view.state} when it was last seen.{files}"

    def _feed_until(
        self, consumer: EventConsumer, news: Iterator[tuple[int, bool, Event]], deadline_s: float = math.inf
    ) -> bool:
        """Hand events on until then; return whether there may be more."""
        for attempt, is_round, event in news:
            if attempt > self._attempt:
                self._attempt = attempt
                self._forget_earlier()
                consumer.begin_attempt(attempt if is_round else None)
            if attempt == self._attempt:
                consumer.add(event)
            if time.monotonic() > deadline_s:
                return True
        return False

    def _forget_earlier(self) -> None:
        """Forget the places in event logs of earlier rounds: nothing is read of them any more."""
        self._places = {key: place for key, place in self._places.items() if key[2] >= self._attempt}
        self._tails = {path: tail for path, tail in self._tails.items() if self._is_read(path)}

    def _is_read(self, path: Path) -> bool:
        match = _ROUND_FOLDER.search(str(path))
        return match is None or int(match[3]) >= self._attempt

    def _begin_replay(self) -> None:
        for place in self._places.values():
            place.is_replayed = True

    def _read_view(self) -> JobView:
        if self.directory is None:
            return self._platform.job(self._name)
        return run_directory.view_run(self.directory, self._name, submission.os_user())

    def _read_news(self) -> Iterator[tuple[int, bool, Event]]:
        """Yield (number of the attempt, whether it is a job's round, event) of what is new.

        Earlier rounds come first; the events of all nodes in a round, as far as they are in files, come by their times.
        """
        with contextlib.suppress(queue.Empty):
            while not self.has_files:
                line = self._streamed.get_nowait()
                if line is None:
                    self._begin_replay()
                else:
                    yield from self._parse_streamed(line)
        errors = list[Exception]()
        logs = [self._read_log(path, errors) for path in self._event_files() if self._is_read(path)]
        yield from heapq.merge(*logs, key=lambda news: (news[0], news[2]["time"]))  # one event of each is in memory
        if errors:
            raise errors[0]

    def _read_log(self, path: Path, errors: list[Exception]) -> Iterator[tuple[int, bool, Event]]:
        """Yield what is new in an event log; an error ends it, and is added to `errors`, for the others go on."""
        match = _ROUND_FOLDER.search(str(path))
        try:
            if match is None:
                for event in self._tails.setdefault(path, telemetry.EventTail(path, self.unread)).iter_new():
                    yield self._attempt + (event["kind"] == "run_started"), False, event
                return
            key = match[1], int(match[2]), int(match[3])
            unread = None if key in self._places else self.unread  # counted when they came from elsewhere
            place = self._places.setdefault(key, _EventLogPlace())
            for event in self._tails.setdefault(path, telemetry.EventTail(path, unread)).iter_new():
                if place.is_new(event):
                    yield key[2], True, event
        except (OSError, RingweaveError) as error:
            errors.append(error)

    def _parse_streamed(self, line: LogLine) -> Iterator[tuple[int, bool, Event]]:
        if line.round < self._attempt:
            return
        place = self._places.setdefault((line.node, line.attempt, line.round), _EventLogPlace())
        unread = None if place.is_replayed else self.unread
        event = telemetry.parse_event(line.text.encode(), unread)
        if event is None:
            return
        if event.get("format", telemetry.EVENTS_FORMAT) != telemetry.EVENTS_FORMAT:
            self.unread.add(f"{event['kind']} of another format")
        elif place.is_new(event):
            yield line.round, True, event

    def _event_files(self) -> list[Path]:
        if not self.has_files:
            return []
        root = Path(self.view.files)
        found = [path for pattern in EVENT_FILES for path in rotation.find_logs(root, pattern)]
        rounds = {path: int(match[3]) if (match := _ROUND_FOLDER.search(str(path))) else 0 for path in found}
        return sorted(found, key=lambda path: (rounds[path], path))


class RunSource:
    """Sections of the page of one job or run; all calls are made by one thread at a time."""

    def __init__(self, platform: Platform, name: str, clock: Callable[[], float] = time.time) -> None:
        """`platform` knows the job of that name."""
        self._reader = JobReader(platform, name, clock)
        self._model, self._trouble = RunModel(self._reader.unread), ""

    def follow_logs(self) -> None:
        """Read the output of workers from now on, in a thread of its own."""
        self._reader.follow_logs()

    def read_all(self) -> None:
        """Read events and output up to their ends."""
        self._reader.read_all(self._model)

    def poll(self, limit_s: float = SLICE_S) -> bool:
        """Read what is new, for at most so long; return whether there is more.

        Raises:
            RingweaveError: The events are of another format.
        """
        try:
            self._reader.update_view()
            has_more = self._reader.feed(self._model, limit_s)
        except OSError as error:
            self._trouble = f"Its events cannot be read at the moment: {error}."
            return False
        self._trouble = ""
        return has_more

    def sections(self) -> dict[str, Any]:
        """Return all sections of the page, as JSON values."""
        view = self._reader.view
        sections = self._model.sections(is_over=view.state.is_end or self._reader.is_gone)
        job_events: list[Document] = [
            {"time_s": each.time_s, "kind": each.kind, "rank": None, "text": each.text} for each in view.events
        ]
        rows = sections["events"]["rows"]
        sections["events"]["rows"] = sorted([*job_events, *rows], key=lambda row: row["time_s"])
        sections["events"]["num"] += len(job_events)
        if not sections["counts"]["events"]:
            sections["left_out"] = [self._missing_log_text()]
            sections["progress"] |= self._node_progress()
        return sections | {"head": self._head(), "logs": self._reader.output.document()}

    def _head(self) -> Document:
        view, directory = self._reader.view, self._reader.directory
        reason = view.reason
        document = api.job_view_document(view)
        keys = (
            "name",
            "platform",
            "requester",
            "created_s",
            "since_s",
            "ended_s",
            "workers",
            "device",
            "mode",
            "files",
        )
        return {key: document[key] for key in keys} | {
            "name": view.name if directory is None else directory.root.name,
            "state": "Removed" if self._reader.is_gone and not view.state.is_end else str(view.state),
            "is_over": view.state.is_end or self._reader.is_gone,
            "reason": reason.text if reason else None,
            "hint": reason.hint if reason else None,
            "num_nodes": len(view.used_nodes),
            "nodes": [
                {
                    "name": each.name,
                    "workers": each.workers,
                    "state": str(each.state),
                    "reason": show_text(each.reason.text) if each.reason else None,
                    "attempts": each.attempts[-1].attempt if each.attempts else 0,
                    "iterations": each.iterations,
                    "loss": each.last_loss,
                }
                for each in view.used_nodes
            ],
            "run": view.run,
            "trouble": self._reader.trouble or self._trouble or None,
        }

    def _missing_log_text(self) -> str:
        """Return why most of the page is empty."""
        view = self._reader.view
        yet = "" if view.state.is_end else " yet"
        return f"Everything that workers measure: no event of theirs has come{yet}. ({view.files})"

    def _node_progress(self) -> Document:
        """Return train steps and loss as the platform knows them, of the node that is ahead."""
        known = [each for each in self._reader.view.used_nodes if each.iterations is not None]
        ahead = max(known, key=lambda each: each.iterations or 0, default=None)
        return {"train_step": ahead.iterations, "loss": ahead.last_loss} if ahead else {}


class WorkerOutput:
    """Last lines of every worker."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[str]] = {}
        self._counts: dict[str, int] = {}
        self._trouble: str | None = None
        self._lock = threading.Lock()

    def read(self, platform: Platform, name: str, query: LogQuery, add_event: Callable[[LogLine], object]) -> bool:
        """Read the output of the job up to its end, or until the platform refuses.

        Returns:
            False if the platform did not answer, or a file could not be read: then all lines are forgotten.
        """
        try:
            for line in platform.logs(name, query):
                add_event(line) if line.is_event else self.add(line)
        except (OSError, RingweaveError) as error:
            self._trouble = str(error)
            if isinstance(error, LaunchError | OSError):
                with self._lock:
                    self._lines, self._counts = {}, {}
                return False
        else:
            self._trouble = None
        return True

    def add(self, line: LogLine) -> None:
        """Add a line."""
        source = f"rank {line.rank}" if line.rank is not None else f"node {line.node}"
        with self._lock:
            self._lines.setdefault(source, deque(maxlen=MAX_LOG_LINES)).append(show_text(line.text))
            self._counts[source] = self._counts.get(source, 0) + 1

    def document(self) -> Document:
        """Return the last lines by source, `rank 3` or `node a0`, with the number of lines before them."""
        with self._lock:
            budget = MAX_LOG_CHARACTERS // max(1, len(self._lines))
            found = {source: _last_lines(lines, budget) for source, lines in self._lines.items()}
            rows = [
                {"source": source, "lines": lines, "left_out": self._counts[source] - len(lines)}
                for source, lines in sorted(found.items(), key=lambda row: _number(row[0]))
            ]
        return {"sources": rows, "trouble": self._trouble}


def _number(source: str) -> tuple[str, int, str]:
    kind, _, name = source.partition(" ")
    return (kind != "rank", int(name) if name.isdecimal() else 0, name)  # type: ignore[return-value]


def _last_lines(lines: "deque[str]", budget: int) -> list[str]:
    taken: deque[str] = deque()
    for line in reversed(lines):
        budget -= len(line) + 1
        if budget < 0:
            break
        taken.appendleft(line)
    return list(taken)
