"""When faults begin, are taken back, and the job is started again: on a clock that only the test moves."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ringweave import lab, telemetry, topology
from ringweave.errors import LabError, LaunchError
from ringweave.telemetry import EventLog
from ringweave_bench.chaos import chaos_session, fault_script
from ringweave_bench.chaos.chaos_session import ChaosPlan
from ringweave_bench.chaos.fault_injector import FaultInjector
from ringweave_bench.chaos.fault_script import Fault


class World:
    """A clock, a job whose attempts end when they are told to, and hands that note what they do."""

    def __init__(self, out: Path, ends: list[tuple[float, int]]) -> None:
        self.now_s, self.first_step_s = 100.0, 103.0
        self.log = EventLog(out / "events.jsonl", clock=lambda: self.now_s)
        self.said: list[str] = []
        self._ends = ends
        self.attempts: list[Attempt] = []

    def start(self) -> "Attempt":
        end_s, code = self._ends.pop(0) if self._ends else (float("inf"), 0)
        self.attempts.append(Attempt(self, end_s, code))
        self.note("start")
        return self.attempts[-1]

    def sleep(self, seconds: float) -> None:
        self.now_s += 0.5
        if self.now_s == self.first_step_s:
            self.log.write("train_step_done", rank=0, steps_since_start=1)

    def note(self, what: str) -> None:
        self.said.append(f"{self.now_s - self.first_step_s:g} {what}")


class Attempt:
    def __init__(self, world: World, end_s: float, code: int) -> None:
        self._world, self._end_s, self._code, self.was_stopped = world, end_s, code, False

    def exit_code(self) -> int | None:
        return self._code if self._world.now_s - self._world.first_step_s >= self._end_s else None

    def stop(self) -> None:
        self.was_stopped = True


class FakeHands(FaultInjector):
    def __init__(self, world: World, absent_until_s: float = 0.0) -> None:
        self._world, self._absent_until_s = world, absent_until_s

    def inject(self, fault: Fault) -> tuple[str, Callable[[], None]] | None:
        if self._world.now_s - self._world.first_step_s < self._absent_until_s:
            return None
        self._world.note(fault.kind)
        return "target", lambda: self._world.note(f"no {fault.kind}")


def play(
    out: Path, script: str, ends: list[tuple[float, int]], absent_until_s: float = 0.0, **settings: float
) -> World:
    world = World(out, ends)
    plan = ChaosPlan(system="ringweave", script=["x.py"], faults=fault_script.parse_faults(script), out=out, **settings)
    does = FakeHands(world, absent_until_s)
    chaos_session.play_faults(
        plan, world.start, does, world.log, lambda text: None, clock=lambda: world.now_s, sleep=world.sleep
    )
    return world


def outcomes(out: Path) -> list[str]:
    return [event["outcome"] for event in telemetry.read_events(out / "events.jsonl") if event["kind"] == "chaos_ended"]


def test_faults_begin_and_end_in_their_time_after_the_first_step(tmp_path: Path) -> None:
    script = "at 5s pause worker 1 for 3s\nat 6s cut a for 10s\nat 7s kill worker 0"
    world = play(tmp_path, script, [], until_s=30.0)
    assert world.said == ["-3 start", "5 pause", "6 cut", "7 kill", "7.5 no kill", "8 no pause", "16 no cut"]
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert kinds.count("fault_begun") == kinds.count("fault_lifted") == 3
    assert outcomes(tmp_path) == ["stopped"]
    assert world.attempts[-1].was_stopped


def test_a_failed_attempt_is_followed_by_another_one(tmp_path: Path) -> None:
    world = play(tmp_path, "at 50s kill worker 0", [(4.0, 1), (20.0, 137), (25.0, 0)], until_s=100.0, restart_s=3.0)
    assert world.said == ["-3 start", "7 start", "23 start"]
    assert len(world.attempts) == 3


def test_a_job_that_is_done_ends_it_all_and_what_lasts_is_taken_back(tmp_path: Path) -> None:
    world = play(tmp_path, "at 5s cut a for 100s\nat 50s kill worker 0", [(10.0, 0)], until_s=100.0)
    assert world.said == ["-3 start", "5 cut", "10 no cut"]
    assert outcomes(tmp_path) == ["done"]


def test_a_fault_whose_worker_is_not_there_waits_for_it(tmp_path: Path) -> None:
    world = play(tmp_path, "at 5s kill worker 0", [(20.0, 0)], absent_until_s=8.0)
    assert world.said == ["-3 start", "8 kill", "8.5 no kill"]


def test_a_job_that_makes_no_step_is_given_up(tmp_path: Path) -> None:
    expected = (
        r"job under chaos: 'no train step after 2 s', expected train steps\. Run it without chaos first; the job's own"
    )
    with pytest.raises(LaunchError, match=expected):
        play(tmp_path, "at 5s kill worker 0", [], start_s=2.0)


def test_a_job_that_was_not_understood_is_not_tried_again_and_its_last_words_are_shown(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text("usage: ringweave lab run\nError: no such option: --elstic\n")
    expected = (
        r"job under chaos: 'it has ended with 2 before any train step', expected train steps\. Run it without chaos "
        r"first; .*job\.log\]\n    usage: ringweave lab run\n    Error: no such option: --elstic$"
    )
    with pytest.raises(LaunchError, match=expected):
        play(tmp_path, "at 5s kill worker 0", [(-1.0, 2)])


def test_a_job_that_goes_wrong_again_and_again_before_its_first_step_is_given_up(tmp_path: Path) -> None:
    expected = r"'it has ended with 1 3 times before any train step', expected train steps\."
    with pytest.raises(LaunchError, match=expected):
        play(tmp_path, "at 5s kill worker 0", [(-2.5, 1), (-2.0, 1), (-1.0, 1)])


def test_a_job_that_fails_twice_before_its_first_step_gets_another_chance(tmp_path: Path) -> None:
    world = play(tmp_path, "", [(-2.5, 1), (-2.0, 1), (9.0, 0)])
    assert len(world.attempts) == 3


def test_wrong_usage_ends_it_later_on_as_well(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"'it has ended with 2', expected train steps"):
        play(tmp_path, "", [(4.0, 2)])
    assert outcomes(tmp_path) == ["failed"]


def test_without_a_lab_it_is_said_before_anything_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "lab_problems", lambda: ["user: 1000, expected root. Put sudo in front. [lab]"])
    out = tmp_path / "out"
    plan = ChaosPlan(system="ringweave", script=["x.py"], faults=(), out=out)
    with pytest.raises(LabError, match=r"user: 1000, expected root\. Put sudo in front"):
        chaos_session.run_chaos(
            plan, topology.loads("name: x\nnodes: [{name: a, nic: 1Gbit/s, devices: 1}]\n"), lambda text: None
        )
    assert not out.exists()
