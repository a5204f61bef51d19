"""Events of a job's Pods: in their logs, in archived ones, and on the page while the job runs."""

import json
import threading
from pathlib import Path

import pytest

from ringweave.cli.export import follow_run
from ringweave.jobs.records import GroupPhase
from ringweave.jobs.request import JobRequest, NodeRequest
from ringweave.jobs.states import JobState
from ringweave.page import run_source
from ringweave.page.run_source import JobReader, RunSource
from ringweave.platforms.agent.agent_channel import AgentStatus
from ringweave.platforms.api import LogQuery
from ringweave.platforms.kubernetes import pod_logs
from ringweave.platforms.kubernetes.agent_main import EVENT_INTERVAL_S, GatewayChannel, GatewayClient
from ringweave.platforms.kubernetes.pod_logs import EVENT_LINE_PREFIX, LogTail
from ringweave.telemetry import EventLog
from ringweave.telemetry.run_metrics import RunMetrics
from tests.page.live_runs import training
from tests.platforms.kubernetes.pods import Place, place
from tests.platforms.kubernetes.test_post import CONFIG
from tests.telemetry.test_exporters import KeptEvents

__all__ = ["place"]


def test_an_agent_hands_new_events_on_by_its_pods_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    gateway = GatewayClient(url="http://127.0.0.1:9", group="a/b/0/1", token=str)
    channel = GatewayChannel(gateway, CONFIG, 0, home=tmp_path, clock=lambda: now_s)
    log = EventLog(tmp_path / "round-2" / "events.jsonl")
    log.path.parent.mkdir()
    channel.report_status(AgentStatus(round=2, phase=GroupPhase.RUNNING, pid=7))
    log.write("fault_lifted", fault="first")
    channel.wait_for_change(0.0)
    assert capsys.readouterr().out == "[ringweave] round 2\n", "not more often than so many seconds"
    now_s += EVENT_INTERVAL_S
    channel.wait_for_change(0.0)
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line.removeprefix(EVENT_LINE_PREFIX))["fault"] == "first"
    log.write("fault_lifted", fault="last")
    channel.report_status(AgentStatus(round=2, phase=GroupPhase.RUNNING, pid=7, iterations=3))
    assert '"last"' in capsys.readouterr().out, "before each report, so before the final one too"


def test_an_archived_log_keeps_a_quarter_of_its_room_for_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_logs, "MAX_LOG_BYTES", 400)
    log = LogTail()
    for number in range(100):
        log.add(f"[0] line {number:09}")  # 19 bytes with its end
        log.add(f"{EVENT_LINE_PREFIX}{number:02}")  # 21 bytes
    events = [line for line in log.lines if line.startswith(EVENT_LINE_PREFIX)]
    assert events == [f"{EVENT_LINE_PREFIX}{number}" for number in range(96, 100)]
    assert len(log.lines) - len(events) == 16
    assert log.lines[-2:] == ["[0] line 000000099", f"{EVENT_LINE_PREFIX}99"]
    few = LogTail()
    for number in range(100):
        few.add(f"[0] line {number:09}")
    assert len(few.lines) == 21, "and all of it without any; each is whole"


def test_the_log_of_a_pod_that_goes_has_its_events(tmp_path: Path) -> None:
    (tmp_path / "round-1" / "logs").mkdir(parents=True)
    (tmp_path / "round-1" / "logs" / "rank-0.log").write_text("hello\n")
    (tmp_path / "round-1" / "events.jsonl").write_text('{"kind": "x"}\n')
    lines = ["[ringweave] round 1", f'{EVENT_LINE_PREFIX}{{"kind": "x"}}', "[0] hello"]
    assert pod_logs.read_worker_logs(tmp_path) == lines


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_the_page_of_a_job_that_runs_and_is_over(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flag = tmp_path / "flag"
    (tmp_path / "train.py").write_text(training(str(flag)))
    nodes = (NodeRequest(name="n0", capacity=1), NodeRequest(name="n1", capacity=1))
    request = JobRequest(name="seen", num_workers=2, device="cpu", script="train.py", nodes=nodes, min_per_node=1)
    place.service.submit(request, base=tmp_path)
    monkeypatch.setattr(run_source, "STATE_INTERVAL_S", 0.0)
    source = RunSource(place.service, "seen")
    assert "no event of theirs has come yet. (kubectl -n default" in source.sections()["left_out"][0]
    source.follow_logs()

    def is_measured() -> bool:
        source.poll()
        rows = source.sections()["ranks"]["rows"]
        return len(rows) == 2 and all(row["step"] for row in rows)

    place.wait(is_measured)
    run = source.sections()
    metrics, exported = RunMetrics(), KeptEvents()
    exporting = threading.Thread(target=follow_run, args=(JobReader(place.service, "seen"), metrics, [exported]))
    exporting.start()
    place.wait(lambda: {event["rank"] for event in exported.seen if event["kind"] == "steps_measured"} == {0, 1})
    assert run["head"]["state"] == "Running"
    assert [(row["node"], row["state"]) for row in run["ranks"]["rows"]] == [("n0", "running"), ("n1", "running")]
    assert run["progress"]["total"] == 1_000_000
    tree = run["topology"]["tree"]["children"]
    assert [each["label"] for each in tree] == ["n0, 1 device, rank 0", "n1, 1 device, rank 1"]
    assert run["steps"]["waits"]["ranks"] == [0, 1]
    assert [row["source"] for row in run["logs"]["sources"]] == ["rank 0", "rank 1"]
    assert not any(EVENT_LINE_PREFIX in line.text for line in place.service.logs("seen", LogQuery()))
    assert all(line.is_event for line in place.service.logs("seen", LogQuery(events="only")))
    flag.touch()
    place.wait(lambda: place.service.job("seen").state is JobState.SUCCEEDED)
    report = RunSource(place.service, "seen")
    report.read_all()
    over = report.sections()
    exporting.join(60.0)
    assert len(exported.seen) == over["counts"]["events"]
    ranks = {str(row["rank"]): row["step"]["steps"] for row in over["ranks"]["rows"]}
    assert {rank: row["steps"] for rank, row in metrics.by_rank().items()} == ranks
    assert over["timeline"]["attempts"][0]["outcome"] == "done"
    assert over["progress"]["train_step"] >= run["progress"]["train_step"]
    assert over["counts"]["unread_text"] == ""
