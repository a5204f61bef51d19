"""The parameter server of a job: who has it, credentials that are handed over once, a crew that waits for it."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from ringweave.jobs.records import EndCause, GroupPhase
from ringweave.launcher.node_context import HostContext
from ringweave.launcher.run_dir import RunDir
from ringweave.launcher.services import SERVER_IDLE_TIMEOUT_S, JobServer, ServiceSetup, SidecarEndpoint
from ringweave.launcher.supervise import NodePlan, NodeWorkers
from ringweave.launcher.workers import HostPort, WorkerExit, WorkerGroup, WorkerProgram, WorkerState
from ringweave.platforms.agent import job_config
from ringweave.platforms.agent.agent_channel import DesiredState, RoundOverError
from ringweave.platforms.agent.job_config import JobConfig, NodeConfig, RendezvousResult
from ringweave.platforms.agent.node_round import NodeRound, RoundServices
from ringweave.platforms.local.file_channel import FileAgentChannel
from ringweave.platforms.local.job_folder import JobFolder
from ringweave.rpc import CertificateAuthority

CONFIG = JobConfig(
    job="job",
    device="cpu",
    mode="ps-hra",
    nodes=(NodeConfig(index=0, name="a", workers=2), NodeConfig(index=1, name="b", workers=1)),
    script="s.py",
)
RACK = """
name: rack
nodes:
  - {name: a, nic: 100Mbit/s, devices: 2}
  - {name: b, nic: 400Mbit/s, devices: 4, switch: r0}
  - {name: c, nic: 400Mbit/s, devices: 4, switch: r1}
switches:
  - {name: r0, uplink: 400Mbit/s}
  - {name: r1, uplink: 400Mbit/s}
