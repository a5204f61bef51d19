"""Job verbs stop, retry, suspend, resume and delete: each changes the desired state of a job. Pure and idempotent."""

from dataclasses import replace

from ringweave.errors import JobError, explain
from ringweave.jobs.advance import with_pending_retry
from ringweave.jobs.records import DesiredJobState, Job
from ringweave.jobs.states import JobState

VERB_NAMES = ("stop", "retry", "suspend", "resume", "delete")


def apply_verb(verb: str, job: Job, now: float) -> DesiredJobState:
    """Return the job's desired state after the verb.

    Args:
        verb: One of `VERB_NAMES`.
        job: As it was saved last.
        now: Seconds on the clock of the job.

    Raises:
        JobError: The verb has no meaning in the job's state; the text names a verb that has.
    """
    if verb == "retry":
        return request_retry(job)
    others = {"stop": request_stop, "suspend": request_suspend, "resume": request_resume, "delete": request_delete}
    return others[verb](with_pending_retry(job, now))  # a pending retry counts, though it has not started


def request_stop(job: Job) -> DesiredJobState:
    """Stop the job now; the deletion policy of each node decides whether its group is kept."""
    _refuse_if_deleting("stop", job)
    if job.record.outcome is not None:
        raise _verb_error(
            "stop", job, "a job that has not ended", f"Remove it with ringweave delete {job.request.name}"
        )
    return replace(job.desired, stop_run=job.record.run)


def request_retry(job: Job) -> DesiredJobState:
    """Start another run after a failed or stopped one, with full retries. A suspended job starts it when resumed."""
    _refuse_if_deleting("retry", job)
    if job.record.outcome not in (JobState.FAILED, JobState.STOPPED):
        succeeded = job.record.outcome is JobState.SUCCEEDED
        do = "Submit it under another name" if succeeded else "Wait for its end, or stop it first"
        raise _verb_error("retry", job, "a job that has failed or was stopped", do)
    return replace(job.desired, retry_run=job.record.run)


def request_suspend(job: Job) -> DesiredJobState:
    """Keep all groups from running until the job is resumed; attempts that this ends are not charged."""
    _refuse_if_deleting("suspend", job)
    if job.record.outcome is not None:
        raise _verb_error("suspend", job, "a job that has not ended", "No process of it runs any more")
    return replace(job.desired, suspend=True)


def request_resume(job: Job) -> DesiredJobState:
    """Let the job run again; no effect on a job that is not suspended."""
    _refuse_if_deleting("resume", job)
    return replace(job.desired, suspend=False)


def request_delete(job: Job) -> DesiredJobState:
    """Remove the job with everything it left, whatever the deletion policies."""
    return replace(job.desired, delete=True)


def _refuse_if_deleting(verb: str, job: Job) -> None:
    if job.record.deleting or job.desired.delete:
        raise _verb_error(verb, job, "a job that is not being deleted", "Submit it again when it is gone")


def _verb_error(verb: str, job: Job, expected: str, do: str) -> JobError:
    state = JobState.DELETING if job.desired.delete else job.record.state
    return JobError(explain(f"{verb} of job {job.request.name}", got=str(state), expected=expected, do=do))
