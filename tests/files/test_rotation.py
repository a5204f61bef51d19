import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest

from ringweave.environment import LOG_MAX_FILES, LOG_MAX_SIZE
from ringweave.errors import UsageError
from ringweave.files import rotation
from ringweave.files.rotation import LineReader, LogCursor, LogLimits, RotatingFile

SMALL = LogLimits(max_bytes=100, max_files=4)
MANY = LogLimits(max_bytes=2000, max_files=1000)


def numbered(numbers: Iterable[int]) -> list[bytes]:
    return [f"line {number:04d}\n".encode() for number in numbers]


def write(path: Path, numbers: Iterable[int], limits: LogLimits = SMALL, **settings: object) -> None:
    log = RotatingFile(path, limits, **settings)  # type: ignore[arg-type]
    for line in numbered(numbers):
        assert log.append(line) == len(line)
    log.close()


def keep_all(lines: Iterable[bytes], max_bytes: int) -> list[bytes]:
    return list(lines)


def read(path: Path) -> list[bytes]:
    return list(LineReader(path).read_new())


@pytest.mark.parametrize("keeps_open", [False, True])
def test_full_files_are_set_aside_and_the_oldest_removed(tmp_path: Path, keeps_open: bool) -> None:
    path = tmp_path / "rank-0.log"
    write(path, range(95), keeps_open=keeps_open)
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        *("rank-0.log", "rank-0.log.61-70", "rank-0.log.71-80", "rank-0.log.81-90")
    ]
    assert read(path) == [rotation.lines_gone_text(60), *numbered(range(60, 95))]
    assert rotation.read_tail(path, 45) == b"".join(numbered(range(90, 95)))[-45:]
    assert rotation.read_tail(path, 70) == b"".join(numbered(range(80, 95)))[-70:]
    assert rotation.last_lines(path)[-2:] == ["line 0093", "line 0094"]
    assert rotation.find_logs(tmp_path, "rank-*.log") == [path]


def test_the_last_lines_of_a_large_log_are_read(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"first\n" + b"x" * 2**21 + b"\n\xff\nlast\n")
    assert rotation.last_lines(path)[1:] == ["\ufffd", "last"]
    assert len(rotation.last_lines(path)[0]) < 2**20


def test_merged_lines_are_kept_and_count_as_one_file(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, range(95), merge=keep_all)
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        *("events.jsonl", "events.jsonl.71-80", "events.jsonl.81-90", "events.jsonl.kept-70")
    ]
    assert read(path) == numbered(range(95))


def test_a_record_larger_than_a_file_is_written_whole(tmp_path: Path) -> None:
    log = RotatingFile(tmp_path / "log", SMALL)
    for record in (b"x" * 300 + b"\n", b"y\n"):
        log.append(record)
    assert (tmp_path / "log.1-1").read_bytes() == b"x" * 300 + b"\n"
    assert read(tmp_path / "log")[1] == b"y\n"


def test_a_log_without_its_newest_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    write(path, range(20), MANY)
    path.rename(tmp_path / "rank-0.log.1-20")
    assert rotation.exists(path)
    assert rotation.find_logs(tmp_path, "rank-*.log") == [path]
    assert read(path) == numbered(range(20))
    with pytest.raises(FileNotFoundError):
        rotation.read_tail(tmp_path / "absent", 10)
    assert not rotation.exists(tmp_path / "absent")


def test_a_reader_goes_on_over_rotations(tmp_path: Path) -> None:
    path = tmp_path / "log"
    reader, found = LineReader(path), []
    for first in range(0, 200, 7):
        write(path, range(first, first + 7), MANY)
        found += reader.read_new()
        assert list(reader.read_new()) == []
    assert found == numbered(range(203))


def test_a_cursor_goes_on_in_another_process(tmp_path: Path) -> None:
    path, cursor, found = tmp_path / "log", rotation.LOG_START, []
    for first in range(0, 100, 7):
        write(path, range(first, first + 7), MANY)
        reader = LineReader(path, cursor=rotation.parse_cursor(str(cursor)))
        found += reader.read_new()
        cursor = reader.cursor
    assert found == numbered(range(105))
    assert rotation.parse_cursor("3:10:2") == LogCursor(first=3, offset=10, lines=2)
    for text in ("0:0:0", "1:2", "1:-1:0"):
        with pytest.raises(ValueError, match=r"^cursor in a log: '.*', expected FIRST:OFFSET:LINES\.$"):
            rotation.parse_cursor(text)


def test_a_reader_that_lags_says_how_many_lines_are_gone(tmp_path: Path) -> None:
    path = tmp_path / "log"
    write(path, range(13))
    reader = LineReader(path)
    found = list(reader.read_new())
    write(path, range(13, 95))
    assert found + list(reader.read_new()) == [
        *(*numbered(range(13)), rotation.lines_gone_text(47), *numbered(range(60, 95)))
    ]
    write(path, range(95, 1000))
    lagging = list(reader.read_new())
    assert lagging[0] == rotation.lines_gone_text(1000 - 95 - len(lagging) + 1)
    assert lagging[1:] == numbered(range(1000))[1 - len(lagging) :]


