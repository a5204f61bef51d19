import json
from pathlib import Path

import pytest

from ringweave import topology
from ringweave.cli import main
from ringweave.telemetry import EVENTS_FORMAT, EventLog
from ringweave.topology import Cluster, Device, Nic, Node

RACKS = Path("examples/clusters/two-racks.yaml")
STARTED = {"format": EVENTS_FORMAT, "command": ["x"], "cluster": "two-racks", "world_size": 8, "cluster_text": ""}
NODES = [f"{rack}-{index}" for rack in "ab" for index in range(4)]


def measured(log: EventLog, **changes) -> None:
    fields = {
        "rank": 0,
        "group": "0",
        "version": 1,
        "collective": "allreduce",
        "schedule": "multi-level",
        "bytes": 25_000_000,
        "num_segments": 64,
        "lag": 1,
        "window": 8,
        "ahead": None,
        "predicted_s": 1.0,
        "wire": "exact",
        "measured_s": 1.25,
        "rounds": 9,
    }
    log.write("schedule_measured", **fields | changes)


@pytest.fixture
def log(tmp_path: Path) -> EventLog:
    log = EventLog(tmp_path / "events.jsonl", clock=lambda: 1.0)
    log.write("run_started", **STARTED, attempt=1)
    log.write("group_formed", rank=0, group="0", node="a-0", members=list(range(8)), nodes=NODES)
    return log


def test_predicted_beside_measured(log: EventLog, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cluster.yaml").write_text(RACKS.read_text())
    measured(log, measured_s=9.0, rounds=1)
    measured(log)
    measured(log, bytes=1_000_000, schedule="native", predicted_s=None, measured_s=0.1)
    measured(log, collective="broadcast", predicted_s=1.0, measured_s=2.0)
    assert main.run_command_line(["plan", "--run", str(tmp_path), "--json"]) == 0
    planned, native, broadcast = json.loads(capsys.readouterr().out)["measured"]
    assert (planned["measured_s"], planned["rounds"], planned["measured_over_predicted"]) == (1.25, 9, 1.25)
    assert (planned["bound_s"], planned["fraction_of_bound"]) == (1.0, 0.8)
    assert (native["predicted_s"], native["measured_over_predicted"]) == (None, None)
    assert main.run_command_line(["plan", "--run", str(tmp_path)]) == 0
    assert (broadcast["bound_s"], broadcast["fraction_of_bound"]) == (1.0, 0.5)
    title, first, second, *_ = capsys.readouterr().out.splitlines()
    assert title.startswith("group  plan  collective  schedule ")
    assert " ".join(first.split()) == "0 1 allreduce multi-level 25MB 64 1000 ms 1000 ms 1250 ms 1.25 9"
    assert " ".join(second.split()) == "0 1 allreduce native 1MB 64 40 ms - 100 ms - 9"


def test_without_a_cluster_file_there_is_no_bound(log: EventLog, tmp_path: Path, capsys) -> None:
    measured(log)
    assert main.run_command_line(["plan", "--run", str(tmp_path), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["measured"]
    assert (row["bound_s"], row["fraction_of_bound"]) == (None, None)


def plan_made(log: EventLog, version: int, bound_s_per_byte: float) -> None:
    fields = {"rank": 0, "group": "0", "rates": {}, "binding": "cut: some"}
    log.write("plan_made", **fields, version=version, bound_s_per_byte=bound_s_per_byte)


def test_plans_are_kept_apart_each_with_its_own_bound(log: EventLog, tmp_path: Path, capsys) -> None:
    """The old plan is measured once more after the new one, as where links are given back."""
    plan_made(log, 1, 4e-8)
    plan_made(log, 2, 6.4e-8)
    measured(log, version=2, measured_s=2.0, rounds=50)
    measured(log, version=1, measured_s=1.25, rounds=3)
    assert main.run_command_line(["plan", "--run", str(tmp_path), "--json"]) == 0
    old, new = json.loads(capsys.readouterr().out)["measured"]
    assert (old["version"], old["rounds"], old["measured_s"]) == (1, 3, 1.25)
    assert (new["version"], new["rounds"], new["measured_s"]) == (2, 50, 2.0)
    assert (old["bound_s"], new["bound_s"]) == (pytest.approx(1.0), pytest.approx(1.6))
    assert new["fraction_of_bound"] == pytest.approx(0.8)


def test_the_bound_of_the_plan_goes_before_that_of_the_file(log: EventLog, tmp_path: Path, capsys) -> None:
    (tmp_path / "cluster.yaml").write_text(RACKS.read_text())
    plan_made(log, 1, 8e-8)
    measured(log)
    assert main.run_command_line(["plan", "--run", str(tmp_path), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["measured"]
    assert row["bound_s"] == pytest.approx(2.0)


def test_only_the_last_attempt_counts(log: EventLog, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured(log)
    log.write("run_started", **STARTED, attempt=2)
    assert main.run_command_line(["plan", "--run", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        "ringweave: error: measured collectives: 'none', expected at least one schedule_measured event. Let it run "
        f"longer, or train with more than the small messages that the native backend takes. [{tmp_path}/events.jsonl]\n"
    )


def test_measured_links_of_a_run_on_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "hosts" / "n0" / "n0" / "1" / "round-1"
    folder.mkdir(parents=True)
    nics = {"n0": "lo", "join-1": "relay"}
    nodes = [
        Node(name=name, devices=(Device(),), nics=(Nic(name=nic, rate_bytes_per_s=1.25e8),))
        for name, nic in nics.items()
    ]
    (folder / "cluster.yaml").write_text(topology.dumps(Cluster(name="train", nodes=tuple(nodes))))
    log = EventLog(folder / "events.jsonl", clock=lambda: 1.0)
    log.write("run_started", **STARTED, attempt=1)
    rates = {"n0->core": 1.2e8, "join-1->core": 2.5e7}
    found = {"nodes": ["n0", "join-1"], "switches": ["core"], "rates": rates, "slow": None, "not_searched": None}
    log.write("network_measured", rank=0, group="0", **found, wall_s=0.8, age_s=0.0)
    assert main.run_command_line(["plan", "--run", str(tmp_path)]) == 0
    links = "join-1->core by relay 200Mbit/s, n0->core 960Mbit/s"
    assert capsys.readouterr().out.strip() == f"links    of group 0, measured by probing: {links}"
    assert main.run_command_line(["plan", "--run", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["measured"], document["networks"][0]["rates"]) == ([], rates)
