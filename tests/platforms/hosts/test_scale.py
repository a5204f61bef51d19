"""`ringweave scale` on a run on hosts: real services and workers on loopback addresses, and the rules alone."""

import contextlib
import json
import re
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from ringweave.errors import JobError, MessageError, NotLeaderError
from ringweave.jobs import admission
from ringweave.jobs.admission import PermissionCache
from ringweave.jobs.records import GroupPhase, ObservedGroup
from ringweave.jobs.request import ElasticRequest, JobRequest, NodeRequest
from ringweave.launcher.run_dir import RunDir
from ringweave.launcher.scale_requests import WantedWorkers
from ringweave.launcher.workers import HostPort
from ringweave.membership.settings import MemberBounds
from ringweave.platforms.agent import job_config
from ringweave.platforms.agent.job_config import RendezvousResult
from ringweave.platforms.hosts import controller, messages
from ringweave.platforms.hosts.controller import HostView
from ringweave.platforms.hosts.messages import HostReport
from ringweave.platforms.hosts.run_entry import ENTRY_JSON, HostEndpoint, RunEntry, ScaleRecord
from ringweave.platforms.submission import JobOrigin
from tests.launcher.small_training import SUM, epoch, prepared
from tests.platforms.hosts.conftest import FakeHosts
from tests.platforms.hosts.test_runs import wait_nothing_left

SERVICE = "ringweave.platforms.hosts.service"
SCRIPT = f"""{prepared()}
last = pathlib.Path({{last!r}})
for epoch in loader.epochs(1_000_000):
    if last.exists() and epoch >= int(last.read_text()):
        break
{epoch(indent=4, also="time.sleep(0.3)")}
    print("epoch", epoch, flush=True)
{SUM}"""


def events_of(hosts: FakeHosts) -> list[dict]:
    paths = [path for name in hosts.names for path in hosts.run_files(name) if path.name == "events.jsonl"]
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def ranks(hosts: FakeHosts) -> list[int]:
    """Ranks of the members of the newest generation."""
    begun = [each for each in events_of(hosts) if each["kind"] == "generation_begun"]
    newest = max(begun, key=lambda each: (each["term"], each["number"]), default={"members": []})
    return sorted(int(member.partition(".")[0]) for member in newest["members"])


def attempts(hosts: FakeHosts, name: str) -> set[str]:
    """Attempts of a host that have an event log."""
    return {path.parts[-3] for path in hosts.run_files(name) if path.name == "events.jsonl"}


def scale(hosts: FakeHosts, workers: int, host: str | None = None) -> str:
    done = hosts.ask("scale", "train", "--workers", str(workers), host=host)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refusal(hosts: FakeHosts, workers: int, host: str | None = None) -> str:
    done = hosts.ask("scale", "train", "--workers", str(workers), host=host)
    assert (done.returncode, done.stdout) == (2, "")
    return done.stderr


def finish(hosts: FakeHosts, last: Path) -> None:
    """Let all workers end after the same epoch, which none of them has reached."""
    logs = [path for name in hosts.names for path in hosts.run_files(name) if path.name.startswith("rank-")]
    reached = max(int(number) for path in logs for number in re.findall(r"epoch (\d+)", path.read_text()))
    last.with_suffix(".new").write_text(str(reached + 5))
    last.with_suffix(".new").rename(last)


def check_simultaneous_requests(hosts: FakeHosts) -> None:
    """Ask for four and five workers at the same moment: one answer follows from the start, and one from the other."""
    commands = {str(workers): hosts.start("scale", "train", "--workers", str(workers)) for workers in (4, 5)}
    said = {workers: command.communicate(timeout=120) for workers, command in commands.items()}
    before = {workers: re.findall(r" requested, (\d) before", out) for workers, (out, _) in said.items()}
    assert before in ({"4": ["3"], "5": ["4"]}, {"5": ["3"], "4": ["5"]}), said


