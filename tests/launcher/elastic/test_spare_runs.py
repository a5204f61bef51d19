"""`ringweave run --elastic --spares`, with real kills."""

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.launcher.conftest import ringweave
from tests.launcher.until_back import SCRIPT
from tests.polling import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SLEEPS = """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # so that a spare imports nothing
    print("started" + chr(10), end="", flush=True)
    time.sleep(600)
"""


def wait_ready(run, number: int) -> list[int]:
    wait_until(lambda: len(run.events("spare_ready")) >= number or run.process.poll() is not None, "a spare")
    return [event["pid"] for event in run.events("spare_ready")]


@pytest.mark.slow
def test_a_spare_replaces_a_killed_worker_and_the_parameters_are_alike(start, tmp_path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    run = start("--elastic", "1:2", "--workers", "2", "--spares", "1", "--mode", "sync", path)
    (spare,) = wait_ready(run, 1)
    run.wait_printed('"step"', 2)
    victim = run.pids()[1]
    os.kill(victim, signal.SIGKILL)
    assert run.wait_ended() == 0, run.stderr + run.stdout
    (used,) = run.events("spare_used")
    assert (used["rank"], used["member"]) == (1, "1.1")
    assert used["pid"] not in (victim, spare), "the spare forks it, and stays"
    assert used["waited_s"] >= 0
    started = [event["pid"] for event in run.events("worker_started") if event["rank"] == 1]
    assert started == [victim, used["pid"]]
    (exit_time,) = [event["time"] for event in run.events("worker_exited") if event["signal"]]
    said = [
        json.loads(line.partition(" ")[2]) for line in run.stdout.splitlines() if line.startswith(("[0] {", "[1] {"))
    ]
    assert any(each["member"] == "1.1" and "step" in each for each in said)
    assert len({each["sum"] for each in said if "sum" in each}) == 1
    assert used["time"] >= exit_time
    assert "step" in run.log(1)
    assert (run.record["spares"], run.record["outcome"]) == (1, "done")
    all_pids = {event["pid"] for kind in ("worker_started", "spare_ready") for event in run.events(kind)}
    assert not [pid for pid in all_pids if psutil.pid_exists(pid)], "nothing is left"
    assert not [each for each in psutil.process_iter(["cmdline"]) if str(path) in (each.info["cmdline"] or [])]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_spares_end_with_the_run_however_it_ends(start, script, all_gone, how: signal.Signals) -> None:
    run = start("--elastic", "1:1", "--workers", "1", "--spares", "2", script(SLEEPS))
    pids = wait_ready(run, 1)
    run.wait_printed("started")
    run.process.send_signal(how)
    assert run.wait_ended() != 0
    all_gone([*pids, *run.pids().values()])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["--spares", "1"],
            "--spares: 'no --elastic', expected an elastic run. Add --elastic MIN:MAX, or leave --spares",
        ),
        (["--spares", "65", "--elastic", "1:1"], "65 is not in the range 0<=x<=64"),
    ],
)
def test_what_cannot_be_is_refused(script, tmp_path: Path, arguments: list[str], text: str) -> None:
    run = ringweave("run", "--run-dir", tmp_path / "run", *arguments, script("pass"))
    assert run.returncode == 2
    assert text in " ".join(run.stderr.split())


def test_a_command_has_no_spares(tmp_path: Path) -> None:
    run = ringweave("run", "--run-dir", tmp_path / "run", "--elastic", "1:1", "--spares", "1", "--", "hostname")
    assert run.returncode == 2
    assert (
        "--spares: 'the command hostname after --', expected a Python script or module, which a spare runs"
        in run.stderr
    )
