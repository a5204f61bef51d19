"""Job runtime of platforms whose agents share a folder: observes and changes the groups of one job.

A job is a folder (`job_folder.py`); desired state, status and rendezvous are files in it. Platforms differ in how an
agent is started, how its end is known, and whether it can be woken.
"""

import abc
import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from ringweave.errors import explain
from ringweave.files import file_io, rotation
from ringweave.jobs import records
from ringweave.jobs.records import EndCause, GroupPhase, JobAction, ObservedGroup, ObservedJobState
from ringweave.launcher.outcome import find_exception
from ringweave.platforms.agent import agent_channel, job_config
from ringweave.platforms.agent.agent_channel import AgentStatus, DesiredState, rendezvous_result
from ringweave.platforms.agent.job_config import JobConfig
from ringweave.platforms.local import job_folder
from ringweave.platforms.local.job_folder import GroupFolder, JobFolder

BoundaryHook = Callable[[str], None]


class FolderJobRuntime(abc.ABC):
    """Runtime of one job whose agents share its folder; every action may be repeated."""

    def __init__(
        self, folder: JobFolder, config: JobConfig, environ: Mapping[str, str], on_boundary: BoundaryHook
    ) -> None:
        """Create the runtime; reads nothing yet.

        Args:
            folder: Folder of the job.
            config: Config of the job.
            environ: Environment of the agents, which workers inherit.
            on_boundary: Called between the steps of an action; crash tests die there.
        """
        self._folder, self._config = folder, config
        self._environ, self._on_boundary = dict(environ), on_boundary
        self._children: list[int] = []

    @abc.abstractmethod
    def _observe_group(self, folder: GroupFolder, *, sweeps: bool) -> ObservedGroup | None:
        """Return the group; None if there is none any more. With `sweeps`, remove it as `observe` says."""

    @abc.abstractmethod
    def _agent_lock(self, folder: GroupFolder) -> Path:
        """Return the path that the group's agent locks while it runs."""

    @abc.abstractmethod
    def _agent_command(self, folder: GroupFolder) -> Sequence[str]:
        """Return the command line of the group's agent; the caller holds its lock and starts it."""

    @abc.abstractmethod
    def _wake_agent(self, folder: GroupFolder) -> None:
        """Wake the group's agent, if possible."""

    def observe(self, *, sweeps: bool = True) -> ObservedJobState:
        """Return the present state of the job's groups.

        Args:
            sweeps: Also remove groups that are gone, and kill agents that do not leave. Only for the job's supervisor:
                a group that another process is just creating looks like one that is gone.
        """
        self._children = job_folder.reap_pids(self._children)
        found = [self._observe_group(group, sweeps=sweeps) for group in self._folder.groups()]
        groups = [group for group in found if group is not None]
        config = self._folder.config.exists()
        return ObservedJobState(
            has_config=config, released_round=self._released_round() if config else 0, groups=tuple(groups)
        )

    def apply(self, action: JobAction) -> None:
        """Apply an action; the caller applies those on the registry (save the record, forget the job).

        Raises:
            LaunchError: There is nothing that a process could be started in.
            OSError: Files cannot be written.
        """
        match action:
            case records.CreateConfig():
                self._folder.rendezvous.unlink(missing_ok=True)
                file_io.replace_text(self._folder.config, job_config.JOB_CONFIG_JSON.dump(self._config))
            case records.CreateGroup():
                self._create_group(action)
            case records.RestartGroup(node=node, attempt=attempt, round=round_):
                self._write_desired_state(self._folder.group(node, attempt), DesiredState(round=round_))
            case records.ReleaseBarrier(round=round_):
                self._release_barrier(round_)
            case records.StopGroup(node=node, attempt=attempt):
                self._stop_group(self._folder.group(node, attempt), "the job ends")
            case records.DeleteGroup(node=node, attempt=attempt):
                group = self._folder.group(node, attempt)
                if group.root.exists():
                    self._stop_group(group, "it is removed")
                    self._on_boundary("told to leave")
                    group.removal_mark.touch()  # last: nobody tells a marked one again
                    self._on_boundary("marked for removal")
            case records.DeleteConfig():
                self._folder.rendezvous.unlink(missing_ok=True)
                self._on_boundary("rendezvous removed")
                shutil.rmtree(self._folder.secrets, ignore_errors=True)  # unused credentials of an elastic job
                self._folder.config.unlink(missing_ok=True)

    def _agent_log(self, folder: GroupFolder) -> Path:
        """Return the log of the group's agent, which exists as soon as the agent was started."""
        return self._folder.runs(self._config.node(folder.node).name, folder.attempt) / "agent.log"

    def _create_group(self, action: records.CreateGroup) -> None:
        folder = self._folder.group(action.node, action.attempt)
        folder.root.mkdir(parents=True, exist_ok=True)
        self._on_boundary("folder created")
        self._agent_log(folder).parent.mkdir(parents=True, exist_ok=True)
        lock = job_folder.try_lock_file(self._agent_lock(folder))
        if lock is None:
            return
        try:
            argv = self._agent_command(folder)
            file_io.replace_text(
                folder.desired_state, agent_channel.DESIRED_STATE_JSON.dump(DesiredState(round=action.round))
            )
            self._on_boundary("desired state written")
            self._spawn_agent(folder, argv, lock, action.round)
        finally:
            os.close(lock)

    def _spawn_agent(self, folder: GroupFolder, argv: Sequence[str], lock: int, round_: int) -> None:
        """Start the group's agent.

        If that fails, the attempt has failed, and the node's retries decide.
        """
        try:
            self._children.append(job_folder.spawn_locked(argv, self._environ, lock=lock, log=self._agent_log(folder)))
        except OSError as error:
            what = f"agent of node {self._config.node(folder.node).name}"
            do = "Check the interpreter, the memory and the process limit of this machine"
            got, expected = error.strerror or str(error), "a program that starts"
            text = explain(what, got=got, expected=expected, do=do, where=argv[0])
            failed = AgentStatus(round=round_, phase=GroupPhase.FAILED, pid=0, cause=EndCause.PLATFORM, text=text)
            file_io.replace_text(folder.status, agent_channel.STATUS_JSON.dump(failed))

    def _release_barrier(self, round_: int) -> None:
        """Release the start barrier: publish the rendezvous result whose master address the node of rank 0 offers."""
        offers = {}
        for folder in self._folder.groups():
            status, _ = folder.read_state()
            if status and status.round == round_ and status.master_address:
                offers[self._config.node(folder.node).name] = status
        rendezvous = rendezvous_result(self._config, round_, offers)
        if rendezvous is not None:
            file_io.replace_text(self._folder.rendezvous, agent_channel.RENDEZVOUS_JSON.dump(rendezvous))
        self._on_boundary("barrier released")
        for folder in self._folder.groups():
            self._wake_agent(folder)

    def _stop_group(self, folder: GroupFolder, why: str) -> None:
        _, desired = folder.read_state()
        if desired is not None:
            self._write_desired_state(folder, DesiredState(round=desired.round, stop=True, reason=why))

    def _write_desired_state(self, folder: GroupFolder, desired: DesiredState) -> None:
        """Replace the desired state; an agent that was told to leave stays so."""
        if not folder.root.exists():
            return
        _, before = folder.read_state()
        if before is None or not before.stop or desired.stop:
            file_io.replace_text(folder.desired_state, agent_channel.DESIRED_STATE_JSON.dump(desired))
        self._wake_agent(folder)

    def _released_round(self) -> int:
        """Return the round of the last rendezvous result; 0 if there was none."""
        try:
            return agent_channel.RENDEZVOUS_JSON.parse(file_io.read_bounded(self._folder.rendezvous)).round
        except FileNotFoundError:
            return 0


