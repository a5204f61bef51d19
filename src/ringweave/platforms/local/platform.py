"""Local platform: jobs on this machine as the commands see them, and their logs; `--on local`, the default."""

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import platformdirs

from ringweave import topology
from ringweave.errors import JobError
from ringweave.jobs import admission
from ringweave.jobs.admission import AccessPolicy, PermissionCache
from ringweave.jobs.advance import is_finished, with_pending_retry
from ringweave.jobs.records import DesiredJobState, Job
from ringweave.jobs.request import JobRequest
from ringweave.platforms import api, submission
from ringweave.platforms.agent import job_config
from ringweave.platforms.api import JobView, LogLine, LogQuery, Platform, RenderedObject, Submission, Tombstones
from ringweave.platforms.local import supervisor
from ringweave.platforms.local.job_folder import REGISTRY, job_folder
from ringweave.platforms.local.registry import LocalJobRegistry, LocalRegistryEntry


class LocalPlatform(Platform):
    """Local platform: the nodes of its jobs are worker groups on this machine, all in one user's state folder."""

    def __init__(
        self,
        state: Path,
        *,
        requester: str,
        environ: Mapping[str, str],
        policy_rules: AccessPolicy = admission.OPEN_POLICY,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Open the platform of a state folder.

        Args:
            state: Folder of the registry and of the jobs' folders; created if needed.
            requester: OS user of the request.
            environ: Environment that submitted jobs inherit.
            policy_rules: Policy of permissions and limits.
            clock: Seconds since 1970.
            sleep: Waits between two polls of logs.
        """
        self._state, self._requester, self._environ = state, requester, dict(environ)
        self._registry = LocalJobRegistry(state / REGISTRY)
        self._permissions = PermissionCache(policy_rules.find_permission)
        self._clock, self._sleep = clock, sleep
        self._tombstones = Tombstones()

    def submit(
        self, request: JobRequest, *, base: Path, script_text: str | None = None, dry_run: bool = False
    ) -> Submission:
        submission.check_platform_keys(request, "local")
        job = self._admit(request, self._registry.rivals(request))  # before any file that it names is read
        origin = submission.create_origin(request, base, self._environ, script_text)
        origin = replace(origin, cluster=submission.lab_cluster_text(request))
        job_config.build_cluster(
            job_config.job_config(job, directory=None, script_text=None, cluster=origin.cluster), {}
        )
        entry = LocalRegistryEntry(id=f"{request.name}-{secrets.token_hex(4)}", job=job, origin=origin)
        if not dry_run:
            entry = self._registry.insert(entry, lambda there: self._admit(request, there))
            self._ensure_supervisor(entry)
        return Submission(job=self._view(entry), objects=_rendered_objects(entry) if dry_run else ())

    def jobs(self) -> Sequence[JobView]:
        now = self._clock()
        entries = self._registry.all_entries()
        self._check_permission("jobs", self._requester, now)
        may_see_all = self._permissions.get_permission(self._requester, "jobs", now).any_owner
        seen = [entry for entry in entries if may_see_all or entry.job.requester == self._requester]
        for entry in seen:
            if _needs_supervisor(entry):
                self._ensure_supervisor(entry)
        return [self._view(entry) for entry in seen]

    def job(self, name: str) -> JobView:
        found = self._registry.find_by_name(name)  # once: it may be deleted at any moment
        if found is None and (gone := self._tombstones.take_final_job(name)) is not None:
            return api.job_view(gone, platform="local")
        entry = self._check_found(found, name, "status")
        self._tombstones.watch_job(job_folder(self._state, entry.id).root, entry.job)
        if _needs_supervisor(entry):
            self._ensure_supervisor(entry)
        return self._view(entry, with_events=True)

    def act(self, name: str, verb: str) -> JobView:
        """Change the desired state of a job, and wake its supervisor."""
        entry = self._find_checked(name, verb)
        if entry.problem and verb != "delete":
            raise JobError(f"{verb} of job {name}: {entry.job.record.reason}")
        if entry.problem:  # its agents leave when its folder is gone
            self._registry.delete(entry.id)
        else:
            self._registry.update_desired(entry.id, lambda job, there: self._desired_after(verb, job, there))
        self._ensure_supervisor(entry)
        return self._view(self._registry.find_by_id(entry.id) or entry, with_events=True)

    def logs(self, name: str, which: LogQuery) -> Iterator[LogLine]:
        entry = self._find_checked(name, "logs")
        submission.check_log_query(entry.job, which)
        folder = job_folder(self._state, entry.id)
        return api.follow_logs(
            lambda positions: api.read_new_text(api.find_logs(folder.runs_folder, which), positions),
            which,
            is_over=lambda: self._is_over(entry.id),
            sleep=self._sleep,
        )

    def _desired_after(self, verb: str, job: Job, there: Sequence[Job]) -> DesiredJobState:
        desired = admission.apply_verb(verb, job, self._clock())
        if verb == "retry":
            admission.check_retry(job, existing=there, permissions=self._permissions, now=self._clock())
        return desired

    def _admit(self, request: JobRequest, there: Sequence[Job]) -> Job:
        return admission.admit_job(
            request, requester=self._requester, existing=there, permissions=self._permissions, now=self._clock()
        )

    def _find_checked(self, name: str, verb: str) -> LocalRegistryEntry:
        return self._check_found(self._registry.find_by_name(name), name, verb)

    def _check_found(self, entry: LocalRegistryEntry | None, name: str, verb: str) -> LocalRegistryEntry:
        """Return the entry, if it exists and the requester may access it."""
        if entry is None:
            names = [each.job.request.name for each in self._registry.all_entries()]
            look = "See ringweave jobs, or name its platform with --on"
            raise admission.unknown_job_error(name, names, look=look, where="local")
        self._check_permission(verb, entry.job.requester, self._clock())
        return entry

    def _check_permission(self, verb: str, owner: str, now: float) -> None:
        admission.check_permission(verb, requester=self._requester, owner=owner, permissions=self._permissions, now=now)

    def _ensure_supervisor(self, entry: LocalRegistryEntry) -> None:
        environ = entry.origin.environ or self._environ
        supervisor.ensure_supervisor(self._state, entry.id, environ)

    def _is_over(self, job_id: str) -> bool:
        entry = self._registry.find_by_id(job_id)
        if entry is None:
            return True
        if _needs_supervisor(entry):
            self._ensure_supervisor(entry)
        return with_pending_retry(entry.job, self._clock()).record.state.is_end

    def _view(self, entry: LocalRegistryEntry, *, with_events: bool = False) -> JobView:
        events = self._registry.events(entry.id) if with_events else ()
        files = str(job_folder(self._state, entry.id).runs_folder)
        return api.job_view(with_pending_retry(entry.job, self._clock()), platform="local", events=events, files=files)


def open_service(environ: Mapping[str, str]) -> LocalPlatform:
    """Open the platform for the user of this process, with the policy of this machine, or else of the user.

    Raises:
        JobError: The policy file is wrong.
        LaunchError: The registry cannot be used.
    """
    return LocalPlatform(
        platformdirs.user_state_path("ringweave"),
        requester=submission.os_user(),
        environ=environ,
        policy_rules=submission.load_policy(),
    )


def _rendered_objects(entry: LocalRegistryEntry) -> tuple[RenderedObject, ...]:
    job, origin = entry.job, entry.origin
    config = origin.config(job)
    cluster = topology.dumps(job_config.build_cluster(config, {}))
    return (
        RenderedObject(name="config.json", text=job_config.JOB_CONFIG_JSON.dump(config)),
        RenderedObject(name="cluster.yaml", text=cluster),
    )


def _needs_supervisor(entry: LocalRegistryEntry) -> bool:
    """Return whether the job may need actions although no user asks for anything."""
    job = entry.job
    return not entry.problem and (not is_finished(job) or job.desired.delete or job.request.ttl_s is not None)
