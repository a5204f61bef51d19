"""Windows of measured steps in the event log."""

import gc
from pathlib import Path
from typing import Any, cast

import pytest

from ringweave import telemetry
from ringweave.environment import WorkerEnvironment
from ringweave.telemetry import EventLog
from ringweave.telemetry.process_usage import ProcessUsage, window_length_s
from ringweave.training.recorder import StepRecorder
from ringweave.training.timing import MeasuredStep
from tests.clock import Clock

STEP = MeasuredStep(
    num_samples=8, seconds=2.5, wall_s=4.0, input_s=1.0, compute_s=2.0, forward_s=0.75, exchange_s=0.5, update_s=0.5
)


class Usage:
    """Sums of a process, as the test sets them."""

    def __init__(self) -> None:
        self.sums = {"throttled_s": 5.0, "collections_s": 1.0, "major_faults": 7.0}
        self.sums |= {"memory_stall_s": 0.0, "disk_stall_s": 2.0, "read_bytes": 4096.0}

    def read(self) -> dict[str, float]:
        return dict(self.sums)

    def memory_bytes(self) -> int:
        return 12345


def test_steps_are_summed_over_windows_with_what_the_process_has_used_meanwhile(tmp_path: Path) -> None:
    clock, used = Clock(), Usage()
    recorder = StepRecorder(EventLog(tmp_path / "events.jsonl"), 3, "a-0", cast(Any, used), clock)
    clock.now_s += 0.3
    for _ in range(3):
        clock.now_s += 0.25
        used.sums["throttled_s"] += 0.25
        recorder.record(STEP)
    recorder.record(STEP)
    recorder.flush()
    first, second = telemetry.read_events(tmp_path / "events.jsonl")
    assert (first["kind"], first["rank"], first["node"], first["steps"]) == ("steps_measured", 3, "a-0", 3)
    assert (first["samples"], first["wall_s"], first["longest_s"], first["input_s"]) == (24, 12.0, 4.0, 3.0)
    assert (first["compute_s"], first["forward_s"], first["memory_bytes"]) == (6.0, 2.25, 12345)
    assert (first["throttled_s"], first["collections_s"], first["major_faults"]) == (0.75, 0.0, 0.0)
    assert (second["steps"], second["throttled_s"], second["disk_stall_s"]) == (1, 0.0, 0.0)


def test_windows_grow_from_one_second_to_ten() -> None:
    assert [window_length_s(each) for each in (0.0, 5.0, 20.0, 100.0, 1e6)] == [1.0, 1.0, 2.0, 10.0, 10.0]


def test_without_an_event_log_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    record = StepRecorder.of_this_process(WorkerEnvironment())
    record(STEP)
    assert list(tmp_path.iterdir()) == []


def test_garbage_collections_are_measured() -> None:
    usage = ProcessUsage()
    try:
        before = usage.read()
        gc.collect()
        after = usage.read()
        assert 0 < after["collections_s"] - before["collections_s"] < 60
        assert after["major_faults"] >= before["major_faults"]
    finally:
        gc.callbacks.remove(usage._note_collection)
