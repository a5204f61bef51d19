from dataclasses import replace

import pytest

from ringweave.errors import JobError
from ringweave.jobs import admission, advance
from ringweave.jobs.records import DesiredJobState, Job
from ringweave.jobs.states import JobState
from tests.jobs.life import lives


def job_in(state: JobState, *, desired: DesiredJobState | None = None) -> Job:
    job = lives.a_job()
    outcome = state if state.is_end else None
    record = replace(job.record, state=state, outcome=outcome, deleting=state is JobState.DELETING, run=3)
    return replace(job, record=record, desired=desired or DesiredJobState())


@pytest.mark.parametrize(
    ("verb", "state", "changed"),
    [
        ("stop", JobState.RUNNING, {"stop_run": 3}),
        ("retry", JobState.FAILED, {"retry_run": 3}),
        ("retry", JobState.STOPPED, {"retry_run": 3}),
        ("suspend", JobState.PENDING, {"suspend": True}),
        ("resume", JobState.SUSPENDED, {"suspend": False}),
        ("delete", JobState.SUCCEEDED, {"delete": True}),
        ("delete", JobState.DELETING, {"delete": True}),
    ],
)
def test_what_a_verb_asks_and_twice_is_as_once(verb: str, state: JobState, changed: dict) -> None:
    job = job_in(state, desired=DesiredJobState(suspend=state is JobState.SUSPENDED))
    once = admission.apply_verb(verb, job, 0.0)
    assert once == replace(job.desired, **changed)
    if verb != "delete":
        assert admission.apply_verb(verb, replace(job, desired=once), 0.0) == once


@pytest.mark.parametrize("state", [JobState.FAILED, JobState.STOPPED])
def test_one_that_is_tried_again_is_not_over_though_nobody_has_begun_with_it(state: JobState) -> None:
    job = job_in(state, desired=DesiredJobState(retry_run=3))
    shown = advance.with_pending_retry(job, 7.0).record
    assert (shown.state, shown.run, shown.outcome, shown.ended_s) == (JobState.PENDING, 4, None, None)
    stopped = admission.apply_verb("stop", job, 7.0)
    assert stopped == DesiredJobState(retry_run=3, stop_run=4)
    for desired in (
        stopped,
        DesiredJobState(),
        DesiredJobState(retry_run=2),
        DesiredJobState(retry_run=3, delete=True),
    ):
        other = replace(job, desired=desired)
        assert advance.with_pending_retry(other, 7.0) is other


@pytest.mark.parametrize(
    ("verb", "state", "text"),
    [
        (
            "stop",
            JobState.FAILED,
            r"stop of job text: 'Failed', expected a job that has not ended\. Remove it",
        ),
        ("stop", JobState.DELETING, r"stop of job text: 'Deleting', expected a job that is not being deleted\."),
        (
            "retry",
            JobState.RUNNING,
            r"retry of job text: 'Running', expected a job that has failed or was stopped\.",
        ),
        (
            "retry",
            JobState.SUCCEEDED,
            r"expected a job that has failed or was stopped\. Submit it under another name\.",
        ),
        (
            "suspend",
            JobState.STOPPED,
            r"suspend of job text: 'Stopped', expected a job that has not ended\. No pr",
        ),
        ("resume", JobState.DELETING, r"resume of job text: 'Deleting', expected a job that is not being deleted\."),
    ],
)
def test_a_verb_that_means_nothing_is_refused(verb: str, state: JobState, text: str) -> None:
    with pytest.raises(JobError, match=text):
        admission.apply_verb(verb, job_in(state), 0.0)
