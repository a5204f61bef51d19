"""Names of nodes made of names of hosts, and hosts of the same name."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringweave.errors import PlacementError
from ringweave.topology import Device, Nic, Node, loads, place_rank, placement
from ringweave.topology.placement import RankPlacement, check_one_host_per_node, host_id, node_name_of_host
from tests import effort


@pytest.mark.parametrize(
    ("host_name", "node"),
    [
        ("a0", "a0"),
        ("a0.example.org", "a0.example.org"),
        ("gpu_node_1", "gpu-node-1"),
        ("_gpu_1_.example..org.", "gpu-1.example.org"),
        ("core", "core-node"),
        ("Core", "Core-node"),
        ("x" * 63, "x" * 63),
    ],
)
def test_a_host_name_gives_the_name_of_a_node(host_name: str, node: str) -> None:
    assert node_name_of_host(host_name) == node


def test_long_names_that_differ_at_the_end_only_are_two() -> None:
    first, second = (
        node_name_of_host("accelerated-node-of-a-cluster-whose-names-are-long-" + "0" * 12 + end) for end in "12"
    )
    assert first != second
    assert (first[:54], len(first)) == ("accelerated-node-of-a-cluster-whose-names-are-long-000", 63)
    assert node_name_of_host("___").startswith("node-")
    assert node_name_of_host("___") != node_name_of_host("__")


@settings(max_examples=effort.share_of(60))
@given(st.text(alphabet="aB0-_.é ", max_size=300))
def test_of_any_name_a_node_can_be_made_and_it_keeps_it(host_name: str) -> None:
    name = node_name_of_host(host_name)
    nic = Nic(name="eth0", rate_bytes_per_s=1e9)
    assert Node(name=name, devices=(Device(),), nics=(nic,)).name == name, "it would be refused"
    assert node_name_of_host(name) == name


@pytest.mark.parametrize("told", [None, "gpu_node_1"])
def test_a_host_is_the_node_that_was_called_after_it(told: str | None) -> None:
    cluster = loads("name: x\nnodes: [{name: gpu-node-1, nic: 1Gbit/s, devices: 1}]")
    for host_name in ("gpu_node_1", "gpu_node_1.example.org"):
        assert place_rank(cluster, node_name=told, host_name=host_name, addresses=[]).name == "gpu-node-1"


def seats(*places: Sequence[str]) -> list[RankPlacement]:
    return [
        RankPlacement(global_rank=rank, node=node, host=host, address=address)
        for rank, (node, host, address) in enumerate(places)
    ]


@pytest.mark.parametrize("second", ["ubuntu", "Ubuntu"])
def test_two_hosts_of_one_name_are_refused_and_both_are_named(second: str) -> None:
    places = [("ubuntu", "1", "10.0.0.5"), ("ubuntu", "1", "10.0.0.5"), (second, "2", "10.0.0.6")]
    with pytest.raises(PlacementError) as caught:
        check_one_host_per_node(seats(*places))
    assert str(caught.value) == (
        f"hosts of node {second}: 'two: rank 0 at 10.0.0.5 and rank 2 at 10.0.0.6', expected one host for each name of "
        "a node. Give the hosts names that differ, or set RINGWEAVE_NODE to another name on each."
    )


@pytest.mark.parametrize("other", [("a", "1", "10.1.0.5"), ("a", "", "10.0.0.6"), ("b", "2", "10.0.0.5")])
def test_ranks_of_one_host_or_of_several_names_are_let_be(other: Sequence[str]) -> None:
    assert check_one_host_per_node(seats(("a", "1", "10.0.0.5"), other)) is None


def test_a_host_is_told_by_its_boot_and_its_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_id() == host_id()
    boot = tmp_path / "boot"
    monkeypatch.setattr(placement, "_BOOT_ID", boot)
    monkeypatch.setattr(placement, "_NETWORK_NAMESPACE", tmp_path)
    assert host_id() == "", "the system does not say"
    seen = set()
    for text, network in (("one", tmp_path), ("two", tmp_path), ("two", boot)):
        boot.write_text(text)
        monkeypatch.setattr(placement, "_NETWORK_NAMESPACE", network)
        seen.add(host_id())
    assert len(seen) == 3
