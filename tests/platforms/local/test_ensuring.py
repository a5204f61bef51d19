"""Supervisors are started where none lives, once; locks, bells, and agents that do not leave."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringweave.errors import LaunchError
from ringweave.jobs import records
from ringweave.jobs.records import EndCause, GroupPhase, new_job
from ringweave.jobs.request import JobRequest, NodeRequest
from ringweave.launcher.workers import HostPort
from ringweave.platforms.agent import agent_channel
from ringweave.platforms.agent.agent_channel import AgentStatus, DesiredState
from ringweave.platforms.agent.job_config import JobConfig, NodeConfig, RendezvousResult
from ringweave.platforms.local import job_folder, job_runtime, supervisor, supervisor_main
from ringweave.platforms.local.agent_main import SUPERVISOR_CHECK_S, SupervisedWait, visible_gpus
from ringweave.platforms.local.file_channel import FileAgentChannel
from ringweave.platforms.local.job_folder import REGISTRY, JobFolder, Wakeup
from ringweave.platforms.local.job_runtime import LocalJobRuntime
from ringweave.platforms.local.registry import LocalJobRegistry, LocalRegistryEntry
from ringweave.platforms.submission import JobOrigin
from tests.polling import wait_until

CONFIG = JobConfig(
    job="job",
    device="cuda",
    mode="auto",
    nodes=(NodeConfig(index=0, name="n0", workers=2), NodeConfig(index=2, name="n2", workers=3)),
    script="s.py",
)


def test_one_supervisor_is_started_and_then_woken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(job_folder, "spawn_locked", lambda argv, environ, *, lock, log: started.append(list(argv)))
    supervisor.ensure_supervisor(tmp_path, "job-1", {})
    assert started[0][-2:] == [str(tmp_path), "job-1"]
    folder = job_folder.job_folder(tmp_path, "job-1")
    bell, lock = Wakeup(folder.wakeup), job_folder.try_lock_file(folder.supervisor_lock)
    assert lock is not None
    assert job_folder.is_lock_held(folder.supervisor_lock)
    supervisor.ensure_supervisor(tmp_path, "job-1", {})
    assert len(started) == 1
    bell.wait(100.0)  # was rung, so it returns
    bell.close()
    os.close(lock)
    assert not job_folder.is_lock_held(folder.supervisor_lock)


def test_a_job_that_is_being_removed_needs_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spawn(*_: object, lock: int, log: Path) -> None:
        if not log.parent.parent.joinpath("broken").exists():
            shutil.rmtree(log.parent)
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(job_folder, "spawn_locked", spawn)
    supervisor.ensure_supervisor(tmp_path, "job-1", {})
    (tmp_path / "jobs" / "broken").touch()
    with pytest.raises(LaunchError, match=r"supervisor could not be started: .*No such file or directory\. \[.*job-1"):
        supervisor.ensure_supervisor(tmp_path, "job-1", {})


def test_a_lock_lives_as_long_as_whoever_has_it(tmp_path: Path) -> None:
    lock = job_folder.try_lock_file(tmp_path / "lock")
    assert lock is not None
    argv = (
        sys.executable,
        "-I",
        "-S",
        "-c",
        "import sys, time; print('said', file=sys.stderr); time.sleep(1000)",
    )
    pid = job_folder.spawn_locked(argv, {}, lock=lock, log=tmp_path / "log")
    os.close(lock)
    assert job_folder.is_lock_held(tmp_path / "lock")
    assert job_folder.try_lock_file(tmp_path / "lock") is None
    wait_until(lambda: (tmp_path / "log").read_text() == "said\n", "the first words")
    assert os.getsid(pid) == pid
    assert job_folder.reap_pids([pid]) == [pid]
    os.kill(pid, 9)
    wait_until(lambda: not job_folder.is_lock_held(tmp_path / "lock"), "the end of the lock")
    wait_until(lambda: job_folder.reap_pids([pid]) == [], "the end of the process")


def test_a_bell_that_nobody_hears(tmp_path: Path) -> None:
    job_folder.notify(tmp_path / "nosuch")
    os.mkfifo(tmp_path / "wakeup")
    job_folder.notify(tmp_path / "wakeup")
    bell = Wakeup(tmp_path / "wakeup")
    bell.wait(0.0)
    bell.close()


@pytest.fixture
def folder(tmp_path: Path) -> JobFolder:
    folder = JobFolder(root=tmp_path / "jobs" / "job-1")
    folder.root.mkdir(parents=True)
    return folder


@pytest.fixture
def agents() -> Iterator[list["subprocess.Popen[bytes]"]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def local_place(folder: JobFolder) -> LocalJobRuntime:
    return LocalJobRuntime(folder, CONFIG, agent=("/nosuch/python",), environ={})


def test_an_agent_that_cannot_be_started_is_a_failure_of_the_place(folder: JobFolder) -> None:
    """It was tried again every second, for ever, while the job's reason was that it goes on by itself."""
    here = local_place(folder)
    here.apply(records.CreateGroup(node=2, attempt=1, workers=3, round=4))
    (seen,) = here.observe().groups
    assert (seen.phase, seen.cause, seen.round, seen.is_terminating) == (GroupPhase.FAILED, EndCause.PLATFORM, 4, False)
    assert seen.text == (
        "agent of node n2: 'No such file or directory', expected a program that starts. "
        "Check the interpreter, the memory and the process limit of this machine. [/nosuch/python]"
    )
    here.apply(records.DeleteGroup(node=2, attempt=1))
    assert here.observe().groups == ()


