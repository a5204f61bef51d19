"""Training modes on hosts, with real services on loopback addresses and real workers."""

import json
from pathlib import Path

import pytest

from tests.hosts.conftest import FakeHosts
from tests.launch.test_serving_runs import SCRIPT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def events_of(folder: Path) -> list[dict]:
    paths = sorted((folder / "hosts").rglob("events.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def run_in_mode(hosts: FakeHosts, mode: str) -> tuple[Path, str]:
    """Train three epochs of 130 samples on two hosts; return the run directory and what the command said."""
    folder = hosts.write_script(SCRIPT)
    done = hosts.run("run", "--hosts", "a:2,b:1", "--mode", mode, "--run-dir", "out", "train.py", timeout_s=300.0)
    assert done.returncode == 0, done.stderr
    sums = {line.split()[-1] for line in done.stdout.splitlines() if " sum " in line}
    assert len(sums) == 1  # all workers have the same parameters at the end
    return folder / "out", done.stderr


def test_rings_and_a_parameter_server(hosts: FakeHosts) -> None:
    folder, said = run_in_mode(hosts, "ps-hra")
    assert "ringweave: trained in mode ps-hra: " in said
    events = events_of(folder)
    assert {"server_started", "rings_formed", "server_exited"} <= {event["kind"] for event in events}
    counted = [event for event in events if event["kind"] == "params_counted"][-1]
    assert counted["samples"] == 390


@pytest.mark.parametrize("mode", ["balanced", "auto"])
def test_shares_and_the_planners_choice(hosts: FakeHosts, mode: str) -> None:
    folder, said = run_in_mode(hosts, mode)
    trained = json.loads((folder / "run.json").read_text())["training"]
    assert trained["exact"]
    assert mode in ("auto", trained["mode"])
    assert f"ringweave: trained in mode {trained['mode']}: " in said
    assert ". 390 samples in 3 epochs, each exactly once.\n" in said
