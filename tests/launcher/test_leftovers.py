"""What comes from this process is ended, except processes of other owners."""

import subprocess
import sys
from collections.abc import Callable, Iterator

import psutil
import pytest

from ringweave.launcher import processes
from tests.launcher.conftest import is_gone
from tests.polling import wait_until

PARENT = """
import signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import signal; signal.pause()"])
print(child.pid, flush=True)
signal.pause()
"""


@pytest.fixture
def start() -> Iterator[Callable[[], tuple[int, int]]]:
    """Begins a process that has begun another one; the ids of both."""
    started: list[subprocess.Popen[str]] = []
    found: list[psutil.Process] = []

    def begin() -> tuple[int, int]:
        argv = [sys.executable, "-I", "-S", "-c", PARENT]
        started.append(subprocess.Popen(argv, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout is not None
        child = int(started[-1].stdout.readline())
        found.extend((psutil.Process(started[-1].pid), psutil.Process(child)))
        return started[-1].pid, child

    yield begin
    for process in found:
        if process.is_running():
            process.kill()
    for each in started:
        each.communicate()


def test_others_are_left_alone_with_all_that_comes_from_them(start: Callable[[], tuple[int, int]]) -> None:
    before = processes.descendants()
    ours, others = start(), start()
    left = processes.end_descendants(
        before, exit_s=0.0, term_s=100.0, is_other=lambda process: process.pid == others[0]
    )
    assert left == []
    # Where nobody adopts orphans the second one may outlive its parent by a moment, unseen from here.
    wait_until(lambda: all(map(is_gone, ours)), f"the end of {ours}")
    assert [is_gone(pid) for pid in others] == [False, False]


def test_who_has_ended_before_it_is_known_is_nobody_elses(start: Callable[[], tuple[int, int]]) -> None:
    before = processes.descendants()
    ours = start()

    def is_other(process: psutil.Process) -> bool:
        raise psutil.NoSuchProcess(process.pid)

    assert {process.pid for process in processes.descendants(is_other) - before} == set(ours)
