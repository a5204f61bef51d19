"""Signals that reach the service that a fault names, and nobody else."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringweave.benchmarks.chaos import faults
from ringweave.benchmarks.chaos.doing.crews import Crew
from ringweave.benchmarks.chaos.doing.hands import LabHands

SLEEP = [sys.executable, "-I", "-S", "-c", "import time; print(flush=True); time.sleep(1000)"]


class FakeCrew(Crew):
    """Has one process, which is the server that leads."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def worker_pid(self, rank: int) -> int | None:
        return None

    def service_pid(self, name: str) -> int | None:
        return self._pid if name == faults.SERVER else None


def running(argv: list[str]) -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # from then on it is what it was started as
        yield process
        process.kill()


@pytest.fixture
def server() -> Iterator["subprocess.Popen[bytes]"]:
    yield from running([*SLEEP, "ringweave.params.serving.main", "--index", "0"])


@pytest.fixture
def stranger() -> Iterator["subprocess.Popen[bytes]"]:
    yield from running(SLEEP)


def hands(pid: int, folder: Path) -> LabHands:
    lab = None  # nobody asks it
    return LabHands(lab, folder, folder / "events.jsonl", FakeCrew(pid))  # pyrefly: ignore


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]


def test_a_server_is_killed(server: "subprocess.Popen[bytes]", tmp_path: Path) -> None:
    (fault,) = faults.parse("at 3s kill server")
    begun = hands(server.pid, tmp_path).begin(fault)
    assert begun is not None
    target, lift = begun
    assert target == f"process {server.pid}"
    assert server.wait() == -signal.SIGKILL
    lift()


def test_a_server_stands_still_until_it_is_taken_back(server: "subprocess.Popen[bytes]", tmp_path: Path) -> None:
    (fault,) = faults.parse("at 3s pause server for 3s")
    begun = hands(server.pid, tmp_path).begin(fault)
    assert begun is not None
    while state(server.pid) != "T":
        assert server.poll() is None
    begun[1]()
    while state(server.pid) == "T":
        assert server.poll() is None


def test_what_is_not_there_is_not_hit_and_neither_is_a_stranger_with_its_id(
    stranger: "subprocess.Popen[bytes]", tmp_path: Path
) -> None:
    for line in ("at 3s kill server", "at 3s kill coordinator", "at 3s kill worker 0"):
        (fault,) = faults.parse(line)
        assert hands(stranger.pid, tmp_path).begin(fault) is None
    assert stranger.poll() is None


class FakeLab:
    """Has one link."""

    def __init__(self) -> None:
        self.now = 100.0

    def rate(self, _: str) -> float:
        return self.now

    def set_rate(self, _: str, rate_bytes_per_s: float) -> None:
        self.now = rate_bytes_per_s


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_link_that_two_faults_slow_has_its_rate_again_after_both(order: tuple[int, int], tmp_path: Path) -> None:
    lab, found = FakeLab(), faults.parse("at 3s slow a0->r0 to 400bit/s for 4s\nat 5s slow a0->r0 to 240bit/s for 4s")
    doing = LabHands(lab, tmp_path, tmp_path / "events.jsonl", FakeCrew(0))  # pyrefly: ignore - all that is asked of it
    for _ in range(2):
        lifts = [begun[1] for each in found if (begun := doing.begin(each))]
        assert lab.now == 30.0
        lifts[order[0]]()
        assert lab.now == (30.0 if order[0] == 0 else 50.0), "the other one's"
        lifts[order[1]]()
        assert lab.now == 100.0


def test_a_fault_that_slows_nothing_is_taken_back_as_well(tmp_path: Path) -> None:
    lab, (fault,) = FakeLab(), faults.parse("at 3s slow a0->r0 to 800bit/s for 4s")
    begun = LabHands(lab, tmp_path, tmp_path / "events.jsonl", FakeCrew(0)).begin(fault)  # pyrefly: ignore - likewise
    assert begun is not None
    begun[1]()
    assert lab.now == 100.0
