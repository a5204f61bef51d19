import json
from pathlib import Path

import pytest

from ringweave.cli import main
from ringweave.telemetry import EventLog

RACKS = Path("examples/clusters/two-racks.yaml")
NODES = [f"{rack}-{index}" for rack in "ab" for index in range(4)]


def measured(log: EventLog, **changes) -> None:
    fields = {
        "rank": 0,
        "group": "0",
        "schedule": "multi-level",
        "bytes": 25_000_000,
        "num_segments": 64,
        "lag": 1,
        "window": 8,
        "predicted_s": 1.0,
        "measured_s": 1.25,
        "rounds": 9,
    }
    log.write("schedule_measured", **fields | changes)


@pytest.fixture
def log(tmp_path: Path) -> EventLog:
    log = EventLog(tmp_path / "events.jsonl", clock=lambda: 1.0)
    log.write("run_started", attempt=1, command=["x"], cluster="two-racks", world_size=8)
    log.write("group_formed", rank=0, group="0", node="a-0", members=list(range(8)), nodes=NODES)
    return log


def test_predicted_beside_measured(log: EventLog, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cluster.yaml").write_text(RACKS.read_text())
    measured(log, measured_s=9.0, rounds=1)
    measured(log)
    measured(log, bytes=1_000_000, schedule="host", predicted_s=None, measured_s=0.1)
    assert main.call(["plan", "--run", str(tmp_path), "--json"]) == 0
    host, planned = json.loads(capsys.readouterr().out)["measured"]
    assert (planned["measured_s"], planned["rounds"], planned["measured_over_predicted"]) == (1.25, 9, 1.25)
    assert (planned["bound_s"], planned["fraction_of_bound"]) == (1.0, 0.8)
    assert (host["predicted_s"], host["measured_over_predicted"]) == (None, None)
    assert main.call(["plan", "--run", str(tmp_path)]) == 0
    title, first, second, *_ = capsys.readouterr().out.splitlines()
    assert title.startswith("group  schedule ")
    assert " ".join(first.split()) == "0 host 1MB 64 40 ms - 100 ms - 9"
    assert " ".join(second.split()) == "0 multi-level 25MB 64 1000 ms 1000 ms 1250 ms 1.25 9"


def test_without_a_cluster_file_there_is_no_bound(log: EventLog, tmp_path: Path, capsys) -> None:
    measured(log)
    assert main.call(["plan", "--run", str(tmp_path), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["measured"]
    assert (row["bound_s"], row["fraction_of_bound"]) == (None, None)


def test_only_the_last_attempt_counts(log: EventLog, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured(log)
    log.write("run_started", attempt=2, command=["x"], cluster="two-racks", world_size=8)
    assert main.call(["plan", "--run", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        "ringweave: error: measured collectives: 'none', expected at least one schedule_measured event. Let it run "
        f"longer, or train with more than the small messages that the host library takes. [{tmp_path}/events.jsonl]\n"
    )
