"""Slurm platform of the job commands (`--on slurm`)."""

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import platformdirs

from ringweave.errors import LaunchError, UnknownJobError
from ringweave.jobs import admission
from ringweave.jobs.admission import AccessPolicy, PermissionCache
from ringweave.jobs.records import Job
from ringweave.jobs.request import JobRequest
from ringweave.platforms import api, submission
from ringweave.platforms.agent import job_config
from ringweave.platforms.api import JobView, LogLine, LogQuery, Platform, RenderedObject, Submission, Tombstones
from ringweave.platforms.slurm import allocation, batch_script
from ringweave.platforms.slurm.allocation import AllocationMonitor, MonitoredJob
from ringweave.platforms.slurm.commands import SlurmClient, SlurmTimeoutError
from ringweave.platforms.slurm.lease import SlurmTimeouts
from ringweave.platforms.slurm.registry import SlurmJobRegistry, SlurmRegistryEntry


class SlurmPlatform(Platform):
    """Jobs of one Slurm cluster, in a folder that its hosts share."""

    def __init__(
        self,
        root: Path,
        slurm: SlurmClient,
        *,
        requester: str,
        environ: Mapping[str, str],
        policy_rules: AccessPolicy = admission.OPEN_POLICY,
        timeouts: SlurmTimeouts | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Jobs below a folder. `environ`: environment that submitted jobs inherit, with the settings of sbatch."""
        self._registry, self._slurm = SlurmJobRegistry(root), slurm
        self._requester, self._environ, self._clock = requester, dict(environ), clock
        self._permissions = PermissionCache(policy_rules.find_permission)
        self._tombstones = Tombstones()
        self._monitor = AllocationMonitor(
            self._registry, slurm, environ=environ, timeouts=timeouts or SlurmTimeouts(), clock=clock, sleep=time.sleep
        )

    def submit(
        self, request: JobRequest, *, base: Path, script_text: str | None = None, dry_run: bool = False
    ) -> Submission:
        submission.check_platform_keys(request, "slurm")
        self._admit(request, [each.job for each in self._registry.all_entries()])  # before any file named in it is read
        origin = submission.create_origin(request, base, self._environ, script_text)
        hosts = self._slurm.list_hosts(self._environ)

        def make(there: Sequence[Job]) -> SlurmRegistryEntry:
            job = self._admit(request, there)
            batch_script.check_feasible(job, hosts)
            job_config.build_cluster(job_config.job_config(job, directory=None, script_text=None), {})
            components = batch_script.allocation_components(job, {host.name for host in hosts})
            job_id = f"{request.name}-{secrets.token_hex(4)}"
            return SlurmRegistryEntry(id=job_id, job=job, origin=origin, components=components)

        if dry_run:
            entry = make([each.job for each in self._registry.all_entries()])
            return Submission(job=api.job_view(entry.job, platform="slurm"), objects=self._rendered_objects(entry))
        entry = self._registry.insert(make)
        try:
            monitored = self._monitor.refresh(request.name, may_request=True)
        except SlurmTimeoutError:
            raise  # Slurm may have accepted the job; the record leads to it
        except Exception as error:
            self._forget_if_refused(entry, error)
            raise
        return Submission(
            job=self._job_view(monitored or MonitoredJob(entry=entry, allocation=None)),
            objects=self._rendered_objects(entry),
        )

    def jobs(self) -> Sequence[JobView]:
        now = self._clock()
        self._check_permission("jobs", self._requester, now)
        may_see_all = self._permissions.get_permission(self._requester, "jobs", now).any_owner
        entries = [
            each for each in self._registry.all_entries() if may_see_all or each.job.requester == self._requester
        ]
        monitored_jobs = [self._monitor.refresh(entry.job.request.name) for entry in entries]
        return [self._job_view(monitored) for monitored in monitored_jobs if monitored is not None]

    def job(self, name: str) -> JobView:
        entry = self._registry.find_by_name(name)  # once: the job may be forgotten at any moment, also by `refresh`
        monitored = None
        if entry is not None:
            self._check_permission("status", entry.job.requester, self._clock())
            self._tombstones.watch_job(self._registry.folder(name).root, entry.job)
            monitored = self._monitor.refresh(name)
        if monitored is not None:
            return self._job_view(monitored, with_events=True)
        final_job = self._tombstones.take_final_job(name)
        if final_job is None:
            raise self._unknown_job_error(name)
        return api.job_view(final_job, platform="slurm")

    def act(self, name: str, verb: str) -> JobView:
        """Apply a verb to a job. The job's controller acts on it in a moment."""
        entry = self._find_entry(name, verb)
        self._refresh(entry)
        with self._registry.admission_lock() as existing, self._registry.locked_entry(name) as latest:
            if latest is not None:
                if verb == "retry":
                    self._check_retry(latest.job, existing)
                self._registry.update_desired(name, admission.apply_verb(verb, latest.job, self._clock()))
                entry = latest
        monitored = self._monitor.refresh(name, may_request=True)
        return self._job_view(
            monitored or MonitoredJob(entry=entry, allocation=None), with_events=monitored is not None
        )

    def logs(self, name: str, which: LogQuery) -> Iterator[LogLine]:
        """Yield the output of its workers."""
        entry = self._find_entry(name, "logs")
        submission.check_log_query(entry.job, which)
        folder = self._registry.folder(name)
        return api.follow_logs(
            lambda positions: api.read_new_text(api.find_logs(folder.runs_folder, which), positions),
            which,
            is_over=lambda: self._is_job_finished(name),
            sleep=time.sleep,
        )

    def _forget_if_refused(self, entry: SlurmRegistryEntry, error: Exception) -> None:
        """Forget a job that Slurm refused, so that its name is free again."""
        name = entry.job.request.name
        with self._registry.locked_entry(name) as latest:
            if latest is None or latest.id != entry.id:
                return
            job_id = latest.allocation_state.allocation
            if job_id is None:
                self._registry.delete(entry)
                return
        look = f"Check it with ringweave status {name} --on slurm"
        raise LaunchError(f"{error} Slurm has accepted job {name} as Slurm job {job_id}. {look}.") from error

    def _admit(self, request: JobRequest, existing: Sequence[Job]) -> Job:
        return admission.admit_job(
            request, requester=self._requester, existing=existing, permissions=self._permissions, now=self._clock()
        )

    def _check_retry(self, job: Job, existing: Sequence[Job]) -> None:
        admission.check_retry(job, existing=existing, permissions=self._permissions, now=self._clock())

    def _find_entry(self, name: str, verb: str) -> SlurmRegistryEntry:
        entry = self._registry.find_by_name(name)
        if entry is None:
            raise self._unknown_job_error(name)
        self._check_permission(verb, entry.job.requester, self._clock())
        return entry

    def _unknown_job_error(self, name: str) -> UnknownJobError:
        names = [each.job.request.name for each in self._registry.all_entries()]
        return admission.unknown_job_error(name, names, look="See ringweave jobs --on slurm", where="slurm")

    def _refresh(self, entry: SlurmRegistryEntry) -> MonitoredJob:
        monitored = self._monitor.refresh(entry.job.request.name)
        if monitored is None:
            raise self._unknown_job_error(entry.job.request.name)
        return monitored

    def _check_permission(self, verb: str, owner: str, now: float) -> None:
        admission.check_permission(verb, requester=self._requester, owner=owner, permissions=self._permissions, now=now)

    def _is_job_finished(self, name: str) -> bool:
        monitored = self._monitor.refresh(name)
        return monitored is None or allocation.displayed_slurm_job(monitored, self._clock()).record.state.is_end

    def _rendered_objects(self, entry: SlurmRegistryEntry) -> tuple[RenderedObject, ...]:
        config = entry.origin.config(entry.job)
        return (
            RenderedObject(name="batch script", text=self._monitor.batch_script(entry)),
            RenderedObject(name="config.json", text=job_config.JOB_CONFIG_JSON.dump(config)),
        )

    def _job_view(self, monitored: MonitoredJob, *, with_events: bool = False) -> JobView:
        name = monitored.entry.job.request.name
        events = self._registry.events(name) if with_events else ()
        files = str(self._registry.folder(name).runs_folder)
        return api.job_view(
            allocation.displayed_slurm_job(monitored, self._clock()), platform="slurm", events=events, files=files
        )


def open_service(environ: Mapping[str, str]) -> SlurmPlatform:
    """Return the platform of the current user, on the cluster that Slurm's commands reach.

    Raises:
        JobError: The policy file is invalid.
        LaunchError: Slurm does not answer, or the folder cannot be used.
    """
    slurm = SlurmClient()
    root = platformdirs.user_state_path("ringweave") / "slurm" / slurm.cluster_name()
    return SlurmPlatform(
        root, slurm, requester=submission.os_user(), environ=environ, policy_rules=submission.load_policy()
    )
