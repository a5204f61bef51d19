"""Sections of the page, from the events of a run."""

import json
from pathlib import Path
from typing import Any

import pytest

from ringweave import topology
from ringweave.page import run_model
from ringweave.page.html_report import report_html
from ringweave.page.run_model import RunModel, show_text
from ringweave.page.run_source import RunSource
from ringweave.platforms.run_directory import RunDirectoryPlatform
from tests.page import synthetic


def sections_of(events: Any, *, is_over: bool = False, cluster: str | None = None) -> dict[str, Any]:
    model = RunModel()
    for event in events:
        model.add(event)
    return model.sections(topology.loads(cluster) if cluster else None, is_over=is_over)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("a\u202eb\u2066c", "a⟨U+202E⟩b⟨U+2066⟩c"),
        ("\ta\x00\x7f", "    a\\x00\\x7f"),
        ("0 %\r50 %\r100 %\r", "…100 %"),
        ("x" * 500, "x" * 400 + "… (100 more characters)"),
    ],
)
def test_texts_are_shown_as_they_are(text: str, shown: str) -> None:
    assert show_text(text) == shown


def test_a_run_with_everything() -> None:
    found = sections_of(synthetic.events(4, 600, per_node=2), cluster=synthetic.cluster_text(2, 2))
    assert found["verdict"]["losses"][0]["rank"] == 3
    assert (found["progress"]["train_step"], found["progress"]["total"]) == (600, 600)
    assert found["progress"]["predicted_left_s"] == 0.0
    assert found["progress"]["samples_per_s"] == pytest.approx(4 * 320, rel=0.05)
    rows = found["ranks"]["rows"]
    assert [(row["rank"], row["node"], row["state"], row["share"]) for row in rows][:2] == [
        (0, "n0", "running", 32),
        (1, "n0", "running", 32),
    ]
    assert rows[3]["step"]["wait_s"] == 0.0 < rows[0]["step"]["wait_s"]
    assert rows[0]["memory_bytes"] == 2.1e9
    tree = found["topology"]["tree"]
    assert [(each["label"], each["is_binding"], each["is_measured"]) for each in tree["children"]] == [
        ("r0", True, True),
        ("r1", False, False),
    ]
    assert tree["children"][0]["children"][0]["label"] == "n0, 2 devices, ranks 0, 1"
    assert found["topology"]["links"][0] == {
        "name": "r0->core",
        "bytes_per_s": 11.6e6,
        "described_bytes_per_s": 12.5e6,
    }
    by_schedule = {row["schedule"]: row for row in found["collectives"]}
    assert by_schedule["multi-level"]["bound_s"] == pytest.approx(4.0)
    assert by_schedule["ring"]["measured_over_predicted"] == pytest.approx(1 / 0.93)
    assert found["counts"]["broken"] == 0
    assert found["left_out"] == [
        "Bytes saved: counted in mode local alone, which exchanges less often than at every step."
    ]


def test_what_is_not_recorded_is_said_and_not_invented() -> None:
    kinds = ("run_started", "worker_started")
    found = sections_of(event for event in synthetic.events(2, 100) if event["kind"] in kinds)
    for name in ("loss", "steps", "topology", "collectives", "training", "rings", "sites", "stages"):
        assert not found[name], name
    silence = "No verdict yet: 0 steps of ringweave.prepare, or scheduled collectives, are reported, and it takes 20."
    assert found["verdict"]["silence"] == silence
    assert [text.partition(":")[0] for text in found["left_out"]] == [
        "Loss",
        "Time to go",
        "Steps, shares and waits of ranks",
        "Topology",
        "Predicted beside measured collectives",
        "Bytes saved",
    ]


