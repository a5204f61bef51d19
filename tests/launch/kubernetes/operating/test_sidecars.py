"""Pods into which a service mesh has put a container of its own: their workers end, and their logs are kept."""

from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ringweave.launch.kubernetes.api import connecting, kinds
from ringweave.launch.kubernetes.logs import Logs
from ringweave.launch.kubernetes.objects import keeping
from ringweave.launch.kubernetes.objects.owning import Owner
from ringweave.launch.kubernetes.objects.pods import CONTAINER
from ringweave.launch.kubernetes.resource import reading
from ringweave.launch.services.service import LogQuery
from ringweave.testing.kubernetes.cluster import FakeCluster
from ringweave.testing.kubernetes.server.refusing import Refused
from tests.launch.kubernetes.operating.worlds import World, fail_a_node, play, run_all

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
        assert [each["name"] for each in pods[0, 1]["spec"]["containers"]] == ["istio-proxy", CONTAINER]
        for pod in pods.values():
            await world.kubelet.succeed(pod)
        assert {pod["status"]["phase"] for pod in (await world.kubelet.pods(world.name)).values()} == {"Running"}
        await world.settle()
        assert (await world.job())["status"]["state"] == "Succeeded"
        kept = await world.client.get(kinds.CONFIG_MAPS, "default", "meshed-0-1-log")
        assert kept["data"][keeping.LOG] == f"[0] of {CONTAINER}"

    play(kubeconfig, "meshed", test)


def test_the_log_of_the_workers_is_kept_and_read(kubeconfig: Path) -> None:
    async def test(world: World) -> None:
        await fail_a_node(world)
        await world.settle()
        kept = await world.client.get(kinds.CONFIG_MAPS, "default", "proxied-1-1-log")
        assert kept["data"][keeping.LOG] == f"[0] of {CONTAINER}"
        job = reading.job_of(await world.job())
        assert job is not None
        owner = Owner.of(await world.job())
        lines = Logs(lambda: connecting.connection({"KUBECONFIG": str(kubeconfig)}), owner, job, LogQuery()).read()
        assert [(line.node, line.text) for line in lines] == [("n1", f"of {CONTAINER}"), ("n0", f"of {CONTAINER}")]

    play(kubeconfig, "proxied", test)


def test_a_log_that_the_server_refuses_leaves_a_line_that_says_so(cluster: FakeCluster, kubeconfig: Path) -> None:
    def refuse(*_: Any) -> AsyncIterator[bytes]:
        raise Refused(400, "BadRequest", "container workers is not valid for pod refused-1-1")

    cluster.handler.logs = refuse

    async def test(world: World) -> None:
        await fail_a_node(world)
        await world.settle()
        kept = await world.client.get(kinds.CONFIG_MAPS, "default", "refused-1-1-log")
        assert "the rest of this log could not be read: " in kept["data"][keeping.LOG]
        assert "is not valid for pod" in kept["data"][keeping.LOG]

    play(kubeconfig, "refused", test)
