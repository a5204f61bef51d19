"""64 processes that submit one name at the same moment: what each of them says."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from ringweave.platforms import submission
from ringweave.platforms.local.platform import LocalPlatform
from tests.platforms.local.conftest import processes_of
from tests.polling import wait_until

TOGETHER = Path(__file__).parents[2] / "launcher" / "together.py"
REFUSAL = re.compile(
    r"ringweave: error: job name job: 'taken by \w+ \d+ s ago \(Suspended\)', expected a free name\. "
    r"Choose another name, or remove that job first with ringweave delete job\."
)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_of_64_processes_one_wins_and_63_are_refused(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("import time; time.sleep(100)")
    job = {"name": "job", "cpu_workers": 1, "min_per_node": 1, "script": "s.py", "nodes": [{"capacity": 1}]}
    (tmp_path / "job.yaml").write_text(json.dumps(job | {"suspend": True}))
    environ = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(TOGETHER), "64", "local", str(tmp_path / "job.yaml")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert Counter(each["code"] for each in told) == {0: 1, 2: 63}, told
    (winner,) = [each for each in told if each["code"] == 0]
    assert winner["out"] == "job: submitted. ringweave status job; ringweave logs -f job\n"
    refusals = {each["err"].splitlines()[-1] for each in told if each["code"] == 2}  # some had shown their plan by then
    assert all(REFUSAL.fullmatch(text) for text in refusals), refusals
    state = tmp_path / "home" / "ringweave"
    service = LocalPlatform(state, requester=submission.os_user(), environ=environ)
    assert [each.name for each in service.jobs()] == ["job"]
    service.act("job", "delete")
    wait_until(lambda: not processes_of(state), "the end of all processes")
    wait_until(lambda: not list((state / "jobs").glob("*")), "the end of all files")
