"""Output of workers: bytes to lines, progress bars, the shared terminal and each worker's log file."""

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO, Literal, Protocol, TextIO

from ringweave.errors import printable
from ringweave.files.rotation import DEFAULT_LIMITS, LogLimits, RotatingFile

MAX_LINE_BYTES = 64 * 1024


class LineSplitter:
    r"""Cuts a stream at line ends; of a line that is rewritten with `\r`, only the last state is kept.

    Bytes stay bytes: whatever a program prints comes through, text or not. A line longer than `MAX_LINE_BYTES` is cut.
    """

    def __init__(self) -> None:
        self._rest = b""

    @property
    def unfinished(self) -> bytes:
        """Content of the unfinished line as a terminal would show it."""
        return _last_overwrite(self._rest)

    def feed(self, received: bytes) -> list[bytes]:
        """Return the lines that these bytes finish, without their line ends."""
        content = self._rest + received
        *lines, rest = content.split(b"\n")
        ends_with_return = rest.endswith(b"\r")
        if b"\r" in content:
            lines, rest = list(map(_last_overwrite, lines)), _last_overwrite(rest)
        is_long = max(map(len, lines), default=0) > MAX_LINE_BYTES
        pieces = [piece for line in lines for piece in _cut_line(line)] if is_long else lines
        while len(rest) > MAX_LINE_BYTES:
            pieces.append(rest[:MAX_LINE_BYTES])
            rest = rest[MAX_LINE_BYTES:]
        self._rest = rest + (b"\r" if ends_with_return else b"")
        return pieces

    def flush(self) -> list[bytes]:
        """Return the unfinished line at the end of the stream."""
        rest, self._rest = self.unfinished, b""
        return [rest] if rest else []


class ProgressBarThrottle:
    """Decides when an unfinished line is shown: it has changed, and some time has passed."""

    def __init__(self, interval_s: float, now_s: float, *, stable_s: float = 0.0) -> None:
        """`stable_s` is the minimum age of an unfinished line; output printed in pieces is soon complete."""
        self._interval_s, self._stable_s = interval_s, stable_s
        self._shown_s = now_s
        self._shown = b""
        self._unfinished_since_s: float | None = None

    def finish(self, lines: list[bytes], now_s: float) -> list[bytes]:
        """Return the finished lines to show: all but a first one that was shown unfinished and has not changed."""
        if not lines:
            return []
        first, self._shown, self._shown_s, self._unfinished_since_s = self._shown, b"", now_s, None
        return lines[1:] if lines[0] == first != b"" else lines

    def is_due(self, unfinished: bytes, now_s: float) -> bool:
        """Return whether to show the unfinished line now; if so, it counts as shown."""
        if not unfinished:
            self._unfinished_since_s = None
            return False
        self._unfinished_since_s = now_s if self._unfinished_since_s is None else self._unfinished_since_s
        if unfinished == self._shown or now_s - self._shown_s < self._interval_s:
            return False
        if now_s - self._unfinished_since_s < self._stable_s:
            return False
        self._shown, self._shown_s = unfinished, now_s
        return True


def _last_overwrite(line: bytes) -> bytes:
    line = line.rstrip(b"\r")
    return line[line.rfind(b"\r") + 1 :]


def _cut_line(line: bytes) -> list[bytes]:
    return [line[start : start + MAX_LINE_BYTES] for start in range(0, max(1, len(line)), MAX_LINE_BYTES)]


OutputStream = Literal["stdout", "stderr"]

PLAIN_BAR_INTERVAL_S = 5.0
"""Minimum time between two lines of a progress bar in files and pipes, where lines cannot be rewritten."""
TERMINAL_BAR_INTERVAL_S = 0.1
"""Minimum time between two redraws of a progress bar on a terminal."""
_RANK_COLOURS = (36, 33, 35, 32, 34, 31)


class LineSink(Protocol):
    """Receives the lines of one stream of one worker."""

    def write_lines(self, lines: list[bytes], unfinished: bytes) -> None:
        """Write finished lines, and the present content of the unfinished one."""
        ...


class OutputConsole:
    """Standard output and error of this process, shared by all workers.

    On a terminal the newest progress bar stays on the last line and is rewritten in place. An output whose reader is
    gone (`| head`) is given up; the workers and their log files go on.
    """

    def __init__(self, outputs: Mapping[OutputStream, BinaryIO], environ: Mapping[str, str]) -> None:
        self._outputs = dict(outputs)
        self._ttys = [stream for stream, output in outputs.items() if output.isatty()]
        self._is_coloured = not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
        self._bar = b""

    def is_tty(self, stream: OutputStream) -> bool:
        """Return whether lines of this stream can be rewritten."""
        return stream in self._ttys

    def prefix(self, stream: OutputStream, global_rank: int) -> bytes:
        """Return the rank in brackets, `[3] `, coloured on a terminal."""
        text = f"[{global_rank}]"
        if self._is_coloured and self.is_tty(stream):
            text = f"\x1b[{_RANK_COLOURS[global_rank % len(_RANK_COLOURS)]}m{text}\x1b[0m"
        return text.encode() + b" "

    def print_lines(self, stream: OutputStream, lines: list[bytes]) -> None:
        """Print whole lines, above the progress bar if there is one."""
        text = b"\n".join([*lines, b""])
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

    def _write(self, stream: OutputStream, text: bytes) -> None:
        output = self._outputs.get(stream)
        if output is None or not text:
            return
        try:
            output.write(text)
            output.flush()
        except OSError:
            del self._outputs[stream]
            _redirect_to_null(output)


