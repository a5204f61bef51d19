"""The verbs of jobs on plain runs: `ringweave status RUN_DIR` and others, on runs of real workers."""

import json
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.distributed

WAIT = """
    import time
    print("rank", os.environ["RANK"], "waits", flush=True)
    time.sleep(600)
"""


def ringweave(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "ringweave", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def view(path: object) -> dict:
    done = ringweave("status", str(path), "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_run_is_seen_and_stopped_by_its_run_directory(start, script) -> None:
    run = start("--workers", "2,1", script(WAIT))
    run.wait_printed("waits", 3)
    path = str(run.run_dir)
    seen = view(path)
    assert (seen["state"], seen["workers"], seen["platform"]) == ("Running", 3, "runs")
    assert [(node["name"], node["workers"]) for node in seen["nodes"]] == [("node0", 2), ("node1", 1)]
    assert ringweave("why", path).stdout == f"{path} is Running: no reason to wait.\n"
    assert sorted(ringweave("logs", path).stdout.splitlines()) == [f"[{rank}] rank {rank} waits" for rank in range(3)]
    assert ringweave("logs", path, "--rank", "2").stdout == "[2] rank 2 waits\n"
    assert "worker_started" in ringweave("events", path).stdout
    refused = ringweave("suspend", path)
    assert refused.returncode == 2
    assert "'a run without a job', expected stop. Submit a job for that" in refused.stderr
    assert ringweave("stop", path).returncode == 0
    assert run.wait_ended() == 1
    assert view(path)["state"] == "Stopped"
    refused = ringweave("stop", path)
    assert (refused.returncode, refused.stderr) == (
        2,
        f"ringweave: error: run {path}: 'ended', expected one that runs. Nothing to do.\n",
    )


def test_ends_of_runs(start, script) -> None:
    done = start("--workers", "1", script("print('fine')"))
    assert done.wait_ended() == 0
    assert view(done.run_dir)["state"] == "Succeeded"
    killed = start("--workers", "1", script(WAIT))
    killed.wait_printed("waits")
    killed.process.send_signal(signal.SIGKILL)
    killed.process.wait()
    seen = view(killed.run_dir)
    assert seen["state"] == "Failed"
    assert seen["reason"]["text"] == "its command was killed, and the workers ended with it"


def test_a_folder_of_something_else_is_named(tmp_path) -> None:
    (tmp_path / "run.json").write_text("[]")
    refused = ringweave("status", str(tmp_path))
    assert refused.returncode == 2
    assert f"run.json of {tmp_path}: 'another file', expected the record of a run." in refused.stderr
    refused = ringweave("status", "nothing", "--on", "runs")
    assert "run: 'nothing', expected a folder with a run.json. Give the path of its run directory" in refused.stderr