def test_an_agent_that_dies_before_its_first_word_says_why_in_its_log(folder: JobFolder) -> None:
    """As one whose lab is down does, or whose directory was removed."""
    dying = (sys.executable, "-I", "-S", "-c", "raise OSError('no directory')")
    here = LocalJobRuntime(folder, CONFIG, agent=dying, environ={})
    here.apply(records.CreateGroup(node=2, attempt=1, workers=3, round=1))
    wait_until(lambda: here.observe(sweeps=False).groups[0].phase is GroupPhase.FAILED, "the end of the agent")
    (seen,) = here.observe().groups
    assert (seen.cause, seen.text) == (EndCause.PLATFORM, "its agent ended without a status: OSError: no directory")
    here.apply(records.DeleteGroup(node=2, attempt=1))
    assert here.observe().groups == ()


def test_an_agent_that_was_never_started_leaves_no_group(folder: JobFolder) -> None:
    """A crash came between its folder and its process."""
    folder.group(2, 1).root.mkdir(parents=True)
    assert local_place(folder).observe().groups == ()
    assert not list((folder.root / "groups").iterdir())


def test_an_agent_that_was_killed_failed_by_the_places_doing(folder: JobFolder) -> None:
    group = folder.group(0, 1)
    group.root.mkdir(parents=True)
    group.desired_state.write_text(agent_channel.DESIRED_STATE_JSON.dump(DesiredState(round=1)))
    group.status.write_text(agent_channel.STATUS_JSON.dump(AgentStatus(round=1, phase=GroupPhase.RUNNING, pid=1)))
    (seen,) = local_place(folder).observe().groups
    assert (seen.phase, seen.cause, seen.text) == (GroupPhase.FAILED, EndCause.PLATFORM, "its agent was killed")
    local_place(folder).apply(records.StopGroup(node=0, attempt=1))
    (seen,) = local_place(folder).observe().groups
    assert (seen.phase, seen.cause, seen.is_terminating) == (GroupPhase.STOPPED, None, False)
    local_place(folder).apply(records.DeleteGroup(node=0, attempt=1))
    assert local_place(folder).observe().groups == ()


def test_who_was_called_back_is_seen_to_be_before_it_hears_of_it(folder: JobFolder) -> None:
    group = folder.group(2, 1)
    group.root.mkdir(parents=True)
    group.desired_state.write_text(agent_channel.DESIRED_STATE_JSON.dump(DesiredState(round=1)))
    group.status.write_text(agent_channel.STATUS_JSON.dump(AgentStatus(round=1, phase=GroupPhase.RUNNING, pid=1)))
    held = job_folder.try_lock_file(group.alive_lock)
    assert held is not None
    here = local_place(folder)
    here.apply(records.RestartGroup(node=2, attempt=1, round=2))
    (seen,) = here.observe().groups
    assert (seen.round, seen.requested_round, seen.phase) == (1, 2, GroupPhase.RUNNING)
    os.close(held)


def test_an_agent_that_is_gone_before_its_lock_is_leaving(folder: JobFolder) -> None:
    group = folder.group(0, 1)
    group.root.mkdir(parents=True)
    held = job_folder.try_lock_file(group.alive_lock)  # by the guard of its workers
    assert held is not None
    group.desired_state.write_text(agent_channel.DESIRED_STATE_JSON.dump(DesiredState(round=1, stop=True)))
    os.utime(group.desired_state, (1.0, 1.0))
    group.status.write_text(agent_channel.STATUS_JSON.dump(AgentStatus(round=1, phase=GroupPhase.RUNNING, pid=2**30)))
    (seen,) = local_place(folder).observe().groups
    os.close(held)
    assert seen.is_terminating


def test_who_has_given_the_lock_back_leaves_what_another_supervisor_makes(tmp_path: Path) -> None:
    nodes = (NodeRequest(name="n0", capacity=3),)
    request = JobRequest(name="job", num_workers=3, script="s.py", nodes=nodes, device="cpu")
    job = new_job(request, requester="ann", counts=(3,), now=0.0)
    origin = JobOrigin(directory=str(tmp_path), script_text="", environ={})
    LocalJobRegistry(tmp_path / REGISTRY).insert(LocalRegistryEntry(id="job-1", job=job, origin=origin), lambda _: job)
    group = job_folder.job_folder(tmp_path, "job-1").group(0, 1)
    group.root.mkdir(parents=True)
    assert not supervisor.JobSupervisor(tmp_path, "job-1").is_idle()
    assert group.root.exists()