@pytest.mark.slow
def test_workers_start_and_leave_on_all_hosts_and_the_number_outlives_the_leader(hosts: FakeHosts) -> None:
    """It may grow to so many that their credentials do not fit into a message without buffers."""
    last = hosts.root / "last"
    folder = hosts.write_script(SCRIPT.format(last=str(last)))
    words = ("--hosts", "a,b,c", "--elastic", "1:100", "--name", "train", "--run-dir", "out")
    command = hosts.start("run", *words, "train.py")
    hosts.wait(lambda: ranks(hosts) == [0, 1, 2], "three workers train")
    check_simultaneous_requests(hosts)
    scale(hosts, 5)
    hosts.wait(lambda: ranks(hosts) == [0, 1, 2, 3, 4], "five workers train")
    started = {each["rank"]: each["node"] for each in events_of(hosts) if each["kind"] == "worker_started"}
    assert started == {0: "a", 1: "b", 2: "c", 3: "a", 4: "b"}
    shown = re.findall(r"^([abc]) +(\d) of ", hosts.ask("status", "train").stdout, re.MULTILINE)
    assert shown == [("a", "2"), ("b", "2"), ("c", "1")]
    assert "epoch" in hosts.ask("logs", "train", "--rank", "4").stdout
    text = "--workers: {}, expected 1 to 100 (--elastic 1:100). Ask for a number within the limits of the run."
    assert refusal(hosts, 101) == f"ringweave: error: {text.format(101)}\n"
    assert refusal(hosts, 0, host="b") == f"ringweave: error: {text.format(0)}\n"
    left = scale(hosts, 1, host="c")
    assert left == "1 workers requested, 5 before; leaving after the train step: rank 1, 2, 3, 4\n"
    hosts.kill("a", SERVICE)
    hosts.wait(lambda: ranks(hosts) == [0], "one worker trains, and two hosts have none")
    assert hosts.ask("status", "train").stdout.startswith("train: Running")
    hosts.wait(lambda: hosts.ask("scale", "train", "--workers", "3", host="b").returncode == 0, "a leader")
    hosts.kill("b", SERVICE)
    hosts.wait(lambda: ranks(hosts) == [0, 1, 2], "three workers train again")
    scale(hosts, 2)
    hosts.wait(lambda: ranks(hosts) == [0, 1], "two workers train, and the last host has none")
    assert "1 workers requested, 5 before" in hosts.ask("events", "train").stdout
    finish(hosts, last)
    output, errors = command.communicate(timeout=300)
    assert command.returncode == 0, errors
    sums = {line.split()[0]: line.split()[-1] for line in output.splitlines() if " sum " in line}
    assert set(sums) == {"[0]", "[1]"}
    assert {"[2]", "[3]", "[4]"} <= {line.split()[0] for line in output.splitlines()}
    assert len(set(sums.values())) == 1
    record = json.loads((folder / "out" / "run.json").read_text())
    assert (record["outcome"], record["world_size"]) == ("done", 2)
    assert [each["workers"] for each in record["cluster"]["nodes"]] == [[0], [1], []]
    wait_nothing_left(hosts)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_leading_host_that_dies_with_its_workers_comes_back_with_as_many_as_were_asked_for(hosts: FakeHosts) -> None:
    last = hosts.root / "last"
    hosts.write_script(SCRIPT.format(last=str(last)))
    command = hosts.start("run", "--hosts", "a,b,c", "--elastic", "1:5", "--name", "train", "train.py")
    hosts.wait(lambda: ranks(hosts) == [0, 1, 2], "three workers train")
    scale(hosts, 5)
    for process in hosts.processes("a"):
        with contextlib.suppress(psutil.Error):
            process.kill()
    hosts.wait(lambda: ranks(hosts) == [0, 1, 2, 3, 4] and len(attempts(hosts, "a")) == 2, "all train")
    finish(hosts, last)
    output, errors = command.communicate(timeout=300)
    assert command.returncode == 0, errors
    sums = {line.split()[0]: line.split()[-1] for line in output.splitlines() if " sum " in line}
    assert sorted(sums) == [f"[{rank}]" for rank in range(5)]
    assert len(set(sums.values())) == 1


