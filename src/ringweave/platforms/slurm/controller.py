"""Controller of one job; runs inside the job's allocation, so that nothing has to run on the login node.

    python -m ringweave.platforms.slurm.controller JOB_FOLDER LEASE_S FENCE_S

The batch script starts it, and restarts it until it exits with 0. It reads its whole state again in every pass. It
releases the allocation when nothing of the job has to run.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

from ringweave.errors import LaunchError
from ringweave.files import rotation
from ringweave.jobs import advance, records
from ringweave.jobs.reconcile import reconcile
from ringweave.jobs.records import JobAction, JobRecord
from ringweave.jobs.restart_policy import MAX_FAILED_STARTS
from ringweave.jobs.states import JobState
from ringweave.platforms import api
from ringweave.platforms.local import job_folder
from ringweave.platforms.local.job_runtime import BoundaryHook
from ringweave.platforms.slurm import batch_script
from ringweave.platforms.slurm.commands import SlurmClient
from ringweave.platforms.slurm.job_runtime import ALLOCATION_REVOKED, AllocationGrant, SlurmDeps, SlurmJobRuntime
from ringweave.platforms.slurm.lease import LeaseRenewer, SlurmTimeouts
from ringweave.platforms.slurm.registry import AllocationState, SlurmJobRegistry, SlurmRegistryEntry

CONTROLLER_POLL_S = 0.2
"""Interval between passes; each reads a few small files of the shared file system."""
CLEANUP_LEAD_S = 60.0
"""Lead time of the cleanup job before the end of a TTL, since Slurm starts jobs late; the cleanup waits for the rest.
"""
CONTROLLER_RETRY_S = 1.0
"""Delay after a failed action or observation."""


def timeout_arguments(timeouts: SlurmTimeouts) -> list[str]:
    """Return the timeouts as arguments of our main programs."""
    return [str(timeouts.lease_s), str(timeouts.fence_s)]


class AllocationRevokedError(BaseException):
    """Slurm ends the allocation. Observations from now on are its effect and allow no conclusions."""


class SlurmController:
    """Controller of one job, active as long as its claim holds."""

    def __init__(
        self,
        registry: SlurmJobRegistry,
        name: str,
        grant: AllocationGrant | None,
        deps: SlurmDeps,
        clock: Callable[[], float] = time.time,
        on_boundary: BoundaryHook = lambda boundary: None,
    ) -> None:
        """Without a grant it only cleans up. `on_boundary` is called before and after each action, with its name."""
        self._registry, self._name, self._grant, self._deps = registry, name, grant, deps
        self._clock, self._on_boundary = clock, on_boundary
        self._runtime: SlurmJobRuntime | None = None

    def claim_job(self) -> bool:
        """Claim the job for this allocation. Return False if another allocation has it, or if it is gone."""
        assert self._grant is not None, "no allocation to claim the job with"
        with self._registry.locked_entry(self._name) as entry:
            if entry is None or entry.allocation_state.allocation not in (None, self._grant.job_id):
                return False
            if not _is_same_or_newer_grant(self._grant.key, entry.allocation_state.claim):
                return False
            allocation_state = replace(entry.allocation_state, allocation=self._grant.job_id, claim=self._grant.key)
            self._registry.save_record(self._name, entry.job.record, allocation_state)
            return True

    def adopt_allocation(self) -> None:
        """Record that this allocation is a new one: all nodes gather again, and no node is charged."""
        assert self._grant is not None, "no allocation to adopt the job into"
        with self._registry.locked_entry(self._name) as entry:
            if entry is None or entry.allocation_state.adopted == self._grant.key:
                return
            record, count = entry.job.record, _count_fruitless_requeues(entry, self._grant)
            if count >= MAX_FAILED_STARTS:  # a job that ran may be preempted any number of times
                record = advance.fail_after_preemptions(entry.job, record, ALLOCATION_REVOKED, count, self._clock())
            elif self._has_wanted_groups(record):
                record = advance.record_after_preemption(record, ALLOCATION_REVOKED)
            allocation_state = replace(entry.allocation_state, adopted=self._grant.key, num_fruitless_requeues=count)
            self._registry.save_record(self._name, record, allocation_state)

    def _has_wanted_groups(self, record: JobRecord) -> bool:
        """Return whether groups of current attempts ran in an earlier allocation; kept groups do not count."""
        wanted = {(node, known.attempt) for node, known in enumerate(record.nodes) if known.ended is None}
        return any((each.node, each.attempt) in wanted for each in self._registry.folder(self._name).groups())

    def holds_claim(self) -> bool:
        """Return whether no other controller has claimed the job since."""
        entry = self._registry.find_by_name(self._name)
        return entry is not None and self._grant is not None and entry.allocation_state.claim == self._grant.key

    def reconcile_once(self) -> float | None:
        """Observe and act once. Return the seconds until the next pass, or None if there is nothing more to do."""
        entry = self._registry.find_by_name(self._name)
        if entry is None or (self._grant is not None and entry.allocation_state.claim != self._grant.key):
            return None
        if self._runtime is None:
            folder, config = self._registry.folder(self._name), entry.origin.config(entry.job)
            self._runtime = SlurmJobRuntime(folder, config, entry.components, self._grant, self._deps)
        observed, now = self._runtime.observe(), self._clock()
        todo = [each for each in reconcile(entry.job, observed, now) if not isinstance(each, records.RequeueAt)]
        for action in todo:
            if self._grant is None and isinstance(action, records.CreateConfig | records.CreateGroup):
                latest = self._registry.find_by_name(self._name)
                return None if latest is None or wants_allocation(latest) else 0.0  # the job waits for an allocation
            try:
                self._apply(self._runtime, entry, action, now)
            except (OSError, LaunchError) as error:
                print(f"{type(action).__name__}: {error}", file=sys.stderr, flush=True)
                return CONTROLLER_RETRY_S
        if todo:
            return 0.0
        return CONTROLLER_POLL_S if observed.is_under_way else self._release_allocation(entry)

    def reconcile_or_retry(self) -> float | None:
        """Run one pass. If Slurm or the file system does not answer, the next pass comes later."""
        try:
            return self.reconcile_once()
        except (OSError, LaunchError) as error:
            print(f"look at {self._name}: {error}", file=sys.stderr, flush=True)
            return CONTROLLER_RETRY_S

    def _release_allocation(self, entry: SlurmRegistryEntry) -> float | None:
        """Release the allocation, unless the job still wants it or its desired state has changed."""
        with self._registry.locked_entry(self._name) as latest:
            if latest is None:
                return None
            if latest.job.desired != entry.job.desired:
                return 0.0
            if wants_allocation(latest) and self._grant is not None:
                return CONTROLLER_POLL_S
            allocation_state = self._schedule_cleanup(latest, replace(latest.allocation_state, allocation=None))
            self._registry.save_record(self._name, latest.job.record, allocation_state)
            return None

    def _schedule_cleanup(self, entry: SlurmRegistryEntry, allocation_state: AllocationState) -> AllocationState:
        """Submit a Slurm job that removes the job after its TTL, even if no command looks at it."""
        at_s = advance.ttl_expiry_s(entry.job, entry.job.record)
        if at_s is None or at_s == allocation_state.cleanup_at_s:
            return allocation_state
        if allocation_state.cleanup_job is not None:  # of an earlier end, which another run followed
            self._deps.slurm.cancel(str(allocation_state.cleanup_job), only_pending=True)
        words = [*timeout_arguments(self._deps.timeouts), str(self._registry.folder(self._name).root), entry.id]
        argv = [sys.executable, "-P", "-m", "ringweave.platforms.slurm.allocation", *words]
        script = batch_script.render_cleanup_script(entry.job, max(0.0, at_s - self._clock() - CLEANUP_LEAD_S), argv)
        try:
            cleanup_job_id = self._deps.slurm.submit_script(script, without_slurm_variables(self._deps.environ))
        except LaunchError as error:
            print(f"TTL of {self._name}: {error}", file=sys.stderr, flush=True)
            return allocation_state  # the first command after the TTL removes the job anyway
        return replace(allocation_state, cleanup_job=cleanup_job_id, cleanup_at_s=at_s)

    def _apply(self, runtime: SlurmJobRuntime, entry: SlurmRegistryEntry, action: JobAction, now: float) -> None:
        name = type(action).__name__
        self._on_boundary(f"before {name}")
        if isinstance(action, records.SaveRecord):
            with self._registry.locked_entry(self._name) as latest:
                if latest is None or latest.allocation_state.claim != entry.allocation_state.claim:
                    raise LaunchError("another controller owns the record now")
                self._registry.add_events(self._name, action.events, now)
                self._on_boundary("events recorded")
                self._registry.save_record(self._name, action.record, latest.allocation_state)
        elif isinstance(action, records.ForgetJob):
            latest = self._registry.find_by_name(self._name)
            if latest is not None and not latest.job.desired.delete:
                api.write_tombstone(self._registry.folder(self._name).root, latest.job.record)
            self._registry.delete(entry)
            if entry.allocation_state.cleanup_job is not None:
                self._deps.slurm.cancel(str(entry.allocation_state.cleanup_job), only_pending=True)
        else:
            runtime.apply(action)
        self._on_boundary(f"after {name}")


def wants_allocation(entry: SlurmRegistryEntry) -> bool:
    """Return whether the job should run, so that it needs hosts."""
    job = entry.job
    if job.desired.delete or job.desired.suspend or job.record.deleting:
        return False
    if job.record.outcome is None:
        return job.desired.stop_run < job.record.run
    return advance.is_retry_pending(job)


def _count_fruitless_requeues(entry: SlurmRegistryEntry, grant: AllocationGrant) -> int:
    """Return the requeues in a row of this allocation before all nodes ran, including this one."""
    is_requeued = entry.allocation_state.adopted.partition(".")[0] == str(grant.job_id)
    return (
        entry.allocation_state.num_fruitless_requeues + 1
        if is_requeued and entry.job.record.state is not JobState.RUNNING
        else 0
    )


def without_slurm_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables of an outer Slurm job, which the new job would inherit."""
    return {key: value for key, value in environ.items() if not key.startswith("SLURM_") or key == "SLURM_CONF"}


