"""Admission in the order of the specification: is the name free, may they, within their limit, and can it be split."""

from collections.abc import Iterable
from dataclasses import replace

from ringweave import units
from ringweave.errors import JobError, UnknownJobError, explain
from ringweave.files.problems import closest
from ringweave.jobs.admission.permissions import Permission, PermissionCache
from ringweave.jobs.life import records
from ringweave.jobs.life.advancing import advance, is_tried_again
from ringweave.jobs.life.observing import Observed
from ringweave.jobs.life.records import Job
from ringweave.jobs.requests.request import Request


def admit(
    request: Request,
    *,
    requester: str,
    there: Iterable[Job],
    permissions: PermissionCache,
    now: float,
) -> Job:
    """The job that a request becomes; nothing of it exists yet.

    Args:
        request: What is asked for, already well-formed.
        requester: Who asks, as the place says (OS user, Kubernetes user), never as a flag says.
        there: All jobs of the place. It must still make the name and the job in one step: whoever loses that race gets
            `name_taken` of the winner.
        permissions: Who may do what.
        now: Seconds on the place's clock.

    Raises:
        JobError: It is refused; nothing has changed.
    """
    there = list(there)
    for job in there:
        if job.request.name == request.name:
            raise name_taken(job, now)
    permission = check_permission("submit", requester=requester, owner=requester, permissions=permissions, now=now)
    if request.device == "cuda":
        _check_limit(request, requester, permission, gpus_in_use(there, requester))
    split = request.split
    if split.counts is None:
        raise JobError(split.refusal(f"job {request.name}"))
    job = records.new_job(request, requester=requester, counts=split.counts, now=now)
    return replace(job, record=advance(job, Observed(), now))  # so that it says at once what it waits for


def gpus_in_use(there: Iterable[Job], requester: str) -> int:
    """GPUs of the requester's jobs that have not ended, or that were asked to begin again."""
    mine = [job for job in there if job.requester == requester and job.request.device == "cuda"]
    return sum(job.request.num_workers for job in mine if not _has_ended(job))


def _has_ended(job: Job) -> bool:
    return job.record.outcome is not None and not is_tried_again(job)


def check_retry(job: Job, *, there: Iterable[Job], permissions: PermissionCache, now: float) -> None:
    """Refuse to begin again with more GPUs than its requester may have by now, in all.

    Args:
        job: What is to begin again.
        there: All jobs of the place.
        permissions: Who may do what.
        now: Seconds on a clock that never goes back.

    Raises:
        JobError: They are too many.
    """
    if job.request.device == "cuda":
        others = [other for other in there if other.request.name != job.request.name]
        permission = permissions.permission(job.requester, "submit", now)
        _check_limit(job.request, job.requester, permission, gpus_in_use(others, job.requester))


def name_taken(job: Job, now: float) -> JobError:
    """The refusal of a name that a job has already."""
    got = f"taken by {job.requester} {units.show_span(now - job.created_s)} ago ({job.record.state})"
    do = f"Take another name, or remove that job first with ringweave delete {job.request.name}"
    return JobError(explain(f"job name {job.request.name}", got=got, expected="a free name", do=do))


def unknown(name: str, names: Iterable[str], *, look: str, where: str) -> UnknownJobError:
    """The refusal of a name that no job has.

    Args:
        name: That was asked for.
        names: That there are.
        look: What helps where none of them is like it.
        where: The place.
    """
    do = closest(name, names) or look
    return UnknownJobError(explain("job", got=name, expected="the name of a job that is here", do=do, where=where))


def not_allowed(verb: str, requester: str, permission: Permission) -> JobError:
    """The refusal of a verb that the requester may not use."""
    do = f"Ask whoever runs this place to let {requester} {verb}"
    return JobError(explain(f"{verb} by {requester}", got=permission.text, expected="a permission", do=do))


def check_permission(verb: str, *, requester: str, owner: str, permissions: PermissionCache, now: float) -> Permission:
    """The permission to use the verb on a job of the owner.

    Raises:
        JobError: There is none.
    """
    permission = permissions.permission(requester, verb, now)
    if not permission.allowed:
        raise not_allowed(verb, requester, permission)
    if requester != owner and not permission.any_owner:
        do = f"Ask {owner} to do it, or whoever runs this place for a rule with jobs: all"
        got = f"the job is {owner}'s"
        raise JobError(explain(f"{verb} by {requester}", got=got, expected="a job of their own", do=do))
    return permission


def _check_limit(request: Request, requester: str, permission: Permission, gpus_in_use: int) -> None:
    limit = permission.max_gpus
    if limit is not None and request.num_workers + gpus_in_use > limit:
        free = max(0, limit - gpus_in_use)
        do = f"Ask for at most {free}" if free else "Wait for one of those jobs to end, or stop one"
        expected = f"at most {limit} GPUs in all jobs of {requester}, of which {gpus_in_use} are in use"
        raise JobError(explain("GPUs in all", got=request.num_workers, expected=expected, do=do))
