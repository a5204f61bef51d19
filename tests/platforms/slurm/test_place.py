"""What is concluded from the files of groups and from what Slurm says, without any process; time is virtual."""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ringweave.errors import LaunchError
from ringweave.jobs import records
from ringweave.jobs.records import EndCause, GroupPhase, ObservedGroup
from ringweave.launcher.workers import HostPort
from ringweave.platforms.agent import agent_channel
from ringweave.platforms.agent.agent_channel import AgentStatus, DesiredState
from ringweave.platforms.agent.job_config import JobConfig, NodeConfig
from ringweave.platforms.local import job_folder
from ringweave.platforms.local.job_folder import JobFolder
from ringweave.platforms.slurm.batch_script import AllocationComponent
from ringweave.platforms.slurm.job_runtime import AllocationGrant, SlurmJobRuntime
from tests.platforms.slurm.fakes import PATIENCE, FakeSlurm, a_grant, means

CONFIG = JobConfig(
    job="text",
    device="cuda",
    mode="auto",
    nodes=(NodeConfig(index=0, name="n0", workers=10), NodeConfig(index=1, name="n1", workers=5)),
    script="train.py",
)


class World:
    def __init__(self, folder: Path) -> None:
        self.fake, self.now_s = FakeSlurm(), 0.0
        self.folder = JobFolder(root=folder / "text")
        self.means = means(self.fake, folder)

    def place(self, grant: AllocationGrant | None = None) -> SlurmJobRuntime:
        parts = (AllocationComponent(node=0, workers=10, host=None), AllocationComponent(node=1, workers=5, host=None))
        return SlurmJobRuntime(self.folder, CONFIG, parts, grant, self.means, lambda: self.now_s)

    def group(self, phase: GroupPhase | None, *, key: str = "10.0", orders: DesiredState | None = None, text: str = ""):
        """Node 1, attempt 1, as its agent left it."""
        folder = self.folder.group(1, 1)
        folder.root.mkdir(parents=True, exist_ok=True)
        (folder.root / "grant").write_text(key)
        folder.desired_state.write_text(agent_channel.DESIRED_STATE_JSON.dump(orders or DesiredState(round=1)))
        if phase is not None:
            folder.status.write_text(
                agent_channel.STATUS_JSON.dump(AgentStatus(round=1, phase=phase, pid=1, text=text))
            )
        return folder


@pytest.fixture
def world(tmp_path) -> World:
    return World(tmp_path)


def only(place: SlurmJobRuntime) -> ObservedGroup:
    (group,) = place.observe().groups
    return group


def test_a_lost_group_is_leaving_until_slurm_knows_that_its_step_is_gone(world):
    world.group(GroupPhase.RUNNING)
    world.fake.steps = "11.0 rw-1-1\n"
    place = world.place(a_grant())
    assert only(place).is_terminating
    assert only(place).phase is GroupPhase.RUNNING
    world.fake.steps, world.now_s = "", 3.0
    found = only(place)
    assert (found.phase, found.cause, found.is_terminating) == (GroupPhase.FAILED, EndCause.PLATFORM, False)
    assert found.text == "its agent ended without a status"


def test_what_slurm_says_of_a_machine_that_does_not_answer_is_not_believed(world):
    world.group(GroupPhase.RUNNING)
    world.fake.hosts = "big|20|gpu:10|idle|main*\nsmall|10|gpu:5|down*|main*\n"
    place = world.place(a_grant())
    assert only(place).is_terminating
    world.now_s = 200.0
    assert only(place).is_terminating


@pytest.mark.parametrize("grant", [a_grant(restarts=1), None])
def test_of_a_former_allocation_it_is_gone_when_its_lease_surely_is(world, grant):
    folder = world.group(GroupPhase.RUNNING)
    place = world.place(grant)
    assert only(place).is_terminating
    lost = (folder.root / "lost").stat()
    os.utime(folder.root / "lost", (lost.st_atime, lost.st_mtime - PATIENCE.fence_s + 20.0))
    assert only(place).is_terminating
    os.utime(folder.root / "lost", (lost.st_atime, lost.st_mtime - PATIENCE.fence_s))
    assert only(world.place(grant)).phase is GroupPhase.FAILED, "also for somebody who has only begun to look"


@pytest.mark.parametrize("state", ["idle", "down*"])
def test_one_whose_step_was_never_started_is_made_again(world, state):
    folder = world.group(None)
    world.fake.hosts = f"big|20|gpu:10|idle|main*\nsmall|10|gpu:5|{state}|main*\n"
    assert world.place(a_grant()).observe().groups == ()
    assert not folder.root.exists()


@pytest.mark.parametrize("phase", [None, GroupPhase.READY])
def test_one_that_was_not_past_the_gate_needs_no_waiting(world, phase):
    world.group(phase)
    log = world.folder.runs("n1", 1) / "agent.log"
    log.parent.mkdir(parents=True)
    log.write_text("srun: error: Unable to create step\n")
    found = only(world.place(a_grant(restarts=1)))
    assert found.phase is GroupPhase.FAILED
    assert not found.is_terminating


def test_ended_with_its_allocation_it_is_nobodys_fault(world):
    world.group(GroupPhase.STOPPED, text="it got SIGTERM")
    found = only(world.place(a_grant(restarts=1)))
    assert (found.phase, found.cause) == (GroupPhase.FAILED, EndCause.PEER)
    assert found.text == "Slurm revoked its allocation"


