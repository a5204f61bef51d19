import errno
import os
import signal
import subprocess
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from ringweave import environment
from ringweave.errors import LaunchError
from ringweave.launcher import processes
from ringweave.launcher.output import OutputConsole, WorkerStream
from ringweave.launcher.processes import LocalLauncher
from ringweave.launcher.workers import WorkerExit, WorkerGroup, WorkerSpec
from tests.launcher.conftest import is_gone
from tests.polling import wait_until


def test_the_last_words_of_an_ended_worker_are_waited_for(tmp_path: Path, monkeypatch) -> None:
    """The thread that reads pipes may come late, where the end of a process is seen at once."""
    feed = WorkerStream.feed

    def feed_late(stream: WorkerStream, received: bytes) -> None:
        if received:
            time.sleep(0.5)
        feed(stream, received)

    monkeypatch.setattr(processes, "adopt_orphans", lambda: None)  # this process has other tests to run
    monkeypatch.setattr(WorkerStream, "feed", feed_late)
    worker = WorkerSpec(global_rank=0, local_rank=0, node="a", environ={})
    with LocalLauncher(lambda rank: tmp_path / f"{rank}.log", OutputConsole({}, os.environ), os.environ) as launcher:
        launcher.start(WorkerGroup(argv=("sh", "-c", "echo no room; exit 3"), workers=(worker,)))
        while (ended := launcher.observe()[0].exit) is None:
            time.sleep(0.01)
        assert ended.exit_code == 3
        assert launcher.logs(0, 1) == ["no room"]


@pytest.fixture
def begin(tmp_path: Path, monkeypatch) -> Callable[..., LocalLauncher]:
    """`begin("sh", "-c", ..)`: a launcher that is not started, and the group of one worker that runs this."""
    monkeypatch.setattr(processes, "adopt_orphans", lambda: None)  # this process has other tests to run
    (tmp_path / "logs").mkdir()
    return lambda: LocalLauncher(
        lambda rank: tmp_path / "logs" / f"{rank}.log", OutputConsole({}, os.environ), os.environ
    )


def group(*argv: str, **environ: str) -> WorkerGroup:
    return WorkerGroup(argv=argv, workers=(WorkerSpec(global_rank=0, local_rank=0, node="a", environ=environ),))


def wait_ended(launcher: LocalLauncher) -> WorkerExit:
    wait_until(lambda: launcher.observe()[0].exit is not None, "its end")
    ended = launcher.observe()[0].exit
    assert ended is not None
    return ended


def num_open() -> int:
    """Descriptors of this process."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def again(launcher: LocalLauncher, started: WorkerGroup) -> WorkerExit:
    launcher.restart(started.workers[0], started.argv)
    return wait_ended(launcher)


def test_a_worker_that_is_started_again_and_again_costs_no_descriptor(begin) -> None:
    talks = group("sh", "-c", "echo once more; exit 3")
    with begin() as launcher:
        launcher.start(talks)
        wait_ended(launcher)
        again(launcher, talks)
        launcher.logs(0, 1)
        before = num_open()
        for _ in range(5):
            again(launcher, talks)
            assert launcher.logs(0, 100)[-1] == "once more"
        assert num_open() <= before
        assert launcher.logs(0, 100) == ["once more"] * 7, "one log for all of them"


def test_where_no_file_can_be_opened_any_more_a_worker_is_started_again_all_the_same(begin, tmp_path: Path) -> None:
    """A run directory that has become read-only, or was removed: what is open already takes what it prints."""
    fails = group("sh", "-c", "exit 3")
    with begin() as launcher:
        launcher.start(fails)
        wait_ended(launcher)
        (tmp_path / "logs").rename(tmp_path / "away")
        assert again(launcher, fails).exit_code == 3
        assert launcher.logs(0, 10) == [], "and that there is none is no error"


def test_a_worker_whose_log_cannot_be_opened_is_not_started(begin, tmp_path: Path) -> None:
    (tmp_path / "logs").rmdir()
    with begin() as launcher, pytest.raises(LaunchError, match=r"worker 0 could not be started: .*No such file"):
        launcher.start(group("true"))


def test_a_worker_that_could_not_be_started_again_has_ended_until_it_can(begin, monkeypatch) -> None:
    """Nothing is left of the process before it, whose number a stranger may have by now."""
    fails, popen = group("sh", "-c", "exit 3"), subprocess.Popen

    def no_room(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    with begin() as launcher:
        launcher.start(fails)
        wait_ended(launcher)
        monkeypatch.setattr(subprocess, "Popen", no_room)
        with pytest.raises(LaunchError, match=r"^worker 0 could not be started: .*unavailable\. \[sh\]"):
            launcher.restart(fails.workers[0], fails.argv)
        assert wait_ended(launcher).exit_code == 3
        with monkeypatch.context() as patched:
            patched.setattr(os, "killpg", lambda pid, how: pytest.fail(f"{how.name} to {pid}, whoever has it by now"))
            launcher.stop(signal.SIGTERM)
        monkeypatch.setattr(subprocess, "Popen", popen)
        assert again(launcher, group("sh", "-c", "exit 4")).exit_code == 4


def test_of_a_long_log_only_the_end_is_read(begin, tmp_path: Path) -> None:
    with begin() as launcher:
        launcher.start(group("true"))
        wait_ended(launcher)
        with (tmp_path / "logs" / "0.log").open("wb") as log:
            log.truncate(64 * 2**20)
            log.seek(0, os.SEEK_END)
            log.write(b"\nlast but one\nlast\n")
        tracemalloc.start()
        try:
            assert launcher.logs(0, 2) == ["last but one", "last"]
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak_bytes < 2**20


PARENT = "sleep 1000 > /dev/null 2>&1 & echo $!; trap 'exit 143' TERM; echo up; while :; do wait; done"


@pytest.mark.parametrize("is_member", [True, False])
def test_who_is_to_finish_its_step_keeps_what_it_has_started_as_long_as_it_runs(begin, is_member: bool) -> None:
    """A member's loader would fail in the midst of a step if its processes got the signal as well."""
    with begin() as launcher:
        launcher.start(group("bash", "-c", PARENT, **({environment.MEMBER: "0.0"} if is_member else {})))
        wait_until(lambda: "up" in launcher.logs(0, 2), "both")
        child = int(launcher.logs(0, 2)[0])
        launcher.stop(signal.SIGTERM)
        assert wait_ended(launcher).exit_code == 143
        if is_member:
            assert not is_gone(child)
            launcher.stop(signal.SIGTERM)
        wait_until(lambda: is_gone(child), "the end of all")


def test_what_a_member_has_started_is_killed_with_it(begin) -> None:
    with begin() as launcher:
        launcher.start(group("bash", "-c", PARENT, **{environment.MEMBER: "0.0"}))
        wait_until(lambda: "up" in launcher.logs(0, 2), "both")
        child = int(launcher.logs(0, 2)[0])
        launcher.stop(signal.SIGKILL)
        wait_until(lambda: is_gone(child), "the end of all")
