import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from ringweave.errors import UsageError
from ringweave.telemetry import (
    EVENT_KINDS,
    EVENTS_FORMAT,
    EventLog,
    EventTail,
    LineReader,
    events,
    read_events,
    read_last_attempt,
)
from tests.wire.mutations import mutated


def exited(rank: int) -> dict[str, object]:
    return {"rank": rank, "node": "a0", "exit_code": 0, "signal": None, "stopped": False}


def started(attempt: int) -> dict[str, object]:
    return {"format": EVENTS_FORMAT, "attempt": attempt, "command": ["train.py"], "cluster": "two", "world_size": 2}


WRITE_MANY = """
import sys
from ringweave.telemetry import EventLog
for _ in range(200):
    EventLog(sys.argv[1]).write("communication_failed", rank=0, node="a0", group="world", text="x" * 1000)
"""


def line(fault: str) -> bytes:
    return json.dumps({"time": 1.0, "kind": "fault_lifted", "fault": fault}, ensure_ascii=False).encode() + b"\n"


def test_an_event_is_one_json_line_with_time_and_kind(tmp_path: Path) -> None:
    EventLog(tmp_path / "events.jsonl", clock=lambda: 12.5).write("worker_exited", **exited(3))
    text = (tmp_path / "events.jsonl").read_text()
    assert text.endswith("\n")
    assert json.loads(text) == {"time": 12.5, "kind": "worker_exited", **exited(3)}
    assert list(read_events(tmp_path / "events.jsonl")) == [json.loads(text)]


def test_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"event kind: 'worker_exit', expected one of run_started, .*Add it to kinds"):
        EventLog(tmp_path / "e").write("worker_exit", rank=0)
    assert not (tmp_path / "e").exists()


@pytest.mark.parametrize("change", [{"rank": None}, {"more": 1}])
def test_missing_and_undocumented_fields_are_refused(tmp_path: Path, change: dict[str, object]) -> None:
    fields = exited(0) | change
    fields = {name: value for name, value in fields.items() if not (name == "rank" and value is None)}
    expected = r"fields of event worker_exited: .*, expected exit_code, node, rank, signal, stopped\. Write exactly"
    with pytest.raises(ValueError, match=expected):
        EventLog(tmp_path / "e").write("worker_exited", **fields)


def test_no_file_holds_no_events(tmp_path: Path) -> None:
    assert list(read_events(tmp_path / "absent")) == []


@pytest.mark.parametrize(
    "torn",
    [
        *(b'{"time": 1, "ki', b'{"time": 1, "kind": "x"}', b"\xff\xfe\x00garbage", b"[1]\n", b"{}\n"),
        *(b'{"kind": []}\n', b"\xff\n", b"[" * 100_000 + b"\n", b'{"a":' * 100_000 + b"\n", b"9" * 5000 + b"\n"),
    ],
    ids=lambda torn: repr(torn[:12]),
)
def test_torn_lines_are_skipped(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "events.jsonl"
    EventLog(path).write("worker_exited", **exited(0))
    with path.open("ab") as file:
        file.write(torn)
    assert [event["rank"] for event in read_events(path)] == [0]
    assert [event["rank"] for event in EventTail(path).read_new()] == [0]


def test_mutated_lines_are_events_or_none_and_cost_no_others(tmp_path: Path) -> None:
    rng, path = random.Random(7), tmp_path / "events.jsonl"
    EventLog(path, clock=lambda: 12.5).write("worker_exited", **exited(3))
    good = path.read_bytes()
    path.write_bytes(b"".join(mutated(rng, good).removesuffix(b"\n") + b"\n" + good for _ in range(1_000)))
    found = list(read_events(path))
    assert all(isinstance(event["kind"], str) for event in found)
    assert len([event for event in found if event == json.loads(good)]) >= 1_000
    assert EventTail(path).read_new() == found


def test_an_endless_line_is_skipped_and_no_more_of_it_in_memory_than_an_event_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "MAX_LINE_BYTES", 200)
    path, good = tmp_path / "events.jsonl", line("b")
    tail = EventTail(path)
    path.write_bytes(good + b'{"kind": "a", "text": "' + b"x" * 250)
    assert [event["fault"] for event in tail.read_new()] == ["b"]
    for more in (b"x" * 30, b"x" * 500):
        with path.open("ab") as file:
            file.write(more)
        assert tail.read_new() == []
    with path.open("ab") as file:
        file.write(b'"}\n' + good)
    assert [event["fault"] for event in tail.read_new()] == ["b"]
    assert max(map(len, LineReader(path).read_new())) == len(good)
    longest = b'{"kind": "c"' + b" " * (200 - 14) + b"}\n"
    path.write_bytes(longest + b" " + longest)
    assert [len(line) for line in LineReader(path).read_new()] == [200]


def test_a_tail_reads_each_event_once_and_one_that_is_being_written_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = EventTail(path)
    assert tail.read_new() == [], "no file yet"
    path.write_bytes(line("\u2028") + b"nonsense\n" + line("b") + line("c")[:20])
    assert [event["fault"] for event in tail.read_new()] == ["\u2028", "b"]
    assert tail.read_new() == []
    with path.open("ab") as file:
        file.write(line("c")[20:])
    assert [event["fault"] for event in tail.read_new()] == ["c"]


def test_the_last_attempt_begins_at_the_last_run_started(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    for attempt in (1, 2):
        log.write("run_started", **started(attempt))
        log.write("worker_exited", **exited(attempt))
    assert [event["kind"] for event in read_last_attempt(path)] == ["run_started", "worker_exited"]
    assert read_last_attempt(path)[0]["attempt"] == 2


def test_lines_of_several_processes_never_mix(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    writers = [subprocess.Popen([sys.executable, "-c", WRITE_MANY, path]) for _ in range(2)]
    assert [writer.wait() for writer in writers] == [0, 0]
    assert len(list(read_events(path))) == 400 == len(path.read_text().splitlines())


@pytest.mark.parametrize(("words", "got"), [({}, "'none'"), ({"format": 1}, "1"), ({"format": 3}, "3")])
def test_an_attempt_of_another_format_is_refused(tmp_path: Path, words: dict[str, int], got: str) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(json.dumps({"time": 1.0, "kind": "run_started", **words}) + "\n")
    expected = (
        rf"^format of the events file: {got}, expected 2\. Read it with the ringweave that wrote it, or .* \[{path}\]$"
    )
    for read in (lambda: list(read_events(path)), lambda: read_last_attempt(path), EventTail(path).read_new):
        with pytest.raises(UsageError, match=expected):
            read()


def test_every_field_has_a_meaning() -> None:
    assert all(meaning for kind in EVENT_KINDS.values() for meaning in kind.fields.values())


def test_a_disk_that_takes_nothing_costs_the_event_and_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", "ringweave"):
        EventLog(tmp_path / "absent" / "e").write("worker_exited", **exited(0))
    assert "event worker_exited: [Errno 2] No such file or directory" in caplog.text
    assert "expected to be written. It is lost, the work goes on." in caplog.text


def test_a_line_that_the_disk_cut_short_takes_no_other_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, write = EventLog(tmp_path / "e"), os.write
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:20]))
        log.write("worker_exited", **exited(0))
    log.write("worker_exited", **exited(1))
    log.write("worker_exited", **exited(2))
    assert [event["rank"] for event in read_events(tmp_path / "e")] == [1, 2]
