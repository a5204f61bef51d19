import io
import os
from pathlib import Path

import pytest

from ringweave.launcher.output import OutputConsole, WorkerLog, WorkerStream, write_message


class Screen(io.BytesIO):
    def isatty(self) -> bool:
        return True


class Time:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def log(tmp_path: Path):
    log = WorkerLog(tmp_path / "log")
    yield log
    log.close()


def merged(outputs: dict, log: WorkerLog, clock: Time, stream="stdout", rank: int = 0, **environ: str) -> WorkerStream:
    return WorkerStream(OutputConsole(outputs, environ), stream, rank, log, clock)


def test_plain_output_has_the_rank_in_front_of_each_line(log: WorkerLog, tmp_path: Path) -> None:
    out = io.BytesIO()
    stream = merged({"stdout": out}, log, Time(), rank=12)
    stream.feed(b"one\ntw")
    stream.feed(b"o\n\nlast")
    stream.finish()
    assert out.getvalue() == b"[12] one\n[12] two\n[12] \n[12] last\n"
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\n\nlast\n"


def test_bars_are_thinned_where_lines_cannot_be_rewritten(log: WorkerLog, tmp_path: Path) -> None:
    out, clock = io.BytesIO(), Time()
    stream = merged({"stderr": out}, log, clock, "stderr")
    for number in range(100):
        clock.now_s = number / 8
        stream.feed(b"\r%d%%" % number)
    stream.feed(b"\r100%\n")
    assert out.getvalue() == b"[0] 40%\n[0] 80%\n[0] 100%\n"
    assert (tmp_path / "log").read_bytes() == b"40%\n80%\n100%\n"


def test_what_is_printed_in_pieces_is_printed_once(log: WorkerLog) -> None:
    out, clock = io.BytesIO(), Time()
    stream = merged({"stdout": out}, log, clock)
    clock.now_s = 60.0
    for piece in (b"loss", b" ", b"0.5", b"\n"):
        stream.feed(piece)
    assert out.getvalue() == b"[0] loss 0.5\n"


def test_a_waiting_line_is_shown_after_a_while(log: WorkerLog) -> None:
    out, clock = io.BytesIO(), Time()
    stream = merged({"stdout": out}, log, clock)
    stream.feed(b"waiting for rank 3 ...")
    assert out.getvalue() == b""
    clock.now_s = 5.0
    stream.feed(b"")
    assert out.getvalue() == b"[0] waiting for rank 3 ...\n"


def test_a_bar_on_a_terminal_is_rewritten_below_the_lines(log: WorkerLog) -> None:
    screen, clock = Screen(), Time()
    outputs = {"stdout": screen, "stderr": screen}
    console = OutputConsole(outputs, {"NO_COLOR": "1"})
    bar, lines = (WorkerStream(console, s, r, log, clock) for s, r in (("stderr", 0), ("stdout", 1)))
    clock.now_s = 1.0
    bar.feed(b"\r50%")
    lines.feed(b"hello\n")
    clock.now_s = 2.0
    bar.feed(b"\r99%")
    bar.feed(b"\r100%\n")
    clear = b"\r\x1b[K"
    assert screen.getvalue() == (
        clear + b"[0] 50%" + clear + b"[1] hello\n" + b"[0] 50%" + clear + b"[0] 99%" + clear + b"[0] 100%\n"
    )


def test_ranks_have_colours_on_terminals_only(log: WorkerLog) -> None:
    for output, environ, expected in (
        (Screen(), {}, b"\x1b[33m[1]\x1b[0m x\n"),
        (Screen(), {"NO_COLOR": "1"}, b"[1] x\n"),
        (Screen(), {"TERM": "dumb"}, b"[1] x\n"),
        (io.BytesIO(), {}, b"[1] x\n"),
    ):
        merged({"stdout": output}, log, Time(), rank=1, **environ).feed(b"x\n")
        assert output.getvalue() == expected


def test_a_long_bar_does_not_wrap(log: WorkerLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    screen, clock = Screen(), Time()
    stream = merged({"stdout": screen}, log, clock, NO_COLOR="1")
    clock.now_s = 1.0
    stream.feed(b"x" * 100)
    assert screen.getvalue() == b"\r\x1b[K[0] " + b"x" * 32


def test_an_output_that_nobody_reads_is_given_up(log: WorkerLog, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as out:
        stream = merged({"stdout": out}, log, Time())
        stream.feed(b"one\n")
        stream.feed(b"two\n")
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\n"


def test_a_full_disk_does_not_end_the_output() -> None:
    log, out = WorkerLog(Path("/dev/full")), io.BytesIO()
    merged({"stdout": out}, log, Time()).feed(b"one\n")
    log.close()
    assert out.getvalue() == b"[0] one\n"


def test_words_that_an_output_does_not_take_are_lost_and_so_are_all_after_them() -> None:
    """Else they would be tried again when the interpreter ends, which makes its exit code 120."""
    with Path("/dev/full").open("w") as out:
        write_message(out, "one\n")
        out.write("two\n")