@pytest.mark.slow
def test_a_run_that_has_no_member_or_ends_is_not_scaled(hosts: FakeHosts) -> None:
    hosts.write_script("import time\ntime.sleep(600)\n")
    words = ("--hosts", "a:2", "--elastic", "1:2", "--name", "train", "--detach")
    assert hosts.run("run", *words, "train.py").returncode == 0
    hosts.wait_state("Running")
    assert "run: 'no member yet', expected workers that have called ringweave.prepare. " in refusal(hosts, 1)
    hosts.ask("stop", "train")
    hosts.wait_state("Stopped")
    assert "run: 'train, which ends', expected a run that trains." in refusal(hosts, 1)


def entry_of(mode: str = "auto", slots: tuple[int, ...] = (2, 2, 1)) -> RunEntry:
    """Entry of an elastic run on three hosts with a worker each."""
    nodes = tuple(NodeRequest(name=name, capacity=1, max_retries=9) for name in "abc")
    request = JobRequest(
        name="train", num_workers=3, script="t.py", directory=".", nodes=nodes, device="cpu", min_per_node=1,
        mode=mode, elastic=ElasticRequest(min=1),
    )  # fmt: skip
    permissions = PermissionCache(admission.OPEN_POLICY.find_permission)
    job = admission.admit_job(request, requester="me", existing=[], permissions=permissions, now=1.0)
    return RunEntry(
        run_id="train-1",
        version=(1, 1),
        hosts=tuple(HostEndpoint(node=name, destination=name, address="127.0.0.1", port=1) for name in "abc"),
        voters=(0, 1, 2),
        job=job,
        origin=JobOrigin(directory="/", script_text=None, environ={}, slots=slots),
        bounds=MemberBounds(min_members=1, max_members=5),
    )


def view_of(node: int, *members: str, phase: GroupPhase = GroupPhase.RUNNING) -> HostView:
    ended_s = None if phase.is_alive else 7.0
    group = ObservedGroup(
        node=node, attempt=1, round=1, phase=phase, members=members, generation=(1, 2), ended_s=ended_s
    )
    return HostView(report=HostReport(has_config=True, groups=(group,)), is_heard=True)


TRAINING = [view_of(0, "0.0"), view_of(1, "1.0"), view_of(2, "2.0")]


def test_later_ranks_are_spread_and_each_request_has_a_number() -> None:
    entry = entry_of()
    config = entry.origin.config(entry.job)
    assert [config.slots_of_node(node) for node in range(3)] == [[0, 3], [1, 4], [2]]
    assert config.credential_holders(0) == {"worker-0", "worker-3", "coordinator-0"}
    once = controller.scale_run(entry, TRAINING, 5, 2.0, "first")
    assert controller.scale_run(once, TRAINING, 5, 2.5, "first") is once, "sent again after a lost answer"
    again = controller.scale_run(once, TRAINING, 2, 3.0, "second")
    wanted = WantedWorkers(workers=2, number=2)
    assert again.scaled == ScaleRecord(wanted=wanted, before=5, most=5, request_id="second")
    assert [again.wanted_ranks(node) for node in range(3)] == [[0], [1], []]
    texts = [event.text for event in again.events]
    assert texts[0] == "5 workers requested, 3 before; started: rank 3, 4"
    assert texts[1] == "2 workers requested, 5 before; leaving after the train step: rank 2, 3, 4"
    assert ENTRY_JSON.parse(ENTRY_JSON.dump(again)) == again


