"""Allocation monitor: requests, cancels and cleans up allocations of jobs whose controller does not run.

The controller does the rest. Both read the same files and decide by the same `reconcile`.

    python -m ringweave.platforms.slurm.allocation LEASE_S FENCE_S JOB_FOLDER ID

is the program of the Slurm job that removes a finished job after its TTL; it needs one CPU for a minute.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ringweave.jobs import advance
from ringweave.jobs.records import GroupPhase, Job, JobEvent, ObservedGroup, ObservedJobState, PendingCause
from ringweave.platforms.local import job_folder
from ringweave.platforms.slurm import batch_script
from ringweave.platforms.slurm.commands import Allocation, SlurmClient, SlurmTimeoutError
from ringweave.platforms.slurm.controller import (
    SlurmController,
    timeout_arguments,
    wants_allocation,
    without_slurm_variables,
)
from ringweave.platforms.slurm.job_runtime import ALLOCATION_REVOKED, SlurmDeps
from ringweave.platforms.slurm.lease import SlurmTimeouts
from ringweave.platforms.slurm.registry import AllocationState, SlurmJobRegistry, SlurmRegistryEntry

PENDING_REASON_TEXTS: Mapping[str, str] = {
    "None": "Slurm has not considered it yet",
    "Resources": "the necessary machines are in use; it starts when other jobs end (squeue shows them)",
    "Priority": "other jobs of its partition have priority; squeue --start shows the expected start",
    "BeginTime": "it was requeued, and Slurm waits at most 2 minutes before the next start",
    "Dependency": "a job that it depends on has not ended",
    "JobHeldUser": "held by a user; scontrol release {job_id} releases it",
    "JobHeldAdmin": "held by an administrator of the cluster; ask them",
    "ReqNodeNotAvail": "a requested machine is down, drained or reserved; sinfo -R shows why. "
    "Leave its name out to use another one, or have it repaired",
    "PartitionDown": "its partition is down; sinfo shows others, SBATCH_PARTITION chooses one",
    "PartitionInactive": "its partition takes no jobs now; sinfo shows others, SBATCH_PARTITION chooses one",
    "PartitionNodeLimit": "it asks for more machines than its partition allows; ask for fewer nodes",
    "PartitionTimeLimit": "it asks for more time than its partition allows; set SBATCH_TIMELIMIT",
    "Reservation": "its reservation has not started",
    "Licenses": "it waits for a licence",
    "NodeDown": "a necessary machine is down; sinfo -R shows why",
    "BadConstraints": "no machine satisfies the request; see sinfo and ask for less",
    "InvalidAccount": "its account is not valid; set SBATCH_ACCOUNT",
    "InvalidQOS": "its quality of service is not valid; set SBATCH_QOS",
    "AssocGrpGRES": "the GPU limit of its account is reached; it starts when jobs of the account end",
    "AssocGrpCpuLimit": "the CPU limit of its account is reached; it starts when jobs of the account end",
    "AssocMaxJobsLimit": "the job limit of its account is reached; it starts when one of the jobs ends",
    "QOSMaxJobsPerUserLimit": "your job limit is reached; it starts when one of your jobs ends",
    "QOSMaxGRESPerUser": "your GPU limit is reached; it starts when one of your jobs ends",
    "QOSGrpGRES": "the GPU limit of its quality of service is reached",
    "launch_failed_requeued_held": "its start failed, and Slurm holds it; see sinfo -R, then scontrol release {job_id}",
    "job_requeued_in_held_state": "requeued and held; scontrol release {job_id} releases it",
    "Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved_for_jobs_in_higher_priority_partitions": "necessary "
    "machines are down, drained or reserved; sinfo -R shows why. Have them repaired, or ask for less",
}
"""Slurm's reason -> meaning and hint."""
_LIMIT_TEXT = "a limit of the account or the quality of service is reached; sacctmgr show assoc shows it"


def pending_text(allocation: Allocation) -> str:
    """Return the text about a pending job, with Slurm's own reason in it."""
    word = allocation.reason.partition("(")[0].rstrip(",") or "None"
    known = PENDING_REASON_TEXTS.get(word) or PENDING_REASON_TEXTS.get(word.split(",")[0])
    if known is None:
        known = _LIMIT_TEXT if word.startswith(("Assoc", "QOS")) else "see the job reason codes in squeue's manual"
    start = f". Slurm expects to start it at {allocation.start}" if allocation.start else ""
    return f"Slurm job {allocation.job_id} ({word}): {known.format(job_id=allocation.job_id)}{start}"


CANCEL_TIMEOUT_S = 10.0
"""Time for a cancelled pending job to leave Slurm's queue; a later exit is found by the next command."""
CLEAR_TIMEOUT_S = 2.0
"""Time for the files of a job to be cleaned up."""
CANCEL_POLL_S = 0.1
ANSWER_TTL_S = 2.0
"""Cache time of Slurm's answer for commands that only look."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitoredJob:
    """Job with Slurm's state of its allocation."""

    entry: SlurmRegistryEntry
    allocation: Allocation | None
    """None if the job has no allocation, or unknown to Slurm."""


