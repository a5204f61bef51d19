"""The supervisor is killed with SIGKILL at every boundary of a job's life, and the end is the same."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

CRASHING = Path(__file__).with_name("crashing.py")
ACTIONS = ("SaveRecord", "CreateConfig", "CreateGroup", "Regather", "OpenGate", "DeleteGroup", "DeleteConfig", "Forget")
INSIDE = {"folder made", "orders written", "gate opened", "marked for removal", "gate removed", "files removed"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_boundary(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(CRASHING), str(tmp_path), "ends"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lives = [json.loads(line) for line in done.stdout.splitlines()]
    boundaries = {life["crash_at"].partition("#")[0] for life in lives if life["has_crashed"]}
    assert boundaries == {f"{when} {name}" for name in ACTIONS for when in ("before", "after")} | INSIDE
    # How often these two are asked for depends on what is seen between two looks; all else is the same in every life.
    missed = {life["crash_at"] for life in lives[1:] if not life["has_crashed"]}
    assert all(boundary.partition("#")[0].endswith(("SaveRecord", "Regather")) for boundary in missed), missed
    for life in lives:
        end = {key: life[key] for key in ("processes", "files", "is_forgotten", "outcome", "retries")}
        wanted = {"processes": 0, "files": [], "is_forgotten": True, "outcome": "Succeeded", "retries": [0, 1]}
        assert end == wanted, life
        check_ledger(life["ledger"])


def check_ledger(lines: list[str]) -> None:
    """No attempt began twice, none ran beside another of its node, and no node ran before all were ready."""
    notes = [(what, int(node), int(attempt), int(round_)) for what, node, attempt, round_ in map(str.split, lines)]
    begun = Counter((node, attempt) for what, node, attempt, _ in notes if what == "begin")
    assert begun == {(0, 1): 1, (1, 1): 1, (1, 2): 1}, lines
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