def test_a_step_that_was_cancelled_alone_counts_when_the_allocation_goes_on(world):
    world.group(GroupPhase.STOPPED, text="it got SIGTERM")
    place = world.place(a_grant())
    assert only(place).is_terminating
    world.now_s = PATIENCE.cancelled_step_s
    found = only(place)
    assert (found.phase, found.cause) == (GroupPhase.FAILED, EndCause.PLATFORM)
    assert found.text == "its step was cancelled: it got SIGTERM"


@pytest.mark.parametrize("ahead_s", [-7200.0, 0.0, 7200.0])
def test_an_end_is_timed_by_the_age_of_its_report_and_not_by_the_clock_of_its_machine(world, ahead_s):
    folder = world.group(GroupPhase.SUCCEEDED)
    report = AgentStatus(round=1, phase=GroupPhase.SUCCEEDED, pid=1, ended_s=time.time() + ahead_s)
    folder.status.write_text(agent_channel.STATUS_JSON.dump(report))
    written = folder.status.stat()
    os.utime(folder.status, (written.st_atime, written.st_mtime - 10.0))
    world.means = replace(world.means, wall_clock=lambda: 5000.0)
    ended_s = only(world.place(a_grant())).ended_s
    assert ended_s is not None
    assert 4000.0 < ended_s <= 4990.0, "10 s ago, and what has passed since"


def test_ended_as_it_was_told_to(world):
    world.group(GroupPhase.STOPPED, orders=DesiredState(round=1, stop=True, reason="the job ends"))
    assert only(world.place(a_grant())).phase is GroupPhase.STOPPED
    world.group(GroupPhase.RUNNING, orders=DesiredState(round=1, stop=True, reason="the job ends"))
    place = world.place(a_grant())
    found = only(place)
    assert (found.phase, found.text) == (GroupPhase.STOPPED, "the job ends"), "killed when it was to end"


def test_a_group_that_lives_is_never_gone(world):
    folder = world.group(GroupPhase.RUNNING)
    held = job_folder.try_lock_file(folder.alive_lock)
    assert held is not None
    place = world.place(a_grant(restarts=1))
    (folder.root / "lost").touch()
    os.utime(folder.root / "lost", (0, 0))
    assert only(place).phase is GroupPhase.RUNNING
    place.apply(records.DeleteGroup(node=1, attempt=1))
    assert only(place).is_terminating
    os.close(held)
    assert place.observe().groups == ()


def test_who_was_called_back_is_seen_to_be_before_it_hears_of_it(world):
    folder = world.group(GroupPhase.RUNNING)
    held = job_folder.try_lock_file(folder.alive_lock)
    assert held is not None
    place = world.place(a_grant())
    assert (only(place).round, only(place).requested_round) == (1, 1)
    place.apply(records.RestartGroup(node=1, attempt=1, round=2))
    assert (only(place).round, only(place).requested_round, only(place).phase) == (1, 2, GroupPhase.RUNNING)
    os.close(held)


def test_slurm_kills_a_step_that_does_not_leave(world):
    folder = world.group(GroupPhase.RUNNING, orders=DesiredState(round=1, stop=True))
    held = job_folder.try_lock_file(folder.alive_lock)
    assert held is not None
    world.fake.steps = "10.0 rw-0-1\n11.4 rw-1-1\n"
    place = world.place(a_grant())
    only(place)
    world.now_s = PATIENCE.agent_exit_s - 1
    only(place)
    assert not [call for call in world.fake.called if call[0] == "scancel"]
    world.now_s = PATIENCE.agent_exit_s
    only(place)
    assert ["scancel", "--quiet", "11.4"] in world.fake.called
    os.close(held)


def test_the_gate_opens_at_what_the_first_node_offered(world):
    world.folder.root.mkdir(exist_ok=True)
    place = world.place(a_grant())
    place.apply(records.CreateConfig(counts=(10, 5)))
    for node, host in ((0, "10.0.0.2"), (1, "10.0.0.3")):
        folder = world.folder.group(node, 1)
        folder.root.mkdir(parents=True)
        folder.desired_state.write_text(agent_channel.DESIRED_STATE_JSON.dump(DesiredState(round=1)))
        report = AgentStatus(round=1, phase=GroupPhase.READY, pid=1, master_address=HostPort(host=host, port=5))
        folder.status.write_text(agent_channel.STATUS_JSON.dump(report))
    assert place.observe().released_round == 0
    place.apply(records.ReleaseBarrier(round=1))
    assert place.observe().released_round == 1
    opening = agent_channel.RENDEZVOUS_JSON.parse(world.folder.rendezvous.read_bytes())
    assert opening.master_address == HostPort(host="10.0.0.2", port=5)
    assert opening.addresses == {"n0": "10.0.0.2", "n1": "10.0.0.3"}
    place.apply(records.DeleteConfig())
    assert place.observe().released_round == 0


def test_without_an_allocation_nothing_can_be_made(world):
    with pytest.raises(LaunchError, match="job text: no allocation, expected a running one"):
        world.place().apply(records.CreateGroup(node=0, attempt=1, workers=10, round=1))
