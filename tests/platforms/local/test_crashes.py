"""The supervisor is killed with SIGKILL at every boundary of a job's life, and the end is the same."""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import effort

CRASHING = Path(__file__).with_name("crashing.py")
ACTIONS = {
    "SaveRecord",
    "CreateConfig",
    "CreateGroup",
    "RestartGroup",
    "ReleaseBarrier",
    "DeleteGroup",
    "DeleteConfig",
    "ForgetJob",
}
INSIDE = {
    "folder created",
    "desired state written",
    "barrier released",
    "told to leave",
    "marked for removal",
    "rendezvous removed",
    "files removed",
}


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What all lives of a kind have in common."""

    outcome: str
    retries: list[int]
    begun: set[tuple[int, int]]
    """(node, attempt) of the groups that begin, each once."""
    actions: set[str]


REPLACED = {(0, 1), (1, 1), (1, 2)}
AGAIN = REPLACED | {(0, 2), (1, 3)}
STOPPING = ACTIONS | {"StopGroup"}
LIVES = {
    "ends": Wanted(outcome="Succeeded", retries=[0, 1], begun=REPLACED, actions=ACTIONS),
    "asked": Wanted(outcome="Stopped", retries=[0, 1], begun=AGAIN, actions=STOPPING),
    "fails": Wanted(outcome="Failed", retries=[0, 0], begun=AGAIN, actions=STOPPING),
}
DAILY = "ends"
DAILY_STEP = 4
"""Of every day's boundaries only each fourth; `--all-crashes` takes all."""


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("life", LIVES)
def test_every_boundary(tmp_path: Path, life: str, request: pytest.FixtureRequest) -> None:
    effort.only_one_daily(request, life, DAILY)
    step = 1 if request.config.getoption("--all-crashes") else DAILY_STEP
    done = subprocess.run(
        [sys.executable, str(CRASHING), str(tmp_path), life, str(step)], capture_output=True, text=True, check=False
    )
    wanted = LIVES[life]
    assert done.returncode == 0, done.stderr
    lives = [json.loads(line) for line in done.stdout.splitlines()]
    assert [life["crash_at"] for life in lives[1:]] == lives[0]["boundaries"][::step]
    boundaries = {boundary.partition("#")[0] for boundary in lives[0]["boundaries"]}
    assert boundaries == {f"{when} {name}" for name in wanted.actions for when in ("before", "after")} | INSIDE
    # How often these two are asked for depends on what is seen between two looks; all else is the same in every life.
    missed = {life["crash_at"] for life in lives[1:] if not life["has_crashed"]}
    assert all(boundary.partition("#")[0].endswith(("SaveRecord", "RestartGroup")) for boundary in missed), missed
    for each in lives:
        end = {key: each[key] for key in ("processes", "files", "is_forgotten", "outcome", "retries")}
        is_gone = {"processes": 0, "files": [], "is_forgotten": True}
        assert end == {**is_gone, "outcome": wanted.outcome, "retries": wanted.retries}, each
        check_ledger(each["ledger"], wanted.begun)


def check_ledger(lines: list[str], wanted: set[tuple[int, int]]) -> None:
    """No attempt began twice, none ran beside another of its node, and no node ran before all were ready."""
    notes = [(what, int(node), int(attempt), int(round_)) for what, node, attempt, round_ in map(str.split, lines)]
    begun = Counter((node, attempt) for what, node, attempt, _ in notes if what == "begin")
    assert begun == dict.fromkeys(wanted, 1), lines
    living: set[int] = set()
    ready: dict[int, set[int]] = {}
    for what, node, _, round_ in notes:
        if what == "begin":
            assert node not in living, lines
            living.add(node)
        elif what == "end":
            living.remove(node)
        elif what == "ready":
            ready.setdefault(round_, set()).add(node)
        else:
            assert ready[round_] == {0, 1}, lines
