"""Text of the command line for people, and progress lines of a long command on standard error."""

import io
import sys
import time
from collections.abc import Callable, Sequence
from typing import TextIO

import click

from ringweave.errors import printable

PROGRESS_INTERVAL_S = 5.0


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print a text, of several lines at most: what is not printable in it is shown in Python's escapes.

    So names, reasons and events of others cannot act on the terminal.

    Args:
        text: Any text; JSON stays as it is.
        err: Print to standard error.
        nl: Add a line end.
    """
    click.echo(printable(text, keeps="\n\t"), err=err, nl=nl)


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines, with columns two spaces apart and the last one unpadded."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return ["  ".join([*map(str.ljust, row, widths), row[-1]]).rstrip() for row in rows]


def format_ms(seconds: float | None) -> str:
    """Format a time as `1.234 ms`; a dash for None."""
    return "-" if seconds is None else f"{seconds * 1e3:.4g} ms"


class ProgressPrinter:
    """Lines for people: every step, and rounds now and then with the time that is left."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._began_s = clock()
        self._rounds_began_s = 0.0
        self._next_s = self._began_s + PROGRESS_INTERVAL_S
        self._current_task: str | None = None

    def print_step(self, what: str) -> None:
        """Something new begins."""
        self._print(what)

    def begin_rounds(self) -> None:
        """The clock for the time that is left starts now."""
        self._rounds_began_s = self._clock()
        self._next_s = self._rounds_began_s + PROGRESS_INTERVAL_S

    def print_rounds(self, what: str, done: int, total: int) -> None:
        """So many rounds are done; printed if the last line is a while ago."""
        if done and self._is_due():
            self._print(f"{what}: {done} of {total} rounds, about {self._left_s(done, total):.0f} s left of these")

    def print_fraction(self, what: str, done: int, total: int) -> None:
        """So much of something that is counted otherwise is done; printed if the last line is a while ago."""
        if what != self._current_task:
            self._current_task, self._rounds_began_s = what, self._clock()
        if done and self._is_due():
            self._print(f"{what}: {done / total:.0%} done, about {self._left_s(done, total):.0f} s left")

    def print_if_due(self, what: str) -> None:
        """Something short begins, one of many; printed if the last line is a while ago."""
        if self._is_due():
            self._print(what)

    def _is_due(self) -> bool:
        now_s = self._clock()
        if now_s < self._next_s:
            return False
        self._next_s = now_s + PROGRESS_INTERVAL_S
        return True

    def _left_s(self, done: int, total: int) -> float:
        return (self._clock() - self._rounds_began_s) / done * (total - done)

    def _print(self, text: str) -> None:
        elapsed_s = self._clock() - self._began_s
        print(f"[{int(elapsed_s) // 60:2d}:{int(elapsed_s) % 60:02d}] {text}", file=self._stream, flush=True)


def terminal_progress() -> ProgressPrinter:
    """Return progress lines for a terminal; elsewhere they are dropped, and standard error has errors only."""
    return ProgressPrinter(sys.stderr if sys.stderr.isatty() else io.StringIO())
