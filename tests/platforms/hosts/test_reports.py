"""Reports of hosts as the leader notes them: two threads of it wait for answers."""

from types import SimpleNamespace
from typing import Any

import pytest

from ringweave.jobs.records import GroupPhase, ObservedGroup
from ringweave.platforms.hosts.controller import HostView, observe_hosts
from ringweave.platforms.hosts.messages import HostAnswer, HostReport
from ringweave.platforms.hosts.service import LeaderLink


class FakeService:
    """Service of a host that leads no more, so that the link's own thread ends at once."""

    def __init__(self) -> None:
        self.num_wakes = 0

    def leads(self, term: int) -> bool:
        return False

    def wake(self) -> None:
        self.num_wakes += 1


def answer(version: int) -> HostAnswer:
    report = HostReport(released_round=version)
    return HostAnswer(term=1, is_accepted=True, entry_version=(1, version), report_version=version, report=report)


def test_an_older_report_replaces_no_newer_one() -> None:
    service: Any = FakeService()
    link: Any = LeaderLink(service, host=1, term=1)
    client = link._client = object()
    for version in (3, 2, 3):
        link._take_answer(client, answer(version))
    assert (link.report.released_round, link.entry_version, service.num_wakes) == (3, (1, 3), 1)
    link._take_answer(object(), answer(9))
    assert link.report.released_round == 3, "an answer over a former connection"
    link._take_answer(client, answer(4))
    assert (link.report.released_round, service.num_wakes) == (4, 2)


def running(node: int, **fields: Any) -> ObservedGroup:
    return ObservedGroup(node=node, attempt=1, round=1, phase=GroupPhase.RUNNING, **fields)


@pytest.mark.parametrize(
    ("evicted", "generation", "phase"),
    [
        ((), (1, 3), GroupPhase.RUNNING),  # the coordinators know its workers
        (("1.0",), (1, 3), GroupPhase.FAILED),  # they have excluded them
        ((), (0, 0), GroupPhase.FAILED),  # nobody knows
    ],
)
def test_workers_that_train_on_are_not_lost_with_their_host_service(
    evicted: tuple[str, ...], generation: tuple[int, int], phase: GroupPhase
) -> None:
    entry: Any = SimpleNamespace(
        hosts=[SimpleNamespace(node="a"), SimpleNamespace(node="b")],
        seats=(),
        scaled=None,
        job=SimpleNamespace(request=SimpleNamespace(elastic=None), used_nodes=(0, 1)),
    )
    knowing = HostReport(groups=(running(0, members=("0.0",), generation=generation, evicted=evicted),))
    silent = HostReport(groups=(running(1, members=("1.0",)),))
    views = [HostView(report=knowing, is_heard=True), HostView(report=silent, is_heard=False)]
    _, group = observe_hosts(entry, views).groups
    assert group.phase is phase
    assert group.text == ("" if phase is GroupPhase.RUNNING else "host b does not answer")
