"""Sections of the page, from the events of a run."""

import gc
import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringweave.cli import job_options, main
from ringweave.errors import LaunchError, UnknownJobError
from ringweave.jobs.states import JobState, NodeState
from ringweave.page import run_model, run_source
from ringweave.page.html_report import report_html
from ringweave.page.run_model import RunModel, show_text
from ringweave.page.run_source import RunSource
from ringweave.platforms.api import AttemptView, JobView, LogLine, LogQuery, NodeView
from ringweave.platforms.run_directory import RunDirectoryPlatform
from ringweave.telemetry import EventTail
from tests import polling
from tests.page import synthetic


def sections_of(events: Any, *, is_over: bool = False) -> dict[str, Any]:
    model = RunModel()
    for event in events:
        model.add(event)
    return model.sections(is_over=is_over)


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
    found = sections_of(synthetic.events(4, 600, per_node=2))
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
    assert found["counts"]["unread"] == 0
    assert by_schedule["ring"]["wire_fraction"] is None
    assert [(row["name"], row["ranks"], row["share"], row["memory_bytes"]) for row in found["ranks"]["nodes"]] == [
        ("n0", "ranks 0, 1", 64, 4.21e9),
        ("n1", "ranks 2, 3", 64, 4.25e9),
    ]
    assert found["ranks"]["nodes"][1]["step"]["wait_s"] == pytest.approx(rows[2]["step"]["wait_s"] / 2)
    assert found["left_out"] == [
        "Bytes saved: gradients are exchanged at every step (not in mode local), and exactly (no --wire)."
    ]


def test_collectives_in_a_wire_format_say_what_part_of_their_bytes_they_send() -> None:
    encoded = [
        {**event, "wire": "int8"} if event["kind"] == "schedule_measured" else event
        for event in synthetic.events(2, 100, per_node=1)
    ]
    found = sections_of(encoded)
    assert [row["wire_fraction"] for row in found["collectives"]] == [pytest.approx(0.252, abs=0.02)] * 2
    assert "Bytes saved" not in "".join(found["left_out"])


@pytest.mark.parametrize("change", [{"collective": "reduce"}, {"collective": "alltoall"}, {"measured_s": 0.0}])
def test_a_measurement_without_a_bound_is_shown_without_one(change: dict[str, Any]) -> None:
    events = [
        {**event, **change} if event["kind"] == "schedule_measured" and event["schedule"] == "ring" else event
        for event in synthetic.events(2, 100, per_node=1)
    ]
    rows = {row["schedule"]: row for row in sections_of(events)["collectives"]}
    assert rows["ring"]["fraction_of_bound"] is None
    assert rows["multi-level"]["fraction_of_bound"] is not None


def test_a_probed_network_is_the_tree_of_the_page() -> None:
    links = {"a": ("r0", 1e6), "b": ("r0", 2e6), "c": ("r1", 3e6), "r0": ("core", 4e6), "r1": ("core", 5e6)}
    rates = {f"{src}->{dst}": rate for src, (dst, rate) in links.items()}
    rates |= {f"{dst}->{src}": rate for src, (dst, rate) in links.items()}
    formed = {"kind": "group_formed", "rank": 0, "group": "world", "node": "a", "nodes": ["a", "a", "b", "c"]}
    probed = {"kind": "network_measured", "rank": 0, "group": "world", "nodes": ["a", "b", "c"], "rates": rates}
    started = next(synthetic.events(4, 100, per_node=2))  # with the cluster file of an agent
    events = [
        started,
        {"time": 1.0, "members": [0, 1, 2, 3], **formed},
        {"time": 1.1, "switches": ["r0", "r1"], **probed},
    ]
    tree = sections_of(events)["topology"]["tree"]
    assert [(each["label"], each["bytes_per_s"], each["is_measured"]) for each in tree["children"]] == [
        ("r0", 4e6, True),
        ("r1", 5e6, True),
    ]
    assert [each["label"] for each in tree["children"][0]["children"]] == ["a, 2 devices", "b, 1 device"]
    assert tree["children"][0]["children"][0]["is_binding"]
    broken = {"time": 1.2, "switches": ["r9"], **probed}
    assert sections_of([*events, broken])["counts"]["unread"] == 1


