from pathlib import Path

import pytest
import torch

from ringweave import telemetry
from ringweave.pipeline.runtime.stopwatch import Stopwatch
from ringweave.testing.ranks import run_ranks
from tests.pipeline.adapting import adapting_functions


@pytest.mark.slow
@pytest.mark.distributed
def test_blocks_leave_a_device_that_became_slow(tmp_path: Path) -> None:
    """In real processes, by a clock that computing alone moves on: rank 0's device becomes four times slower."""
    found = run_ranks(adapting_functions.slow_down, 2, str(tmp_path), 60, 28, 4.0, backend="gloo")
    assert found[0].splits == found[1].splits
    assert found[0].splits[0] < 6
    assert found[0].outcomes == found[1].outcomes
    assert any(outcome.is_done and outcome.splits[0] < 6 for outcome in found[0].outcomes)
    events = list(telemetry.read_events(adapting_functions.events_of(tmp_path)))
    kinds = {event["kind"] for event in events}
    assert {"pipeline_measured", "partition_solved", "blocks_moved"} <= kinds
    moved = next(event for event in events if event["kind"] == "blocks_moved")
    assert moved["before"] == [6]
    measured = [event for event in events if event["kind"] == "pipeline_measured"]
    assert all(len(event["compute_s"]) == 2 and event["measured_s"] > 0 for event in measured)
    assert len(measured) >= 4


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("accumulated", [1, 2])
def test_computing_is_measured_apart_from_waiting(accumulated: int) -> None:
    """Six blocks of 3 ms, four microbatches: 72 ms of computing; evaluations and accumulation do not count."""
    events = run_ranks(adapting_functions.measure_only, 2, accumulated, backend="gloo")[0]
    measured = [event for event in events if event["kind"] == "pipeline_measured"]
    assert [(event["first_step"], event["end_step"]) for event in measured][:2] == [(2, 5), (5, 8)]
    for event in measured:
        for seconds in event["compute_s"]:
            assert seconds == pytest.approx(0.072)


@pytest.mark.slow
@pytest.mark.distributed
def test_all_links_are_timed() -> None:
    found = run_ranks(adapting_functions.probe, 4, backend="gloo")
    assert all(each == found[0] for each in found)
    assert found[0][0] == [128 * 1024, 128 * 1024 + 300_000, 128 * 1024]
    for first, second, unknown in found[0][1]:
        assert first[0] > 0
        assert second[0] > 0
        assert unknown == ()


@pytest.mark.slow
@pytest.mark.distributed
def test_a_link_is_as_much_slower_as_its_messages() -> None:
    """By a clock that runs a million times as fast: whatever else this machine does is nothing beside that."""
    found = run_ranks(adapting_functions.probe_slower, 2, 1e6, backend="gloo")
    assert found[0] == found[1]
    assert found[0][0][0] < 1e8 / 10


def test_a_stopwatch_counts_what_it_is_told() -> None:
    ticks = iter(range(100))
    watch = Stopwatch(torch.device("cpu"), clock=lambda: float(next(ticks)))
    assert watch.time(lambda value: value + 1, 3, is_forward=True) == 4
    assert watch.lap().num_forwards == 0
    watch.is_on = True
    assert watch.time(lambda: "done", is_forward=True) == "done"
    watch.time(lambda: None, is_forward=False)
    lap = watch.lap()
    assert (lap.compute_s, lap.num_forwards, lap.begun_s) == (2.0, 1, 0.0)
    assert watch.lap().compute_s == 0.0
