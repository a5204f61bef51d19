"""A run of rings that may lose members, whose servers and coordinators are killed, through the real command."""

import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from ringweave.param_server.leadership import FolderLeadershipLog, LeadershipRecord
from tests.launcher.conftest import Run
from tests.launcher.small_training import SUM, epoch, prepared
from tests.polling import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(1800)]

LIMIT_S = 600.0
"""Seven processes are started, six of which import torch: minutes where many others do so, too."""


def script_of(options: str = "") -> str:
    return f"""{prepared(num_samples=96, batch=32, lr=0.1, shuffles=True, options=options)}
for epoch in range(5):
{epoch(indent=4)}
    if epoch in (0, 2):
        pathlib.Path(f"waits-{{epoch}}-" + os.environ["RANK"]).touch()
        while not pathlib.Path(f"killed-{{epoch}}").exists():
            time.sleep(0.05)
{SUM}"""


def pid_of_server(run: Run, index: int) -> int:
    """They are started first in the order of their indices, and again at the same address."""
    started = run.events("server_started")
    return next(each["pid"] for each in reversed(started) if each["address"] == started[index]["address"])


def pid_of_coordinator(run: Run, index: int) -> int:
    for process in psutil.Process(run.process.pid).children(recursive=True):
        words = process.cmdline()
        if "ringweave.membership.main" in words and words[words.index("--index") + 1] == str(index):
            return process.pid
    raise AssertionError(f"no coordinator {index}")


def wait_whole(run: Run, folder: Path, number: int, after: int = -1) -> LeadershipRecord:
    """Until both workers wait after that epoch, and both servers have everything."""
    claims, found = FolderLeadershipLog(run.run_dir / "claims"), []

    def is_whole() -> bool:
        assert run.process.poll() is None, run.stderr
        newest = claims.latest()
        found[:] = [newest] if newest is not None and newest.number > after and len(newest.members) == 2 else []
        return bool(found) and all((folder / f"waits-{number}-{rank}").exists() for rank in range(2))

    wait_until(is_whole, "both servers have everything, both workers wait", LIMIT_S)
    return found[0]


def test_the_server_is_killed_and_then_it_and_the_coordinator_at_once(start, script, tmp_path: Path) -> None:
    run = start("--elastic", "1:2", "--workers", "2", "--mode", "ps-hra", "--standby", script(script_of()))
    first = wait_whole(run, tmp_path, 0)
    os.kill(pid_of_server(run, first.leader), signal.SIGKILL)
    (tmp_path / "killed-0").touch()
    second = wait_whole(run, tmp_path, 2, after=first.number)
    for pid in (pid_of_server(run, second.leader), pid_of_coordinator(run, 0)):
        os.kill(pid, signal.SIGKILL)
    (tmp_path / "killed-2").touch()
    assert run.process.wait(LIMIT_S) == 0, run.stderr
    assert second.term > first.term
    last = FolderLeadershipLog(run.run_dir / "claims").latest()
    assert last is not None
    assert last.term > second.term
    assert len({line.split()[-1] for line in run.stdout.splitlines() if "sum " in line}) == 1
    found = [(each["epoch"], each["samples"], each["exact"]) for each in run.events("samples_accounted")]
    assert found == [(number, 96, True) for number in range(5)], "no sample lost: no worker has died"
    counted = run.events("params_counted")[-1]
    assert counted["version"] >= 5 * 3, "a batch of all rings is at least one push"
    assert [each["signal"] for each in run.events("server_exited")].count("SIGKILL") == 2
    assert not [each for each in run.events("worker_exited") if each.get("exit_code") != 0]


@pytest.mark.thorough
def test_the_server_of_a_run_that_is_not_elastic_is_killed(start, script, tmp_path: Path) -> None:
    run = start("--workers", "2", "--mode", "ps-hra", "--standby", script(script_of()))
    first = wait_whole(run, tmp_path, 0)
    os.kill(pid_of_server(run, first.leader), signal.SIGKILL)
    for number in (0, 2):
        (tmp_path / f"killed-{number}").touch()
    assert run.process.wait(LIMIT_S) == 0, run.stderr
    last = FolderLeadershipLog(run.run_dir / "claims").latest()
    assert last is not None
    assert last.term > first.term, "and more than one, if a server stood still for longer than its lease"
    assert len({line.split()[-1] for line in run.stdout.splitlines() if "sum " in line}) == 1
    assert "pushes applied" in run.stderr
    found = [(each["epoch"], each["samples"], each["exact"]) for each in run.events("samples_accounted")]
    assert found == [(number, 96, True) for number in range(5)]
    assert "SIGKILL" in [each["signal"] for each in run.events("server_exited")]


@pytest.mark.thorough
@pytest.mark.parametrize(("rings", "goes_on"), [(1, r"1\.0"), (2, r"0\.[1-9]")])
def test_a_ring_goes_on_when_the_coordinator_is_killed_with_so_many_of_it_that_no_majority_is_left(
    start, script, tmp_path: Path, rings: int, goes_on: str
) -> None:
    """Of two the first one, or the only one."""
    given = script(script_of(f", asynchronous=ringweave.training.Asynchronous(rings={rings})"))
    run = start("--elastic", "1:2", "--workers", "2", "--mode", "ps-hra", given)
    waits = [tmp_path / f"waits-0-{slot}" for slot in range(2)]
    wait_until(lambda: all(each.exists() for each in waits), "both wait", LIMIT_S)
    before = len(run.events())
    for pid in (run.pids()[0], pid_of_coordinator(run, 0)):
        os.kill(pid, signal.SIGKILL)
    (tmp_path / "killed-0").touch()

    def has_gone_on() -> bool:
        alone = [each["members"][0] for each in run.events()[before:] if len(each.get("members", ())) == 1]
        return any(re.fullmatch(goes_on, str(member)) for member in alone)

    wait_until(has_gone_on, lambda: f"the ring goes on\n{run.stdout}{run.stderr}", LIMIT_S)
    (tmp_path / "killed-2").touch()
    assert run.process.wait(LIMIT_S) == 0, run.stderr
    accounted = {each["epoch"]: each["samples"] for each in run.events("samples_accounted")}
    assert accounted == dict.fromkeys(range(5), 96), "at the end of an epoch nothing is under way that could be lost"
    assert len({line.split()[-1] for line in run.stdout.splitlines() if "sum " in line}) == 1
