"""Reports of hosts as the leader notes them: two threads of it wait for answers."""

from typing import Any

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
