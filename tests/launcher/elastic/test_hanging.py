"""Members of a real run that are stopped for good."""

import json
import os
import signal

import pytest

from tests.launcher import until_back

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.mark.thorough
def test_where_the_first_of_two_hangs_for_good_the_job_goes_on_with_another_in_its_place(start, script) -> None:
    """The one that is left is no majority as long as the other may live: it waits a minute, and then ends the job."""
    run = start("--elastic", "1:2", "--workers", "2", "--mode", "sync", script(until_back.SCRIPT))
    run.wait_printed('"member": "0.0"', times=3)
    os.kill(run.pids()[0], signal.SIGSTOP)
    assert run.wait_ended() == 0, run.stderr + run.stdout
    exits = run.events("worker_exited")
    assert (exits[0]["rank"], exits[0]["signal"]) == (0, "SIGKILL")
    assert all(event["exit_code"] == 0 for event in exits[1:])
    said = [json.loads(line.partition(" ")[2]) for line in run.stdout.splitlines() if '"sum"' in line]
    assert {each["member"] for each in said} == {"0.1", "1.0"}, "the other one has lost nothing"
    assert len({each["sum"] for each in said}) == 1
