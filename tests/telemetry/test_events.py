import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from ringweave.errors import UsageError
from ringweave.files import rotation
from ringweave.launcher.run_dir import summarize_events
from ringweave.telemetry import (
    EVENT_KINDS,
    EVENTS_FORMAT,
    MAX_CLUSTER_TEXT,
    EventLog,
    EventTail,
    UnreadRecords,
    event_lines,
    events,
    parse_event,
    read_events,
    read_last_attempt,
)
from tests.rpc.mutations import mutated


def exited(rank: int) -> dict[str, object]:
    return {"rank": rank, "node": "a0", "exit_code": 0, "signal": None, "stopped": False}


def started(attempt: int) -> dict[str, object]:
    of = {"cluster": "two", "world_size": 2, "cluster_text": ""}
    return {"format": EVENTS_FORMAT, "attempt": attempt, "command": ["train.py"], **of}


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
    monkeypatch.setattr(rotation, "MAX_LINE_BYTES", 200)
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
    assert max(map(len, event_lines(path).read_new())) == len(good)
    longest = b'{"kind": "c"' + b" " * (200 - 14) + b"}\n"
    path.write_bytes(longest + b" " + longest)
    assert [len(line) for line in event_lines(path).read_new()] == [200]


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


def test_a_log_from_before_a_field_has_what_stands_for_it() -> None:
    event = {"time": 1.0, "kind": "run_started", **started(1)}
    del event["cluster_text"]
    assert parse_event(json.dumps(event).encode()) == {**event, "cluster_text": ""}
    unread = UnreadRecords()
    longest = {**event, "cluster_text": "é" * MAX_CLUSTER_TEXT}
    assert parse_event(json.dumps(longest).encode(), unread) == longest
    assert parse_event(json.dumps({**event, "cluster_text": "x" * (MAX_CLUSTER_TEXT + 1)}).encode(), unread) is None
    assert "run_started with a wrong cluster_text (1)" in unread.text()


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


def window(kind: str, rank: int, **fields: object) -> dict[str, object]:
    """Return the fields of a window; numbers are 1 where none is given."""
    texts: dict[str, object] = {"rank": rank, "node": f"n{rank}", "group": "world", "links": {}, "by_schedule": {}}
    return {name: texts.get(name, 1) for name in EVENT_KINDS[kind].fields} | fields


def write_long_run(log: EventLog, num_windows: int) -> None:
    """Write a run: two ranks with a window each ten seconds, and a death with its generation each ten windows."""
    log.write("run_started", **started(1))
    log.write("training_prepared", **window("training_prepared", 0, shares=[4, 4], mode="sync"))
    for number in range(num_windows):
        for rank in (0, 1):
            log.write("steps_measured", **window("steps_measured", rank, wall_s=0.1 * number, longest_s=number))
            links = {"1": {"sent_bytes": 7, "busy_s": 0.5, "limited_s": 0.0}}
            log.write("traffic_measured", **window("traffic_measured", rank, links=links))
            by_schedule = {"ring": {"collectives": number, "bytes": 9 * number, "messages": 1}}
            log.write("collectives", rank=rank, group="world", by_schedule=by_schedule)
            log.write("iterations_done", rank=rank, iterations=number, total=None, loss=1 / (1 + number))
        if number % 10 == 0:
            log.write("worker_exited", **exited(1) | {"signal": "SIGKILL", "exit_code": None})
            log.write("generation_begun", **window("generation_begun", 0, members=["0.0"], newcomers=[], part=""))


def test_what_a_report_needs_outlives_the_files_of_a_long_run(tmp_path: Path) -> None:
    limits = rotation.LogLimits(max_bytes=20_000, max_files=4)
    times = itertools.count(1000, 3)
    write_long_run(EventLog(tmp_path / "long.jsonl", lambda: next(times), limits), 400)
    times = itertools.count(1000, 3)
    write_long_run(EventLog(tmp_path / "whole.jsonl", lambda: next(times)), 400)
    long, whole = read_last_attempt(tmp_path / "long.jsonl"), read_last_attempt(tmp_path / "whole.jsonl")
    assert len(list(tmp_path.glob("long.jsonl*"))) == 4
    assert sum(each.stat().st_size for each in tmp_path.glob("long.jsonl*")) <= 80_000
    assert len(long) < len(whole) / 4
    assert [event["time"] for event in long] == sorted(event["time"] for event in long)
    for kind in ("run_started", "training_prepared", "worker_exited", "generation_begun"):
        assert [event for event in long if event["kind"] == kind] == [event for event in whole if event["kind"] == kind]
    kept, all_of_it = summarize_events(long), summarize_events(whole)
    for rank in ("0", "1"):  # how exchanges split depends on the windows
        for row in (kept["ranks"][rank], all_of_it["ranks"][rank]):
            assert row.pop("wait_s") + row.pop("communication_s") == pytest.approx(400)
        links = kept["ranks"][rank].pop("links")
        assert links == all_of_it["ranks"][rank].pop("links")
        assert kept["ranks"][rank] == pytest.approx(all_of_it["ranks"][rank])
    del kept["ranks"], all_of_it["ranks"]
    assert kept == all_of_it
    longest = [event["longest_s"] for event in long if event["kind"] == "steps_measured"]
    assert max(longest) == 399


def test_the_oldest_of_too_many_events_are_left_out_and_counted(tmp_path: Path) -> None:
    limits = rotation.LogLimits(max_bytes=4_000, max_files=3)
    log = EventLog(tmp_path / "events.jsonl", limits=limits)
    log.write("run_started", **started(1))
    for number in range(1000):
        log.write("member_lost", member=f"1.{number}", reason="died", term=1)
    found = list(read_events(tmp_path / "events.jsonl"))
    assert found[0]["kind"] == "run_started"
    gone = [event for event in found if event["kind"] == "records_gone"]
    assert len(gone) == 1
    assert gone[0]["records"] == 1000 - len([event for event in found if event["kind"] == "member_lost"])
    assert [event["member"] for event in found[2:]] == [f"1.{number}" for number in range(1002 - len(found), 1000)]
    assert sum(each.stat().st_size for each in tmp_path.iterdir()) <= 12_000


def test_a_tail_over_rotations_gets_each_event_once_or_how_many_it_has_missed(tmp_path: Path) -> None:
    limits = rotation.LogLimits(max_bytes=4_000, max_files=3)
    log, tail = EventLog(tmp_path / "events.jsonl", limits=limits), EventTail(tmp_path / "events.jsonl")
    found = []
    for number in range(300):
        log.write("member_lost", member=f"1.{number}", reason="died", term=1)
        found += [event["member"] for event in tail.read_new()]
    assert found == [f"1.{number}" for number in range(300)]
    for number in range(300):
        log.write("member_lost", member=f"2.{number}", reason="died", term=1)
    late = tail.read_new()
    assert late[0]["kind"] == "records_gone"
    assert late[0]["records"] + len(late) - 1 == 300
    assert tail.read_new() == []


def test_damaged_events_are_merged_without_an_error(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "whole.jsonl", lambda: 5.0)
    log.write("steps_measured", **window("steps_measured", 0))
    log.write("traffic_measured", **window("traffic_measured", 0, links={"1": {"sent_bytes": 7, "busy_s": 0.5}}))
    log.write("records_gone", records=3)
    rng, good = random.Random(7), (tmp_path / "whole.jsonl").read_bytes()
    lines = [line for _ in range(2_000) for line in mutated(rng, good).splitlines(keepends=True)]
    assert len(events.merge_events(lines, 10_000)) <= 10_000
