"""The coordinators of an elastic job: who has them, credentials for every life, who takes a lost one's place."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ringweave.launcher.node_context import HostContext
from ringweave.launcher.run_dir import RunDir
from ringweave.launcher.services import COORDINATOR_LINGER_S, CoordinatorProcesses, JobServer
from ringweave.launcher.workers import HostPort
from ringweave.membership import main
from ringweave.platforms.agent.agent_channel import (
    NUM_INCARNATIONS,
    AgentStatus,
    DesiredState,
    RoundOverError,
    rendezvous_result,
)
from ringweave.platforms.agent.job_config import JobConfig, NodeConfig, RendezvousResult
from ringweave.platforms.agent.node_round import RoundServices
from ringweave.platforms.local.file_channel import FileAgentChannel
from ringweave.platforms.local.job_folder import JobFolder

NODES = tuple(NodeConfig(index=index, name=name, workers=2) for index, name in enumerate("abc"))
CONFIG = JobConfig(job="job", device="cpu", mode="auto", nodes=NODES, script="s.py", min_workers=3)


class Noted(HostContext):
    """Has something that only a signal ends in the place of a coordinator, and notes what it would have been told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[list[str]] = []

    def wrap_node_command(self, node: str, argv: Sequence[str]) -> Sequence[str]:
        self.told.append([node, *argv[3:]])
        return [sys.executable, "-I", "-S", "-c", "import signal; signal.pause()"]


def channel(folder: Path) -> FileAgentChannel:
    """Of an agent of the job in this folder."""
    job = JobFolder(root=folder)
    return FileAgentChannel(job, job.group(0, 1), lambda seconds: None)


def opening(
    desks: dict[str, RoundServices], round_: int = 1, config: JobConfig = CONFIG, host: str = "h"
) -> RendezvousResult:
    """The gate as it is opened when all have offered."""
    here = HostPort(host=host, port=1)
    offers = {
        name: AgentStatus(round=round_, phase="Ready", pid=1, master_address=here, **offered)
        for name, desk in desks.items()
        for offered in [desk.prepare_round(DesiredState(round=round_))]
    }
    found = rendezvous_result(config, round_, offers)
    assert found is not None
    return found


@pytest.fixture
def desks(tmp_path: Path) -> dict[str, RoundServices]:
    site = Noted()
    return {name: RoundServices(CONFIG, name, site, channel(tmp_path)) for name in "abc"}


def test_the_first_two_nodes_have_one_each(desks: dict[str, RoundServices]) -> None:
    assert CONFIG.coordinator_nodes == ("a", "b")
    assert replace(CONFIG, min_workers=None).coordinator_nodes == ()
    found = opening(desks)
    assert [meeting.host for meeting in found.coordinators] == ["127.0.0.1"] * 2
    assert desks["c"].prepare_round(DesiredState(round=1)) == {}


