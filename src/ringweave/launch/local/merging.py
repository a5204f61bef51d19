"""The output of all workers on one terminal, and of each in its log file."""

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO, Literal, Protocol, TextIO

from ringweave.launch.local.lines import LineSplitter, Thinner

Stream = Literal["stdout", "stderr"]

BAR_INTERVAL_S = 5.0
"""A progress bar gives at most one line in this time where lines cannot be rewritten: in files and pipes."""
TTY_INTERVAL_S = 0.1
"""How often a progress bar is redrawn on a terminal."""
_COLOURS = (36, 33, 35, 32, 34, 31)


class Sink(Protocol):
    """Takes the lines of one stream of one worker."""

    def show(self, lines: list[bytes], unfinished: bytes) -> None:
        """Take finished lines, and what the line without an end looks like now."""
        ...


class Console:
    """Our own standard output and error, shared by all workers.

    On a terminal the newest progress bar stays on the last line and is rewritten in place. An output that nobody reads
    any more (`| head`) is given up; the workers and their log files go on.
    """

    def __init__(self, outputs: Mapping[Stream, BinaryIO], environ: Mapping[str, str]) -> None:
        self._outputs = dict(outputs)
        self._ttys = [stream for stream, output in outputs.items() if output.isatty()]
        self._is_coloured = not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
        self._bar = b""

    def is_tty(self, stream: Stream) -> bool:
        """Whether lines of this stream can be rewritten."""
        return stream in self._ttys

    def prefix(self, stream: Stream, global_rank: int) -> bytes:
        """`[3] `, coloured where that helps."""
        text = f"[{global_rank}]"
        if self._is_coloured and self.is_tty(stream):
            text = f"\x1b[{_COLOURS[global_rank % len(_COLOURS)]}m{text}\x1b[0m"
        return text.encode() + b" "

    def print(self, stream: Stream, lines: list[bytes]) -> None:
        """Whole lines, above the progress bar if there is one."""
        text = b"".join(line + b"\n" for line in lines)
        if self.is_tty(stream) and self._bar:
            self._write(self._ttys[-1], b"\r\x1b[K")
            self._write(stream, text)
            self._write(self._ttys[-1], self._bar)
        else:
            self._write(stream, text)

    def draw_bar(self, prefix: bytes, text: bytes) -> None:
        """Rewrite the last line of the terminal; an empty text clears it."""
        width = shutil.get_terminal_size().columns - 8
        self._bar = prefix + text.decode(errors="replace")[:width].encode() if text else b""
        self._write(self._ttys[-1], b"\r\x1b[K" + self._bar)

    def _write(self, stream: Stream, text: bytes) -> None:
        output = self._outputs.get(stream)
        if output is None or not text:
            return
        try:
            output.write(text)
            output.flush()
        except OSError:
            del self._outputs[stream]
            _discard(output)


class TerminalSink:
    """Lines to a terminal: finished ones stay, the unfinished one is rewritten in place."""

    def __init__(self, console: Console, stream: Stream, global_rank: int, clock: Callable[[], float]) -> None:
        self._console, self._stream, self._clock = console, stream, clock
        self._prefix = console.prefix(stream, global_rank)
        self._thinner = Thinner(TTY_INTERVAL_S, clock())
        self._has_bar = False

    def show(self, lines: list[bytes], unfinished: bytes) -> None:
        """Take finished lines, and what the line without an end looks like now."""
        if lines:
            if self._has_bar:
                self._console.draw_bar(b"", b"")
                self._has_bar = False
            self._thinner.finish(lines, self._clock())
            self._console.print(self._stream, [self._prefix + line for line in lines])
        if self._thinner.is_due(unfinished, self._clock()):
            self._console.draw_bar(self._prefix, unfinished)
            self._has_bar = True


class PlainSink:
    """Lines to something that cannot rewrite: a pipe or a file. Progress bars are thinned."""

    def __init__(self, write: Callable[[list[bytes]], None], prefix: bytes, clock: Callable[[], float]) -> None:
        self._write, self._prefix, self._clock = write, prefix, clock
        self._thinner = Thinner(BAR_INTERVAL_S, clock(), stands_s=BAR_INTERVAL_S)

    def show(self, lines: list[bytes], unfinished: bytes) -> None:
        """Take finished lines, and what the line without an end looks like now."""
        shown = self._thinner.finish(lines, self._clock())
        if self._thinner.is_due(unfinished, self._clock()):
            shown = [*shown, unfinished]
        if shown:
            self._write([self._prefix + line for line in shown])


class LogFile:
    """The log of one worker: both streams. If the disk is full, what does not fit is lost and the run goes on."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab")

    def print(self, lines: list[bytes]) -> None:
        """Whole lines, on disk before this returns."""
        with contextlib.suppress(OSError):
            self._file.write(b"".join(line + b"\n" for line in lines))
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):
            self._file.close()


class MergedStream:
    """One stream of one worker: cut into lines, to the console and to the log."""

    def __init__(
        self,
        console: Console,
        stream: Stream,
        global_rank: int,
        log: LogFile,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._splitter = LineSplitter()
        plain = PlainSink(log.print, b"", clock)
        if console.is_tty(stream):
            self._sinks: list[Sink] = [plain, TerminalSink(console, stream, global_rank, clock)]
        else:
            to_console = lambda lines: console.print(stream, lines)  # noqa: E731
            self._sinks = [plain, PlainSink(to_console, console.prefix(stream, global_rank), clock)]

    def feed(self, received: bytes) -> None:
        """Take what the worker printed; nothing, to let an unfinished line be shown in time."""
        self._show(self._splitter.feed(received))

    def end(self) -> None:
        """The stream has ended: its last line counts, with or without an end."""
        self._show(self._splitter.flush())

    def _show(self, lines: list[bytes]) -> None:
        for sink in self._sinks:
            sink.show(lines, self._splitter.unfinished)


def tell(output: TextIO, text: str) -> None:
    """Words of our own, shown at once. What takes nothing any more, as a file on a full disk, is given up as well."""
    try:
        output.write(text)
        output.flush()
    except OSError:
        _discard(output.buffer)


def _discard(output: BinaryIO) -> None:
    """Let later writes, and the interpreter's own flush at exit, go nowhere."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, output.fileno())
        os.close(null)
