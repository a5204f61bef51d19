"""`up` cut short at every point, by real signals; another `up`, or `down`, clears it away."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ringweave import lab, topology
from ringweave.errors import LabError
from ringweave.lab import lab_state, tools

pytestmark = pytest.mark.slow

CLUSTER = """
name: cut
nodes:
  - {name: a, switch: r, nic: 1Gbit/s, devices: [{kind: cpu}, {kind: cpu, speed: 0.5}]}
switches: [{name: r, uplink: 1Gbit/s}]
"""
WRAPPER = """#!/bin/sh
if [ "$PPID" = "$UP_PID" ]; then
    echo "$0" >> "$CALLS"
    if [ "$(wc -l < "$CALLS")" -eq "$CUT_AT" ]; then kill -s "$CUT_BY" "$UP_PID"; fi
fi
exec {program} "$@"
"""
"""Stands before each program that `up` calls. At the call of the given number it first kills `up`, then does its work
all the same, as a child that outlives its parent does."""


@pytest.fixture
def cut_up(lab_name: str, tmp_path: Path) -> Callable[[int, str], subprocess.CompletedProcess[str]]:
    """`cut_up(3, "KILL")`: `ringweave lab up`, or `down`, sent a signal when it calls its third program."""
    folder = tmp_path / "programs"
    folder.mkdir()
    for name in set(tools.DEBIAN_PACKAGES) - {"sh"}:
        (folder / name).write_text(WRAPPER.replace("{program}", tools.find_program(name) or name))
        (folder / name).chmod(0o755)
    (tmp_path / "cut.yaml").write_text(CLUSTER)
    main = "from ringweave.cli.main import main; main()"
    verbs = {"up": ["up", str(tmp_path / "cut.yaml"), "--name", lab_name], "down": ["down", "--lab", lab_name]}
    calls = tmp_path / "calls"

    def cut(at: int, by: str, verb: str = "up") -> subprocess.CompletedProcess[str]:
        calls.unlink(missing_ok=True)
        environ = {
            **os.environ,
            "PATH": f"{folder}:{os.environ['PATH']}",
            "CALLS": str(calls),
            "CUT_AT": str(at),
            "CUT_BY": by,
        }
        start = ["sh", "-c", 'UP_PID=$$ exec "$@"', "start", sys.executable, "-c", main, "lab", *verbs[verb]]
        done = subprocess.run(start, env=environ, capture_output=True, text=True, check=False, timeout=300)
        assert len(calls.read_text().splitlines()) >= at or done.returncode == 0, "was never cut"
        return done

    return cut


def num_calls(tmp_path: Path) -> int:
    return len((tmp_path / "calls").read_text().splitlines())


def test_killed_at_every_point_and_brought_up_again(cut_up, left_of, lab_name: str, tmp_path: Path) -> None:
    cluster = topology.loads(CLUSTER)
    at = 1
    while (done := cut_up(at, "KILL")).returncode != 0:
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert not lab.is_up(lab_name)
        if at % 2:
            again = lab.up(cluster, lab_name)
            subprocess.run(again.command("a", ["true"]), check=True)
            assert set(again.bytes_on_links()) == {link.name for link in cluster.links()}
        lab.down(lab_name)
        assert left_of(lab_name) == []
        at += 1
    assert at == num_calls(tmp_path) + 1 > 10, "one cut before each call"


def test_down_is_killed_at_every_point_and_done_again(cut_up, left_of, lab_name: str, tmp_path: Path) -> None:
    at, done = 1, None
    while done is None or done.returncode != 0:
        made = lab.up(topology.loads(CLUSTER), lab_name)
        with subprocess.Popen(made.command("a", ["sleep", "300"])) as inside:
            done = cut_up(at, "KILL", "down")
            assert inside.wait(timeout=300) < 0, "ended by a signal"
        assert not lab.is_up(lab_name)
        assert lab.down(lab_name) == (done.returncode != 0)
        assert left_of(lab_name) == []
        at += 1
    assert at > 3, done.stderr


@pytest.mark.parametrize("at", [3, 8])
def test_an_interrupted_up_leaves_nothing(cut_up, left_of, lab_name: str, at: int) -> None:
    done = cut_up(at, "INT")
    assert done.returncode == 1, done.stderr
    assert "ringweave: error: interrupted\n" in done.stderr
    assert left_of(lab_name) == []


def test_a_program_that_fails_leaves_nothing(left_of, lab_name: str, tmp_path: Path, monkeypatch) -> None:
    fake = tmp_path / "tc"
    fake.write_text(f'#!{shutil.which("sh")}\necho "no room" >&2\nexit 1\n')
    fake.chmod(0o755)
    monkeypatch.setattr(tools, "lab_problems", lambda *, needs_quotas: [])
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(LabError, match="command of the lab: 'no room', expected tc to succeed"):
        lab.up(topology.loads(CLUSTER), lab_name)
    assert left_of(lab_name) == []


def test_two_at_once_give_one_lab(lab_name: str, tmp_path: Path) -> None:
    (tmp_path / "cut.yaml").write_text(CLUSTER)
    main = "from ringweave.cli.main import main; main()"
    command = [sys.executable, "-c", main, "lab", "up", str(tmp_path / "cut.yaml"), "--name", lab_name]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=300)[1] for process in both]
    assert sorted(process.returncode for process in both) == [0, 1], said
    refusals = ("expected one that no lab has", "expected one that no other command works on")
    assert any(refusal in text for text in said for refusal in refusals)
    assert lab.is_up(lab_name)


def test_what_a_deleted_record_would_have_told_is_found_all_the_same(left_of, lab_name: str) -> None:
    lab.up(topology.loads(CLUSTER), lab_name)
    (lab_state.lab_folder(lab_name) / "lab.json").unlink()
    assert not lab.is_up(lab_name)
    assert lab.down(lab_name)
    assert left_of(lab_name) == []
