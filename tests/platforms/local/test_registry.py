"""Names, permissions and limits of jobs on this machine; nothing runs here."""

import json
import sqlite3
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from ringweave.errors import JobError, LaunchError
from ringweave.jobs import records
from ringweave.jobs.admission import ALL_USERS, AccessPolicy, PolicyRule
from ringweave.jobs.records import new_job
from ringweave.jobs.request import JobRequest, NodeRequest
from ringweave.jobs.states import JobState
from ringweave.platforms.api import LogQuery
from ringweave.platforms.local import registry as registry_module
from ringweave.platforms.local import supervisor
from ringweave.platforms.local.job_folder import job_folder
from ringweave.platforms.local.platform import LocalPlatform
from ringweave.platforms.local.registry import LocalJobRegistry, LocalRegistryEntry
from ringweave.platforms.local.supervisor import JobSupervisor
from ringweave.platforms.submission import JobOrigin


@pytest.fixture(autouse=True)
def supervised(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the jobs for which a supervisor would have been started."""
    ids: list[str] = []
    monkeypatch.setattr(supervisor, "ensure_supervisor", lambda state, job_id, environ: ids.append(job_id))
    return ids


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "s.py").write_text("pass")
    return tmp_path


def request(name: str = "job", gpus: int = 6, **more: object) -> JobRequest:
    return JobRequest(name=name, num_workers=gpus, script="s.py", nodes=(NodeRequest(name="n0", capacity=8),), **more)


def service(folder: Path, requester: str = "ann", *rules: PolicyRule) -> LocalPlatform:
    return LocalPlatform(
        folder / "state",
        requester=requester,
        environ={"A": "1"},
        policy_rules=AccessPolicy(rules=rules or (PolicyRule(users=(ALL_USERS,)),)),
        clock=lambda: 100.0,
    )


def test_of_64_submits_at_once_one_wins(folder: Path, supervised: list[str]) -> None:
    outcomes: list[str] = []
    gate = threading.Barrier(64)

    def submit(index: int) -> None:
        mine = service(folder, f"user{index}")  # each makes the registry if it is not there
        gate.wait()
        try:
            mine.submit(request(), base=folder)
            outcomes.append("won")
        except JobError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=submit, args=(index,)) for index in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    refusals = [text for text in outcomes if text != "won"]
    assert (len(outcomes), len(refusals), len(supervised)) == (64, 63, 1)
    owner = service(folder, "root", PolicyRule(users=("root",), any_owner=True)).jobs()[0].requester
    mend = "Choose another name, or remove that job first with ringweave delete job."
    assert set(refusals) == {
        f"job name job: 'taken by {owner} 0 s ago (Pending)', expected a free name. {mend}",
    }


def test_a_dry_run_checks_and_changes_nothing(folder: Path, supervised: list[str]) -> None:
    here = service(folder)
    tried = here.submit(request(), base=folder, dry_run=True)
    assert [each.name for each in tried.objects] == ["config.json", "cluster.yaml"]
    assert tried.job.reason is not None
    assert tried.job.reason.code == "NotReady"
    assert (list(here.jobs()), supervised) == ([], [])
    here.submit(request(), base=folder)
    with pytest.raises(JobError, match="job name job: 'taken by ann"):
        here.submit(request(), base=folder, dry_run=True)


def test_permission_and_limit(folder: Path) -> None:
    rules = (
        PolicyRule(users=("ann",), max_gpus=10),
        PolicyRule(users=("bob",), verbs=("jobs", "status"), any_owner=True),
    )
    ann, bob = service(folder, "ann", *rules), service(folder, "bob", *rules)
    ann.submit(request("a"), base=folder)
    with pytest.raises(JobError, match=r"GPUs in all: 6, expected at most 10 GPUs in all jobs of ann, of which 6 are"):
        ann.submit(request("b"), base=folder)
    with pytest.raises(JobError, match=r"submit by bob: 'no rule of the policy allows bob to submit', expected a"):
        bob.submit(request("b"), base=folder)
    assert [job.name for job in bob.jobs()] == ["a"]
    assert bob.job("a").requester == "ann"
    with pytest.raises(JobError, match="delete by bob"):
        bob.act("a", "delete")
    with pytest.raises(JobError, match="logs by bob"):
        bob.logs("a", LogQuery())


def test_only_own_jobs_are_listed_without_a_rule_for_all(folder: Path) -> None:
    service(folder, "ann").submit(request("a"), base=folder)
    assert service(folder, "bob").jobs() == []
    with pytest.raises(JobError, match='status by bob: "the job is ann\'s", expected a job of their own'):
        service(folder, "bob").job("a")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"script": None, "module": "nosuch.train"},
            r"module: 'nosuch\.train', expected a module in .*, or an installed one\. Check its name, or give",
        ),
        (
            {"script": None, "module": "json", "directory": "nosuch"},
            r"module: 'json', expected a module in .*nosuch, or",
        ),
        (
            {"script": None, "command": "bash train.sh"},
            r"command: 'bash train\.sh', expected a program on the PATH, or a path below .*\. Check its name",
        ),
        (
            {"script": None, "command": "./s.py"},
            r"command: '\./s\.py', expected a program on the PATH, or a path below",
        ),
        ({"directory": "nosuch"}, r"script: '.*nosuch/s\.py', expected the path of a Python file\. Correct the script"),
        ({"num_workers": 9}, r"split: 9, expected a total that nodes of \(8\) can share"),
    ],
)
def test_what_is_refused(folder: Path, changes: dict, text: str) -> None:
    with pytest.raises(JobError, match=text):
        service(folder).submit(replace(request(), **changes), base=folder)


def test_a_module_and_a_command_start_in_the_folder_of_the_job_file(folder: Path) -> None:
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    for name, program in (("a", {"module": "s"}), ("b", {"command": "./run.sh"}), ("c", {"command": "sh"})):
        made = service(folder).submit(replace(request(name), script=None, **program), base=folder, dry_run=True)
        config = json.loads(made.objects[0].text)
        assert config["directory"] == str(folder.absolute())
        found = {key: config[key] for key in ("script", "script_text", "module", "command")}
        assert found == {"script": None, "script_text": None, "module": None, "command": None} | program


def test_name_permission_and_split_come_before_all_that_the_request_names(folder: Path) -> None:
    lost = replace(request(), script="nosuch.py")
    with pytest.raises(JobError, match="split: 9, expected a total"):
        service(folder).submit(replace(lost, num_workers=9), base=folder)
    with pytest.raises(JobError, match="submit by ann: 'no rule of the policy allows ann to submit'"):
        service(folder, "ann", PolicyRule(users=("bob",))).submit(replace(lost, num_workers=9), base=folder)
    service(folder).submit(request(), base=folder)
    with pytest.raises(JobError, match="job name job: 'taken by ann"):
        service(folder).submit(replace(lost, num_workers=9), base=folder)


def test_a_node_that_cannot_be_in_a_cluster_is_refused_at_once(folder: Path) -> None:
    wrong = replace(request(), nodes=(NodeRequest(name="core", capacity=8),))
    with pytest.raises(Exception, match="core"):
        service(folder).submit(wrong, base=folder)
    assert service(folder).jobs() == []


def test_unknown_jobs_nodes_and_ranks(folder: Path) -> None:
    here = service(folder)
    here.submit(request("first"), base=folder)
    with pytest.raises(JobError, match=r"job: 'frist', expected the name of an existing job\. Did you mean \"fir"):
        here.job("frist")
    with pytest.raises(
        JobError, match=r"node: 'n1', expected one of n0\. Leave --node out for all of them\. \[--node\]"
    ):
        here.logs("first", LogQuery(node="n1"))
    with pytest.raises(JobError, match=r"rank: 6, expected 0 to 5\. Leave --rank out for all of them\. \[--rank\]"):
        here.logs("first", LogQuery(rank=6))


def test_verbs_are_asked_and_a_supervisor_is_woken(folder: Path, supervised: list[str]) -> None:
    here = service(folder)
    here.submit(request(), base=folder)
    here.act("job", "suspend")
    here.act("job", "suspend")
    assert len(supervised) == 3
    assert len(set(supervised)) == 1


def test_trying_again_needs_room_in_the_limit(folder: Path) -> None:
    here = service(folder, "ann", PolicyRule(users=(ALL_USERS,), max_gpus=10))
    here.submit(request(), base=folder)
    (entry,) = here._registry.all_entries()
    record = replace(entry.job.record, outcome=JobState.FAILED, state=JobState.FAILED)
    here._registry.save_record(entry.id, record, [], 0.0)
    here.submit(request("other"), base=folder)
    with pytest.raises(
        JobError, match=r"GPUs in all: 6, expected at most 10 GPUs in all jobs of ann, of which 6 are in"
    ):
        here.act("job", "retry")
    (other,) = [each for each in here._registry.all_entries() if each.job.request.name == "other"]
    here._registry.delete(other.id)
    assert here.act("job", "retry").state == "Pending", "though no supervisor has begun with it"
    assert here.job("job").state == "Pending"
    with pytest.raises(JobError, match=r"of which 6 are in use"):
        here.submit(request("other"), base=folder)


def test_who_followed_a_job_hears_how_it_ended_though_its_ttl_took_it(folder: Path) -> None:
    here, other = service(folder), service(folder)
    here.submit(replace(request(), ttl_s=0.0), base=folder)
    (entry,) = here._registry.all_entries()
    job_folder(folder / "state", entry.id).root.mkdir(parents=True)
    here.job("job")
    record = replace(entry.job.record, outcome=JobState.SUCCEEDED, state=JobState.DELETING, deleting=True, ended_s=0.0)
    here._registry.save_record(entry.id, record, [], 0.0)
    JobSupervisor(folder / "state", entry.id).serve()
    assert here.job("job").state == "Succeeded"
    for asked in (here, other):
        with pytest.raises(JobError, match="expected the name of an existing job"):
            asked.job("job")
    assert not list((folder / "state" / "jobs").iterdir())


def test_events_are_kept_once_and_go_with_the_job(tmp_path: Path) -> None:
    registry = LocalJobRegistry(tmp_path / "jobs.sqlite")
    job = new_job(request(), requester="ann", counts=(6,), now=1.0)
    origin = JobOrigin(directory="/", script_text="x", environ={})
    registry.insert(LocalRegistryEntry(id="job-1", job=job, origin=origin), lambda _: job)
    event = records.JobEvent(key="k", kind="Running", text="first")
    changed = replace(job.record, round=2)
    registry.save_record("job-1", changed, [event], 5.0)
    registry.save_record("job-1", changed, [replace(event, text="again")], 6.0)
    assert [(each.time_s, each.text) for each in registry.events("job-1")] == [(5.0, "first")]
    assert registry.find_by_id("job-1") == LocalRegistryEntry(
        id="job-1", job=replace(job, record=changed), origin=origin
    )
    registry.delete("job-1")
    registry.save_record("job-1", changed, [event], 7.0)
    assert (registry.all_entries(), registry.events("job-1"), registry.find_by_name("job")) == ([], (), None)


def test_a_registry_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match=r"registry of jobs: .*, expected a file that can be used\. Make the folder"):
        LocalJobRegistry(tmp_path / "file" / "jobs.sqlite")


def test_a_registry_of_another_format_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "jobs.sqlite"
    LocalJobRegistry(path)
    LocalJobRegistry(path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 1")
    before = path.read_bytes()
    text = r"registry of jobs: 'format 1', expected format 2\. Delete its jobs with the ringweave that made them, then"
    with pytest.raises(LaunchError, match=text):
        LocalJobRegistry(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("record = replace(record, 'Pending', 'Hovering')", "JobRecord has 'Hovering' as state"),
        ("record = '{\"format\": 2'", "as its text"),
        (
            "record = replace(record, '\"format\":2', '\"format\":9')",
            "record of the job: 'format 9', expected format 2",
        ),
        ("counts = '[]'", "0 counts, 1 nodes in its request, 1 in its record"),
        ("request = '[]'", "JobRequest has [] as its text"),
    ],
)
def test_a_record_that_is_none_of_ours_is_named_and_hides_no_other(folder: Path, change: str, text: str) -> None:
    here = service(folder)
    for name in ("first", "strange", "last"):
        here.submit(request(name), base=folder)
    with closing(sqlite3.connect(folder / "state" / "jobs.sqlite")) as connection:
        connection.execute(f"UPDATE jobs SET {change} WHERE name = 'strange'")
        connection.commit()
    assert [(each.name, each.state) for each in here.jobs()] == [
        ("first", "Pending"),
        ("last", "Pending"),
        ("strange", "Failed"),
    ]
    found = here.job("strange")
    assert found.reason is not None
    assert text in found.reason.text
    assert found.reason.hint.startswith("ringweave delete strange removes it")
    with pytest.raises(JobError, match="stop of job strange: its record cannot be read: "):
        here.act("strange", "stop")
    with pytest.raises(JobError, match=r"job name strange: 'taken by .*Failed\)'"):
        here.submit(request("strange"), base=folder)
    strange = here._registry.find_by_name("strange")
    supervisor_of_it = JobSupervisor(folder / "state", strange.id)
    assert supervisor_of_it.is_idle()
    here.act("strange", "delete")
    assert [each.name for each in here.jobs()] == ["first", "last"]


def test_a_registry_that_is_busy_or_damaged_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_module, "LOCK_TIMEOUT_S", 0.01)
    path = tmp_path / "jobs.sqlite"
    registry = LocalJobRegistry(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(LaunchError, match=r"'database is locked', expected a file that can be used\. Try again: "):
            registry.delete("job-1")
    path.write_bytes(b"no database, but more than the hundred bytes of a header" * 40)
    with pytest.raises(LaunchError, match=r"'file is not a database', expected .*\. Move the file away: "):
        LocalJobRegistry(path)