@pytest.mark.parametrize(
    ("entry", "views", "workers", "text"),
    [
        (entry_of(), TRAINING, 6, "--workers: 6, expected 1 to 5 (--elastic 1:5). "),
        (entry_of(slots=(2, 1, 1)), TRAINING, 5, "--workers: 5, expected 1 to 4 (the places on its hosts). "),
        (entry_of("ps-hra", (1, 1, 1)), TRAINING, 4, "expected 1 to 3 (the number of workers in its rings). "),
        (
            replace(entry_of(slots=(500, 250, 250)), bounds=MemberBounds(min_members=1, max_members=2000)),
            TRAINING,
            1001,
            "expected 1 to 1000 (the workers for which certificates were issued at its start). ",
        ),
    ],
)
def test_an_impossible_number_is_refused(entry: RunEntry, views: list[HostView], workers: int, text: str) -> None:
    with pytest.raises(JobError) as caught:
        controller.scale_run(entry, views, workers, 2.0)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_new_leader_waits_for_reports_before_it_decides() -> None:
    with pytest.raises(NotLeaderError):
        controller.scale_run(entry_of(), [*TRAINING[:2], HostView(report=None, is_heard=True, is_awaited=True)], 2, 2.0)


@pytest.mark.parametrize(
    ("others", "phase"),
    [
        ((GroupPhase.RUNNING, GroupPhase.RUNNING), GroupPhase.RUNNING),
        ((GroupPhase.SUCCEEDED, GroupPhase.RUNNING), GroupPhase.RUNNING),
        ((GroupPhase.SUCCEEDED, GroupPhase.SUCCEEDED), GroupPhase.SUCCEEDED),
        ((GroupPhase.SUCCEEDED, GroupPhase.FAILED), GroupPhase.SUCCEEDED),
        ((GroupPhase.FAILED, GroupPhase.FAILED), GroupPhase.RUNNING),
    ],
)
def test_a_host_without_workers_has_succeeded_once_no_other_trains(
    others: tuple[GroupPhase, GroupPhase], phase: GroupPhase
) -> None:
    entry = controller.scale_run(entry_of(), TRAINING, 2, 2.0)
    views = [view_of(0, phase=others[0]), view_of(1, phase=others[1]), view_of(2)]
    found = {group.node: group for group in controller.observe_hosts(entry, views).groups}
    assert found[2].phase is phase
    assert found[2].ended_s == (7.0 if phase is GroupPhase.SUCCEEDED else None)
    assert controller.observe_hosts(entry_of(), views).groups[2].phase is GroupPhase.RUNNING


def test_credentials_of_a_thousand_workers_travel_in_one_buffer() -> None:
    files = {f"worker-{rank}.{number}.json": "x" * 1760 for rank in range(1000) for number in range(8)}
    (packed,) = messages.pack_secrets(files)
    assert messages.unpack_secrets([memoryview(packed)]) == files
    assert messages.pack_secrets({}) == []
    assert messages.unpack_secrets([]) == {}


@pytest.mark.parametrize("buffer", [b"", b"[]", b'{"worker-0.0.json": 5}', b"\xff"])
def test_other_bytes_are_no_credentials(buffer: bytes) -> None:
    expected = r"^credentials of a round: 'something else', expected a JSON object of texts\. Look at the host"
    with pytest.raises(MessageError, match=expected):
        messages.unpack_secrets([buffer])


def test_a_later_worker_shares_the_processors_of_the_hosts_with_all() -> None:
    entry = entry_of(slots=(400, 300, 300))
    config = entry.origin.config(entry.job)
    addresses = {name: f"10.0.0.{number}" for number, name in enumerate("abc")}
    rendezvous = RendezvousResult(round=1, master_address=HostPort(host="10.0.0.0", port=1), addresses=addresses)
    program = job_config.worker_program(config)
    group = job_config.node_worker_group(
        config, 0, rendezvous, run_dir=RunDir(root=Path("/run")), program=program, cpus=8
    )
    threads = {each.global_rank: each.environ["OMP_NUM_THREADS"] for each in group.workers}
    assert (threads[0], threads[3]) == ("8", "6"), "24 processors for four workers"
