"""Who is on which node, in words and from the environment."""

import socket
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from ringweave.comm.group_info import (
    GroupInfo,
    RankEndpoint,
    RankInfo,
    RankLocation,
    exchange_group_info,
    locate_process,
)
from ringweave.environment import WorkerEnvironment
from ringweave.errors import PeerError, PlacementError
from ringweave.topology.discovery import Machine, MachinePart, NetworkInterface
from ringweave.topology.placement import host_id, node_name_of_host

CLUSTER = """
name: lab
nodes:
  - {name: a0, nic: 1Gbit/s, devices: 2, address: 127.0.0.1}
  - {name: b0, nic: 1Gbit/s, devices: 1}
"""


@pytest.fixture
def cluster_path(tmp_path: Path) -> Path:
    path = tmp_path / "lab.yaml"
    path.write_text(CLUSTER)
    return path


def test_names() -> None:
    members = GroupInfo(tuple(RankInfo(10 + r, RankLocation(f"n{r}", "127.0.0.1"), ()) for r in range(6)), 2, b"")
    assert members.rank_text(3) == "rank 13 (node n3)"
    assert members.ranks_text([0, 1]) == "rank 10 (node n0) and rank 11 (node n1)"
    assert members.ranks_text(range(6)).endswith("rank 13 (node n3) and 2 more")
    assert members.own_info.global_rank == 12


def test_without_a_cluster_the_node_is_what_we_are_told_or_the_host() -> None:
    environ = {"MASTER_ADDR": "127.0.0.1"}
    assert locate_process(WorkerEnvironment(node="x1"), environ) == RankLocation("x1", "127.0.0.1", host=host_id())
    assert locate_process(WorkerEnvironment(), environ).node == node_name_of_host(socket.gethostname())


def test_a_host_whose_name_no_host_may_have_is_called_as_discover_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu_node_1")
    assert locate_process(WorkerEnvironment(), {"MASTER_ADDR": "127.0.0.1"}).node == "gpu-node-1"


@pytest.mark.parametrize("master", ["127.0.0.1", "localhost", "::1"])
def test_a_loopback_master_means_that_all_are_here(master: str) -> None:
    assert locate_process(WorkerEnvironment(node="x"), {"MASTER_ADDR": master}).address in ("127.0.0.1", "::1")


def test_a_master_that_resolves_to_loopback_by_name_is_not_taken_at_its_word(monkeypatch: pytest.MonkeyPatch) -> None:
    routes = {"head": "127.0.1.1", "192.0.2.1": "10.1.2.3"}
    monkeypatch.setattr("ringweave.comm.group_info._source_address", routes.get)
    assert locate_process(WorkerEnvironment(node="x"), {"MASTER_ADDR": "head"}).address == "10.1.2.3"
    routes["192.0.2.1"] = None
    assert locate_process(WorkerEnvironment(node="x"), {"MASTER_ADDR": "head"}).address == "127.0.1.1"
    routes["head"] = "10.7.7.7"
    assert locate_process(WorkerEnvironment(node="x"), {"MASTER_ADDR": "head"}).address == "10.7.7.7"


def test_the_interface_that_users_name_for_gloo_is_taken() -> None:
    environ = {"MASTER_ADDR": "head", "GLOO_SOCKET_IFNAME": "lo"}
    assert locate_process(WorkerEnvironment(node="x"), environ).address == "127.0.0.1"


def test_in_a_cluster_the_told_node_comes_before_the_address(cluster_path: Path) -> None:
    environment = WorkerEnvironment(cluster_path=cluster_path, node="b0")
    assert locate_process(environment, {"LOCAL_RANK": "0"}).node == "b0"
    assert locate_process(WorkerEnvironment(cluster_path=cluster_path), {"LOCAL_RANK": "1"}).node == "a0"


def test_a_node_that_the_cluster_lacks_is_an_error_that_names_both(cluster_path: Path) -> None:
    with pytest.raises(PlacementError, match=r"c7") as caught:
        locate_process(WorkerEnvironment(cluster_path=cluster_path, node="c7"), {})
    assert "a0" in str(caught.value)


def test_a_local_rank_without_a_device_is_an_error(cluster_path: Path) -> None:
    with pytest.raises(PlacementError, match=r"LOCAL_RANK.*|a0.*2") as caught:
        locate_process(WorkerEnvironment(cluster_path=cluster_path, node="a0"), {"LOCAL_RANK": "2"})
    assert "a0" in str(caught.value)


def test_meeting_tells_who_did_not_come() -> None:
    place = RankLocation("a0", "127.0.0.1")
    with pytest.raises(PeerError, match=r"rank 5 did not come within 0\.05 s, expected all of 2 ranks"):
        exchange_group_info(HashStore(), 0, (3, 5), place, [RankEndpoint((1,), "a")], timedelta(seconds=0.05))


def test_meeting_alone() -> None:
    place = RankLocation("a0", "127.0.0.1")
    members = exchange_group_info(
        HashStore(), 0, (4,), place, [RankEndpoint((1,), "a"), RankEndpoint((2,), "b")], timedelta(seconds=1)
    )
    assert members.ranks == (RankInfo(4, place, (RankEndpoint((1,), "a"), RankEndpoint((2,), "b"))),)
    assert len(members.token) == 16


def test_every_nic_of_the_cluster_file_that_is_here_gives_an_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "two-nics.yaml"
    nics = "[{name: fast, rate: 3Gbit/s}, {name: absent, rate: 9Gbit/s}, {name: slow, rate: 1Gbit/s}]"
    path.write_text(f"name: lab\nnodes:\n  - {{name: a0, nics: {nics}, devices: 1, address: 10.9.0.1}}\n")
    found = {"slow": "10.8.0.1", "fast": "10.9.0.1", "lo": "127.0.0.1"}
    interfaces = {name: [SimpleNamespace(family=socket.AF_INET, address=each)] for name, each in found.items()}
    monkeypatch.setattr("psutil.net_if_addrs", lambda: interfaces)
    place = locate_process(WorkerEnvironment(cluster_path=path), {"LOCAL_RANK": "0"})
    assert place.addresses == ("10.9.0.1", "10.8.0.1")
    assert place.rates == (375e6, 125e6)