class AllocationMonitor:
    """Monitor of the allocations of a registry's jobs."""

    def __init__(
        self,
        registry: SlurmJobRegistry,
        slurm: SlurmClient,
        *,
        environ: Mapping[str, str],
        timeouts: SlurmTimeouts,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._registry, self._slurm, self._environ, self._timeouts = registry, slurm, environ, timeouts
        self._clock, self._sleep = clock, sleep
        self._answers: dict[int, tuple[float, str, Allocation | None]] = {}
        """Slurm job -> time of the query, controller key at that time, and answer."""

    def refresh(self, name: str, *, may_request: bool = False) -> MonitoredJob | None:
        """Return the job after everything that can be done for it now; None once it is forgotten.

        `may_request`: request an allocation if one is wanted. Commands that only look never do: a job must not start
        because a user looks at it hours later.
        """
        entry = self._find_unconfirmed(self._registry.find_by_name(name))
        if entry is None:
            return None
        allocation = self._query_allocation(entry.allocation_state, fresh=may_request)
        if allocation is not None and allocation.is_pending and not wants_allocation(entry):
            allocation = self._cancel_pending(allocation)
        if entry.allocation_state.allocation is not None and (allocation is None or allocation.is_over):
            self._record_allocation_end(name, entry.allocation_state.allocation, allocation)
        elif allocation is not None:
            return MonitoredJob(entry=entry, allocation=allocation)
        if may_request:
            self._request_allocation(name)
        return self._clean_without_controller(name)

    def batch_script(self, entry: SlurmRegistryEntry) -> str:
        folder = self._registry.folder(entry.job.request.name).root
        return batch_script.render_batch_script(
            entry.job, entry.id, entry.components, folder, self._controller_command(folder)
        )

    def _find_unconfirmed(self, entry: SlurmRegistryEntry | None) -> SlurmRegistryEntry | None:
        """Return the entry with the Slurm job of an unconfirmed submission, if Slurm has it."""
        if entry is None or not entry.allocation_state.is_unconfirmed or entry.allocation_state.allocation is not None:
            return entry
        job_id = self._slurm.find_job_id(batch_script.slurm_job_name(entry.job), entry.id)
        if job_id is None:
            return entry
        name = entry.job.request.name
        with self._registry.locked_entry(name) as latest:
            if latest is not None and latest.allocation_state.allocation is None:
                allocation_state = replace(latest.allocation_state, allocation=job_id, is_unconfirmed=False)
                self._registry.save_record(name, latest.job.record, allocation_state)
        return self._registry.find_by_name(name)

    def _request_allocation(self, name: str) -> None:
        """Submit the batch script. If this process is killed after that, the Slurm job takes over by itself."""
        with self._registry.locked_entry(name) as entry:
            if entry is None or entry.allocation_state.allocation is not None or not wants_allocation(entry):
                return
            try:
                job_id = self._slurm.submit_script(
                    self.batch_script(entry), without_slurm_variables(entry.origin.environ)
                )
            except SlurmTimeoutError as error:
                self._registry.save_record(name, entry.job.record, replace(entry.allocation_state, is_unconfirmed=True))
                again = f"ringweave resume {name} --on slurm"
                do = f"Check it with ringweave status {name} --on slurm, or request it again with {again}"
                raise SlurmTimeoutError(f"{error} Slurm may have accepted job {name}. {do}.") from error
            allocation_state = replace(entry.allocation_state, allocation=job_id, is_unconfirmed=False)
            self._registry.save_record(name, entry.job.record, allocation_state)

    def _cancel_pending(self, allocation: Allocation) -> Allocation | None:
        """Cancel a pending Slurm job; a job that starts meanwhile is left to its controller."""
        deadline = self._clock() + CANCEL_TIMEOUT_S
        self._slurm.cancel(str(allocation.job_id), only_pending=True)
        latest: Allocation | None = allocation
        while latest is not None and latest.is_pending and self._clock() < deadline:
            self._sleep(CANCEL_POLL_S)
            latest = self._slurm.get_allocation(allocation.job_id)
        return latest

    def _record_allocation_end(self, name: str, job_id: int, allocation: Allocation | None) -> None:
        """Record the end of an allocation that was not released: by scancel, a time limit or an administrator."""
        with self._registry.locked_entry(name) as entry:
            if entry is None or entry.allocation_state.allocation != job_id:
                return
            if wants_allocation(entry):
                slurm_state = (
                    f"{allocation.state} {allocation.reason}".strip() if allocation is not None else "unknown to Slurm"
                )
                text = (
                    f"Slurm job {job_id} ended before the job did: {slurm_state}. "
                    f"ringweave retry {name} requests another one."
                )
                event = JobEvent(key=f"allocation/{job_id}", kind="AllocationEnded", text=text)
                self._registry.add_events(name, [event], self._clock())
                self._registry.update_desired(name, replace(entry.job.desired, stop_run=entry.job.record.run))
            self._registry.save_record(name, entry.job.record, replace(entry.allocation_state, allocation=None))

    def _clean_without_controller(self, name: str) -> MonitoredJob | None:
        """Do the controller's work that needs no hosts, unless a controller runs."""
        folder = self._registry.folder(name).root
        try:
            lock = job_folder.try_lock_file(folder / "controller.lock")
        except FileNotFoundError:
            return None
        entry = self._registry.find_by_name(name)
        if lock is not None and entry is not None and entry.allocation_state.allocation is None:
            deps = SlurmDeps(slurm=self._slurm, environ=entry.origin.environ, timeouts=self._timeouts)
            controller = SlurmController(self._registry, name, None, deps, clock=self._clock)
            deadline = self._clock() + CLEAR_TIMEOUT_S
            while (wait_s := controller.reconcile_once()) is not None and self._clock() < deadline:
                self._sleep(wait_s)
        if lock is not None:
            os.close(lock)
        entry = self._registry.find_by_name(name)
        if entry is None:
            return None
        return MonitoredJob(entry=entry, allocation=self._query_allocation(entry.allocation_state, fresh=True))

    def _query_allocation(self, allocation_state: AllocationState, *, fresh: bool) -> Allocation | None:
        """Return Slurm's state of a job, cached for a while for commands that follow the job.

        An answer is valid only for the same controller: one that started later is not in an earlier answer.
        """
        job_id = allocation_state.allocation
        if job_id is None:
            return None
        known = self._answers.get(job_id)
        is_known = (
            known is not None and known[1] == allocation_state.adopted and 0 <= self._clock() - known[0] < ANSWER_TTL_S
        )
        if fresh or known is None or not is_known:
            known = self._answers[job_id] = (
                self._clock(),
                allocation_state.adopted,
                self._slurm.get_allocation(job_id),
            )
        return known[2]

    def _controller_command(self, folder: Path) -> Sequence[str]:
        words = [str(folder), *timeout_arguments(self._timeouts)]
        return [sys.executable, "-P", "-m", "ringweave.platforms.slurm.controller", *words]


def displayed_slurm_job(monitored: MonitoredJob, now: float) -> Job:
    """Return the job to display: the record that its controller saved last, or why there is none yet."""
    entry, allocation = monitored.entry, monitored.allocation
    job, pending_cause = entry.job, PendingCause.CAPACITY
    if not wants_allocation(entry):
        return job
    if allocation is None and entry.allocation_state.is_unconfirmed:
        resume = f"ringweave resume {job.request.name}"
        text = f"Slurm did not answer the request, and has no such job now; {resume} requests it again"
    elif allocation is None:
        text = f"recorded, but not requested from Slurm; ringweave resume {job.request.name} requests it"
    elif allocation.is_pending:
        text = pending_text(allocation)
    elif entry.allocation_state.adopted != f"{allocation.job_id}.{allocation.restarts}":
        text, pending_cause = f"Slurm job {allocation.job_id} ({allocation.state}): its controller starts", None
    else:
        return advance.with_pending_retry(job, now)
    if advance.is_retry_pending(job):
        job = advance.with_pending_retry(job, now)
    elif entry.allocation_state.adopted:
        job = replace(job, record=advance.record_after_preemption(job.record, f"{ALLOCATION_REVOKED}; {text}"))
        pending_cause = None  # the new round has its own reason
    groups = tuple(
        ObservedGroup(
            node=node,
            attempt=job.record.nodes[node].attempt,
            round=job.record.round,
            phase=GroupPhase.PENDING,
            text=text,
            pending_cause=pending_cause,
        )
        for node in job.used_nodes
        if job.record.nodes[node].ended is None
    )
    return replace(job, record=advance.advance_record(job, ObservedJobState(groups=groups), now))


TTL_MARGIN_S = 0.01
"""Margin after the end of a TTL, against rounding."""
CLEANUP_RETRY_S = 5.0
"""Retry interval while something of the job still holds it."""


def remove_after_ttl(
    registry: SlurmJobRegistry,
    monitor: AllocationMonitor,
    name: str,
    job_id: str,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait for the end of the TTL and remove the job, unless it runs again or another job has its name."""
    while True:
        entry = registry.find_by_name(name)
        at_s = None if entry is None or entry.id != job_id else advance.ttl_expiry_s(entry.job, entry.job.record)
        if at_s is None:
            return
        if clock() >= at_s:
            if monitor.refresh(name) is None:
                return
            sleep(CLEANUP_RETRY_S)
        else:
            sleep(at_s - clock() + TTL_MARGIN_S)


def main(root: Path, job_id: str, timeouts: SlurmTimeouts) -> None:
    """Remove the job of a folder after its TTL."""
    registry = SlurmJobRegistry(root.parent.parent)
    monitor = AllocationMonitor(registry, SlurmClient(), environ=os.environ, timeouts=timeouts)
    remove_after_ttl(registry, monitor, root.name, job_id)


if __name__ == "__main__":
    main(Path(sys.argv[3]), sys.argv[4], SlurmTimeouts(lease_s=float(sys.argv[1]), fence_s=float(sys.argv[2])))
