"""Windows of measured steps in the event log."""

import gc
from pathlib import Path

import pytest

from ringweave import telemetry
from ringweave.environment import WorkerEnvironment
from ringweave.telemetry import EventLog
from ringweave.training.recorder import ProcessUsage, StepRecorder
from ringweave.training.timing import MeasuredStep
from tests.clock import Clock

STEP = MeasuredStep(num_samples=8, seconds=2.5, wall_s=4.0, input_s=1.0, compute_s=2.0, exchange_s=0.5, update_s=0.5)


def test_steps_are_summed_over_windows_with_what_the_process_has_used_meanwhile(tmp_path: Path) -> None:
    clock, used = Clock(), {"throttled_s": 5.0, "collections_s": 1.0, "major_faults": 7.0}
    recorder = StepRecorder(EventLog(tmp_path / "events.jsonl"), 3, lambda: dict(used), clock, window_s=10.0)
    for _ in range(3):
        clock.now_s += 4
        used["throttled_s"] += 0.25
        recorder.record(STEP)
    recorder.flush()
    recorder.record(STEP)
    recorder.flush()
    first, second = telemetry.read_events(tmp_path / "events.jsonl")
    assert (first["kind"], first["rank"], first["steps"], first["samples"]) == ("steps_measured", 3, 3, 24)
    assert (first["wall_s"], first["longest_s"], first["input_s"], first["compute_s"]) == (12.0, 4.0, 3.0, 6.0)
    assert (first["throttled_s"], first["collections_s"], first["major_faults"]) == (0.75, 0.0, 0.0)
    assert (second["steps"], second["throttled_s"]) == (1, 0.0)


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
