"""Bytes of a worker's stream into lines, progress bars included. Pure."""

MAX_LINE_BYTES = 64 * 1024


class LineSplitter:
    r"""Cuts a stream at line ends; of a line that is rewritten with `\r`, only the last state is kept.

    Bytes stay bytes: whatever a program prints comes through, text or not. A line longer than `MAX_LINE_BYTES` is cut.
    """

    def __init__(self) -> None:
        self._rest = b""

    @property
    def unfinished(self) -> bytes:
        """What a terminal would show on the line that has no end yet."""
        return _last_state(self._rest)

    def feed(self, received: bytes) -> list[bytes]:
        """The lines that these bytes finish, without their ends."""
        *lines, rest = (self._rest + received).split(b"\n")
        ends_with_return = rest.endswith(b"\r")
        rest = _last_state(rest)
        pieces = [piece for line in lines for piece in _cut(_last_state(line))]
        while len(rest) > MAX_LINE_BYTES:
            pieces.append(rest[:MAX_LINE_BYTES])
            rest = rest[MAX_LINE_BYTES:]
        self._rest = rest + (b"\r" if ends_with_return else b"")
        return pieces

    def flush(self) -> list[bytes]:
        """The unfinished line, as the stream has ended."""
        rest, self._rest = self.unfinished, b""
        return [rest] if rest else []


class Thinner:
    """Says when an unfinished line is worth showing: it changed, and nothing was shown for a while."""

    def __init__(self, interval_s: float, now_s: float, *, stands_s: float = 0.0) -> None:
        """`stands_s`: it has had no end for so long. What is printed in pieces is whole a moment later."""
        self._interval_s, self._stands_s = interval_s, stands_s
        self._shown_s = now_s
        self._shown = b""
        self._begun_s: float | None = None

    def finish(self, lines: list[bytes], now_s: float) -> list[bytes]:
        """The finished lines to show: all, but not one that was shown while unfinished and is still the same."""
        if not lines:
            return []
        first, self._shown, self._shown_s, self._begun_s = self._shown, b"", now_s, None
        return lines[1:] if lines[0] == first != b"" else lines

    def is_due(self, unfinished: bytes, now_s: float) -> bool:
        """Whether to show the unfinished line now; if so, it counts as shown."""
        if not unfinished:
            self._begun_s = None
            return False
        self._begun_s = now_s if self._begun_s is None else self._begun_s
        if unfinished == self._shown or now_s - self._shown_s < self._interval_s:
            return False
        if now_s - self._begun_s < self._stands_s:
            return False
        self._shown, self._shown_s = unfinished, now_s
        return True


def _last_state(line: bytes) -> bytes:
    line = line.rstrip(b"\r")
    return line[line.rfind(b"\r") + 1 :]


def _cut(line: bytes) -> list[bytes]:
    return [line[start : start + MAX_LINE_BYTES] for start in range(0, max(1, len(line)), MAX_LINE_BYTES)]
