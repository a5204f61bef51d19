"""Worker groups of one job in its Slurm allocation: observation and actions."""

import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ringweave.errors import LaunchError
from ringweave.files import file_io, rotation
from ringweave.jobs.records import EndCause, GroupPhase, ObservedGroup
from ringweave.platforms.agent.agent_channel import AgentStatus, DesiredState
from ringweave.platforms.agent.job_config import JobConfig
from ringweave.platforms.local import job_folder
from ringweave.platforms.local.job_folder import GroupFolder, JobFolder
from ringweave.platforms.local.job_runtime import BoundaryHook, FolderJobRuntime
from ringweave.platforms.slurm import batch_script
from ringweave.platforms.slurm.batch_script import AllocationComponent
from ringweave.platforms.slurm.commands import SlurmClient
from ringweave.platforms.slurm.lease import SlurmTimeouts

ALLOCATION_REVOKED = "Slurm revoked its allocation"
AGENT_COMMAND = (sys.executable, "-P", "-m", "ringweave.platforms.slurm.agent_main")
_SRUN_ERROR_PREFIX = "srun: error: "
SLURM_QUERY_INTERVAL_S = 2.0
"""Interval between queries to Slurm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocationGrant:
    """Running allocation."""

    key: str
    """`12.1`: Slurm job, and number of its requeues."""
    job_ids: tuple[int, ...]
    """Slurm jobs of the components."""
    hosts: tuple[str, ...]

    @property
    def job_id(self) -> int:
        """Slurm job that identifies all components."""
        return self.job_ids[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmDeps:
    """Dependencies of a job's runtime."""

    slurm: SlurmClient
    """Client for steps and hosts."""
    environ: Mapping[str, str]
    """Environment of the steps."""
    timeouts: SlurmTimeouts
    agent: Sequence[str] = AGENT_COMMAND
    """Begins the command line of an agent; the job's folder, node, attempt, allocation and lease are appended."""
    on_boundary: BoundaryHook = lambda boundary: None
    """Called between the steps of an action; crash tests exit there."""
    wall_clock: Callable[[], float] = time.time
    """Seconds since 1970, on the clock of the deciding process."""


