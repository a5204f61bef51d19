"""Admission of jobs: permissions, the policy file, the checks that turn a request into a job, and verbs on jobs.

Stop, retry, suspend, resume and delete each change the desired state of a job; they are pure and idempotent.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from pydantic import Field

from ringweave import units
from ringweave.errors import JobError, UnknownJobError
from ringweave.files import problems, yaml_files
from ringweave.files.problems import InputProblem, suggest_closest
from ringweave.files.yaml_files import FileKind
from ringweave.jobs import records
from ringweave.jobs.advance import advance_record, is_retry_pending, with_pending_retry
from ringweave.jobs.records import DesiredJobState, Job, ObservedJobState
from ringweave.jobs.request import JobRequest
from ringweave.jobs.states import JobState

ALLOW_TTL_S = 300.0
"""Cache time of a granted permission."""
DENY_TTL_S = 30.0
"""Cache time of a denied permission. Shorter, since a user who was just given a permission retries at once."""
MAX_CACHED_PERMISSIONS = 10_000
"""Maximum number of cached permissions; the oldest are dropped first. A platform has fewer users."""

VERB_NAMES = ("stop", "delete", "retry", "suspend", "resume")
"""Verbs that change the desired state of a job."""
JOB_VERBS = ("submit", "jobs", "status", "why", "logs", "events", *VERB_NAMES)
"""All verbs on jobs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Permission:
    """Permission of a user for a verb, or its denial."""

    allowed: bool
    text: str
    """Rule or role that allows or denies the verb, in words."""
    any_owner: bool = False
    """Valid for other users' jobs too."""
    max_gpus: int | None = None
    """Limit on the GPUs of all the user's jobs that have not ended, including the requested one; None: no limit."""


Authoriser = Callable[[str, str], Permission]
"""(requester, verb) -> permission; raises if it cannot be determined. Reads a policy file or asks the platform."""


class PermissionCache:
    """Cache of an authoriser's answers.

    Errors of the authoriser are passed on and never cached, so that an error is neither a grant nor a denial.
    """

    def __init__(self, authorise: Authoriser) -> None:
        self._authorise = authorise
        self._cached: dict[tuple[str, str], tuple[float, Permission]] = {}

    def get_permission(self, requester: str, verb: str, now: float) -> Permission:
        """Return the permission, from the cache while it is valid. `verb`: one of `VERBS`."""
        key = (requester, verb)
        known = self._cached.get(key)
        if known is not None and now < known[0]:
            return known[1]
        self._cached.pop(key, None)
        answer = self._authorise(requester, verb)
        while len(self._cached) >= MAX_CACHED_PERMISSIONS:
            self._cached.pop(next(iter(self._cached)))
        self._cached[key] = (now + (ALLOW_TTL_S if answer.allowed else DENY_TTL_S), answer)
        return answer


def admit_job(
    request: JobRequest,
    *,
    requester: str,
    existing: Iterable[Job],
    permissions: PermissionCache,
    now: float,
) -> Job:
    """Return the job for a request. Nothing of it exists yet.

    Args:
        request: The request, already well-formed.
        requester: The OS user or Kubernetes user that the platform reports, never one named by a flag.
        existing: All jobs of the platform. The platform must still reserve the name and create the job in one step: a
            request that loses that race gets `name_taken_error` of the winner.
        permissions: Cache of permissions.
        now: Seconds on the platform's clock.

    Raises:
        JobError: The request is refused; nothing has changed.
    """
    existing = list(existing)
    for job in existing:
        if job.request.name == request.name:
            raise name_taken_error(job, now)
    permission = check_permission("submit", requester=requester, owner=requester, permissions=permissions, now=now)
    if request.device == "cuda":
        _check_gpu_limit(request, requester, permission, gpus_in_use(existing, requester))
    split = request.split
    if split.counts is None:
        raise JobError(split.refusal_text(f"job {request.name}"))
    job = records.new_job(request, requester=requester, counts=split.counts, now=now)
    return replace(
        job, record=advance_record(job, ObservedJobState(), now)
    )  # so that its first status already has a reason


def gpus_in_use(existing: Iterable[Job], requester: str) -> int:
    """Return the number of GPUs of the requester's jobs that have not ended or wait for a retry."""
    own_jobs = [job for job in existing if job.requester == requester and job.request.device == "cuda"]
    return sum(job.request.num_workers for job in own_jobs if not _has_job_ended(job))


def _has_job_ended(job: Job) -> bool:
    return job.record.outcome is not None and not is_retry_pending(job)


