"""Servers in real processes on nodes of a lab that are cut off while rings push: the other server goes on."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ringweave import lab, rpc, topology
from ringweave.lab import Lab, lab_state
from ringweave.param_server.leadership import LeadershipRecord
from tests.fakes import parameter_servers
from tests.fakes.parameter_servers import SERVER_START_TIMEOUT_S, ReplicatedServers, ServerNetwork, ServerProcess
from tests.param_server.standby import training
from tests.param_server.standby.test_failover import wait_rounds

pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * SERVER_START_TIMEOUT_S)]
CLUSTER = """
name: cut-off
nodes: [{name: a, nic: 200Mbit/s, devices: 1, count: 4}]
"""
SERVERS = ("a-0", "a-1")
RINGS = ("a-0", "a-2", "a-3")
"""The first one is on the node of a server, which hears it without any network."""


class Cluster(ServerNetwork):
    """Servers and rings on nodes of a lab."""

    def __init__(self, where: Lab) -> None:
        self._lab = where

    def address_of(self, index: int) -> str:
        return self._lab.addresses[SERVERS[index]][0]

    def start(self, index: int, argv: list[str], log: Path) -> ServerProcess:
        return ServerProcess(argv, log, self._namespace_of(SERVERS[index]))

    def connect(self, ring: int, connect: Callable[[], rpc.RpcClient]) -> rpc.RpcClient:
        """In a thread of its own, which enters the node."""

        def connect_inside() -> rpc.RpcClient:
            parameter_servers.enter_network(self._namespace_of(RINGS[ring]))
            return connect()

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(connect_inside).result()

    def _namespace_of(self, node: str) -> Path:
        return lab_state.NETNS_FOLDER / self._lab.layout.namespaces[node]


def cut_off(
    where: Lab, pair: ReplicatedServers, way: str, *, is_leader: bool
) -> tuple[LeadershipRecord, LeadershipRecord]:
    """Cut off the node of a server; the claims of before, and of after.

    On a busy machine one of them may have given the other one up in just that moment, for another reason.
    """
    while True:
        before = pair.wait_leadership(2)
        victim = before.leader if is_leader else 1 - before.leader
        where.cut(SERVERS[victim], way)
        after = pair.wait_leadership(1, after=before.number)
        if after.leader != victim:
            return before, after
        where.reconnect(SERVERS[victim])


WAYS = [
    ("out", True),
    *(pytest.param(*way, marks=pytest.mark.thorough) for way in (("both", True), ("in", True), ("both", False))),
]


@pytest.mark.parametrize(("way", "is_leader"), WAYS, ids=str)
def test_the_server_that_rings_reach_goes_on(lab_name: str, tmp_path: Path, way: str, is_leader: bool) -> None:
    where = lab.up(topology.loads(CLUSTER), lab_name, quotas="never")
    with ReplicatedServers(tmp_path, len(RINGS), lease_s=5.0, network=Cluster(where)) as pair:
        rings = training.begin(pair, len(RINGS), 100_000, pause_s=0.03)
        threads = [ring.start() for ring in rings]
        wait_rounds(rings, 10)
        before, after = cut_off(where, pair, way, is_leader=is_leader)
        reached = rings if not is_leader and before.leader == 0 else rings[1:]
        wait_rounds(reached, max(len(ring.done) for ring in reached) + 20)
        assert pair.newest_leadership().leader == after.leader, "the one that is cut off has claimed nothing"
        where.reconnect(SERVERS[before.leader if is_leader else 1 - before.leader])
        assert pair.wait_leadership(2, after=after.number).leader == after.leader
        wait_rounds(rings, max(len(ring.done) for ring in rings) + 10)
        for ring in rings:
            ring.stop.set()
        for thread in threads:
            thread.join(SERVER_START_TIMEOUT_S)
        training.check(rings)
        for ring in rings:
            ring.client.close()