def test_there_are_credentials_for_every_life_each_of_use_once(desks: dict[str, RoundServices], tmp_path) -> None:
    opening(desks)
    spares = channel(tmp_path)
    num_lives = spares.num_incarnations(CONFIG.world_size)
    names = [spares.take_credentials(1, "worker-3").identity.name for _ in range(num_lives)]
    assert names == [f"3.{life}" for life in range(num_lives)]
    assert num_lives > NUM_INCARNATIONS, "a node that fails once a week does not make all others start again"
    assert [spares.num_incarnations(many) for many in (1, 20, 1000)] == [64, 20, NUM_INCARNATIONS]
    with pytest.raises(
        RoundOverError, match=r"credentials of round 1: 'none left for worker-3', expected a current round"
    ):
        spares.take_credentials(1, "worker-3")
    assert (
        spares.take_credentials(1, "coordinator-1").identity.role,
        spares.take_credentials(1, "worker-5").identity.name,
    ) == (
        "coordinator",
        "5.0",
    )
    files = [path for path in (tmp_path / "secrets").rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    opening(desks, 2)
    with pytest.raises(RoundOverError):
        spares.take_credentials(1, "worker-0")
    assert spares.take_credentials(2, "worker-3").identity.name == "3.0"


def told(desk: RoundServices, found: RendezvousResult, folder: Path, starting: list[str]) -> main.argparse.Namespace:
    """What the process of this desk's coordinator is told."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    (coordinator,) = desk.create_services(found, RunDir(root=folder), initial_members=starting)
    with coordinator.running({}):
        pass
    return main.parse(desk._node_context.told[-1][1:])


def test_who_offered_it_begins_and_who_comes_later_stands_by_and_names_its_workers(
    desks: dict[str, RoundServices], tmp_path: Path
) -> None:
    found = opening(desks)
    first = told(desks["a"], found, tmp_path, ["0.0", "1.0"])
    second = told(desks["b"], found, tmp_path, ["2.0", "3.0"])
    assert [(each.index, each.standby, each.elastic, each.expected) for each in (first, second)] == [
        (0, False, "3:6", 6),
        (1, True, "3:6", 6),
    ]
    assert first.other == f"127.0.0.1:{second.port}"
    assert second.other == f"127.0.0.1:{first.port}"
    assert desks["c"].create_services(found, RunDir(root=tmp_path), initial_members=["4.0"]) == []
    later = RoundServices(CONFIG, "a", desks["a"]._node_context, channel(tmp_path))
    assert later.prepare_round(DesiredState(round=1, rendezvous=found)) == {}, (
        "the gate is open: the credentials stay as they are"
    )
    again = told(later, found, tmp_path, ["0.1", "1.1"])
    assert (again.index, again.standby, again.port, again.successors) == (0, True, first.port, "0.1,1.1")


def test_it_stays_a_while_for_workers_of_other_nodes(
    desks: dict[str, RoundServices], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, found = [3], opening(desks)
    monkeypatch.setattr(CoordinatorProcesses, "num_connections", property(lambda self: count[0]))
    (coordinator,) = desks["a"].create_services(found, RunDir(root=tmp_path), initial_members=[])
    assert coordinator.is_needed(100.0)
    assert coordinator.is_needed(100.0 + COORDINATOR_LINGER_S - 0.1)
    assert not coordinator.is_needed(100.0 + COORDINATOR_LINGER_S), "who trains on needs none"
    (coordinator,) = desks["b"].create_services(found, RunDir(root=tmp_path), initial_members=[])
    count[0] = 1
    assert not coordinator.is_needed(100.0), "the other coordinator alone"
    assert coordinator.failure_text == ""


SERVED = replace(CONFIG, mode="ps-hra")


def started(desk: RoundServices, found: RendezvousResult, folder: Path) -> list[list[str]]:
    """The command lines of the servers that this desk starts."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    servers = [
        each
        for each in desk.create_services(found, RunDir(root=folder), initial_members=["0.0"])
        if isinstance(each, JobServer)
    ]
    site = desk._node_context
    del site.told[:]
    for each in servers:
        with each.running({}):
            pass
    return [words[1:] for words in site.told]


def test_the_first_node_has_coordinator_and_server_and_one_that_replaces_it_has_no_server(tmp_path: Path) -> None:
    """A new server would have no state."""
    desks = {name: RoundServices(SERVED, name, Noted(), channel(tmp_path)) for name in "abc"}
    assert SERVED.credential_holders(0) == {"worker-0", "worker-1", "coordinator-0", "server-0"}
    assert SERVED.credential_holders(1) == {"worker-2", "worker-3", "coordinator-1"}
    found = opening(desks, config=SERVED)
    assert (len(found.servers), len(found.coordinators)) == (1, 2)
    (words,) = started(desks["a"], found, tmp_path)
    assert words[words.index("--port") + 1] == str(found.servers[0].port)
    assert "--other" not in words
    assert [started(desks[name], found, tmp_path) for name in "bc"] == [[], []]
    later = RoundServices(SERVED, "a", Noted(), channel(tmp_path))
    assert later.prepare_round(DesiredState(round=1, rendezvous=found)) == {}
    assert started(later, found, tmp_path) == []


def test_of_a_pair_each_node_starts_its_own_and_so_does_one_that_replaces_it(tmp_path: Path) -> None:
    config = replace(SERVED, has_standby=True)
    desks = {name: RoundServices(config, name, Noted(), channel(tmp_path), host=f"{name}.job") for name in "abc"}
    found = opening(desks, config=config)
    assert [server.host for server in found.servers] == ["a.job", "b.job"]
    later = RoundServices(config, "a", Noted(), channel(tmp_path), host="a.job")
    for desk, index in ((desks["a"], 0), (desks["b"], 1), (later, 0)):
        (words,) = started(desk, found, tmp_path)
        other = found.servers[1 - index]
        assert words[words.index("--index") + 1] == str(index)
        assert words[words.index("--other") + 1] == f"{other.host}:{other.port}"
        assert words[words.index("--host") + 1] == "127.0.0.1", "its name may still be that of a lost node"
        assert words[words.index("--claims") + 1].startswith("fd:")
    assert started(desks["c"], found, tmp_path) == []
    assert rendezvous_result(config, 1, {}) is None
