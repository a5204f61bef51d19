from collections.abc import Sequence
from dataclasses import replace

import pytest

from ringweave.errors import JobError
from ringweave.jobs import admission
from ringweave.jobs.admission import Permission, PermissionCache
from ringweave.jobs.records import Job
from ringweave.jobs.request import JobRequest, NodeRequest
from ringweave.jobs.states import JobState
from tests.jobs.life import lives

REQUEST = JobRequest(
    name="text",
    num_workers=15,
    script="train.py",
    nodes=(NodeRequest(name="n0", capacity=10), NodeRequest(name="n1", capacity=5)),
)


def admitted(request: JobRequest = REQUEST, *, rules: str | None = None, there: Sequence[Job] = (), now: float = 100.0):
    found = admission.OPEN_POLICY if rules is None else admission.parse_policy(rules)
    permissions = PermissionCache(found.find_permission)
    return admission.admit_job(request, requester="ann", existing=there, permissions=permissions, now=now)


def test_an_admitted_job_knows_its_split_and_who_asked() -> None:
    job = admitted()
    assert (job.counts, job.requester, job.created_s, job.record.state) == ((10, 5), "ann", 100.0, JobState.PENDING)
    assert admitted(replace(REQUEST, suspend=True)).record.state is JobState.SUSPENDED


@pytest.mark.parametrize(
    ("age_s", "age"), [(3.5, "3 s"), (119, "119 s"), (240, "4 min"), (7300, "2 h"), (2e5, "2 days")]
)
def test_a_taken_name_comes_first_and_says_whose_it_is(age_s: float, age: str) -> None:
    impossible = replace(REQUEST, num_workers=16)
    with pytest.raises(JobError) as caught:
        admitted(impossible, rules="rules: []", there=[lives.a_job()], now=age_s)
    assert str(caught.value) == (
        f"job name text: 'taken by ann {age} ago (Pending)', expected a free name. "
        "Choose another name, or remove that job first with ringweave delete text."
    )


def test_a_permission_comes_second() -> None:
    with pytest.raises(JobError) as caught:
        admitted(replace(REQUEST, num_workers=16), rules="rules: [{users: [bob]}]")
    assert str(caught.value) == (
        "submit by ann: 'no rule of the policy allows ann to submit', expected a permission. "
        "Ask the administrator of this platform to allow ann to submit."
    )


@pytest.mark.parametrize(
    ("in_use", "do"), [(4, r"Ask for at most 8\."), (12, r"Wait for one of those jobs to end, or stop one\.")]
)
def test_the_limit_comes_third(in_use: int, do: str) -> None:
    rules = "rules: [{users: ['*'], max_gpus: 12}]"
    other = admitted(replace(REQUEST, name="other", num_workers=in_use))
    with pytest.raises(JobError, match=rf"GPUs in all: 16, expected at most 12 GPUs in all jobs of ann, .*{do}"):
        admitted(replace(REQUEST, num_workers=16), rules=rules, there=[other])


def test_jobs_that_have_not_ended_or_begin_again_are_in_use() -> None:
    job = admitted()
    assert admission.gpus_in_use([job, job], "ann") == 30
    assert admission.gpus_in_use([job], "bob") == 0
    assert admission.gpus_in_use([replace(job, request=replace(REQUEST, device="cpu"))], "ann") == 0
    for outcome, retried in ((JobState.SUCCEEDED, 0), (JobState.FAILED, 15), (JobState.STOPPED, 15)):
        ended = replace(job, record=replace(job.record, outcome=outcome))
        assert admission.gpus_in_use([ended], "ann") == 0
        again = replace(ended, desired=replace(job.desired, retry_run=1))
        assert admission.gpus_in_use([again], "ann") == retried


@pytest.mark.parametrize(("other_gpus", "limit"), [(6, 20), (6, None), (5, 20)])
def test_trying_again_is_within_the_limit(other_gpus: int, limit: int | None) -> None:
    job = replace(admitted(), record=replace(admitted().record, outcome=JobState.FAILED))
    other = admitted(replace(REQUEST, name="other", num_workers=other_gpus))
    permissions = PermissionCache(lambda requester, verb: Permission(allowed=True, text="", max_gpus=limit))

    def check() -> None:
        admission.check_retry(job, existing=[job, other], permissions=permissions, now=0.0)

    if limit is None or other_gpus + 15 <= limit:
        check()
        return
    text = r"GPUs in all: 15, expected at most 20 GPUs in all jobs of ann, of which 6 are in use\. Ask for at most 14\."
    with pytest.raises(JobError, match=text):
        check()


def test_processes_without_gpus_are_not_counted() -> None:
    assert admitted(replace(REQUEST, device="cpu"), rules="rules: [{users: ['*'], max_gpus: 0}]").counts == (10, 5)


def test_the_split_comes_last() -> None:
    with pytest.raises(JobError, match=r"split: 16, expected .*Ask for 15, the nearest possible totals\. \[job text\]"):
        admitted(replace(REQUEST, num_workers=16))


def test_other_peoples_jobs_need_a_rule_of_their_own() -> None:
    permissions = PermissionCache(admission.OPEN_POLICY.find_permission)
    with pytest.raises(JobError, match=r"stop by bob: \"the job is ann's\", expected a job of their own\. Ask ann"):
        admission.check_permission("stop", requester="bob", owner="ann", permissions=permissions, now=0)
    wide = PermissionCache(lambda requester, verb: Permission(allowed=True, text="", any_owner=True))
    assert admission.check_permission("stop", requester="bob", owner="ann", permissions=wide, now=0).allowed
