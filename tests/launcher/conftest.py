"""Real runs of real worker processes, and what is needed to look at them."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from ringweave.cli.main import run_command_line
from ringweave.telemetry import Event, read_events
from tests.lab import fixtures
from tests.polling import DEADLINE_S, wait_until

lab_name, lab_problems = fixtures.lab_name, fixtures.lab_problems

_CLI = "from ringweave.cli.main import main; main()"


@dataclass
class Run:
    """A `ringweave run` in progress; its output goes to files, so nobody has to read it."""

    process: subprocess.Popen[bytes]
    folder: Path

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    @property
    def stdout(self) -> str:
        return (self.folder / "stdout").read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text(errors="replace")

    @property
    def record(self) -> dict:
        return json.loads((self.run_dir / "run.json").read_text())

    def log(self, rank: int) -> str:
        return (self.run_dir / "logs" / f"rank-{rank}.log").read_text(errors="replace")

    def events(self, kind: str = "") -> list[Event]:
        """Events of the log, of one kind if it is named."""
        return [each for each in read_events(self.run_dir / "events.jsonl") if kind in ("", each["kind"])]

    def pids(self) -> dict[int, int]:
        """Rank -> pid of the workers, as the event log has them."""
        return {event["rank"]: event["pid"] for event in self.events("worker_started")}

    def wait_printed(self, text: str, times: int = 1) -> None:
        wait_until(lambda: self.stdout.count(text) >= times, f"{text!r} {times} times in {self.stdout!r}")

    def wait_ended(self) -> int:
        return self.process.wait(timeout=DEADLINE_S)


def ringweave(*words: object) -> "subprocess.CompletedProcess[str]":
    """Run a verb in this process, where all that it imports is there already."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = run_command_line(list(map(str, words)))
    return subprocess.CompletedProcess(words, code, out.getvalue(), errors.getvalue())


def is_gone(pid: int) -> bool:
    """Ended, even if whoever inherited it has not collected it yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def all_gone() -> Callable[[list[int]], None]:
    return lambda pids: wait_until(lambda: all(map(is_gone, pids)), f"the end of {pids}")


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(
            "import os, signal, subprocess, sys, time\nrank = int(os.environ['RANK'])\n" + textwrap.dedent(text)
        )
        return path

    return write


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """`start("--workers", "4", script)`: a run with its run directory in tmp_path; ended with the test."""
    runs: list[Run] = []

    def begin(*arguments: object, verb: Sequence[str] = ("run",), program: str = _CLI, **environ: str) -> Run:
        command = [sys.executable, "-c", program, *verb, "--run-dir", tmp_path / "run", *map(str, arguments)]
        inherited = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
        with (tmp_path / "stdout").open("wb") as out, (tmp_path / "stderr").open("wb") as err:
            process = subprocess.Popen(command, stdout=out, stderr=err, cwd=tmp_path, env=inherited | environ)
        runs.append(Run(process, tmp_path))
        return runs[-1]

    yield begin
    for run in runs:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.process.wait(timeout=60)
            run.process.kill()
        run.process.wait()
