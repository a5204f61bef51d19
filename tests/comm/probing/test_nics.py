"""Nodes with several NICs: over the loopback interface each of them has an address in each of two networks."""

import socket
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from ringweave import topology
from ringweave.comm.group_info import GroupInfo, RankInfo, RankLocation
from ringweave.comm.probing import measure, probe_coordinator
from ringweave.comm.probing.network_measurement import MeasurementCache, NetworkMeasurement
from ringweave.comm.transport.connect import ChannelListener, open_listeners
from ringweave.errors import PeerError
from ringweave.topology import Cluster, Device, Nic, Node
from ringweave.topology.inference.observations import Flow, FlowBatch
from ringweave.topology.inference.tree import NodeSpec
from tests.comm.probing.parts import FOUND, TOKEN, at_once
from tests.comm.probing.test_probing import BRIEF, SOON

NETWORKS = ("127.0.1.0/24", "127.0.2.0/24")
NAMES = ("eth0", "eth1")


def place(node: int) -> RankLocation:
    addresses = [f"127.0.{network}.{node + 1}" for network in (1, 2)]
    return RankLocation(f"n{node}", addresses[0], (addresses[1],), (1.0, 1.0), NAMES, NETWORKS)


def members(num_nodes: int, doors: list[ChannelListener] | None = None) -> list[GroupInfo]:
    entrances = [(door.endpoint,) for door in doors] if doors else [()] * num_nodes
    ranks = tuple(RankInfo(rank, place(rank), entrance) for rank, entrance in enumerate(entrances))
    return [GroupInfo(ranks, rank, TOKEN) for rank in range(num_nodes)]


def found_with(rates: dict[str, float], *nodes: str) -> NetworkMeasurement:
    made = [
        Node(
            name=node,
            devices=(Device(),),
            nics=tuple(Nic(name=name, rate_bytes_per_s=rate) for name, rate in rates.items()),
        )
        for node in nodes
    ]
    text = topology.dumps(Cluster(name="x", nodes=tuple(made)))
    return replace(FOUND, cluster_text=text, offers=dict.fromkeys(nodes, NAMES))


@pytest.mark.slow
def test_every_nic_is_measured_and_the_sum_is_the_rate_of_the_node() -> None:
    store = HashStore()
    found = at_once(*(lambda m=m: measure.probe_group(store, m, SOON) for m in members(2)))[0]
    assert isinstance(found, NetworkMeasurement)
    assert found.offers == {"n0": NAMES, "n1": NAMES}
    for node in found.cluster().nodes:
        assert [nic.name for nic in node.nics] == ["eth0", "eth1"]
        least = min(rate for name, rate in found.link_rates.items() if node.name in name)
        assert node.rate_bytes_per_s == pytest.approx(least, rel=1e-3)


@pytest.fixture
def doors() -> Iterator[list[ChannelListener]]:
    """Of two nodes, at both addresses of each."""
    made = [open_listeners(place(node).addresses, 1)[0] for node in range(2)]
    yield made
    for door in made:
        door.close()


def conducted(doors: list[ChannelListener], find_out: Any, groups: list[GroupInfo] | None = None) -> Any:
    """What `find_out` returns of the conductor of two nodes."""
    first, second = groups or members(2, doors)

    def conduct() -> Any:
        conductor = probe_coordinator.ProbeCoordinator(first, doors[0].tcp_sockets, 60.0)
        try:
            conductor.find_rails()
            return find_out(conductor)
        finally:
            conductor.close()

    return at_once(conduct, lambda: probe_coordinator.follow_coordinator(second, doors[1].tcp_sockets))[0]


def rates_of(conductor: probe_coordinator.ProbeCoordinator) -> dict[str, dict[str, float]]:
    batch = FlowBatch(purpose="a test", flows=(Flow(src=0, dst=1), Flow(src=1, dst=0)))
    totals = conductor.measure_rates(batch, BRIEF)
    best = conductor.nic_rates
    for node in ("n0", "n1"):
        assert max(totals) <= sum(best[node].values()) * 1.0001, "the best of each, over flows there and back"
    return best


def test_flows_go_by_all_nics_at_once(doors: list[ChannelListener]) -> None:
    best = conducted(doors, rates_of)
    assert {node: list(rates) for node, rates in best.items()} == {"n0": ["eth0", "eth1"], "n1": ["eth0", "eth1"]}
    assert min(min(rates.values()) for rates in best.values()) > 0


