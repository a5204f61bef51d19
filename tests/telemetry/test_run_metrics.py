"""Sums of a run's events, and the files of monitoring that name them."""

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from ringweave import telemetry
from ringweave.launcher import run_dir
from ringweave.telemetry import run_metrics
from ringweave.telemetry.run_metrics import METRICS, RunMetrics
from tests.telemetry.test_verdict import traffic, window

MONITORING = Path(__file__).parents[2] / "deploy" / "monitoring"


def summed(events: list[dict[str, Any]]) -> RunMetrics:
    metrics = RunMetrics()
    for event in events:
        metrics.add(event)
    return metrics


def test_an_exchange_is_split_into_communication_and_waits_by_the_rank_that_waits_least() -> None:
    metrics = summed([window(0), window(1, exchange_s=3.5), window(0, 1, exchange_s=2.0), window(1, 1)])
    rows = metrics.by_rank()
    assert (rows["0"]["communication_s"], rows["0"]["wait_s"]) == (3.0, 0.5)
    assert (rows["1"]["communication_s"], rows["1"]["wait_s"]) == (3.0, 2.0)
    assert (rows["1"]["steps"], rows["1"]["wall_s"], rows["1"]["node"]) == (200, 20.0, "n1")


def test_a_rank_that_is_gone_keeps_no_other_waiting() -> None:
    metrics = summed([window(0), window(1), window(0, 1), window(0, 2), window(0, 3)])
    assert metrics.values["ringweave_rank_communication_seconds_total"]["0", "n0"] == 1.5 * 3, "the newest may wait"
    assert metrics.by_rank()["0"]["communication_s"] == 6.0, "at the end none does"


def test_links_have_sums_and_the_last_rate() -> None:
    metrics = summed([traffic(0, 0, {"1": 10.0}), traffic(0, 1, {"1": 20.4})])
    assert metrics.values["ringweave_link_sent_bytes_total"]["0", "1"] == 152e6
    assert metrics.values["ringweave_link_bytes_per_second"]["0", "1"] == pytest.approx(20e6)
    assert metrics.by_rank()["0"]["links"] == {"1": {"sent_bytes": 152e6, "busy_s": 10.2}}


def test_counts_of_groups_are_cumulative_and_a_new_attempt_starts_anew() -> None:
    def count(group: str, number: int) -> dict[str, Any]:
        row = {"collectives": number, "bytes": 8 * number, "messages": 0}
        return {"time": 1.0, "kind": "collectives", "rank": 0, "group": group, "by_schedule": {"ring": row}}

    metrics = summed([count("a", 3), count("b", 1), count("a", 5)])
    assert list(metrics.samples()) == [
        ("ringweave_rank_collectives_total", ("0", "ring"), 6.0),
        ("ringweave_rank_collective_bytes_total", ("0", "ring"), 48.0),
    ]
    for attempt in (1, 2):
        metrics.add({"time": 2.0, "kind": "run_started", "attempt": attempt})
    assert list(metrics.samples()) == []


def test_shares_generations_deaths_staleness_and_losses_are_known() -> None:
    died = {"kind": "worker_exited", "rank": 1, "stopped": False, "signal": "SIGKILL", "exit_code": None}
    metrics = summed(
        [
            {"kind": "training_prepared", "shares": [3, 5]},
            {"kind": "shares_changed", "shares": [2, 6]},
            {"kind": "generation_begun"},
            {"kind": "generation_begun"},
            died,
            {**died, "stopped": True},
            {"kind": "params_counted", "staleness": {"0": 7, "2": 1}},
            {"kind": "iterations_done", "rank": 0, "iterations": 40, "loss": 0.5},
            {"kind": "group_formed"},
        ]
    )
    assert list(metrics.samples()) == [
        ("ringweave_rank_share_samples", ("0",), 2),
        ("ringweave_rank_share_samples", ("1",), 6),
        ("ringweave_generations_total", (), 2.0),
        ("ringweave_worker_deaths_total", ("1",), 1.0),
        ("ringweave_staleness_pushes_total", ("0",), 7.0),
        ("ringweave_staleness_pushes_total", ("2",), 1.0),
        ("ringweave_iterations", ("0",), 40),
        ("ringweave_loss", ("0",), 0.5),
    ]


def test_run_json_has_the_same_sums() -> None:
    events = [window(0), window(1), traffic(0, 0, {"1": 10.0})]
    assert run_dir.summarize_events(events)["ranks"] == summed(events).by_rank()


def test_events_of_all_nodes_and_of_the_last_round_alone_are_read(tmp_path: Path) -> None:
    for name in ("a/1/round-1", "a/1/round-2", "b/2/round-2"):
        time_s = 5.0 if "b/" in name else 7.0
        log = telemetry.EventLog(tmp_path / name / "events.jsonl", clock=functools.partial(float, time_s))
        log.path.parent.mkdir(parents=True)
        log.write("fault_lifted", fault=name)
    found = [event["fault"] for event in telemetry.read_run(tmp_path)]
    assert found == ["b/2/round-2", "a/1/round-2"], "by their times"


def test_rules_and_dashboard_name_metrics_that_exist() -> None:
    rules = (MONITORING / "rules.yml").read_text()
    recorded = set(re.findall(r"record: (\S+)", rules))
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    used = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    names = re.findall(r"\binstance\w*:ringweave[\w:]+|\bringweave_\w+", rules + "\n".join(used))
    known = set(METRICS) | recorded
    assert set(names) <= known
    assert recorded <= set(names)
    assert {name for name in METRICS if name not in rules + "\n".join(used)} <= {
        "ringweave_iterations",
        "ringweave_link_bytes_per_second",
        "ringweave_rank_collective_bytes_total",
        "ringweave_rank_collectives_total",
        "ringweave_rank_major_faults_total",
        "ringweave_rank_update_seconds_total",
    }
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_the_page_of_metrics_has_them_all() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text()
    assert run_metrics.to_markdown() in page


def test_counts_of_many_groups_take_no_more_room_and_stay_exact() -> None:
    rows = [{"collectives": number, "bytes": 8 * number, "messages": 1} for number in (1, 2)]
    counted = [
        {"kind": "collectives", "time": 1.0, "rank": 0, "group": f"g{number}", "by_schedule": {"ring": row}}
        for number in range(1000)
        for row in rows
    ]
    metrics = summed(counted)
    assert metrics.values["ringweave_rank_collectives_total"] == {("0", "ring"): 2000}
    assert {len(groups) for groups in metrics._counted.values()} == {run_metrics._MAX_GROUPS}