def test_a_reader_that_lags_behind_what_was_merged_says_so(tmp_path: Path) -> None:
    path = tmp_path / "log"
    write(path, range(13), merge=keep_all)
    reader = LineReader(path)
    assert list(reader.read_new()) == numbered(range(13))
    write(path, range(13, 95), merge=keep_all)
    assert list(reader.read_new()) == [rotation.lines_gone_text(57), *numbered(range(70, 95))]


def test_a_reader_of_another_log_at_its_path_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "log"
    write(path, range(35))
    reader = LineReader(path)
    list(reader.read_new())
    for each in tmp_path.iterdir():
        each.unlink()
    write(path, range(5))
    assert list(reader.read_new()) == numbered(range(5))


def test_an_unfinished_line_comes_at_the_end_or_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\ntw")
    reader = LineReader(path)
    assert list(reader.read_new()) == [b"one\n"]
    assert list(reader.read_new(at_end=True)) == [b"tw"]
    path.write_bytes(b"one\ntw")
    path.rename(tmp_path / "log.1-2")
    path.write_bytes(b"three\n")
    assert read(path) == [b"one\n", b"tw", b"three\n"]


def test_a_line_that_is_being_written_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a line before the number of lines that are gone would hide that number from those who read lines."""
    path = tmp_path / "log"

    def finish(_: float) -> None:
        os.write(writer.fileno(), b"o\nthree\n")
        fcntl.flock(writer, fcntl.LOCK_UN)

    monkeypatch.setattr(rotation.time, "sleep", finish)
    with path.open("ab", buffering=0) as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        writer.write(b"one\ntw")
        assert list(LineReader(path).read_new(at_end=True)) == [b"one\n", b"two\n", b"three\n"]


WRITE = """
import os, sys
from pathlib import Path
from ringweave.files.rotation import LogLimits, RotatingFile
log = RotatingFile(Path(sys.argv[1]), LogLimits(max_bytes=2000, max_files=int(sys.argv[3])))
for number in range(1000):
    log.append(f"{sys.argv[2]} {number}\\n".encode())
"""


def test_many_processes_write_and_a_follower_gets_each_line_once(tmp_path: Path) -> None:
    path = tmp_path / "log"
    writers = [subprocess.Popen([sys.executable, "-c", WRITE, path, str(index), "1000"]) for index in range(4)]
    reader, found = LineReader(path), []
    while any(writer.poll() is None for writer in writers):
        found += reader.read_new()
    found += reader.read_new()
    assert [writer.returncode for writer in writers] == [0, 0, 0, 0]
    for index in range(4):
        own = [int(line.split()[1]) for line in found if line.startswith(b"%d " % index)]
        assert own == list(range(1000))
    assert len(found) == 4000
    assert len(rotation.find_segments(path)[0]) > 10


def test_a_follower_of_a_small_log_gets_each_line_or_its_number(tmp_path: Path) -> None:
    path = tmp_path / "log"
    writers = [subprocess.Popen([sys.executable, "-c", WRITE, path, str(index), "2"]) for index in range(2)]
    reader, found = LineReader(path, gone=lambda number: b"gone %d" % number), []
    while any(writer.poll() is None for writer in writers):
        found += reader.read_new()
    found += reader.read_new()
    assert [writer.wait() for writer in writers] == [0, 0]
    gone = sum(int(line.split()[1]) for line in found if line.startswith(b"gone"))
    lines = [line for line in found if not line.startswith(b"gone")]
    assert len(lines) == len(set(lines))
    assert len(lines) + gone == 2000
    assert sum(each.stat().st_size for each in tmp_path.iterdir()) <= 2 * 2000


CRASH = """
import itertools, os, signal, sys
from pathlib import Path
from ringweave.files import file_io, rotation

calls = ((os, "open"), (os, "write"), (os, "close"), (os, "fstat"), (os, "pread"), (rotation.fcntl, "flock"))
calls += ((Path, "rename"), (Path, "unlink"), (Path, "open"), (file_io, "fsync_file"))
ends_at = 0

def guarded(call):
    def wrapped(*arguments, **settings):
        global ends_at
        ends_at -= 1
        if ends_at == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **settings)
    return wrapped

for owner, name in calls:
    setattr(owner, name, guarded(getattr(owner, name)))
