"""A crew of real processes: what is in the books when it ends."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ringweave.jobs.life.observing import Cause, Phase
from ringweave.launch.books import Books
from ringweave.launch.groups import layout
from ringweave.launch.groups.config import Config, ConfigNode
from ringweave.launch.groups.crew import Crew, Outcome
from ringweave.launch.groups.posts import Opening
from ringweave.launch.groups.results import Results
from ringweave.launch.groups.serving import RoundServer
from ringweave.launch.local import leftovers
from ringweave.launch.local.attendants import Post
from ringweave.launch.local.launcher import LocalLauncher
from ringweave.launch.local.merging import Console
from ringweave.launch.local.sites import ThisMachine
from ringweave.launch.run_dirs import RunDir
from ringweave.launch.serving import JobServer
from ringweave.launch.workers import Meeting, Program
from ringweave.wire import Authority
from tests.launch.conftest import wait_until

CONFIG = Config(
    job="job", device="cpu", mode="ps-hra", nodes=(ConfigNode(index=0, name="a", workers=1),), script="s.py"
)


class StaysForEver(ThisMachine):
    """Has something in the place of a parameter server that only a signal ends."""

    def enter_node(self, node: str, argv: Sequence[str]) -> Sequence[str]:
        return [sys.executable, "-I", "-S", "-c", "import signal; signal.pause()"]


def test_a_server_that_outlives_a_round_that_failed_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "adopt_orphans", lambda: None)  # this process has other tests to run
    run_dir = RunDir(root=tmp_path / "round-1")
    (run_dir.root / "logs").mkdir(parents=True)
    (tmp_path / "s.py").write_text("raise SystemExit(3)")
    meeting = Meeting(host="127.0.0.1", port=9)
    program = Program(target=str(tmp_path / "s.py"))
    opening = Opening(round=1, meeting=meeting, server=meeting)
    group = layout.workers_of(CONFIG, 0, opening, run_dir=run_dir, program=program, python=sys.executable, cpus=1)
    record = {"attempt": 1, "command": ["s.py"], "world_size": 1, "cluster": {"name": "job"}}
    launcher = LocalLauncher(run_dir.log, Console({}, os.environ), os.environ)
    server = JobServer([Post(node="a", meeting=meeting)], StaysForEver(), run_dir, Authority("job"))
    crew = Crew(
        group, launcher, Books(run_dir, group, record), Results(run_dir.events), RoundServer(server, os.environ)
    )
    found: list[Outcome | None] = []

    def is_over() -> bool:
        found.append(crew.look())
        return found[-1] is not None

    wait_until(is_over, "the end of the round")
    assert found[-1] == Outcome(
        phase=Phase.FAILED, cause=Cause.PROGRAM, exit_code=3, text="rank 0 ended with exit code 3"
    )
    events = [json.loads(line) for line in run_dir.events.read_text().splitlines()]
    (ended,) = [event for event in events if event["kind"] == "server_exited"]
    assert (ended["exit_code"], ended["signal"], ended["stopped"]) == (None, "SIGTERM", True)
