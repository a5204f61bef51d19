"""Following a job to its end, or to where it is gone."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from ringweave.cli import job_options
from ringweave.errors import JobError, LaunchError, UnknownJobError
from ringweave.jobs import records
from ringweave.jobs.request import JobRequest, NodeRequest
from ringweave.jobs.states import JobState, make_reason
from ringweave.platforms import api
from ringweave.platforms.api import JobView, LogLine


class Told:
    """A service that shows a job in these states, one a look, or fails so, and then has none."""

    def __init__(self, *states: JobState | Exception) -> None:
        request = JobRequest(name="job", num_workers=3, script="s.py", nodes=(NodeRequest(name="n0", capacity=3),))
        job = records.new_job(request, requester="ann", counts=(3,), now=0.0)
        self.views = [
            state
            if isinstance(state, Exception)
            else api.job_view(replace(job, record=replace(job.record, state=state)), platform="here")
            for state in states
        ]

    def job(self, name: str) -> JobView:
        if not self.views:
            raise UnknownJobError(f"job: {name!r}, expected the name of an existing job.")
        found = self.views.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    def logs(self, name: str, which: object) -> Iterator[object]:
        return iter(())


SILENT = LaunchError("service: 'refused', expected an answer.")


def follow(*states: JobState | Exception) -> int:
    told = Told(*states)
    return job_options.follow_job("job", "local", lambda: told, sleep=lambda _: None)  # type: ignore[arg-type, return-value]


def test_the_exit_code_is_the_jobs() -> None:
    assert follow(JobState.RUNNING, JobState.SUCCEEDED) == 0
    assert follow(JobState.RUNNING, JobState.FAILED) == 1


def test_a_loss_that_the_others_go_on_without_is_told_though_the_job_runs_on(
    capfd: pytest.CaptureFixture[str],
) -> None:
    told = Told(*[JobState.RUNNING] * 4, JobState.SUCCEEDED)
    loss = make_reason(
        "Degraded", job="job", node="n0", nodes="node n0", detail="node n0 failed (killed), retry 1 of 3"
    )
    told.views[1:3] = [replace(view, reason=loss) for view in told.views[1:3] if isinstance(view, JobView)]
    assert job_options.follow_job("job", "local", lambda: told, sleep=lambda _: None) == 0  # type: ignore[arg-type, return-value]
    assert capfd.readouterr().err.splitlines() == [
        "ringweave: job is Running",
        "ringweave: job is Running: node n0 failed (killed), retry 1 of 3; the other nodes continue, and node n0 can "
        "join them when replaced",
        "ringweave: job is Running",
        "ringweave: job is Succeeded",
    ]


def test_a_job_that_is_gone_before_its_end_was_seen_is_no_wrong_usage(capfd: pytest.CaptureFixture[str]) -> None:
    assert follow(JobState.RUNNING, JobState.DELETING) == 1
    said = "ringweave: job was removed before its outcome was read (last state: Deleting)\n"
    assert capfd.readouterr().err.endswith(said)


def test_a_job_that_was_never_seen_is_an_error() -> None:
    with pytest.raises(JobError, match="expected the name of an existing job"):
        follow()
    with pytest.raises(LaunchError, match="expected an answer"):
        follow(SILENT)


def test_a_place_that_does_not_answer_for_a_while_ends_nothing() -> None:
    assert follow(JobState.RUNNING, *[SILENT] * job_options.MAX_UNANSWERED, JobState.SUCCEEDED) == 0
    with pytest.raises(LaunchError, match="expected an answer"):
        follow(JobState.RUNNING, *[SILENT] * (job_options.MAX_UNANSWERED + 1), JobState.SUCCEEDED)


def test_a_refusal_is_not_the_end_of_a_job() -> None:
    refusal = JobError("status by ann: 'no rule allows it', expected a permission.")
    with pytest.raises(JobError, match="expected a permission"):
        follow(JobState.RUNNING, refusal)
    told = Told(JobState.DELETING, refusal)
    with pytest.raises(JobError, match="expected a permission"):
        job_options.wait_until_gone(told, told.job("job"), lambda _: None)  # type: ignore[arg-type]


def test_what_is_deleted_is_waited_for_though_its_place_is_silent_meanwhile() -> None:
    told = Told(JobState.DELETING, JobState.DELETING, SILENT, SILENT, JobState.DELETING)
    job_options.wait_until_gone(told, told.job("job"), lambda _: None)  # type: ignore[arg-type]
    assert told.views == []


def test_logs_that_break_are_told_and_the_job_is_followed_on(capfd: pytest.CaptureFixture[str]) -> None:
    told = Told(JobState.RUNNING, JobState.SUCCEEDED)

    def logs(name: str, which: object) -> Iterator[object]:
        yield LogLine(node="n0", attempt=1, round=1, rank=0, text="one line")
        raise SILENT

    told.logs = logs  # type: ignore[method-assign]
    assert job_options.follow_job("job", "local", lambda: told, sleep=lambda _: None) == 0  # type: ignore[arg-type, return-value]
    out, err = capfd.readouterr()
    assert out == "[0] one line\n"
    assert "ringweave: the output of job is no longer shown: service: 'refused', expected an answer." in err


@pytest.mark.parametrize(
    ("rank", "many", "text"), [(3, False, "[3] text"), (3, True, "[n0.2/4 3] text"), (None, False, "[n0.2/4] text")]
)
def test_lines_of_a_log(rank: int | None, many: bool, text: str) -> None:
    assert (
        job_options.format_log_line(LogLine(node="n0", attempt=2, round=4, rank=rank, text="text"), many=many) == text
    )
