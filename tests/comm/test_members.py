"""Who is on which node, in words and from the environment."""

import socket
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from ringweave.comm.members import Entrance, Member, Members, Place, meet, own_place
from ringweave.environment import WorkerEnvironment
from ringweave.errors import PeerError, PlacementError
from ringweave.topology.hosts import host_id, node_name

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
    members = Members(tuple(Member(10 + r, Place(f"n{r}", "127.0.0.1"), ()) for r in range(6)), 2, b"")
    assert members.name(3) == "rank 13 (node n3)"
    assert members.names([0, 1]) == "rank 10 (node n0) and rank 11 (node n1)"
    assert members.names(range(6)).endswith("rank 13 (node n3) and 2 more")
    assert members.own.global_rank == 12


def test_without_a_cluster_the_node_is_what_we_are_told_or_the_host() -> None:
    environ = {"MASTER_ADDR": "127.0.0.1"}
    assert own_place(WorkerEnvironment(node="x1"), environ) == Place("x1", "127.0.0.1", host=host_id())
    assert own_place(WorkerEnvironment(), environ).node == node_name(socket.gethostname())


def test_a_host_whose_name_no_host_may_have_is_called_as_discover_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu_node_1")
    assert own_place(WorkerEnvironment(), {"MASTER_ADDR": "127.0.0.1"}).node == "gpu-node-1"


@pytest.mark.parametrize("master", ["127.0.0.1", "localhost", "::1"])
def test_a_loopback_master_means_that_all_are_here(master: str) -> None:
    assert own_place(WorkerEnvironment(node="x"), {"MASTER_ADDR": master}).address in ("127.0.0.1", "::1")


def test_a_master_that_resolves_to_loopback_by_name_is_not_taken_at_its_word(monkeypatch: pytest.MonkeyPatch) -> None:
    routes = {"head": "127.0.1.1", "192.0.2.1": "10.1.2.3"}
    monkeypatch.setattr("ringweave.comm.members._source_address", routes.get)
    assert own_place(WorkerEnvironment(node="x"), {"MASTER_ADDR": "head"}).address == "10.1.2.3"
    routes["192.0.2.1"] = None
    assert own_place(WorkerEnvironment(node="x"), {"MASTER_ADDR": "head"}).address == "127.0.1.1"
    routes["head"] = "10.7.7.7"
    assert own_place(WorkerEnvironment(node="x"), {"MASTER_ADDR": "head"}).address == "10.7.7.7"


def test_the_interface_that_users_name_for_gloo_is_taken() -> None:
    environ = {"MASTER_ADDR": "head", "GLOO_SOCKET_IFNAME": "lo"}
    assert own_place(WorkerEnvironment(node="x"), environ).address == "127.0.0.1"


def test_in_a_cluster_the_told_node_comes_before_the_address(cluster_path: Path) -> None:
    environment = WorkerEnvironment(cluster_path=cluster_path, node="b0")
    assert own_place(environment, {"LOCAL_RANK": "0"}).node == "b0"
    assert own_place(WorkerEnvironment(cluster_path=cluster_path), {"LOCAL_RANK": "1"}).node == "a0"


def test_a_node_that_the_cluster_lacks_is_an_error_that_names_both(cluster_path: Path) -> None:
    with pytest.raises(PlacementError, match=r"c7") as caught:
        own_place(WorkerEnvironment(cluster_path=cluster_path, node="c7"), {})
    assert "a0" in str(caught.value)


def test_a_local_rank_without_a_device_is_an_error(cluster_path: Path) -> None:
    with pytest.raises(PlacementError, match=r"LOCAL_RANK.*|a0.*2") as caught:
        own_place(WorkerEnvironment(cluster_path=cluster_path, node="a0"), {"LOCAL_RANK": "2"})
    assert "a0" in str(caught.value)


def test_meeting_tells_who_did_not_come() -> None:
    place = Place("a0", "127.0.0.1")
    with pytest.raises(PeerError, match=r"rank 5 did not come within 0\.05 s, expected all of 2 ranks"):
        meet(HashStore(), 0, (3, 5), place, [Entrance((1,), "a")], timedelta(seconds=0.05))


def test_meeting_alone() -> None:
    place = Place("a0", "127.0.0.1")
    members = meet(HashStore(), 0, (4,), place, [Entrance((1,), "a"), Entrance((2,), "b")], timedelta(seconds=1))
    assert members.ranks == (Member(4, place, (Entrance((1,), "a"), Entrance((2,), "b"))),)
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
    place = own_place(WorkerEnvironment(cluster_path=path), {"LOCAL_RANK": "0"})
    assert place.addresses == ("10.9.0.1", "10.8.0.1")
    assert place.rates == (375e6, 125e6)
