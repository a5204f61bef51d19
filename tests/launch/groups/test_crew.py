"""A crew of real processes: what is in the books when it ends."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ringweave.jobs.life.observing import Cause, Phase
from ringweave.launch.books import Books
from ringweave.launch.causes import Death
from ringweave.launch.groups import layout
from ringweave.launch.groups.config import Config, ConfigNode
from ringweave.launch.groups.crew import Crew, Outcome, conclude_elastic
from ringweave.launch.groups.posts import Opening
from ringweave.launch.groups.results import Results
from ringweave.launch.groups.serving import RoundServer
from ringweave.launch.launcher import Exit
from ringweave.launch.local import leftovers
from ringweave.launch.local.attendants import Post
from ringweave.launch.local.launcher import LocalLauncher
from ringweave.launch.local.merging import Console
from ringweave.launch.local.sites import ThisMachine
from ringweave.launch.run_dirs import RunDir
from ringweave.launch.serving import JobServer
from ringweave.launch.workers import Meeting, Program
from ringweave.membership.agent import SEARCH_S
from ringweave.membership.rules.follower import Out
from ringweave.training.elastic import seams
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


def death(said: str, *, signal_name: str | None = None, time_s: float = 1.0, rank: int = 2) -> Death:
    ended = Exit(exit_code=None if signal_name else 1, signal_name=signal_name, time_s=time_s, stopped=False)
    return Death(global_rank=rank, node="a", exit=ended, last_lines=("Traceback (most recent call last):", said))


def error(reason: str, *, is_end: bool, heir: str = "") -> str:
    """As the log of a worker has it."""
    found = seams.error_of(Out(reason=reason, is_end=is_end, heir=heir))
    return f"ringweave.errors.{type(found).__name__}: {found}"


@pytest.mark.parametrize(
    ("said", "phase", "cause"),
    [
        (error("all workers are done", is_end=True), Phase.SUCCEEDED, None),
        (error("no worker is left that has the parameters", is_end=True), Phase.INTERRUPTED, Cause.PEER),
        (error("workers left: 2", is_end=True, heir="0.0"), Phase.INTERRUPTED, Cause.PEER),
        (error(f"no coordinator within {SEARCH_S:g} s: refused", is_end=False), Phase.INTERRUPTED, Cause.PEER),
        (error("it was not heard of in time", is_end=False), Phase.FAILED, Cause.PLACE),
        ("ValueError: no", Phase.FAILED, Cause.PROGRAM),
        ("ConnectionResetError: peer", Phase.INTERRUPTED, Cause.PEER),
    ],
)
def test_what_a_member_was_told_says_whose_doing_its_end_is(said: str, phase: Phase, cause: Cause | None) -> None:
    outcome = conclude_elastic([death(said)])
    assert (outcome.phase, outcome.cause) == (phase, cause)


def test_a_member_that_was_killed_is_the_places_doing_whatever_the_others_say() -> None:
    over = death(error("all workers are done", is_end=True), time_s=0.5, rank=3)
    outcome = conclude_elastic([over, death("", signal_name="SIGKILL")])
    assert (outcome.phase, outcome.cause) == (Phase.FAILED, Cause.PLACE)
    assert conclude_elastic([]).phase is Phase.SUCCEEDED
