"""The stand-in for CPU quotas, on virtual clocks and processes."""

import os
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringweave.errors import LabError
from ringweave.lab import lab_state, user_namespace
from ringweave.lab.user_namespace import PERIOD_S, DeviceBudget, ProcessScan, Throttle

DEVICE, OTHER = (4, 100), (4, 200)


class Machine:
    """Processes that compute whenever they are not stopped, on a virtual clock."""

    def __init__(self, members: Mapping[tuple[int, int], list[int]], quotas: dict[tuple[int, int], int]) -> None:
        self.members, self.quotas = members, quotas
        self.now_s = 0.0
        self.used_s = {pid: 5.0 for pids in members.values() for pid in pids}
        self.stopped: set[int] = set()
        self.sent: list[tuple[int, signal.Signals]] = []
        self.throttle = Throttle(lambda: self.members, lambda: self.quotas, self.send, self.used_s.get)

    def send(self, pid: int, number: signal.Signals) -> None:
        self.sent.append((pid, number))
        (self.stopped.add if number == signal.SIGSTOP else self.stopped.discard)(pid)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        for pid in self.used_s.keys() - self.stopped:
            self.used_s[pid] += seconds

    def run_for(self, seconds: float) -> None:
        """Limit the devices for a while; then they are gone."""
        end_s = self.now_s + seconds

        def sleep(wait_s: float) -> None:
            self.sleep(wait_s)
            if self.now_s >= end_s:
                self.quotas.clear()

        self.throttle.scan()
        user_namespace.throttle_devices(self.throttle, clock=lambda: self.now_s, sleep=sleep)


@given(st.lists(st.integers(1_000, 40_000), min_size=1, max_size=5))
def test_each_process_gets_its_quota_on_average(quotas: list[int]) -> None:
    devices = {(4, index): quota for index, quota in enumerate(quotas)}
    machine = Machine({each: [index] for index, each in enumerate(devices)}, dict(devices))
    machine.run_for(8.0)
    for index, quota in enumerate(quotas):
        assert machine.used_s[index] - 5.0 == pytest.approx(8.0 * quota / 40_000, abs=0.15), quota
    assert machine.stopped == set(), "all go on in the end"


def test_processes_of_a_device_share_its_quota() -> None:
    machine = Machine({DEVICE: [1, 2]}, {DEVICE: 20_000})
    machine.run_for(4.0)
    assert sum(machine.used_s.values()) - 10.0 == pytest.approx(2.0, abs=0.15)


def test_others_are_never_signalled() -> None:
    machine = Machine({DEVICE: [1], OTHER: [2]}, {DEVICE: 1_000})
    machine.run_for(1.0)
    assert {pid for pid, _ in machine.sent} == {1}


def test_a_debt_is_paid_and_unused_time_is_not_kept() -> None:
    budget = DeviceBudget(quota_us=10_000, balance_us=10_000)
    budget.charge({1: 5.0})
    assert budget.balance_us == 10_000, "a process counts from its first reading on"
    budget.charge({1: 5.035})
    assert budget.balance_us == pytest.approx(-25_000)
    budget.refill(2)
    assert budget.is_spent
    budget.refill(100)
    assert budget.balance_us == 10_000


def test_a_new_quota_counts_at_once_and_a_late_process_is_stopped_too() -> None:
    machine = Machine({DEVICE: [1]}, {DEVICE: 4_000})
    machine.throttle.scan()
    machine.throttle.step(0)
    machine.sleep(0.03)
    machine.throttle.step(0)
    assert machine.stopped == {1}
    machine.members, machine.used_s[2] = {DEVICE: [1, 2]}, 0.0
    machine.throttle.scan()
    machine.throttle.step(0)
    assert machine.stopped == {1, 2}
    machine.quotas[DEVICE] = 40_000
    machine.throttle.scan()
    machine.throttle.step(1)
    assert machine.stopped == set()


def test_what_an_earlier_one_has_stopped_goes_on() -> None:
    machine = Machine({DEVICE: [1]}, {DEVICE: 4_000})
    machine.stopped = {1}
    machine.throttle.scan()
    assert machine.sent == [(1, signal.SIGCONT)]


def test_all_go_on_when_it_ends() -> None:
    machine = Machine({DEVICE: [1]}, {DEVICE: 4_000})
    machine.throttle.scan()
    machine.throttle.step(0)
    machine.sleep(PERIOD_S)
    machine.throttle.step(0)
    assert machine.stopped == {1}
    machine.throttle.release()
    assert machine.stopped == set()


def test_the_scan_finds_this_process_and_reads_its_clock() -> None:
    own = lab_state.namespace_id(Path("/proc/self/ns/uts"))
    assert own is not None
    assert os.getpid() in ProcessScan()()[own]
    first = user_namespace.read_process_clock(os.getpid())
    sum(range(300_000))
    assert (user_namespace.read_process_clock(os.getpid()) or 0.0) > (first or 0.0)
    assert user_namespace.read_process_clock(2**22 + 1) is None


def test_quotas_are_those_of_complete_labs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_state, "LAB_HOME", tmp_path)
    record = lab_state.LabRecord(name="one", cluster_text="", quotas={"a": (4_000,)}, is_complete=False, boot_id="b")
    lab_state.write_record(record)
    lab_state.duty_cycle_folder("one").mkdir()
    lab_state.namespace_folder("one").mkdir()
    (lab_state.namespace_folder("one") / "a:0.uts").touch()
    (lab_state.duty_cycle_folder("one") / "a:0").write_text("4000")
    assert user_namespace.read_lab_quotas() == {}
    lab_state.write_record(lab_state.LabRecord(name="one", cluster_text="", quotas=None, is_complete=True, boot_id="b"))
    assert list(user_namespace.read_lab_quotas().values()) == [4000]
    lab_state.write_duty_cycle("one", "a", 0, 9_000)
    assert list(user_namespace.read_lab_quotas().values()) == [9000]
    with pytest.raises(LabError, match=r"CPU quota of a:0: 10, expected 1000 microseconds or more\. Give at"):
        lab_state.write_duty_cycle("one", "a", 0, 10)
    with pytest.raises(LabError, match="see whether the lab is still up"):
        lab_state.write_duty_cycle("two", "a", 0, 9_000)