def test_a_nic_that_leads_nowhere_is_left_out(doors: list[ChannelListener]) -> None:
    with socket.create_server((place(1).addresses[1], 0)) as nobody:
        port = nobody.getsockname()[1]
    groups = [replace(group, ranks=(group.ranks[0], with_port(group.ranks[1], port))) for group in members(2, doors)]
    best = conducted(doors, rates_of, groups)
    assert {node: list(rates) for node, rates in best.items()} == {"n0": ["eth0"], "n1": ["eth0"]}


def with_port(member: RankInfo, port: int) -> RankInfo:
    """The member as if it had to be called there at its second address."""
    (entrance,) = member.endpoints
    return replace(member, endpoints=(replace(entrance, ports=(entrance.ports[0], port)),))


def settled(found: NetworkMeasurement | None, num_nodes: int = 2) -> list[GroupInfo]:
    store = HashStore()
    ranks = members(num_nodes)
    calls = (lambda m=m: measure.agree_on_nics(store, m, found if m.group_rank == 0 else None, SOON) for m in ranks)
    return at_once(*calls)


def test_a_group_is_reached_by_what_probing_found() -> None:
    for group in settled(found_with({"eth0": 25e6, "eth1": 12.5e6}, "n0", "n1")):
        assert [member.location.addresses for member in group.ranks] == [place(0).addresses, place(1).addresses]
        assert [member.location.rates for member in group.ranks] == [(25e6, 12.5e6)] * 2


@pytest.mark.parametrize(
    "found", [None, found_with({"eth0": 25e6}, "n0", "n1"), found_with({"eth0": 1e6, "eth1": 1e6}, "n0", "n7")]
)
def test_nics_of_which_nothing_is_known_are_not_used(found: NetworkMeasurement | None) -> None:
    for group in settled(found):
        assert [member.location.addresses for member in group.ranks] == [("127.0.1.1",), ("127.0.1.2",)]


def test_nodes_of_one_nic_ask_nobody() -> None:
    group = GroupInfo((RankInfo(0, RankLocation("a", "127.0.0.1"), ()),), 0, TOKEN)
    assert measure.agree_on_nics(HashStore(), group, None, timedelta(seconds=0)) is group


def test_a_first_rank_that_does_not_say_what_it_found_is_named() -> None:
    with pytest.raises(PeerError, match=r"nothing in time.*expected rank 0 \(node n0\) to say what probing found"):
        measure.agree_on_nics(HashStore(), members(2)[1], None, timedelta(seconds=0.05))


def node(name: str, rate: float) -> Node:
    return Node(name=name, devices=(Device(),), nics=(Nic(name="eth0", rate_bytes_per_s=rate),))


def test_shares_of_the_rate_of_a_node() -> None:
    seen = {name: {"eth0": 20e6 + index * 5e5, "eth1": 10e6} for index, name in enumerate("abcd")}
    seen["e"] = {"eth0": 10e6, "eth1": 20e6}
    cluster = measure.with_measured_nics(Cluster(name="x", nodes=tuple(node(name, 30e6) for name in "abcdef")), seen)
    rates = [[nic.rate_bytes_per_s for nic in each.nics] for each in cluster.nodes]
    assert rates[0] == rates[1] == rates[2] == rates[3], "equal hardware looks equal"
    assert rates[0] == pytest.approx([30e6 * 20.5 / 30.5, 30e6 * 10 / 30.5], rel=1e-3)
    assert rates[4] == pytest.approx([10e6, 20e6], rel=1e-3)
    assert [nic.name for nic in cluster.nodes[5].nics] == ["eth0"]
    assert {each.rate_bytes_per_s for each in cluster.nodes} == {30e6}


def test_findings_by_one_nic_do_not_answer_for_two(tmp_path: Path) -> None:
    cache = MeasurementCache(tmp_path)
    found = replace(FOUND, offers=dict.fromkeys(("n0", "n1"), ("eth0",)))
    one = [NodeSpec(name=f"n{n}", address=f"127.0.0.{n + 1}", num_devices=1, nics=("eth0",)) for n in range(2)]
    both = [replace(host, nics=NAMES) for host in one]
    cache.put(one, found)
    assert cache.get(one, 1001.0) == found
    assert cache.get(both, 1001.0) is None
    assert cache.path(one) != cache.path(both)


def test_findings_answer_whatever_the_order_of_nics() -> None:
    group = members(2)[0]
    turned = replace(
        group, ranks=tuple(replace(m, location=m.location.at_addresses([1, 0], (1.0, 1.0))) for m in group.ranks)
    )
    assert (
        [host.nics for host in measure.group_hosts(turned)]
        == [NAMES, NAMES]
        == [h.nics for h in measure.group_hosts(group)]
    )