def chain(num_switches: int) -> str:
    switch, last = "  - {{name: s{0}, uplink: 1Mbit/s, parent: s{1}}}\n", num_switches - 1
    below = "".join(switch.format(each, each + 1) for each in range(last))
    top = f"  - {{name: s{last}, uplink: 1Mbit/s}}\n"
    return f"name: c\nswitches:\n{below}{top}nodes:\n  - {{name: n, switch: s0, nic: 1Mbit/s, devices: 1}}\n"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("name: two-racks\nnodes: [{}]", "ClusterError"),
        ("\x00{{{", "ClusterError"),
        (chain(run_model.MAX_SWITCH_LEVELS + 1), "ValueError"),
        (chain(1200), "ValueError"),
    ],
)
def test_a_cluster_that_cannot_be_shown_costs_the_tree_alone(text: str, error: str) -> None:
    whole = list(synthetic.events(4, 100, per_node=2))
    found = sections_of([{**whole[0], "cluster_text": text}, *whole[1:]])
    assert (found["topology"]["cluster"], found["topology"]["tree"]) == (None, None)
    assert found["topology"]["links"][0]["name"] == "r0->core"
    assert found["counts"]["unread_text"] == f"1 record of the event log could not be read: run_started ({error}) (1)."
    deepest = sections_of([{**whole[0], "cluster_text": chain(run_model.MAX_SWITCH_LEVELS)}, *whole[1:]])
    assert run_model.dump_sections(deepest)["topology"].count('"is_switch":true') == run_model.MAX_SWITCH_LEVELS + 1


def test_an_attempt_is_shown_with_its_own_cluster_whichever_node_tells_of_it() -> None:
    whole = list(synthetic.events(4, 100, per_node=2))
    other = {**whole[0], "cluster_text": ""}
    model = RunModel()
    for event in (whole[0], other):  # of the node with rank 0, and of another one
        model.add(event)
    assert model.sections(is_over=False)["topology"]["cluster"] == "two-racks"
    assert "name: two-racks" not in model.sections(is_over=False)["events"]["rows"][0]["text"]
    model.begin_attempt()
    model.add(other)
    assert model.sections(is_over=False)["topology"] is None


def test_what_is_not_recorded_is_said_and_not_invented() -> None:
    started = [event for event in synthetic.events(2, 100) if event["kind"] in ("run_started", "worker_started")]
    found = sections_of([{**started[0], "cluster_text": ""}, *started[1:]])
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


def test_the_time_to_go_after_a_return_to_a_checkpoint_is_that_of_the_pace_since() -> None:
    done = [(10.0, 100), (20.0, 200), (30.0, 50), (40.0, 250)]
    events = [
        {"time": time_s, "kind": "iterations_done", "rank": 0, "iterations": steps, "total": 450, "loss": None}
        for time_s, steps in done
    ]
    assert sections_of(events)["progress"]["predicted_left_s"] == pytest.approx(10.0)
    assert sections_of(events[:3])["progress"]["predicted_left_s"] is None


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
    assert (found["counts"]["events"], found["counts"]["unread"]) == (len(whole) + 1, 1)
    assert found["progress"]["train_step"] == 100
    json.loads(run_model.dump_sections(found)["steps"])


def test_a_long_run_gives_a_small_page(tmp_path: Path) -> None:
    folder = synthetic.write_run(tmp_path / "run", 64, 20_000)
    source = RunSource(RunDirectoryPlatform("me"), str(folder))
    source.read_all()
    page = report_html(run_model.dump_sections(source.sections() | {"written_s": 0.0}))
    assert len(page) < 1_000_000


def deaths(numbers: range) -> Iterator[dict[str, Any]]:
    """Events of a job whose rank 1 dies in every second: each time there is another generation with another group."""
    for number in numbers:
        group, where = f"generation 1.{number}", {"time": synthetic.BEGIN_S + number, "rank": 1}
        member = {"time": where["time"], "member": f"1.{number}", "term": 1, "part": ""}
        yield {**where, "kind": "worker_exited", "node": "n0", "exit_code": None, "signal": "SIGKILL", "stopped": False}
        yield {**member, "kind": "member_lost", "reason": "its connection to the coordinator broke"}
        yield {**member, "kind": "generation_begun", "number": number, "members": ["0.0", f"1.{number}"]}
        yield {**where, "kind": "worker_started", "node": "n0", "local_rank": 1, "pid": number}
        yield {**where, "kind": "group_formed", "group": group, "node": "n0", "members": [0, 1], "nodes": ["n0", "n0"]}
        plan = {"group": group, "version": 1, "rates": {"a0->r0": 1e6}, "bound_s_per_byte": 1e-7, "binding": "a0"}
        yield {**where, "kind": "plan_made", **plan}
        times = {"measured_s": {"ring": 0.1}, "predicted_s": {"ring": 0.1}, "trials": 3, "trials_s": 0.3}
        tuned = {"group": group, "version": 1, "collective": "allreduce", "schedule": "ring", "bytes": 1000 + number}
        yield {**where, "kind": "schedule_tuned", **tuned, **times}
        for rank in (0, 1):
            links = {str(1 - rank): {"sent_bytes": 1000, "busy_s": 0.5, "limited_s": 0.0}}
            sums = {"node": "n0", "group": group, "collectives": 1, "wall_s": 0.9, "in_flight_s": 0.1, "links": links}
            yield {**where, "kind": "traffic_measured", "rank": rank, **sums}
            counted = {"ring": {"collectives": 2, "bytes": 2000, "messages": 4}}
            yield {**where, "kind": "collectives", "rank": rank, "group": group, "by_schedule": counted}


