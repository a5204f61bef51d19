from pathlib import Path

import pytest

from ringweave.errors import ClusterError, UsageError
from ringweave_bench import benchmark_request


def test_this_machine_as_it_is() -> None:
    cluster, is_local = benchmark_request.read_target("local:4")
    assert (cluster.num_nodes, cluster.num_devices, is_local) == (1, 4, True)


def test_a_cluster_file(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("name: pair\nnodes: [{name: a, nic: 1Mbit/s, devices: 1, count: 2}]")
    cluster, is_local = benchmark_request.read_target(str(path))
    assert (cluster.name, is_local) == ("pair", False)


@pytest.mark.parametrize("text", ["local:", "local:1", "local:65", "local:two", "local:-2", "local:²"])
def test_a_wrong_number_of_local_ranks(text: str) -> None:
    with pytest.raises(UsageError, match=r"CLUSTER: 'local:.*', expected local:N with 2 to 64 ranks\. Write it like"):
        benchmark_request.read_target(text)


def test_one_rank_has_nobody_to_talk_to(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("name: one\nnodes: [{name: a, nic: 1Mbit/s, devices: 1}]")
    with pytest.raises(UsageError, match=r"ranks of the cluster: 1, expected two or more\. Give its nodes"):
        benchmark_request.read_target(str(path))
    with pytest.raises(ClusterError, match=r"nosuch\.yaml"):
        benchmark_request.read_target("nosuch.yaml")


def test_lists() -> None:
    assert benchmark_request.parse_sizes("1MB, 25MB,1MB") == (1_000_000, 25_000_000)
    assert benchmark_request.parse_systems("mpich, ringweave,mpich") == ("mpich", "ringweave")
    assert benchmark_request.parse_orders("shuffled,block") == ("shuffled", "block")
    assert benchmark_request.check_count("--rounds", 1, 1) == 1


@pytest.mark.parametrize(("text", "got"), [("0", "0"), ("1MB,6B", "6"), ("8GB", "8000000000")])
def test_wrong_sizes(text: str, got: str) -> None:
    expected = rf"--sizes: {got}, expected a positive multiple of 4 bytes \(float32\), at most 4GB\. Write it like 1MB"
    with pytest.raises(UsageError, match=expected):
        benchmark_request.parse_sizes(text)


@pytest.mark.parametrize("text", ["", "1MB,", "fast"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(UsageError, match=r"size: '.*', expected a number with one of B, kB"):
        benchmark_request.parse_sizes(text)


@pytest.mark.parametrize(("name", "do"), [("glo", "Did you mean gloo?"), ("nccl2x", "Name some of them.")])
def test_an_unknown_system(name: str, do: str) -> None:
    expected = r"--systems: '\w+', expected ringweave, gloo, openmpi, mpich, separated by commas\. "
    with pytest.raises(UsageError, match=expected) as caught:
        benchmark_request.parse_systems(f"ringweave,{name}")
    assert str(caught.value).endswith(do)


def test_too_few_rounds() -> None:
    with pytest.raises(UsageError, match=r"--rounds: 0, expected 1 or more\. Give a larger number\."):
        benchmark_request.check_count("--rounds", 0, 1)
