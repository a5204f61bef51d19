"""The coordinators of an elastic job: who has them, credentials for every life, who takes a lost one's place."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ringweave.launch.groups.config import Config, ConfigNode
from ringweave.launch.groups.coordinating import LINGER_S, CoordinatorDesk, RoundCoordinator
from ringweave.launch.groups.handing import RoundOverError
from ringweave.launch.groups.posts import Opening, Orders, Report, opening_of
from ringweave.launch.groups.spares import NUM_LIVES, FolderSpares
from ringweave.launch.local.sites import ThisMachine
from ringweave.launch.run_dirs import RunDir
from ringweave.launch.workers import Meeting
from ringweave.membership.serving import main

NODES = tuple(ConfigNode(index=index, name=name, workers=2) for index, name in enumerate("abc"))
CONFIG = Config(job="job", device="cpu", mode="auto", nodes=NODES, script="s.py", least=3)


class Noted(ThisMachine):
    """Has something that only a signal ends in the place of a coordinator, and notes what it would have been told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[list[str]] = []

    def enter_node(self, node: str, argv: Sequence[str]) -> Sequence[str]:
        self.told.append([node, *argv[3:]])
        return [sys.executable, "-I", "-S", "-c", "import signal; signal.pause()"]


def opening(desks: dict[str, CoordinatorDesk], round_: int = 1) -> Opening:
    """The gate as it is opened when all have offered."""
    offers = {
        name: Report(round=round_, phase="Ready", pid=1, meeting=Meeting(host="h", port=1), coordinator=meeting)
        for name, desk in desks.items()
        for meeting in [desk.offer(Orders(round=round_))]
    }
    found = opening_of(CONFIG, round_, offers)
    assert found is not None
    return found


@pytest.fixture
def desks(tmp_path: Path) -> dict[str, CoordinatorDesk]:
    site = Noted()
    return {name: CoordinatorDesk(CONFIG, name, site, FolderSpares(tmp_path / "secrets")) for name in "abc"}


def test_the_first_two_nodes_have_one_each(desks: dict[str, CoordinatorDesk]) -> None:
    assert CONFIG.coordinating == ("a", "b")
    assert replace(CONFIG, least=None).coordinating == ()
    found = opening(desks)
    assert [meeting.host for meeting in found.coordinators] == ["127.0.0.1"] * 2
    assert desks["c"].offer(Orders(round=1)) is None


def test_there_are_credentials_for_every_life_each_of_use_once(desks: dict[str, CoordinatorDesk], tmp_path) -> None:
    opening(desks)
    spares = FolderSpares(tmp_path / "secrets")
    names = [spares.take(1, "worker-3").identity.name for _ in range(NUM_LIVES)]
    assert names == [f"3.{life}" for life in range(NUM_LIVES)]
    with pytest.raises(
        RoundOverError, match=r"credentials of round 1: 'none left for worker-3', expected a round that"
    ):
        spares.take(1, "worker-3")
    assert (spares.take(1, "coordinator-1").identity.role, spares.take(1, "worker-5").identity.name) == (
        "coordinator",
        "5.0",
    )
    files = [path for path in (tmp_path / "secrets").rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    opening(desks, 2)
    with pytest.raises(RoundOverError):
        spares.take(1, "worker-0")
    assert spares.take(2, "worker-3").identity.name == "3.0"


def told(desk: CoordinatorDesk, found: Opening, folder: Path, starting: list[str]) -> main.argparse.Namespace:
    """What the process of this desk's coordinator is told."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    coordinator = desk.coordinator(found, RunDir(root=folder), {}, starting=starting)
    assert coordinator is not None
    coordinator.start()
    coordinator.end()
    return main.parse(desk._site.told[-1][1:])


def test_who_offered_it_begins_and_who_comes_later_stands_by_and_names_its_workers(
    desks: dict[str, CoordinatorDesk], tmp_path: Path
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
    assert desks["c"].coordinator(found, RunDir(root=tmp_path), {}, starting=["4.0"]) is None
    later = CoordinatorDesk(CONFIG, "a", desks["a"]._site, FolderSpares(tmp_path / "secrets"))
    assert later.offer(Orders(round=1, opening=found)) is None, "the gate is open: the credentials stay as they are"
    again = told(later, found, tmp_path, ["0.1", "1.1"])
    assert (again.index, again.standby, again.port, again.successors) == (0, True, first.port, "0.1,1.1")


class FakeCoordinators:
    pids = frozenset({1})


def test_it_stays_a_while_for_workers_of_other_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    count = [3]
    monkeypatch.setattr("ringweave.launch.groups.coordinating.num_established", lambda pid, port: count[0])
    coordinator = RoundCoordinator(FakeCoordinators(), 7, {})  # type: ignore[arg-type]
    assert coordinator.is_wanted(100.0)
    assert coordinator.is_wanted(100.0 + LINGER_S - 0.1)
    assert not coordinator.is_wanted(100.0 + LINGER_S), "who trains on needs none"
    coordinator = RoundCoordinator(FakeCoordinators(), 7, {})  # type: ignore[arg-type]
    count[0] = 1
    assert not coordinator.is_wanted(100.0), "the other coordinator alone"
    assert coordinator.death == ""