@pytest.mark.slow
def test_5000_deaths_are_counted_and_take_no_more_memory_than_500() -> None:
    model = RunModel()
    for event in (next(synthetic.events(2, 1)), *deaths(range(500))):
        model.add(event)
    few = len(pickle.dumps(model))
    for event in deaths(range(500, 5_000)):
        model.add(event)
    assert len(pickle.dumps(model)) < 1.1 * few < 250_000
    found = model.sections(is_over=False)
    line = found["timeline"]
    assert (line["num_deaths"], line["num_generations"], line["num_lives"]) == (5_000, 5_000, 5_000)
    newest = line["num_lives"] - 1
    assert (len(line["lives"]), line["lives"][-1]["begin_s"]) == (201, synthetic.BEGIN_S + newest)
    assert (len(found["events"]["rows"]), found["events"]["num"]) == (run_model.MAX_EVENTS, 1 + 7 * 5_000)
    assert found["traffic"] == {"ring": {"collectives": 10_000, "bytes": 10_000_000, "messages": 40_000}}
    assert len(found["peers"]) == run_model.MAX_COLLECTIVES
    assert len(found["topology"]["links"]) == 1


def test_earlier_rounds_of_a_job_are_read_no_more(tmp_path: Path) -> None:
    def num_tails() -> int:
        gc.collect()
        return sum(isinstance(each, EventTail) for each in gc.get_objects())

    kinds = ("run_started", "worker_started")
    lines = "".join(f"{json.dumps(each)}\n" for each in synthetic.events(1, 100) if each["kind"] in kinds)
    source, before = RunSource(OtherPlatform("local", str(tmp_path)), "job"), num_tails()
    for number in range(1, 101):
        folder = tmp_path / "n0" / str(number) / f"round-{number}"
        folder.mkdir(parents=True)
        (folder / "events.jsonl").write_text(lines)
        source.poll()
    assert num_tails() - before == 1
    assert [each["number"] for each in source.sections()["timeline"]["attempts"]] == list(range(1, 101))
    (tmp_path / "n0" / "1" / "round-1" / "events.jsonl").write_text(lines * 3)
    source.poll()
    assert source.sections()["counts"]["events"] == 200


def test_a_disk_that_fails_for_a_while_is_told_and_outlived(tmp_path: Path) -> None:
    folder = synthetic.write_run(tmp_path / "run", 2, 200, per_node=1)
    events = (folder / "events.jsonl").read_text()
    (folder / "events.jsonl").unlink()
    (folder / "events.jsonl").mkdir()
    source = RunSource(RunDirectoryPlatform("me"), str(folder))
    assert not source.poll()
    assert "Its events cannot be read at the moment: [Errno 21] Is a directory" in source.sections()["head"]["trouble"]
    (folder / "events.jsonl").rmdir()
    (folder / "events.jsonl").write_text(events)
    source.poll()
    source.poll()
    found = source.sections()
    assert (found["head"]["trouble"], found["progress"]["train_step"]) == (None, 200)


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


