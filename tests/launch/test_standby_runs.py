"""A run whose parameter server is killed while its standby has everything, through the real command."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ringweave.param_server.leadership import LeadershipRecord
from ringweave.param_server.leadership_log import FolderLeadershipLog
from tests.ending import ended
from tests.launch.conftest import wait_until
from tests.launch.small_training import SUM, epoch, prepared

TIMEOUT_S = 600.0
"""Five processes import torch: minutes where many others do so, too."""

SCRIPT = f"""{prepared(num_samples=96, batch=32, lr=0.1, shuffles=True)}
for epoch in range(3):
{epoch(indent=4)}
    if epoch == 0:
        pathlib.Path("waits-" + os.environ["RANK"]).touch()
        while not pathlib.Path("killed").exists():
            time.sleep(0.05)
{SUM}"""


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(3 * TIMEOUT_S)
def test_a_run_goes_on_when_its_parameter_server_is_killed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    argv = [sys.executable, "-m", "ringweave", "run", "--workers", "2", "--mode", "ps-hra", "--standby"]
    argv += ["--run-dir", "run", "train.py"]
    asked = subprocess.Popen(argv, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    claims = FolderLeadershipLog(tmp_path / "run" / "claims")
    before: LeadershipRecord | None = None

    def is_ready() -> bool:
        nonlocal before
        waiting = all((tmp_path / f"waits-{rank}").exists() for rank in range(2))
        before = claims.latest()
        return asked.poll() is not None or (waiting and before is not None and len(before.members) == 2)

    with ended(asked):
        wait_until(is_ready, "both servers have everything, both workers wait", TIMEOUT_S)
        assert asked.poll() is None, asked.communicate()
        assert before is not None
        os.kill(pid_of_server(tmp_path, before.leader), signal.SIGKILL)
        (tmp_path / "killed").touch()
        stdout, stderr = asked.communicate(timeout=TIMEOUT_S)
    assert asked.returncode == 0, stderr
    after = claims.latest()
    assert after is not None
    assert after.term > before.term, "and more than one, if a server stood still for longer than its lease"
    assert len({line.split()[-1] for line in stdout.splitlines() if "sum " in line}) == 1
    assert "pushes applied" in stderr
    accounts = [each for each in events(tmp_path) if each["kind"] == "samples_accounted"]
    assert [(each["epoch"], each["samples"], each["exact"]) for each in accounts] == [(n, 96, True) for n in range(3)]
    assert "SIGKILL" in [each["signal"] for each in events(tmp_path) if each["kind"] == "server_exited"]


def events(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]


def pid_of_server(folder: Path, index: int) -> int:
    """They are started first in the order of their indices, and again at the same address."""
    started = [each for each in events(folder) if each["kind"] == "server_started"]
    return next(each["pid"] for each in reversed(started) if each["address"] == started[index]["address"])