def _is_same_or_newer_grant(key: str, claimed: str) -> bool:
    """Return whether the key is of the same allocation or of a later one."""
    return not claimed or tuple(map(int, key.split("."))) >= tuple(map(int, claimed.split(".")))


def grant_from_environment(environ: Mapping[str, str]) -> AllocationGrant:
    """Return the allocation in which this process runs."""
    size = int(environ.get("SLURM_HET_SIZE", "1"))
    job_id = int(environ["SLURM_JOB_ID"])
    if size == 1:
        job_ids, hosts = (job_id,), (environ["SLURM_JOB_NODELIST"],)
    else:
        job_ids = tuple(int(environ[f"SLURM_JOB_ID_HET_GROUP_{part}"]) for part in range(size))
        hosts = tuple(environ[f"SLURM_JOB_NODELIST_HET_GROUP_{part}"] for part in range(size))
    return AllocationGrant(key=f"{job_id}.{environ.get('SLURM_RESTART_COUNT') or 0}", job_ids=job_ids, hosts=hosts)


def main(root: Path, timeouts: SlurmTimeouts) -> None:
    """Control the job of a folder until nothing of it has to run, or another controller claims it."""
    rotation.rotate_own_output()
    slurm, grant = SlurmClient(), grant_from_environment(os.environ)
    os.chdir("/")
    registry = SlurmJobRegistry(root.parent.parent)
    deps = SlurmDeps(slurm=slurm, environ=os.environ, timeouts=timeouts)
    controller = SlurmController(registry, root.name, grant, deps)
    lease_renewer = LeaseRenewer(root / "controller.lease", grant.key)

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise AllocationRevokedError

    signal.signal(signal.SIGTERM, leave)
    try:
        _run_controller(controller, root, lease_renewer)
    except AllocationRevokedError:
        lease_renewer.revoke()


def _run_controller(controller: SlurmController, root: Path, lease_renewer: LeaseRenewer) -> None:
    if not controller.claim_job():
        return
    while (held := job_folder.try_lock_file(root / "controller.lock")) is None:
        if not controller.holds_claim():
            return
        time.sleep(CONTROLLER_POLL_S)
    controller.adopt_allocation()
    lease_renewer.start()
    while (wait_s := controller.reconcile_or_retry()) is not None:
        time.sleep(wait_s)
    lease_renewer.stop()
    os.close(held)


if __name__ == "__main__":
    main(Path(sys.argv[1]), SlurmTimeouts(lease_s=float(sys.argv[2]), fence_s=float(sys.argv[3])))
