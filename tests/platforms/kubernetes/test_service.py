"""What `--on kubernetes` refuses by itself, before it asks anybody."""

import asyncio
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ringweave.errors import JobError, LaunchError
from ringweave.jobs.request import JobRequest, NodeRequest
from ringweave.platforms.kubernetes import api_client
from ringweave.platforms.kubernetes.api_client import KubernetesClient
from ringweave.platforms.kubernetes.platform import KubernetesPlatform
from tests.fakes.kubernetes import validation
from tests.fakes.kubernetes.fake_cluster import FakeCluster
from tests.fakes.kubernetes.users import MASTERS_GROUP
from tools.kubernetes_crd import custom_resource_definition

USERS: dict[str, tuple[str, ...]] = {"admin": (MASTERS_GROUP,), "bob": ()}
REQUEST = {"name": "text", "num_workers": 3, "nodes": (NodeRequest(name="n0", capacity=3),)}


def service(server: str = "http://127.0.0.1:9") -> KubernetesPlatform:
    return KubernetesPlatform(lambda: api_client.ConnectionInfo(server=server))


def test_a_folder_beside_the_job_file_does_not_travel(tmp_path: Path) -> None:
    request = JobRequest(script="train.py", directory=".", **REQUEST)
    with pytest.raises(JobError, match=r"directory: '\.', expected an absolute path in the container image"):
        service().submit(request, base=tmp_path)


def test_there_are_no_labs_on_kubernetes(tmp_path: Path) -> None:
    request = JobRequest(script="train.py", lab="two-racks", device="cpu", **REQUEST)
    with pytest.raises(JobError, match=r"lab: 'two-racks', expected none on kubernetes. Leave lab out, or submit it"):
        service().submit(request, base=tmp_path)


def test_a_script_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"script .*train.py: 'No such file or directory', expected a Python file"):
        service().submit(JobRequest(script="train.py", **REQUEST), base=tmp_path)


def test_a_script_that_was_handed_over_is_not_looked_for(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="Kubernetes API server"):
        service().submit(JobRequest(script="train.py", **REQUEST), base=tmp_path, script_text="print()")


def test_an_api_server_that_does_not_answer_is_named() -> None:
    with pytest.raises(LaunchError, match=r"Kubernetes API server: .* expected an answer.*\[http://127\.0\.0\.1:9\]"):
        service().jobs()


def script_field(whole: dict[str, Any]) -> dict[str, Any]:
    """The schema of `spec.script` in a definition."""
    schema = whole["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema["properties"]["spec"]["properties"]["script"]


def test_one_job_that_cannot_be_read_does_not_hide_the_others(tmp_path: Path) -> None:
    """As an API server keeps it that had an older definition when it was stored."""
    older = custom_resource_definition()
    del script_field(older)["pattern"]
    with FakeCluster() as cluster:
        kubeconfig = cluster.kubeconfig(tmp_path / "config")

        def connect() -> api_client.ConnectionInfo:
            return api_client.connection_info({"KUBECONFIG": str(kubeconfig)})

        async def store() -> None:
            async with KubernetesClient(connect) as client:
                await client.create(api_client.DEFINITIONS, None, older)
                for name, script in (("odd", "a\u00a0b.py"), ("plain", "a.py")):
                    spec = {"cpuWorkers": 3, "script": script, "nodes": [{"name": "n0", "capacity": 3}]}
                    body = {"metadata": {"name": name}, "spec": spec}
                    await client.create(api_client.TRAINING_JOBS, "default", body)

        asyncio.run(store())
        service = KubernetesPlatform(connect)
        shown = {job.name: job for job in service.jobs()}
        assert set(shown) == {"odd", "plain"}
        odd = shown["odd"]
        assert odd.reason is not None
        assert (odd.state, odd.reason.code, odd.workers) == ("Failed", "Invalid", 3)
        assert r"script: 'a\xa0b.py', expected a path" in odd.reason.text
        assert odd.reason.hint == "ringweave delete odd --on kubernetes, and submit it again"
        service.act("odd", "delete")
        assert [job.name for job in service.jobs()] == ["plain"]


def test_name_permission_and_split_are_asked_in_this_order(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("pass")
    nodes = (NodeRequest(name="n0", capacity=3), NodeRequest(name="n1", capacity=1))
    too_many = JobRequest(name="text", num_workers=4, script="train.py", nodes=nodes)
    with FakeCluster() as cluster:
        paths = {user: cluster.kubeconfig(tmp_path / user, user=user, groups=groups) for user, groups in USERS.items()}

        def connect(user: str) -> api_client.ConnectionInfo:
            return api_client.connection_info({"KUBECONFIG": str(paths[user])})

        def submit(user: str) -> str:
            with pytest.raises(JobError) as caught:
                KubernetesPlatform(lambda: connect(user)).submit(too_many, base=tmp_path)
            return str(caught.value)

        async def make(kind: api_client.ResourceKind, body: dict[str, Any]) -> None:
            async with KubernetesClient(lambda: connect("admin")) as client:
                await client.create(kind, "default" if kind.is_namespaced else None, body)

        asyncio.run(make(api_client.DEFINITIONS, custom_resource_definition()))
        assert submit("bob").startswith("submit by bob: 'no role allows submit on trainingjobs.ringweave.dev (")
        assert submit("admin").startswith("split: 4, expected a total that nodes of (3, 1) can share")
        node = {"name": "n0", "capacity": 3}
        spec = {"gpus": 3, "script": "a.py", "nodes": [node], "requester": {"username": "ann"}}
        asyncio.run(make(api_client.TRAINING_JOBS, {"metadata": {"name": "text"}, "spec": spec}))
        assert submit("admin").startswith("job name text: 'taken by ann ")


def test_of_64_at_once_one_gets_the_name_and_63_are_told_whose_it_is(kubeconfig: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("pass")

    def submit(_: int) -> str:
        connection = api_client.connection_info({"KUBECONFIG": str(kubeconfig)})
        try:
            KubernetesPlatform(lambda: connection, admission_timeout_s=0.0).submit(
                JobRequest(script="train.py", **REQUEST), base=tmp_path
            )
        except JobError as error:
            return str(error)
        return "submitted"

    with ThreadPoolExecutor(64) as at_once:
        told = Counter(at_once.map(submit, range(64)))
    assert told.pop("submitted") == 1
    assert sum(told.values()) == 63
    assert all(text.startswith("job name text: 'taken by admin ") for text in told), told
    KubernetesPlatform(lambda: api_client.connection_info({"KUBECONFIG": str(kubeconfig)})).act("text", "delete")


LINES = ("a b.py", "\u00e9.py", "a\u00a0b.py", "a\u2028b", "a\u200bb", "\t", " ", "a\nb", "\ue000", "\U0001f642")


@pytest.mark.parametrize("text", LINES)
def test_the_api_server_wants_of_a_line_what_a_request_wants(text: str) -> None:
    schema = script_field(custom_resource_definition())
    is_legal = not list(validation.schema_problems(schema, text))
    try:
        JobRequest(script=text, **REQUEST)
    except JobError:
        assert not is_legal
    else:
        assert is_legal