append_written = os.write
limits = rotation.LogLimits(max_bytes=60, max_files=3)
merge = (lambda lines, size: list(lines)) if sys.argv[2] == "merged" else None
for ends in itertools.count(1):
    path = Path(sys.argv[1]) / str(ends) / "log"
    path.parent.mkdir()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        ends_at = ends
        log = rotation.RotatingFile(path, limits if merge else rotation.LogLimits(max_bytes=60), merge=merge)
        for number in range(30):
            log.append(b"%04d\\n" % number)
            done = ends_at
            ends_at = 0
            os.write(writer, b"%04d\\n" % number)
            ends_at = done
        os._exit(7)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        told = file.read().splitlines()
    _, status = os.waitpid(child, 0)
    last = int(told[-1]) if told else -1
    log = rotation.RotatingFile(path, limits if merge else rotation.LogLimits(max_bytes=60), merge=merge)
    for number in range(100, 120):
        log.append(b"%04d\\n" % number)
    found = [int(line) for line in rotation.LineReader(path).read_new()]
    ours = [number for number in found if number < 100]
    assert ours in (list(range(last + 1)), list(range(last + 2))), (ends, last, found)
    assert [number for number in found if number >= 100] == list(range(100, 120)), (ends, found)
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 7
        break
print(ends)
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["merged", "removed"])
def test_a_process_killed_at_any_call_loses_and_doubles_no_line(tmp_path: Path, way: str) -> None:
    done = subprocess.run([sys.executable, "-c", CRASH, tmp_path, way], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 150, "calls at which it was killed"


def test_a_stopped_lock_holder_delays_others_for_a_moment_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotation, "LOCK_WAIT_S", 0.01)
    path = tmp_path / "log"
    write(path, range(5))
    with path.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        write(path, range(5, 15))
        assert not list(tmp_path.glob("log.*")), "the holder may be about to write"
        write(path, range(15, 30))
        assert [each.name for each in tmp_path.glob("log.*")] == ["log.1-20"], "at twice the size it goes on without"
    assert read(path) == numbered(range(30))


def test_a_folder_that_cannot_be_changed_costs_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    path = tmp_path / "log"
    monkeypatch.setattr(Path, "rename", refuse)
    write(path, range(50))
    assert path.read_bytes() == b"".join(numbered(range(50)))


OWN_OUTPUT = """
import os, sys, time
from ringweave.files import rotation
rotation.OUTPUT_CHECK_S = 0.01
rotation.rotate_own_output()
for number in range(40_000):
    print("line", number, file=sys.stderr)
    if number % 1000 == 0:
        time.sleep(0.02)
time.sleep(0.1)
os.write(2, b"last\\n")
os.write(1, b"other\\n")
"""


def test_a_process_limits_the_file_of_its_own_output(tmp_path: Path) -> None:
    path = tmp_path / "agent.log"
    environ = {**os.environ, LOG_MAX_SIZE: "64KiB", LOG_MAX_FILES: "3"}
    with path.open("ab") as output:
        done = subprocess.run(
            [sys.executable, "-c", OWN_OUTPUT], stdout=output, stderr=output, env=environ, check=False
        )
    assert done.returncode == 0
    assert len(list(tmp_path.iterdir())) == 3
    assert rotation.last_lines(path)[-3:] == ["line 39999", "last", "other"]
    assert sum(each.stat().st_size for each in tmp_path.iterdir()) < 6 * 65536


def test_a_fork_between_lock_and_release_keeps_no_lock(tmp_path: Path) -> None:
    log = RotatingFile(tmp_path / "log", SMALL)
    ready, end = threading.Event(), threading.Event()

    def hold() -> None:
        with (tmp_path / "log").open("ab") as file, rotation._locked(file.fileno()):
            ready.set()
            end.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    ready.wait(10)
    child = subprocess.Popen(["sleep", "5"], close_fds=False)
    end.set()
    thread.join()
    try:
        write(log.path, range(12))
        assert [each.name for each in tmp_path.glob("log.*")] == ["log.1-10"]
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize(
    ("size", "files", "text"),
    [
        (
            "1KiB",
            None,
            r"^size of a log file: '1KiB', expected >= 65536 bytes\. Give .* \[RINGWEAVE_LOG_MAX_SIZE",
        ),
        ("big", None, r"^size: 'big', expected a number with one of"),
        (
            None,
            "1",
            r"^files of a log: '1', expected 2 to 1000\. Give .* \[RINGWEAVE_LOG_MAX_FILES\]",
        ),
        (None, "x", r"^files of a log: 'x', expected 2 to 1000"),
    ],
)
def test_limits_are_checked(size: str | None, files: str | None, text: str) -> None:
    given = {LOG_MAX_SIZE: size or "", LOG_MAX_FILES: files or ""}
    with pytest.raises(UsageError, match=text):
        LogLimits.from_environ(given)


def test_limits_are_read_and_written() -> None:
    assert LogLimits.from_environ({}) == LogLimits()
    limits = LogLimits(max_bytes=2**20, max_files=3)
    assert LogLimits.from_environ(limits.to_environ()) == limits