class SlurmJobRuntime(FolderJobRuntime):
    """Folder of one job, and its job steps. Without a grant the runtime can observe and clean up."""

    def __init__(
        self,
        folder: JobFolder,
        config: JobConfig,
        components: Sequence[AllocationComponent],
        grant: AllocationGrant | None,
        deps: SlurmDeps,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Observe nothing yet. `grant`: the allocation; None if there is none now."""
        super().__init__(folder, config, deps.environ, deps.on_boundary)
        self._grant, self._deps = grant, deps
        self._component_indices = {part.node: index for index, part in enumerate(components)}
        self._timeouts, self._clock = deps.timeouts, clock
        self._since_s: dict[tuple[int, int, str], float] = {}
        self._last_query: tuple[float, dict[str, str], set[str]] = (float("-inf"), {}, set())

    def _observe_group(self, folder: GroupFolder, *, sweeps: bool) -> ObservedGroup | None:
        """Return the group; None if there is none, or not any more."""
        # In this order: an agent that exits after the first check has written its status before.
        runs = job_folder.is_lock_held(self._agent_lock(folder)) or job_folder.is_lock_held(folder.alive_lock)
        status, desired = folder.read_state()
        is_told_to_leave = folder.removal_mark.exists() or (desired is not None and desired.stop)
        has_ended = status is not None and not status.phase.is_alive
        was_started = status is not None or self._agent_log(folder).exists()
        if runs or (was_started and not has_ended and not self._cannot_be_running(folder)):
            if is_told_to_leave and sweeps:
                self._kill_overdue_agent(folder)
            return self._live_group(folder, status, desired, is_terminating=is_told_to_leave or not runs)
        if folder.removal_mark.exists() or not (was_started and folder.desired_state.exists()):
            # It is being removed, or a crash came before its step started: the starter holds its lock until then.
            if sweeps:
                shutil.rmtree(folder.root, ignore_errors=True)
            return None
        return self._ended_group(folder, status, desired)

    def _live_group(
        self, folder: GroupFolder, status: AgentStatus | None, desired: DesiredState | None, *, is_terminating: bool
    ) -> ObservedGroup:
        round_ = desired.round if desired else 0
        if status is None:
            status = AgentStatus(round=round_, phase=GroupPhase.PENDING, pid=0, text="its step starts")
        return replace(self._reported_group(folder, status, is_terminating=is_terminating), requested_round=round_)

    def _reported_group(
        self, folder: GroupFolder, status: AgentStatus, *, is_terminating: bool = False
    ) -> ObservedGroup:
        """Return the group by its agent's status, with its end time on our clock."""
        found = status.to_group(folder.node, folder.attempt, leaving=is_terminating)
        return (
            found
            if found.ended_s is None
            else replace(found, ended_s=self._deps.wall_clock() - self._status_age_s(folder))
        )

    def _status_age_s(self, folder: GroupFolder) -> float:
        """Return the age of the last status, by the file server's clock: those of the hosts may differ by hours."""
        return max(0.0, _file_server_time_s(folder.root / "looked") - folder.status.stat().st_mtime)

    def _ended_group(
        self, folder: GroupFolder, status: AgentStatus | None, desired: DesiredState | None
    ) -> ObservedGroup:
        """Return a group of which no process can run any more."""
        if status is None:
            status = AgentStatus(round=desired.round if desired else 0, phase=GroupPhase.PENDING, pid=0)
        found = self._reported_group(folder, status)
        if desired is not None and desired.stop:
            return found if not status.phase.is_alive else replace(found, phase=GroupPhase.STOPPED, text=desired.reason)
        if status.phase is GroupPhase.STOPPED or (
            status.phase is GroupPhase.PENDING and not self._is_of_this_allocation(folder)
        ):
            return self._cancelled_group(folder, found)
        if not status.phase.is_alive:
            return found
        text = f"its agent ended without a status{self._last_srun_error(folder)}"
        return replace(found, phase=GroupPhase.FAILED, cause=EndCause.PLATFORM, text=text)

    def _cancelled_group(self, folder: GroupFolder, found: ObservedGroup) -> ObservedGroup:
        """Return a group that was cancelled: by Slurm with the whole allocation, or by a person with scancel."""
        if not self._is_of_this_allocation(folder):
            return replace(found, phase=GroupPhase.FAILED, cause=EndCause.PEER, text=ALLOCATION_REVOKED)
        if not self._has_passed(folder, "cut", self._timeouts.cancelled_step_s):
            return replace(found, is_terminating=True)  # if Slurm ends the whole allocation, this process ends too
        return replace(
            found, phase=GroupPhase.FAILED, cause=EndCause.PLATFORM, text=f"its step was cancelled: {found.text}"
        )

    def _cannot_be_running(self, folder: GroupFolder) -> bool:
        """Return whether no process of a group without a final status can run; before that it is not replaced."""
        if not self._is_of_this_allocation(folder):
            # A group before the barrier is harmless: the barrier of its round stays closed.
            status, _ = folder.read_state()
            return status is None or status.phase is not GroupPhase.RUNNING or self._is_fenced(folder)
        if self._is_fenced(folder):
            return True
        lost_s = self._since_s.setdefault((folder.node, folder.attempt, "lost"), self._clock())
        hosts, steps = self._query_slurm(lost_s)
        host = self._host_of(folder.node)
        return host in hosts and not hosts[host] and _step_name(folder) not in steps

    def _is_fenced(self, folder: GroupFolder) -> bool:
        """Return whether the group has been lost for longer than its lease, by the file server's clock."""
        lost = folder.root / "lost"
        if not lost.exists():
            lost.touch()
        return _file_server_time_s(folder.root / "looked") - lost.stat().st_mtime >= self._timeouts.fence_s

    def _kill_overdue_agent(self, folder: GroupFolder) -> None:
        """Let Slurm kill an agent that does not exit in time; its workers die with it."""
        if self._grant is None or not self._has_passed(folder, "leave", self._timeouts.agent_exit_s):
            return
        for step in self._deps.slurm.list_steps(self._grant.job_ids):
            if step.name == _step_name(folder):
                self._deps.slurm.cancel(step.step_id)

    def _has_passed(self, folder: GroupFolder, what: str, wait_s: float) -> bool:
        since = self._since_s.setdefault((folder.node, folder.attempt, what), self._clock())
        return self._clock() - since >= wait_s

    def _query_slurm(self, after_s: float) -> tuple[dict[str, str], set[str]]:
        """Return host -> state if Slurm cannot reach it, else an empty text; and the names of running steps.

        Args:
            after_s: Minimum time of the query; a query from before a step was lost says nothing about it.
        """
        queried_s, hosts, steps = self._last_query
        if self._grant is not None and (queried_s < after_s or self._clock() - queried_s >= SLURM_QUERY_INTERVAL_S):
            steps = {step.name for step in self._deps.slurm.list_steps(self._grant.job_ids)}
            hosts = {
                host.name: "" if host.is_responding else host.state
                for host in self._deps.slurm.list_hosts(self._deps.environ)
            }
            self._last_query = (self._clock(), hosts, steps)
        return hosts, steps

    def _agent_lock(self, folder: GroupFolder) -> Path:
        """Return the lock file that srun holds."""
        return folder.root / "step"

    def _agent_command(self, folder: GroupFolder) -> Sequence[str]:
        if self._grant is None:
            raise LaunchError(f"job {self._config.job}: no allocation, expected a running one. Request one from Slurm.")
        file_io.replace_text(_grant_path(folder), self._grant.key)
        self._on_boundary("grant written")
        words = self._folder.root, folder.node, folder.attempt, self._grant.key, self._timeouts.lease_s
        agent = [*self._deps.agent, *map(str, words)]
        argv = batch_script.srun_command(
            self._component_indices[folder.node], len(self._component_indices), _step_name(folder), agent
        )
        return [shutil.which(argv[0], path=self._environ.get("PATH")) or argv[0], *argv[1:]]

    def _wake_agent(self, folder: GroupFolder) -> None:
        """Do nothing: agents on other hosts poll."""

    def _is_of_this_allocation(self, folder: GroupFolder) -> bool:
        """Return whether the group was created in the current allocation."""
        try:
            key = _grant_path(folder).read_text(encoding="utf-8")
        except FileNotFoundError:
            return False
        return self._grant is not None and key == self._grant.key

    def _host_of(self, node: int) -> str:
        return self._grant.hosts[self._component_indices[node]] if self._grant is not None else ""

    def _last_srun_error(self, folder: GroupFolder) -> str:
        with contextlib.suppress(OSError):
            lines = rotation.last_lines(self._agent_log(folder))
            errors = [line.removeprefix(_SRUN_ERROR_PREFIX) for line in lines if line.startswith(_SRUN_ERROR_PREFIX)]
            return f": {errors[-1]}" if errors else ""
        return ""


def _step_name(folder: GroupFolder) -> str:
    return f"rw-{folder.node}-{folder.attempt}"


def _file_server_time_s(path: Path) -> float:
    path.touch()
    return path.stat().st_mtime


def _grant_path(folder: GroupFolder) -> Path:
    """Return the file with the key of the allocation in which the group was created."""
    return folder.root / "grant"