def check_retry(job: Job, *, existing: Iterable[Job], permissions: PermissionCache, now: float) -> None:
    """Refuse a retry with which the requester would exceed the GPU limit that applies now.

    Raises:
        JobError: The limit would be exceeded.
    """
    if job.request.device == "cuda":
        others = [other for other in existing if other.request.name != job.request.name]
        permission = permissions.get_permission(job.requester, "submit", now)
        _check_gpu_limit(job.request, job.requester, permission, gpus_in_use(others, job.requester))


def name_taken_error(job: Job, now: float) -> JobError:
    """Return the error for a name that a job already has."""
    got = f"taken by {job.requester} {units.show_duration(now - job.created_s)} ago ({job.record.state})"
    do = f"Choose another name, or remove that job first with ringweave delete {job.request.name}"
    return JobError(f"job name {job.request.name}", got=got, expected="a free name", do=do)


def unknown_job_error(name: str, names: Iterable[str], *, look: str, where: str) -> UnknownJobError:
    """Return the error for a name that no job has. `look`: the advice if no existing name is similar."""
    do = suggest_closest(name, names) or look
    return UnknownJobError("job", got=name, expected="the name of an existing job", do=do, where=where)


def not_allowed_error(verb: str, requester: str, permission: Permission) -> JobError:
    """Return the error for a verb that the requester may not use."""
    do = f"Ask the administrator of this platform to allow {requester} to {verb}"
    return JobError(f"{verb} by {requester}", got=permission.text, expected="a permission", do=do)


def check_permission(verb: str, *, requester: str, owner: str, permissions: PermissionCache, now: float) -> Permission:
    """Return the permission to use the verb on a job of the owner.

    Raises:
        JobError: The requester has no such permission.
    """
    permission = permissions.get_permission(requester, verb, now)
    if not permission.allowed:
        raise not_allowed_error(verb, requester, permission)
    if requester != owner and not permission.any_owner:
        do = f"Ask {owner} to do it, or the administrator of this platform for a rule with jobs: all"
        got = f"the job is {owner}'s"
        raise JobError(f"{verb} by {requester}", got=got, expected="a job of their own", do=do)
    return permission


def _check_gpu_limit(request: JobRequest, requester: str, permission: Permission, gpus_in_use: int) -> None:
    limit = permission.max_gpus
    if limit is not None and request.num_workers + gpus_in_use > limit:
        free = max(0, limit - gpus_in_use)
        do = f"Ask for at most {free}" if free else "Wait for one of those jobs to end, or stop one"
        expected = f"at most {limit} GPUs in all jobs of {requester}, of which {gpus_in_use} are in use"
        raise JobError("GPUs in all", got=request.num_workers, expected=expected, do=do)


POLICY_FILE = FileKind(
    noun="policy file",
    error=JobError,
    expected_keys="a map with the key rules",
    fix_empty='Begin with "rules:", then list them',
    fix_too_large="Use * for all users",
)
ALL_USERS = "*"
_USERS = f"a list of user names, or {ALL_USERS} for everybody"
_VERBS = f"a list of {', '.join(JOB_VERBS)}"
_GPU_LIMIT = "a whole number of at least 0: GPUs of all jobs of a user that have not ended"


class PolicyRuleEntry(yaml_files.FileEntry):
    """Item of `rules` in the policy file."""

    users: list[str] = Field(description=_USERS, examples=["[ann, bob]"])
    verbs: list[str] | None = Field(default=None, description=_VERBS, examples=["[submit, stop]"])
    jobs: str = Field(default="own", description="own or all: on whose jobs", examples=["own"])
    max_gpus: int | None = Field(default=None, description=_GPU_LIMIT, examples=["16"])


class PolicyEntry(yaml_files.FileEntry):
    """Root of the policy file."""

    rules: list[PolicyRuleEntry] = Field(description="a list of rules", examples=["[{users: [ann], max_gpus: 16}]"])


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyRule:
    """Rule that allows verbs to users."""

    users: tuple[str, ...]
    """User names; `*` means all users."""
    verbs: tuple[str, ...] = JOB_VERBS
    any_owner: bool = False
    """Valid for other users' jobs too."""
    max_gpus: int | None = None
    """Limit on the GPUs of all jobs of one user that have not ended; None: no limit."""

    def applies_to(self, requester: str, verb: str) -> bool:
        return verb in self.verbs and (requester in self.users or ALL_USERS in self.users)