AGENT_LEAVE_TIMEOUT_S = 20.0
"""An agent that does not leave in this time is killed; its workers die with it."""


class LocalJobRuntime(FolderJobRuntime):
    """Runtime of one local job: its folder, and its processes on this machine."""

    def __init__(
        self,
        folder: JobFolder,
        config: JobConfig,
        *,
        agent: Sequence[str],
        environ: Mapping[str, str],
        on_boundary: BoundaryHook = lambda boundary: None,
    ) -> None:
        """`agent` begins the command line of an agent; the job's folder, node and attempt are appended."""
        super().__init__(folder, config, environ, on_boundary)
        self._agent_program = tuple(agent)

    def remove_files(self) -> None:
        shutil.rmtree(self._folder.root, ignore_errors=True)

    def _observe_group(self, folder: GroupFolder, *, sweeps: bool) -> ObservedGroup | None:
        """Return the group; None also after a crash between creating its folder and its process."""
        is_held = job_folder.is_lock_held(folder.alive_lock)
        status, desired = folder.read_state()
        is_told_to_go = folder.removal_mark.exists() or (desired is not None and desired.stop)
        if not is_held and status is None and not is_told_to_go:
            status = self._startup_failure(folder, desired)
        if not is_held and (status is None or folder.removal_mark.exists()):
            if sweeps:
                shutil.rmtree(folder.root, ignore_errors=True)
            return None
        if is_held and is_told_to_go and sweeps:
            self._kill_if_overdue(folder, status)
        round_ = desired.round if desired else 0
        if status is None:
            waiting = AgentStatus(round=round_, phase=GroupPhase.PENDING, pid=0, text="its agent starts")
            return waiting.to_group(folder.node, folder.attempt, leaving=is_told_to_go)
        found = status.to_group(folder.node, folder.attempt, requested_round=round_, leaving=is_held and is_told_to_go)
        if is_held or not status.phase.is_alive:
            return found
        if is_told_to_go:
            return replace(found, phase=GroupPhase.STOPPED, text="its agent was killed after it did not stop in time")
        return replace(found, phase=GroupPhase.FAILED, cause=EndCause.PLATFORM, text="its agent was killed")

    def _startup_failure(self, folder: GroupFolder, desired: DesiredState | None) -> AgentStatus | None:
        """Return the failure of an agent that ended before its first status; None if none was started."""
        try:
            lines = rotation.last_lines(self._agent_log(folder))
        except FileNotFoundError:
            return None
        if desired is None or not lines:
            return None
        text = f"its agent ended without a status: {find_exception(lines) or lines[-1]}"
        return AgentStatus(round=desired.round, phase=GroupPhase.FAILED, pid=0, cause=EndCause.PLATFORM, text=text)

    def _agent_lock(self, folder: GroupFolder) -> Path:
        return folder.alive_lock

    def _agent_command(self, folder: GroupFolder) -> Sequence[str]:
        return (*self._agent_program, *self._agent_arguments(folder))

    def _agent_arguments(self, folder: GroupFolder) -> list[str]:
        return [str(self._folder.root), str(folder.node), str(folder.attempt)]

    def _wake_agent(self, folder: GroupFolder) -> None:
        job_folder.notify(folder.wakeup)

    def _kill_if_overdue(self, folder: GroupFolder, status: AgentStatus | None) -> None:
        """Kill an agent that does not leave in time; its workers die with it, and the guard kills their children.

        A stopped guard is continued: it holds the lock until it has done that.
        """
        asked_s = max(
            (path.stat().st_mtime for path in (folder.desired_state, folder.removal_mark) if path.exists()), default=0
        )
        if time.time() - asked_s < AGENT_LEAVE_TIMEOUT_S:
            return
        for process in self._agent_processes(folder, status):
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        for pid in job_folder.lock_holders(folder.alive_lock):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _agent_processes(self, folder: GroupFolder, status: AgentStatus | None) -> Iterator[psutil.Process]:
        """Yield the group's agent; without a status, all processes of the machine are searched."""
        for pid in psutil.pids() if status is None else [status.pid]:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                # The process id may have been reused.
                if process.cmdline()[-3:] == self._agent_arguments(folder):
                    yield process
