"""Records of an event log that are not as they have to be: counted, named, and harmless to all others."""

import importlib.util
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from ringweave import telemetry
from ringweave.cli import main
from ringweave.launcher import run_dir
from ringweave.page import run_model
from ringweave.page.html_report import report_html
from ringweave.page.run_model import RunModel
from ringweave.telemetry import EVENT_KINDS, UnreadRecords, verdict
from ringweave.telemetry.exporters import CurveExporter, RunCollector, TraceExporter
from ringweave.telemetry.run_metrics import RunMetrics
from tests.page import synthetic
from tests.telemetry.examples import example

RUN = list(synthetic.events(2, 300, per_node=1))
RATES = {"a->core": 1.0, "core->a": 1.0, "b->core": 2.0, "core->b": 2.0}
NETWORK = {"nodes": ["a", "b"], "switches": [], "rates": RATES}
OTHERS = [kind for kind in EVENT_KINDS if kind != "run_started"]
WHOLE = [
    *RUN,
    *(example(kind, time=synthetic.BEGIN_S + 40, **(NETWORK if kind == "network_measured" else {})) for kind in OTHERS),
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just("0.0") | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.sampled_from("012"), inner, max_size=3),
    max_leaves=6,
)


class Curves(CurveExporter):
    """Points as they come."""

    def __init__(self) -> None:
        super().__init__()
        self.points: list[Any] = []

    def _add_points(self, points: Mapping[str, float], step: int, time_s: float) -> None:
        self.points.append((dict(points), step, time_s))

    def close(self) -> None: ...


def read(lines: Sequence[bytes], unread: UnreadRecords) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        path.write_bytes(b"".join(lines))
        return telemetry.read_last_attempt(path, unread)


def line(event: Mapping[str, Any]) -> bytes:
    return json.dumps(event).encode() + b"\n"


def export_traces(events: Sequence[Mapping[str, Any]]) -> None:
    if importlib.util.find_spec("opentelemetry") is not None:
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        traces = TraceExporter("run", span_exporter=InMemorySpanExporter())
        traces.export(events)
        traces.close()


def shown(events: Sequence[Mapping[str, Any]], unread: UnreadRecords) -> dict[str, Any]:
    """Everything that is made of events; fails where one of them breaks it."""
    model, metrics, curves = RunModel(unread), RunMetrics(), Curves()
    for event in events:
        model.add(dict(event))
        metrics.add(event)
    curves.export(events)
    export_traces(events)
    sections = run_model.dump_sections(model.sections(is_over=True))
    report_html(sections)
    registry = CollectorRegistry()
    registry.register(RunCollector(metrics))
    losses = [loss.text() for loss in verdict.find_losses([dict(event) for event in events])]
    summary = run_dir.summarize_events([dict(event) for event in events])
    run_dir.describe_training(summary["training"])
    return {
        "sections": sections,
        "metrics": generate_latest(registry),
        "curves": curves.points,
        "losses": losses,
        "summary": json.dumps(summary),
    }


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    unread = UnreadRecords()
    found = shown(read([*map(line, WHOLE)], unread), unread)
    assert unread.text() == ""
    return found


@st.composite
def changed(draw: st.DrawFn) -> dict[str, Any]:
    """An event of any kind in which one field is missing or another one."""
    event = dict(draw(st.sampled_from(WHOLE)))
    name = draw(st.sampled_from(sorted(event)))
    if draw(st.booleans()):
        del event[name]
    else:
        event[name] = draw(JSON)
    return event


@given(changed(), st.integers(0, len(WHOLE)))
def test_one_changed_field_of_any_kind_harms_no_other_record(
    whole: dict[str, Any], event: dict[str, Any], place: int
) -> None:
    if event.get("kind") == "run_started":
        return  # another attempt, or one of another format
    unread = UnreadRecords()
    lines = [*map(line, WHOLE)]
    events = read([*lines[: max(1, place)], line(event), *lines[max(1, place) :]], unread)
    found = shown(events, unread)
    if not unread.count:
        return  # it is a whole event
    assert unread.count == 1
    assert len(events) in (len(WHOLE), len(WHOLE) + 1)
    if len(events) > len(WHOLE):
        return  # the page alone found it wrong
    assert unread.text().startswith("1 record of the event log could not be read: ")
    sections, expected = dict(found.pop("sections")), dict(whole["sections"])
    assert json.loads(sections.pop("counts"))["unread"] == 1
    expected.pop("counts")
    assert sections == expected
    assert found == {name: value for name, value in whole.items() if name != "sections"}


@pytest.mark.parametrize("kind", OTHERS)
def test_every_field_of_every_kind_is_checked(kind: str) -> None:
    for name in EVENT_KINDS[kind].fields:
        unread = UnreadRecords()
        missing = {key: value for key, value in example(kind).items() if key != name}
        odd = [missing, example(kind, **{name: {"odd": {"odd": []}}}), example(kind, **{name: [None, {}]})]
        found = [telemetry.parse_event(line(event), unread) for event in odd]
        assert found[1:] == [None, None], name
        assert unread.count >= 2
        assert f"{kind} with a wrong {name} (2)" in unread.text()


def test_flaws_are_named_once_with_their_numbers() -> None:
    unread = UnreadRecords()
    lines = [line(example("iterations_done")), line(example("iterations_done", rank="x")), b'{"time": 1.0, "ki\n']
    lines += [line(example("iterations_done", rank=None)), line({"time": 1.0, "kind": "<b>\x1b[31m"})]
    assert len([event for event in (telemetry.parse_event(each, unread) for each in lines) if event]) == 1
    assert unread.text() == (
        "4 records of the event log could not be read: iterations_done with a wrong rank (2), "
        r"truncated, or no JSON object with a kind (1), unknown kind '<b>\x1b[31m' (1)."
    )
    for number in range(100):
        unread.add(f"flaw {number}")
    assert "other flaws (91)" in unread.text()


def test_report_and_why_name_what_they_could_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = synthetic.write_run(tmp_path / "run", 2, 300, outcome="done", per_node=1)
    with (folder / "events.jsonl").open("ab") as file:
        file.write(line({"time": 1.0, "kind": "schedule_measured"}) * 2 + b'{"time": 1.0, "kind": "ru')
        file.write(b"\n")
    said = "3 records of the event log could not be read: schedule_measured without rank (2), truncated, or no JSON"
    assert main.run_command_line(["why", str(folder)]) == 0
    output = capsys.readouterr().out
    assert said in output
    assert "rank 1" in output, "the verdict on all others"
    assert main.run_command_line(["report", "--html", str(tmp_path / "run.html"), str(folder)]) == 0
    assert said in (tmp_path / "run.html").read_text()
