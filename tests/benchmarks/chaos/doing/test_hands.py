"""Faults reach what they name and nobody else, have happened when they did, and end when all of their kind are over."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ringweave_bench.chaos import clock_shift, fault_injector, fault_script, kill_requests
from ringweave_bench.chaos.fault_injector import LabFaultInjector, ProcessTable

SLEEP = [sys.executable, "-I", "-S", "-c", "import time; print(flush=True); time.sleep(1000)"]


class FakeCrew(ProcessTable):
    """Has one process, which is the server that leads."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def worker_pid(self, rank: int) -> int | None:
        return None

    def service_pid(self, name: str) -> int | None:
        return self._pid if name == fault_script.SERVER else None


def running(argv: list[str]) -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # from then on it is what it was started as
        yield process
        process.kill()


@pytest.fixture
def server() -> Iterator["subprocess.Popen[bytes]"]:
    yield from running([*SLEEP, "ringweave.param_server.main", "--index", "0"])


@pytest.fixture
def stranger() -> Iterator["subprocess.Popen[bytes]"]:
    yield from running(SLEEP)


def hands(pid: int, folder: Path) -> LabFaultInjector:
    lab = None  # nobody asks it
    return LabFaultInjector(lab, folder, folder / "events.jsonl", FakeCrew(pid))  # pyrefly: ignore


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]


def test_a_server_is_killed(server: "subprocess.Popen[bytes]", tmp_path: Path) -> None:
    (fault,) = fault_script.parse_faults("at 3s kill server")
    begun = hands(server.pid, tmp_path).inject(fault)
    assert begun is not None
    target, lift = begun
    assert target == f"process {server.pid}"
    assert server.wait() == -signal.SIGKILL
    lift()


def test_a_server_stands_still_until_it_is_taken_back(server: "subprocess.Popen[bytes]", tmp_path: Path) -> None:
    (fault,) = fault_script.parse_faults("at 3s pause server for 3s")
    begun = hands(server.pid, tmp_path).inject(fault)
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
        (fault,) = fault_script.parse_faults(line)
        assert hands(stranger.pid, tmp_path).inject(fault) is None
    assert stranger.poll() is None


class FakeLab:
    """Has one link and one node."""

    def __init__(self) -> None:
        self.now, self.way = 100.0, ""

    def rate(self, _: str) -> float:
        return self.now

    def set_rate(self, _: str, rate_bytes_per_s: float) -> None:
        self.now = rate_bytes_per_s

    def cut(self, _: str, way: str) -> None:
        self.way = way

    def reconnect(self, _: str) -> None:
        self.way = ""


def doing_in(lab: FakeLab, folder: Path) -> LabFaultInjector:
    return LabFaultInjector(lab, folder, folder / "events.jsonl", FakeCrew(0))  # pyrefly: ignore - all that is asked of it


def begun(doing: LabFaultInjector, text: str) -> list[Callable[[], None]]:
    """What takes each fault of a script back."""
    found = [doing.inject(each) for each in fault_script.parse_faults(text)]
    return [each[1] for each in found if each is not None]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_link_that_two_faults_slow_has_its_rate_again_after_both(order: tuple[int, int], tmp_path: Path) -> None:
    lab, found = (
        FakeLab(),
        fault_script.parse_faults("at 3s slow a0->r0 to 400bit/s for 4s\nat 5s slow a0->r0 to 240bit/s for 4s"),
    )
    doing = LabFaultInjector(lab, tmp_path, tmp_path / "events.jsonl", FakeCrew(0))  # pyrefly: ignore - all that is asked of it
    for _ in range(2):
        lifts = [begun[1] for each in found if (begun := doing.inject(each))]
        assert lab.now == 30.0
        lifts[order[0]]()
        assert lab.now == (30.0 if order[0] == 0 else 50.0), "the other one's"
        lifts[order[1]]()
        assert lab.now == 100.0


def test_a_fault_that_slows_nothing_is_taken_back_as_well(tmp_path: Path) -> None:
    lab, (fault,) = FakeLab(), fault_script.parse_faults("at 3s slow a0->r0 to 800bit/s for 4s")
    begun = LabFaultInjector(lab, tmp_path, tmp_path / "events.jsonl", FakeCrew(0)).inject(fault)  # pyrefly: ignore - likewise
    assert begun is not None
    begun[1]()
    assert lab.now == 100.0


@pytest.mark.parametrize(
    ("ways", "together", "left"),
    [
        (("", ""), "both", ["both", "both"]),
        (("in", "in"), "in", ["in", "in"]),
        (("in", "out"), "both", ["out", "in"]),
        (("", "in"), "both", ["in", "both"]),
    ],
)
def test_a_node_that_two_faults_cut_off_stays_so_until_both_are_over(
    ways: tuple[str, str], together: str, left: list[str], tmp_path: Path
) -> None:
    lab = FakeLab()
    text = "".join(f"at {at}s cut a {way} for 4s\n" for at, way in enumerate(ways, start=3)).replace("  ", " ")
    for first in (0, 1):
        lifts = begun(doing_in(lab, tmp_path), text)
        assert lab.way == together
        lifts[first]()
        assert lab.way == left[first], "as the other one wants it"
        lifts[1 - first]()
        assert lab.way == ""


