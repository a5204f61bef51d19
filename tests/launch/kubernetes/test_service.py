"""What `--on kubernetes` refuses by itself, before it asks anybody."""

from pathlib import Path

import pytest

from ringweave.errors import JobError, LaunchError
from ringweave.jobs.requests.request import NodeRequest, Request
from ringweave.launch.kubernetes.api import connecting
from ringweave.launch.kubernetes.service import KubernetesService

REQUEST = {"name": "text", "num_workers": 3, "nodes": (NodeRequest(name="n0", capacity=3),)}


def service(server: str = "http://127.0.0.1:9") -> KubernetesService:
    return KubernetesService(lambda: connecting.kopf.ConnectionInfo(server=server))


def test_a_folder_beside_the_job_file_does_not_travel(tmp_path: Path) -> None:
    request = Request(script="train.py", directory=".", **REQUEST)
    with pytest.raises(JobError, match=r"directory: '\.', expected an absolute path in the container image"):
        service().submit(request, base=tmp_path)


def test_there_are_no_labs_on_kubernetes(tmp_path: Path) -> None:
    request = Request(script="train.py", lab="two-racks", device="cpu", **REQUEST)
    with pytest.raises(JobError, match=r"lab: 'two-racks', expected none on kubernetes. Leave lab out, or submit it"):
        service().submit(request, base=tmp_path)


def test_a_script_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"script .*train.py: 'No such file or directory', expected a Python file"):
        service().submit(Request(script="train.py", **REQUEST), base=tmp_path)


def test_a_script_that_was_handed_over_is_not_looked_for(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="Kubernetes API server"):
        service().submit(Request(script="train.py", **REQUEST), base=tmp_path, script_text="print()")


def test_an_api_server_that_does_not_answer_is_named() -> None:
    with pytest.raises(LaunchError, match=r"Kubernetes API server: .* expected an answer.*\[http://127\.0\.0\.1:9\]"):
        service().jobs()
