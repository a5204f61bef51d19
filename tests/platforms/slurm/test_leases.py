"""Who may run, on virtual time."""

import os
import signal

import pytest

from ringweave.platforms.agent import agent_channel
from ringweave.platforms.agent.agent_channel import DesiredState
from ringweave.platforms.local.file_channel import FileAgentChannel
from ringweave.platforms.local.job_folder import JobFolder
from ringweave.platforms.slurm.agent_main import sleep_until_poll
from ringweave.platforms.slurm.lease import EXPIRED_EXIT_TIMEOUT_S, AgentLease, LeaseRenewer
from tests.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lease(tmp_path, clock) -> AgentLease:
    return AgentLease(tmp_path / "beat", "12.0", 30.0, clock)


def test_beats_of_its_allocation_renew_it(lease, tmp_path, clock):
    for number in range(5):
        (tmp_path / "beat").write_text(f"12.0 99 {number}\n")
        assert lease.check() == ""
        clock.now_s += 29.0
    assert lease.check() == ""
    clock.now_s += 2.0
    assert lease.check() == "its controller has not renewed the lease for 31 s"


@pytest.mark.parametrize("beat", ["12.1 99 0\n", "13.0 99 0\n", "revoked\n"])
def test_the_beat_of_another_allocation_ends_it_at_once(lease, tmp_path, beat):
    (tmp_path / "beat").write_text("12.0 99 0\n")
    assert lease.check() == ""
    (tmp_path / "beat").write_text(beat)
    assert lease.check() == "Slurm revoked its allocation"


def test_a_folder_that_cannot_be_read_renews_nothing(lease, tmp_path, clock):
    (tmp_path / "beat").write_text("12.0 99 0\n")
    lease.check()
    (tmp_path / "beat").unlink()
    assert lease.check() == ""
    clock.now_s = 31.0
    assert lease.check() != ""


def test_who_does_not_leave_is_killed(lease, clock, monkeypatch):
    killed = []
    monkeypatch.setattr(os, "kill", lambda pid, how: killed.append((clock.now_s, pid, how)))

    def sleep(seconds: float) -> None:
        clock.now_s += seconds

    lease.kill_when_expired(sleep)
    ((when, pid, how),) = killed
    assert 30.0 + EXPIRED_EXIT_TIMEOUT_S < when <= 32.0 + EXPIRED_EXIT_TIMEOUT_S
    assert (pid, how) == (os.getpid(), signal.SIGKILL)


def test_a_heart_beats_until_it_is_stopped_and_revokes_for_good(tmp_path):
    heart = LeaseRenewer(tmp_path / "beat", "12.0")
    heart.start()
    assert (tmp_path / "beat").read_text().split() == ["12.0", str(os.getpid()), "0"]
    heart.revoke()
    assert (tmp_path / "beat").read_text() == "revoked\n"


def test_orders_that_cannot_be_read_are_as_they_were(lease, tmp_path):
    job = JobFolder(root=tmp_path)
    group = job.group(0, 1)
    group.root.mkdir(parents=True)
    post = FileAgentChannel(job, group, sleep_until_poll, lease.check)
    assert post.desired_state() == DesiredState(round=0)
    group.desired_state.write_text(agent_channel.DESIRED_STATE_JSON.dump(DesiredState(round=3)))
    assert post.desired_state() == DesiredState(round=3)
    group.desired_state.unlink()
    assert post.desired_state() == DesiredState(round=3)
    (tmp_path / "beat").write_text("revoked\n")
    assert post.desired_state() == DesiredState(round=3, stop=True, reason="Slurm revoked its allocation")