class TerminalSink:
    """Writes lines to a terminal: finished ones stay, the unfinished one is rewritten in place."""

    def __init__(
        self, console: OutputConsole, stream: OutputStream, global_rank: int, clock: Callable[[], float]
    ) -> None:
        self._console, self._stream, self._clock = console, stream, clock
        self._prefix = console.prefix(stream, global_rank)
        self._throttle = ProgressBarThrottle(TERMINAL_BAR_INTERVAL_S, clock())
        self._has_bar = False

    def write_lines(self, lines: list[bytes], unfinished: bytes) -> None:
        if lines:
            if self._has_bar:
                self._console.draw_bar(b"", b"")
                self._has_bar = False
            self._throttle.finish(lines, self._clock())
            self._console.print_lines(self._stream, [self._prefix + line for line in lines])
        if self._throttle.is_due(unfinished, self._clock()):
            self._console.draw_bar(self._prefix, unfinished)
            self._has_bar = True


class PlainSink:
    """Writes lines to a pipe or a file, which cannot rewrite lines; progress bars are throttled."""

    def __init__(self, write: Callable[[list[bytes]], None], prefix: bytes, clock: Callable[[], float]) -> None:
        self._write, self._prefix, self._clock = write, prefix, clock
        self._throttle = ProgressBarThrottle(PLAIN_BAR_INTERVAL_S, clock(), stable_s=PLAIN_BAR_INTERVAL_S)

    def write_lines(self, lines: list[bytes], unfinished: bytes) -> None:
        shown = self._throttle.finish(lines, self._clock())
        if self._throttle.is_due(unfinished, self._clock()):
            shown = [*shown, unfinished]
        if shown:
            self._write([self._prefix + line for line in shown] if self._prefix else shown)


class WorkerLog:
    """Log of one worker, both streams, of limited size. On a full disk the rest is lost and the run goes on."""

    def __init__(self, path: Path, limits: LogLimits = DEFAULT_LIMITS) -> None:
        """Open the log.

        Raises:
            OSError: It cannot be opened.
        """
        self._file = RotatingFile(path, limits, keeps_open=True)
        self._file.append(b"")

    def print_lines(self, lines: list[bytes]) -> None:
        """Write whole lines to the file before returning."""
        with contextlib.suppress(OSError):
            self._file.append(b"\n".join([*lines, b""]))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


class WorkerStream:
    """One stream of one worker: split into lines, written to the console and to the log."""

    def __init__(
        self,
        console: OutputConsole,
        stream: OutputStream,
        global_rank: int,
        log: WorkerLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._splitter = LineSplitter()
        plain = PlainSink(log.print_lines, b"", clock)
        if console.is_tty(stream):
            self._sinks: list[LineSink] = [plain, TerminalSink(console, stream, global_rank, clock)]
        else:
            to_console = lambda lines: console.print_lines(stream, lines)  # noqa: E731
            self._sinks = [plain, PlainSink(to_console, console.prefix(stream, global_rank), clock)]

    def feed(self, received: bytes) -> None:
        """Take output of the worker; empty bytes let a due unfinished line be shown."""
        self._write_lines(self._splitter.feed(received))

    def finish(self) -> None:
        """Finish the stream; a last line without a line end counts too."""
        self._write_lines(self._splitter.flush())

    def _write_lines(self, lines: list[bytes]) -> None:
        for sink in self._sinks:
            sink.write_lines(lines, self._splitter.unfinished)


def write_message(output: TextIO, text: str) -> None:
    """Write our own message at once; what others wrote into it is escaped but for line ends and tabs.

    An output that fails, such as a file on a full disk, is given up.
    """
    try:
        output.write(printable(text, keeps="\n\t"))
        output.flush()
    except OSError:
        _redirect_to_null(output.buffer)


def write_notice(text: str, output: TextIO | None = None) -> None:
    """Write a notice of the command, or of a node agent, for people; to standard error by default."""
    write_message(output or sys.stderr, f"ringweave: {text}{'' if text.endswith(('.', '?')) else '.'}\n")


def _redirect_to_null(output: BinaryIO) -> None:
    """Redirect later writes, and the interpreter's own flush at exit, to /dev/null."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, output.fileno())
        os.close(null)
