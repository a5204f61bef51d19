"""What `stop`, `retry`, `suspend`, `resume` and `delete` change in what is asked of a job. Pure; twice is as once."""

from dataclasses import replace

from ringweave.errors import JobError, explain
from ringweave.jobs.life.advancing import as_asked
from ringweave.jobs.life.records import Desired, Job
from ringweave.jobs.life.states import JobState

NAMES = ("stop", "retry", "suspend", "resume", "delete")


def ask(verb: str, job: Job, now: float) -> Desired:
    """What is asked of the job after the verb.

    Args:
        verb: One of `NAMES`.
        job: As it was saved last.
        now: Seconds on the clock of the job.

    Raises:
        JobError: The job is in a state in which the verb means nothing; the text says what does.
    """
    if verb == "retry":
        return retry(job)
    others = {"stop": stop, "suspend": suspend, "resume": resume, "delete": delete}
    return others[verb](as_asked(job, now))  # of one that was tried again a moment ago, though nobody has begun


def stop(job: Job) -> Desired:
    """It ends now; nodes are deleted or kept as each one's policy says."""
    _refuse_if_going("stop", job)
    if job.record.outcome is not None:
        raise _refusal("stop", job, "a job that has not ended", f"Remove it with ringweave delete {job.request.name}")
    return replace(job.desired, stop_run=job.record.run)


def retry(job: Job) -> Desired:
    """It starts anew after a bad end, with its retries refilled; a suspended one once it is resumed."""
    _refuse_if_going("retry", job)
    if job.record.outcome not in (JobState.FAILED, JobState.STOPPED):
        succeeded = job.record.outcome is JobState.SUCCEEDED
        do = "Submit it under another name" if succeeded else "Wait for its end, or stop it first"
        raise _refusal("retry", job, "a job that has failed or was stopped", do)
    return replace(job.desired, retry_run=job.record.run)


def suspend(job: Job) -> Desired:
    """Nothing of it runs until it is resumed; attempts that this ends are not charged."""
    _refuse_if_going("suspend", job)
    if job.record.outcome is not None:
        raise _refusal("suspend", job, "a job that has not ended", "Nothing of it runs any more")
    return replace(job.desired, suspend=True)


def resume(job: Job) -> Desired:
    """It runs again; of one that is not suspended nothing changes."""
    _refuse_if_going("resume", job)
    return replace(job.desired, suspend=False)


def delete(job: Job) -> Desired:
    """It is removed with all it left, whatever the policies."""
    return replace(job.desired, delete=True)


def _refuse_if_going(verb: str, job: Job) -> None:
    if job.record.deleting or job.desired.delete:
        raise _refusal(verb, job, "a job that is not being deleted", "Submit it again when it is gone")


def _refusal(verb: str, job: Job, expected: str, do: str) -> JobError:
    state = JobState.DELETING if job.desired.delete else job.record.state
    return JobError(explain(f"{verb} of job {job.request.name}", got=str(state), expected=expected, do=do))
