"""Pods into which a service mesh has put a container of its own: their workers end, and their logs are kept."""

from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ringweave.platforms.api import LogQuery
from ringweave.platforms.kubernetes import api_client, job_resource, pod_logs
from ringweave.platforms.kubernetes.objects import WORKER_CONTAINER, JobOwner
from ringweave.platforms.kubernetes.platform import JobLogReader
from tests.fakes.kubernetes.api_failures import ApiFailure
from tests.fakes.kubernetes.fake_cluster import FakeCluster
from tests.platforms.kubernetes.operating.worlds import World, fail_a_node, play, run_all

PROXY = {"name": "istio-proxy", "image": "istio/proxyv2:1.24"}


def with_proxy(resource: Any, body: dict[str, Any]) -> dict[str, Any]:
    if resource.plural != "pods":
        return body
    return {**body, "spec": {**body["spec"], "containers": [PROXY, *body["spec"]["containers"]]}}


async def printed(container: str) -> AsyncIterator[bytes]:
    yield f"[0] of {container}\n".encode()


def logs_of(pod: Mapping[str, Any], params: Mapping[str, str]) -> AsyncIterator[bytes]:
    return printed(params["container"])


@pytest.fixture(autouse=True)
def _mesh(cluster: FakeCluster) -> Iterator[None]:
    before = cluster.api.mutate, cluster.handler.logs
    cluster.api.mutate, cluster.handler.logs = with_proxy, logs_of
    yield
    cluster.api.mutate, cluster.handler.logs = before


def test_a_job_whose_pods_have_a_proxy_beside_the_workers_ends(kubeconfig: Path) -> None:
    async def test(world: World) -> None:
        pods = await run_all(world)
        assert [each["name"] for each in pods[0, 1]["spec"]["containers"]] == ["istio-proxy", WORKER_CONTAINER]
        for pod in pods.values():
            await world.kubelet.succeed_pod(pod)
        assert {pod["status"]["phase"] for pod in (await world.kubelet.list_pods(world.name)).values()} == {"Running"}
        await world.settle()
        assert (await world.job())["status"]["state"] == "Succeeded"
        kept = await world.client.get(api_client.CONFIG_MAPS, "default", "meshed-0-1-log")
        assert kept["data"][pod_logs.LOG_KEY] == f"[0] of {WORKER_CONTAINER}"

    play(kubeconfig, "meshed", test)


def test_the_log_of_the_workers_is_kept_and_read(kubeconfig: Path) -> None:
    async def test(world: World) -> None:
        await fail_a_node(world)
        await world.settle()
        kept = await world.client.get(api_client.CONFIG_MAPS, "default", "proxied-1-1-log")
        assert kept["data"][pod_logs.LOG_KEY] == f"[0] of {WORKER_CONTAINER}"
        job = job_resource.job_from_resource(await world.job())
        assert job is not None
        owner = JobOwner.from_resource(await world.job())
        lines = JobLogReader(
            lambda: api_client.connection_info({"KUBECONFIG": str(kubeconfig)}), owner, job, LogQuery()
        ).read_lines()
        assert [(line.node, line.text) for line in lines] == [
            ("n1", f"of {WORKER_CONTAINER}"),
            ("n0", f"of {WORKER_CONTAINER}"),
        ]

    play(kubeconfig, "proxied", test)


def test_a_log_that_the_server_refuses_leaves_a_line_that_says_so(cluster: FakeCluster, kubeconfig: Path) -> None:
    def refuse(*_: Any) -> AsyncIterator[bytes]:
        raise ApiFailure(400, "BadRequest", "container workers is not valid for pod refused-1-1")

    cluster.handler.logs = refuse

    async def test(world: World) -> None:
        await fail_a_node(world)
        await world.settle()
        kept = await world.client.get(api_client.CONFIG_MAPS, "default", "refused-1-1-log")
        assert "the rest of this log could not be read: " in kept["data"][pod_logs.LOG_KEY]
        assert "is not valid for pod" in kept["data"][pod_logs.LOG_KEY]

    play(kubeconfig, "refused", test)
