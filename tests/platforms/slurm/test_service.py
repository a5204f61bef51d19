"""The service, with Slurm in memory: names, refusals, waiting, what commands do where no controller runs."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from ringweave.errors import JobError, LaunchError
from ringweave.jobs import admission
from ringweave.platforms.api import LogQuery
from ringweave.platforms.slurm import allocation
from ringweave.platforms.slurm.allocation import AllocationMonitor
from ringweave.platforms.slurm.commands import SlurmClient
from ringweave.platforms.slurm.platform import SlurmPlatform
from ringweave.platforms.slurm.registry import SlurmJobRegistry
from tests.platforms.slurm.fakes import PATIENCE, FakeSlurm, a_request, a_service


@pytest.fixture
def fake() -> FakeSlurm:
    return FakeSlurm()


@pytest.fixture
def service(tmp_path, fake):
    return a_service(tmp_path, fake)


def files(folder: Path) -> list[str]:
    return [path.name for path in (folder / "state").rglob("*") if path.is_file()]


def test_of_64_at_once_one_gets_the_name(tmp_path, fake):
    services = [a_service(tmp_path, fake, requester=f"user{index}") for index in range(64)]
    together = threading.Barrier(64)

    def submit(service):
        together.wait()
        try:
            return service.submit(a_request(), base=tmp_path).job.requester
        except JobError as error:
            return error

    with ThreadPoolExecutor(64) as pool:
        outcomes = list(pool.map(submit, services))
    winners = [outcome for outcome in outcomes if isinstance(outcome, str)]
    refusals = [str(outcome) for outcome in outcomes if isinstance(outcome, JobError)]
    assert len(winners) == 1
    assert len(refusals) == 63
    start = f"job name text: 'taken by {winners[0]} "
    assert all(text.startswith(start) and "ringweave delete text" in text for text in refusals)
    assert len(fake.scripts) == 1, "Slurm was asked once"


def test_where_locks_do_not_work_the_folder_still_has_one_owner(tmp_path, fake, service):
    # The second one looks before the first has renamed its folder into place.
    registry = SlurmJobRegistry(tmp_path / "state")
    service.submit(a_request(name="other"), base=tmp_path)
    first = registry.find_by_name("other")
    assert first is not None
    with pytest.raises(OSError, match="not empty"):
        registry.insert(lambda there: first)


def test_name_permission_and_split_come_before_all_that_the_request_names(tmp_path, fake, service):
    lost = replace(a_request(), script="nosuch.py")
    with pytest.raises(JobError, match="split: 16, expected a total"):
        service.submit(replace(lost, num_workers=16), base=tmp_path)
    forbidden = a_service(tmp_path, fake, rules=admission.parse_policy("rules: []"))
    with pytest.raises(JobError, match="submit by ann: 'no rule of the policy allows ann to submit'"):
        forbidden.submit(replace(lost, num_workers=16), base=tmp_path)
    assert fake.called == [], "Slurm was not asked either"


def test_a_claim_is_for_kubernetes(tmp_path, service):
    with pytest.raises(JobError, match=r"claim: 'mine', expected none on slurm\. Leave claim out: the nodes"):
        service.submit(replace(a_request(), claim="mine"), base=tmp_path)


def test_what_slurm_refuses_leaves_nothing(tmp_path, fake, service):
    fake.refusal = "Batch job submission failed: Invalid account or account/partition combination specified"
    with pytest.raises(LaunchError, match="Invalid account"):
        service.submit(a_request(), base=tmp_path)
    assert service.jobs() == []
    assert files(tmp_path) == ["submit.lock"]


def test_what_slurm_has_taken_stays_though_it_cannot_be_asked_about(tmp_path, fake, service, monkeypatch):
    lost = CompletedProcess(
        [],
        returncode=1,
        stdout="",
        stderr="slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n",
    )
    scontrol = fake.scontrol
    monkeypatch.setattr(fake, "scontrol", lambda argv, stdin: lost)
    said = r"Unable to contact slurm controller .*Slurm has accepted job text as Slurm job 10\. Check it with"
    with pytest.raises(LaunchError, match=said):
        service.submit(a_request(), base=tmp_path)
    monkeypatch.setattr(fake, "scontrol", scontrol)
    assert "Slurm job 10" in str(service.job("text").reason)
    service.act("text", "delete")
    assert fake.states == {10: "CANCELLED"}


def test_an_answer_of_sbatch_that_nobody_heard_leaves_no_job_behind(tmp_path, fake, service):
    fake.is_silent = True
    said = r"sbatch: 'nothing in 60 s', expected Slurm to answer\. .* Slurm may have accepted job text\. Check it with"
    with pytest.raises(LaunchError, match=said):
        service.submit(a_request(), base=tmp_path)
    fake.is_silent = False
    assert "Slurm job 10" in str(a_service(tmp_path, fake).job("text").reason), "the next look finds it"
    assert len(fake.scripts) == 1
    service.act("text", "delete")
    assert fake.states == {10: "CANCELLED"}
    assert service.jobs() == []


def test_what_slurm_never_took_can_be_asked_for_again(tmp_path, fake, service):
    fake.refusal = "Batch job submission failed: Socket timed out on send/recv operation"
    with pytest.raises(LaunchError, match="sbatch: 'Socket timed out', expected Slurm to answer"):
        service.submit(a_request(), base=tmp_path)
    fake.refusal = ""
    reason = str(service.job("text").reason)
    assert "Slurm did not answer the request, and has no such job now; ringweave resume text requests" in reason
    assert service.act("text", "resume").state == "Pending"
    assert fake.states == {10: "PENDING"}


def test_trying_again_needs_room_in_the_limit(tmp_path, fake):
    rules = admission.parse_policy("rules: [{users: ['*'], max_gpus: 20}]")
    service = a_service(tmp_path, fake, rules=rules)
    service.submit(a_request(), base=tmp_path)
    service.act("text", "stop")
    service.submit(a_request(name="other", gpus="8"), base=tmp_path)
    text = r"GPUs in all: 15, expected at most 20 GPUs in all jobs of ann, of which 8 are in use\. Ask for at most 12\."
    with pytest.raises(JobError, match=text):
        service.act("text", "retry")
    service.act("other", "stop")
    assert service.act("text", "retry").state == "Pending"


def test_a_dry_run_shows_the_batch_script_and_changes_nothing(tmp_path, fake, service):
    submission = service.submit(a_request(), base=tmp_path, dry_run=True)
    assert [each.name for each in submission.objects] == ["batch script", "config.json"]
    assert "#SBATCH hetjob" in submission.objects[0].text
    assert fake.scripts == []
    assert service.jobs() == []


def test_a_waiting_job_says_what_slurm_waits_for(tmp_path, fake, service):
    service.submit(a_request(), base=tmp_path)
    fake.now_s += 5
    fake.reasons[10] = "ReqNodeNotAvail,_UnavailableNodes:small"
    view = service.job("text")
    assert view.reason is not None
    assert view.reason.code == "Unschedulable"
    assert "Slurm job 10 (ReqNodeNotAvail,_UnavailableNodes:small): a requested machine is down" in view.reason.text
    assert all("sinfo -R shows why" in str(node.reason) for node in view.used_nodes)


def test_a_requeued_job_says_so(tmp_path, fake, service):
    service.submit(a_request(), base=tmp_path)
    registry = SlurmJobRegistry(tmp_path / "state")
    with registry.locked_entry("text") as entry:
        assert entry is not None
        registry.save_record(
            "text", entry.job.record, type(entry.allocation_state)(allocation=10, claim="10.0", adopted="10.0")
        )
    fake.now_s += 5
    fake.reasons[10] = "BeginTime"
    view = service.job("text")
    assert view.state == "Retrying"
    text = "Slurm revoked its allocation; Slurm job 10 (BeginTime): it was requeued"
    assert str(view.reason).startswith(text)


def test_a_job_that_has_just_begun_is_not_taken_for_a_requeued_one(tmp_path, fake, service):
    service.submit(a_request(), base=tmp_path)
    assert service.job("text").state == "Pending"
    registry = SlurmJobRegistry(tmp_path / "state")
    with registry.locked_entry("text") as entry:
        assert entry is not None
        registry.save_record(
            "text", entry.job.record, type(entry.allocation_state)(allocation=10, claim="10.0", adopted="10.0")
        )
    fake.states[10] = "RUNNING"
    view = service.job("text")  # at once: Slurm's last answer is not old
    assert view.state == "Pending"
    assert "taken back" not in str(view.reason)


@pytest.mark.parametrize(("verb", "state"), [("stop", "Stopped"), ("suspend", "Suspended")])
def test_taken_back_while_it_waits(tmp_path, fake, service, verb, state):
    service.submit(a_request(), base=tmp_path)
    assert service.act("text", verb).state == state
    assert fake.states == {10: "CANCELLED"}
    again = "retry" if verb == "stop" else "resume"
    view = service.act("text", again)
    assert view.state == "Pending"
    assert fake.states == {10: "CANCELLED", 20: "PENDING"}
    assert "Slurm job 20" in str(view.reason)


def test_deleted_while_it_waits_nothing_is_left(tmp_path, fake, service):
    service.submit(a_request(), base=tmp_path)
    service.act("text", "delete")
    assert files(tmp_path) == ["submit.lock"]
    assert fake.states == {10: "CANCELLED"}
    with pytest.raises(JobError, match=r"job: 'text', expected the name of an existing job. See ringweave jobs"):
        service.job("text")


def test_submitted_suspended_it_asks_slurm_for_nothing_until_it_is_resumed(tmp_path, fake, service):
    assert service.submit(a_request("suspend: true\n"), base=tmp_path).job.state == "Suspended"
    assert fake.scripts == []
    assert service.act("text", "resume").state == "Pending"
    assert len(fake.scripts) == 1


def test_killed_before_slurm_was_asked_a_look_says_so_and_resume_asks(tmp_path, fake, service):
    fake.refusal = "killed here"
    service._registry.delete = lambda entry: None  # as if the command had been killed
    with pytest.raises(LaunchError):
        service.submit(a_request(), base=tmp_path)
    fake.refusal = ""
    service = a_service(tmp_path, fake)
    assert "not requested from Slurm; ringweave resume text requests it" in str(service.job("text").reason)
    assert fake.scripts == [], "a job must not begin because somebody looks at it"
    service.act("text", "resume")
    assert len(fake.scripts) == 1


def test_an_allocation_that_slurm_forgot_is_one_that_ended(tmp_path, fake, service):
    service.submit(a_request(), base=tmp_path)
    fake.states.clear()
    fake.now_s += 5
    view = service.job("text")
    assert view.state == "Stopped"
    assert "unknown to Slurm. ringweave retry text requests another one" in view.events[0].text


def test_a_ttl_that_has_passed_removes_it_at_the_next_look(tmp_path, fake, service):
    service.submit(a_request("ttl: 0s\n"), base=tmp_path)
    service.act("text", "stop")
    assert service.jobs() == []
    assert files(tmp_path) == ["submit.lock"]


def test_who_looks_when_a_ttl_has_passed_is_told_how_it_ended(tmp_path, fake, service):
    service.submit(a_request("ttl: 5s\n"), base=tmp_path)
    service.act("text", "stop")
    assert service.job("text").state == "Stopped"
    fake.now_s += 6
    assert service.job("text").state == "Stopped", "this look removes it"
    assert files(tmp_path) == ["submit.lock"]
    with pytest.raises(JobError, match="job: 'text', expected the name of an existing job"):
        service.job("text")


def test_slurm_is_asked_to_remove_it_when_its_ttl_is_over(tmp_path, fake, service):
    service.submit(a_request("ttl: 3600s\n"), base=tmp_path)
    service.act("text", "stop")
    service.job("text")
    assert len(fake.scripts) == 2, "once"
    assert "#SBATCH --job-name=rw-ttl-text\n" in fake.scripts[1]
    assert "#SBATCH --begin=now+3540\n" in fake.scripts[1]
    service.act("text", "delete")
    assert fake.states == {10: "CANCELLED", 20: "CANCELLED"}, "nothing of it stays in Slurm's queue"


def test_another_run_has_another_end(tmp_path, fake, service):
    service.submit(a_request("ttl: 3600s\n"), base=tmp_path)
    service.act("text", "stop")
    fake.now_s += 60
    service.act("text", "retry")
    service.act("text", "retry")  # twice is as once
    service.act("text", "stop")
    assert fake.states == {10: "CANCELLED", 20: "CANCELLED", 30: "CANCELLED", 40: "PENDING"}
    assert "rw-ttl-text" in fake.scripts[3]


def test_tried_again_it_is_not_over_while_its_controller_has_only_begun(tmp_path, fake, service):
    service.submit(a_request(), base=tmp_path)
    service.act("text", "stop")
    service.act("text", "retry")
    fake.states[20] = "RUNNING"
    registry = SlurmJobRegistry(tmp_path / "state")
    with registry.locked_entry("text") as entry:
        assert entry is not None
        registry.save_record("text", entry.job.record, replace(entry.allocation_state, claim="20.0", adopted="20.0"))
    job = service.job("text")
    assert (job.state, job.run) == ("Pending", 2)


def test_where_slurm_refuses_that_the_job_ends_all_the_same(tmp_path, fake, service, capsys):
    service.submit(a_request("ttl: 3600s\n"), base=tmp_path)
    fake.refusal = "too many jobs"
    assert service.act("text", "stop").state == "Stopped"
    assert "TTL of text: sbatch: too many jobs, expected Slurm to accept it" in capsys.readouterr().err


def test_the_sweeper_waits_for_the_end_of_the_ttl_to_the_tenth_of_a_second(tmp_path, fake, service):
    service.submit(a_request("ttl: 30s\n"), base=tmp_path)
    service.act("text", "stop")
    registry = SlurmJobRegistry(tmp_path / "state")
    entry = registry.find_by_name("text")
    assert entry is not None
    began_s = fake.now_s
    tending = AllocationMonitor(
        registry, SlurmClient(fake.run), environ={}, timeouts=PATIENCE, clock=lambda: fake.now_s
    )

    def sleep(seconds: float) -> None:
        fake.now_s += seconds

    allocation.remove_after_ttl(registry, tending, "text", "another", clock=lambda: fake.now_s, sleep=sleep)
    assert fake.now_s == began_s, "of another job with that name nothing is removed"
    allocation.remove_after_ttl(registry, tending, "text", entry.id, clock=lambda: fake.now_s, sleep=sleep)
    assert fake.now_s - began_s == pytest.approx(30.0, abs=0.1)
    assert files(tmp_path) == ["submit.lock"]


def test_inside_of_another_job_of_slurm_its_variables_stay_behind(tmp_path, fake):
    outer = {"SLURM_HET_SIZE": "3", "SLURM_CONF": "/etc/slurm.conf", "SBATCH_PARTITION": "main", "HOME": "/home/ann"}
    (tmp_path / "train.py").touch()
    service = SlurmPlatform(tmp_path / "state", SlurmClient(fake.run), requester="ann", environ=outer)
    service.submit(a_request(), base=tmp_path)
    assert fake.environ == {key: outer[key] for key in ("SLURM_CONF", "SBATCH_PARTITION", "HOME")}


def test_others_may_not(tmp_path, fake, service):
    service.submit(a_request(), base=tmp_path)
    other = a_service(tmp_path, fake, requester="bob")
    with pytest.raises(JobError, match='stop by bob: "the job is ann\'s", expected a job of their own'):
        other.act("text", "stop")
    assert other.jobs() == []


def test_logs_of_what_is_not_there_are_refused(tmp_path, fake, service):
    service.submit(a_request(), base=tmp_path)
    with pytest.raises(JobError, match="node: 'n7', expected one of n0, n1"):
        service.logs("text", LogQuery(node="n7"))
    assert list(service.logs("text", LogQuery())) == []


def test_a_job_of_another_format_is_refused(tmp_path, service):
    service.submit(a_request(), base=tmp_path)
    path = tmp_path / "state" / "jobs" / "text" / "job.json"
    assert path.read_text().startswith('{"format":2,')
    path.write_text(path.read_text().replace('"format":2,', "", 1))
    text = r"job text: 'format 1', expected format 2\. Delete the job with the ringweave that made it, then submit"
    for ask in (service.jobs, lambda: service.job("text")):
        with pytest.raises(JobError, match=text):
            ask()