def test_rings_sites_and_stages() -> None:
    rings = {"time": 2.0, "kind": "rings_formed", "rank": 0, "rings": [[0, 1], [2]], "most_staleness_versions": 4}
    counted = {
        "time": 3.0,
        "kind": "params_counted",
        "version": 9,
        "staleness": {"0": 5, "1": 4},
        "pushes": {"0": 5, "1": 4},
    }
    counted |= {"samples": 90, "train_steps": 3, "received_bytes": 100, "sent_bytes": 200}
    sites = {"time": 2.0, "kind": "sites_formed", "rank": 0, "sites": [[0], [1]], "inner_steps": 50}
    outer = {"time": 9.0, "kind": "outer_step", "number": 2, "train_steps": 100, "inner_steps": [50, 50]}
    outer |= {"computing_s": [1.0, 1.1], "wait_s": 0.1, "exchange_s": 2.0}
    stages = {
        "time": 9.0,
        "kind": "pipeline_measured",
        "blocks": 9,
        "splits": [4],
        "compute_s": [0.1, 0.2],
        "speeds": [1, 1],
    }
    found = sections_of([rings, counted, sites, outer, stages | {"measured_s": 0.4, "predicted_s": 0.38}])
    assert (found["rings"]["rings"], found["rings"]["staleness"]) == ([[0, 1], [2]], {"0": 5, "1": 4})
    assert (found["sites"]["number"], found["sites"]["train_steps"]) == (2, 100)
    assert (found["stages"]["splits"], found["stages"]["predicted_s"]) == ([4], 0.38)
    assert "Bytes saved" not in "".join(found["left_out"])


@pytest.mark.parametrize(
    "broken",
    [
        {"time": float("inf"), "kind": "steps_measured"},
        {"time": float("nan"), "kind": "run_started"},
        {"time": 1.0, "kind": "steps_measured", "rank": [], "wall_s": 1},
        {"time": 1.0, "kind": "worker_exited"},
        {"time": 1.0, "kind": "plan_made", "rates": 7},
        {"time": "never", "kind": "collectives"},
        {"kind": "iterations_done"},
    ],
)
def test_an_event_that_is_none_is_counted_and_harms_nothing(broken: dict[str, Any]) -> None:
    whole = list(synthetic.events(2, 100))
    found = sections_of([*whole, broken])
    assert found["counts"] == {"events": len(whole) + 1, "broken": 1}
    assert found["progress"]["train_step"] == 100
    json.loads(run_model.dump_sections(found)["steps"])


def test_a_long_run_gives_a_small_page(tmp_path: Path) -> None:
    folder = synthetic.write_run(tmp_path / "run", 64, 20_000)
    source = RunSource(RunDirectoryPlatform("me"), str(folder))
    source.read_all()
    page = report_html(run_model.dump_sections(source.sections() | {"written_s": 0.0}))
    assert len(page) < 1_000_000


def test_a_second_attempt_begins_anew_and_the_time_line_keeps_both(tmp_path: Path) -> None:
    folder = synthetic.write_run(tmp_path / "run", 2, 200, outcome="failed", per_node=1)
    with (folder / "events.jsonl").open("a") as file:
        for event in synthetic.events(2, 100):
            attempt = {"attempt": 2} if event["kind"] == "run_started" else {}
            file.write(json.dumps({**event, **attempt, "time": event["time"] + 1000}) + "\n")
    source = RunSource(RunDirectoryPlatform("me"), str(folder))
    source.read_all()
    found = source.sections()
    assert found["progress"]["train_step"] == 100
    assert [each["number"] for each in found["timeline"]["attempts"]] == [1, 2]
    assert (found["head"]["state"], found["head"]["name"]) == ("Failed", "run")


def test_hostile_texts_are_no_markup(tmp_path: Path) -> None:
    folder = synthetic.write_run(tmp_path / "run", 4, 200, outcome="failed", per_node=2)
    source = RunSource(RunDirectoryPlatform("me"), str(folder))
    source.read_all()
    page = report_html(run_model.dump_sections(source.sections() | {"written_s": 0.0}))
    assert "<script>alert" not in page
    assert page.count("<script>") == page.count("</script>") - 1, "the data are the one script with a type"
    assert not {"\x1b", "\u202e", "\u2066", "\x00"} & set(page)
    assert "src=" not in page.partition("<body>")[0]