@pytest.fixture
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has eth0, its twins eth1 and eth2 (both in one network), a bridge of containers, and a way out."""
    told = {"eth0": "10.9.0.1", "eth1": "10.8.0.1", "eth2": "10.8.0.2", "docker0": "172.17.0.1"}
    nics = tuple(
        NetworkInterface(
            name=name,
            is_virtual=True,
            driver="bridge" if name == "docker0" else "veth",
            is_up=True,
            addresses=(address, "fd00::1"),
            networks=(f"{address}/24", "fd00::1/64"),
        )
        for name, address in told.items()
    )
    machine = Machine(
        name="x", source="a test", parts=(MachinePart(kind="machine", name="x"),), workers=(), interfaces=nics
    )
    monkeypatch.setattr("ringweave.topology.discovery.observe_links", lambda: machine)
    monkeypatch.setattr("ringweave.comm.group_info._source_address", {"head": "10.9.0.1"}.get)


@pytest.mark.usefixtures("interfaces")
def test_without_a_cluster_file_the_nics_that_discovery_calls_equal_are_offered() -> None:
    assert locate_process(WorkerEnvironment(node="x"), {"MASTER_ADDR": "head"}) == RankLocation(
        "x", "10.9.0.1", ("10.8.0.1",), (1.0, 1.0), ("eth0", "eth1"), ("10.9.0.0/24", "10.8.0.0/24"), host_id()
    )
    unprobed = locate_process(WorkerEnvironment(node="x", probes=False), {"MASTER_ADDR": "head"})
    assert unprobed == RankLocation("x", "10.9.0.1", host=host_id()), (
        "nobody would look whether the others lead anywhere"
    )


@pytest.mark.usefixtures("interfaces")
@pytest.mark.parametrize(
    ("named", "nics"), [("eth0", ("eth0",)), ("eth0,docker0", ("eth0", "docker0")), ("", ("eth0", "eth1"))]
)
def test_the_interfaces_that_users_name_for_gloo_are_all_there_are(
    monkeypatch: pytest.MonkeyPatch, named: str, nics: tuple[str, ...]
) -> None:
    found = {"eth0": [SimpleNamespace(family=socket.AF_INET, address="10.9.0.1")]}
    monkeypatch.setattr("psutil.net_if_addrs", lambda: found)
    environ = {"MASTER_ADDR": "head", "GLOO_SOCKET_IFNAME": named}
    assert locate_process(WorkerEnvironment(node="x"), environ).nics == nics


def offer(node: str, *networks: str) -> RankLocation:
    """A place with a NIC in each of these networks; the address ends in the last letter of the node's name."""
    host = ord(node[-1]) - 96
    addresses = [network.replace("0/24", str(host)) for network in networks]
    nics = tuple(f"eth{index}" for index in range(len(networks)))
    return RankLocation(node, addresses[0], tuple(addresses[1:]), (1.0,) * len(nics), nics, networks)


def met(*places: RankLocation) -> list[RankLocation]:
    store, entrance = HashStore(), []
    for rank, place in reversed(list(enumerate(places))):
        entrance = [RankEndpoint(tuple(range(len(place.addresses))), "a")]
        if rank:
            with pytest.raises(PeerError):
                exchange_group_info(store, rank, range(len(places)), place, entrance, timedelta(seconds=0.01))
    members = exchange_group_info(store, 0, range(len(places)), places[0], entrance, timedelta(seconds=1))
    for member in members.ranks:
        numbers = [int(nic.removeprefix("eth")) for nic in member.location.nics]
        assert member.endpoints[0].ports == tuple(numbers), "each port goes with its address"
    return [member.location for member in members.ranks]


def test_of_what_nodes_offer_the_networks_that_all_of_them_have_stay_in_one_order() -> None:
    first, second = met(
        offer("a", "10.9.0.0/24", "10.8.0.0/24", "10.7.0.0/24", "10.6.0.0/24"),
        offer("b", "10.9.0.0/24", "10.6.0.0/24", "10.5.0.0/24", "10.8.0.0/24"),
    )
    assert (first.nics, first.addresses) == (("eth0", "eth1", "eth3"), ("10.9.0.1", "10.8.0.1", "10.6.0.1"))
    assert (second.nics, second.addresses) == (("eth0", "eth3", "eth1"), ("10.9.0.2", "10.8.0.2", "10.6.0.2"))


def test_an_address_that_every_node_has_leads_nowhere() -> None:
    bridge = "172.17.0.0/24"
    places = [replace(offer(node, "10.9.0.0/24", bridge), more_addresses=("172.17.0.1",)) for node in "ab"]
    assert [place.addresses for place in met(*places)] == [("10.9.0.1",), ("10.9.0.2",)]


def test_ranks_of_one_node_have_the_same_nics() -> None:
    networks = ("10.9.0.0/24", "10.8.0.0/24")
    assert [len(place.addresses) for place in met(*(offer(node, *networks) for node in "aab"))] == [2, 2, 2]


def test_who_offers_nothing_leaves_everybody_with_one_address() -> None:
    alone = RankLocation("b", "10.9.0.2", (), (1.0,), ("eth0",))
    assert [place.nics for place in met(offer("a", "10.9.0.0/24", "10.8.0.0/24"), alone)] == [("eth0",), ("eth0",)]