def test_an_agent_goes_on_where_no_supervisor_can_be_started(folder: JobFolder) -> None:
    now_s, tried_s = [0.0], list[float]()

    def supervise() -> None:
        tried_s.append(now_s[0])
        raise LaunchError("supervisor could not be started: no space left.")

    group = folder.group(0, 1)
    group.root.mkdir(parents=True)
    here = SupervisedWait(group.wakeup, supervise, clock=lambda: now_s[0])
    for now_s[0] in (1.0, SUPERVISOR_CHECK_S, SUPERVISOR_CHECK_S + 1.0, 2 * SUPERVISOR_CHECK_S):
        here.wait(0.0)
    assert tried_s == [SUPERVISOR_CHECK_S, 2 * SUPERVISOR_CHECK_S]


@pytest.mark.parametrize("has_reported", [True, False])
def test_an_agent_that_does_not_leave_is_killed(
    folder: JobFolder, agents: list, monkeypatch, has_reported: bool
) -> None:
    group = folder.group(0, 1)
    group.root.mkdir(parents=True)
    lock = job_folder.try_lock_file(group.alive_lock)
    assert lock is not None
    deaf = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(1000)", str(folder.root), "0", "1"]
    agents.append(subprocess.Popen(deaf, pass_fds=(lock,)))
    os.close(lock)
    group.desired_state.write_text(agent_channel.DESIRED_STATE_JSON.dump(DesiredState(round=1)))
    if has_reported:
        group.status.write_text(
            agent_channel.STATUS_JSON.dump(AgentStatus(round=1, phase=GroupPhase.RUNNING, pid=agents[0].pid))
        )
    here = local_place(folder)
    monkeypatch.setattr(job_runtime, "AGENT_LEAVE_TIMEOUT_S", 1000.0)
    here.apply(records.DeleteGroup(node=0, attempt=1))
    (seen,) = here.observe().groups
    assert (seen.is_terminating, agents[0].poll()) == (True, None)
    monkeypatch.setattr(job_runtime, "AGENT_LEAVE_TIMEOUT_S", 0.0)
    time.sleep(0.01)
    wait_until(lambda: here.observe().groups == (), "the end of the agent")
    assert agents[0].wait() == -9


def test_the_gate_opens_where_the_first_node_offered_to_meet(folder: JobFolder) -> None:
    here = local_place(folder)
    here.apply(records.CreateConfig(counts=(2, 0, 3)))
    for node, port in ((0, 7), (2, 8)):
        group = folder.group(node, 1)
        group.root.mkdir(parents=True)
        group.desired_state.write_text(agent_channel.DESIRED_STATE_JSON.dump(DesiredState(round=3)))
        report = AgentStatus(round=3, phase=GroupPhase.READY, pid=1, master_address=HostPort(host="h", port=port))
        group.status.write_text(agent_channel.STATUS_JSON.dump(report))
    here.apply(records.ReleaseBarrier(round=3))
    assert here.observe().released_round == 3
    post = FileAgentChannel(folder, folder.group(2, 1), lambda seconds: None)
    assert post.desired_state() == DesiredState(
        round=3, rendezvous=RendezvousResult(round=3, master_address=HostPort(host="h", port=7))
    )
    here.apply(records.DeleteConfig())
    assert (here.observe().released_round, here.observe().has_config, post.desired_state().rendezvous) == (
        0,
        False,
        None,
    )
    shutil.rmtree(folder.group(2, 1).root)
    assert post.desired_state().stop


def test_nodes_of_one_machine_share_its_gpus_without_overlap() -> None:
    assert visible_gpus(CONFIG, 0, {}) == {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert visible_gpus(CONFIG, 2, {}) == {"CUDA_VISIBLE_DEVICES": "2,3,4"}
    assert visible_gpus(CONFIG, 2, {"CUDA_VISIBLE_DEVICES": "7,6,5,4,3"}) == {"CUDA_VISIBLE_DEVICES": "5,4,3"}


def test_jobs_start_in_turns_and_a_stopped_one_blocks_nobody_for_ever(tmp_path: Path) -> None:
    end_first = supervisor_main.take_turn(tmp_path, num_turns=1)
    begun_s = time.monotonic()
    end_second = supervisor_main.take_turn(tmp_path, num_turns=1, timeout_s=0.2)
    assert time.monotonic() - begun_s >= 0.2, "the first has not ended its turn"
    end_first()
    end_first()
    end_second()
    end_third = supervisor_main.take_turn(tmp_path, num_turns=1, timeout_s=100.0)
    assert job_folder.is_lock_held(tmp_path / supervisor_main.STARTING_FOLDER / "0")
    end_third()
    assert not job_folder.is_lock_held(tmp_path / supervisor_main.STARTING_FOLDER / "0")
