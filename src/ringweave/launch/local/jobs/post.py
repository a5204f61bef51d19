"""The post of a group on this machine: files that are replaced whole, and a bell."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from ringweave.errors import LaunchError
from ringweave.launch.groups import posts
from ringweave.launch.groups.posts import Opening, Orders, Post, Report
from ringweave.launch.local.jobs import bells
from ringweave.launch.local.jobs.bells import Bell
from ringweave.launch.local.jobs.folders import GroupFolder, JobFolder, replace_text

T = TypeVar("T")

WATCH_S = 2.0
"""How often an agent sees to it that its job has a supervisor."""


class FilePost(Post):
    """Orders come from two files, reports go to a third."""

    def __init__(
        self,
        job: JobFolder,
        group: GroupFolder,
        supervise: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`supervise` starts a supervisor where none lives, so that a job goes on though its supervisor was killed."""
        self._job, self._group, self._supervise, self._clock = job, group, supervise, clock
        self._bell = Bell(group.bell)
        self._orders = _Kept(group.orders, posts.parse_orders)
        self._gate = _Kept(job.gate, posts.parse_opening)
        self._watched_s = clock()

    def orders(self) -> Orders:
        """What is wanted now; to leave, if the group's folder was removed."""
        orders = self._orders.read()
        if orders is None:
            return Orders(round=0, leave=True, why=f"its folder {self._group.root} is gone")
        opening: Opening | None = self._gate.read()
        return Orders(round=orders.round, opening=opening, leave=orders.leave, why=orders.why)

    def tell(self, report: Report) -> None:
        """Replace the report, and wake the supervisor."""
        if self._group.root.exists():
            replace_text(self._group.report, posts.dump_report(report))
        bells.ring(self._job.bell)

    def wait(self, timeout_s: float) -> None:
        """Wait at the bell."""
        self._bell.wait(timeout_s)
        now_s = self._clock()
        if now_s - self._watched_s >= WATCH_S:
            self._watched_s = now_s
            with contextlib.suppress(LaunchError):  # tried again; the workers go on without a supervisor
                self._supervise()


class _Kept(Generic[T]):
    """A file's content, parsed again only when it was replaced."""

    def __init__(self, path: Path, parse: Callable[[bytes], T]) -> None:
        self._path, self._parse = path, parse
        self._seen: tuple[int, int] | None = None
        self._value: T | None = None

    def read(self) -> T | None:
        """None where there is no file."""
        try:
            found = self._path.stat()
            if (found.st_ino, found.st_mtime_ns) != self._seen:
                self._value = self._parse(self._path.read_bytes())
                self._seen = (found.st_ino, found.st_mtime_ns)
        except FileNotFoundError:
            self._value = self._seen = None
        return self._value
