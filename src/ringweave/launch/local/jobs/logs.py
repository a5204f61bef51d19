"""What the workers of a job printed: the logs of all attempts and rounds, read as they grow."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ringweave.launch.local.jobs.folders import JobFolder
from ringweave.launch.services.service import LogLine, LogQuery

FOLLOW_S = 0.2
"""Between two looks at logs that may grow."""


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class _Source:
    """One worker's log of one round; sorts as it is shown."""

    attempt: int
    round: int
    node: str
    rank: int
    path: Path


@dataclass(slots=True)
class _Reader:
    """Gives the whole lines that were added since it was last asked."""

    source: _Source
    position: int = 0
    rest: bytes = field(default=b"")

    def lines(self, *, at_end: bool) -> Iterator[LogLine]:
        """`at_end`: a last line without an end counts too."""
        try:
            with self.source.path.open("rb") as log:
                log.seek(self.position)
                added = log.read()
        except FileNotFoundError:  # the job is being deleted
            return
        self.position += len(added)
        *whole, self.rest = (self.rest + added).split(b"\n")
        if at_end and self.rest:
            whole, self.rest = [*whole, self.rest], b""
        for line in whole:
            yield LogLine(
                node=self.source.node,
                attempt=self.source.attempt,
                round=self.source.round,
                rank=self.source.rank,
                text=line.decode(errors="replace"),
            )


def read(
    folder: JobFolder, which: LogQuery, *, is_over: Callable[[], bool], sleep: Callable[[float], None]
) -> Iterator[LogLine]:
    """The lines that are asked for; where they are followed, until the job is over.

    Args:
        folder: Of the job.
        which: Which lines.
        is_over: No more will be printed.
        sleep: Waits between two looks.
    """
    readers: dict[_Source, _Reader] = {}
    while True:
        over = not which.follow or is_over()  # before the last look, so that nothing is missed
        for source in _sources(folder, which):
            readers.setdefault(source, _Reader(source))
        for source in sorted(readers):
            yield from readers[source].lines(at_end=over)
        if over:
            return
        sleep(FOLLOW_S)


def _sources(folder: JobFolder, which: LogQuery) -> Iterator[_Source]:
    try:
        paths = list((folder.root / "runs").glob("*/*/round-*/logs/rank-*.log"))
    except FileNotFoundError:  # the job is being removed
        return
    for path in paths:
        node, attempt, round_, _, name = path.parts[-5:]
        rank = int(name.removeprefix("rank-").removesuffix(".log"))
        is_wanted = which.node in (None, node) and which.rank in (None, rank)
        if is_wanted and which.attempt in (None, int(attempt)):
            number = int(round_.removeprefix("round-"))
            yield _Source(attempt=int(attempt), round=number, node=node, rank=rank, path=path)
