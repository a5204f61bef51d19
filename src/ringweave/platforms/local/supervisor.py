"""Supervisor process of one local job: observes, reconciles and acts until nothing is left to do.

`submit`, every other command on jobs, and the job's own agents start it where none runs (`supervisor_main.py`). It may
be killed at any time.
"""

import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ringweave.errors import LaunchError
from ringweave.files import rotation
from ringweave.jobs import reconcile, records
from ringweave.jobs.records import GroupPhase, JobAction, ObservedJobState
from ringweave.platforms import api
from ringweave.platforms.local import job_folder
from ringweave.platforms.local.job_folder import REGISTRY, Wakeup
from ringweave.platforms.local.registry import LocalJobRegistry, LocalRegistryEntry

if TYPE_CHECKING:  # imported where a job is supervised: commands only start the process
    from ringweave.platforms.local.job_runtime import BoundaryHook, LocalJobRuntime

ACTIVE_POLL_S = 0.5
"""Time between two polls without a notification: an agent that was killed is noticed this late."""
LEAVING_POLL_S = 0.05
"""The same while a group leaves: its last process sends no notification when it ends."""
TTL_POLL_S = 30.0
"""The same while only a TTL runs; short enough for clocks that are changed."""
RETRY_DELAY_S = 1.0
"""Delay before a failed action is retried."""
SUPERVISOR_MODULE = "ringweave.platforms.local.supervisor_main"
"""Name of the supervisor's module in command lines."""
AGENT_COMMAND = (sys.executable, "-P", "-m", "ringweave.platforms.local.agent_main")


class JobSupervisor:
    """Supervisor of one job; it reads all its state anew at every poll."""

    def __init__(
        self,
        state: Path,
        job_id: str,
        *,
        agent: Sequence[str] = AGENT_COMMAND,
        clock: Callable[[], float] = time.time,
        on_boundary: "BoundaryHook" = lambda boundary: None,
        on_started: Callable[[], object] = lambda: None,
    ) -> None:
        """Open the registry.

        Args:
            state: Folder of the registry.
            job_id: Id of the job.
            agent: Begins the agents' command line.
            clock: Seconds since 1970.
            on_boundary: Called with the name of every boundary of an action.
            on_started: Called at every poll at which no group of the job is about to start.
        """
        self._registry, self._id = LocalJobRegistry(state / REGISTRY), job_id
        self._folder = job_folder.job_folder(state, job_id)
        self._agent, self._clock, self._on_boundary = agent, clock, on_boundary
        self._on_started = on_started

    def serve(self) -> None:
        """Supervise the job until nothing is left to do for now, or the job is gone."""
        entry = self._registry.find_by_id(self._id)
        if entry is None:
            self._remove_folder()
        if entry is None or entry.problem:
            return
        self._folder.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        runtime = self._runtime(entry)
        wakeup = Wakeup(self._folder.wakeup)
        try:
            while (wait_s := self.step(runtime)) is not None:
                wakeup.wait(wait_s)
        finally:
            wakeup.close()

    def step(self, runtime: "LocalJobRuntime") -> float | None:
        """Poll once and act; return the seconds until the next poll, None if nothing is left to do."""
        entry = self._registry.find_by_id(self._id)
        if entry is None:
            self._remove_folder()
        if entry is None or entry.problem:
            return None
        observed, now = runtime.observe(), self._clock()
        todo = reconcile.reconcile(entry.job, observed, now)
        wake_s = next((action.at_s for action in todo if isinstance(action, records.RequeueAt)), None)
        todo = [action for action in todo if not isinstance(action, records.RequeueAt)]
        for action in todo:
            try:
                self._apply(runtime, action, now)
            except (OSError, LaunchError) as error:
                print(f"{type(action).__name__}: {error}", file=sys.stderr, flush=True)
                return RETRY_DELAY_S
        if todo:
            return 0.0
        if not any(group.phase in (GroupPhase.PENDING, GroupPhase.READY) for group in observed.groups):
            self._on_started()
        if wake_s is None:
            return _poll_interval_s(observed) if observed.is_under_way else None
        return max(0.0, min(_poll_interval_s(observed), wake_s - now))

    def is_idle(self) -> bool:
        """Return whether there is nothing to do for now; changes nothing."""
        entry = self._registry.find_by_id(self._id)
        if entry is None:
            self._remove_folder()
        if entry is None or entry.problem:
            return True
        observed = self._runtime(entry).observe(sweeps=False)  # another supervisor may run by now
        return not observed.is_under_way and not reconcile.reconcile(entry.job, observed, self._clock())

    def _apply(self, runtime: "LocalJobRuntime", action: JobAction, now: float) -> None:
        name = type(action).__name__
        self._on_boundary(f"before {name}")
        if isinstance(action, records.SaveRecord):
            self._registry.save_record(self._id, action.record, action.events, now)
        elif isinstance(action, records.ForgetJob):
            entry = self._registry.find_by_id(self._id)
            if entry is not None and not entry.job.desired.delete:
                api.write_tombstone(self._folder.root, entry.job.record)
            runtime.remove_files()
            self._on_boundary("files removed")
            self._registry.delete(self._id)
        else:
            runtime.apply(action)
        self._on_boundary(f"after {name}")

    def _runtime(self, entry: LocalRegistryEntry) -> "LocalJobRuntime":
        from ringweave.platforms.local.job_runtime import LocalJobRuntime

        config = entry.origin.config(entry.job)
        return LocalJobRuntime(
            self._folder, config, agent=self._agent, environ=entry.origin.environ, on_boundary=self._on_boundary
        )

    def _remove_folder(self) -> None:
        """Remove the folder of a deleted job, which another process may have recreated to supervise it."""
        shutil.rmtree(self._folder.root, ignore_errors=True)


def ensure_supervisor(state: Path, job_id: str, environ: dict[str, str]) -> None:
    """Start a supervisor if none runs, else wake it; a job that is just being removed gets none.

    Raises:
        LaunchError: The supervisor cannot be started.
    """
    folder = job_folder.job_folder(state, job_id)
    try:
        folder.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = job_folder.try_lock_file(folder.supervisor_lock)
        if lock is None:
            job_folder.notify(folder.wakeup)
            return
        try:
            argv = (sys.executable, "-P", "-m", SUPERVISOR_MODULE, str(state), job_id)
            job_folder.spawn_locked(argv, environ, lock=lock, log=folder.supervisor_log)
        finally:
            os.close(lock)
    except OSError as error:
        if not folder.root.exists():  # removed by the previous supervisor
            return
        raise LaunchError(f"supervisor could not be started: {error}. [{folder.root}]") from error


def main(state: Path, job_id: str, on_started: Callable[[], object]) -> None:
    """Supervise a job with the inherited lock.

    Release it before the last check, to see requests made while it was held.
    """
    rotation.rotate_own_output()
    supervisor = JobSupervisor(state, job_id, on_started=on_started)
    lock: int | None = job_folder.INHERITED_LOCK
    while lock is not None:
        supervisor.serve()
        os.close(lock)
        lock = (
            None
            if supervisor.is_idle()
            else job_folder.try_lock_file(job_folder.job_folder(state, job_id).supervisor_lock)
        )


def _poll_interval_s(observed: ObservedJobState) -> float:
    """Return the time until the next poll without a notification."""
    if any(group.is_terminating for group in observed.groups):
        return LEAVING_POLL_S
    return ACTIVE_POLL_S if observed.is_under_way else TTL_POLL_S
