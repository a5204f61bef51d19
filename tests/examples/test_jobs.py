"""The job files of the examples say what they claim."""

from pathlib import Path

import pytest

from ringweave import topology
from ringweave.jobs import request as jobs_request
from ringweave.jobs.request import ElasticRequest

JOBS = Path(__file__).parents[2] / "examples" / "jobs"


@pytest.mark.parametrize(
    ("name", "device", "counts"),
    [
        ("text", "cpu", (10, 5)),
        ("digits", "cpu", (3, 3)),
        ("gpus", "cuda", (8, 3)),
        ("lab", "cpu", (1,) * 6),
        ("rings", "cpu", (3, 3)),
        ("elastic", "cpu", (3, 3)),
    ],
)
def test_they_can_be_submitted(name: str, device: str, counts: tuple[int, ...]) -> None:
    request = jobs_request.load_request(JOBS / f"{name}.yaml")
    assert (request.device, request.split.counts) == (device, counts)
    assert (JOBS / str(request.directory) / request.script).is_file()


def test_all_of_them_are_named_here() -> None:
    assert {path.stem for path in JOBS.glob("*.yaml")} == {"text", "digits", "gpus", "lab", "rings", "elastic"}


def test_the_nodes_of_the_lab_are_those_of_its_cluster() -> None:
    request = jobs_request.load_request(JOBS / "lab.yaml")
    cluster = topology.load(JOBS.parent / "clusters" / f"{request.lab}.yaml")
    assert cluster.name == request.lab
    rooms = {node.name: node.num_devices for node in cluster.nodes}
    assert {node.name: node.capacity for node in request.nodes} == rooms


def test_the_elastic_one_can_lose_a_node() -> None:
    assert jobs_request.load_request(JOBS / "elastic.yaml").elastic == ElasticRequest(min=3)


def test_the_one_in_rings_has_a_server() -> None:
    assert jobs_request.load_request(JOBS / "rings.yaml").mode == "ps-hra"
