"""What groups are made of: config, layout, reports, results, what deaths come to."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringweave import telemetry
from ringweave.errors import JobError
from ringweave.jobs import records
from ringweave.jobs.records import EndCause, GroupPhase
from ringweave.jobs.request import JobRequest, NodeRequest
from ringweave.jobs.worker_options import RankOrder, WorkerOptions, assign_ranks
from ringweave.launcher.outcome import WorkerFailure
from ringweave.launcher.run_dir import RunDir
from ringweave.launcher.workers import HostPort, WorkerExit, WorkerProgram
from ringweave.platforms.agent import agent, agent_channel, job_config, node_round
from ringweave.platforms.agent.agent_channel import AgentStatus, DesiredState
from ringweave.platforms.agent.job_config import JobConfig, NodeConfig, RendezvousResult
from ringweave.platforms.agent.node_round import NodeProgress, ProgressReader
from tests.telemetry.examples import example

MEETING = HostPort(host="10.0.0.1", port=29500)


@pytest.fixture
def config() -> JobConfig:
    nodes = tuple(NodeRequest(name=f"n{index}", capacity=capacity) for index, capacity in enumerate((10, 2, 5)))
    request = JobRequest(name="job", num_workers=15, script="a/train.py", nodes=nodes, mode="sync", data="/data")
    job = records.new_job(request, requester="ann", counts=(10, 0, 5), now=0.0)
    return job_config.job_config(job, directory="/home/ann", script_text=None)


def test_the_config_says_what_the_split_gave(config: JobConfig) -> None:
    assert [(node.index, node.name, node.workers) for node in config.nodes] == [(0, "n0", 10), (2, "n2", 5)]
    assert (config.world_size, config.node(2).name, config.script) == (15, "n2", "a/train.py")
    assert job_config.JOB_CONFIG_JSON.parse(job_config.JOB_CONFIG_JSON.dump(config)) == config


@pytest.mark.parametrize(("found", "text"), [('"format":3', "format 3"), ('"name":"job"', "format 1")])
def test_a_config_of_another_ringweave_is_refused_and_both_formats_are_named(
    config: JobConfig, found: str, text: str
) -> None:
    other = job_config.JOB_CONFIG_JSON.dump(config).replace('"format":2', found)
    with pytest.raises(
        JobError, match=rf"config of the job: '{text}', expected format 2\. Delete the job with the ringw"
    ):
        job_config.JOB_CONFIG_JSON.parse(other)


@pytest.mark.parametrize(
    ("changes", "probe"),
    [({}, "always"), ({"cluster": "x"}, None), ({"between_hosts": False}, None), ({"min_workers": 5}, "always")],
)
def test_workers_between_hosts_know_that_rates_are_assumed(
    config: JobConfig, tmp_path: Path, changes: dict[str, Any], probe: str | None
) -> None:
    if "cluster" in changes:
        nodes = "".join(f"  - {{name: {name}, nic: 1Gbit/s, devices: 10}}\n" for name in ("n0", "n2"))
        changes = {"cluster": f"name: lab\nnodes:\n{nodes}"}
    opening = RendezvousResult(round=1, master_address=MEETING, addresses={"n0": "10.0.0.1", "n2": "10.0.0.3"})
    program = WorkerProgram(target=str(tmp_path / "s.py"))
    changed = replace(config, **changes)
    group = job_config.node_worker_group(changed, 2, opening, run_dir=RunDir(root=tmp_path), program=program, cpus=1)
    assert {worker.environ.get("RINGWEAVE_PROBE") for worker in group.workers} == {probe}


def test_each_node_starts_its_part_of_the_whole(config: JobConfig, tmp_path: Path) -> None:
    opening = RendezvousResult(round=3, master_address=MEETING, addresses={"n0": "10.0.0.1", "n2": "10.0.0.3"})
    run_dir = RunDir(root=tmp_path)
    program = job_config.write_worker_program(config, tmp_path)
    assert program == WorkerProgram(target="/home/ann/a/train.py")
    group = job_config.node_worker_group(config, 2, opening, run_dir=run_dir, program=program, cpus=2)
    assert [worker.global_rank for worker in group.workers] == list(range(10, 15))
    environ = group.workers[1].environ
    expected = {
        "RANK": "11",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "15",
        "LOCAL_WORLD_SIZE": "5",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "OMP_NUM_THREADS": "2",
        "RINGWEAVE_NODE": "n2",
        "RINGWEAVE_MODE": "sync",
        "RINGWEAVE_DATA": "/data",
        "RINGWEAVE_RUN_DIR": str(tmp_path),
    }
    assert {key: environ[key] for key in expected} == expected
    cluster = job_config.build_cluster(config, opening.addresses)
    assert [(node.name, node.num_devices, node.address) for node in cluster.nodes] == [
        ("n0", 10, "10.0.0.1"),
        ("n2", 5, "10.0.0.3"),
    ]
    assert {device.kind for node in cluster.nodes for device in node.devices} == {"cuda"}


def test_the_options_of_the_workers_are_those_of_the_request(tmp_path: Path) -> None:
    nodes = tuple(NodeRequest(name=f"n{index}", capacity=2) for index in range(2))
    words = {"schedule": "ring", "tuning": False, "replace_backend": True, "leader_per_nic": True}
    request = JobRequest(name="job", num_workers=4, module="text.train", nodes=nodes, order="round-robin", **words)
    job = records.new_job(request, requester="ann", counts=(2, 2), now=0.0)
    config = job_config.job_config(job, directory="/home/ann", script_text=None)
    assert job_config.JOB_CONFIG_JSON.parse(job_config.JOB_CONFIG_JSON.dump(config)) == config
    assert (config.ranks_of_node(0), config.ranks_of_node(1), job.ranks_of_node(1)) == ([0, 2], [1, 3], [1, 3])
    program = job_config.write_worker_program(config, tmp_path)
    assert program == WorkerProgram(target="text.train", is_module=True)
    opening = RendezvousResult(round=1, master_address=MEETING)
    group = job_config.node_worker_group(config, 1, opening, run_dir=RunDir(root=tmp_path), program=program, cpus=1)
    assert group.argv == (sys.executable, "-m", "text.train")
    expected = {
        "RINGWEAVE_SCHEDULE": "ring",
        "RINGWEAVE_TUNING": "0",
        "RINGWEAVE_REPLACE_BACKEND": "1",
        "RINGWEAVE_LEADER_PER_NIC": "1",
    }
    for rank, worker in zip((1, 3), group.workers, strict=True):
        told = {key: worker.environ[key] for key in expected}
        assert (worker.global_rank, worker.environ["RANK"], told) == (rank, str(rank), expected)


def test_the_node_of_rank_0_gives_the_master_address() -> None:
    nodes = tuple(NodeConfig(index=index, name=f"n{index}", workers=1) for index in range(3))
    order = next(
        order
        for seed in range(99)
        if assign_ranks([1, 1, 1], order := RankOrder(kind="shuffled", seed=seed))[0] == (2, 0)
    )
    config = JobConfig(
        job="j", device="cpu", mode="auto", nodes=nodes, command="true", worker_options=WorkerOptions(order=order)
    )
    assert config.master_node == "n2"
    offers = {
        f"n{index}": AgentStatus(
            round=1, phase=GroupPhase.READY, pid=1, master_address=HostPort(host=f"10.0.0.{index}", port=5)
        )
        for index in range(3)
    }
    found = agent_channel.rendezvous_result(config, 1, offers)
    assert found is not None
    assert found.master_address == HostPort(host="10.0.0.2", port=5)
    assert agent_channel.rendezvous_result(config, 1, {name: offers[name] for name in ("n0", "n1")}) is None


def test_a_command_runs_without_an_interpreter(tmp_path: Path) -> None:
    config = JobConfig(job="j", device="cpu", mode="auto", nodes=(), command="./run.sh", arguments=("x",))
    program = job_config.write_worker_program(config, tmp_path)
    assert program.argv("python", entry="entry.py") == ("./run.sh", "x")


def test_the_link_of_a_node_that_others_reach_by_relays_says_so(config: JobConfig) -> None:
    cluster = job_config.build_cluster(config, {"n0": "10.0.0.1", "n2": "127.64.0.9"})
    assert [nic.name for node in cluster.nodes for nic in node.nics] == ["lo", "relay"]


def test_a_script_that_is_alone_travels(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('é')")
    text = job_config.read_script(script)
    config = JobConfig(job="j", device="cpu", mode="auto", nodes=(), script="train.py", script_text=text)
    program = job_config.write_worker_program(config, tmp_path / "home")
    assert Path(program.target).read_text() == "print('é')"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, r"script .*x\.py: 'No such file or directory', expected a Python file\. Check the path, or give the"),
        (b"\xff", r"script .*x\.py: 'bytes that are no UTF-8', expected a Python file\."),
        (
            b"#" * (2**20 + 1),
            r"bytes of script .*x\.py: 1048577, expected at most 1048576 \(1 MiB\), which travel with the job\. Put",
        ),
    ],
)
def test_a_script_that_cannot_travel(content: bytes | None, text: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "x.py").write_bytes(content)
    with pytest.raises(JobError, match=text):
        job_config.read_script(tmp_path / "x.py")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("#" * (2**20 + 1), r"bytes of script x\.py: 1048577, expected at most 1048576 \(1 MiB\), which travel with"),
        ("\ud800", r"script x\.py: 'characters that are no UTF-8', expected a Python file\. Write it as UTF-8\."),
    ],
)
def test_a_text_that_cannot_travel(text: str, said: str) -> None:
    with pytest.raises(JobError, match=said):
        job_config.check_script_text(text, "x.py")


def test_what_is_told_reads_back() -> None:
    report = AgentStatus(
        round=2,
        phase=GroupPhase.FAILED,
        pid=7,
        cause=EndCause.PLATFORM,
        text="x",
        master_address=MEETING,
        last_loss=0.1,
    )
    assert agent_channel.STATUS_JSON.parse(agent_channel.STATUS_JSON.dump(report)) == report
    orders = DesiredState(round=2, rendezvous=RendezvousResult(round=1, master_address=MEETING), stop=True, reason="w")
    assert agent_channel.DESIRED_STATE_JSON.parse(agent_channel.DESIRED_STATE_JSON.dump(orders)) == orders
    opening = RendezvousResult(round=1, master_address=MEETING, addresses={"a": "b"})
    assert agent_channel.RENDEZVOUS_JSON.parse(agent_channel.RENDEZVOUS_JSON.dump(opening)) == opening
    seen = report.to_group(3, 4, leaving=True)
    assert (seen.node, seen.attempt, seen.round, seen.phase, seen.cause, seen.is_terminating) == (
        *(3, 4, 2, GroupPhase.FAILED),
        *(EndCause.PLATFORM, True),
    )


def test_iterations_are_told_and_read(tmp_path: Path) -> None:
    results = ProgressReader(tmp_path / "events.jsonl")
    assert results.read() == NodeProgress()
    now = [0.0]
    environ = {"RINGWEAVE_RUN_DIR": str(tmp_path), "RANK": "4", "LOCAL_RANK": "0"}
    with telemetry.Iterations(environ, clock=lambda: now[0]) as iterations:
        iterations.done(1, 3.0)
        assert results.read() == NodeProgress(iterations=1, last_loss=3.0)
        iterations.done(2, 2.0)
        assert results.read() == NodeProgress(iterations=1, last_loss=3.0)
        now[0] = 0.6
        iterations.done(3, 1.5)
        assert results.read() == NodeProgress(iterations=3, last_loss=1.5)
        iterations.done(4)
    assert results.read() == NodeProgress(iterations=4)
    with (tmp_path / "events.jsonl").open("a") as log:
        log.write('{"kind": "iterations_done", torn\n' + json.dumps(example("iterations_done", iterations=9))[:-1])
    assert results.read() == NodeProgress(iterations=4)
    with (tmp_path / "events.jsonl").open("ab") as log:
        for rubbish in (b"[" * 100_000, b"\xff\xfe", b"[]", b'"\r"', b"{}"):
            log.write(b'\n{"kind": "iterations_done", "loss": ' + rubbish)
        log.write(f"\n{json.dumps(example('iterations_done', iterations=5, loss=None))}\n".encode())
    assert results.read() == NodeProgress(iterations=5)


@pytest.mark.parametrize("environ", [{}, {"RINGWEAVE_RUN_DIR": "here", "LOCAL_RANK": "1"}])
def test_nobody_else_speaks(environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    with telemetry.Iterations(environ) as iterations:
        iterations.done(1)
    assert not list((tmp_path / "here").iterdir())


def death(rank: int, how: int | str, *lines: str, stopped: bool = False) -> WorkerFailure:
    code, name = (how, None) if isinstance(how, int) else (None, how)
    ended = WorkerExit(exit_code=code, signal_name=name, time_s=1.0, was_stopped=stopped)
    return WorkerFailure(global_rank=rank, node="n0", exit=ended, last_lines=lines)


PEER = ("Traceback (most recent call last):", "ringweave.errors.PeerError: rank 3 died")


@pytest.mark.parametrize(
    ("deaths", "phase", "cause", "text"),
    [
        ([], GroupPhase.SUCCEEDED, None, ""),
        ([death(0, "SIGTERM", stopped=True)], GroupPhase.STOPPED, None, "its workers were stopped"),
        ([death(0, 1, *PEER)], GroupPhase.INTERRUPTED, EndCause.PEER, f"rank 0 raised {PEER[1]}"),
        (
            [death(0, 1, *PEER), death(1, "SIGKILL")],
            GroupPhase.FAILED,
            EndCause.PLATFORM,
            "rank 1 was killed by SIGKILL",
        ),
        ([death(0, 1, *PEER), death(1, 2)], GroupPhase.FAILED, EndCause.PROGRAM, "rank 1 ended with exit code 2"),
        ([death(0, 137)], GroupPhase.FAILED, EndCause.PLATFORM, "rank 0 ended with exit code 137"),
    ],
)
def test_what_deaths_come_to(deaths: list[WorkerFailure], phase: GroupPhase, cause: EndCause | None, text: str) -> None:
    outcome = node_round.conclude_node(deaths)
    assert (outcome.phase, outcome.cause, outcome.text) == (phase, cause, text)


def epoch(number: int, *members: str, term: int = 1) -> dict[str, object]:
    return example("generation_begun", term=term, number=number, members=list(members), part="")


def lost(member: str, reason: str = "no heartbeat") -> dict[str, object]:
    return example("member_lost", member=member, reason=reason)


def back(member: str) -> dict[str, object]:
    return example("member_returned", member=member)


FINISHED = "it has finished"


def test_of_a_slot_that_dies_again_and_again_the_newest_members_are_told(tmp_path: Path) -> None:
    results = ProgressReader(tmp_path / "events.jsonl")
    for number in range(1, 300):
        name = f"1.{number}"
        events = [epoch(2 * number, "0.0", name), lost(name), epoch(2 * number + 1, "0.0")]
        with (tmp_path / "events.jsonl").open("a") as file:
            file.write("".join(json.dumps(event) + "\n" for event in events))
    assert results.read() == NodeProgress(
        generation=(1, 599), evicted=tuple(f"1.{number}" for number in range(292, 300))
    )


def test_rings_have_memberships_of_their_own(tmp_path: Path) -> None:
    results = ProgressReader(tmp_path / "events.jsonl")
    first = [epoch(1, "0.0", "1.0") | {"part": "ring 0"}, epoch(1, "2.0", "3.0") | {"part": "ring 1"}]
    path = tmp_path / "events.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in first))
    assert results.read() == NodeProgress(generation=(1, 1)), "members of another ring are not evicted"
    later = [lost("1.0"), epoch(2, "0.0") | {"part": "ring 0"}, lost("3.0"), lost("2.0", FINISHED)]
    with path.open("a") as file:
        file.write("".join(json.dumps(event) + "\n" for event in later))
    assert results.read() == NodeProgress(generation=(1, 2), evicted=("1.0", "3.0"))


@pytest.mark.parametrize(
    ("events", "newest", "out"),
    [
        ([epoch(1, "0.0", "1.0"), lost("1.0")], (1, 1), ()),  # the others may not know of it, nor it of them
        ([epoch(1, "0.0", "1.0"), lost("1.0"), epoch(2, "0.0")], (1, 2), ("1.0",)),
        ([epoch(1, "0.0", "1.0"), epoch(2, "0.0"), epoch(3, "0.0", "1.1")], (1, 3), ()),
        ([epoch(1, "0.0", "1.0"), epoch(1, "0.0", term=2), epoch(9, "1.0", "0.0")], (2, 1), ("1.0",)),
        ([epoch(1, "0.0", "1.0"), lost("0.0", FINISHED), lost("1.0")], (1, 1), ("1.0",)),  # nobody is left to go on
        ([epoch(1, "0.0", "1.0"), lost("0.0", FINISHED), lost("1.0"), back("1.0")], (1, 1), ()),
        ([epoch(1, "0.0", "1.0", term=3), lost("0.0", FINISHED), lost("1.0"), back("1.0")], (3, 1), ("1.0",)),
        ([epoch(1, "0.0", "1.0"), lost("0.0", FINISHED), lost("1.0", FINISHED)], (1, 1), ()),
        ([epoch(1, "0.0", "1.0"), lost("1.0", FINISHED), epoch(2, "0.0")], (1, 2), ()),
    ],
)
def test_who_is_no_member_any_more_is_read_from_what_the_coordinator_notes(
    events: list[dict[str, object]], newest: tuple[int, int], out: tuple[str, ...], tmp_path: Path
) -> None:
    results = ProgressReader(tmp_path / "events.jsonl")
    assert results.read() == NodeProgress()
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert results.read() == NodeProgress(generation=newest, evicted=out)


def test_of_a_node_that_begins_again_and_again_the_last_rounds_are_kept(tmp_path: Path) -> None:
    node, other = tmp_path / "n0", tmp_path / "n1" / "1" / "round-1"
    other.mkdir(parents=True)
    for round_ in range(1, 101):
        home = node / str(1 + round_ // 2)
        (home / f"round-{round_}" / "logs").mkdir(parents=True)
        (home / "agent.log").touch()
        (home / "round-of-somebody").mkdir(exist_ok=True)
        agent.remove_old_rounds(home)
    kept = {int(path.name.removeprefix("round-")) for path in node.glob("*/round-[0-9]*")}
    assert kept == set(range(101 - agent.MAX_ROUNDS, 101))
    assert len(list(node.iterdir())) == agent.MAX_ROUNDS
    assert other.exists()


def test_a_home_without_a_number_has_no_others_beside_it(tmp_path: Path) -> None:
    for folder in ("home", "1"):
        for round_ in range(30):
            (tmp_path / folder / f"round-{round_}").mkdir(parents=True)
    agent.remove_old_rounds(tmp_path / "home")
    assert len(list((tmp_path / "home").iterdir())) == agent.MAX_ROUNDS
    assert len(list((tmp_path / "1").iterdir())) == 30
