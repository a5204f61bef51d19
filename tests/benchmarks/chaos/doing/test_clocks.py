"""Clocks that jump: the wall clock of a process that has the library does, its monotonic one does not."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ringweave.errors import LabError
from ringweave_bench.chaos import clock_shift, fault_script

LOOK = """
import sys, time
from pathlib import Path
began_s, wall_s = time.monotonic(), time.time()
Path(sys.argv[1]).open("r+b").write(bytes.fromhex(sys.argv[2]))
time.sleep(0.01)
print(time.time() - wall_s - (time.monotonic() - began_s))
"""

WAIT = """
import sys, time
from datetime import timedelta
from pathlib import Path
import torch
from torch.distributed import FileStore, ProcessGroupGloo
file, shift, store, rank = sys.argv[1:]
gloo = ProcessGroupGloo(FileStore(store, 2), int(rank), 2, timedelta(seconds=30))
gloo.barrier().wait()
if rank == "1":
    sys.stdin.read()
else:
    Path(file).open("r+b").write(bytes.fromhex(shift))
    began_s = time.monotonic()
    try:
        gloo.recv([torch.empty(1)], 1, 1).wait(timedelta(milliseconds=200))
    except RuntimeError:
        print(time.monotonic() - began_s)
"""
"""The native backend waits by the wall clock, for a message that never comes."""


def loaded(folder: Path, file: Path) -> dict[str, str]:
    """What a process is started with whose clock goes by that file; the library is compiled into the folder."""
    return {**os.environ, "LD_PRELOAD": str(clock_shift.compile_library(folder)), "RINGWEAVE_CLOCK": str(file)}


def test_without_jumps_nothing_is_told(tmp_path: Path) -> None:
    lab = None  # nobody asks it
    assert clock_shift.clock_environ(fault_script.parse_faults("at 3s kill worker 0"), lab, tmp_path) == {}  # pyrefly: ignore


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
@pytest.mark.parametrize("shift_s", [7200.0, -86400.5])
def test_a_process_sees_its_wall_clock_jump_and_sleeps_as_before(tmp_path: Path, shift_s: float) -> None:
    file = tmp_path / "clock"
    file.write_bytes(clock_shift.shift_to_bytes(0.0))
    environ = loaded(tmp_path, file)
    said = subprocess.run(
        [sys.executable, "-c", LOOK, str(file), clock_shift.shift_to_bytes(shift_s).hex()],
        env=environ,
        check=True,
        capture_output=True,
        text=True,
    )
    assert float(said.stdout) == pytest.approx(shift_s, abs=60)
    assert said.stderr == ""


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
@pytest.mark.parametrize("shift_s", [pytest.param(3600.0, marks=pytest.mark.thorough), -3600.5])
def test_who_waits_until_a_moment_of_the_jumped_clock_waits_as_long_as_wanted(tmp_path: Path, shift_s: float) -> None:
    file = tmp_path / "clock"
    file.write_bytes(clock_shift.shift_to_bytes(0.0))
    environ = loaded(tmp_path, file)
    command = [
        sys.executable,
        "-c",
        WAIT,
        str(file),
        clock_shift.shift_to_bytes(shift_s).hex(),
        str(tmp_path / "store"),
    ]
    with subprocess.Popen([*command, "1"], env=environ, stdin=subprocess.PIPE) as silent:
        try:
            said = subprocess.run([*command, "0"], env=environ, check=True, capture_output=True, text=True, timeout=300)
        finally:
            silent.communicate()
    assert 0.2 <= float(said.stdout) < 20


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_a_process_without_the_file_has_the_clock_that_it_is(tmp_path: Path) -> None:
    environ = loaded(tmp_path, tmp_path / "none")
    look = [sys.executable, "-c", "import time; print(time.time())"]
    before_s = time.time()
    said = subprocess.run(look, env=environ, check=True, capture_output=True, text=True)
    assert before_s - 1 <= float(said.stdout) <= time.time() + 1


def test_a_machine_without_a_compiler_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    expected = (
        r"clocks that jump: 'no cc', expected a C compiler called cc\. Install a C compiler, or leave clock out\."
    )
    with pytest.raises(LabError, match=expected):
        clock_shift.compile_library(tmp_path)
