from dataclasses import replace

import pytest

from ringweave.errors import JobError
from ringweave.jobs.life import verbs
from ringweave.jobs.life.records import Desired, Job
from ringweave.jobs.life.states import JobState
from tests.jobs.life import lives


def job_in(state: JobState, *, desired: Desired | None = None) -> Job:
    job = lives.a_job()
    outcome = state if state.is_end else None
    record = replace(job.record, state=state, outcome=outcome, deleting=state is JobState.DELETING, run=3)
    return replace(job, record=record, desired=desired or Desired())


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
    job = job_in(state, desired=Desired(suspend=state is JobState.SUSPENDED))
    once = verbs.ask(verb, job)
    assert once == replace(job.desired, **changed)
    if verb != "delete":
        assert verbs.ask(verb, replace(job, desired=once)) == once


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
            r"suspend of job text: 'Stopped', expected a job that has not ended\. Noth",
        ),
        ("resume", JobState.DELETING, r"resume of job text: 'Deleting', expected a job that is not being deleted\."),
    ],
)
def test_a_verb_that_means_nothing_is_refused(verb: str, state: JobState, text: str) -> None:
    with pytest.raises(JobError, match=text):
        verbs.ask(verb, job_in(state))