class OtherPlatform(RunDirectoryPlatform):
    """Some platform of jobs: two nodes, of which the second is ahead."""

    def __init__(self, platform: str, files: str, state: JobState = JobState.RUNNING) -> None:
        super().__init__("me")
        self.event_lines: list[LogLine] = []
        self.queries: list[LogQuery] = []
        self.num_failures = 0
        node = {"workers": 2, "capacity": 2, "state": NodeState.RUNNING, "retries": 0, "max_retries": 3}
        nodes = [
            NodeView(name="n0", reason=None, iterations=7, last_loss=2.5, attempts=(AttemptView(attempt=1),), **node),
            NodeView(name="n1", reason=None, iterations=9, last_loss=2.25, attempts=(), **node),
        ]
        times = {"created_s": 1.0, "since_s": 1.0, "ended_s": None, "ttl_s": None}
        counts = {"workers": 4, "device": "cpu", "mode": "sync", "run": 1, "round": 1}
        names = {"name": "job", "platform": platform, "requester": "me", "files": files}
        self.view = JobView(state=state, reason=None, nodes=tuple(nodes), **names, **times, **counts)

    def job(self, name: str) -> JobView:
        if self.view.state.is_end and self.view.platform == "hosts":
            raise UnknownJobError("job: removed")
        return self.view

    def logs(self, name: str, which: LogQuery) -> Iterator[LogLine]:
        self.queries.append(which)
        if which.events != "only":
            for rank in range(4):
                yield LogLine(node=f"n{rank // 2}", attempt=1, round=1, rank=rank, text=synthetic.HOSTILE)
        if self.num_failures:
            yield from self.event_lines[:20]
            self.num_failures -= 1
            raise LaunchError("no answer")
        yield from self.event_lines if which.events != "none" else ()


@pytest.mark.parametrize(
    ("platform", "folders"),
    [
        ("local", ("n0/1/round-1", "n1/1/round-1")),
        ("slurm", ("n0/2/round-3", "n1/1/round-3")),
        ("runs", ("hosts/a/n0/1/round-1", "hosts/b/n1/1/round-1")),
    ],
)
def test_a_job_of_a_platform_is_shown_by_the_event_logs_of_its_nodes(
    tmp_path: Path, platform: str, folders: tuple[str, str]
) -> None:
    for index, folder in enumerate(folders):
        (tmp_path / folder).mkdir(parents=True)
        with (tmp_path / folder / "events.jsonl").open("w") as file:
            for event in synthetic.events(4, 200, per_node=2):
                is_own = event["kind"] == "run_started" or event.get("rank") in (2 * index, 2 * index + 1)
                file.write(json.dumps(event) + "\n" if is_own else "")
    source = RunSource(OtherPlatform(platform, str(tmp_path)), "job")
    source.read_all()
    found = source.sections()
    assert [row["rank"] for row in found["ranks"]["rows"]] == [0, 1, 2, 3]
    assert [row["steps"] for row in (each["step"] for each in found["ranks"]["rows"])] == [200] * 4
    assert (found["progress"]["train_step"], found["progress"]["total"]) == (200, 200)
    assert [each["number"] for each in found["timeline"]["attempts"]] == [int(folders[0][-1])], "one for all nodes"
    assert [row["source"] for row in found["logs"]["sources"]] == [f"rank {rank}" for rank in range(4)]
    assert "\\x1b[31m" in found["logs"]["sources"][0]["lines"][0]


def test_a_job_whose_event_logs_are_elsewhere_is_shown_as_its_platform_knows_it() -> None:
    source = RunSource(OtherPlatform("kubernetes", "kubectl -n ml get pods"), "job")
    source.read_all()
    found = source.sections()
    assert (found["progress"]["train_step"], found["progress"]["loss"]) == (9, 2.25)
    assert [(node["iterations"], node["attempts"]) for node in found["head"]["nodes"]] == [(7, 1), (9, 0)]
    (left_out,) = found["left_out"]
    assert "Everything that workers measure: no event of theirs has come yet. (kubectl -n ml get pods)" in left_out
    assert len(found["logs"]["sources"]) == 4


def event_lines(round_: int = 2) -> list[LogLine]:
    """The event logs of two nodes, one after the other, behind those of an earlier round."""
    whole = list(synthetic.events(4, 200, per_node=2))
    lines = [LogLine(node="n0", attempt=1, round=1, rank=None, text=json.dumps(whole[0]), is_event=True)]
    for node in ("n0", "n1"):
        for event in whole:
            is_own = event["kind"] == "run_started" or event.get("rank", 0) // 2 == int(node[1])
            line = LogLine(node=node, attempt=1, round=round_, rank=None, text=json.dumps(event), is_event=True)
            lines += [line] if is_own else []
    return lines


@pytest.mark.parametrize("platform", ["hosts", "kubernetes"])
def test_event_logs_on_other_machines_come_beside_the_output(platform: str) -> None:
    service = OtherPlatform(platform, "")
    service.event_lines = event_lines()
    source = RunSource(service, "job")
    source.read_all()
    found = source.sections()
    assert [row["step"]["steps"] for row in found["ranks"]["rows"]] == [200] * 4
    assert [each["number"] for each in found["timeline"]["attempts"]] == [1, 2], "rounds"
    assert (found["progress"]["train_step"], found["counts"]["unread"]) == (200, 0)
    assert len(found["logs"]["sources"]) == 4


