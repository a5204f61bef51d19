"""Buckets of time, parts of steps, and the lives of workers."""

from typing import Any

import pytest

from ringweave.page import aggregation
from ringweave.page.aggregation import BucketedSeries, RunTimeline, StepGrid, WindowSums
from tests.page import synthetic


def window(
    rank: int, time_s: float, *, steps: int = 10, exchange_s: float = 2.0, compute_s: float = 6.0
) -> dict[str, Any]:
    """Steps of a second each that end at that time."""
    event = {"time": time_s, "kind": "steps_measured", "rank": rank, "node": "a", "steps": steps, "samples": 4 * steps}
    event |= {"wall_s": 1.0 * steps, "longest_s": 1.5, "input_s": 0.1 * steps, "update_s": 0.05 * steps}
    return event | {"exchange_s": exchange_s, "compute_s": compute_s, "memory_bytes": 7}


def test_a_series_keeps_extremes_and_mean_at_any_length() -> None:
    series = BucketedSeries(100.0)
    for second in range(10_000):
        series.add(100.0 + second, float(second % 10))
    series.add(100.0, float("nan"))
    found = series.document()
    assert aggregation.MAX_BUCKETS / 2 < len(found["times"]) <= aggregation.MAX_BUCKETS
    assert (set(found["min"]), set(found["max"])) == ({0.0}, {9.0})
    assert all(4.0 < mean < 5.0 for mean in found["mean"][:-1])
    assert found["times"] == sorted(found["times"])
    assert BucketedSeries(0.0).document() == {"times": [], "min": [], "mean": [], "max": []}


def test_what_a_rank_exchanges_beyond_the_least_of_its_group_is_its_wait() -> None:
    grid = StepGrid(0.0)
    grid.add(window(0, 10.0, exchange_s=1.0, compute_s=7.5))
    grid.add(window(1, 10.0, exchange_s=4.0, compute_s=4.5))
    found = grid.ranks(None)
    assert (found[0]["wait_s"], found[0]["communication_s"], found[0]["compute_s"]) == (0.0, 0.1, 0.75)
    assert (found[1]["wait_s"], found[1]["communication_s"], found[1]["steps"]) == (0.3, 0.1, 10)
    for each in found.values():
        assert sum(each[f"{part}_s"] for part in aggregation.PARTS) == pytest.approx(each["wall_s"])
    alone = grid.ranks(None, [[0], [1]])
    assert (alone[1]["wait_s"], alone[1]["communication_s"]) == (0.0, 0.4), "each is a ring of its own"


def test_samples_and_steps_survive_doubling() -> None:
    grid = StepGrid(0.0)
    for number in range(1, 201):
        grid.add(window(0, 10.0 * number))
        grid.add(window(1, 10.0 * number + 0.5))
    found = grid.document()
    assert found is not None
    assert (grid.ranks(None)[0]["steps"], grid.ranks(None)[1]["samples"]) == (2000, 8000)
    assert [grid.samples_per_s(60.0), grid.samples_per_s(None)] == pytest.approx([8.0, 8.0], rel=0.01)
    assert len(found["times"]) <= aggregation.MAX_BUCKETS
    assert found["samples_per_s"][5] == pytest.approx(8.0)
    assert found["step_s"]["mean"][5] == pytest.approx(1.0)
    assert (found["waits"]["ranks"], len(found["waits"]["rows"])) == ([0, 1], 2)
    assert StepGrid(0.0).document() is None


def test_a_rank_that_is_long_silent_does_not_hold_the_curves_back() -> None:
    grid = StepGrid(0.0)
    grid.add(window(1, 10.0))
    for number in range(1, 10):
        grid.add(window(0, 10.0 * number))
    found = grid.document()
    assert found is not None
    assert found["times"][-1] > 85
    assert found["waits"]["rows"][1][-1] is None


def test_windows_for_the_verdict_add_up_and_keep_the_first() -> None:
    windows = WindowSums()
    links = {"1": {"sent_bytes": 5, "busy_s": 0.5}}
    for number in range(1000):
        windows.add(window(0, 10.0 * number))
        traffic = {"time": 10.0 * number, "kind": "traffic_measured", "rank": 0, "group": "g", "links": links}
        windows.add(traffic)
    kept = [event for event in windows.events() if event["kind"] == "steps_measured"]
    traffic = [event["links"]["1"] for event in windows.events() if event["kind"] == "traffic_measured"]
    assert sum(each["sent_bytes"] for each in traffic) == 5000
    assert sum(each["busy_s"] for each in traffic) == pytest.approx(500)
    assert len(kept) <= WindowSums.MAX_WINDOWS
    assert sum(event["steps"] for event in kept) == 10_000
    assert (kept[0]["steps"], kept[0]["time"], kept[-1]["time"]) == (10, 0.0, 9990.0)
    assert (kept[1]["longest_s"], kept[1]["memory_bytes"]) == (1.5, 7)


def test_the_time_line_knows_deaths_from_ends() -> None:
    line = RunTimeline()
    assert line.document() is None
    for event in synthetic.events(2, 100, per_node=1):
        line.add(event, "text")
    how = {"node": "n0", "exit_code": None, "signal": "SIGKILL", "stopped": False}
    line.add({"time": synthetic.BEGIN_S + 5, "kind": "worker_exited", "rank": 0, **how}, "killed")
    line.add({"time": synthetic.BEGIN_S + 6, "kind": "worker_started", "rank": 0, "node": "n0"}, "")
    done = {"node": "n0", "exit_code": 0, "signal": None, "stopped": False}
    line.add({"time": synthetic.BEGIN_S + 9, "kind": "worker_exited", "rank": 0, **done}, "done")
    line.add({"time": synthetic.BEGIN_S + 9, "kind": "member_lost", "reason": "it has finished"}, "left")
    found = line.document()
    assert found is not None
    assert found["num_deaths"] == 1
    assert [life["end_s"] is None for life in found["lives"]] == [False, True, False]
    assert found["marks"] == [], "deaths are in the lives, and who has finished is no loss"
