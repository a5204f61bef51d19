"""The parameter server of a job: who has it, credentials that are handed over once, a crew that waits for it."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringweave.jobs.life.observing import Cause, Phase
from ringweave.launch.groups import layout
from ringweave.launch.groups.config import Config, ConfigNode
from ringweave.launch.groups.crew import Crew
from ringweave.launch.groups.handing import RoundOverError, SharedFolder
from ringweave.launch.groups.posts import Opening
from ringweave.launch.groups.serving import QUIET_S, RoundServer, ServerDesk
from ringweave.launch.launcher import Exit, WorkerState
from ringweave.launch.local.sites import ThisMachine
from ringweave.launch.run_dirs import RunDir
from ringweave.launch.workers import Meeting, Program, WorkerGroup

CONFIG = Config(
    job="job",
    device="cpu",
    mode="ps-hra",
    nodes=(ConfigNode(index=0, name="a", workers=2), ConfigNode(index=1, name="b", workers=1)),
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
    assert layout.server_node(CONFIG) == "a", "of equals the first"
    assert layout.server_node(replace(CONFIG, cluster=RACK)) in ("a", "b")
    assert layout.server_node(replace(CONFIG, mode="sync")) is None


def test_ranks_are_counted_through_the_nodes() -> None:
    assert [CONFIG.ranks(index) for index in (0, 1)] == [range(2), range(2, 3)]


def test_a_described_cluster_keeps_what_the_job_uses_of_it() -> None:
    config = replace(CONFIG, cluster=RACK)
    cluster = layout.cluster_of(config, {"b": "10.0.0.2"})
    assert [(node.name, node.num_devices, node.address) for node in cluster.nodes] == [
        ("a", 2, None),
        ("b", 1, "10.0.0.2"),
    ]
    assert [switch.name for switch in cluster.switches] == ["r0"]
    assert cluster.node("a").rate_bytes_per_s == 12.5e6


def test_workers_are_told_where_the_server_is(tmp_path: Path) -> None:
    opening = Opening(round=1, meeting=Meeting(host="h", port=1), server=Meeting(host="h", port=7))
    group = layout.workers_of(
        CONFIG, 1, opening, run_dir=RunDir(root=tmp_path), program=Program(target="s.py"), python="python", cpus=1
    )
    assert group.workers[0].environ["RINGWEAVE_SERVER"] == "h:7"
    assert group.workers[0].environ["RINGWEAVE_MODE"] == "ps-hra"


def test_credentials_are_handed_over_once_and_those_of_the_round_before_stay(tmp_path: Path) -> None:
    secrets = tmp_path / "secrets"
    handover = SharedFolder(secrets)
    desk = ServerDesk(CONFIG, "a", ThisMachine(), handover)
    for round_ in (1, 2):
        desk.offer(round_)
    meeting = desk.offer(3)
    assert meeting.host == "127.0.0.1"
    files = sorted(path for path in secrets.rglob("*") if path.is_file())
    wanted = [f"round-{round_}/worker-{rank}.json" for round_ in (2, 3) for rank in range(3)]
    assert [str(path.relative_to(secrets)) for path in files] == wanted, "somebody may still be starting round 2"
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    credentials = handover.take(3, 1)
    assert (credentials.identity.role, credentials.identity.name) == ("worker", "1")
    with pytest.raises(FileNotFoundError):
        handover.take(3, 1)
    desk.offer(3)
    assert handover.take(3, 1) != credentials
    assert handover.take(2, 1).identity.name == "1"
    assert desk.server(2, RunDir(root=tmp_path), {}) is None
    assert desk.server(3, RunDir(root=tmp_path), {}) is not None


def test_who_comes_for_credentials_of_a_round_that_is_over_hears_that_it_is(tmp_path: Path) -> None:
    handover = SharedFolder(tmp_path / "secrets")
    desk = ServerDesk(CONFIG, "a", ThisMachine(), handover)
    for round_ in (1, 2, 3):
        desk.offer(round_)
    with pytest.raises(RoundOverError, match=r"credentials of round 1: 'round 3 has begun', expected a round that is"):
        handover.take(1, 0)
    with pytest.raises(FileNotFoundError):
        handover.take(4, 0)


class FakeServer:
    node = "a"

    def __init__(self) -> None:
        self.exit_code: int | None = None
        self.num_peers = 0


def test_a_server_is_wanted_while_somebody_talks_to_it() -> None:
    fake = FakeServer()
    server = RoundServer(fake, {})  # type: ignore[arg-type]
    assert server.is_wanted(100.0)
    fake.num_peers = 1
    assert server.is_wanted(200.0)
    fake.num_peers = 0
    assert server.is_wanted(200.0 + QUIET_S - 0.1)
    assert not server.is_wanted(200.0 + QUIET_S)
    fake.num_peers, fake.exit_code = 1, 0
    assert not server.is_wanted(201.0)
    assert server.death == ""
    fake.exit_code = 3
    assert server.death == "the parameter server on node a ended with exit code 3"
    fake.exit_code = -signal.SIGKILL
    assert server.death == "the parameter server on node a was killed by SIGKILL"


class Stage:
    """A crew with a launcher, books and a server that exist in memory only."""

    def __init__(self) -> None:
        self.exits: dict[int, Exit | None] = {0: None, 1: None}
        self.stopped: list[signal.Signals] = []
        self.death, self.wanted, self.happened = "", True, list[str]()
        self.now_s, self.num_tended = 0.0, 0
        group = WorkerGroup(argv=("python",), workers=())
        self.crew = Crew(group, self, self, self, self, clock=lambda: self.now_s)  # type: ignore[arg-type]

    pid = 0

    def start(self, *given: Any) -> None:
        self.happened.append("workers" if given else "server")

    def end(self) -> None:
        self.happened.append("server ends")

    def tend(self) -> None:
        self.num_tended += 1

    def is_wanted(self, now_s: float) -> bool:
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
        self.stopped.append(how)
        for rank, ended in self.exits.items():
            self.exits[rank] = ended or Exit(exit_code=None, signal_name=how.name, time_s=self.now_s, stopped=True)

    def logs(self, rank: int, count: int) -> list[str]:
        return []

    def __exit__(self, *_: object) -> None:
        self.happened.append("workers gone")

    def finish(self) -> None:
        self.exits = {rank: Exit(exit_code=0, signal_name=None, time_s=1.0, stopped=False) for rank in self.exits}


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    stage = Stage()
    stage.crew._nodes = {0: "a", 1: "a"}
    return stage


def test_the_server_comes_first_and_stays_for_the_other_nodes(stage: Stage) -> None:
    assert stage.happened == ["server", "workers"]
    stage.finish()
    assert [stage.crew.look(), stage.crew.look()] == [None, None]
    stage.wanted = False
    outcome = stage.crew.look()
    assert outcome is not None
    assert outcome.phase is Phase.SUCCEEDED
    assert stage.happened[2:] == ["server ends", "workers gone", "done"]
    assert stage.num_tended == 3


def test_nothing_of_the_workers_is_left_though_the_server_cannot_be_ended(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stage, "end", end)
    stage.finish()
    stage.wanted = False
    with pytest.raises(OSError, match="No space left"):
        stage.crew.look()
    assert stage.happened[2:] == ["workers gone"]


def test_a_crew_that_is_called_back_does_not_wait_for_the_server(stage: Stage) -> None:
    stage.finish()
    assert stage.crew.look() is None
    stage.crew.end()
    outcome = stage.crew.look()
    assert outcome is not None
    assert outcome.phase is Phase.SUCCEEDED


def test_the_death_of_the_server_is_the_places_doing(stage: Stage) -> None:
    stage.death = "the parameter server on node a was killed by SIGKILL"
    outcome = None
    for _ in range(3):
        stage.now_s += 1.0
        outcome = outcome or stage.crew.look()
    assert outcome is not None
    assert (outcome.phase, outcome.cause, outcome.text) == (Phase.FAILED, Cause.PLACE, stage.death)
    assert stage.stopped == [signal.SIGKILL]


def test_connections_are_counted_where_the_process_is() -> None:
    import socket

    from ringweave.launch.serving import num_established

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert num_established(os.getpid(), port) == 0
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = server.accept()
            with accepted:
                assert num_established(os.getpid(), port) == 1
                assert client.getpeername()[1] == port
    assert num_established(2**30, port) == 0
