"""Runs whose disk takes nothing more: the training comes first, and what is written of it second."""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.launcher import until_back
from tests.launcher.conftest import Run
from tests.polling import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(900)]

FULL_BYTES = 2**20
UNTIL_GO = "while not os.path.exists('go'):\n    time.sleep(0.05)\n"
NO_RECORD = """
    os.mkdir(os.environ["RINGWEAVE_RUN_DIR"] + f"/.run.json.{os.getppid()}")
    print("through")
"""
"""Where the launcher writes its record, before that takes the place of the one that is there."""


def coordinators(run: Run) -> list[psutil.Process]:
    children = psutil.Process(run.process.pid).children()
    return [each for each in children if "ringweave.membership.main" in each.cmdline()]


def fill(events: Path, writers: list[psutil.Process]) -> None:
    """For these processes the event log ends here, as on a full disk: their own logs are far from that size."""
    with events.open("a") as log:
        log.write(json.dumps({"time": 0.0, "kind": "padding", "text": "x" * FULL_BYTES}) + "\n")
    for process in writers:
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (FULL_BYTES, FULL_BYTES))


@pytest.mark.thorough
def test_members_whom_no_event_tells_of_go_on_when_one_is_killed(start, script) -> None:
    run = start("--elastic", "1:2", "--workers", "2", "--mode", "sync", script(UNTIL_GO + until_back.SCRIPT))
    wait_until(lambda: len(coordinators(run)) == 2, "both coordinators")
    fill(run.run_dir / "events.jsonl", coordinators(run))
    (run.folder / "go").touch()
    run.wait_printed('"member": "1.0"', times=3)
    os.kill(run.pids()[1], signal.SIGKILL)
    starts_anew = "no worker had called ringweave.prepare"
    wait_until(lambda: run.process.poll() is not None or starts_anew in run.stderr, "its end")
    assert starts_anew not in run.stderr
    assert run.wait_ended() == 0, run.stderr + run.stdout
    assert "generation_begun" not in (run.run_dir / "events.jsonl").read_text()
    assert run.record["attempt"] == 1
    sums = {json.loads(line.partition(" ")[2])["sum"] for line in run.stdout.splitlines() if '"sum"' in line}
    assert len(sums) == 1, "the same parameters"


def test_a_run_that_was_good_has_been_good_though_its_record_cannot_be_written(start, script) -> None:
    run = start(script(NO_RECORD))
    assert run.wait_ended() == 0, run.stderr
    assert "[0] through" in run.stdout
    assert "ringweave: run.json could not be written: [Errno 21] Is a directory" in run.stderr
    assert "It lacks the outcome of the run: done, exit code 0." in run.stderr
    assert run.record["outcome"] == "running"


def test_a_run_that_has_failed_says_why_though_its_record_cannot_be_written(start, script) -> None:
    run = start(script(NO_RECORD + "    raise KeyError('no such layer')"))
    assert run.wait_ended() == 1
    assert "run.json could not be written" in run.stderr
    assert "rank 0 on node node0 raised KeyError: 'no such layer'." in run.stderr


def test_a_run_whose_words_go_to_a_full_disk_is_as_good_as_another(script, tmp_path: Path) -> None:
    cli = "from ringweave.cli.main import main; main()"
    command = [sys.executable, "-c", cli, "run", "--run-dir", "run", script("print('through', file=sys.stderr)")]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=full, check=False, timeout=300)
    assert done.returncode == 0
    assert (tmp_path / "run" / "logs" / "rank-0.log").read_text() == "through\n"
    assert json.loads((tmp_path / "run" / "run.json").read_text())["outcome"] == "done"