def test_a_clock_that_two_faults_move_is_right_again_after_both(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said: list[float] = []
    monkeypatch.setattr(clock_shift, "shift_clock", lambda _lab, _node, shift_s: said.append(shift_s))
    first, second = begun(doing_in(FakeLab(), tmp_path), "at 3s clock a by -3600s for 4s\nat 4s clock a by 60s for 4s")
    first()
    second()
    assert said == [-3600.0, 60.0, 60.0, 0.0]


def test_a_disk_that_two_faults_fill_is_full_until_both_are_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ballast = tmp_path / fault_injector._BALLAST
    monkeypatch.setattr(fault_injector, "fill_disk", lambda _: ballast.touch())
    first, second = begun(doing_in(FakeLab(), tmp_path), "at 3s fill disk for 4s\nat 4s fill disk for 4s")
    first()
    assert ballast.exists()
    second()
    assert not ballast.exists()


def test_faults_of_different_targets_do_not_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said: list[tuple[str, float]] = []
    monkeypatch.setattr(clock_shift, "shift_clock", lambda _lab, node, shift_s: said.append((node, shift_s)))
    first, _ = begun(doing_in(FakeLab(), tmp_path), "at 3s clock a by 60s for 4s\nat 4s clock b by 60s for 4s")
    first()
    assert said[-1] == ("a", 0.0)


def test_a_process_that_two_faults_stop_goes_on_after_both(server: "subprocess.Popen[bytes]", tmp_path: Path) -> None:
    first, second = begun(hands(server.pid, tmp_path), "at 3s pause server for 3s\nat 4s pause server for 3s")
    while state(server.pid) != "T":
        assert server.poll() is None
    first()
    assert state(server.pid) == "T"
    second()
    while state(server.pid) == "T":
        assert server.poll() is None


class Workers(ProcessTable):
    """Each rank has the process that the test says; which of them live is the test's too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pids: dict[int, int] = {}
        self.alive: set[int] = set()
        monkeypatch.setattr(fault_injector, "_is_job_pid", self.alive.__contains__)

    def start(self, rank: int, pid: int) -> None:
        self.pids[rank] = pid
        self.alive.add(pid)

    def worker_pid(self, rank: int) -> int | None:
        return self.pids.get(rank)

    def service_pid(self, name: str) -> int | None:
        return None


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Workers:
    return Workers(monkeypatch)


def hurting(workers: Workers, folder: Path) -> LabFaultInjector:
    lab = None  # nobody asks it
    return LabFaultInjector(lab, folder, folder / "events.jsonl", workers)  # pyrefly: ignore


def die(workers: Workers, folder: Path, rank: int, reached: str) -> None:
    """The worker finds its note and does as it says, or ends without a word."""
    pid, note = workers.pids[rank], kill_requests.kill_request_path(folder / "events.jsonl", rank)
    if reached:
        kill_requests.take_kill_request(note, pid)
        kill_requests.confirm_kill(note, pid, reached)
    workers.alive.remove(pid)


@pytest.mark.parametrize("reached", ["bucket 2", "commit"])
def test_a_kill_at_a_moment_has_happened_when_its_victim_has_said_at_which(
    reached: str, workers: Workers, tmp_path: Path
) -> None:
    (fault,) = fault_script.parse_faults("at 3s kill worker 1 during bucket 2")
    doing = hurting(workers, tmp_path)
    assert doing.inject(fault) is None, "there is no such worker yet"
    workers.start(1, 70)
    assert [doing.inject(fault) for _ in range(2)] == [None, None], "it lives"
    assert kill_requests.kill_request_path(tmp_path / "events.jsonl", 1).read_text() == "70 bucket 2"
    die(workers, tmp_path, 1, reached)
    found = doing.inject(fault)
    assert found is not None
    assert found[0] == f"process 70 during {reached}"


def test_a_process_that_is_gone_for_another_reason_was_not_killed_at_a_moment(workers: Workers, tmp_path: Path) -> None:
    (fault,) = fault_script.parse_faults("at 3s kill worker 1 during commit")
    doing = hurting(workers, tmp_path)
    workers.start(1, 70)
    doing.inject(fault)
    die(workers, tmp_path, 1, "")
    assert doing.inject(fault) is None
    workers.start(1, 71)
    assert doing.inject(fault) is None
    die(workers, tmp_path, 1, "commit")
    found = doing.inject(fault)
    assert found is not None
    assert found[0] == "process 71 during commit", "the one that came after it"


def test_one_death_is_not_the_doing_of_two_faults(workers: Workers, tmp_path: Path) -> None:
    first, second = fault_script.parse_faults("at 3s kill worker 1 during commit\nat 4s kill worker 1 during forward")
    doing = hurting(workers, tmp_path)
    workers.start(1, 70)
    assert [doing.inject(each) for each in (first, second)] == [None, None]
    assert kill_requests.kill_request_path(tmp_path / "events.jsonl", 1).read_text() == "70 commit", (
        "the second one waits"
    )
    die(workers, tmp_path, 1, "commit")
    assert doing.inject(first) is not None
    assert doing.inject(second) is None
    workers.start(1, 71)
    assert doing.inject(second) is None
    die(workers, tmp_path, 1, "forward")
    assert doing.inject(second) is not None