@pytest.mark.parametrize("platform", ["hosts", "runs"])
def test_why_reads_the_events_of_the_last_round_and_no_output(
    platform: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def why() -> dict[str, Any]:
        assert main.run_command_line(["why", "job", "-o", "json"]) == 0
        return json.loads(capsys.readouterr().out)

    service = OtherPlatform(platform, str(tmp_path) if platform == "runs" else "")
    service.event_lines = [*event_lines(), replace(event_lines()[0], text="{", round=2)]
    for line in service.event_lines if platform == "runs" else ():
        path = tmp_path / line.node / str(line.attempt) / f"round-{line.round}" / "events.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(line.text + "\n")
    monkeypatch.setattr(job_options, "open_user_platform", lambda _: service)
    found = why()
    assert [(each["cause"], each["rank"]) for each in found["losses"]] == [("backward", 3)]
    flaw = "truncated, or no JSON object with a kind"
    assert found["notes"] == [f"1 record of the event log could not be read: {flaw} (1)."]
    assert {query.events for query in service.queries} == ({"only"} if platform == "hosts" else set())
    service.num_failures = 1
    if platform == "hosts":
        found = why()
        assert (found["losses"], found["notes"]) == ([], ["Its losses are not known: no answer"])


def follow(source: RunSource, holds: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    def is_seen() -> object:
        source.poll()
        return holds(source.sections())

    polling.wait_until(is_seen, source.sections, 60.0)
    return source.sections()


def test_a_connection_that_breaks_costs_no_event_and_counts_none_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_source, "RETRY_S", 0.01)
    service = OtherPlatform("hosts", "")
    service.event_lines, service.num_failures = event_lines(), 3
    source = RunSource(service, "job")
    source.follow_logs()
    found = follow(source, lambda run: run["counts"]["events"] == len(service.event_lines))
    assert [row["step"]["steps"] for row in found["ranks"]["rows"]] == [200] * 4
    assert [len(each["lines"]) for each in found["logs"]["sources"]] == [1] * 4
    assert found["logs"]["trouble"] is None


def test_a_run_on_hosts_that_is_over_is_shown_by_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_source, "STATE_INTERVAL_S", 0.0)
    service = OtherPlatform("hosts", str(tmp_path / "out"))
    service.event_lines = event_lines()[:100]
    source = RunSource(service, "job")
    source.follow_logs()
    assert follow(source, lambda run: run["ranks"]["rows"])["head"]["state"] == "Running"
    synthetic.write_run(tmp_path / "out", 4, 300, outcome="done", per_node=2)
    service.view = replace(service.view, state=JobState.SUCCEEDED)
    found = follow(source, lambda run: run["head"]["is_over"])
    assert (found["head"]["name"], found["head"]["state"], found["head"]["trouble"]) == ("out", "Succeeded", None)
    assert found["progress"]["train_step"] == 300
    assert found["topology"]["tree"]["children"], "of its cluster file"


def test_a_run_that_is_removed_between_two_looks_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_source, "STATE_INTERVAL_S", 0.0)
    service = OtherPlatform("hosts", "")  # the page of a host that has not started the run
    service.event_lines = event_lines()
    source = RunSource(service, "job")
    source.read_all()
    assert not source.sections()["head"]["is_over"]
    service.view = replace(service.view, state=JobState.SUCCEEDED)
    source.poll()
    found = source.sections()
    assert (found["head"]["state"], found["head"]["is_over"]) == ("Removed", True)
    last = "It was Running when it was last seen. Its output and files are where it was started."
    assert found["head"]["trouble"] == f"job: removed {last}"
    assert found["ranks"]["last_s"] is None, "numbers of the whole attempt"


def test_hostile_texts_are_no_markup(tmp_path: Path) -> None:
    folder = synthetic.write_run(tmp_path / "run", 4, 200, outcome="failed", per_node=2)
    source = RunSource(RunDirectoryPlatform("me"), str(folder))
    source.read_all()
    page = report_html(run_model.dump_sections(source.sections() | {"written_s": 0.0}))
    assert "<script>alert" not in page
    assert page.count("<script>") == page.count("</script>") - 1, "the data are the one script with a type"
    assert not {"\x1b", "\u202e", "\u2066", "\x00"} & set(page)
    assert "src=" not in page.partition("<body>")[0]
