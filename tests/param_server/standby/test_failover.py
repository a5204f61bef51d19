"""Servers in real processes that are killed and stopped while rings push."""

import signal
from pathlib import Path

import pytest

from ringweave.errors import ConnectionLostError, RemoteError
from ringweave.param_server.messages import LeaderStatus, LeaderStatusRequest, Pull
from tests.fakes.parameter_servers import SERVER_START_TIMEOUT_S, ReplicatedServers
from tests.param_server.standby import training
from tests.polling import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * SERVER_START_TIMEOUT_S)]


def wait_rounds(rings: list[training.Ring], count: int) -> None:
    wait_until(
        lambda: all(len(ring.done) >= count or ring.error for ring in rings), lambda: [len(ring.done) for ring in rings]
    )


@pytest.mark.thorough
def test_a_leader_and_a_standby_that_are_killed_lose_nothing(tmp_path: Path) -> None:
    with ReplicatedServers(tmp_path, 2) as pair:
        rings = training.begin(pair, 2, 80)
        threads = [ring.start() for ring in rings]
        wait_rounds(rings, 10)
        pair.send_signal(0, signal.SIGKILL)
        wait_rounds(rings, 30)
        claim = pair.wait_leadership(2, after=1).number  # the one that was killed has come back, with everything
        pair.send_signal(0, signal.SIGKILL)
        wait_rounds(rings, 60)
        pair.wait_leadership(2, after=claim)
        pair.send_signal(1, signal.SIGKILL)
        for thread in threads:
            thread.join(SERVER_START_TIMEOUT_S)
        training.check(rings)
        with pair.connect(0, 0) as client:
            entered = client.call(LeaderStatusRequest(), timeout_s=SERVER_START_TIMEOUT_S).message
        assert isinstance(entered, LeaderStatus)
        assert entered.leads
        assert entered.term == 2
        for ring in rings:
            ring.client.close()
    said = pair.output()
    assert "server 1 leads in term 1, alone: the leader is gone" in said
    assert "server 1 leads in term 1, alone: the standby is lost" in said
    assert "server 0 leads in term 2, alone: the leader is gone" in said


def stop_the_leader(pair: ReplicatedServers) -> tuple[int, int]:
    """SIGSTOP for the server that leads; its index and term, once the other one leads.

    On a busy machine the leader may have given its standby up in just that moment: then nobody can take over.
    """
    while True:
        claim = pair.wait_leadership(2)
        pair.send_signal(claim.leader, signal.SIGSTOP)
        newest = pair.wait_leadership(after=claim.number)
        if newest.leader != claim.leader:
            return claim.leader, claim.term
        pair.send_signal(claim.leader, signal.SIGCONT)


@pytest.mark.thorough
def test_a_leader_that_stood_still_refuses_when_it_wakes(tmp_path: Path) -> None:
    with ReplicatedServers(tmp_path, 2, lease_s=3.0) as pair:
        rings = training.begin(pair, 2, 60)
        others = [pair.connect(index, 0) for index in range(2)]
        first, term = stop_the_leader(pair)
        threads = [ring.start() for ring in rings]
        wait_rounds(rings, 5)  # all go on with the other one
        pair.send_signal(first, signal.SIGCONT)
        with pytest.raises((RemoteError, ConnectionLostError)):  # it says so, or has ended by then
            others[first].call(Pull(term=term, ring=0, after_sequence=0), timeout_s=SERVER_START_TIMEOUT_S)
        for thread in threads:
            thread.join(SERVER_START_TIMEOUT_S)
        training.check(rings)
        for each in others:
            each.close()
        for ring in rings:
            ring.client.close()