@dataclass(frozen=True, kw_only=True, slots=True)
class AccessPolicy:
    """Access policy: each rule allows something, and everything else is denied."""

    rules: tuple[PolicyRule, ...]
    """Rules in the order of the file; the order has no meaning."""

    def find_permission(self, requester: str, verb: str) -> Permission:
        """Return the widest permission of all rules that apply."""
        applicable = [rule for rule in self.rules if rule.applies_to(requester, verb)]
        if not applicable:
            return Permission(allowed=False, text=f"no rule of the policy allows {requester} to {verb}")
        limits = [rule.max_gpus for rule in applicable]
        return Permission(
            allowed=True,
            text="the policy",
            any_owner=any(rule.any_owner for rule in applicable),
            max_gpus=None if None in limits else max(limit for limit in limits if limit is not None),
        )


OPEN_POLICY = AccessPolicy(rules=(PolicyRule(users=(ALL_USERS,)),))
"""Policy without a policy file: all users may use all verbs on their own jobs."""


def load_policy(path: str | os.PathLike[str]) -> AccessPolicy:
    """Read a policy file.

    Raises:
        JobError: The file cannot be read or is invalid; the text names the line and the fix.
    """
    return yaml_files.load_yaml_file(path, POLICY_FILE, _build_policy)


def parse_policy(text: str, *, source: str = "<text>") -> AccessPolicy:
    """Parse the text of a policy file.

    Raises:
        JobError: The text is invalid.
    """
    return yaml_files.load_yaml_text(text, POLICY_FILE, _build_policy, source=source)


def _build_policy(value: Any) -> AccessPolicy:
    entry = yaml_files.validate_entries(PolicyEntry, value, POLICY_FILE.noun)
    problems.raise_problems(_policy_problems(entry))
    return AccessPolicy(rules=tuple(_to_rule(item) for item in entry.rules))


def _to_rule(entry: PolicyRuleEntry) -> PolicyRule:
    verbs = JOB_VERBS if entry.verbs is None else tuple(entry.verbs)
    return PolicyRule(users=tuple(entry.users), verbs=verbs, any_owner=entry.jobs == "all", max_gpus=entry.max_gpus)


def _policy_problems(entry: PolicyEntry) -> Iterator[InputProblem]:
    for index, rule in enumerate(entry.rules):
        for place, verb in enumerate(rule.verbs or ()):
            if verb not in JOB_VERBS:
                do = suggest_closest(verb, JOB_VERBS) or "Leave verbs out for all of them"
                path = ("rules", index, "verbs", place)
                yield InputProblem(path=path, what="verb", got=verb, expected=f"one of {', '.join(JOB_VERBS)}", do=do)
        if rule.jobs not in ("own", "all"):
            do = suggest_closest(rule.jobs, ("own", "all")) or "Leave it out for own"
            yield InputProblem(path=("rules", index, "jobs"), what="jobs", got=rule.jobs, expected="own or all", do=do)
        if rule.max_gpus is not None and rule.max_gpus < 0:
            path, do = ("rules", index, "max_gpus"), "Leave it out for no limit"
            yield InputProblem(path=path, what="max_gpus", got=rule.max_gpus, expected=_GPU_LIMIT, do=do)


def apply_verb(verb: str, job: Job, now: float) -> DesiredJobState:
    """Return the job's desired state after the verb.

    `verb`: one of `VERB_NAMES`. `stop`: the deletion policy of each node decides whether its group is kept. `retry`:
    another run with full retries; a suspended job starts it when resumed. `suspend`: attempts that this ends are not
    charged. `delete`: whatever the deletion policies.

    Raises:
        JobError: The verb has no meaning in the job's state; the text names a verb that has.
    """
    if verb != "retry":
        job = with_pending_retry(job, now)  # it counts, though it has not started
    if verb == "delete":
        return replace(job.desired, delete=True)
    if job.record.deleting or job.desired.delete:
        raise _verb_error(verb, job, "a job that is not being deleted", "Submit it again when it is gone")
    if verb == "resume":
        return replace(job.desired, suspend=False)
    if verb == "retry":
        if job.record.outcome not in (JobState.FAILED, JobState.STOPPED):
            succeeded = job.record.outcome is JobState.SUCCEEDED
            do = "Submit it under another name" if succeeded else "Wait for its end, or stop it first"
            raise _verb_error(verb, job, "a job that has failed or was stopped", do)
        return replace(job.desired, retry_run=job.record.run)
    if job.record.outcome is not None:
        remove = f"Remove it with ringweave delete {job.request.name}"
        do = {"stop": remove, "suspend": "No process of it runs any more"}[verb]
        raise _verb_error(verb, job, "a job that has not ended", do)
    if verb == "stop":
        return replace(job.desired, stop_run=job.record.run)
    return replace(job.desired, suspend=True)


def _verb_error(verb: str, job: Job, expected: str, do: str) -> JobError:
    state = JobState.DELETING if job.desired.delete else job.record.state
    return JobError(f"{verb} of job {job.request.name}", got=str(state), expected=expected, do=do)