"""


def test_the_server_is_on_the_node_that_is_connected_best() -> None:
    assert job_config.server_nodes(CONFIG) == ("a",), "of equals the first"
    assert job_config.server_nodes(replace(CONFIG, cluster=RACK)) in (("a",), ("b",))
    described = replace(CONFIG, cluster=RACK.replace("nic: 100", "nic: 10"), min_workers=1)
    assert job_config.server_nodes(described) == ("a",), "an elastic job has it where its first coordinator is"
    assert job_config.server_nodes(replace(CONFIG, mode="sync")) == ()


def test_ranks_are_counted_through_the_nodes() -> None:
    assert [CONFIG.ranks_of_node(index) for index in (0, 1)] == [[0, 1], [2]]


def test_a_described_cluster_keeps_what_the_job_uses_of_it() -> None:
    config = replace(CONFIG, cluster=RACK)
    cluster = job_config.build_cluster(config, {"b": "10.0.0.2"})
    assert [(node.name, node.num_devices, node.address) for node in cluster.nodes] == [
        ("a", 2, None),
        ("b", 1, "10.0.0.2"),
    ]
    assert [switch.name for switch in cluster.switches] == ["r0"]
    assert cluster.node("a").rate_bytes_per_s == 12.5e6


def test_workers_are_told_where_the_server_is(tmp_path: Path) -> None:
    opening = RendezvousResult(
        round=1, master_address=HostPort(host="h", port=1), servers=(HostPort(host="h", port=7),)
    )
    group = job_config.node_worker_group(
        CONFIG, 1, opening, run_dir=RunDir(root=tmp_path), program=WorkerProgram(target="s.py"), cpus=1
    )
    assert group.workers[0].environ["RINGWEAVE_SERVER"] == "h:7"
    assert group.workers[0].environ["RINGWEAVE_MODE"] == "ps-hra"


def channel(folder: Path) -> FileAgentChannel:
    """Of an agent of the job in this folder."""
    job = JobFolder(root=folder)
    return FileAgentChannel(job, job.group(0, 1), lambda seconds: None)


def test_credentials_are_handed_over_once_with_one_more_in_case_they_are_lost(tmp_path: Path) -> None:
    secrets = tmp_path / "secrets"
    handover = channel(tmp_path)
    desk = RoundServices(CONFIG, "a", HostContext(), handover)
    for round_ in (1, 2):
        desk.prepare_round(DesiredState(round=round_))
    meeting = desk.prepare_round(DesiredState(round=3))["server"]
    assert meeting.host == "127.0.0.1"
    files = sorted(path for path in secrets.rglob("*") if path.is_file())
    wanted = [f"round-3/worker-{rank}.{life}.json" for rank in range(3) for life in range(2)]
    assert [str(path.relative_to(secrets)) for path in files] == wanted
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    credentials = handover.take_credentials(3, "worker-1")
    assert (credentials.identity.role, credentials.identity.name) == ("worker", "1")
    assert handover.take_credentials(3, "worker-1") != credentials
    with pytest.raises(RoundOverError, match="none left for worker-1"):
        handover.take_credentials(3, "worker-1")
    desk.prepare_round(DesiredState(round=3))
    assert handover.take_credentials(3, "worker-1").authority_pem != credentials.authority_pem
    begun = [RendezvousResult(round=round_, master_address=meeting, servers=(meeting,)) for round_ in (2, 3)]
    counts = [len(desk.create_services(each, RunDir(root=tmp_path), initial_members=[])) for each in begun]
    assert counts == [0, 1]


def test_who_comes_for_credentials_of_a_round_that_is_over_hears_that_it_is(tmp_path: Path) -> None:
    handover = channel(tmp_path)
    desk = RoundServices(CONFIG, "a", HostContext(), handover)
    for round_ in (1, 2, 3):
        desk.prepare_round(DesiredState(round=round_))
    with pytest.raises(RoundOverError, match=r"credentials of round 1: 'round 3 has begun', expected a current round"):
        handover.take_credentials(1, "worker-0")
    with pytest.raises(RoundOverError, match="credentials of round 4: 'none left for worker-0', expected a current"):
        handover.take_credentials(4, "worker-0")


class FakeServer(JobServer):
    """Its process and its connections are what the test says."""

    exit_code: int | None = None
    num_connections = 0


def test_a_server_is_wanted_while_somebody_talks_to_it(tmp_path: Path) -> None:
    here = SidecarEndpoint(node="a", advertised=HostPort(host="h", port=7))
    setup = ServiceSetup(
        node_context=HostContext(),
        run_dir=RunDir(root=tmp_path),
        issue=lambda role, index: CertificateAuthority("job").issue(role, str(index)),
    )
    server = fake = FakeServer([here], setup)
    assert server.is_needed(100.0)
    fake.num_connections = 1
    assert server.is_needed(200.0)
    fake.num_connections = 0
    assert server.is_needed(200.0 + SERVER_IDLE_TIMEOUT_S - 0.1)
    assert not server.is_needed(200.0 + SERVER_IDLE_TIMEOUT_S)
    fake.num_connections, fake.exit_code = 1, 0
    assert not server.is_needed(201.0)
    assert server.failure_text == ""
    fake.exit_code = 3
    assert server.failure_text == "the parameter server on node a ended with exit code 3"
    fake.exit_code = -signal.SIGKILL
    assert server.failure_text == "the parameter server on node a was killed by SIGKILL"


class Stage:
    """A crew with a launcher, books and a server that exist in memory only."""

    def __init__(self) -> None:
        self.exits: dict[int, WorkerExit | None] = {0: None, 1: None}
        self.stopped: list[signal.Signals] = []
        self.failure_text, self.wanted, self.happened = "", True, list[str]()
        self.now_s, self.num_tended = 0.0, 0
        group = WorkerGroup(argv=("python",), workers=())
        plan = NodePlan(group=group, environ={}, services=[self], is_node_of_job=True)  # type: ignore[list-item]
        self.workers = NodeWorkers(plan, self, self, clock=lambda: self.now_s)  # type: ignore[arg-type]
        self.crew = NodeRound(self.workers, self, self)  # type: ignore[arg-type]

    pid = 0

    @contextmanager
    def running(self, environ: object) -> Iterator[None]:
        """The server."""
        self.happened.append("server")
        yield
        self.end_server()

    def end_server(self) -> None:
        self.happened.append("server ends")

    def start(self, group: object) -> None:
        self.happened.append("workers")

    def restart_dead(self) -> None:
        self.num_tended += 1

    def is_needed(self, now_s: float) -> bool:
        return self.wanted

    def workers_started(self, pid: object) -> None:
        pass

    def worker_exited(self, state: WorkerState) -> None:
        pass

    def close(self, **given: object) -> None:
        self.happened.append(str(given["outcome"]))

    def observe(self) -> list[WorkerState]:
        return [WorkerState(global_rank=rank, exit=ended) for rank, ended in self.exits.items()]

    def stop(self, how: signal.Signals) -> None:
        """Stop the workers by a signal."""
        self.stopped.append(how)
        for rank, ended in self.exits.items():
            self.exits[rank] = ended or WorkerExit(
                exit_code=None, signal_name=how.name, time_s=self.now_s, was_stopped=True
            )

    def logs(self, rank: int, count: int) -> list[str]:
        return []

    def __enter__(self) -> "Stage":
        return self

    def __exit__(self, *_: object) -> None:
        self.happened.append("workers gone")

    def finish(self) -> None:
        self.exits = {
            rank: WorkerExit(exit_code=0, signal_name=None, time_s=1.0, was_stopped=False) for rank in self.exits
        }


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    stage = Stage()
    stage.workers._nodes = {0: "a", 1: "a"}
    return stage


def test_the_server_comes_first_and_stays_for_the_other_nodes(stage: Stage) -> None:
    assert stage.happened == ["server", "workers"]
    stage.finish()
    assert [stage.crew.poll(), stage.crew.poll()] == [None, None]
    stage.wanted = False
    outcome = stage.crew.poll()
    assert outcome is not None
    assert outcome.phase is GroupPhase.SUCCEEDED
    assert stage.happened[2:] == ["workers gone", "server ends", "done"]
    assert stage.num_tended == 3


def test_nothing_of_the_workers_is_left_though_the_server_cannot_be_ended(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stage, "end_server", end)
    stage.finish()
    stage.wanted = False
    with pytest.raises(OSError, match="No space left"):
        stage.crew.poll()
    assert stage.happened[2:] == ["workers gone"]


def test_a_crew_that_is_called_back_does_not_wait_for_the_server(stage: Stage) -> None:
    stage.finish()
    assert stage.crew.poll() is None
    stage.crew.request_stop()
    outcome = stage.crew.poll()
    assert outcome is not None
    assert outcome.phase is GroupPhase.SUCCEEDED


def test_the_death_of_the_server_is_the_places_doing(stage: Stage) -> None:
    stage.failure_text = "the parameter server on node a was killed by SIGKILL"
    outcome = None
    for _ in range(3):
        stage.now_s += 1.0
        outcome = outcome or stage.crew.poll()
    assert outcome is not None
    assert (outcome.phase, outcome.cause, outcome.text) == (GroupPhase.FAILED, EndCause.PLATFORM, stage.failure_text)
    assert stage.stopped == [signal.SIGKILL]


def test_connections_are_counted_where_the_process_is() -> None:
    import socket

    from ringweave.launcher.services import count_established

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert count_established(os.getpid(), port) == 0
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = server.accept()
            with accepted:
                assert count_established(os.getpid(), port) == 1
                assert client.getpeername()[1] == port
    assert count_established(2**30, port) == 0


def test_leadership_logs_of_earlier_rounds_are_removed(tmp_path: Path) -> None:
    agent_channel = channel(tmp_path)
    for round_ in range(1, 10):
        agent_channel.leadership_log(round_)
    assert sorted(each.name for each in (tmp_path / "claims").iterdir()) == ["round-8", "round-9"]
