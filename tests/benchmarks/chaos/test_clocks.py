"""Clocks that jump: what the job is started with, and that it is refused where the library is not there."""

from pathlib import Path

import pytest

from ringweave.benchmarks.chaos import clocks, faults
from ringweave.errors import LabError

JUMP = faults.parse("at 3s clock a0 by 3600s for 20s")


def test_without_jumps_nothing_is_told() -> None:
    assert clocks.environ(faults.parse("at 3s kill worker 0")) == {}


def test_with_jumps_the_library_is_loaded_and_the_monotonic_clock_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "x86_64-linux-gnu" / "faketime" / "libfaketimeMT.so.1"
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.setattr(clocks, "_PLACES", (tmp_path,))
    told = clocks.environ(JUMP)
    assert told["LD_PRELOAD"] == str(library)
    assert told["FAKETIME_DONT_FAKE_MONOTONIC"] == "1"


def test_a_machine_without_the_library_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "_PLACES", (tmp_path,))
    expected = r"clocks that jump: 'no libfaketime', expected libfaketimeMT\.so\.1 below .*\. Install it \(Debian: libf"
    with pytest.raises(LabError, match=expected):
        clocks.environ(JUMP)
