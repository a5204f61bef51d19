"""A run with a parameter server, through the real command."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher import kept_secrets
from tests.launcher.small_training import SUM, epoch, prepared

TIMEOUT_S = 600.0
"""Five processes import torch: two minutes where the machine has a load of thirty."""

SCRIPT = f"""{prepared(num_samples=130, batch=32, lr=0.1, shuffles=True)}
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
for _ in range(3):
{epoch(indent=4)}
    schedule.step()
{SUM}"""


def run(folder: Path, script: str, *options: str) -> "subprocess.CompletedProcess[str]":
    (folder / "train.py").write_text(script)
    argv = [sys.executable, "-m", "ringweave", "run", *options, "--run-dir", str(folder / "run"), "train.py"]
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_a_run_in_rings(tmp_path):
    done = run(tmp_path, kept_secrets.TELLS + SCRIPT, "--workers", "3", "--mode", "ps-hra")
    assert done.returncode == 0, done.stderr
    sums = {line.split()[-1] for line in done.stdout.splitlines() if " sum " in line}
    assert len(sums) == 1  # all rings have the same parameters at the end of an epoch
    assert "pushes applied" in done.stderr
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["server"]["node"] == "node0"
    assert (record["training"]["mode"], record["training"]["exact"]) == ("ps-hra", True)
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    kinds = [event["kind"] for event in events]
    assert {"server_started", "rings_formed", "server_exited"} <= set(kinds)
    counted = [event for event in events if event["kind"] == "params_counted"][-1]
    formed = [event for event in events if event["kind"] == "rings_formed"]  # several if the machine was busy
    assert counted["samples"] == 390
    # Two, unless the machine was so busy that speeds differed.
    assert 2 <= counted["most_peers"] <= max(len(event["rings"]) for event in formed)
    assert set(counted["rpc"]) == set(counted["pushes"])
    assert all(each["calls"] > 0 and each["latency_mean_s"] > 0 for each in counted["rpc"].values())
    names = {"run.json", "events.jsonl", "server.log", "rank-0.log"}
    kept_secrets.check_none(tmp_path / "run", tmp_path / "secrets", num_told=3, names=names)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_every_worker_may_be_a_ring(tmp_path):
    done = run(tmp_path, SCRIPT, "--workers", "2", "--mode", "ps")
    assert done.returncode == 0, done.stderr
    assert len({line.split()[-1] for line in done.stdout.splitlines() if " sum " in line}) == 1
    assert "ringweave: trained in mode ps: " in done.stderr
    assert ". 390 samples in 3 epochs, each exactly once.\n" in done.stderr
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    (formed,) = (event for event in events if event["kind"] == "rings_formed")
    assert formed["rings"] == [[0], [1]]
    counted = [event for event in events if event["kind"] == "params_counted"][-1]
    assert (counted["samples"], counted["most_peers"]) == (390, 2)
    assert max(map(int, counted["staleness"])) <= formed["most_staleness_versions"]


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize("workers", ["2", pytest.param("1,1", marks=pytest.mark.thorough)])
def test_the_mode_may_be_left_to_the_planner(tmp_path, workers):
    """Workers of one node have no server, and nothing is open; on two nodes there is one, and modes are rehearsed."""
    done = run(tmp_path, SCRIPT, "--workers", workers, "--mode", "auto")
    assert done.returncode == 0, done.stderr
    training = json.loads((tmp_path / "run" / "run.json").read_text())["training"]
    assert (training["requested_mode"], training["exact"]) == ("auto", True)
    assert ("(measured)" in training["reason"]) is ("," in workers)
    said = f"ringweave: trained in mode {training['mode']}: {training['reason'].rstrip('.')}. 390 samples in 3 epochs"
    assert said in done.stderr


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_without_a_server_the_script_says_how_to_get_one(tmp_path):
    done = run(tmp_path, prepared(options=', mode="ps"'), "--workers", "1")
    assert done.returncode == 1
    assert "parameter server: 'none in this run', expected one that the launcher has started." in done.stderr
