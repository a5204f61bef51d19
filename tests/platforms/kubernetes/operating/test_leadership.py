"""Leadership records of a job's two parameter servers, at the agent gateway: of one number the first counts."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ringweave.errors import NotLeaderError
from ringweave.param_server.leadership import LeadershipLog, LeadershipRecord
from ringweave.platforms.kubernetes import api_client, objects
from ringweave.platforms.kubernetes.agent_main import GatewayLeadershipLog
from tests.platforms.kubernetes.operating.test_desk import Office

FIRST = LeadershipRecord(number=0, term=0, leader=0, members=(0,))
PAIR = replace(FIRST, number=1, members=(0, 1))


@pytest.fixture
def office(kubeconfig: Path, request: pytest.FixtureRequest) -> Iterator[Office]:
    with Office(kubeconfig, "leads" + str(abs(hash(request.node.name)))[:8]) as office:
        office.note()
        body = {"metadata": office.owner.metadata(objects.config_name(office.name)), "data": {}}
        office.run(office.client.create(api_client.CONFIG_MAPS, "default", body))
        yield office


def log(office: Office, round_: int = 1) -> LeadershipLog:
    return GatewayLeadershipLog(office.address(), round_)


def test_each_round_has_a_log_and_an_earlier_one_is_closed(office: Office) -> None:
    assert log(office).latest() is None
    assert log(office).append(FIRST)
    assert log(office).append(FIRST), "its answer was lost"
    assert not log(office).append(replace(FIRST, leader=1, members=(1,)))
    assert log(office).append(PAIR)
    assert log(office).latest() == PAIR
    assert not log(office).append(FIRST)
    assert log(office, 2).latest() is None
    assert log(office, 2).append(FIRST)
    assert not log(office).append(replace(PAIR, number=2))


def test_of_many_at_the_same_time_one_is_appended(office: Office) -> None:
    made: list[int] = []
    start = threading.Barrier(6)

    def race(leader: int) -> None:
        own = log(office)
        start.wait()
        try:
            is_appended = own.append(replace(FIRST, leader=leader, members=(leader,)))
        except NotLeaderError:  # too many others at once; whether it is appended, another question says
            is_appended = (found := own.latest()) is not None and found.leader == leader
        if is_appended:
            made.append(leader)

    threads = [threading.Thread(target=race, args=(leader,)) for leader in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = log(office).latest()
    assert found is not None
    assert made == [found.leader]


def test_without_the_config_or_the_gateway_there_is_no_log(office: Office) -> None:
    own = log(office)
    office.run(office.client.delete(api_client.CONFIG_MAPS, "default", objects.config_name(office.name)))
    expected = r"^leadership log: .*it has no config.*, expected an answer of the agent gateway\. Nothing: it is asked"
    with pytest.raises(NotLeaderError, match=expected):
        own.latest()
    office.run(office.runner.cleanup())
    with pytest.raises(NotLeaderError, match=r"^leadership log: .*, expected an answer of the agent gateway"):
        own.append(FIRST)
